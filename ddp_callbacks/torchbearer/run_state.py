"""Save and restore, on each rank, the state of a run that the Trial's ``state_dict`` lacks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections import Counter, deque
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import torch
import torchbearer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchbearer import Callback
from torchbearer.callbacks import CSVLogger
from torchbearer.callbacks.tensor_board import AbstractTensorBoard
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from ddp_callbacks.checkpoints import LocalStates, Saved
from ddp_callbacks.checkpoints.format import describe_loader, describe_model
from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.checkpoints.resume import Content, closed_windows, load_buffers
from ddp_callbacks.checkpoints.saved_attributes import attributes_of, load_attributes, set_attributes
from ddp_callbacks.checkpoints.settings import follow_settings, settings_of
from ddp_callbacks.data import attributes
from ddp_callbacks.files import count_lines, keep_lines
from ddp_callbacks.replacement import Replacements
from ddp_callbacks.torchbearer._torchbearer import advance_bar, has_own_closure, metrics_within, scheduler_of
from ddp_callbacks.torchbearer.base import DistributedCallback
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.gradients import AverageParameters
from ddp_callbacks.torchbearer.replicas import SynchronizeBuffers
from ddp_callbacks.torchbearer.state import State, held_by

_TRAIN = str(torchbearer.TRAIN_DATA)
_DATA = (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA)
_STATEFUL = (torch.nn.Module, Optimizer, LRScheduler)
_OTHERS = "ddp_callbacks_others"  # key in the file, which a plain Trial ignores


class RunState:
    """The state of a run that is not in the Trial's ``state_dict``. Every rank makes one, before loaders are divided.

    Args:
        trial: The Trial.
        callbacks: Its list of callbacks.
        data: The callback that divides the loaders.
        recovery: What keeps copies of the run in memory, if anything does.

    Attributes:
        about: Properties that a run must have in common with this one to continue from its file.
    """

    def __init__(self, trial: Any, callbacks: Any, data: ShardData, recovery: Recovery | None = None) -> None:
        self._trial, self._data, self._recovery = trial, data, recovery
        named = _named(callbacks)
        self._ours = {name: one for name, one in named.items() if isinstance(one, DistributedCallback)}
        self._others = {name: one for name, one in named.items() if name not in self._ours}
        self._memory = attributes.memory_of_model(trial.state[torchbearer.MODEL])
        self._at_start: dict[str, attributes.Checksums] = {}
        self._filemodes = {one: one.filemode for one in self._others.values() if isinstance(one, CSVLogger)}
        self.about = _describe(trial, data)

    def note_start(self, state: State) -> None:
        """Note attributes, to save only those that the run changes. Call it after ``on_start``."""
        for callback, mode in self._filemodes.items():
            callback.filemode = mode  # a later call opens the file as without this library
        owners = self._owners(state)
        found = {name: self._attributes(one) for name, one in self._others.items()}
        found |= {name: attributes_of(owner) for name, owner in owners.items()}
        if self._recovery is not None:
            loaders = self._loaders()
            orders = {name: loader.attributes.plain() for name, loader in loaders.items()}
            before = self._recovery.at_start(found | orders, self._trial.state[torchbearer.DEVICE])
            for name, values in before.items():
                if name in loaders:
                    loaders[name].attributes.start_from(values)
                else:
                    set_attributes((self._others | owners)[name], values)
            found |= before
        self._at_start = {name: attributes.checksums_of(values) for name, values in found.items()}

    # --- saved ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def content(self, state: State, batches: int | None, is_last: bool) -> Iterator[Content]:
        """Yield the content of a file. A collective.

        Args:
            batches: The number of batches done in the current training pass; ``None`` between two epochs.
            is_last: Whether no epoch follows, as a callback has stopped the run.
        """
        own = self._own(state) | {"batches": batches, "is_last": is_last}
        averages = [one.averager for one in self._ours.values() if isinstance(one, AverageParameters)]
        with closed_windows(averager for averager in averages if averager is not None):
            yield functools.partial(self._shared, state), own, self.about

    def _shared(self, state: State) -> dict[str, Any]:
        """Return the Trial's ``state_dict`` without its callbacks; Torchbearer can load it without this library.

        One more key has what else of the state can be saved: a criterion with parameters, a second optimizer.
        """
        callbacks = str(torchbearer.CALLBACK_LIST)
        whole = {str(key): value for key, value in self._trial.state_dict().items() if str(key) != callbacks}
        return whole | {_OTHERS: {name: other.state_dict() for name, other in self._stateful(state).items()}}

    def _own(self, state: State) -> dict[str, Any]:
        """Return this rank's own state. Local."""
        return {
            "batch": state.get(torchbearer.BATCH),
            "settings": settings_of(self._parts(state)),
            "metrics": attributes.encode(dict(state.get(torchbearer.METRICS, {}))),
            "losses": attributes.encode({str(key): value for key, value in state.items() if _is_number(value)}),
            "ours": {name: one.local_state(state) for name, one in self._ours.items()},
            "others": {name: self._state_of(name, one) for name, one in self._others.items()},
            "gradients": [parameter.grad for parameter in self._parameters()] if self._accumulates() else None,
            "samples": sum(one.samples for one in self._ours.values() if isinstance(one, SynchronizeBuffers)),
            "buffers": dict(held_by(state).named_buffers()),
            "attributes": {name: self._changed(name, attributes_of(one)) for name, one in self._owners(state).items()},
            "trainable": [parameter.requires_grad for parameter in self._parameters()],
            "loaders": {name: loader.state_dict() for name, loader in self._loaders().items()},
            "random": self._data.random_state.state_dict(),
        }

    def _parts(self, state: State) -> list[Any]:
        """Return the optimizers and schedulers, and other parts."""
        schedulers = [scheduler_of(one) for one in self._others.values() if isinstance(one, TorchScheduler)]
        return [state[torchbearer.OPTIMIZER], *self._stateful(state).values(), *schedulers]

    def _state_of(self, name: str, callback: Callback) -> dict[str, Any]:
        """Return a callback's ``state_dict``, and the state that it lacks."""
        return {
            "state": callback.state_dict(),
            "attributes": self._changed(name, self._attributes(callback)),
            "scheduler": scheduler_of(callback).state_dict() if isinstance(callback, TorchScheduler) else None,
            "rows": _rows(callback) if isinstance(callback, CSVLogger) else None,
        }

    def _changed(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        return attributes.changed(values, self._at_start.get(name, {}))

    def _attributes(self, callback: Callback) -> dict[str, Any]:
        return attributes.plain_attributes(callback, self._memory) if _is_torchbearers(callback) else {}

    def _stateful(self, state: State) -> dict[str, Any]:
        """Return the modules, optimizers and schedulers that the Trial's ``state_dict`` lacks, by their key.

        The last one has the parameters that only an optimizer has.
        """
        own = {*state[torchbearer.MODEL].modules(), state[torchbearer.OPTIMIZER]}
        found = {str(key): value for key, value in state.items() if isinstance(value, _STATEFUL) and value not in own}
        return found | dict([*held_by(state).named_modules()][-1:])

    def _owners(self, state: State) -> dict[str, Any]:
        """Return the model, the criterion and what else the state has of the user's, by key; no optimizers."""
        others = {str(key): state[key] for key in (torchbearer.MODEL, torchbearer.CRITERION)} | self._stateful(state)
        return {name: owner for name, owner in others.items() if not isinstance(owner, Optimizer | LRScheduler)}

    def _loaders(self) -> dict[str, Any]:
        """Return the divided loaders of training and validation."""
        found = {str(key): (self._trial.state[key] or (None,))[0] for key in _DATA}
        return {name: loader for name, loader in found.items() if hasattr(loader, "state_dict")}

    def _accumulates(self) -> bool:
        """Whether gradients may outlive a step: Torchbearer's closure sets them to zero at its start."""
        zero_grad = getattr(self._trial.state[torchbearer.OPTIMIZER].zero_grad, "__func__", None)
        return has_own_closure(self._trial) or zero_grad is not torch.optim.Optimizer.zero_grad

    def let_go(self) -> None:
        """End the workers of the current passes, and close the callbacks' files, which the next run continues."""
        for callback in self._others.values():
            files = [getattr(callback, name, None) for name in ("csvfile", "writer")]
            if isinstance(callback, CSVLogger | AbstractTensorBoard) and any(file is not None for file in files):
                callback.on_end(self._trial.state)
                if batches := getattr(callback, "batch_log_dir", None):
                    callback.close_writer(batches)
        for loader in self._data.divided:
            loader.end()

    # --- put back -------------------------------------------------------------------------------------------------

    def begin(self, saved: Saved) -> tuple[int | None, bool]:
        """Restore what the Trial needs at the start of the run, such as its epochs, and truncate files to continue.

        Returns:
            ``batches`` and ``is_last`` of :meth:`content`.
        """
        states = self._states(saved)
        self._load_trial(saved, states.mine)
        for callback, found in self._saved_others(states.mine):
            callback.load_state_dict(found["state"])
            if found["rows"] is not None and (states.rank == 0 or states.is_same_world):
                _keep_rows(callback, found["rows"])
        return states.mine["batches"], states.mine["is_last"]

    def load_loaders(self, saved: Saved) -> None:
        """Move the loaders to their saved positions. Call it once they are divided."""
        own, loaders, state = self._states(saved).mine, self._loaders(), self._trial.state
        is_endless = state[torchbearer.INF_TRAIN_LOADING] and getattr(loaders.get(_TRAIN), "inf", False)
        for name, loader in loaders.items():
            if state[torchbearer.INF_TRAIN_LOADING] and not is_endless:
                loader.tb_iter = None  # otherwise Torchbearer makes an iterator that it does not use
            loader.load_state_dict(own["loaders"][name])
            # A pass of an endless loader ends where the loader ends, in whatever epoch.
            if name != _TRAIN or (own["batches"] is None and not is_endless):
                loader.start_afresh()

    def put_back(self, saved: Saved, state: State, path: str) -> None:
        """Restore all state as it was at the cut. The random state comes last, because the other steps may draw."""
        states = self._states(saved)
        follow_settings(states.mine.get("settings", {}), self._parts(state), path, states.rank)
        own, device = states.mine, self._trial.state[torchbearer.DEVICE]
        self._load_trial(saved, own)
        self._load_others(saved, states, state)
        for callback, found in self._saved_others(own):
            _put_back_callback(callback, found, device)
        if own["batches"] is not None:
            printer = getattr(state[torchbearer.CALLBACK_LIST], "callback", None)  # the bar that Torchbearer adds
            for callback in (*self._others.values(), printer):
                advance_bar(callback, own["batches"])
            state[torchbearer.METRICS] = attributes.decode(own["metrics"], device)
            state[torchbearer.BATCH] = own["batch"]
            for name, value in attributes.decode(own["losses"], device).items():
                state.setdefault(_key_of(name), value)  # metrics read those of a closure when no batch is left, too
        for name, callback in self._ours.items():
            if name in own["ours"]:
                callback.load_local_state(states.of("ours").of(name), state)
        for parameter, gradient in zip(self._parameters(), own["gradients"] or (), strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._data.random_state.load_state_dict(own["random"])

    def _load_others(self, saved: Saved, states: LocalStates, state: State) -> None:
        for name, other in self._stateful(state).items():
            other.load_state_dict(saved.shared[_OTHERS][name])
        load_buffers(held_by(state), states.of("buffers"), states.of("samples").of_ranks)
        for name, owner in self._owners(state).items():
            load_attributes(owner, states.of("attributes").of(name), state[torchbearer.DEVICE])

    def _load_trial(self, saved: Saved, own: dict[str, Any]) -> None:
        for parameter, is_trainable in zip(self._parameters(), own["trainable"], strict=False):
            parameter.requires_grad_(is_trainable)
        history = copy.deepcopy(saved.shared["history"])  # an evaluation in front of the run adds to its last entry
        self._trial.load_state_dict({**saved.shared, "history": history})

    def _states(self, saved: Saved) -> LocalStates:
        return saved.local_states(self._data.rank, self._data.world_size)

    def _saved_others(self, own: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        return [(one, own["others"][name]) for name, one in self._others.items() if name in own["others"]]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return held_by(self._trial.state).parameters()


def _key_of(name: str) -> Any:
    """Return a key equal to the user's; a new ``StateKey`` would get another name."""
    key = copy.copy(torchbearer.LOSS)
    key.key = key.name = name
    return key


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _named(callbacks: Any) -> dict[str, Any]:
    """Name callbacks by class and place among those of the class: others may have been added since the file."""
    counts: Counter[str] = Counter()
    found = {}
    for callback in callbacks:
        kind = type(callback).__qualname__
        found[f"{kind} {counts[kind]}"] = callback
        counts[kind] += 1
    return found


def _is_torchbearers(callback: Callback) -> bool:
    """Whether a callback is one of Torchbearer's own, of which most have no ``state_dict``."""
    return type(callback).__module__.startswith("torchbearer.")


def _put_back_callback(callback: Callback, saved: dict[str, Any], device: torch.device | str) -> None:
    callback.load_state_dict(saved["state"])
    vars(callback).update(attributes.decode(saved["attributes"], device))
    for value in vars(callback).values():
        if _is_torchbearers(callback) and isinstance(value, GeneratorType | filter):
            deque(value, maxlen=0)  # parameters to clip or decay: the first batch has used them up
    if saved["scheduler"] is not None:
        scheduler_of(callback).load_state_dict(saved["scheduler"])


def _rows(callback: CSVLogger) -> int | None:
    file = getattr(callback, "csvfile", None)
    if file is None or file.closed:
        return None
    file.flush()
    return count_lines(callback.filename)


def _keep_rows(callback: CSVLogger, rows: int) -> None:
    """Cut a CSV file to ``rows`` rows, and append to it. Call this before ``on_start``, which would begin it anew."""
    if os.path.exists(callback.filename):
        keep_lines(callback.filename, rows)
        callback.filemode = "a"
        callback.write_header = callback.write_header and rows == 0


@contextlib.contextmanager
def appended_rows(callbacks: Any) -> Iterator[None]:
    """Let CSV files keep their rows inside, until the run that resumes cuts off what was appended."""
    with Replacements() as replacements:
        for writer in callbacks:
            if isinstance(writer, CSVLogger):
                replacements.set(writer, "filemode", "a")
                replacements.set(writer, "write_header", False)
        yield


def _describe(trial: Any, data: ShardData) -> dict[str, str]:
    about = {
        "model": describe_model(trial.state[torchbearer.MODEL]),
        "optimizer": type(trial.state[torchbearer.OPTIMIZER]).__name__,
        "metrics": ", ".join(metric.name for metric, _ in metrics_within(trial.state[torchbearer.METRIC_LIST])),
        "batch_size of DDPCallback": str(data.batch_size),
    }
    for key in _DATA:
        generator, steps = trial.state[key] or (None, None)
        about |= {f"steps of {key}": str(steps), **describe_loader(generator, str(key))}
    return about
