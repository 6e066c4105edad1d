"""``save_checkpoint`` and ``load_checkpoint``: resume a loop in plain PyTorch at the next batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks._torch import mark_as_stepped
from ddp_callbacks.checkpoints.file import CheckpointFile
from ddp_callbacks.checkpoints.format import LocalStates, describe_loader, describe_model, require_same
from ddp_callbacks.checkpoints.resume import closed_windows, load_buffers
from ddp_callbacks.checkpoints.settings import follow_settings, settings_of
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.global_state import get_global_state, set_global_state
from ddp_callbacks.data.random_state import RunRandomState, seed_by_rank
from ddp_callbacks.data.resuming import Resumable
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.local_sgd import ParameterAverager
from ddp_callbacks.process_group import get_rank, get_world_size

Objects = Mapping[str, Any]

_OBJECTS, _GRADIENTS, _BUFFERS, _OPTIMIZERS, _RANDOM = "objects", "gradients", "buffers", "optimizers", "random"
_SETTINGS = "settings"
_COMPARE = "the comparison of what the ranks save"


class LocalSums(dict[str, Any]):
    """Sums of this rank's part of the data: losses, counts. A dict of numbers and tensors, for ``save_checkpoint``.

    Each rank has different values. On as many ranks each continues from its own; on another number, rank 0 continues
    from the sums over the ranks and the others from zero, so that the sum over the ranks stays the same.

    Args:
        sums: The initial values by name: ``LocalSums(loss=0.0, samples=0)``.
    """

    def __init__(self, **sums: Any) -> None:
        super().__init__(sums)


_OWN = (Resumable, GradientSynchronizer, ParameterAverager, RunRandomState, LocalSums)


def save_checkpoint(file: CheckpointFile | str | os.PathLike[str], objects: Objects) -> None:
    """Save a loop between two batches, so that :func:`load_checkpoint` resumes at the next one. A collective.

    Returns when the file exists. Call it when the loop has finished a batch: after the optimizer's step, or, in the
    middle of an accumulation, after backward. To resume in the middle of a loader's pass, call it inside the ``for``
    over the loader: after a ``break`` the pass is over, and the next one starts from its beginning.

    Each rank saves its own position in the data, random state, accumulated gradients, and whatever else differs between
    the ranks. Everything else, such as the model and the optimizer, is saved by rank 0.

    Args:
        file: A path; or an open :class:`CheckpointFile`, which keeps other jobs away between two saves, too, and can
            write while training continues (``async_save=True``).
        objects: Everything that changes, by name: objects with ``state_dict`` and ``load_state_dict`` (models,
            optimizers, schedulers, scalers, a :class:`GradientSynchronizer`, loaders of :func:`resumable_loader`),
            dicts of numbers that are equal on all ranks (the epoch), and
            :class:`~ddp_callbacks.LocalSums` for numbers that are not.

    Raises:
        CheckpointError: The file cannot be written; the old files remain. Or another job writes it.
        ConfigurationError: An object has no state.
        PeerError: Another rank failed or died.
    """
    with _opened(file) as opened:
        own = {name: _state_of(name, value) for name, value in objects.items() if _is_own(value)}
        buffers = {name: dict(module.named_buffers()) for name, module in _modules(objects).items()}
        tensors = {_GRADIENTS: _gradients(objects, own), _BUFFERS: buffers}
        differing = _which_differ(tensors, opened)
        mine: dict[str, Any] = {name: value for name, value in tensors.items() if name in differing}
        averagers = [value for value in objects.values() if isinstance(value, ParameterAverager)]
        optimizers = {name: value for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
        mine[_OPTIMIZERS] = {name: value.state_dict() for name, value in optimizers.items() if averagers}
        ours = {_GRADIENTS: {} if _GRADIENTS in differing else tensors[_GRADIENTS]}
        with closed_windows(averagers):
            ours[_OBJECTS] = {name: _state_of(name, value) for name, value in objects.items() if not _is_own(value)}
            settings = settings_of(_by_name(objects))
            mine |= {_OBJECTS: own, _RANDOM: get_global_state(), _SETTINGS: settings}
            opened.write(ours, mine, _describe(objects))


def load_checkpoint(file: CheckpointFile | str | os.PathLike[str], objects: Objects) -> bool:
    """Continue from a file of :func:`save_checkpoint`, on any number of ranks. A collective.

    Call it right before the loop, after you have made all objects. On the same number of ranks as before, the loop
    continues with the same bits. On another number, it continues with the next batch of the same order, and running
    statistics are the mean over the ranks. Generators (torch's, Python's, NumPy's) that differ between the ranks when
    you call this then get new states, derived from rank 0's.

    Args:
        file: As in :func:`save_checkpoint`. Only rank 0 needs to see it. A path reads tensors and plain data only; for
            other objects pass ``CheckpointFile(path, weights_only=False)``.
        objects: As in :func:`save_checkpoint`, with the same names.

    Returns:
        Whether there was a file. Without one, nothing changes.

    Raises:
        CheckpointError: The file cannot be read, is not ours, or of a newer version; or it belongs to another model,
            data set or batch size, or has other objects.
        PeerError: Another rank failed or died.
    """
    opened = file if isinstance(file, CheckpointFile) else CheckpointFile(file)
    saved = opened.read()
    if saved is None:
        return False
    require_same(saved.about, _describe(objects), opened.path)
    group = opened.process_group
    states = saved.local_states(get_rank(group), get_world_size(group))
    follow_settings(states.mine.get(_SETTINGS, {}), _by_name(objects), opened.path, states.rank)
    _load_all(objects, saved.shared, states, group)
    return True


def _by_name(objects: Objects) -> list[Any]:
    """Return the objects in an order that does not depend on that of the dict."""
    return [objects[name] for name in sorted(objects)]


def _opened(file: CheckpointFile | str | os.PathLike[str]) -> AbstractContextManager[CheckpointFile]:
    return nullcontext(file) if isinstance(file, CheckpointFile) else CheckpointFile(file)


def _load_all(objects: Objects, shared: dict[str, Any], states: LocalStates, group: dist.ProcessGroup | None) -> None:
    """Load all objects. The random state comes last: loading the others may draw."""
    own: dict[str, Any] = states.mine if states.is_same_world else {}
    for name, value in objects.items():
        if not _is_own(value):
            _load_shared(value, own.get(_OPTIMIZERS, {}).get(name, shared[_OBJECTS][name]))
    gradients = shared[_GRADIENTS] | own.get(_GRADIENTS, {})
    for name, module in _modules(objects).items():
        for key, parameter in module.named_parameters():
            gradient = gradients.get(name, {}).get(key)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        if _BUFFERS in states.mine:
            load_buffers(module, states.of(_BUFFERS).of(name), [1.0] * len(states.of_ranks))
    for name, value in objects.items():
        if _is_own(value):
            _load_own(value, states.of(_OBJECTS).of(name))
    if not any(isinstance(value, RunRandomState) for value in objects.values()):
        _load_random_state(states, group)


def _load_random_state(states: LocalStates, group: dist.ProcessGroup | None) -> None:
    """Load the random states. On another number of ranks, generators that are equal on all ranks now stay equal."""
    by_rank = all_gather_object([checksum_of(part) for part in get_global_state()], _COMPARE, group)
    saved = states.mine[_RANDOM]
    set_global_state(saved)
    if not states.is_same_world:
        seed_by_rank(group)
        own = get_global_state()
        is_alike = [len(set(seen)) == 1 for seen in zip(*by_rank, strict=True)]
        set_global_state([s if alike else o for s, o, alike in zip(saved, own, is_alike, strict=True)])


def _which_differ(tensors: dict[str, Any], file: CheckpointFile) -> list[str]:
    """Return the names of the ``tensors`` that differ between the ranks. A collective."""
    by_rank = all_gather_object([checksum_of(value) for value in tensors.values()], _COMPARE, file.process_group)
    return [name for name, *seen in zip(tensors, *by_rank, strict=True) if len(set(seen)) > 1]


def _gradients(objects: Objects, own: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the models' gradients by name; none if a synchronizer saves those that it has not sent yet."""
    synchronizers = [name for name, value in objects.items() if isinstance(value, GradientSynchronizer)]
    if any(own[name]["gradients"] for name in synchronizers):
        return {}
    return {
        name: {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
        for name, module in _modules(objects).items()
    }


def _modules(objects: Objects) -> dict[str, torch.nn.Module]:
    return {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}


def _describe(objects: Objects) -> dict[str, str]:
    """Return what must be equal in the resumed run."""
    described = {"names of the objects": ", ".join(sorted(objects))}
    described |= {name: describe_model(module) for name, module in _modules(objects).items()}
    for name, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            described[f"groups of parameters of {name}"] = str([len(each["params"]) for each in value.param_groups])
        if isinstance(value, Resumable):
            described |= describe_loader(value, name)
    return described


def _is_own(value: Any) -> bool:
    """Whether each rank has a different state of this object."""
    return isinstance(value, _OWN)


def _state_of(name: str, value: Any) -> Any:
    """Return the state of an object to save.

    Raises:
        ConfigurationError: The object has no ``state_dict`` and ``load_state_dict``, and is no dict.
    """
    if isinstance(value, dict):
        return dict(value)
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise ConfigurationError(
            f"{name!r} must have state_dict and load_state_dict, or be a dict of plain values, got a "
            f"{type(value).__name__}. Make a loader by resumable_loader(); put numbers into a dict."
        )
    return value.state_dict()


def _load_shared(value: Any, state: Any) -> None:
    """Load a state that is equal on all ranks. The object may keep ``state``: pass a new copy to each call."""
    if isinstance(value, dict):
        _replace(value, state)
    else:
        value.load_state_dict(state)
    if isinstance(value, torch.optim.Optimizer) and value.state:
        mark_as_stepped(value)


def _load_own(value: Any, states: LocalStates) -> None:
    """Load the ranks' own states. Local; a collective for a ``ParameterAverager`` on another number of ranks."""
    if isinstance(value, GradientSynchronizer):
        value.load_state_dict(states.of_ranks)
    elif isinstance(value, ParameterAverager) and not states.is_same_world:
        value.load_state_dict({"steps": 0, "weight": 0.0})  # the loaded model was saved with closed windows
        value.outer_step()
    elif isinstance(value, LocalSums):
        _replace(value, states.mine if states.is_same_world else _part_of_sums(states))
    else:
        value.load_state_dict(states.mine)


def _replace(value: dict[str, Any], state: Mapping[str, Any]) -> None:
    value.clear()
    value.update(copy.deepcopy(dict(state)))


def _part_of_sums(states: LocalStates) -> dict[str, Any]:
    names = dict.fromkeys(name for state in states.of_ranks for name in state)
    sums = {name: sum(state[name] for state in states.of_ranks if name in state) for name in names}
    return sums if states.rank == 0 else {name: _zero(value) for name, value in sums.items()}


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
