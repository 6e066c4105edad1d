"""A loader set up by Fabric: it yields this rank's part, and tells the strategy of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ddp_callbacks.data.sharding import ShardedLoader, with_shares

if TYPE_CHECKING:
    from ddp_callbacks.lightning.fabric.strategy import CallbackFabricMixin


class WatchedLoader:
    """Replaces the user's loader in Fabric. It has that loader's attributes, as Fabric's own loader has.

    Iterating is a collective if the loader is divided.

    Args:
        loader: The user's loader.
        divides: Whether this rank gets a part of it.
        strategy: Makes that part, and is told of each batch.
    """

    def __init__(self, loader: Any, divides: bool, strategy: CallbackFabricMixin) -> None:
        self.__dict__.update(vars(loader))
        self._of_user, self._divides, self._strategy = loader, divides, strategy
        self._at_least = 1
        self._part = strategy.divide(loader, 1) if divides else loader

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[Any]:
        at_least = self._strategy.samples_needed(self._of_user) if self._divides else 1
        if at_least != self._at_least:
            self._at_least, self._part = at_least, self._strategy.divide(self._of_user, at_least)
        with self._strategy.running_pass(isinstance(self._part, ShardedLoader)) as running:
            for batch, share in with_shares(self._part):
                with self._strategy.computing(running, batch, share):
                    yield batch
