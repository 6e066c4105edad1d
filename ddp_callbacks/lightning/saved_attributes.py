"""Plain attributes of a module that a fit changes, such as a list of what its steps return, for a file.

Only what has changed since the fit began is in the file: a script may set anything else to another value before it goes
on. Plain are numbers, text, tensors, and lists, tuples and dicts of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ddp_callbacks.comm.checksums import checksum_of, is_dense

_SCALARS = (type(None), bool, int, float, str)
_FOREIGN = ("torch", "torchmetrics", "lightning", "pytorch_lightning")  # packages that save their own, or need none

Checksums = dict[str, int]  # of attributes, by names such as "encoder.outputs"


def checksums_of_attributes(module: torch.nn.Module) -> Checksums:
    """To know later what has changed."""
    return {name: checksum_of(value) for name, value in _plain_attributes(module)}


def save_attributes(module: torch.nn.Module, before: Checksums) -> dict[str, Any]:
    """This rank's attributes that differ from ``before``. Local."""
    changed = {}
    for name, value in _plain_attributes(module):
        if before.get(name) != checksum_of(value):
            is_on_cpu = all(tensor.is_cpu for tensor in _leaves(value) if isinstance(tensor, torch.Tensor))
            changed[name] = {"value": _copy(value), "is_on_cpu": is_on_cpu}
    return changed


def load_attributes(
    module: torch.nn.Module, ranks: Sequence[dict[str, Any]], mine: int | None, device: torch.device, says: bool
) -> None:
    """Inverse of :func:`save_attributes`. Local.

    Args:
        ranks: Of all ranks that wrote the file.
        mine: Which of them is this rank's; ``None`` if there were another number of ranks.
        device: For tensors that were not on the CPU.
        says: Whether this rank warns of attributes that another number of ranks cannot have.
    """
    parts = dict(module.named_modules())
    lost = []
    for name, entry in ranks[mine or 0].items():
        owner, _, attribute = name.rpartition(".")
        if mine is None and not _is_common(name, ranks):
            lost.append(name)
        elif owner in parts:
            value = entry["value"] if entry["is_on_cpu"] else _copy(entry["value"], device)
            setattr(parts[owner], attribute, value)
    if lost and says:
        names = ", ".join(f"{type(module).__name__}.{name}" for name in lost)
        warnings.warn(
            f"{names}: each of the {len(ranks)} processes of the run that was cut had its own. On another number of "
            "processes they begin anew. Keep what is summed over the batches of an epoch in self.log or in a metric of "
            "torchmetrics.",
            stacklevel=2,
        )


def _is_common(name: str, ranks: Sequence[dict[str, Any]]) -> bool:
    """Whether it means the same on any number of ranks, such as a count of steps."""
    values = [each[name]["value"] if name in each else None for each in ranks]
    if len(ranks) == 1:
        return isinstance(values[0], bool | int | str | None)
    return len(set(map(checksum_of, values))) == 1


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of the classes that the user has written, by their names; parameters and buffers are none."""
    tensors = filter(is_dense, [*module.parameters(), *module.buffers()])
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for prefix, part in module.named_modules():
        if _is_foreign(type(part)):
            continue
        inherited = vars(next(kind for kind in type(part).__mro__ if kind in _bases(module))())
        for name, value in vars(part).items():
            if name not in inherited and all(_is_plain(leaf, known) for leaf in _leaves(value)):
                yield f"{prefix}.{name}" if prefix else name, value


def _bases(module: torch.nn.Module) -> set[type]:
    """The classes whose own attributes are none of the user's: those of either package, too."""
    hosts = {kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule" and _is_foreign(kind)}
    return hosts | {torch.nn.Module}


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) not in (list, tuple, dict):
        yield value
        return
    for entry in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(entry)


def _is_plain(leaf: Any, known: set[int]) -> bool:
    """Whether it is a scalar, or a tensor in none of the ``known`` memory."""
    if type(leaf) is torch.Tensor and is_dense(leaf):
        return leaf.untyped_storage().data_ptr() not in known
    return type(leaf) in _SCALARS


def _copy(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copy(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(entry, device) for entry in value)
    return value
