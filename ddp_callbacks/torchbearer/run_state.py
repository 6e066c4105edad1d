"""What a run of a Trial knows beside the Trial's ``state_dict``: saved on each rank, and put back."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torchbearer
from torchbearer import Callback

from ddp_callbacks.checkpoints import Saved
from ddp_callbacks.comm.agreement import module_settings
from ddp_callbacks.data.random_state import RunRandomState, set_global_state
from ddp_callbacks.data.sharding import ShardedLoader, length_of
from ddp_callbacks.torchbearer._torchbearer import metrics_within
from ddp_callbacks.torchbearer.base import DistributedCallback, LocalStates, State
from ddp_callbacks.torchbearer.callback_state import CallbackStates, named
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.decisions import flat_callbacks
from ddp_callbacks.torchbearer.local_sgd import AverageParameters
from ddp_callbacks.torchbearer.metric_state import (
    kept_state,
    load_kept_state,
    load_metric_state,
    metric_state,
    noting_device,
    on_device,
)
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.position import BETWEEN, TRAINING, VALIDATION, Position

_KEYS = {TRAINING: torchbearer.TRAIN_DATA, VALIDATION: torchbearer.VALIDATION_DATA}
_DATA = tuple(_KEYS.values())


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
        self._others = CallbackStates(self._callbacks)
        self.training_metrics: dict[str, Any] = {}
        self.samples = 0  # of this rank, in the pass under way

    def note_start(self) -> None:
        """Call it after ``on_start``."""
        self._others.note_start()

    # --- saved ----------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """The Trial's ``state_dict``, which Torchbearer alone can load.

        It holds the classes of the callbacks. If one is made in a function, no file can, and their states are left out.
        """
        found = {str(key): value for key, value in self._trial.state_dict().items()}
        if not self._others.can_be_pickled:
            del found[str(torchbearer.CALLBACK_LIST)]
        return found

    def own(self, state: State, position: Position) -> dict[str, Any]:
        """What this rank has for itself."""
        return {
            "position": dataclasses.asdict(position),
            "last_batch": state.get(torchbearer.BATCH),
            "metrics": noting_device(dict(state[torchbearer.METRICS])),
            "history": self._trial.state[torchbearer.HISTORY],  # its running values are of this rank's samples
            "training_metrics": noting_device(self.training_metrics),
            "accumulators": self._accumulators(state) if position.is_within_pass else None,
            "kept": None if position.is_within_pass else noting_device(kept_state(state[torchbearer.METRIC_LIST])),
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
        found: dict[str, Any] = noting_device(metric_state(state[torchbearer.METRIC_LIST], current, self.samples))
        return found

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
        is_plain = getattr(self._trial.closure, "__module__", "") == "torchbearer.bases" and not has_own_zero_grad
        return not (is_plain and type(optimizer).__module__.startswith(("torch.optim", "torchbearer.")))

    # --- put back -------------------------------------------------------------------------------------------------

    def begin(self, saved: Saved) -> None:
        """Give the Trial what it needs at the start of the run: its epochs, and the sizes of the files that go on."""
        own = saved.own(self._rank_in(saved))
        self._set_trainable(own)
        self._load_trial(saved, own)
        self._others.load(own["callbacks"])
        if self._data.rank == 0 or saved.world_size == self._data.world_size:
            self._others.continue_files(own["callbacks"])

    def load_loaders(self, saved: Saved, position: Position) -> None:
        """Let the next passes go on in the data. Call it when the loaders are divided."""
        own = saved.own(self._rank_in(saved))
        loaders = self._loaders()
        going_on = [loaders.get(name) for name in self._under_way(position)]
        if self._trial.state[torchbearer.INF_TRAIN_LOADING] and not self._is_endless:
            for loader in loaders.values():
                loader.tb_iter = None  # otherwise Torchbearer makes an iterator that it does not use
        for name, loader in loaders.items():
            if name in own["loaders"]:
                loader.load_state_dict(own["loaders"][name])
                if not any(loader is other for other in going_on):
                    loader.start_afresh()

    def _under_way(self, position: Position) -> list[str]:
        """Whose passes go on."""
        names = [str(_KEYS[position.phase])] if position.is_within_pass else []
        return [*names, str(torchbearer.TRAIN_DATA)] if self._is_endless else names

    @property
    def _is_endless(self) -> bool:
        """Whether a pass of the training loader ends where the loader ends, in whatever epoch."""
        generator = (self._trial.state[torchbearer.TRAIN_DATA] or (None,))[0]
        return bool(self._trial.state[torchbearer.INF_TRAIN_LOADING] and getattr(generator, "inf", False))

    def end_of_training(self, saved: Saved) -> tuple[dict[str, Any], int]:
        """The metrics and the last batch of a training pass that has ended."""
        own = saved.own(self._rank_in(saved))
        device = self._trial.state[torchbearer.DEVICE]
        return on_device(own["training_metrics"], device), own["last_batch"]

    def callbacks_and_printer(self, state: State) -> list[Callback]:
        """All callbacks, and the progress bar that Torchbearer adds."""
        printer = getattr(state[torchbearer.CALLBACK_LIST], "callback", None)
        return [*self._callbacks, *([] if printer is None else [printer])]

    def put_back(self, saved: Saved, position: Position, state: State) -> None:
        """Make everything as it was at the cut. The random state is last: what comes before may draw."""
        owns = [saved.own(rank) for rank in range(saved.world_size)]
        states = LocalStates(owns, self._data.rank, self._data.world_size)
        own, device = states.mine, state[torchbearer.DEVICE]
        self._set_trainable(own)
        self._load_trial(saved, own)
        self._others.put_back(own["callbacks"])
        for name, callback in named(self._of(DistributedCallback)):
            if name in own["distributed"]:
                callback.load_local_state(states.of("distributed").of(name), state)
        self._put_back_gradients(own)
        self.training_metrics = on_device(own["training_metrics"], device)
        if position.phase != BETWEEN:
            state[torchbearer.METRICS] = on_device(own["metrics"], device)
        if position.is_within_pass:
            self._put_back_accumulators(states.of("accumulators"), position, state)
        else:
            load_kept_state(state[torchbearer.METRIC_LIST], on_device(own["kept"], device))
        if self._random_state.is_open or states.world_size == 1:
            self._random_state.load_state_dict(own["random"])
        else:  # without data all ranks draw the same
            set_global_state(own["random"]["own"])

    def _load_trial(self, saved: Saved, own: dict[str, Any]) -> None:
        callbacks = str(torchbearer.CALLBACK_LIST)  # Torchbearer fails there if one has been added
        self._trial.load_state_dict({key: value for key, value in saved.shared.items() if key != callbacks})
        self._trial.state[torchbearer.HISTORY][:] = own["history"]

    def _put_back_gradients(self, own: dict[str, Any]) -> None:
        if own["gradients"] is not None:
            for parameter, gradient in zip(self._parameters(), own["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _put_back_accumulators(self, states: LocalStates, position: Position, state: State) -> None:
        device = state[torchbearer.DEVICE]
        states = dataclasses.replace(states, of_ranks=[on_device(one, device) for one in states.of_ranks])
        current = next((callback.current for callback in self._of(ReduceMetrics)), None)
        load_metric_state(state[torchbearer.METRIC_LIST], current, states, position.batches)
        if states.is_same_world:
            self.samples = states.mine["samples"]
        else:
            self.samples = sum(one["samples"] for one in states.of_ranks) if states.rank == 0 else 0

    def _set_trainable(self, own: dict[str, Any]) -> None:
        for parameter, is_trainable in zip(self._parameters(), own["trainable"], strict=True):
            parameter.requires_grad_(is_trainable)

    # --- whose states ---------------------------------------------------------------------------------------------

    def _rank_in(self, saved: Saved) -> int:
        return self._data.rank if saved.world_size == self._data.world_size else 0

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._trial.state[torchbearer.MODEL].parameters()  # type: ignore[no-any-return]

    def _of(self, kind: Any) -> list[Any]:
        return [callback for callback in self._callbacks if isinstance(callback, kind)]


def describe_run(trial: Any, data: ShardData) -> dict[str, str]:
    """What a checkpoint must have in common with the run that goes on from it. Call it before the loaders are divided.

    Args:
        data: Divides the loaders.
    """
    model, optimizer = trial.state[torchbearer.MODEL], trial.state[torchbearer.OPTIMIZER]
    settings = {name: text.removesuffix(" frozen") for name, text in module_settings(model).items()}
    checksum = zlib.crc32(repr(sorted(settings.items())).encode())
    numel = sum(parameter.numel() for parameter in model.parameters())
    about = {
        "model": f"{type(model).__name__} with {numel} parameters (checksum of names and shapes: {checksum:08x})",
        "optimizer": type(optimizer).__name__,
        "metrics": ", ".join(metric.name for metric in metrics_within(trial.state[torchbearer.METRIC_LIST])),
        "batch_size of DDPCallback": data.batch_size,
    }
    for key in _DATA:
        generator, steps = trial.state[key] or (None, None)
        about[f"{key}: steps"] = str(steps)
        about |= {f"{key}: {name}": text for name, text in _describe_loader(generator).items()}
    return about


def _describe_loader(loader: Any) -> dict[str, str]:
    if loader is None:
        return {}
    batch_size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    samples = length_of(getattr(loader, "dataset", None))
    return {"batch size": str(batch_size), "samples": str(samples), "batches": str(length_of(loader))}
