"""Equal replicas: they start equal, merge what differs between them, and stop together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torchbearer
from torchbearer import CALLBACK_LIST, HISTORY, MODEL, OPTIMIZER, SELF, STOP_TRAINING, Callback
from torchbearer.callbacks import EarlyStopping, TerminateOnNaN

from ddp_callbacks.batch_norm.layers import BatchNormSynchronizer
from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.comm.agreement import VERSIONS, module_settings, optimizer_settings, require_agreement
from ddp_callbacks.comm.collectives import all_gather_object, broadcast_object
from ddp_callbacks.data.global_state import set_global_state
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.process_group.moments import tell_lone_decision
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replacement import Replaced
from ddp_callbacks.replicas import parameters as replicas
from ddp_callbacks.replicas.checks import ReplicaChecks
from ddp_callbacks.replicas.equality import OnDivergence
from ddp_callbacks.torchbearer.base import RANDOM_STATE, Call, DistributedCallback, aggregator_of, handles
from ddp_callbacks.torchbearer.state import (
    DATA_KEYS,
    RUN_RANDOM_STATE,
    SHARE,
    STEP_TIMES,
    WEIGHS_LOSS,
    State,
    held_by,
    share_of,
)

_MAY_STOP = {  # ranks agree after an event (key) if a user's callback handles one of these events, and may stop there
    "on_step_training": ("on_forward", "on_criterion", "on_backward", "on_step_training"),
    "on_step_validation": ("on_forward_validation", "on_criterion_validation", "on_step_validation"),
}

_STOPS = (
    "set state[torchbearer.STOP_TRAINING], the other processes did not: all stop now. If it was for a loss or a metric "
    "of this process's part of the data, decide in on_end_epoch by state[torchbearer.METRICS]."
)


class BroadcastParameters(DistributedCallback):
    """Start ``run``, ``evaluate`` and ``predict`` equal: compare the ranks' settings, then copy rank 0's state to all.

    It compares the called method, parameter names, shapes and dtypes, the optimizer's groups, the loaders' lengths, the
    epochs trained so far, and library versions. It broadcasts parameters, buffers and the optimizer's state. If only
    rank 0 has loaded a checkpoint, the other ranks also get its history and its optimizer's hyperparameters. A run that
    resumes from a checkpoint of :class:`RankZeroOutput` restores its random state, also with a single process, so it
    draws the same batches as an uninterrupted run.

    An exception that ends the method on one rank is raised on the others, too, as
    :class:`ddp_callbacks.errors.PeerError` with its text, within about two seconds. If all ranks catch it, they can
    call these methods again.

    Args:

    Raises:
        MismatchError: On every rank; names the differences and the ranks.
    """

    _called = ""
    _loaded: str | None = None
    _random_state: Any = None  # random state of the checkpoint that the next run resumes from

    def on_init(self, state: State) -> None:
        super().on_init(state)
        Replaced(state[SELF], "load_state_dict", self._load_noting)

    def on_start(self, state: State) -> None:
        begin_run()
        if self._random_state is not None and self._called == "run":
            set_global_state(self._random_state)
            self._random_state = None
        if self.world_size == 1:
            return
        resumed = self._follow_resumed(state[HISTORY])
        if resumed:
            replicas.broadcast_optimizer_state(state[OPTIMIZER])
        require_agreement(
            module_settings(held_by(state)) | self._settings(state) | optimizer_settings(state[OPTIMIZER]),
            "the Trial",
            "Run the same script with the same arguments, data and libraries in every process.",
        )
        replicas.broadcast_parameters(held_by(state))
        if not resumed:
            replicas.broadcast_optimizer_state(state[OPTIMIZER])

    def _settings(self, state: State) -> dict[str, str]:
        settings = {
            "version of Python": "{}.{}".format(*sys.version_info),
            **VERSIONS,
            "version of torchbearer": torchbearer.__version__,
            "what is called": self._called,
            "epochs trained so far": str(len(state[HISTORY])),
        }
        for key in DATA_KEYS:
            generator, steps = state[SELF].state[key] or (None, None)
            settings |= {f"{key}: steps": str(steps), f"{key}: batches": str(length_of(generator))}
        return settings

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Note which method is called: all begin alike, so different ones on the ranks would deadlock later."""
        self._called = call.name
        try:
            yield
        except BaseException as exception:
            if self.world_size > 1:
                report_failure(exception)
            raise

    def _load_noting(self, load: Callable[..., Any], state_dict: Any, resume: bool = True, **kwargs: Any) -> Any:
        """Load a checkpoint into the Trial, and note what was loaded."""
        loaded = load(state_dict, resume, **kwargs)
        self._random_state = state_dict.get(RANDOM_STATE) if resume else None
        state = [state_dict.get(key) for key in (MODEL, OPTIMIZER)] if MODEL in state_dict else state_dict
        self._loaded = replicas.describe_checkpoint(state, epochs=len(state_dict.get(HISTORY, ())))
        return loaded

    def _follow_resumed(self, history: list[dict[str, Any]]) -> bool:
        """Raise if ranks resume differently. If only rank 0 has resumed, the others follow it; return whether they do.

        Rank 0 has resumed if it has loaded a checkpoint, or has a history.
        """
        loaded, self._loaded = self._loaded, None
        found = all_gather_object([loaded, len(history)], "who resumes")
        by_rank, epochs = zip(*found, strict=True)
        if len(set(by_rank)) > 1 and any(by_rank[1:]):
            replicas.require_same_checkpoint(loaded, "a state")
        if epochs[0] == 0 or set(epochs) != {0, epochs[0]}:
            return False
        history[:] = broadcast_object(history, "the history")
        return True


class SynchronizeBuffers(DistributedCallback):
    """After each training pass: average running statistics, weighted by samples; copy other buffers from rank 0.

    Evaluations and checkpoints then use statistics of the whole data, equal on all ranks. A batch without samples on a
    rank doesn't change that rank's statistics. Put it after :class:`ShardData`, which divides the batch.

    Args:
        sync_batchnorm: Make the model's BatchNorm layers use global batch statistics while the Trial runs, see
            :class:`ddp_callbacks.BatchNormSynchronizer`. They are restored when ``run``, ``evaluate`` or ``predict``
            returns or raises. This sets ``state[WEIGHS_LOSS]``, so that :class:`AllReduceGradients` weights the loss
            before backward instead of the gradients after it; gradients through these layers are then exact.
    """

    def __init__(self, sync_batchnorm: bool = False) -> None:
        super().__init__()
        self._sync_batchnorm = sync_batchnorm
        self._synchronizer: BatchNormSynchronizer | None = None
        self.samples = 0.0
        """The number of this rank's samples in the pass, which weigh its running statistics."""
        self._undo: list[Callable[[], None]] = []  # what a padding batch does to running statistics

    def on_init(self, state: State) -> None:
        super().on_init(state)
        if self._sync_batchnorm:
            state[WEIGHS_LOSS] = True

    def on_start(self, state: State) -> None:
        # In predict() a rank has whole batches. A call within a call finds synchronized layers.
        if self._sync_batchnorm and self._synchronizer is None and aggregator_of(state) is None:
            self._synchronizer = BatchNormSynchronizer(
                state[MODEL], counts=lambda: SHARE not in state or state[SHARE].local > 0
            )

    def on_start_training(self, state: State) -> None:
        self.samples = 0

    def on_sample(self, state: State) -> None:
        share = share_of(state)
        self.samples += share.local
        if share.local == 0:
            self._undo = [undo for _, undo in replicas.remember_statistics(held_by(state))]

    def on_step_training(self, state: State) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def on_end_training(self, state: State) -> None:
        replicas.merge_buffers(held_by(state), self.samples)
        self.samples = 0

    def local_state(self, state: State) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """Continue. On another number of ranks, all count as equal parts of the pass: buffers are merged then."""
        samples = states.of("samples").of_ranks
        self.samples = states.mine["samples"] if states.is_same_world else sum(samples) / states.world_size

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Restore the model's layers after the outermost call."""
        is_outermost = self._synchronizer is None
        try:
            yield
        finally:
            if is_outermost and self._synchronizer is not None:
                self._synchronizer.close()
                self._synchronizer = None


class StopTogether(DistributedCallback):
    """Stop all ranks at the same step if any rank sets ``state[STOP_TRAINING]``. Compare the replicas.

    In training passes whose gradients the ranks synchronize, parameters and the optimizer's state are compared every k
    steps, see :class:`ddp_callbacks.replicas.checks.ReplicaChecks`.

    At the end of each epoch of ``run``, after all other callbacks, one message compares parameters and buffers
    (:func:`ddp_callbacks.replicas.require_equal_replicas`, about one pass over the model's memory), the decisions to
    stop and the random states: ranks that have drawn another amount than rank 0 get its state again. Ranks that read
    merged epoch metrics decide the same anyway; this covers decisions that differ.

    After each step, which costs a small message, the ranks agree only if a callback may stop there: ``TerminateOnNaN``
    on one rank's running loss, ``EarlyStopping(step_on_batch=True)``, or a user's callback with an event after the
    forward pass. This must be the last callback; it moves itself there.

    Args:
        on_divergence: See :func:`ddp_callbacks.replicas.equality.repair_or_raise`.

    Raises:
        MismatchError: On every rank; names the tensors that differ, the ranks and hosts.
    """

    _meeting: Sequence[str] = ()  # the events after which the ranks agree
    _checks: ReplicaChecks | None = None  # of this run's training

    def __init__(self, on_divergence: OnDivergence = "raise") -> None:
        super().__init__()
        self._on_divergence: OnDivergence = on_divergence

    def on_init(self, state: State) -> None:
        super().on_init(state)
        callbacks = state[CALLBACK_LIST]
        # A new list: Torchbearer is iterating over the old one.
        callbacks.callback_list = [other for other in callbacks.callback_list if other is not self] + [self]

    def on_start(self, state: State) -> None:
        callbacks = list(state[CALLBACK_LIST])
        self._meeting = [name for name, events in _MAY_STOP.items() if any(_may_stop(one, events) for one in callbacks)]
        self._checks = None
        if RUN_RANDOM_STATE in state:  # another callback may have drawn on some ranks only
            state[RUN_RANDOM_STATE].synchronize()

    def on_start_training(self, state: State) -> None:
        if self._checks is None and self.world_size > 1 and STEP_TIMES in state:
            self._checks = ReplicaChecks(held_by(state), state[STEP_TIMES], self._on_divergence)

    def on_sample(self, state: State) -> None:
        if self._checks is not None:
            self._checks.times.mark("between steps")

    def on_step_training(self, state: State) -> None:
        if self._checks is not None:
            self._checks.after_step([state[OPTIMIZER]], state[torchbearer.EPOCH], state[torchbearer.BATCH])
        self._agree(state, "on_step_training")

    def on_step_validation(self, state: State) -> None:
        self._agree(state, "on_step_validation")

    def on_checkpoint(self, state: State) -> None:
        when = f"at the end of epoch {state[torchbearer.EPOCH]}"
        random_state: RunRandomState | None = state.get(RUN_RANDOM_STATE)
        own = [bool(state[STOP_TRAINING]), random_state and random_state.checksums()]
        of_ranks = replicas.require_equal_replicas(
            held_by(state), when, None, own, self._on_divergence, [state[OPTIMIZER]]
        )
        stops, of_random = zip(*of_ranks, strict=True)
        self._stop_all(state, stops)
        if random_state is not None:
            random_state.follow(of_random)

    def _agree(self, state: State, event: str) -> None:
        if event in self._meeting:
            own = bool(state[STOP_TRAINING])
            self._stop_all(state, all_gather_object(own, "whether to stop the Trial"))

    def _stop_all(self, state: State, stops: Sequence[bool]) -> None:
        state[STOP_TRAINING] = any(stops)
        if self.world_size > 1:
            tell_lone_decision(stops, _STOPS)


def _may_stop(callback: Callback, events: tuple[str, ...]) -> bool:
    if isinstance(callback, EarlyStopping):
        return bool(callback.step_on_batch)
    return isinstance(callback, TerminateOnNaN) or handles(callback, events)
