"""Stop anywhere and resume anywhere: a run that is asked to stop writes a file, and the next run continues from it.

Torchbearer's loop can only be entered at its beginning, so the next run gets the opening events again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import CallbackList
from torchbearer.trial import CallbackListInjection

from ddp_callbacks.checkpoints import Saved, require_same
from ddp_callbacks.checkpoints.recovery import Recovery, Savers
from ddp_callbacks.checkpoints.resume import ARGUMENTS, ResumeOptions
from ddp_callbacks.errors import ConfigurationError, PeerError, Preempted, say
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.torchbearer.base import Call, DistributedCallback
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.run_state import RunState, appended_rows
from ddp_callbacks.torchbearer.state import State


class Resume(ResumeOptions, DistributedCallback):
    """Let ``run`` stop when it is asked to, and resume at the next batch when the program starts again.

    Asked by a signal, a time limit or ``preemption.request``, all ranks finish the same batch, write one file and raise
    :class:`ddp_callbacks.errors.Preempted`, which ends the process with exit code 75. If there is a file, the next
    ``run`` continues from it, on any number of processes, also a single one; a validation that was cut is repeated.
    ``run(epochs)`` still means the number of epochs in all: a finished run returns its history.

    Callbacks see the opening events again (``on_start``, ``on_start_epoch``, ``on_start_training``). Then parameters,
    optimizer, schedulers, the callbacks' ``state_dict``, metrics, random states and the position in the data are
    restored. On the same number of processes, the run has the same numbers, bit for bit, as a run that was not cut. On
    another number, it has the numbers that any number of processes gives; a window of local steps is closed there.
    ``evaluate`` and ``predict`` are not resumed. If a script that starts again calls them between two runs, they see
    the state at the cut, the only one in the file.

    Several processes need :class:`DDPCallback`, or :class:`ShardData` and :class:`ReduceMetrics`. The file is a
    checkpoint of the Trial without its callbacks, which ``Trial.load_state_dict`` loads without this library.
    """

    saved: Saved | None = None
    """The file's content, until a run has continued from it."""
    has_read = False
    """Whether a run has looked for the file."""

    def on_init(self, state: State) -> None:
        """Add the callbacks that know the position in the data, and the metrics. A single process needs only these."""
        super().on_init(state)
        callbacks: CallbackList = state[torchbearer.CALLBACK_LIST]
        kinds = (ShardData, ReduceMetrics)
        self._added = [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
        for one in self._added:
            one.on_init(state)
        callbacks.callback_list = [*self._added, *callbacks.callback_list]

    def calling(self, call: Call) -> contextlib.AbstractContextManager[object]:
        """Resume the run inside, and let it stop. Before that, other calls leave the rows of its CSV files alone."""
        callbacks: CallbackList = call.trial.state[torchbearer.CALLBACK_LIST]
        if call.name != "run":
            will_resume = self.saved is not None or (not self.has_read and os.path.exists(self.path))
            return appended_rows(callbacks) if will_resume else contextlib.nullcontext()
        several = sum(isinstance(callback, Resume) for callback in callbacks)
        if several > 1:
            raise ConfigurationError(f"a Trial takes one callback Resume, got {several}. Remove the others.")
        if self._added and self.world_size > 1:
            raise ConfigurationError(
                f"Resume needs DDPCallback, or {type(self._added[0]).__name__}, to know the position of several "
                "processes in the data, and their metrics. Add it."
            )
        recovery = next((callback.recovery for callback in callbacks if isinstance(callback, Recover)), None)
        return _continued(call, self, recovery)

    def read_again(self) -> None:
        """Let the next ``run`` read what it continues from, even if an earlier one has."""
        self.has_read = False


Resume.__doc__ = f"{Resume.__doc__}{ARGUMENTS}"


class Recover(DistributedCallback):
    """Let ``run``, ``evaluate`` and ``predict`` continue without processes that died, if the launcher does.

    A ``run`` goes back to its last copy in memory, about a second old, and resumes from it as by :class:`Resume`, on
    the processes that are left.
    """

    is_outermost = True
    saved: Saved | None = None
    """The content of the copy, until the run has continued from it."""

    def __init__(self) -> None:
        super().__init__()
        self.recovery = Recovery()

    def on_init(self, state: State) -> None:
        super().on_init(state)
        self._callbacks = state[torchbearer.CALLBACK_LIST]

    def around(self, inside: Callable[[], Any], call: Call) -> Any:
        """Return ``inside()``, called again if processes have died."""
        return self.recovery.call(functools.partial(super().around, inside, call), self)

    def begin_again(self) -> None:
        """Forget the call that has failed."""
        for callback in self._callbacks:
            if isinstance(callback, Resume):
                callback.read_again()

    def follow(self) -> None:
        """Divide the data among the ranks that are left."""
        for callback in self._callbacks:
            if isinstance(callback, ShardData):
                callback.divide_again()

    def calling(self, call: Call) -> contextlib.AbstractContextManager[object]:
        """Keep copies of a run, unless ``Resume`` does so with its own."""
        keeps = call.name == "run" and not any(isinstance(callback, Resume) for callback in self._callbacks)
        return _continued(call, self, self.recovery) if keeps else contextlib.nullcontext()


@contextlib.contextmanager
def _continued(call: Call, origin: Resume | Recover, recovery: Recovery | None) -> Iterator[None]:
    """Let a run continue inside from what ``origin`` reads, and save it. A collective."""
    callbacks: CallbackList = call.trial.state[torchbearer.CALLBACK_LIST]
    data = next(callback for callback in callbacks if isinstance(callback, ShardData))
    data.make_resumable()
    begin_run()
    options = origin if isinstance(origin, Resume) else None
    run_state, savers = RunState(call.trial, callbacks, data, recovery), Savers(recovery, options)
    with savers.opened():
        _read(origin, savers, run_state.about)
        with _Run(callbacks, run_state, savers, origin).injected(call.trial):
            yield


def _read(origin: Resume | Recover, savers: Savers, about: dict[str, str]) -> None:
    """Read what a run continues from, if none has yet. A collective."""
    if isinstance(origin, Recover):
        origin.saved = savers.read()
        return
    if not origin.has_read:
        origin.saved, origin.has_read = savers.read(), True
    if origin.saved is not None:
        require_same(origin.saved.about, about, savers.path)
        if origin.rank == 0:
            epochs, own = len(origin.saved.shared["history"]), origin.saved.local_states(0, origin.world_size).mine
            after = f"batch {own['batches']} of epoch {epochs + 1}" if own["batches"] else f"epoch {epochs}"
            over = ", which has ended the run: to train again, remove the file" if own["is_last"] else ""
            say(f"resumes from {savers.path}, after {after}{over}")


class _Run(CallbackListInjection):  # type: ignore[misc]
    """The Trial's callbacks during one ``run``. It resumes where an earlier run was cut, and checks whether to stop.

    It acts after all callbacks, and outside of the events in which all ranks draw alike. An ``evaluate`` within the run
    has some of these events, too, with a state of its own.

    Args:
        origin: Has what the run continues from, until it has; ``None``: the run begins at its start.
    """

    def __init__(self, callbacks: CallbackList, run_state: RunState, savers: Savers, origin: Resume | Recover) -> None:
        super().__init__(Callback(), callbacks)
        self._run_state, self._savers = run_state, savers
        self._state: State = None  # the run's state
        self._origin = origin
        self._batches: int | None = None  # batches done in the pass that was cut; None: the cut was between two epochs
        self._is_last = False
        self._steps = 0  # steps of the current training pass
        if origin.saved is not None:
            self._batches, self._is_last = run_state.begin(origin.saved)

    @contextlib.contextmanager
    def injected(self, trial: Any) -> Iterator[None]:
        """Take the place of the Trial's callbacks inside."""
        trial.state[torchbearer.CALLBACK_LIST] = self
        try:
            yield
        except (Preempted, PeerError):
            self._run_state.let_go()
            raise
        finally:
            trial.state[torchbearer.CALLBACK_LIST] = self.callback_list

    # --- resuming -------------------------------------------------------------------------------------------------

    def on_start(self, state: State) -> None:
        super().on_start(state)
        if self._state is not None:
            return
        self._state = state
        self._run_state.note_start(state)
        if self._origin.saved is None:
            self._savers.save_at_begin(functools.partial(self._run_state.content, state, None, False))
        if self._origin.saved is None or self._is_of_a_later_run(state):
            return
        self._run_state.load_loaders(self._origin.saved)
        if self._batches is None:
            if self._is_last:
                state[torchbearer.MAX_EPOCHS] = len(state[torchbearer.HISTORY])
            self._put_back(state)

    def _is_of_a_later_run(self, state: State) -> bool:
        """Whether the run that was cut was a later call of ``run``, for more epochs than this one."""
        done = len(state[torchbearer.HISTORY]) + (self._batches is not None)
        return bool(done > state[torchbearer.MAX_EPOCHS])

    def on_start_training(self, state: State) -> None:
        super().on_start_training(state)
        self._steps = state[torchbearer.STEPS]
        if self._origin.saved is not None and self._batches is not None:
            _leave_out(state, self._batches)
            self._put_back(state)
        elif self._steps == 0:  # only a validation follows
            self._save_if_due(state, 0, validates=True)

    def _put_back(self, state: State) -> None:
        assert self._origin.saved is not None
        self._run_state.put_back(self._origin.saved, state, self._savers.path)
        self._origin.saved = None

    # --- stopping -------------------------------------------------------------------------------------------------

    def _save_if_due(self, state: State, batches: int | None, is_last: bool = False, **is_at: bool) -> None:
        self._savers.save_if_due(functools.partial(self._run_state.content, state, batches, is_last), **is_at)

    def on_step_training(self, state: State) -> None:
        super().on_step_training(state)
        if not state[torchbearer.STOP_TRAINING]:
            batches = state[torchbearer.BATCH] + 1
            self._save_if_due(state, batches, ends_batch=True, validates=batches == self._steps)

    def on_end_training(self, state: State) -> None:
        state[torchbearer.STEPS] = self._steps  # it is still smaller if no batch was left
        super().on_end_training(state)

    def on_step_validation(self, state: State) -> None:
        super().on_step_validation(state)
        is_last = state[torchbearer.BATCH] + 1 == state[torchbearer.STEPS]
        if state is self._state and not (is_last or state[torchbearer.STOP_TRAINING]):
            self._savers.stop_in_validation()

    def on_checkpoint(self, state: State) -> None:
        super().on_checkpoint(state)
        is_last = bool(state[torchbearer.STOP_TRAINING])
        is_over = is_last or state[torchbearer.EPOCH] + 1 >= state[torchbearer.MAX_EPOCHS]
        self._save_if_due(state, None, is_last, ends_epoch=True, is_over=is_over)

    def on_end(self, state: State) -> None:
        """End a run that a callback has stopped within a pass: there was no end of an epoch."""
        if state is self._state and state[torchbearer.STOP_TRAINING]:
            self._save_if_due(state, None, True, ends_epoch=True, is_over=True)
        super().on_end(state)


def _leave_out(state: State, batches: int) -> None:
    """Let a training pass take only the batches that are left. Call it at the end of ``on_start_training``.

    The loop reads the number of steps once, right after that event, and calls the sampler first in each step. So it
    gets a smaller number, and the sampler restores the true one and shifts ``state[BATCH]``.

    Args:
        batches: The number of batches that are done.
    """
    steps, sampler = state[torchbearer.STEPS], state[torchbearer.SAMPLER]
    if steps != -1:
        state[torchbearer.STEPS] = steps - batches

    def shifted(of: State) -> None:
        of[torchbearer.BATCH] += batches
        of[torchbearer.STEPS] = steps
        sampler(of)

    state[torchbearer.SAMPLER] = shifted
