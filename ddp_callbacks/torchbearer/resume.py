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
from ddp_callbacks.checkpoints.intervals import Interval, make_interval
from ddp_callbacks.errors import ConfigurationError, say
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption
from ddp_callbacks.torchbearer._torchbearer import advance_bar
from ddp_callbacks.torchbearer.base import DistributedCallback, State, share_of, wrap_methods
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.decisions import flat_callbacks
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
        self._path, self._async_save = os.path.abspath(path), async_save
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
        several = sum(isinstance(callback, Resume) for callback in flat_callbacks(callbacks))
        if several > 1:
            raise ConfigurationError(f"a Trial takes one callback Resume, got {several}. Remove the others.")
        if not self._has_read:
            self._saved, self._has_read = file.read(), True
        if self._saved is not None:
            require_same(self._saved.about, about, file.path)
            if self.rank == 0:
                say(f"goes on from {file.path}, after epoch {len(self._saved.shared['history'])}")
        interval = make_interval(self._every, self.process_group)
        run_state = RunState(trial, callbacks, data)
        current = _Run(trial, run_state, _Writer(file, about, self.preemption, interval))
        try:
            if self._saved is not None:
                current.begin(self._saved)
            with current.listening(callbacks):
                return run()
        finally:
            trial.state[torchbearer.CALLBACK_LIST] = callbacks  # Torchbearer leaves its printer there if run raises
            self._saved = current.saved

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


class _Writer:
    """Writes the file when it is due or the ranks are asked to stop. Its method is a collective.

    Args:
        file: The open file.
        about: What a run that goes on from it must have in common with this one.
    """

    def __init__(self, file: CheckpointFile, about: dict[str, str], preemption: Preemption, interval: Interval) -> None:
        self._file, self._about = file, about
        self._preemption, self._interval = preemption, interval

    def pass_moment(self, run_state: RunState, state: State, position: Position) -> None:
        """Write if it is due. If the ranks are asked to stop, write and raise ``Preempted``.

        A run that is over writes and ends as usual.
        """
        is_end = position.phase == BETWEEN
        is_requested = self._preemption.is_requested()
        is_due = self._interval.is_due(position.phase == TRAINING or position.ends_training, is_end)
        is_over = is_end and (position.is_last or state[torchbearer.EPOCH] + 1 >= state[torchbearer.MAX_EPOCHS])
        if is_requested or is_due or is_over:
            own = run_state.own(state, position)
            with run_state.closed_windows(state):
                self._file.write(run_state.shared, own, self._about)
            self._interval.note_written()
        if is_requested and not is_over:
            run_state.let_go(state)
            self._file.wait()
            self._preemption.exit(self._file.path)


class _Run:
    """One call of ``run``: begins where the last one was cut, and looks after each batch whether to stop.

    It acts after all callbacks, and outside of the events, in which all ranks draw alike.
    """

    def __init__(self, trial: Any, run_state: RunState, writer: _Writer) -> None:
        self.saved: Saved | None = None  # what is still to be put back
        self._trial, self._run_state, self._writer = trial, run_state, writer
        self._position: Position | None = None  # of it
        self._state: State | None = None  # not that of an evaluate() in the middle

    def begin(self, saved: Saved) -> None:
        """Go on from ``saved``."""
        self.saved, self._position = saved, Position(**saved.own(0)["position"])
        self._run_state.begin(saved)

    @contextlib.contextmanager
    def listening(self, callbacks: CallbackList) -> Iterator[None]:
        """Handle the events of this list, too."""
        after = {
            "on_start": self._start,
            "on_start_training": self._start_training,
            "on_step_training": self._step_training,
            "on_end_training": self._end_training,
            "on_start_validation": self._start_validation,
            "on_step_validation": self._step_validation,
            "on_checkpoint": self._end_epoch,
        }
        before = {name: vars(callbacks).get(name) for name in (*after, "on_end")}
        for name, handle in after.items():
            setattr(callbacks, name, self._both(getattr(callbacks, name), handle))
        callbacks.on_end = self._both(self._end, callbacks.on_end)
        try:
            yield
        finally:
            for name, event in before.items():
                delattr(callbacks, name) if event is None else setattr(callbacks, name, event)

    def _both(self, first: Event, second: Event) -> Event:
        def both(state: State) -> None:
            first(state)
            second(state)

        return both

    # --- going on -------------------------------------------------------------------------------------------------

    def _start(self, state: State) -> None:
        if self._state is not None:
            return
        self._state = state
        self._run_state.note_start()
        if self.saved is None or self._position is None:
            return
        self._run_state.load_loaders(self.saved, self._position)
        if self._position.phase == BETWEEN:
            if self._position.is_last:
                state[torchbearer.MAX_EPOCHS] = len(state[torchbearer.HISTORY])
            self._put_back(state)
        elif self._position.phase == VALIDATION:
            metrics, batch = self._run_state.end_of_training(self.saved)
            put_back = _nothing if self._position.is_within_pass else self._put_back
            skip_training(self._trial, metrics, batch, put_back)

    def _start_training(self, state: State) -> None:
        if self._is_own(state):
            self._run_state.samples = 0
            self._enter(state, TRAINING)

    def _start_validation(self, state: State) -> None:
        if self._is_own(state):
            self._run_state.samples = 0
            self._enter(state, VALIDATION)

    def _enter(self, state: State, phase: str) -> None:
        position = self._position
        if self.saved is not None and position is not None and position.phase == phase:
            enter_pass(state, position.batches, self._put_back)

    def _put_back(self, state: State) -> None:
        assert self.saved is not None and self._position is not None
        self._run_state.put_back(self.saved, self._position, state)
        for callback in self._run_state.callbacks_and_printer(state):
            advance_bar(callback, self._position.batches)
        self.saved = None

    # --- stopping -------------------------------------------------------------------------------------------------

    def _is_own(self, state: State) -> bool:
        return state is self._state

    def _step_training(self, state: State) -> None:
        self._step(state, TRAINING)

    def _step_validation(self, state: State) -> None:
        self._step(state, VALIDATION)

    def _step(self, state: State, phase: str) -> None:
        """The last batch of a pass is no moment: the end of the pass, which follows, is one."""
        if not self._is_own(state):
            return
        self._run_state.samples += share_of(state).local
        batches = state[torchbearer.BATCH] + 1
        if batches != state[torchbearer.STEPS] and not state[torchbearer.STOP_TRAINING]:
            self._writer.pass_moment(self._run_state, state, Position(phase, batches))

    def _end_training(self, state: State) -> None:
        if self._is_own(state):
            self._run_state.training_metrics = dict(state[torchbearer.METRICS])
            if not state[torchbearer.STOP_TRAINING]:
                self._writer.pass_moment(self._run_state, state, Position(VALIDATION))

    def _end_epoch(self, state: State) -> None:
        if self._is_own(state):
            position = Position(BETWEEN, is_last=bool(state[torchbearer.STOP_TRAINING]))
            self._writer.pass_moment(self._run_state, state, position)

    def _end(self, state: State) -> None:
        """A run that a callback has stopped within a pass ends here, without the end of an epoch."""
        if self._is_own(state) and state[torchbearer.STOP_TRAINING]:
            self._writer.pass_moment(self._run_state, state, Position(BETWEEN, is_last=True))


def _nothing(state: State) -> None:
    pass
