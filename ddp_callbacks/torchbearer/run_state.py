"""What a run of a Trial knows beside the Trial's ``state_dict``: saved on each rank, and put back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torchbearer

from ddp_callbacks.checkpoints import LocalStates, Saved
from ddp_callbacks.checkpoints.about import describe_loader, describe_model
from ddp_callbacks.checkpoints.attributes import decode, encode, memory_of_model
from ddp_callbacks.data.global_state import set_global_state
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.torchbearer._torchbearer import advance_bar, has_own_closure, metrics_within
from ddp_callbacks.torchbearer.base import DistributedCallback, State, flat_callbacks
from ddp_callbacks.torchbearer.callback_state import CallbackStates, named
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.local_sgd import AverageParameters
from ddp_callbacks.torchbearer.metric_state import kept_state, load_kept_state, load_metric_state, metric_state
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.position import BETWEEN, VALIDATION, Position

_TRAIN = str(torchbearer.TRAIN_DATA)
_DATA = (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA)


class RunState:
    """All of a run that is not in the Trial's ``state_dict``. Every rank makes one; its methods are local.

    Args:
        trial: The Trial.
        callbacks: Its list.
        data: Divides the loaders.
    """

    def __init__(self, trial: Any, callbacks: Any, data: ShardData) -> None:
        self._trial, self._data = trial, data
        self._callbacks = flat_callbacks(callbacks)
        self._random_state = data.random_state or RunRandomState(data.process_group)
        self._others = CallbackStates(self._callbacks, memory_of_model(trial.state[torchbearer.MODEL]))
        self.samples = 0  # of this rank, in the training pass under way

    def note_start(self) -> None:
        """Call it after ``on_start``."""
        self._others.note_start()

    # --- saved ----------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """The Trial's ``state_dict``, which Torchbearer alone can load, without the classes of its callbacks."""
        callbacks = str(torchbearer.CALLBACK_LIST)
        return {str(key): value for key, value in self._trial.state_dict().items() if str(key) != callbacks}

    def own(self, state: State, position: Position) -> dict[str, Any]:
        """What this rank has for itself."""
        return {
            "position": dataclasses.asdict(position),
            "batch": state.get(torchbearer.BATCH),
            "metrics": encode(dict(state[torchbearer.METRICS])),
            "history": self._trial.state[torchbearer.HISTORY],  # its running values are of this rank's samples
            "accumulators": self._accumulators(state) if position.is_within_pass else None,
            "kept": None if position.is_within_pass else kept_state(state[torchbearer.METRIC_LIST]),
            "distributed": {name: one.local_state(state) for name, one in named(self._of(DistributedCallback))},
            "callbacks": self._others.save(),
            "gradients": self._gradients() if self._accumulates() else None,
            "trainable": [parameter.requires_grad for parameter in self._parameters()],
            "loaders": {name: loader.state_dict() for name, loader in self._loaders().items()},
            "random": self._random_state.state_dict(),
        }

    @contextlib.contextmanager
    def closed_windows(self, state: State) -> Iterator[None]:
        """Have a model that any number of ranks can go on from, inside. A collective."""
        with contextlib.ExitStack() as stack:
            for callback in self._of(AverageParameters):
                stack.enter_context(callback.closed_window(state))
            yield

    def let_go(self, state: State) -> None:
        """End the workers of the passes under way, and close the callbacks' files, which go on with the next run."""
        self._others.close_files(state)
        for loader in self._loaders().values():
            if isinstance(loader, ShardedLoader):
                loader.end()

    def _accumulators(self, state: State) -> dict[str, Any]:
        current = next((callback.current for callback in self._of(ReduceMetrics)), None)
        return metric_state(state[torchbearer.METRIC_LIST], current, self.samples)

    def _loaders(self) -> dict[str, Any]:
        """The loaders of the two passes, as they are divided."""
        found = {str(key): (self._trial.state[key] or (None,))[0] for key in _DATA}
        return {name: loader for name, loader in found.items() if hasattr(loader, "state_dict")}

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters()]

    def _accumulates(self) -> bool:
        """Whether gradients may outlive a step: Torchbearer's closure sets them to zero at its start."""
        optimizer = self._trial.state[torchbearer.OPTIMIZER]
        has_own_zero_grad = "zero_grad" in vars(optimizer)
        is_plain = not (has_own_closure(self._trial) or has_own_zero_grad)
        return not (is_plain and type(optimizer).__module__.startswith(("torch.optim", "torchbearer.")))

    # --- put back -------------------------------------------------------------------------------------------------

    def begin(self, saved: Saved) -> Position:
        """Give the Trial what it needs at the start of the run: its epochs, and the sizes of the files that go on."""
        states = self._states(saved)
        self._load_trial(saved, states.mine)
        self._others.load(states.mine["callbacks"])
        if states.rank == 0 or states.is_same_world:
            self._others.continue_files(states.mine["callbacks"])
        return Position(**states.mine["position"])

    def load_loaders(self, saved: Saved, position: Position) -> None:
        """Let the next passes go on in the data. Call it when the loaders are divided."""
        states = self._states(saved).mine["loaders"]
        loaders = self._loaders()
        going_on = loaders.get(_TRAIN) if position.is_within_pass or self._is_endless else None
        if self._trial.state[torchbearer.INF_TRAIN_LOADING] and not self._is_endless:
            for loader in loaders.values():
                loader.tb_iter = None  # otherwise Torchbearer makes an iterator that it does not use
        for name, loader in loaders.items():
            if name in states:
                loader.load_state_dict(states[name])
                if loader is not going_on:
                    loader.start_afresh()

    @property
    def _is_endless(self) -> bool:
        """Whether a pass of the training loader ends where the loader ends, in whatever epoch."""
        generator = (self._trial.state[torchbearer.TRAIN_DATA] or (None,))[0]
        return bool(self._trial.state[torchbearer.INF_TRAIN_LOADING] and getattr(generator, "inf", False))

    def put_back(self, saved: Saved, position: Position, state: State) -> None:
        """Make everything as it was at the cut. The random state is last: what comes before may draw."""
        states = self._states(saved)
        own = states.mine
        self._load_trial(saved, own)
        self._others.put_back(own["callbacks"], self._trial.state[torchbearer.DEVICE])
        for name, callback in named(self._of(DistributedCallback)):
            if name in own["distributed"]:
                callback.load_local_state(states.of("distributed").of(name), state)
        self._put_back_gradients(own)
        printer = getattr(state[torchbearer.CALLBACK_LIST], "callback", None)  # the bar that Torchbearer adds
        for callback in (*self._callbacks, printer):
            advance_bar(callback, position.batches)
        if position.phase != BETWEEN:
            state[torchbearer.METRICS] = self._decoded(own["metrics"])
        if position.phase == VALIDATION:
            state[torchbearer.BATCH] = own["batch"]
        if position.is_within_pass:
            self._put_back_accumulators(states.of("accumulators"), position, state)
        else:
            state[torchbearer.METRIC_LIST].reset(state)  # one that the criterion chooses is chosen there
            load_kept_state(state[torchbearer.METRIC_LIST], self._decoded(own["kept"]))
        if self._random_state.is_open or states.world_size == 1:
            self._random_state.load_state_dict(own["random"])
        else:  # without data all ranks draw the same
            set_global_state(own["random"]["own"])

    def _load_trial(self, saved: Saved, own: dict[str, Any]) -> None:
        for parameter, is_trainable in zip(self._parameters(), own["trainable"], strict=True):
            parameter.requires_grad_(is_trainable)
        self._trial.load_state_dict(saved.shared)
        self._trial.state[torchbearer.HISTORY][:] = own["history"]

    def _put_back_gradients(self, own: dict[str, Any]) -> None:
        if own["gradients"] is not None:
            for parameter, gradient in zip(self._parameters(), own["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _put_back_accumulators(self, states: LocalStates, position: Position, state: State) -> None:
        states = LocalStates(self._decoded(states.of_ranks), states.rank, states.world_size)
        current = next((callback.current for callback in self._of(ReduceMetrics)), None)
        load_metric_state(state[torchbearer.METRIC_LIST], current, states, position.batches)
        if states.is_same_world:
            self.samples = states.mine["samples"]
        else:
            self.samples = sum(one["samples"] for one in states.of_ranks) if states.rank == 0 else 0

    def _decoded(self, value: Any) -> Any:
        return decode(value, self._trial.state[torchbearer.DEVICE])

    def _states(self, saved: Saved) -> LocalStates:
        """New ones."""
        return saved.local_states(self._data.rank, self._data.world_size)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._trial.state[torchbearer.MODEL].parameters()  # type: ignore[no-any-return]

    def _of(self, kind: Any) -> list[Any]:
        return [callback for callback in self._callbacks if isinstance(callback, kind)]


def describe_run(trial: Any, data: ShardData) -> dict[str, str]:
    """What a checkpoint must have in common with the run that goes on from it. Call it before the loaders are divided.

    Args:
        data: Divides the loaders.
    """
    about = {
        "model": describe_model(trial.state[torchbearer.MODEL]),
        "optimizer": type(trial.state[torchbearer.OPTIMIZER]).__name__,
        "metrics": ", ".join(metric.name for metric in metrics_within(trial.state[torchbearer.METRIC_LIST])),
        "batch_size of DDPCallback": str(data.batch_size),
    }
    for key in _DATA:
        generator, steps = trial.state[key] or (None, None)
        about |= {f"steps of {key}": str(steps), **describe_loader(generator, str(key))}
    return about
