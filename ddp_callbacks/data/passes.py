"""The record of a pass of a resumable loader: what its draws depend on, and how far it has come."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ddp_callbacks.data.global_state import (
    State,
    digest_of,
    get_global_state,
    get_state_of,
    own_generators,
    plain_state,
    same_state,
    set_global_state,
    set_state_of,
)
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError

_KEPT = 16  # of the last batches handed out; a host may have drawn this many that it has not used


class BatchEnd(NamedTuple):
    """Where the loader is after a batch.

    Attributes:
        drawn: Number of the loader's batches up to here.
        checksum: Of the last of them.
    """

    drawn: int
    checksum: int


class RandomStates(NamedTuple):
    """A global random state, and those of generators that are attributes of a loader and its samplers."""

    of_process: State
    of_generators: list[State]

    @classmethod
    def of(cls, state: State, sources: Sequence[object]) -> RandomStates:
        """With the generators' current states."""
        return cls(state, states_of_generators(sources))

    def put_back(self, sources: Sequence[object]) -> None:
        set_global_state(self.of_process)
        set_generators(sources, self.of_generators)

    def plain(self) -> list[Any]:
        return [plain_state(self.of_process), list(map(plain_state, self.of_generators))]


def states_of_generators(sources: Sequence[object]) -> list[State]:
    return [get_state_of(generator) for source in sources for generator in own_generators(source)]


def set_generators(sources: Sequence[object], states: Sequence[Sequence[Any]]) -> None:
    """Inverse of :func:`states_of_generators`. If the sources have another number of generators now, nothing is set."""
    generators = [generator for source in sources for generator in own_generators(source)]
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            set_state_of(generator, state)


class Pass:
    """One pass over a resumable loader.

    Args:
        sources: The loader and its samplers, which may have generators.
        number: Of the loader's passes.
        rank: Of this process; its workers draw differently from others'.
        resumed: Where to begin: the ``"pass"`` of a state; ``None``: at the beginning.

    Attributes:
        done: Where the earlier run was after its last batch.
        skipped: Number of steps that it has done.
        is_over: The loader has no batch left.
        beside: What else the state of the earlier run had.
    """

    def __init__(self, sources: Sequence[object], number: int, rank: int, resumed: Mapping[str, Any] | None) -> None:
        self.sources = sources
        self._found = [generator for source in sources for generator in own_generators(source)]
        self.is_resumed = resumed is not None
        self.is_over = False
        self.skipped = self.handed_out = resumed["batches"] if resumed else 0
        self.done = BatchEnd(resumed["drawn"], resumed["checksum"]) if resumed else BatchEnd(0, 0)
        self._ends: deque[tuple[BatchEnd, Any]] = deque(maxlen=_KEPT)
        self.begin_beside(resumed["beside"] if resumed else None)
        self._rank, self._number = rank, number
        self._seed = resumed["seed"] if resumed else _seed_of(RandomStates.of(get_global_state(True), sources), number)
        self._begin_from: RandomStates | None = None
        self._shared: RandomStates | None = None
        self._drawn_to: list[State] = []
        self._generators: list[Any] | None = resumed["generators"] if resumed else None
        self._is_shared = self._generators is not None  # others draw from the generators, too
        if resumed and resumed["draws_from"]:
            of_process, of_generators = resumed["draws_from"]
            self._begin_from = RandomStates(tuple(of_process), of_generators)

    def begin_from_here(self) -> None:
        """Draw the batches from the states of this moment, whatever else the loader draws before."""
        if self._begin_from is None:
            self._begin_from = RandomStates.of(get_global_state(False), self.sources)

    def begin_beside(self, beside: Any) -> None:
        """What the state has before the first batch is handed out."""
        self.beside = beside
        self._ends.clear()
        self._ends.append((self.done, beside))

    def before_drawing(self) -> None:
        """The batches are about to be drawn for the first time."""
        if self._begin_from is not None:
            self._begin_from.put_back(self.sources)

    @property
    def can_skip(self) -> bool:
        """Whether the earlier run had begun to draw."""
        return self._begin_from is not None

    def draws_from(self, shared: SharedRandomState) -> None:
        """Keep what the batches will be drawn from."""
        self._shared = RandomStates.of(shared.state or get_global_state(True), self.sources)

    def draw_alike(self, shared: SharedRandomState) -> None:
        """Let the workers of all ranks draw the same."""
        if not self.is_resumed:
            self._seed = digest_of(self._number, *shared.state[:1])
        self._rank = 0

    def will_draw(self) -> None:
        """A batch will be drawn: notice whether others have drawn from the generators since the last one."""
        states = map(get_state_of, self._found)
        self._is_shared = self._is_shared or not all(map(same_state, states, self._drawn_to))

    def has_drawn(self) -> None:
        """A batch has been drawn."""
        self._drawn_to = list(map(get_state_of, self._found))

    def has_begun(self) -> None:
        """What the earlier run has done is skipped: others' draws from the generators are made up for."""
        if self._generators is not None:
            set_generators(self.sources, self._generators)

    def hand_out(self, end: BatchEnd, beside: Any = None) -> None:
        """A batch has been handed out.

        Args:
            end: Where the loader is.
            beside: What else the state after this batch has.
        """
        self.handed_out += 1
        self._ends.append((end, beside))

    def require_same(self, end: BatchEnd, name: str) -> None:
        """Raise unless the last batch of the earlier run, drawn again, is the same."""
        if self.done.drawn and end.checksum != self.done.checksum:
            raise ConfigurationError(
                f"{name} does not draw the batches of the run that was saved: batch {self.done.drawn - 1} of the pass "
                f"has the checksum {end.checksum}, and had {self.done.checksum}. Go on with the data set, the batch "
                "size and the sampler of that run, and take its randomness from torch's, Python's or NumPy's global "
                "random state, or from generators that are its attributes. If it depends on the epoch, call set_epoch."
            )

    def for_worker(self, part: Sequence[Any], number: int) -> SeededIndices:
        """The indices of a batch as a worker gets them."""
        return SeededIndices(part, digest_of(self._seed, self._rank, number))

    def position(self, batches: int | None) -> dict[str, Any]:
        """See :meth:`ddp_callbacks.data.resuming.Resumable.state_dict`."""
        used = self.handed_out if batches is None else batches
        if not 0 <= self.handed_out - used < len(self._ends):
            raise ConfigurationError(
                f"batches must be the number of batches used in this pass, at most {self.handed_out}, which were "
                f"handed out, and at least {self.handed_out - len(self._ends) + 1}, got {used}."
            )
        end, beside = self._ends[used - self.handed_out - 1]
        return {
            "batches": used,
            "drawn": end.drawn,
            "checksum": end.checksum,
            "seed": self._seed,
            "draws_from": self._shared.plain() if self._shared else None,
            "generators": self._drawn_by_others(),
            "beside": beside,
        }

    def _drawn_by_others(self) -> list[Any] | None:
        """The generators' states, unless they follow from the batches drawn."""
        self.will_draw()
        if self._shared is not None and not self._is_shared:
            return None
        return list(map(plain_state, states_of_generators(self.sources)))


class SeededIndices:
    """The indices of a batch. They arrive in a worker as they are, and its random state is then that of the batch.

    So what a worker draws for a batch depends on neither the worker nor the batches that it has loaded before.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices, self.seed = indices, seed

    def __reduce__(self) -> Any:
        return _arrive, (self.indices, self.seed)


def _arrive(indices: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([seed >> 32, seed & 0xFFFFFFFF])
    return indices


def _seed_of(states: RandomStates, number: int) -> int:
    parts = [part for state in (states.of_process, *states.of_generators) for part in state]
    return digest_of(number, *parts)
