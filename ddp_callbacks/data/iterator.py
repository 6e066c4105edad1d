"""What every iterator over this rank's part of a loader offers."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from ddp_callbacks._torch import end_workers, worker_queues
from ddp_callbacks.data.shares import Share, WholeBatch


def _let_go(_: object) -> None:
    """The caller's reference is gone after this."""


class ShardedIterator(Iterator[Any]):
    """Iterates over this rank's part, and knows how many samples each batch had here and everywhere.

    Args:
        batches: Those of the loader that is divided.
        shares: Filled with the :class:`Share` of each batch as it is drawn.
    """

    def __init__(self, batches: Iterator[Any], shares: deque[Share]) -> None:
        self.batches = batches
        self._shares = shares
        # Python's garbage collector finalizes the queues of a DataLoader's iterator before it ends the iterator, whose
        # workers then hear nothing, and are waited for 5 s each. Referenced from here, the queues are no garbage.
        weakref.finalize(self, _let_go, worker_queues(batches)).atexit = False

    def end(self) -> None:
        """End the workers that load the batches."""
        end_workers(self.batches)

    def take_share(self) -> Share | None:
        """The share of the batches drawn since the last call; ``None`` if none was."""
        if not self._shares:
            return None
        taken = functools.reduce(operator.add, self._shares)
        self._shares.clear()
        return taken

    def first_batch(self) -> WholeBatch:
        """The first batch of this pass, on every rank, and a part of it.

        A collective, after the first batch was drawn and before the third is. Samples of a map-style data set are
        loaded again, in this process.

        Raises:
            ConfigurationError: The whole batch cannot be had.
        """
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """As of a ``DataLoader``'s iterator, nothing is left of it in a copy of what holds it."""
        return type(None), ()

    def check_agreement(self) -> None:
        """Compare what the ranks have drawn. A collective; call it at the end of a pass.

        Raises:
            MismatchError: They have drawn different batches, as a sampler with a random state of its own does.
        """
