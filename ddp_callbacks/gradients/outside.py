"""Copy what a step names outside of its objects, so that computing it once more leaves no trace there either.

That is: global variables, variables of enclosing functions, and attributes of classes and functions, all of the
program's own code: a counter of steps, say, or a dict with a value for each sample.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from types import BuiltinMethodType, MethodType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks._torch import forward_hooks
from ddp_callbacks.data.global_state import generator_types
from ddp_callbacks.data.nested import is_array
from ddp_callbacks.data.own_code import Reached, is_own
from ddp_callbacks.gradients.copies import Ignoring, copied

_ENTRIES = 1000  # of a list or dict whose entries are copied; of a longer one, only which entries it has
_OBJECTS = 10_000  # that are copied
_LARGEST = 1 << 26  # bytes of an array
_FIXED = (int, float, str, NoneType)
_CONTAINERS = (dict, list, set, deque)
_COPIED = (*_FIXED, *_CONTAINERS, argparse.Namespace, SimpleNamespace)
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # of a function's arguments


class _Variable(NamedTuple):
    name: str
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
    reached = _reached_by(parts)
    variables, owners = _variables_of(reached), [*reached.functions, *reached.classes]
    with ExitStack() as stack:
        with suppress(Exception):  # a module may refuse to be copied
            modules = {id(each.value): each.value for each in variables if _is_fixed(each.value)}
            stack.enter_context(copied([modules[each] for each in modules.keys() - memo.keys()], memo, ignores=True))
        copies = _Copies(memo)
        made = [copies.of(each.value) for each in variables]
        for each, found in zip(variables, made, strict=True):
            stack.callback(each.assign, each.value)
            each.assign(found)
        owners += [each.value for each in variables if _is_empty(each.value)]
        for owner in owners:
            stack.callback(_forget_others, owner, set(vars(owner)))
        yield


def _forget_others(owner: Any, known: set[str]) -> None:
    """Take away the attributes that a step has made."""
    for name in vars(owner).keys() - known:
        if not name.startswith("__"):
            delattr(owner, name)


def _is_empty(value: Any) -> bool:
    """Whether this is an object of the program's without attributes: it may be known by its identity."""
    return is_own(type(value)) and getattr(value, "__dict__", None) == {}


def _is_fixed(value: Any) -> bool:
    """Whether this is a module without parameters to train, such as a loss function with a buffer."""
    return isinstance(value, nn.Module) and not any(each.requires_grad for each in value.parameters())


def _reached_by(parts: Iterable[Any]) -> Reached:
    layers = [layer for part in parts if isinstance(part, nn.Module) for layer in part.modules()]
    return Reached([*parts, *layers, *(hook for layer in layers for hook in forward_hooks(layer))])


def _variables_of(reached: Reached) -> list[_Variable]:
    """Return the variables that hold what may be copied, or are assigned: a handler of signals may set others."""
    assigned = reached.assigned()
    return [each for each in _named_by(reached) if each.name in assigned or not isinstance(each.value, _FIXED)]


def _named_by(reached: Reached) -> Iterator[_Variable]:
    for variables, names in reached.globals():
        for name in names:
            yield _Variable(name, variables[name], functools.partial(variables.__setitem__, name))
    for owner in (*reached.functions, *(each for each in reached.classes if not issubclass(each, Enum))):
        for name, value in vars(owner).items():
            if _is_copied(value) and not name.startswith("__"):
                yield _Variable(name, value, functools.partial(setattr, owner, name))
    for function in reached.functions:
        for name in _DEFAULTS:
            yield _Variable(name, getattr(function, name), functools.partial(setattr, function, name))
    for name, cell in reached.cells():
        yield _Variable(name, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))


def _is_copied(value: Any) -> bool:
    """Whether a value is a number, a text, or something that :class:`_Copies` may copy."""
    if isinstance(value, nn.Module | DataLoader | Dataset | type) or hasattr(type(value), "__del__"):
        return False
    is_known = is_array(value) or isinstance(value, (*_COPIED, *generator_types()))
    return is_known or (is_own(type(value)) and bool(getattr(value, "__dict__", None)))


class _Refusing:
    """Stands for an iterator that cannot be copied: the step cannot be computed without moving it."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise RuntimeError("an iterator is used that cannot be copied")


class _Copies:
    """Copies of what code may change in place, and of its entries and attributes.

    Args:
        memo: Copies that exist, by the ``id`` of the original. Gets those that are made.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo, self._most = memo, len(memo) + _OBJECTS

    def of(self, value: Any) -> Any:
        """Return the copy of a value, or the value."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, tuple | functools.partial | MethodType | BuiltinMethodType):
            return self._of_parts(value)
        if hasattr(type(value), "__next__") and not is_own(type(value)):
            return _copy_of_iterator(value)
        if not _is_copied(value) or len(self._memo) > self._most:
            return value
        found = value
        with suppress(Exception):  # an object of the program's may refuse to be copied
            found = self._memo[id(value)] = _shallow_copy(value)
            self._fill(found)
        return found

    def _of_parts(self, value: Any) -> Any:
        """Return a tuple of copies, or what calls a copy."""
        if isinstance(value, tuple):
            return tuple(map(self.of, value)) if type(value) is tuple and len(value) <= _ENTRIES else value
        if isinstance(value, functools.partial):
            named = {name: self.of(each) for name, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        owner = self.of(value.__self__)
        return value if owner is value.__self__ else getattr(owner, value.__name__, value)

    def _fill(self, found: Any) -> None:
        """Put copies into a shallow copy."""
        if isinstance(found, dict | list | deque) and len(found) <= _ENTRIES:
            for key, entry in [*(found.items() if isinstance(found, dict) else enumerate(found))]:
                found[key] = self.of(entry)
        elif isinstance(found, argparse.Namespace | SimpleNamespace) or is_own(type(found)):
            vars(found).update({name: self.of(each) for name, each in vars(found).items()})


def _shallow_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_shared = value.requires_grad or value.nbytes > _LARGEST
        return value if is_shared else value.clone()
    if is_array(value):
        return value.copy() if value.nbytes <= _LARGEST else value
    if isinstance(value, generator_types()):
        return copy.deepcopy(value)
    if not is_own(type(value)) or isinstance(value, _CONTAINERS):
        return copy.copy(value)
    found = object.__new__(type(value))  # a class may have one object only
    vars(found).update(vars(value))
    return found


def _copy_of_iterator(value: Any) -> Any:
    if isinstance(value, io.IOBase):
        return Ignoring() if value.writable() else value
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of Python's can be copied until 3.13
        if type(value).__module__ in ("builtins", "itertools"):
            return copy.deepcopy(value)
    return _Refusing()
