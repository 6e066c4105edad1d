"""Stop anywhere and go on anywhere: a run that is asked to stop writes a file, and the next run goes on from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torchbearer
from torchbearer.callbacks import CallbackList

from ddp_callbacks.checkpoints import CheckpointFile, Saved, require_same
from ddp_callbacks.errors import ConfigurationError, Preempted, say
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption
from ddp_callbacks.torchbearer._torchbearer import advance_bar
from ddp_callbacks.torchbearer.base import DistributedCallback, State, share_of, wrap_methods
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.decisions import flat_callbacks
from ddp_callbacks.torchbearer.intervals import Interval, make_interval
from ddp_callbacks.torchbearer.position import BETWEEN, TRAINING, VALIDATION, Event, Position, enter_pass, skip_training
from ddp_callbacks.torchbearer.run_state import RunState, describe_run


class Resume(DistributedCallback):
    """Let ``run`` stop when it is asked to, and go on at the next batch when the program starts again.

    Asked by a signal, a time limit or ``preemption.request``, all ranks finish the same batch, write one file and raise
    :class:`ddp_callbacks.errors.Preempted`, which ends the process with exit code 75. If there is a file, the next
    ``run`` goes on from it, on any number of processes, also a single one. ``run(epochs)`` still means the number of
    epochs in all: a finished run returns its history.

    Callbacks see the opening events again (``on_start``, ``on_start_epoch``, and ``on_start_training`` or
    ``on_start_validation``); then everything is put back as it was: parameters, optimizer, schedulers, the callbacks'
    ``state_dict``, metrics, random states, the position in the data. On the same number of processes the run has the
    numbers, bit for bit, of one that was not cut. On another number it has those that any number of processes has; a
    window of local steps is closed there. ``evaluate`` and ``predict`` are not resumed.

    The file is a checkpoint of the Trial, which ``Trial.load_state_dict`` loads without this library. Reading it can
    run code, as every ``torch.load`` of a Trial's checkpoint: read only files that you trust.

    Args:
        path: The file, ``"run.pt"``; only rank 0 must see it. The one before is kept as ``run.previous.pt``.
        every: When to write without being asked: a number of training batches, or a ``timedelta``. ``None``: at the end
            of each epoch. The end of the run is always written.
        on_signal: Whether SIGTERM and SIGUSR1 ask to stop.
        time_limit: Ask to stop after this time in ``run``.
        async_save: Go on with training while the file is written.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: ``every`` or ``time_limit`` is invalid. At the start of a run: several processes without
            :class:`ShardData` (or :class:`DDPCallback`).
        CheckpointError: At the start of a run: the file is of another model, data or batch size, or another job writes
            it. Later: it cannot be written.
        Preempted: On every rank: asked to stop, and the file is written.

    Attributes:
        preemption: The :class:`ddp_callbacks.Preemption` of the run; its ``request`` asks to stop.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int | timedelta | None = None,
        on_signal: bool = True,
        time_limit: timedelta | None = None,
        async_save: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self.preemption = Preemption(SIGNALS if on_signal else (), time_limit, process_group)
        self._path, self._async_save = path, async_save
        self._every = every
        make_interval(every, process_group)  # raises if it is invalid
        self._saved: Saved | None = None  # until a run has gone on from it
        self._has_read = False

    def on_init(self, state: State) -> None:
        super().on_init(state)
        trial = state[torchbearer.SELF]

        def stopping(run: Callable[..., Any]) -> Callable[..., Any]:
            def resumed(*args: Any, **kwargs: Any) -> Any:
                with self._file() as file, self.preemption:
                    return self._run(trial, file, lambda: run(*args, **kwargs))

            return resumed

        wrap_methods(trial, ("run",), stopping)

    def _file(self) -> CheckpointFile:
        return CheckpointFile(
            self._path, async_save=self._async_save, weights_only=False, process_group=self.process_group
        )

    def _run(self, trial: Any, file: CheckpointFile, run: Callable[[], Any]) -> Any:
        callbacks: CallbackList = trial.state[torchbearer.CALLBACK_LIST]
        data = self._find_data(callbacks)
        data.make_resumable()
        about = describe_run(trial, data)
        if not self._has_read:
            self._saved, self._has_read = file.read(), True
        if self._saved is not None:
            require_same(self._saved.about, about, file.path)
        current = _Run(self, RunState(trial, callbacks, data), file, about)
        try:
            with current.listening(trial, callbacks, self._saved):
                return run()
        finally:
            trial.state[torchbearer.CALLBACK_LIST] = callbacks  # Torchbearer leaves its printer there if run raises
            if current.has_put_back:
                self._saved = None

    def _find_data(self, callbacks: CallbackList) -> ShardData:
        for callback in flat_callbacks(callbacks):
            if isinstance(callback, ShardData):
                return callback
        if self.world_size > 1:
            raise ConfigurationError(
                "Resume needs DDPCallback, or ShardData, to know the position of several processes in the data. Add it."
            )
        data = ShardData(process_group=self.process_group)
        callbacks.callback_list = [data, *callbacks.callback_list]
        return data

    def interval(self) -> Interval:
        """When the next run writes without being asked."""
        return make_interval(self._every, self.process_group)
