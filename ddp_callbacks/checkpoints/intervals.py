"""When to write a checkpoint without being asked; all ranks decide alike."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.errors import ConfigurationError

Every = int | timedelta | None

_DOING = "the time of the next checkpoint"
_MOST = 1000  # moments between two looks at the clock


class Interval(Protocol):
    """Decides at each moment; every rank asks at the same ones."""

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        """Whether to write at this moment.

        Args:
            is_batch: A training batch has ended since the last moment.
            is_epoch_end: The moment is between two epochs.
        """

    def note_written(self) -> None:
        """A file has been written, for whatever reason."""


def make_interval(every: Every, group: dist.ProcessGroup | None) -> Interval:
    """The decision for ``every``, see ``Resume``. Local.

    Raises:
        ConfigurationError: It is no positive number of batches, no positive time, and not ``None``.
    """
    if every is None:
        return EachEpoch()
    if isinstance(every, timedelta) and every > timedelta(0):
        return EachTime(every, group)
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return EachBatches(every)
    raise ConfigurationError(
        "every must be a positive number of training batches, a timedelta, or None (at the end of each epoch), got "
        f"{every!r}."
    )


class EachEpoch:
    """At the end of each epoch."""

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        return is_epoch_end

    def note_written(self) -> None:
        pass


class EachBatches:
    """Every few training batches."""

    def __init__(self, every: int) -> None:
        self._every, self._since = every, 0

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        self._since += is_batch
        return self._since >= self._every

    def note_written(self) -> None:
        self._since = 0


class EachTime:
    """When a time has passed on rank 0, which tells the others; not at each moment, but about when half is over."""

    def __init__(self, every: timedelta, group: dist.ProcessGroup | None) -> None:
        self._seconds, self._group = every.total_seconds(), group
        self._moments = 0  # since the last write
        self._next_look = 1
        self._written = time.monotonic()

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        self._moments += 1
        if self._moments < self._next_look:
            return False
        (due, further), _ = broadcast_tensors(self._look(), [], _DOING, self._group)
        self._next_look = self._moments + further
        return bool(due)

    def note_written(self) -> None:
        self._moments, self._next_look, self._written = 0, 1, time.monotonic()

    def _look(self) -> tuple[bool, int]:
        """Whether the time has passed, and the number of moments until the next look."""
        elapsed = time.monotonic() - self._written
        left = (self._seconds - elapsed) / max(elapsed / self._moments, 1e-6)
        return elapsed >= self._seconds, max(1, min(_MOST, int(left / 2)))
