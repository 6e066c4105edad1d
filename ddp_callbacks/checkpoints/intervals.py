"""When to write a checkpoint without being asked; all ranks decide alike."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.errors import ConfigurationError

Every = int | timedelta | None

_DOING = "the time of the next checkpoint"
_MOST = 1000  # moments between two looks at the clock


class Interval:
    """Decides at each moment; every rank asks at the same ones.

    A time is rank 0's, which tells the others; not at each moment, but about when half of what is left is over.

    Args:
        every: See ``Resume``.

    Raises:
        ConfigurationError: ``every`` is no positive number of batches, no positive time, and not ``None``.
    """

    def __init__(self, every: Every, group: dist.ProcessGroup | None = None) -> None:
        is_number = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if not (every is None or is_number or (isinstance(every, timedelta) and every > timedelta(0))):
            raise ConfigurationError(
                "every must be a positive number of training batches, a timedelta, or None (at the end of each epoch), "
                f"got {every!r}."
            )
        self._every, self._group = every, group
        self.note_written()

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        """Whether to write at this moment.

        Args:
            is_batch: A training batch has ended since the last moment.
            is_epoch_end: The moment is between two epochs.
        """
        self._batches += is_batch
        if isinstance(self._every, timedelta):
            return self._is_time(self._every.total_seconds())
        return is_epoch_end if self._every is None else self._batches >= self._every

    def note_written(self) -> None:
        """A file has been written, for whatever reason."""
        self._batches = self._moments = 0
        self._next_look, self._written = 1, time.monotonic()

    def _is_time(self, seconds: float) -> bool:
        self._moments += 1
        if self._moments < self._next_look:
            return False
        (due, further), _ = broadcast_tensors(self._look(seconds), [], _DOING, self._group)
        self._next_look = self._moments + further
        return bool(due)

    def _look(self, seconds: float) -> tuple[bool, int]:
        """Whether the time has passed, and the number of moments until the next look."""
        elapsed = time.monotonic() - self._written
        left = (seconds - elapsed) / max(elapsed / self._moments, 1e-6)
        return elapsed >= seconds, max(1, min(_MOST, int(left / 2)))
