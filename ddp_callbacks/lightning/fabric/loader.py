"""A loader that Fabric has set up: this rank's part of it, and the strategy hears of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.data.shares import Share, common_size


class Listener(Protocol):
    """Who hears of the passes over loaders. ``running`` stands for the pass; see :class:`WatchedLoader`."""

    def begin_pass(self) -> None:
        """A pass over a divided loader begins. A collective."""

    def draw(self, running: object, batch: Any, share: Share) -> None:
        """A batch was drawn. Local."""

    def complete_pass(self) -> None:
        """A pass over a divided loader has come to its end. A collective."""

    def leave(self, running: object) -> None:
        """A pass has ended, or the loop has left it. Local."""


class WatchedLoader:
    """What Fabric iterates over in the place of a loader. It has the attributes of the user's, as Fabric's own has.

    Iterating is a collective if the loader is divided.

    Args:
        loader: The user's.
        divide: Makes this rank's part of it, for a least number of samples. A collective.
        needed: That number, when a pass begins: it depends on the models, and whether they train.
        listener: Hears of each batch.
    """

    def __init__(
        self, loader: Any, divide: Callable[[Any, int], Any], needed: Callable[[Any], int], listener: Listener
    ) -> None:
        self.__dict__.update(vars(loader))
        self._of_user, self._divide, self._needed, self._listener = loader, divide, needed, listener
        self._at_least = 1
        self._part = divide(loader, 1)

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[Any]:
        at_least = self._needed(self._of_user)
        if at_least != self._at_least:
            self._at_least, self._part = at_least, self._divide(self._of_user, at_least)
        is_divided, running = isinstance(self._part, ShardedLoader), object()
        if is_divided:
            self._listener.begin_pass()
        batches = iter(self._part)
        try:
            for batch in batches:
                share = batches.take_share() if isinstance(batches, ShardedIterator) else None
                self._listener.draw(running, batch, share or Share(common_size(batch) or 1, None))
                yield batch
        finally:
            self._listener.leave(running)
        if isinstance(batches, ShardedIterator):
            self._listener.complete_pass()
