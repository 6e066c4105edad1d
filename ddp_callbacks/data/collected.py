"""Find what a program itself collects of its batches: on several processes, each has only what it has computed."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.nested import is_array
from ddp_callbacks.data.own_code import carried_by, counts_sizes, enclosed, functions_of, is_own, read_clocks
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group.presence import exchanges_by_now

_LARGEST = 1 << 20  # numbers in an array that is compared
_ENTRIES = 100  # of a list or dict, in which to look for more
_SMALL = 1 << 12  # numbers in an array that is an entry
_CLOCKS = dict.fromkeys((time.time, time.monotonic, time.perf_counter), 1.0)
_CLOCKS |= dict.fromkeys((time.time_ns, time.monotonic_ns, time.perf_counter_ns), 1e9)  # in a second
OF_PART = -1  # instead of a checksum: the samples of a part are counted, which may be equal on all ranks
_REPLACED = 0  # instead of a checksum: another array is in its place, which each process may have of its last batch
EXCHANGES = {"all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "gather_object"}
_GATHERING = {"torch", "lightning", "pytorch_lightning", "torchbearer", "torchmetrics", "ddp_callbacks"}
_DECORATED = "torchbearer.callbacks.decorators"  # callbacks made from a user's functions
COLLECTS = (
    "each process collects in {names} what it computes itself, so what you compute from it is not that of all samples. "
    "Use a metric, or let all processes gather it before you use it: all_gather_object(own, 'what') of "
    "ddp_callbacks.comm returns what each has."
)


class Collected:
    """What a module or callbacks collect in a pass over the batches.

    That is a list to which each step appends, an array that grows, is written in place or carries something from batch
    to batch, or a number that changes: an attribute, or a variable that their functions name. A callback that measures
    times, or memory, may have other numbers with a fraction on each rank.

    Args:
        is_sized: Whether the code that changes an attribute, by name, may add sizes; by default their owners' code.

    Attributes:
        counts: After the last batch, numbers that count the samples of this rank's parts.
    """

    def __init__(self, is_sized: Callable[[str], bool] | None = None) -> None:
        self._is_sized = is_sized or (lambda attribute: any(counts_sizes(owner, attribute) for owner in self._owners))
        self._owners: list[Any] = []
        self._modules: list[torch.nn.Module] = []  # among these
        self._before: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._exchanges: tuple[int, int] | None = None  # at the end, until the first look at what came after
        self._begin = 0.0
        self._warned: set[str] = set()
        self._samples = self._batches = 0  # of this rank's parts
        self._sizes: set[int] = set()  # of these
        self._carried: set[str] = set()  # names of attributes and variables
        self._begun: dict[str, float] = {}  # numbers before the first batch
        self.counts: list[float] = []

    def begin(self, owners: Iterable[Any], carried: Iterable[str] = (), least: int = 2) -> None:
        """Note, before the first batch, what these objects hold.

        Args:
            carried: Attributes that carry something from batch to batch, in addition to those that their code names.
            least: From how many new entries on a list counts. The first may be that of a pass, or of a comparison, for
                which all ranks compute a whole batch.
        """
        self._least = least
        self._owners = [each for each in owners if may_collect(each)]
        self._modules = [each for each in self._owners if isinstance(each, torch.nn.Module)]
        self._owners += [layer for module in self._modules for layer in _own_layers(module)]
        self._before, self._new, self._begin = {}, {}, time.monotonic()
        self._carried, self._sizes = {*carried, *(name for each in self._owners for name in carried_by(each))}, set()
        trained = _memory_of(self._modules)
        found = self._held_now()
        for name, held in found:
            with suppress(Exception):
                if not (_is_entry(name, held) and _memory(held) in trained):  # of a state_dict
                    self._before[name] = _mark(held)
        self._samples = self._batches = 0
        self._begun, self.counts = dict(self._numbers(found)), []

    def note(self, samples: int) -> None:
        """Note that a batch begins, of which this rank has so many samples."""
        self._samples, self._batches = self._samples + samples, self._batches + 1
        self._sizes.add(samples)

    def _held_now(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        with suppress(Exception):  # an object of the user's may not answer what it is asked
            found.extend(_held_by(self._owners))
        return found

    def _numbers(self, found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
        buffers = [each.named_buffers(type(each).__name__) for each in self._modules]
        for name, held in itertools.chain(found, *buffers):
            with suppress(Exception):
                if isinstance(held, int | float) or _size(held) == 1:
                    yield name, float(held.detach() if isinstance(held, torch.Tensor) else held)

    def is_count(self, name: str, grown: float) -> bool:
        """Whether this has counted the samples of the parts, or so many for each by the sizes that its code reads."""
        if not self._samples or self._batches in (grown, self._samples):
            return False  # these may be counted
        if grown < self._samples or grown % self._samples:
            return False
        return grown == self._samples or self._is_sized(_whole(name).rpartition(".")[2])

    def end(self) -> None:
        """Note, after the last batch, what has changed."""
        seconds = time.monotonic() - self._begin
        found = self._held_now()
        for name, held in found:
            with suppress(Exception):
                if _whole(name) in self._warned or (_is_entry(name, held) and name not in self._before):
                    continue
                new = _new_in(held, self._before.get(name), self._is_carried(name, held), self._least)
                if new is not None and not _is_moment(new, seconds):
                    self._new[name] = new if _is_numbers(new) else checksum_of(new)
                elif new is None and _is_entry(name, held) and checksum_of(held) != self._before[name][-1]:
                    self._new[name] = _REPLACED
        for name, number in self._numbers(found):
            if self.is_count(name, number - self._begun.get(name, 0.0)):
                self.counts.append(number)
                self._new |= {} if _whole(name) in self._warned else {name: OF_PART}
        self._exchanges = exchanges_by_now()

    def _is_carried(self, name: str, held: Any) -> bool:
        """Whether an array carries something from batch to batch, unless it has a row for each sample of a part."""
        return _whole(name).rpartition(".")[2] in self._carried and self._sizes.isdisjoint(getattr(held, "shape", ()))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the ranks exchange what no program could have collected: the states of a metric."""
        before = exchanges_by_now()
        yield
        if self._exchanges == before:
            self._exchanges = exchanges_by_now()

    def checksums(self) -> dict[str, Any]:
        """Return what numbers a list has got, and checksums of what else has changed, by name.

        At the first call since the end, the program may have used it: if the ranks have exchanged anything since, so
        that the program may gather what they have, nothing counts as changed.
        """
        if self._exchanges not in (None, exchanges_by_now()):
            self._new = {}
        self._exchanges = None
        return self._new

    def warn(self, of_ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Warn on rank 0 of what differs between the ranks: see :meth:`checksums`."""
        first, *others = of_ranks
        differ = {name for name in first for other in others if _differ(first[name], other.get(name))}
        differ |= {name for name in first for other in others if self._has_others(name, other)}
        names = [name for name, checksum in first.items() if name in differ or checksum == OF_PART]
        wholes = Counter(map(_whole, names))
        self._warned.update(wholes)
        if names and rank == 0:
            shown = dict.fromkeys(name if wholes[_whole(name)] == 1 else _whole(name) for name in names)
            warn(COLLECTS.format(names=", ".join(shown)))

    def _has_others(self, name: str, other: Mapping[str, Any]) -> bool:
        """Whether another rank has changed other entries of a list or dict, such as those of its samples."""
        return name in self._before and name not in other and _whole(name) in set(map(_whole, other)) - {name}


def _is_numbers(new: Any) -> bool:
    return isinstance(new, list) and len(new) <= _ENTRIES and all(type(each) in (int, float) for each in new)


def _differ(one: Any, other: Any) -> bool:
    """Whether two ranks have collected something else; of numbers, one may have more: it has had more batches."""
    if isinstance(one, list) and isinstance(other, list):
        least = min(len(one), len(other))
        one, other = checksum_of(one[:least]), checksum_of(other[:least])
    return other not in (None, one)


def _whole(name: str) -> str:
    """Return the name of the list or dict that has the entry of this name."""
    return name.partition("[")[0]


def _is_entry(name: str, held: Any) -> bool:
    """Whether this is an array in a list or dict."""
    return is_array(held) and name != _whole(name)


def _memory_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Return where the parameters and buffers of modules are."""
    own = itertools.chain.from_iterable((*each.parameters(), *each.buffers()) for each in modules)
    return {_memory(each) for each in own}


def _memory(array: Any) -> int:
    with suppress(Exception):  # an uninitialized parameter has none, nor has an array of NumPy
        return int(array.data_ptr())
    return id(array)


def _mark(held: Any) -> Any:
    """Return what tells later whether this has changed, without keeping it."""
    if is_array(held):
        return weakref.ref(held), _length(held), checksum_of(held) if _size(held) <= _LARGEST else 0
    if not isinstance(held, list | deque):
        return held
    is_short = len(held) <= _ENTRIES and all(type(each) in (int, float) for each in held)
    return [*held] if is_short else len(held)


def _new_in(held: Any, before: Any, is_carried: bool, least: int) -> Any:
    """Return what has changed since :func:`_mark`: new numbers, or the last of other entries; ``None`` if nothing has.

    Args:
        is_carried: Whether an array in place of another one is the same, changed.
        least: See :meth:`Collected.begin`.
    """
    if isinstance(held, int | float):
        return held if held != before else None
    known, length, checksum = before if isinstance(before, tuple) else (lambda: None, before or 0, 0)
    if isinstance(before, list):
        if len(held) == len(before) and [*held] != before:
            return [*held]
        length = len(before)
    if (first := length + least - 1) < _length(held):
        is_short = isinstance(before, list) and type(held[-1]) in (int, float)
        return [*held][first:] if is_short else [held[first], held[-1]]  # all ranks may compute the last
    is_same = is_array(held) and (is_carried or held is known())
    return held if is_same and _size(held) <= _LARGEST and checksum_of(held) != checksum else None


def _length(held: Any) -> int:
    return len(held) if isinstance(held, list | deque) or held.ndim else 0


def _size(array: Any) -> int:
    return array.numel() if isinstance(array, torch.Tensor) else array.size


def _is_moment(value: Any, seconds: float) -> bool:
    """Whether this, or the last of these, is what a clock has shown in the last seconds."""
    value = value[-1] if isinstance(value, list) and value else value
    is_number = type(value) in (int, float)
    return is_number and any(0 <= clock() - value <= seconds * unit for clock, unit in _CLOCKS.items())


def _held_by(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what these objects, and objects of the user's that they have or name, may collect in, with names."""
    for owner in owners:
        functions = functions_of(owner)
        may_differ = read_clocks(functions) and not isinstance(owner, torch.nn.Module)
        kinds = (list, deque, int) if may_differ else (list, deque, int, float)
        for name, value in _known_to(owner, functions):
            yield from _within(name, value, kinds)
            is_searched = is_own(type(value)) or isinstance(value, Sampler)
            if is_searched and not isinstance(value, type | torch.nn.Module | Dataset | DataLoader):
                for attribute, inner in list(getattr(value, "__dict__", {}).items()):
                    yield from _within(f"{name}.{attribute}", inner, kinds)


def _own_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a module that are of the user's own classes, without metrics, which merge what they have."""
    layers = [layer for layer in module.modules() if layer is not module and is_own(type(layer)) and may_collect(layer)]
    return [
        each for each in layers if not any(kind.__module__.startswith("torchmetrics") for kind in type(each).__mro__)
    ]


def _known_to(owner: Any, functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, and the variables outside of its functions that these name."""
    classes = [vars(kind) for kind in type(owner).__mro__ if is_own(kind)]
    own = ChainMap(getattr(owner, "__dict__", {}), *map(dict, classes))
    yield from ((f"{type(owner).__name__}.{name}", value) for name, value in list(own.items()))
    for function in functions:
        named = function.__globals__
        yield from ((name, named[name]) for name in function.__code__.co_names if name in named)
        yield from enclosed(function).items()


def _within(name: str, value: Any, kinds: tuple[type, ...], depth: int = 2) -> Iterator[tuple[str, Any]]:
    if type(value) in kinds or is_array(value):
        yield name, value
    if not depth or not isinstance(value, dict | list):
        return
    of_entries = kinds if isinstance(value, dict) else (list,)
    entries: Iterable[Any] = dict.items(value) if isinstance(value, dict) else enumerate(value)
    for key, each in list(itertools.islice(entries, _ENTRIES)):
        if type(each) in of_entries or isinstance(each, dict) or (is_array(each) and _size(each) <= _SMALL):
            yield from _within(f"{name}[{key!r}]", each, of_entries, depth - 1)


def may_collect(owner: Any) -> bool:
    """Whether an object is not of a library that gathers, and has no function that may do so itself."""
    module = str(type(owner).__module__)
    if module != _DECORATED and module.partition(".")[0] in _GATHERING:
        return False
    return not any(EXCHANGES.intersection(each.__code__.co_names) for each in functions_of(owner))
