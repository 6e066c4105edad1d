"""Random numbers of samples that a data set draws: augmentation, noise.

Each sample draws under a seed of its own, made from the seed of the pass and the sample's place in the order. So what
it draws depends neither on the number of processes nor on workers. The process's own random state stays as it is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddp_callbacks.data.global_state import (
    State,
    digest_of,
    get_global_state,
    is_same_state,
    seed_cpu,
    set_global_state,
)


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
            return self._loading.apart(self[:], self._seed)
        return self._seeded()

    def __reduce__(self) -> Any:
        return type(self), (self[:], self._seeds, self._first)

    def _seeded(self) -> Iterator[Any]:
        for place, index in enumerate(self[:]):
            self._seed(place)
            yield index

    def _seed(self, place: int) -> None:
        seed_cpu(digest_of(*self._seeds, self._first + place))


class SeededIndex:
    """The index of a sample that is loaded by itself. Unpickling it in a worker seeds its draws, and returns it."""

    def __init__(self, index: Any, seeds: tuple[int, ...]) -> None:
        self._index, self._seeds = index, seeds

    def __reduce__(self) -> Any:
        return _arrive, (self._index, self._seeds)


def _arrive(index: Any, seeds: tuple[int, ...]) -> Any:
    seed_cpu(digest_of(*seeds))
    return index


class Loading:
    """Keeps the random state of a process apart from what it draws while it loads samples itself.

    A data set that has drawn nothing in a whole pass gets no seeds, until it draws.
    """

    def __init__(self) -> None:
        self._before: State | None = None
        self._draws: bool | None = None  # whether the data set draws; None: unknown
        self._has_seeded = False

    def apart(self, indices: list[Any], seed: Callable[[int], None]) -> Iterator[Any]:
        """Yield the indices of a batch, each under its seed. :meth:`end` must follow when the samples are loaded."""
        if self._before is None:
            self._before = get_global_state()
        self._has_seeded = self._draws is not False
        if not self._has_seeded:
            yield from indices
            return
        has_drawn = False
        for place, index in enumerate(indices):
            seed(place)
            if not self._draws:
                untouched = _numbers()
                seed(place)
            yield index
            has_drawn = self._draws or has_drawn or _numbers() != untouched
        self._draws = has_drawn or None

    def seed(self, *seeds: int) -> None:
        """Seed what this process draws for a sample that it loads by itself. :meth:`end` must follow."""
        self._before, self._has_seeded = get_global_state(), True
        seed_cpu(digest_of(*seeds))

    def end_pass(self) -> None:
        """Note whether the data set has drawn."""
        self._draws = bool(self._draws)

    def end(self) -> None:
        """Draw on from the state before, if samples were loaded since."""
        before, self._before = self._before, None
        if before is not None and not is_same_state(before, get_global_state()):
            self._draws = self._draws if self._has_seeded else True
            set_global_state(before)


def _numbers() -> list[float]:
    """Draw a number from each generator: after a seed, it tells whether anything has drawn. States take ten times."""
    numpy = sys.modules.get("numpy")
    own = [float(torch.randint(1 << 62, (), device="cpu")), random.random()]
    return [*own, float(numpy.random.random())] if numpy else own
