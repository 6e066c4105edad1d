"""Copy modules and loss functions, so that user code can run once more without leaving a trace in the originals."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks._torch import lazy_copy
from ddp_callbacks.errors import ConfigurationError

_SHARED = (dist.ProcessGroup, DataLoader, Dataset)  # too large, or impossible, to copy
_STATELESS = (type, ModuleType, torch.Tensor)


@contextmanager
def copied(parts: Sequence[Any], instead: Mapping[int, Any]) -> Iterator[list[Any]]:
    """Yield a deep copy of modules and other objects, which may refer to each other. Local.

    The copy's tensors take no memory until they are written. It shares process groups, loaders and data sets that are
    attributes of a layer. Its layers have no gradient hooks of the originals' parameters.

    Args:
        parts: The objects; functions are not copied.
        instead: By the ``id`` of an object that ``parts`` may refer to, what the copy has in its place.

    Raises:
        ConfigurationError: An object cannot be copied.
    """
    modules = [part for part in parts if isinstance(part, nn.Module)]
    attributes = [value for module in modules for layer in module.modules() for value in vars(layer).values()]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    lazy = {tensor: other for tensor in (*tensors, *attributes) if (other := _lazy(tensor)) is not None}
    shared = {id(value): value for value in attributes if isinstance(value, _SHARED)}
    try:
        yield _deepcopy(parts, {id(tensor): other for tensor, other in lazy.items()} | shared | dict(instead))
    finally:
        for tensor, other in lazy.items():
            other.data = other.data.new_empty(0)  # what still refers to the copy must not keep the memory
            tensor.data_ptr()  # ends the laziness, without a copy, as nothing else refers to the memory


def _deepcopy(parts: Sequence[Any], memo: dict[int, Any]) -> list[Any]:
    try:
        return copy.deepcopy(list(parts), memo)
    except Exception as error:
        names = " and ".join(type(part).__name__ for part in parts)
        raise ConfigurationError(
            f"the gradient of the first batch is computed on a copy, but {names} cannot be copied "
            f"({type(error).__name__}: {error}). Keep what copy.deepcopy refuses outside, or leave verify out."
        ) from error


def _lazy(tensor: Any) -> torch.Tensor | None:
    """Return a copy that takes no memory until it is written; ``None`` if there is none of this kind of object."""
    with contextlib.suppress(RuntimeError):  # memory that is not torch's own, such as a NumPy array's
        if type(tensor) is nn.Parameter:
            return nn.Parameter(lazy_copy(tensor.detach()), tensor.requires_grad)
        if type(tensor) is torch.Tensor and not tensor.requires_grad:
            return lazy_copy(tensor)
    return None


def shares_state(part: Any) -> bool:
    """Whether a copy would share state with its original: functions are not copied, nor what they close over.

    Only closures are seen, of ``part`` itself and of the attributes and hooks of a module's layers.
    """
    functions = [part] if isinstance(part, FunctionType) else []
    if isinstance(part, nn.Module):
        functions = [function for layer in part.modules() for function in _functions(layer)]
    return any(map(_may_change, _closed_over(functions)))


def _functions(layer: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions that a copy of a layer would have, too."""
    state: Any = {}
    with contextlib.suppress(Exception):  # a layer that cannot be copied
        state = layer.__getstate__()
    for name, value in state.items() if isinstance(state, dict) else ():
        if "state_dict" not in name:  # hooks for saving and loading
            inside = value.values() if isinstance(value, dict) else [value]
            yield from (each for each in inside if isinstance(each, FunctionType))


def _closed_over(functions: Sequence[Any]) -> list[Any]:
    """Return what functions close over, and the functions among that, too."""
    found, waiting = {id(function): function for function in functions}, list(functions)
    while waiting:
        for cell in getattr(waiting.pop(), "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                value = cell.cell_contents
                waiting += [] if id(value) in found else [value]
                found[id(value)] = value
    return [value for value in found.values() if not isinstance(value, FunctionType)]


def _may_change(value: Any) -> bool:
    owner = getattr(value, "__self__", value)  # of a method
    return not isinstance(owner, _STATELESS) and (hasattr(owner, "__dict__") or isinstance(owner, list | dict | set))
