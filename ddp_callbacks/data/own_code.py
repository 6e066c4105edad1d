"""Read the code of a user's modules and callbacks: what their functions name tells what they may read or count."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_CLOCKS = {
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "datetime"),
    *("default_timer", "elapsed_time", "psutil", "getrusage", "memory_allocated", "max_memory_allocated"),
}
_MEASURED = re.compile(r"(?i)time|sec|duration|elapsed|speed|throughput|mem|cpu|(^|_)(eta|m?s|rss|[mg]b|per_s)($|_)")
_READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"}
_ASSIGNS = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"}
_OF_VARIABLE = re.compile("_(FAST|NAME|GLOBAL|DEREF)")
_MOST, _ENTRIES = 10_000, 1000  # objects that are looked at; of a list or dict
_SIZES, _WORLD = {"numel", "shape", "size", "len"}, {"world_size", "get_world_size", "num_processes", "num_devices"}


def is_own(kind: Any) -> bool:
    """Whether a class or a function is the program's own, of no library."""
    return not is_of_library(str(kind.__module__))  # code from exec may have none


@functools.cache
def is_of_library(module: str) -> bool:
    """Whether this is no module of the user's own."""
    place = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in {*sys.stdlib_module_names, "ddp_callbacks"} or "-packages" in place


def functions_of(owner: Any) -> list[FunctionType]:
    """Return the functions of the user's own code that an object has, as methods or attributes, also decorated."""
    inherited = [vars(kind).values() for kind in type(owner).__mro__ if is_own(kind)]
    return _own(_closure([*getattr(owner, "__dict__", {}).values(), *itertools.chain(*inherited)]))


def may_read(owner: Any, hook: str, *words: str) -> bool:
    """Whether a hook of the user's, or what it may call, has one of these names or texts in its code."""
    hooks = [each for each in functions_of(owner) if each.__name__ == hook or not each.__name__.startswith("on_")]
    called = _own(_closure(hooks, _named))
    return any({*each.__code__.co_names, *each.__code__.co_consts}.intersection(words) for each in called)


def _closure(
    found: Iterable[Any], next_ones: Callable[[FunctionType], Iterable[Any]] = lambda _: ()
) -> list[FunctionType]:
    """Return the functions among these, and all that can be reached from them."""
    pending, known = [*found], dict[FunctionType, None]()
    while pending:
        function = getattr(each := pending.pop(0), "__func__", each)
        if isinstance(function, FunctionType) and function not in known:
            known[function] = None
            pending += [*enclosed(function).values(), *next_ones(function)]
    return [*known]


def _own(functions: Iterable[FunctionType]) -> list[FunctionType]:
    return [each for each in functions if is_own(each)]


def enclosed(function: FunctionType) -> dict[str, Any]:
    """Return the variables of a function that it has from where it is defined, such as what a decorator calls."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield what a user's function names: global variables, and what its modules of the user's own have."""
    return (space[name] for space, names in _spaces(function) for name in names)


def _spaces(function: FunctionType) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Yield the global variables, and those of the user's modules among them, with the names that a function has."""
    if is_own(function):
        names, known = names_in(function.__code__), function.__globals__
        yield known, known.keys() & names
        for each in (known.get(name, sys.modules.get(name)) for name in names):  # a function may import a module itself
            if isinstance(each, ModuleType) and not is_of_library(each.__name__):
                yield vars(each), vars(each).keys() & names


class Reached:
    """The program's own code that objects may run.

    Attributes:
        functions, classes: Those of the objects, and what these name, enclose or have as attributes.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.functions, self.classes = list[FunctionType](), list[type]()
        pending, known = [*objects], dict[int, Any]()
        while pending and len(known) < _MOST:
            if id(each := pending.pop()) not in known:
                known[id(each)] = each
                pending += self._next(each)

    def _next(self, each: Any) -> Iterable[Any]:
        if isinstance(each, FunctionType):
            self.functions += [each] if is_own(each) else []
            return [*enclosed(each).values(), *_named(each)]
        if isinstance(each, type):
            self.classes += [each] if is_own(each) else []
            return [*vars(each).values(), *each.__bases__] if is_own(each) else []
        if isinstance(each, property | functools.partial | staticmethod | classmethod | MethodType):
            return [getattr(each, name, None) for name in ("__func__", "__self__", "fget", "func")]
        if isinstance(each, dict | list | tuple):
            return itertools.islice(each.values() if isinstance(each, dict) else each, _ENTRIES)
        return [type(each), *getattr(each, "__dict__", {}).values()] if is_own(type(each)) else []

    def globals(self) -> Iterator[tuple[dict[str, Any], set[str]]]:
        """Yield dicts of global variables, and the names among these that the functions have."""
        return itertools.chain.from_iterable(map(_spaces, self.functions))

    def cells(self) -> Iterator[tuple[str, CellType]]:
        """Yield the variables that the functions have from where they are defined, with names."""
        for each in self.functions:
            cells = zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
            yield from ((name, cell) for name, cell in cells if cell != CellType())  # some may be empty yet

    def assigned(self) -> set[str]:
        """Return the names of variables and attributes that the functions assign."""
        return set[str]().union(*(_assigned_in(each.__code__) for each in self.functions))


def measures(owner: Any) -> bool:
    """Whether a function of an object reads a clock, or how much memory is used."""
    return read_clocks(functions_of(owner))


def read_clocks(functions: Iterable[FunctionType]) -> bool:
    """Whether one of these reads a clock, or how much memory is used."""
    return any(not _CLOCKS.isdisjoint(each.__code__.co_names) for each in functions)


def running_in(code: CodeType) -> set[str]:
    """Return the variables that a statement of this code computes from themselves, without those of what measures.

    Functions inside may do so, too.
    """
    if not _CLOCKS.isdisjoint(code.co_names):
        return set()
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    running = {name for each in inner for name in running_in(each) & {*each.co_freevars}}
    read = dict[str, Any]()  # the line in which each was last read
    for each in dis.get_instructions(code):
        if not _OF_VARIABLE.search(each.opname) or each.positions is None:
            continue
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # of one instruction that does two
        for kind, name in zip(re.findall("LOAD|STORE", each.opname), names, strict=False):
            if kind == "LOAD":
                read[name] = each.positions.lineno
            elif read.get(name) == each.positions.lineno:
                running.add(name)
    return running


@functools.cache
def _assigned_in(code: CodeType) -> frozenset[str]:
    inside = [_assigned_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname in _ASSIGNS}
    return frozenset(own).union(*inside)


@functools.cache
def names_in(code: CodeType) -> Sequence[str]:
    """Return the names of globals and attributes in a function, and in those inside of it, such as comprehensions."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return [*code.co_names, *itertools.chain.from_iterable(inside)]


def is_measured(owners: Iterable[Any], name: str) -> bool:
    """Whether a value that one of these objects logs is a time, or memory: by its name, and their code."""
    return names_measure(name) and any(map(measures, owners))


def names_measure(name: str) -> bool:
    """Whether this may be the name of a time, a speed, or memory."""
    return bool(_MEASURED.search(name))


def counts_sizes(owner: Any, attribute: str) -> bool:
    """Whether a function of an object may add the sizes of what it gets to an attribute, without all processes'."""
    names_of_functions = (each.__code__.co_names for each in functions_of(owner))
    return any(attribute in names and reads_sizes(names) for names in names_of_functions)


def reads_sizes(names: Iterable[str]) -> bool:
    """Whether code with these names may read sizes, and not the number of processes."""
    return not _SIZES.isdisjoint(names) and _WORLD.isdisjoint(names)


def carried_by(owner: Any) -> set[str]:
    """Return the attributes and variables that a function of an object reads before it assigns them: running values."""
    return set(itertools.chain.from_iterable(_carried(each.__code__) for each in functions_of(owner)))


@functools.cache
def _carried(code: CodeType) -> frozenset[str]:
    read, carried = list[str](), set[str]()
    for each in dis.get_instructions(code):
        if each.opname in _READS:
            read.append(each.argval)
        elif each.opname in _ASSIGNS and each.argval in read:
            carried.add(each.argval)
        elif each.opname == "STORE_SUBSCR":  # an entry, of what was read last, but for the key
            carried.update(name for name in read[-2:] if read.count(name) > 1)
    return frozenset(carried)
