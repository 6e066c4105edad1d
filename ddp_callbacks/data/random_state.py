"""Random states of the ranks: shared when all ranks must draw the same, distinct otherwise.

The global random state is torch's CPU generator, Python's :mod:`random`, NumPy's if the program has imported it, and
the current device's generator if the process uses CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.codec import pack, unpack
from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.data.global_state import (
    State,
    as_tuples,
    checksum_of_state,
    get_global_state,
    own_generators,
    plain,
    plain_global_state,
    plain_state,
    restore_global_state,
    same_part,
    same_state,
    seed_global,
    set_generators,
    set_global_state,
    states_of_generators,
)
from ddp_callbacks.process_group import get_rank, get_world_size

__all__ = [
    "OwnRandomState",
    "RunRandomState",
    "SharedRandomState",
    "broadcast_rng_state",
    "get_global_state",
    "own_generators",
    "plain_global_state",
    "restore_global_state",
    "seed_by_rank",
    "set_global_state",
]


class OwnRandomState:
    """A random state of its own: that of this moment, kept apart from the global one.

    What is drawn inside ``with own.drawing():`` depends on it alone, not on what was drawn outside in between, so it
    can be drawn again. As long as nothing has drawn outside, the global state advances with it on rank 0, as it would
    without this library.
    """

    def __init__(self) -> None:
        self._state: State = get_global_state(False)
        self._is_kept, self._rank = True, 0

    @property
    def state(self) -> State:
        """What the next :meth:`drawing` draws from. Set it to go on elsewhere."""
        return self._state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._state = tuple(state)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this state inside. Local, no communication."""
        if not self._is_kept:
            yield
            return
        before, own = get_global_state(False), self._state
        untouched = same_state(before, own)
        if not untouched:
            set_global_state(own)
        try:
            yield
        finally:
            self._state = get_global_state(False)
            if not (self._rank == 0 and untouched):
                set_global_state(before)


class SharedRandomState(OwnRandomState):
    """A snapshot of rank 0's global random state, which every rank replays.

    Inside ``with shared.drawing():`` every rank draws what a single process would have drawn from then on. Outside,
    each rank has its separate state.

    The constructor is a collective.

    Args:
        sources: Objects to search for generators (a sampler, a loader). All ranks permanently get rank 0's states of
            them.
        always: Keep the shared state apart with a single process, too.
    """

    def __init__(
        self, sources: Sequence[object] = (), *, group: dist.ProcessGroup | None = None, always: bool = False
    ) -> None:
        super().__init__()
        world_size, self._rank = get_world_size(group), get_rank(group)
        self._is_kept = always or world_size > 1
        if world_size > 1:
            self._state, *states = _broadcast([self._state, *states_of_generators(sources)], group)
            set_generators(sources, states)


def seed_by_rank(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank but 0 a distinct global random state, derived from rank 0's, which is unchanged. A collective.

    It sets torch's states on the CPU and on GPUs, Python's and NumPy's. Dropout and augmentation then differ between
    the ranks, and a run with the same seed on rank 0 and the same number of ranks is reproducible.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) == 1:
        return
    (state,) = _broadcast([get_global_state(False)], group)
    if rank := get_rank(group):
        seed_global(f"{rank}", checksum_of_state(state))


def broadcast_rng_state(group: dist.ProcessGroup | None = None) -> None:
    """Copy rank 0's global random state to every rank: torch's on the CPU, Python's and NumPy's. A collective.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) > 1:
        set_global_state(_broadcast([get_global_state(False)], group)[0])


class RunRandomState:
    """The global random state during a run: distinct per rank while computing, shared inside :meth:`alike`.

    Code that changes parameters at random (a hook that prunes, or reinitializes a layer) must draw the same on all
    ranks; dropout, augmentation and loader workers must not. The shared state is rank 0's, so a hook draws what it
    would draw in a single process, unless rank 0's draws depend on its part of the batch. With a single process nothing
    changes.

    Args:
        group: ``None`` is the default group.

    Attributes:
        is_fresh: Whether nobody has drawn alike since the state was last shared.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = get_rank(group)
        self._shared: State | None = None  # between the first synchronize and the end
        self._sent: State | None = None  # what all ranks have last got
        self._in_batch: State | None = None  # follows from what was sent until it is drawn from
        self._own: State | None = None  # while all ranks draw alike; None if rank 0's state is the shared one
        self.is_fresh = False
        self._is_alike = False
        self._is_in_batch = False  # of the two ways to be alike, this one draws from _in_batch

    @property
    def is_open(self) -> bool:
        """Whether the ranks have distinct states, as they do between the first :meth:`synchronize` and :meth:`end`."""
        return self._shared is not None

    def synchronize(self) -> None:
        """Share rank 0's state from here on; the other ranks derive theirs from it. A collective.

        Everything after this depends only on rank 0's state, so a run can resume from it.
        """
        if get_world_size(self._group) == 1:
            return
        self.accept(_of_rank_0(self.offer(), self._group))

    def offer(self) -> Any:
        """What rank 0 sends of its state, as tensors and plain data; another message may carry it. Local."""
        return _news(get_global_state(False), self._sent or ()) if self._rank == 0 else None

    def accept(self, offered: Any) -> None:
        """As :meth:`synchronize`, with what rank 0 has offered at this moment. Local; every rank calls it."""
        current = get_global_state(False)
        self._sent = current if self._rank == 0 else _updated(self._sent or current, offered)
        self._shared, self._in_batch, self._own = self._sent, None, None
        if self._rank:
            seed_global(f"{self._rank}", checksum_of_state(self._shared))
            self._own = get_global_state(False)
        set_global_state(self._shared if self._is_alike or self._own is None else self._own)
        self.is_fresh = True

    def end(self) -> None:
        """Leave the shared state in place on all ranks. Local."""
        if self._shared is not None and not self._is_alike:
            set_global_state(self._shared)
        self._shared = self._sent = self._in_batch = None

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Draw the same on all ranks inside. Local, no communication; every rank must draw the same amount."""
        if self._is_alike:
            yield
            return
        self._is_alike = True
        self._enter()
        try:
            yield
        finally:
            self._is_alike = False
            self._leave()

    @contextmanager
    def alike_in_batch(self) -> Iterator[None]:
        """Like :meth:`alike`, within a batch: draw from a separate state, since rank 0's has advanced by then."""
        if self._is_alike or self._shared is None:
            yield
            return
        self._own, in_batch = get_global_state(False), self._of_batch()
        self._is_alike, self._is_in_batch = True, True
        set_global_state(in_batch)
        try:
            yield
        finally:
            self._is_alike, self._is_in_batch, self._in_batch = False, False, get_global_state(False)
            set_global_state(self._own or self._shared)  # an evaluation in the batch has synchronized them

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside :meth:`alike_in_batch`, draw from this rank's state."""
        if not self._is_alike or self._own is None:
            yield
            return
        kept = "_in_batch" if self._is_in_batch else "_shared"
        setattr(self, kept, get_global_state(False))
        self._is_alike = False
        set_global_state(self._own)
        try:
            yield
        finally:
            self._own, self._is_alike = get_global_state(False), True
            set_global_state(getattr(self, kept))

    def state_dict(self) -> dict[str, Any]:
        """The random state of this rank, as tensors and plain data. Local.

        It is that between the hooks, wherever this is called: in :meth:`alike`, :meth:`alike_in_batch`, :meth:`apart`.
        """
        current = get_global_state(False)
        own, shared, in_batch = current, self._shared, self._of_batch() if self.is_open else None
        if self._is_in_batch and self._is_alike:
            own, in_batch = self._own or current, current
        elif self._is_alike and shared is not None:
            own, shared = self._own or current, current
        return {
            "rank": self._rank,
            "world_size": get_world_size(self._group),
            "own": plain_state(own),
            "shared": plain_state(shared) if shared else None,
            "in_batch": plain_state(in_batch) if in_batch else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the random state of a :meth:`state_dict`. Local; every rank calls it.

        CUDA's state is set, too, as soon as CUDA is in use.

        Args:
            state: This rank's. If it was saved by another number of ranks, rank 0's on every rank: the other ranks
                derive theirs from it.
        """
        own = tuple(state["own"])
        shared = tuple(state["shared"] or own)
        world_size, is_derived = get_world_size(self._group), state["rank"] != self._rank
        if world_size > 1 and (is_derived or state["in_batch"] is None):
            own = self._derived(own, shared)
        if world_size > 1 and (self.is_open or state["shared"]):
            self._shared, self._sent, self.is_fresh = shared, None, False
            self._in_batch = tuple(state["in_batch"] or self._seeded("hooks of a batch", shared))
        if self._is_alike and self._is_in_batch:
            self._own, current = own, self._in_batch or own
        elif self._is_alike and self._shared is not None:
            self._own, current = own, self._shared
        else:
            current = own
        restore_global_state(current)

    def _of_batch(self) -> State:
        """What :meth:`alike_in_batch` draws from next."""
        if self._in_batch is None:
            assert self._sent is not None
            self._in_batch = self._seeded("hooks of a batch", self._sent)
        return self._in_batch

    def _derived(self, own: State, shared: State) -> State:
        """This rank's state after that of rank 0."""
        return own if self._rank == 0 else self._seeded(f"{self._rank}", shared)

    @staticmethod
    def _seeded(salt: str, shared: State) -> State:
        before = get_global_state(False)
        seed_global(salt, checksum_of_state(shared))
        seeded = get_global_state(False)
        set_global_state(before)
        return seeded

    def _enter(self) -> None:
        if self._shared is None:
            return
        self._own = get_global_state(False)
        if self._rank == 0 and same_state(self._own, self._shared):
            self._own = None
        else:
            set_global_state(self._shared)

    def _leave(self) -> None:
        if self._shared is None:
            return
        self._shared, self.is_fresh = get_global_state(False), False
        if self._own is not None:
            set_global_state(self._own)


def _broadcast(states: list[State], group: dist.ProcessGroup | None) -> list[State]:
    """Rank 0's states. A collective."""
    if get_rank(group) == 0:
        _of_rank_0([_news(state) for state in states], group)
        return states
    return [_updated(state, news) for state, news in zip(states, _of_rank_0(None, group), strict=True)]


def _of_rank_0(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's tensors and plain data. A collective."""
    tensors: list[torch.Tensor] = []
    header = pack(value, tensors)
    return unpack(*broadcast_tensors(header, tensors, "the random state", group))


def _news(state: State, known: State = ()) -> list[list[Any]]:
    """The parts of ``state`` that are not those of ``known``, each with its place."""
    news = [place for place, part in enumerate(state) if place >= len(known) or not same_part(part, known[place])]
    parts = [state[place] for place in news]
    sent = [part if isinstance(part, torch.Tensor) else json.dumps(plain(part)) for part in parts]
    return [list(pair) for pair in zip(news, sent, strict=True)]


def _updated(state: State, news: list[list[Any]]) -> State:
    """Inverse of :func:`_news`: the whole state, given what is known of it."""
    parts = list(state)
    for place, part in news:
        parts[place] = part if isinstance(part, torch.Tensor) else as_tuples(json.loads(part))
    return tuple(parts)
