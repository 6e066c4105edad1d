"""What resuming has in common for all hosts: a run's file, when it is written, when all ranks stop, and models.

An adapter says what the state of its run is, and where a step ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.checkpoints.file import CheckpointFile, Shared
from ddp_callbacks.checkpoints.format import LocalStates
from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.local_sgd import ParameterAverager
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption
from ddp_callbacks.replicas import running_statistics

Every = int | timedelta | None
"""When to write a file without being asked; see :class:`ResumeOptions`."""

Content = tuple[Shared, Mapping[str, Any], Mapping[str, str]]
"""The arguments of :meth:`CheckpointFile.write <ddp_callbacks.CheckpointFile.write>`."""

_INTERVAL = "the time of the next checkpoint"
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
        (due, further), _ = broadcast_tensors(self._look(seconds), [], _INTERVAL, self._group)
        self._next_look = self._moments + further
        return bool(due)

    def _look(self, seconds: float) -> tuple[bool, int]:
        """Whether the time has passed, and the number of moments until the next look."""
        elapsed = time.monotonic() - self._written
        left = (seconds - elapsed) / max(elapsed / self._moments, 1e-6)
        return elapsed >= seconds, max(1, min(_MOST, int(left / 2)))


class ResumeOptions:
    """What a user sets of ``Resume``, which is this and the host's callback.

    Args:
        path: Of the file, ``"run.pt"``; only rank 0 needs to see it. The file before it is kept as ``run.previous.pt``.
        every: When to write the file, except when all stop: after so many training batches, after a time by rank 0's
            clock, or at the end of each epoch (``None``). It is written when the run ends, too.
        on_signal: Whether SIGTERM and SIGUSR1 ask to stop. In a Trainer, Lightning handles no signal of its own then,
            and requeues no job of Slurm.
        time_limit: From the start of the run, after which to stop.
        async_save: Let a thread write the file while the training continues.
        weights_only: Whether the file may only hold tensors and plain data, see :func:`torch.load`. With ``False``,
            reading it runs its code.

    Raises:
        ConfigurationError: A setting is invalid. When a Trial is made, or a Trainer's run starts: the host cannot tell
            where each process is in the data. At the start of a run: there are several ``Resume``.
        CheckpointError: At the start of a run: the file is of another model, data or batch size, or another job writes
            it. Later: it cannot be written.
        Preempted: In a run, on every rank: asked to stop, and the file is written.

    Attributes:
        preemption: The :class:`ddp_callbacks.Preemption` of the runs; its ``request`` asks to stop.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: Every = None,
        on_signal: bool = True,
        time_limit: timedelta | None = None,
        async_save: bool = False,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self.require_host()
        Interval(every)  # raises if it is invalid
        self.path = os.path.abspath(path)
        self.every, self.on_signal, self.time_limit = every, on_signal, time_limit
        self.async_save, self.weights_only = async_save, weights_only
        self.preemption = self._make_preemption()

    def require_host(self) -> None:
        """Raise ``ImportError`` if the host lacks something."""

    def _make_preemption(self) -> Preemption:
        return Preemption(SIGNALS if self.on_signal else (), self.time_limit)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "preemption"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.preemption = self._make_preemption()


ARGUMENTS = "\n" + str(ResumeOptions.__doc__).partition("\n\n")[2]
"""For the docstring of a host's callback."""


class ResumableRun:
    """The file of one run, and the decisions to write it and to stop. Each method is a collective.

    A validation is repeated as a whole: a run that is cut in it goes on from in front of it. So its content is put
    together there, and written if the ranks are asked to stop before it ends. A validation that is repeated is not cut
    again, or a run with little time would get no further.

    Attributes:
        file: The file, open inside :meth:`opened`.
    """

    def __init__(self, options: ResumeOptions, group: dist.ProcessGroup | None = None) -> None:
        self.file = CheckpointFile(
            options.path, async_save=options.async_save, weights_only=options.weights_only, process_group=group
        )
        self._preemption = options.preemption
        self._interval = Interval(options.every, group)
        self._before_validation: io.BytesIO | None = None
        self._is_further = False  # than the run that it goes on from

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, no other job writes the file, and ranks can be asked to stop."""
        with self.file, self._preemption:
            yield

    def pass_moment(
        self,
        take: Callable[[], AbstractContextManager[Content]],
        *,
        ends_batch: bool = False,
        ends_epoch: bool = False,
        is_over: bool = False,
        validates: bool = False,
    ) -> None:
        """Write if it is due. If the ranks are asked to stop, write and raise ``Preempted``.

        A run that is over writes and ends as usual.

        Args:
            take: What the file is to hold; a collective. It is written inside the context.
            ends_batch: A training batch has ended since the last moment.
            ends_epoch: The moment is between two epochs.
            is_over: Nothing is left to do.
            validates: A validation comes next.
        """
        self._before_validation, self._is_further = None, True
        stops = not is_over and self._preemption.is_requested()
        is_due = self._interval.is_due(ends_batch, ends_epoch)
        if is_over or stops or is_due:
            with take() as content:
                self.file.write(*content)
            self._interval.note_written()
        elif validates:
            with take() as content:
                self._before_validation = self.file.prepare(*content)
        if stops:
            self._stop()

    def pass_moment_of_validation(self) -> None:
        """If the ranks are asked to stop, write what a run needs that repeats the validation, and raise."""
        if self._is_further and self._preemption.is_requested():
            if self._before_validation is not None:  # else it is the file that is there
                self.file.put(self._before_validation)
            self._stop()

    def _stop(self) -> None:
        self.file.wait()
        self._preemption.exit(self.file.path)


@contextlib.contextmanager
def closed_windows(averagers: Iterable[ParameterAverager]) -> Iterator[None]:
    """Have averaged models and optimizers, which any number of ranks can continue from, inside. A collective."""
    windows = [(averager, averager.state_dict()) for averager in averagers]
    for averager, _ in windows:
        averager.outer_step()
    try:
        yield
    finally:
        for averager, window in windows:
            averager.load_state_dict(window)


@torch.no_grad()
def load_buffers(module: torch.nn.Module, states: LocalStates, weights: Sequence[float]) -> None:
    """Load each rank's buffers; on another number of ranks, the mean of their running statistics, and else rank 0's.

    Args:
        states: Each rank's buffers, by name.
        weights: For the mean, of each rank of ``states``.
    """
    total = sum(weights)
    averaged = set() if states.is_same_world else {id(buffer) for buffer in running_statistics(module)}
    for name, buffer in module.named_buffers():
        if name not in states.mine:
            continue
        saved = states.mine[name]
        if id(buffer) in averaged and total:
            pairs = zip(states.of_ranks, weights, strict=True)
            saved = sum(of_rank[name] * (weight / total) for of_rank, weight in pairs if weight)
        buffer.copy_(saved)
