"""Resuming, as far as it is common to all hosts: options, when to write a run's file, and when all ranks stop.

An adapter supplies the state of its run, and says where a step ends.
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

from ddp_callbacks.checkpoints.file import CheckpointFile
from ddp_callbacks.checkpoints.format import LocalStates, Shared
from ddp_callbacks.comm.collectives import broadcast_object
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.local_sgd import ParameterAverager
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption
from ddp_callbacks.replicas.parameters import running_statistics

Every = int | timedelta | None
"""When to write a file apart from stops; see :class:`ResumeOptions`."""

Content = tuple[Shared, Mapping[str, Any], Mapping[str, str]]
"""The arguments of :meth:`CheckpointFile.write <ddp_callbacks.CheckpointFile.write>`."""

_INTERVAL = "the time of the next checkpoint"
_MOST = 1000  # at most so many moments between two looks at the clock


class Interval:
    """Decides at each moment whether to write a file. All ranks must ask at the same moments.

    A time is measured by rank 0, which tells the others. It does so not at each moment, but about when half of the time
    left is over.

    Args:
        every: See :class:`ResumeOptions`.

    Raises:
        ConfigurationError: ``every`` is not a positive number of batches, a positive time, or ``None``.
    """

    def __init__(self, every: Every) -> None:
        is_number = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if not (every is None or is_number or (isinstance(every, timedelta) and every > timedelta(0))):
            raise ConfigurationError(
                "every must be a positive number of training batches, a timedelta, or None (at the end of each epoch), "
                f"got {every!r}."
            )
        self._every = every
        self.note_written()

    def is_due(self, is_batch: bool, is_epoch_end: bool) -> bool:
        """Return whether to write at this moment. May be a collective if ``every`` is a time.

        Args:
            is_batch: Whether a training batch has ended since the last moment.
            is_epoch_end: Whether the moment is between two epochs.
        """
        self._batches += is_batch
        if isinstance(self._every, timedelta):
            return self._is_time(self._every.total_seconds())
        return is_epoch_end if self._every is None else self._batches >= self._every

    def note_written(self) -> None:
        """Note that a file has been written, for whatever reason."""
        self._batches = self._moments = 0
        self._next_look, self._written = 1, time.monotonic()

    def _is_time(self, seconds: float) -> bool:
        self._moments += 1
        if self._moments < self._next_look:
            return False
        due, further = broadcast_object(self._look(seconds), _INTERVAL)
        self._next_look = self._moments + further
        return bool(due)

    def _look(self, seconds: float) -> tuple[bool, int]:
        """Return whether the time has passed, and the number of moments until the next look.

        The estimate holds for as many moments as were measured: the first ones may be quick.
        """
        elapsed = time.monotonic() - self._written
        left = (seconds - elapsed) / max(elapsed / self._moments, 1e-6)
        return elapsed >= seconds, max(1, min(_MOST, self._moments, int(left / 2)))


class ResumeOptions:
    """The options of ``Resume``, which inherits from this class and from the host's callback.

    Args:
        path: The path of the file, ``"run.pt"``; only rank 0 needs to see it. The file before it is kept as
            ``run.previous.pt``.
        every: When to write the file, apart from stops: every so many training batches, after a time by rank 0's clock,
            or at the end of each epoch (``None``). It is also written when the run ends.
        on_signal: Whether SIGTERM and SIGUSR1 ask to stop. Lightning's Trainer then handles no signals itself, and does
            not requeue Slurm jobs.
        time_limit: Time from the start of the run after which to stop.
        async_save: Let a thread write the file while the training continues.
        weights_only: Whether the file may only hold tensors and plain data, see :func:`torch.load`. With ``False``,
            reading the file may run code in it.

    Raises:
        ConfigurationError: A setting is invalid. At the start of a run: the host cannot tell where each process is in
            the data, or there are several ``Resume``.
        CheckpointError: At the start of a run: the file belongs to another model, data set or batch size, or another
            job writes it. Later: the file cannot be written.
        Preempted: During a run, on every rank: the run was asked to stop, and the file is written.

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
        self.path = os.path.abspath(os.path.expanduser(path))
        self.every, self.on_signal, self.time_limit = every, on_signal, time_limit
        self.async_save, self.weights_only = async_save, weights_only
        self.preemption = Preemption(SIGNALS if on_signal else (), time_limit)

    def require_host(self) -> None:
        """Raise ``ImportError`` if the host lacks something."""


ARGUMENTS = "\n" + str(ResumeOptions.__doc__).partition("\n\n")[2]
"""The arguments in the docstring above, for the docstring of a host's callback."""


class ResumableRun:
    """The file of one run, and the decisions to write it and to stop. Each method is a collective.

    A resumed run repeats a validation as a whole: if the run is cut in a validation, it resumes right before it. So the
    file's content is put together before the validation, and written if the ranks are asked to stop before its end. A
    repeated validation is not cut again, because a run with little time would never get further.

    Attributes:
        file: The file, open inside :meth:`opened`.
    """

    def __init__(self, options: ResumeOptions) -> None:
        self.file = CheckpointFile(options.path, async_save=options.async_save, weights_only=options.weights_only)
        self._preemption = options.preemption
        self._interval = Interval(options.every)
        self._before_validation: io.BytesIO | None = None
        self._is_further = False  # than the run that it resumes

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Keep other jobs from writing the file, and listen for requests to stop, inside."""
        with self.file, self._preemption:
            yield

    def save_if_due(
        self,
        take: Callable[[], AbstractContextManager[Content]],
        *,
        ends_batch: bool = False,
        ends_epoch: bool = False,
        is_over: bool = False,
        validates: bool = False,
    ) -> None:
        """Write the file if it is due. If the ranks are asked to stop, write it and raise ``Preempted``.

        A run that is over writes the file and ends as usual.

        Args:
            take: Returns the content of the file, as a context inside which it is written. A collective.
            ends_batch: Whether a training batch has ended since the last moment.
            ends_epoch: Whether the moment is between two epochs.
            is_over: Whether the run has nothing left to do.
            validates: Whether a validation comes next.
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

    def stop_in_validation(self) -> None:
        """If the ranks are asked to stop, write the state from before the validation, and raise ``Preempted``."""
        if self._is_further and self._preemption.is_requested():
            if self._before_validation is not None:  # otherwise the file has it already
                self.file.put(self._before_validation)
            self._stop()

    def _stop(self) -> None:
        self.file.wait()
        self._preemption.exit(self.file.path)


@contextlib.contextmanager
def closed_windows(averagers: Iterable[ParameterAverager]) -> Iterator[None]:
    """Close the averagers' windows inside, so that any number of ranks can continue. A collective.

    Models and optimizers are averaged inside. On exit, the windows are as they were before.
    """
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
    """Load this rank's buffers; on another number of ranks, rank 0's, and the ranks' mean of running statistics. Local.

    Args:
        states: Each rank's buffers, by name.
        weights: The weight of each rank of ``states`` in the mean.
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
        if (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
            buffer.copy_(saved)
        else:  # a cache, which grows with the data
            buffer.data = saved.to(buffer.device, copy=True)
