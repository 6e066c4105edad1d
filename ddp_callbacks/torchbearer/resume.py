"""Stop anywhere and resume anywhere: a run that is asked to stop writes a file, and the next run continues from it.

Torchbearer's loop has no entry but its beginning, so the next run gets the opening events again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torchbearer
from torchbearer.callbacks import CallbackList

from ddp_callbacks.checkpoints import Saved, require_same
from ddp_callbacks.checkpoints.resume import ARGUMENTS, Content, ResumableRun, ResumeOptions
from ddp_callbacks.errors import ConfigurationError, Preempted, say
from ddp_callbacks.torchbearer._torchbearer import replace_training_pass
from ddp_callbacks.torchbearer.base import DistributedCallback, State, wrap_methods
from ddp_callbacks.torchbearer.data import Event, ShardData
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.run_state import BETWEEN, TRAINING, VALIDATION, Position, RunState, describe_run


class Resume(ResumeOptions, DistributedCallback):
    """Let ``run`` stop when it is asked to, and resume at the next batch when the program starts again.

    Asked by a signal, a time limit or ``preemption.request``, all ranks finish the same batch, write one file and raise
    :class:`ddp_callbacks.errors.Preempted`, which ends the process with exit code 75. If there is a file, the next
    ``run`` continues from it, on any number of processes, also a single one; a validation that was cut is repeated.
    ``run(epochs)`` still means the number of epochs in all: a finished run returns its history.

    Callbacks see the opening events again (``on_start``, ``on_start_epoch`` and ``on_start_training``); then everything
    is put back as it was: parameters, optimizer, schedulers, the callbacks' ``state_dict``, metrics, random states, the
    position in the data. On the same number of processes the run has the numbers, bit for bit, of one that was not cut.
    On another number it has those that any number of processes has; a window of local steps is closed there.
    ``evaluate`` and ``predict`` are not resumed; between two runs of a script that starts again, they see the state of
    the cut, as a file holds one.

    Several processes need :class:`DDPCallback`, or :class:`ShardData` and :class:`ReduceMetrics`, whose process group
    it takes. The file is a checkpoint of the Trial without its callbacks, which ``Trial.load_state_dict`` loads without
    this library.
    """

    _saved: Saved | None = None  # until a run has continued from it
    _has_read = False

    def on_init(self, state: State) -> None:
        super().on_init(state)
        wrap_methods(state[torchbearer.SELF], ("run",), self._resuming(state[torchbearer.SELF]))

    @contextlib.contextmanager
    def _resuming(self, trial: Any) -> Iterator[None]:
        callbacks: CallbackList = trial.state[torchbearer.CALLBACK_LIST]
        several = sum(isinstance(callback, Resume) for callback in callbacks)
        if several > 1:
            raise ConfigurationError(f"a Trial takes one callback Resume, got {several}. Remove the others.")
        data = self._find_data(callbacks)
        data.make_resumable()
        self.process_group = self.preemption.process_group = data.process_group
        about = describe_run(trial, data)
        resumable = ResumableRun(self, self.process_group)
        with resumable.opened():
            current = _Run(trial, RunState(trial, callbacks, data), resumable, about, self._read(resumable, about))
            try:
                with current.listening(callbacks):
                    yield
            finally:
                trial.state[torchbearer.CALLBACK_LIST] = callbacks  # Torchbearer leaves its printer there if run raises
                self._saved = current.saved

    def _read(self, resumable: ResumableRun, about: dict[str, str]) -> Saved | None:
        if not self._has_read:
            self._saved, self._has_read = resumable.file.read(), True
        if self._saved is not None:
            require_same(self._saved.about, about, self.path)
            if self.rank == 0:
                say(f"resumes from {self.path}, after epoch {len(self._saved.shared['history'])}")
        return self._saved

    def _find_data(self, callbacks: CallbackList) -> ShardData:
        """What knows the position in the data; a single process needs none of our other callbacks."""
        kinds = (ShardData, ReduceMetrics)
        lacking = [kind for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
        if lacking and self.world_size > 1:
            raise ConfigurationError(
                f"Resume needs DDPCallback, or {lacking[0].__name__}, to know the position of several processes in the "
                "data, and their metrics. Add it."
            )
        callbacks.callback_list = [*(kind() for kind in lacking), *callbacks.callback_list]
        return next(callback for callback in callbacks if isinstance(callback, ShardData))


Resume.__doc__ = f"{Resume.__doc__}{ARGUMENTS}"


class _Run:
    """One call of ``run``: begins where the last one was cut, and looks after each batch whether to stop.

    It acts after all callbacks, and outside of the events, in which all ranks draw alike.

    Args:
        about: What a run that continues from the file must have in common with this one.
        saved: What it continues from.
    """

    def __init__(
        self, trial: Any, run_state: RunState, resumable: ResumableRun, about: dict[str, str], saved: Saved | None
    ) -> None:
        self._trial, self._run_state, self._resumable, self._about = trial, run_state, resumable, about
        self._state: State | None = None  # not that of an evaluate() in the middle
        self.saved = saved  # what is still to be put back
        self._position = Position(BETWEEN)  # of it
        if saved is not None:
            self._position = run_state.begin(saved)

    @contextlib.contextmanager
    def listening(self, callbacks: CallbackList) -> Iterator[None]:
        """Handle the events of this list, too."""
        after = {
            "on_start": self._start,
            "on_start_training": self._start_training,
            "on_step_training": self._step_training,
            "on_end_training": self._end_training,
            "on_step_validation": self._step_validation,
            "on_checkpoint": self._end_epoch,
        }
        before = {name: vars(callbacks).get(name) for name in (*after, "on_end")}
        for name, handle in after.items():
            setattr(callbacks, name, _both(getattr(callbacks, name), self._of_this_run(handle)))
        callbacks.on_end = _both(self._of_this_run(self._end), callbacks.on_end)
        try:
            yield
        except Preempted:
            self._run_state.let_go(self._state)
            raise
        finally:
            for name, event in before.items():
                delattr(callbacks, name) if event is None else setattr(callbacks, name, event)

    def _of_this_run(self, handle: Event) -> Event:
        def handle_own(state: State) -> None:
            if self._state is None or state is self._state:
                handle(state)

        return handle_own

    # --- resuming -------------------------------------------------------------------------------------------------

    def _start(self, state: State) -> None:
        self._state = state
        self._run_state.note_start()
        if self.saved is None or self._is_of_a_later_run(state):
            return
        self._run_state.load_loaders(self.saved, self._position)
        if self._position.phase == BETWEEN:
            if self._position.is_last:
                state[torchbearer.MAX_EPOCHS] = len(state[torchbearer.HISTORY])
            self._put_back(state)
        elif self._position.phase == VALIDATION:
            replace_training_pass(self._trial, self._skip_training)

    def _is_of_a_later_run(self, state: State) -> bool:
        """Whether the program had called ``run`` once more, for further epochs, when it was cut."""
        done = len(state[torchbearer.HISTORY]) + (self._position.phase != BETWEEN)
        return bool(done > state[torchbearer.MAX_EPOCHS])

    def _start_training(self, state: State) -> None:
        if self.saved is not None and self._position.phase == TRAINING:
            _enter_pass(state, self._position.batches, self._put_back)

    def _skip_training(self, state: State) -> State:
        """The training pass, which is done, does nothing but put everything back; no event is called."""
        state.update(self._trial.state)
        self._put_back(state)  # before the validation makes its iterator
        return state

    def _put_back(self, state: State) -> None:
        assert self.saved is not None
        self._run_state.put_back(self.saved, self._position, state)
        self.saved = None

    # --- stopping -------------------------------------------------------------------------------------------------

    def _pass_moment(self, state: State, position: Position, **is_at: bool) -> None:
        @contextlib.contextmanager
        def take() -> Iterator[Content]:
            own = self._run_state.own(state, position)
            with self._run_state.closed_windows():
                yield self._run_state.shared, own, self._about

        self._resumable.pass_moment(take, **is_at)

    def _step_training(self, state: State) -> None:
        """The last batch of a pass is no moment: the end of the pass, which follows, is one."""
        if not _is_last(state):
            self._pass_moment(state, Position(TRAINING, state[torchbearer.BATCH] + 1), ends_batch=True)

    def _end_training(self, state: State) -> None:
        if not state[torchbearer.STOP_TRAINING]:
            self._pass_moment(state, Position(VALIDATION), ends_batch=True, validates=True)

    def _step_validation(self, state: State) -> None:
        if not _is_last(state):
            self._resumable.pass_moment_of_validation()

    def _end_epoch(self, state: State) -> None:
        is_last = bool(state[torchbearer.STOP_TRAINING])
        is_over = is_last or state[torchbearer.EPOCH] + 1 >= state[torchbearer.MAX_EPOCHS]
        self._pass_moment(state, Position(BETWEEN, is_last=is_last), ends_epoch=True, is_over=is_over)

    def _end(self, state: State) -> None:
        """A run that a callback has stopped within a pass ends here, without the end of an epoch."""
        if state[torchbearer.STOP_TRAINING]:
            self._pass_moment(state, Position(BETWEEN, is_last=True), ends_epoch=True, is_over=True)


def _enter_pass(state: State, batches: int, put_back: Event) -> None:
    """Let the pass that is about to begin take only the batches that are left. Call it after the event of its start.

    The loop evaluates its range once, right after that event, and calls the sampler first in each step. So it gets a
    smaller number of steps, and the sampler restores the true one and shifts ``state[BATCH]``.

    Args:
        batches: The number that is done.
        put_back: Called once, before the first sample.
    """
    steps, sampler = state[torchbearer.STEPS], state[torchbearer.SAMPLER]
    if steps != -1:
        state[torchbearer.STEPS] = steps - batches
    waiting = [put_back]

    def shifted(of: State) -> None:
        of[torchbearer.BATCH] += batches
        if waiting:
            of[torchbearer.STEPS] = steps
            waiting.pop()(of)
        sampler(of)

    state[torchbearer.SAMPLER] = shifted


def _is_last(state: State) -> bool:
    """Whether the pass ends with this batch."""
    return bool(state[torchbearer.BATCH] + 1 == state[torchbearer.STEPS] or state[torchbearer.STOP_TRAINING])


def _both(first: Event, second: Event) -> Event:
    def both(state: State) -> None:
        first(state)
        second(state)

    return both
