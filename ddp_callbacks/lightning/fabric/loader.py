"""A loader set up by Fabric: it yields this rank's part, and tells the strategy of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ddp_callbacks.data.sharding import ShardedLoader, with_shares
from ddp_callbacks.data.skipped import SkippedParts
from ddp_callbacks.randomness import WholeDraws

if TYPE_CHECKING:
    from ddp_callbacks.lightning.fabric.fabric_strategy import CallbackFabricMixin


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
        self._draws: WholeDraws | None = None  # of the bodies of loops over it
        self._skipped = SkippedParts()

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[Any]:
        at_least = self._strategy.samples_needed(self._of_user) if self._divides else 1
        if at_least != self._at_least:
            self._at_least, self._part = at_least, self._strategy.divide(self._of_user, at_least)
        if self._draws is None and isinstance(self._part, ShardedLoader):
            self._draws = self._strategy.draws()
        with self._strategy.running_pass(self._draws, self._skipped) as running:
            for batch, share in self._strategy.loading(with_shares(self._part)):
                with self._strategy.computing(running, batch, share, self._draws):
                    yield batch
