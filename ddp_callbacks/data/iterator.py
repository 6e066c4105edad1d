"""Base classes for every way to divide a loader: the source of batches, a pass over it, and the pass's iterator."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ddp_callbacks._torch import end_workers, worker_queues
from ddp_callbacks.data.nested import name_of
from ddp_callbacks.data.order import Start
from ddp_callbacks.data.shares import Divider, Share, WholeBatch
from ddp_callbacks.errors import ConfigurationError


class Pass:
    """The progress of one pass over a loader.

    Attributes:
        limit: The number of batches to take; ``None``: all.
        start: Where the pass begins, if the loader is resumable.
        resumed: The position of an earlier run; ``None``: the pass begins at the first batch.
        used: The number of steps handed out, including those of an earlier run.
        is_over: Whether no step is left.
        first: The batch or indices of the first step, for :meth:`ShardedIterator.first_batch`; ``None``: not available.
    """

    is_over = False
    first: Any = None

    def __init__(self, limit: int | None, start: Start | None) -> None:
        self.limit, self.start = limit, start
        self.resumed = start.position if start else None
        self.used: int = self.resumed["batches"] if self.resumed else 0

    def position(self, batches: int | None) -> dict[str, Any]:
        """Return the position in the pass as tensors and plain data, for the state of a resumable loader.

        Args:
            batches: The number of steps used; ``None``: all steps handed out.
        """
        raise NotImplementedError

    def steps(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Share]]:
        """Yield this rank's part of each step, and its share.

        Args:
            batches: The iterator of the source's loader.
        """
        raise NotImplementedError

    def count_used(self, batches: int | None) -> int:
        """Return ``batches``, or for ``None`` the number of steps handed out. Raise if it is out of range."""
        if batches is not None and not 0 <= batches <= self.used:
            raise ConfigurationError(
                f"batches must be the number of batches used in this pass, of which {self.used} were handed out, got "
                f"{batches}."
            )
        return self.used if batches is None else batches


class Source:
    """A source of batches for a sharded loader.

    Args:
        loader: The iterable of batches.
        objects: Those on which the order depends, by name: their generators and other attributes.
        divider: Chooses this rank's part of each step.
        group: The ranks' process group; ``None`` is the default group.

    Attributes:
        is_stateful: Whether the loader resumes by a ``state_dict`` of its own.
    """

    is_stateful = False

    def __init__(
        self, loader: Any, objects: Mapping[str, object], divider: Divider, group: dist.ProcessGroup | None
    ) -> None:
        self.loader, self.objects, self.divider, self.group = loader, objects, divider, group
        self.sources = tuple(objects.values())

    def iterate(self, shares: deque[Share], limit: int | None, start: Start | None) -> ShardedIterator:
        """Begin a pass. A collective if every rank produces the whole batches."""
        raise NotImplementedError

    def compared(self, first: Any) -> WholeBatch:
        """Return the whole batch of the first step, and this rank's part of it. A collective."""
        raise NotImplementedError


def _let_go(_: object) -> None:
    """Do nothing. :func:`weakref.finalize` keeps the argument alive until it calls this."""


class ShardedIterator(Iterator[Any]):
    """Iterates over this rank's part of a loader, and knows each batch's share.

    Args:
        source: The source of the batches.
        current: The pass.
        batches: The iterator of the source's loader.
        shares: A queue. The iterator appends the :class:`~ddp_callbacks.Share` of each batch that it yields.
    """

    def __init__(self, source: Source, current: Pass, batches: Iterator[Any], shares: deque[Share]) -> None:
        self._source, self.current = source, current
        self.batches, self._steps = batches, current.steps(batches)
        self._shares = shares
        # Python's garbage collector finalizes the queues of a DataLoader's iterator before the iterator itself. Its
        # workers then get no message, and the process waits 5 s for each. A reference from here keeps the queues alive.
        weakref.finalize(self, _let_go, worker_queues(batches)).atexit = False

    def __next__(self) -> Any:
        try:
            part, share = next(self._steps)
        except StopIteration:
            self.current.is_over = True
            raise
        self.current.used += 1
        self._shares.append(share)
        return part

    def end(self) -> None:
        """End the workers that load the batches."""
        end_workers(self.batches)

    def take_share(self) -> Share | None:
        """Return the combined share of the batches drawn since the last call; ``None`` if there were none."""
        if not self._shares:
            return None
        taken = functools.reduce(operator.add, self._shares)
        self._shares.clear()
        return taken

    def first_batch(self) -> WholeBatch:
        """Return the whole first batch of this pass, the same on every rank, and this rank's part of it.

        A collective. Call it after drawing the first batch and before drawing the third. Samples of a map-style data
        set are loaded again, by a worker if the loader has some.

        Raises:
            ConfigurationError: The whole batch is not available, or batches of the same samples differ at random.
        """
        if self.current.first is None:
            raise ConfigurationError(
                f"the whole first batch of {name_of(self._source.loader)} is not available: it has not been drawn, is "
                "no longer kept, or each process has batches of its own."
            )
        return self._source.compared(self.current.first)

    def __reduce__(self) -> Any:
        """Copies and pickles drop the iterator, like a ``DataLoader``'s."""
        return type(None), ()
