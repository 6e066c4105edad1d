"""Find what a program's own loop sums up in its variables: on several processes, each has only its part."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.collected import COLLECTS, EXCHANGES, OF_PART, Collected, may_collect
from ddp_callbacks.data.gathered import comprehensions_in, gathered_in
from ddp_callbacks.data.nested import is_array
from ddp_callbacks.data.own_code import (
    is_of_library,
    is_own,
    measures,
    names_in,
    names_measure,
    reads_sizes,
    running_in,
)
from ddp_callbacks.errors import frames, warn

_LOOP = "loop"
_VARIABLE = re.compile(r"\w+\.((?:self\.)?\w+)")  # the name of a loop's variable, after that of the loop
_EXCHANGES = EXCHANGES | {"gather", "reduce"}
_PADDED = (
    "{ranks} had no sample of a batch in the loop of {place}, and computed one of another rank's once more: what the "
    "loop sums or collects itself, and gathers, has it twice. Use a metric, or leave out batches for which "
    "fabric.strategy.share.local is 0."
)


class LoopVariables:
    """The sums that loops over batches keep in variables."""

    def __init__(self) -> None:
        self._gathered: Gathered | None = None  # once it is known
        self._told: set[str] = set()

    def sums(self, loop: Loop) -> tuple[dict[str, float], bool]:
        """Return what has changed in the loop that has just ended, by name, and is not gathered. Local.

        These are its running sums, and checksums of what lists, arrays and objects of the program have got. A NaN is
        a count of the samples of this rank's parts.

        Returns:
            Also whether this rank had no sample of a batch, and the loop has changed something that is gathered.
        """
        if (frame := next(_own_frames(), None)) is None:
            return {}, False
        if self._gathered is None:
            self._gathered = Gathered()
        changed, code = loop.end(frame), frame.f_code
        if (line := f"line {code.co_firstlineno}") in self._gathered.comprehensions and not code.co_name.isidentifier():
            changed[line] = math.nan
        own = {name: of for name, of in changed.items() if not self._gathered.has(name, code)}
        found = {f"{_place(frame)}{'.py, ' if name == line else '.'}{name}": of for name, of in own.items()}
        return found, loop.has_padded and len(own) < len(changed)

    def warn(self, of_ranks: Sequence[Mapping[str, float]], rank: int) -> None:
        """Warn on rank 0 of what differs between the ranks: see :meth:`sums`."""
        first = of_ranks[0]
        differ = [name for name in first if any(other.get(name, first[name]) != first[name] for other in of_ranks)]
        new = [name for name in differ if name not in self._told]
        self._told.update(new)
        if new and rank == 0:
            warn(COLLECTS.format(names=", ".join(new)))

    def warn_of_padding(self, ranks: Sequence[int]) -> None:
        """Warn, once for a place, of the loop that has just ended: these ranks had no sample of a batch. Local."""
        frame = next(_own_frames(), None)
        if not ranks or frame is None or (place := _place(frame)) in self._told:
            return
        self._told.add(place)
        if not _asks_for_shares():
            warn(_PADDED.format(ranks=", ".join(f"rank {rank}" for rank in ranks), place=place))


class Loop:
    """What a loop can collect in: numbers, and the lists, arrays and objects of the program's, of its variables.

    Attributes:
        reads_sizes: Whether its code may ask for the size of a batch.
    """

    def __init__(self) -> None:
        self.has_padded = False  # this rank has had no sample of a batch
        self._before: dict[str, float] = {}
        self._ids: dict[str, int] = {}
        frame = next(_own_frames(), None)
        self._code = None if frame is None else frame.f_code
        names = set() if frame is None else names_in(frame.f_code)
        self.reads_sizes = reads_sizes(names)
        self._collected = Collected(lambda _: self.reads_sizes)
        if frame is None:
            return
        running = running_in(frame.f_code)
        self._before = _numbers(frame, running)
        # An object of the program's, whose attributes are the variables.
        self._variables = type(_LOOP, (), {"__module__": frame.f_globals.get("__name__", "")})()
        with suppress(Exception), self._of(_holders(frame)) as held:  # an object may not answer what it is asked
            self._ids = {name: id(each) for name, each in held.items()}
            self._collected.begin([self._variables], running)

    def note(self, samples: int) -> None:
        """Note that a batch begins, of which this rank has so many samples."""
        self.has_padded = self.has_padded or not samples
        self._collected.note(samples)

    def end(self, frame: FrameType) -> dict[str, float]:
        """Return what has changed, by the name of the variable: numbers, NaN for a count, and checksums."""
        if frame.f_code is not self._code:  # Python has collected an iterator that was left, wherever the program is
            return {}
        running = running_in(frame.f_code)
        found = {name: of for name, of in _numbers(frame, running).items() if of != self._before.get(name)}
        for name, number in found.items():
            if self._collected.is_count(name, number - self._before.get(name, 0.0)):
                found[name] = math.nan
        with suppress(Exception):
            found |= self._filled(_holders(frame), running)
        return found

    def _filled(self, holders: Mapping[str, Any], running: set[str]) -> dict[str, float]:
        known = {name: each for name, each in holders.items() if name in self._ids}
        with self._of({name: each for name, each in known.items() if name in running or id(each) == self._ids[name]}):
            self._collected.end()
        changed: dict[str, dict[str, int]] = {}
        for name, checksum in self._collected.checksums().items():
            variable = _VARIABLE.match(name)
            if variable and not names_measure(name.partition(".")[2]):
                changed.setdefault(variable[1], {})[name] = checksum
        return {name: math.nan if OF_PART in of.values() else checksum_of(of) for name, of in changed.items()}

    @contextmanager
    def _of(self, holders: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Have these variables inside. Afterwards nothing is kept alive."""
        held = vars(self._variables)
        held.update(holders)
        try:
            yield held
        finally:
            held.clear()


def _holders(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a loop's code that can hold several values, and such attributes of ``self``."""
    code = frame.f_code
    named = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    known = {**frame.f_globals, **_locals(frame)}
    found = {name: known[name] for name in sorted(named & known.keys()) if name != "self"}
    found["self"] = known.get("self")
    found |= {f"self.{name}": each for name, each in getattr(found["self"], "__dict__", {}).items()}
    return {name: each for name, each in found.items() if _holds(each) or (name == "self" and _is_object(each))}


def _holds(value: Any) -> bool:
    if isinstance(value, list | deque | dict) or is_array(value):
        return True
    return _is_object(value) and may_collect(value) and not measures(value)


def _is_object(value: Any) -> bool:
    """Whether this is an object of the program's that is not made to be trained or read."""
    is_plain = isinstance(value, type | FunctionType | ModuleType | torch.nn.Module | Dataset | DataLoader)
    return not is_plain and is_own(type(value))


def _locals(frame: FrameType) -> dict[str, Any]:
    held = frame.f_locals
    found = dict(held)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        held.clear()  # a copy, which would keep alive what the function lets go
    return found


def _numbers(frame: FrameType, names: set[str]) -> dict[str, float]:
    """Return the values of variables that are single numbers."""
    held = _locals(frame)
    values = {name: held[name] for name in sorted(names & held.keys())}
    tensors = {name: of.detach() for name, of in values.items() if isinstance(of, torch.Tensor) and of.numel() == 1}
    plain = {name: of for name, of in values.items() if type(of) in (int, float)}
    return {name: float(of) for name, of in (plain | tensors).items() if of == of}  # a NaN differs from itself


def _place(frame: FrameType) -> str:
    is_function = frame.f_code.co_name.isidentifier()
    return frame.f_code.co_name if is_function else Path(frame.f_code.co_filename).stem


def _own_frames() -> Iterator[FrameType]:
    return (frame for frame in frames() if not is_of_library(str(frame.f_globals.get("__name__"))))


class Gathered:
    """The variables that the program gathers."""

    def __init__(self) -> None:
        codes = _codes_of_program()
        self._may_gather = any(not _EXCHANGES.isdisjoint(names_in(code)) for code in codes)
        self._names: set[str] = set()  # empty if it does not, or its files cannot be read
        self.comprehensions: set[str] = set()
        with suppress(SyntaxError, ValueError):
            files = {code.co_filename for code in codes}
            trees = [ast.parse("".join(linecache.getlines(file))) for file in files]
            self.comprehensions, self._names = comprehensions_in(trees), gathered_in(trees, _EXCHANGES, EXCHANGES)

    def has(self, name: str, code: CodeType) -> bool:
        """Whether a variable of this code, or an attribute of ``self``, reaches an exchange."""
        if not self._names or name.startswith("self."):
            return self._may_gather and (not self._names or name.partition(".")[2] in self._names)
        if name in code.co_freevars:
            return any(each.endswith(f".{name}") for each in self._names)
        is_own = code.co_name.isidentifier() and name in {*code.co_varnames, *code.co_cellvars}
        return (f"{code.co_name}.{name}" if is_own else name) in self._names


def _asks_for_shares() -> bool:
    return any("share" in names_in(code) for code in _codes_of_program())


def _codes_of_program() -> set[CodeType]:
    """Return the code of the program that is running, as far as its modules are known."""
    spaces = {id(frame.f_globals): frame.f_globals for frame in _own_frames()}
    known = [value for space in spaces.values() for value in space.values()]
    modules = [each for each in known if isinstance(each, ModuleType) and not is_of_library(each.__name__)]
    known += [value for module in modules for value in vars(module).values()]
    known += [value for each in known if isinstance(each, type) and is_own(each) for value in vars(each).values()]
    functions = [each for each in known if isinstance(each, FunctionType) and is_own(each)]
    return {each.__code__ for each in functions} | {frame.f_code for frame in _own_frames()}
