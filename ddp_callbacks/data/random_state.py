"""Random states of the ranks: shared when all ranks must draw the same, distinct otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.collectives import broadcast_object
from ddp_callbacks.data.global_state import (
    GLOBAL,
    State,
    digest_of,
    get_global_state,
    is_same_state,
    restore_global_state,
    seed_global,
    set_generators,
    set_global_state,
)
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.randomness import WholeDraws
from ddp_callbacks.randomness.generators import drawing_from

_DOING = "the random state"


class OwnRandomState:
    """A copy of the current global random state, kept apart from it.

    Draws inside ``with own.drawing():`` depend on this state alone, not on draws outside, so you can repeat them. As
    long as nothing draws outside, rank 0's global state advances with this one, as it would without this library.

    Attributes:
        state: The state that the next :meth:`drawing` starts from.
    """

    def __init__(self) -> None:
        self.state = get_global_state()
        self._rank = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this state inside. Local, no communication."""
        before = get_global_state()
        is_untouched = is_same_state(before, self.state)
        set_global_state(self.state)
        try:
            yield
        finally:
            self.state = get_global_state()
            if self._rank or not is_untouched:
                set_global_state(before)


class SharedRandomState(OwnRandomState):
    """A snapshot of rank 0's global random state, which every rank replays.

    Inside ``with shared.drawing():`` every rank draws what a single process would have drawn from then on. Outside,
    each rank has its separate state.

    The constructor is a collective.

    Args:
        sources: Objects to search for generators (a sampler, a loader). On all ranks, these generators permanently get
            rank 0's states.

    Attributes:
        begin: Rank 0's global state at construction, followed by the states of the generators of ``sources``.
    """

    def __init__(self, sources: Sequence[object] = (), *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._rank = get_rank(group)
        self.begin = get_global_state(sources)
        if get_world_size(group) > 1:
            self.begin = broadcast_object(self.begin, _DOING, group)
            set_generators(sources, self.begin[GLOBAL:])
        self.state = self.begin[:GLOBAL]


def seed_by_rank(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank but 0 a distinct global random state, derived from rank 0's, which is unchanged. A collective.

    It sets torch's states on the CPU and on GPUs, Python's and NumPy's. Dropout and augmentation then differ between
    the ranks, and a run with the same seed on rank 0 and the same number of ranks is reproducible.

    Args:
        group: ``None`` is the default group.
    """
    shared = SharedRandomState(group=group).state
    if rank := get_rank(group):
        seed_global(digest_of(rank, shared[0]))


def broadcast_rng_state(group: dist.ProcessGroup | None = None) -> None:
    """Copy rank 0's global random state to every rank: torch's on the CPU, Python's and NumPy's. A collective.

    Args:
        group: ``None`` is the default group.
    """
    set_global_state(SharedRandomState(group=group).state)


@contextmanager
def without_draws(what: str) -> Iterator[None]:
    """Raise :class:`ConfigurationError` if random numbers were drawn inside. Local."""
    before = get_global_state()
    yield
    if not is_same_state(before, get_global_state()):
        raise ConfigurationError(f"{what} draws random numbers, so batches of the same samples differ.")


class RunRandomState:
    """The global random state during a run: distinct per rank, shared inside :meth:`alike` and :meth:`computing`.

    Code that changes parameters at random (a hook that prunes, or reinitializes a layer) must draw the same on all
    ranks; augmentation and loader workers must not. The shared state is rank 0's, so a hook draws what it
    would draw in a single process, unless rank 0's draws depend on its part of the batch. With a single process nothing
    changes.

    Args:
        group: ``None`` is the default group.

    Attributes:
        is_fresh: Whether rank 0 has drawn nothing since it last shared its state, as far as this rank knows.
        draws: What gives the batches of the run their random numbers, if anything does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._states: dict[str, Any] = {}  # a state or a seed for "own", "shared", "in_batch"; empty: not open
        self._accepted: list[Any] = [None] * GLOBAL
        self._current = "own"  # which state is global now; its entry in _states is out of date
        self._is_one = False  # rank 0's own state equals the shared one: both advance together, as in a single process
        self.is_fresh = False
        self.draws: WholeDraws | None = None

    @property
    def _rank(self) -> int:
        return get_rank(self._group)

    @property
    def is_open(self) -> bool:
        """Whether the ranks have distinct states, as they do between the first :meth:`synchronize` and :meth:`end`."""
        return bool(self._states)

    def synchronize(self) -> None:
        """Share rank 0's state from here on; the other ranks derive theirs from it. A collective.

        Everything after this depends only on rank 0's state, so a run can resume from it.
        """
        if get_world_size(self._group) > 1:
            self._accepted = [None] * GLOBAL  # a failure may have left the ranks with different ones
            self.accept(broadcast_object(self.offer(), _DOING, self._group))

    def offer(self) -> Any:
        """Return rank 0's states that changed since the last time, for :meth:`accept`; ``None`` on other ranks. Local.

        The states are tensors and plain data. You may send them as part of another message.
        """
        if self._rank:
            return None
        both = enumerate(zip(get_global_state(), self._accepted, strict=True))
        return [[number, state] for number, (state, known) in both if not is_same_state([state], [known])]

    def accept(self, offered: Any) -> None:
        """Like :meth:`synchronize`, but local; every rank calls it.

        Args:
            offered: The result of rank 0's :meth:`offer` at this moment.
        """
        self._states = self._derived(self._noted(offered))
        _set(self._states[self._current])
        self._is_one, self.is_fresh = self._rank == 0, True

    def digest(self) -> int:
        """Return a checksum of the state of :meth:`computing`. Local."""
        return checksum_of(self._states.get("batch"))

    def compare(self, digests: Sequence[int]) -> None:
        """Note which ranks have not drawn for whole batches as rank 0 has. Local.

        Args:
            digests: Each rank's :meth:`digest`, at one moment.
        """
        if self.draws is not None:
            self.draws.compare(digests)

    def share(self) -> None:
        """Share rank 0's state; every rank draws on from its own, outside of hooks. A collective."""
        if self.is_open and self._current == "own":
            shared = self._noted(broadcast_object(self.offer(), _DOING, self._group))
            self._states |= {"shared": shared, "batch": _of_batches(shared)}

    def _noted(self, offered: Any) -> State:
        changed = dict(offered)
        self._accepted = [changed.get(number, known) for number, known in enumerate(self._accepted)]
        return self._accepted

    def end(self) -> None:
        """End the run: the shared state becomes the global one on all ranks. Local."""
        if self.is_open and self._current == "own":
            _set(self._states["shared"])
        self._states, self._accepted = {}, [None] * GLOBAL

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Draw the same on all ranks inside. Local, no communication; every rank must draw the same amount."""
        if self._current != "own":
            yield
            return
        self._is_one = self._rank == 0 and self.is_open and is_same_state(get_global_state(), self._states["shared"])
        try:
            with self._drawing_from("shared"):
                yield
        finally:
            self.is_fresh = False
            if self._is_one and self.is_open:
                _set(self._states["shared"])

    @contextmanager
    def alike_in_batch(self) -> Iterator[None]:
        """Like :meth:`alike`, within a batch: draw from a separate state, since rank 0's has advanced by then."""
        aside = nullcontext() if self.draws is None else self.draws.aside()
        with aside, self._drawing_from("in_batch" if self._current == "own" else self._current):
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, torch draws from a state that is the same on all ranks, if they draw for the whole batch.

        See :class:`ddp_callbacks.randomness.WholeDraws`. Rank 0's own state advances together with it.
        """
        with drawing_from(self._states["batch"]) if self.is_open and self._current == "own" else nullcontext():
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside :meth:`alike_in_batch`, draw from this rank's state."""
        with self._drawing_from("own"):
            yield

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        before = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        if self.is_open and name != self._current:
            self._states[self._current] = get_global_state()
            _set(self._states[name])
        self._current = name

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's random states as tensors and plain data. Local.

        These are the states between hooks, even if you call this inside :meth:`alike`, :meth:`alike_in_batch` or
        :meth:`apart`.
        """
        states = self._states | {self._current if self.is_open else "own": get_global_state()}
        return {"rank": self._rank, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the random states of a :meth:`state_dict`. Local; every rank calls it.

        This also sets CUDA's state, as soon as CUDA is in use.

        Args:
            state: This rank's state. If another number of ranks saved it, pass rank 0's on every rank: the other ranks
                derive theirs from it.
        """
        states = {name: kept for name, kept in state.items() if name != "rank"}
        if get_world_size(self._group) > 1:
            derived, is_open = self._derived(states.get("shared", states["own"])), "shared" in states
            if self._rank and not (is_open and state["rank"] == self._rank):
                del states["own"]
            states = derived | states
            if self.is_open or is_open:
                self._states, self.is_fresh = states, False
        _set(states[self._current] if self.is_open else states["own"])

    def _derived(self, shared: State) -> dict[str, Any]:
        """Return this rank's states, or seeds for them, derived from the shared state."""
        own = digest_of(self._rank, shared[0]) if self._rank else shared
        in_batch = digest_of("hooks of a batch", shared[0])
        return {"own": own, "shared": shared, "in_batch": in_batch, "batch": _of_batches(shared)}


def _of_batches(shared: State) -> list[torch.Tensor]:
    """Return the states of torch's generators."""
    return [state for state in (shared[0], shared[3]) if state is not None]


def _set(state: State | int) -> None:
    """Set the global state to ``state``, or seed it if that is an integer."""
    if isinstance(state, int):
        seed_global(state)
    else:
        restore_global_state(state)
