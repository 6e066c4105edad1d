"""Random numbers of samples that a data set draws: augmentation, noise.

Each sample draws under a seed of its own, made from the seed of the pass and the sample's place in the order. So what
it draws depends neither on the number of processes nor on workers. The global generators get the seed, and those that
the data set and its transforms hold, or name in their code. The process's own random state stays as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ddp_callbacks.data.global_state import (
    State,
    digest_of,
    generator_types,
    get_global_state,
    is_same_state,
    seed_cpu,
    seed_generator,
    set_global_state,
)
from ddp_callbacks.data.own_code import enclosed, is_own, names_in
from ddp_callbacks.errors import warn

_OBJECTS = 100  # of a data set, in which to look for generators
_ENTRIES = 100  # of a list or dict: of samples there are more
_LOOKS = 50  # samples that are seen not to draw, which takes 0.2 ms each, before batches get no seeds


class SeededIndices(list[Any]):
    """The indices of a batch. Whatever iterates over them, as torch's loaders do, loads each sample under its seed.

    Args:
        indices: The indices.
        seeds: What the seed of each sample is made from, along with its place among the indices.
        first: The place of the first one in the batch that all processes load together.
        loading: Keeps this process's random state apart. Workers, which unpickle the indices, need none.
    """

    def __init__(self, indices: list[Any], seeds: tuple[int, ...], first: int, loading: Loading | None = None) -> None:
        super().__init__(indices)
        self._seeds, self._first, self._loading = seeds, first, loading

    def __iter__(self) -> Iterator[Any]:
        if self._loading is not None:
            return self._loading.apart(self)
        return self._seeded()

    def __reduce__(self) -> Any:
        return type(self), (self[:], self._seeds, self._first)

    def _seeded(self) -> Iterator[Any]:
        own = _of_worker()
        for place, index in enumerate(self[:]):
            self.seed(place, own)
            yield index
            if not place and (worker := get_worker_info()) and worker.id == 0:  # one tells it for all
                _look_for_more(worker.dataset, own)

    def seed(self, place: int, own: Sequence[Any]) -> None:
        """Seed what a sample draws from the global generators and those of the data set, by its place in the batch."""
        _seed((*self._seeds, self._first + place), own)


class SeededIndex:
    """The index of a sample that is loaded by itself. Unpickling it in a worker seeds its draws, and returns it."""

    def __init__(self, index: Any, seeds: tuple[int, ...]) -> None:
        self._index, self._seeds = index, seeds

    def __reduce__(self) -> Any:
        return _arrive, (self._index, self._seeds)


def _arrive(index: Any, seeds: tuple[int, ...]) -> Any:
    _seed(seeds, _of_worker())
    return index


def _seed(seeds: tuple[int, ...], own: Sequence[Any]) -> None:
    seed = digest_of(*seeds)
    seed_cpu(seed)
    for number, generator in enumerate(own, 1):
        seed_generator(generator, seed ^ number)


def _of_worker() -> list[Any]:
    """Return the generators of the data set in this worker of a loader."""
    worker = get_worker_info()
    return [] if worker is None else generators_of(worker.dataset)


def _look_for_more(dataset: object, known: Sequence[Any]) -> None:
    """Warn if a data set has made a generator, which had no seed, while it loaded a sample."""
    if len(generators_of(dataset)) > len(known):
        warn(
            "the data set makes a random generator while it loads a sample, whose random numbers then depend on the "
            "number of processes and workers. Make the generator in __init__."
        )


def generators_of(dataset: object) -> list[Any]:
    """Return the generators that a data set holds or may use, or what it holds: what it wraps, its transforms."""
    kinds, found = generator_types(), dict[int, Any]()
    seen, left = {id(dataset)}, deque([dataset])
    while left and len(seen) < _OBJECTS:
        for value in _used_by(left.popleft()):
            if isinstance(value, kinds):
                found[id(value)] = value
            elif id(value) not in seen and _may_use(value):
                seen.add(id(value))
                left.append(value)
    return list(found.values())


def _used_by(owner: Any) -> Iterable[Any]:
    """Return what an object holds, or what its code names."""
    if type(owner) in (list, tuple, dict):
        values = owner.values() if type(owner) is dict else owner
        return values if len(values) <= _ENTRIES else ()
    if isinstance(owner, partial):
        return (owner.func, *owner.args, *owner.keywords.values())
    if isinstance(owner, MethodType):
        return (owner.__self__, owner.__func__)
    if isinstance(owner, FunctionType):
        named = (owner.__globals__.get(name) for name in names_in(owner.__code__))
        return (*enclosed(owner).values(), *named)
    if isinstance(owner, type):
        return [getattr(value, "__func__", value) for value in vars(owner).values()]
    slots = [getattr(owner, name, None) for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return (*getattr(owner, "__dict__", {}).values(), *slots, *type(owner).__mro__)


def _may_use(value: Any) -> bool:
    if isinstance(value, FunctionType | type):
        return is_own(value)
    if isinstance(value, ModuleType | torch.Tensor):
        return False
    is_plain = type(value) in (list, tuple, dict) or isinstance(value, MethodType | partial)
    return is_plain or bool(getattr(value, "__dict__", ())) or hasattr(type(value), "__slots__") or is_own(type(value))


class Loading:
    """Keeps the random state of a process apart from what it draws while it loads samples itself.

    If the samples of the first batch draw nothing, later ones get no seeds. Once one draws, its batch is loaded again.

    Attributes:
        draws: Whether samples draw, and get seeds; ``None``: unknown.
    """

    def __init__(self, dataset: object) -> None:
        self.draws: bool | None = None
        self._dataset = dataset
        self._before: State | None = None
        self._own: list[Any] = []  # the data set's generators
        self._indices: SeededIndices | None = None  # of the batch that is being loaded

    def apart(self, indices: SeededIndices) -> Iterator[Any]:
        """Yield the indices of a batch. :meth:`load_again` must follow when the samples are loaded, and :meth:`end`."""
        before = self._begin()
        self._indices, is_unknown, has_drawn = indices, self.draws is None, False
        for place, index in enumerate(indices[:]):
            if self.draws is not False:
                indices.seed(place, self._own)
            looks = is_unknown and place < _LOOKS
            seeded = get_global_state(self._own) if looks else []
            yield index
            if is_unknown and not place:
                _look_for_more(self._dataset, self._own)
            has_drawn = has_drawn or (looks and not is_same_state(seeded, get_global_state(self._own)))
        if is_unknown:
            self.draws = has_drawn
            if not has_drawn:
                set_global_state(before, self._own)

    def load_again(self) -> Any:
        """Return the samples of the batch under their seeds; ``None`` if it had these, or draws nothing."""
        if self.draws is not False or self._before is None:
            return None
        if is_same_state(self._before, get_global_state(self._own)):
            self._before = None
            return None
        self.draws = True
        set_global_state(self._before, self._own)
        load_all: Any = getattr(self._dataset, "__getitems__", None)
        dataset: Any = self._dataset
        return load_all(self._indices) if load_all else [dataset[index] for index in self._indices or ()]

    def seed(self, *seeds: int) -> None:
        """Seed what this process draws for a sample that it loads by itself. :meth:`end` must follow."""
        self.draws = True
        self._begin()
        _seed(seeds, self._own)

    def end(self) -> None:
        """Draw on from the state before, if samples were loaded since."""
        before, self._before = self._before, None
        if before is not None:
            set_global_state(before, self._own)

    def _begin(self) -> State:
        """Keep the states from before, and return them."""
        if self._before is None:
            self._own = generators_of(self._dataset)
            self._before = get_global_state(self._own)
        return self._before
