"""What the callback ``Resume`` does with any host: its file, when it is written, and when all ranks stop.

An adapter says what the state of its run is, and where a step ends.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_callbacks.checkpoints.file import CheckpointFile, Shared
from ddp_callbacks.checkpoints.intervals import Every, Interval
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption

Content = tuple[Shared, Mapping[str, Any], Mapping[str, str]]
"""The arguments of :meth:`CheckpointFile.write <ddp_callbacks.CheckpointFile.write>`."""

ARGUMENTS = """
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
        ConfigurationError: A setting is invalid. At the start of a run: the host cannot tell where each process is in
            the data, or there are several ``Resume``.
        CheckpointError: At the start of a run: the file is of another model, data or batch size, or another job writes
            it. Later: it cannot be written.
        Preempted: In a run, on every rank: asked to stop, and the file is written.

    Attributes:
        preemption: The :class:`ddp_callbacks.Preemption` of the runs; its ``request`` asks to stop.
"""


class ResumeOptions:
    """What a user sets of ``Resume``, which is this and the host's callback; see :data:`ARGUMENTS`."""

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
