"""Find what a program's own loop sums up in its variables: on several processes, each has only its part."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import torch

from ddp_callbacks.data.collected import COLLECTS, EXCHANGES
from ddp_callbacks.data.gathered import FILLS, gathered_in
from ddp_callbacks.data.own_code import names_in, running_in
from ddp_callbacks.data.sample_seeds import is_of_library, is_own
from ddp_callbacks.errors import frames, warn

_EXCHANGES = EXCHANGES | {"gather", "reduce"}
_PADDED = (
    "{ranks} had no sample of a batch in the loop of {place}, and computed one of another rank's once more: what the "
    "loop sums or collects itself, and gathers, has it twice. Use a metric, or leave out batches for which "
    "fabric.strategy.share.local is 0."
)


class LoopVariables:
    """The sums that loops over batches keep in variables."""

    def __init__(self) -> None:
        self._gathered: set[str] | None = None  # variables that the program gathers somewhere, once it is known
        self._told: set[str] = set()

    def sums(self) -> dict[str, float]:
        """Return the sums of the loop that has just ended, by name, which the program does not gather. Local."""
        frame = next(_own_frames(), None)
        if frame is None:
            return {}
        if self._gathered is None:
            self._gathered = _gathered()
        names = running_in(frame.f_code) - self._gathered
        return {f"{_place(frame)}.{name}": of for name, of in _numbers(frame, names).items()}

    def warn(self, of_ranks: Sequence[Mapping[str, float]], rank: int) -> None:
        """Warn on rank 0 of what differs between the ranks: see :meth:`sums`."""
        first = of_ranks[0]
        differ = [name for name in first if any(other.get(name, first[name]) != first[name] for other in of_ranks)]
        new = [name for name in differ if name not in self._told]
        self._told.update(new)
        if new and rank == 0:
            warn(COLLECTS.format(names=", ".join(new)))

    def warn_of_padding(self, ranks: Sequence[int]) -> None:
        """Warn, once, if the loop that has just ended collects, and these ranks had no sample of a batch. Local."""
        frame = next(_own_frames(), None)
        if not ranks or not self._gathered or frame is None or (place := _place(frame)) in self._told:
            return
        self._told.add(place)
        collects = running_in(frame.f_code) or FILLS.intersection(frame.f_code.co_names)
        if collects and not _asks_for_shares():
            warn(_PADDED.format(ranks=", ".join(f"rank {rank}" for rank in ranks), place=place))


def _numbers(frame: FrameType, names: set[str]) -> dict[str, float]:
    """Return the values of variables that are single numbers."""
    held = frame.f_locals
    values = {name: held[name] for name in sorted(names & held.keys())}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        held.clear()  # a copy, which would keep alive what the function lets go
    tensors = {name: of.detach() for name, of in values.items() if isinstance(of, torch.Tensor) and of.numel() == 1}
    plain = {name: of for name, of in values.items() if type(of) in (int, float)}
    return {name: float(of) for name, of in (plain | tensors).items() if of == of}  # a NaN differs from itself


def _place(frame: FrameType) -> str:
    is_function = frame.f_code.co_name.isidentifier()
    return frame.f_code.co_name if is_function else Path(frame.f_code.co_filename).stem


def _own_frames() -> Iterator[FrameType]:
    return (frame for frame in frames() if not is_of_library(str(frame.f_globals.get("__name__"))))


def _gathered() -> set[str]:
    """Return the variables that the program gathers; all that it has, if its files cannot be read."""
    codes = _codes_of_program()
    gathering = [code for code in codes if not _EXCHANGES.isdisjoint(names_in(code))]
    if not gathering:
        return set()
    try:
        trees = [ast.parse("".join(linecache.getlines(file))) for file in {code.co_filename for code in codes}]
    except SyntaxError:
        trees = []
    found = gathered_in(trees, _EXCHANGES)
    return found or set().union(*(code.co_names + code.co_varnames for code in codes))


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
