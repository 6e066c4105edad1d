"""Save and load the plain attributes and generators of a module, or of another object, that a run changes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.data.attributes import (
    GeneratorState,
    checksums_of,
    decode,
    is_generator,
    memory_of_model,
    plain_attributes,
)
from ddp_callbacks.data.global_state import generator_types, set_state_of
from ddp_callbacks.data.own_code import is_own
from ddp_callbacks.errors import warn

_LOST = "each of the {} processes of the run that was cut had its own. On another number of processes they are reset."
_KEPT = (
    "each process has now what the only process of the run that was cut had: wrong for a sum over samples, right for "
    "what is equal on all."
)
_LARGEST = 10_000  # numbers in an attribute of an object that is no module, or as many as the model has
_FOREIGN = ("torch", "torchmetrics", "lightning", "pytorch_lightning")  # saved elsewhere, or not needed


def attributes_of(module: Any) -> dict[str, Any]:
    """Return the plain attributes and generators of layers of the user's classes, by names like ``"encoder.outputs"``.

    An object that is no module counts as one layer, and so does an attribute of a layer that is an object of the user's
    classes, such as a schedule. Of modules in such an object, such as an average of the model, there are also the
    parameters and buffers.
    """
    known: Collection[int] = ()
    layers: set[torch.nn.Module] = set()
    largest = _LARGEST
    if isinstance(module, torch.nn.Module):
        known, layers = memory_of_model(module), {*module.modules()}
        largest += sum(each.numel() for each in [*module.parameters(), *module.buffers()] if is_dense(each))
    found: dict[str, Any] = {}
    for prefix, part in _parts_of(module).items():
        own = {}
        if not _is_foreign(type(part)) and hasattr(part, "__dict__"):
            inherited = _inherited(part, module)
            own = {name: value for name, value in _own(part, known, largest).items() if name not in inherited}
        if isinstance(part, torch.nn.Module) and part not in layers:
            own |= _tensors_of(part, known)
        found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return found


def _tensors_of(layer: torch.nn.Module, known: Collection[int]) -> dict[str, torch.Tensor]:
    own = itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    return {
        name: each.detach() for name, each in own if is_dense(each) and each.untyped_storage().data_ptr() not in known
    }


def _own(part: Any, known: Collection[int], largest: int) -> dict[str, Any]:
    generators = {name: value for name, value in vars(part).items() if isinstance(value, generator_types())}
    limit = {} if isinstance(part, torch.nn.Module) else {"largest": largest}
    return plain_attributes(part, known, **limit) | generators


def load_attributes(module: Any, states: LocalStates, device: torch.device | str) -> None:
    """Restore the attributes that had changed. Local.

    On another number of ranks, attributes that differed between the ranks are left out; those of a single rank are
    kept, and may be sums over samples. Rank 0 warns of both, unless ``on_load_checkpoint`` has set what is kept.

    Args:
        states: The result of :func:`ddp_callbacks.data.attributes.changed` on each rank.
        device: For tensors that were not on the CPU.
    """
    now = checksums_of(attributes_of(module)) if len(states.of_ranks) == 1 else {}
    new = [name for name, value in states.mine.items() if now.get(name) != checksum_of(value)]
    doubtful = [name for name in new if not states.is_same_world and not _is_common(name, states)]
    lost = doubtful if len(states.of_ranks) > 1 else []
    set_attributes(module, {name: decode(value, device) for name, value in states.mine.items() if name not in lost})
    if doubtful and states.rank == 0:
        names = ", ".join(f"{type(module).__name__}.{name}" for name in doubtful)
        warn(
            f"{names}: "
            + (_LOST.format(len(states.of_ranks)) if lost else _KEPT)
            + " Keep what is summed over the batches of an epoch in self.log or in a metric."
        )


def set_attributes(module: Any, values: Mapping[str, Any]) -> None:
    """Set attributes, named as by :func:`attributes_of`. Local."""
    parts = _parts_of(module)
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        if owner not in parts:
            continue
        if isinstance(found := getattr(parts[owner], attribute, None), torch.nn.Parameter):
            found.data.copy_(value)
        elif not isinstance(value, GeneratorState):
            setattr(parts[owner], attribute, value)
        elif isinstance(found, generator_types()):
            set_state_of(found, value.state)
        else:
            warn(f"{type(module).__name__}.{name}: the generator starts again. Make it in __init__, to keep its state.")


def _is_common(name: str, states: LocalStates) -> bool:
    """Whether an attribute means the same on any number of ranks, such as a count of steps."""
    values = [each.get(name) for each in states.of_ranks]
    if len(values) == 1:
        return isinstance(values[0], bool | int | str | None) or is_generator(values[0])
    return len(set(map(checksum_of, values))) == 1


def _parts_of(module: Any) -> dict[str, Any]:
    layers = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {"": module}
    owners = {name: layer for name, layer in layers.items() if hasattr(layer, "__dict__")}
    objects = {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, layer in owners.items()
        for name, value in vars(layer).items()
        if _is_of_user(value, layer) and name not in _inherited(layer, module)
    }
    known = {*map(id, layers.values())}  # a torchmetric says of anything that it is equal
    inner = {
        f"{prefix}.{name}.{within}".strip("."): layer
        for prefix, owner in (owners | objects).items()
        if not isinstance(owner, torch.nn.Module)
        for name, value in vars(owner).items()
        if isinstance(value, torch.nn.Module)
        for within, layer in value.named_modules()
        if id(layer) not in known
    }
    return layers | objects | inner


def _is_of_user(value: Any, layer: Any) -> bool:
    """Whether an object's class is the user's, or of the package that the layer's is of, and it holds no data."""
    if isinstance(value, type | torch.nn.Module | Dataset | DataLoader) or not hasattr(value, "__dict__"):
        return False
    own, of_layer = (type(each).__module__.partition(".")[0] for each in (value, layer))
    return own not in _FOREIGN and (own == of_layer or is_own(type(value)))


def _inherited(part: Any, module: Any) -> dict[str, Any]:
    """Return the attributes of an object's class that are not the user's: of ``nn.Module`` or ``LightningModule``."""
    bases = {kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule" and _is_foreign(kind)}
    return next((vars(kind()) for kind in type(part).__mro__ if kind in bases | {torch.nn.Module}), {})


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN
