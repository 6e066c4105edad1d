"""A loader that Fabric has set up: this rank's part of it, and the strategy hears of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.data.shares import Share, common_size

if TYPE_CHECKING:
    from ddp_callbacks.lightning.fabric.strategy import CallbackFabricMixin


class WatchedLoader:
    """What Fabric iterates over in the place of a loader. It has the attributes of the user's, as Fabric's own has.

    Iterating is a collective if the loader is divided.

    Args:
        loader: The user's.
        divide: Makes this rank's part of it, for a least number of samples. A collective.
        needed: That number, when a pass begins: it depends on the models, and whether they train.
        strategy: Hears of each batch.
    """

    def __init__(
        self,
        loader: Any,
        divide: Callable[[Any, int], Any],
        needed: Callable[[Any], int],
        strategy: CallbackFabricMixin,
    ) -> None:
        self.__dict__.update(vars(loader))
        self._of_user, self._divide, self._needed, self._strategy = loader, divide, needed, strategy
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
            self._strategy.begin_pass()
        batches = iter(self._part)
        try:
            for batch in batches:
                share = batches.take_share() if isinstance(batches, ShardedIterator) else None
                self._strategy.draw(running, batch, share or Share(common_size(batch) or 1, None))
                yield batch
        finally:
            self._strategy.leave(running)
        if isinstance(batches, ShardedIterator):
            self._strategy.complete_pass()
