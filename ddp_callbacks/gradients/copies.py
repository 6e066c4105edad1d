"""Copy modules and loss functions, so that user code can run once more without leaving a trace in the originals."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks._torch import lazy_copy
from ddp_callbacks.data.nested import leaves_in
from ddp_callbacks.data.own_code import is_own
from ddp_callbacks.replacement import Replacements

_SHARED = (dist.ProcessGroup, DataLoader, Dataset)  # too large, or impossible, to copy


class Ignoring:
    """Stands for an object that cannot be copied, such as an open file, a lock or a writer: its methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> Ignoring:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def copied(parts: Sequence[Any], memo: dict[int, Any], *, ignores: bool = False) -> Iterator[list[Any]]:
    """Yield a deep copy of modules and other objects, which may refer to each other. Local.

    The copy's tensors take no memory until they are written. It shares process groups, loaders and data sets that are
    attributes of a layer. Its layers have no gradient hooks of the originals' parameters.

    Args:
        parts: The objects; functions are not copied.
        memo: As for ``copy.deepcopy``: by the ``id`` of an object that ``parts`` may refer to, what the copy has in its
            place. Gets all that is copied.
        ignores: Whether :class:`Ignoring` stands for attributes of layers that cannot be copied.

    Raises:
        Exception: What ``copy.deepcopy`` raises for an object that cannot be copied.
    """
    modules = [part for part in parts if isinstance(part, nn.Module)]
    attributes = [value for module in modules for layer in module.modules() for value in leaves_in(vars(layer))]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    lazy = {tensor: other for tensor in (*tensors, *attributes) if (other := _lazy(tensor)) is not None}
    shared: dict[int, Any] = {id(value): value for value in attributes if isinstance(value, _SHARED)}
    if ignores:  # what a copy does when it is deleted, such as closing a file, would be done to the original
        shared |= {
            id(value): Ignoring() for value in attributes if is_own(type(value)) and hasattr(type(value), "__del__")
        }
    memo.update(shared | {id(tensor): other for tensor, other in lazy.items()} | memo)
    try:
        yield _deep_copy(list(parts), memo, attributes if ignores else [])
    finally:
        for tensor, other in lazy.items():
            other.data = other.data.new_empty(0)  # what still refers to the copy must not keep the memory
            tensor.data_ptr()  # ends the laziness, without a copy, as nothing else refers to the memory


@contextmanager
def calling_only(memo: Mapping[int, Any], made: list[weakref.ref[nn.Module]]) -> Iterator[None]:
    """Inside, a call of a module that may keep a state, and was neither made here nor by this deep copy, raises.

    Args:
        memo: That of the deep copy.
        made: Gets the modules that are made here.

    Raises:
        RuntimeError: From the call, before it does anything.
    """
    own, make = set(map(id, memo.values())), nn.Module.__init__

    def note(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        own.add(id(module))  # a loss that the step makes
        made.append(weakref.ref(module))
        make(module, *args, **kwargs)

    def check(module: nn.Module, _: object) -> None:
        is_plain = type(module).__module__.startswith("torch.nn.modules") and not module.state_dict()
        if id(module) not in own and not is_plain:
            raise RuntimeError(f"a {type(module).__name__} is called that was not copied")

    with Replacements() as replaced:
        replaced.callback(register_module_forward_pre_hook(check).remove)
        replaced.set(nn.Module, "__init__", note)
        yield


def _deep_copy(parts: list[Any], memo: dict[int, Any], attributes: Sequence[Any]) -> list[Any]:
    """Like ``copy.deepcopy``; of these attributes, :class:`Ignoring` stands for those that it refuses."""

    def is_refused(value: Any) -> bool:
        if isinstance(value, nn.Module | torch.Tensor):
            return False
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            return True
        return False

    made = dict(memo)
    try:
        found = copy.deepcopy(parts, made)
    except Exception:
        made = memo | {id(value): Ignoring() for value in attributes if is_refused(value)}
        found = copy.deepcopy(parts, made)
    memo.update(made)
    return found


def _lazy(tensor: Any) -> torch.Tensor | None:
    """Return a copy that takes no memory until it is written; ``None`` if there is none of this kind of object."""
    with contextlib.suppress(RuntimeError):  # memory that is not torch's own, such as a NumPy array's
        if type(tensor) is nn.Parameter:
            return nn.Parameter(lazy_copy(tensor.detach()), tensor.requires_grad)
        if type(tensor) is torch.Tensor and (tensor.grad_fn is not None or not tensor.requires_grad):
            return lazy_copy(tensor.detach())
    return None
