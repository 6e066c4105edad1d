"""Copy what a step names outside of its objects, so that computing it once more leaves no trace there either.

That is: global variables, variables of enclosing functions, and attributes of classes and functions, all of the
program's own code: a counter of steps, say, or a dict with a value for each sample.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks._torch import forward_hooks
from ddp_callbacks.data.global_state import generator_types
from ddp_callbacks.data.nested import is_array
from ddp_callbacks.data.own_code import Reached, is_own
from ddp_callbacks.gradients.copies import copied

_ENTRIES = 1000  # of a list or dict whose entries are copied; of a longer one, only which entries it has
_OBJECTS = 10_000  # that are copied
_LARGEST = 1 << 26  # bytes of an array
_CONTAINERS = (dict, list, set, deque)


class _Variable(NamedTuple):
    value: Any
    assign: Callable[[Any], None]


@contextmanager
def outside_copied(parts: Iterable[Any], memo: dict[int, Any]) -> Iterator[None]:
    """Inside, the variables that the code of these objects may name have copies of what they had. Local.

    Shared stay modules with parameters to train, loaders, data sets, arrays of more than 64 MiB, and objects of
    libraries.

    Args:
        parts: Modules, functions and other objects.
        memo: That of the copies of ``parts``, see :func:`.copies.copied`. Gets what is copied.
    """
    variables = [*_variables(parts)]
    with ExitStack() as stack:
        with suppress(Exception):  # a module may refuse to be copied
            modules = {id(each.value): each.value for each in variables if _is_fixed(each.value)}
            stack.enter_context(copied([modules[each] for each in modules.keys() - memo.keys()], memo, ignores=True))
        most = len(memo) + _OBJECTS
        copies = [_copy_of(each.value, memo, most) for each in variables]
        for each, made in zip(variables, copies, strict=True):
            stack.callback(each.assign, each.value)
            each.assign(made)
        yield


def _is_fixed(value: Any) -> bool:
    """Whether this is a module without parameters to train, such as a loss function with a buffer."""
    return isinstance(value, nn.Module) and not any(each.requires_grad for each in value.parameters())


def _variables(parts: Iterable[Any]) -> Iterator[_Variable]:
    """Yield the variables that hold what may be copied."""
    layers = [layer for part in parts if isinstance(part, nn.Module) for layer in part.modules()]
    reached = Reached([*parts, *layers, *(hook for layer in layers for hook in forward_hooks(layer))])
    for variables, names in reached.globals():
        for name in names:
            yield _Variable(variables[name], functools.partial(variables.__setitem__, name))
    for owner in (*reached.functions, *(each for each in reached.classes if not issubclass(each, Enum))):
        for name, value in vars(owner).items():
            if _is_copied(value) and not name.startswith("__"):
                yield _Variable(value, functools.partial(setattr, owner, name))
    for cell in reached.cells():
        yield _Variable(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))


def _is_copied(value: Any) -> bool:
    """Whether a value is a number, text, or something that :func:`_copy_of` may copy."""
    if isinstance(value, nn.Module | DataLoader | Dataset | type):
        return False
    kinds = (int, float, str, tuple, *_CONTAINERS, *generator_types())
    return value is None or is_array(value) or isinstance(value, kinds) or is_own(type(value))


def _copy_of(value: Any, memo: dict[int, Any], most: int) -> Any:
    """Return a copy of what code may change in place, with copies of its entries or attributes; else the value."""
    if id(value) in memo:
        return memo[id(value)]
    if not _is_copied(value) or len(memo) > most:
        return value
    found = value
    with suppress(Exception):  # an object of the program's may refuse to be copied
        found = memo[id(value)] = _shallow_copy(value)
        if isinstance(found, dict) and len(found) <= _ENTRIES:
            found.update({key: _copy_of(each, memo, most) for key, each in value.items()})
        elif isinstance(found, list | deque) and len(found) <= _ENTRIES:
            for index, each in enumerate(value):
                found[index] = _copy_of(each, memo, most)
        elif is_own(type(found)):
            vars(found).update({name: _copy_of(each, memo, most) for name, each in vars(value).items()})
    return found


def _shallow_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_shared = value.requires_grad or value.nbytes > _LARGEST
        return value if is_shared else value.clone()
    if is_array(value):
        return value.copy() if value.nbytes <= _LARGEST else value
    return copy.copy(value) if not isinstance(value, generator_types()) else copy.deepcopy(value)
