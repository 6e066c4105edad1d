"""Save and load the plain attributes of a module that a fit changes, such as a list of its steps' outputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.checkpoints.attributes import decode, memory_of_model, plain_attributes
from ddp_callbacks.comm.checksums import checksum_of

_FOREIGN = ("torch", "torchmetrics", "lightning", "pytorch_lightning")  # saved elsewhere, or not needed


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the plain attributes of layers whose class the user has written, by names like ``"encoder.outputs"``."""
    known = memory_of_model(module)
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        if not _is_foreign(type(part)):
            inherited = vars(next(kind for kind in type(part).__mro__ if kind in _bases(module))())
            own = {name: value for name, value in plain_attributes(part, known).items() if name not in inherited}
            found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return found


def load_attributes(module: torch.nn.Module, states: LocalStates, device: torch.device) -> None:
    """Restore the attributes that had changed. Local.

    On another number of ranks, attributes that differed between the ranks are left out, and rank 0 warns of them.

    Args:
        states: The result of :func:`ddp_callbacks.checkpoints.attributes.changed` on each rank.
        device: For tensors that were not on the CPU.
    """
    lost = [name for name in states.mine if not states.is_same_world and not _is_common(name, states)]
    set_attributes(module, {name: decode(value, device) for name, value in states.mine.items() if name not in lost})
    if lost and states.rank == 0:
        names = ", ".join(f"{type(module).__name__}.{name}" for name in lost)
        warnings.warn(
            f"{names}: each of the {len(states.of_ranks)} processes of the run that was cut had its own. On another "
            "number of processes they are reset. Keep what is summed over the batches of an epoch in self.log or in a "
            "metric of torchmetrics.",
            stacklevel=2,
        )


def set_attributes(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Set attributes, named as by :func:`attributes_of`. Local."""
    parts = dict(module.named_modules())
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        if owner in parts:
            setattr(parts[owner], attribute, value)


def _is_common(name: str, states: LocalStates) -> bool:
    """Whether an attribute means the same on any number of ranks, such as a count of steps."""
    values = [each.get(name) for each in states.of_ranks]
    if len(values) == 1:
        return isinstance(values[0], bool | int | str | None)
    return len(set(map(checksum_of, values))) == 1


def _bases(module: torch.nn.Module) -> set[type]:
    """Return the base classes whose attributes are not the user's: ``nn.Module``, and ``LightningModule``."""
    hosts = {kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule" and _is_foreign(kind)}
    return hosts | {torch.nn.Module}


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN
