"""The interface of every iterator over this rank's part of a loader."""

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
    """Drop the reference to a batch. The caller's reference is gone after this call."""


class ShardedIterator(Iterator[Any]):
    """Iterates over this rank's part of a loader, and knows each batch's share.

    Args:
        batches: The iterator of the divided loader.
        shares: Filled with the :class:`~ddp_callbacks.Share` of each batch when it is drawn.
    """

    def __init__(self, batches: Iterator[Any], shares: deque[Share]) -> None:
        self.batches = batches
        self._shares = shares
        # Python's garbage collector finalizes the queues of a DataLoader's iterator before the iterator itself. Its
        # workers then get no message, and the process waits 5 s for each. A reference from here keeps the queues alive.
        weakref.finalize(self, _let_go, worker_queues(batches)).atexit = False

    def end(self) -> None:
        """End the workers that load the batches."""
        end_workers(self.batches)

    def take_share(self) -> Share | None:
        """The combined share of the batches drawn since the last call; ``None`` if there were none."""
        if not self._shares:
            return None
        taken = functools.reduce(operator.add, self._shares)
        self._shares.clear()
        return taken

    def first_batch(self) -> WholeBatch:
        """The first batch of this pass, on every rank, and a part of it.

        A collective. Call it after drawing the first batch and before drawing the third. Samples of a map-style data
        set are loaded again, by a worker if the loader has some.

        Raises:
            ConfigurationError: The whole batch is not available, or batches of the same samples differ at random.
        """
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """Copies and pickles drop the iterator, like a ``DataLoader``'s."""
        return type(None), ()
