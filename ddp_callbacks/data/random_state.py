"""Random states of the ranks: one on all of them in a run, distinct in loops of your own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import all_gather_object, broadcast_object
from ddp_callbacks.data.global_state import (
    GLOBAL,
    State,
    checksums_of,
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

_PURPOSE = "the random state"


class OwnRandomState:
    """A copy of the current global random state, kept apart from it.

    Draws inside ``with own.drawing():`` depend on this state alone, not on draws outside, so you can repeat them. The
    global state of each library from which nothing draws outside advances with this one, as it would without us.

    Args:
        state: The current global state; ``None`` reads it.

    Attributes:
        state: The state that the next :meth:`drawing` starts from.
        has_drawn: Whether code inside has drawn.
        takes_turns: Whether code inside and outside have both drawn from a library's global state.
    """

    has_drawn = takes_turns = False

    def __init__(self, state: State | None = None) -> None:
        self.state = get_global_state() if state is None else state

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this state inside. Local, no communication."""
        before, begin = get_global_state(), self.state
        are_touched = [not is_same_state([one], [other]) for one, other in zip(before, begin, strict=True)]
        set_global_state(begin)
        try:
            yield
        finally:
            self.state = get_global_state()
            are_drawn = [not is_same_state([one], [other]) for one, other in zip(begin, self.state, strict=True)]
            self.has_drawn = self.has_drawn or any(are_drawn)
            if any(are_touched):
                self.takes_turns = self.takes_turns or any(map(operator.and_, are_touched, are_drawn))
                both = zip(are_touched, before, self.state, strict=True)
                set_global_state([state if is_touched else advanced for is_touched, state, advanced in both])


class SharedRandomState(OwnRandomState):
    """A snapshot of rank 0's global random state, which every rank replays.

    Inside ``with shared.drawing():`` every rank draws what a single process would have drawn from then on. Ranks that
    have another global state keep it outside.

    The constructor is a collective.

    Args:
        sources: Objects to search for generators (a sampler, a loader). On all ranks, these generators permanently get
            rank 0's states.

    Attributes:
        begin: Rank 0's global state at construction, followed by the states of the generators of ``sources``.
    """

    def __init__(self, sources: Sequence[object] = (), *, group: dist.ProcessGroup | None = None) -> None:
        self.begin = get_global_state(sources)
        if get_world_size(group) > 1:
            self.begin = broadcast_object(self.begin, _PURPOSE, group)
            set_generators(sources, self.begin[GLOBAL:])
        self._group = group
        self.rewind()

    def follow(self) -> None:
        """Let the next draws be those that follow rank 0's last ones, inside or outside. A collective."""
        changed = broadcast_object(changed_state(self.state), _PURPOSE, self._group)
        self.state = [state if new is None else new for state, new in zip(self.state, changed, strict=True)]

    def rewind(self) -> None:
        """Let the next draws be the first ones again. Local."""
        self.state = self.begin[:GLOBAL]


def changed_state(known: State) -> State:
    """Return the global state, with ``None`` for each generator whose state is still the known one. Local."""
    both = zip(get_global_state(), known, strict=True)
    return [None if is_same_state([state], [before]) else state for state, before in both]


def follow_changes(before: Sequence[int], changed: State) -> None:
    """Draw what another rank has drawn, from torch, or from Python and NumPy, if the state was the same before. Local.

    Args:
        before: The :func:`checksums_of` the other rank's state.
        changed: Its :func:`changed_state` afterwards.
    """
    torchs, others = map(operator.eq, checksums_of(get_global_state()), before)
    follows = (torchs, others, others, torchs)
    set_global_state([state if is_same else None for state, is_same in zip(changed, follows, strict=True)])


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
def drawing_apart() -> Iterator[None]:
    """Inside, each rank draws its own numbers; outside, torch's state advances by one draw on all ranks. Local."""
    seed = int(torch.randint(1 << 62, ()))
    before = get_global_state()
    seed_global(digest_of(get_rank(), seed))
    try:
        yield
    finally:
        set_global_state(before)


@contextmanager
def without_draws(what: str) -> Iterator[None]:
    """Raise :class:`ConfigurationError` if random numbers were drawn inside. Local."""
    before = get_global_state()
    yield
    if not is_same_state(before, get_global_state()):
        raise ConfigurationError(
            f"{what} draws random numbers, so batches of the same samples differ. Draw them in the data set's "
            "__getitem__, or in the step, or leave this comparison out (verify=None)."
        )


class RunRandomState:
    """The global random state during a run of a Trainer or Trial: one on all ranks, as on a single process.

    Hooks draw from it on every rank, so they may prune parameters or add noise to gradients. Steps draw from it for the
    whole batch (:class:`ddp_callbacks.WholeDraws`). What loads samples has states of its own.
    A rank that draws another amount, as in a hook that asks for the rank, gets rank 0's state again when the ranks
    compare their states next.

    Attributes:
        draws: What gives the batches of the run their random numbers, if anything does.
    """

    def __init__(self) -> None:
        self.draws: WholeDraws | None = None

    def synchronize(self, purpose: str = _PURPOSE) -> None:
        """Continue on all ranks from rank 0's state. A collective.

        Args:
            purpose: For error messages, if more than this is over: "the end of the run".
        """
        if get_world_size() > 1:
            self.follow(all_gather_object(self.checksums(), purpose))

    def checksums(self) -> list[int]:
        """Return one of the generators of torch, and one of Python's and NumPy's, for :meth:`follow`. Local.

        You may send them as part of another message.
        """
        return checksums_of(get_global_state())

    def follow(self, of_ranks: Sequence[list[int]]) -> None:
        """Like :meth:`synchronize`, but local if the checksums are equal.

        Args:
            of_ranks: Each rank's :meth:`checksums` at this moment.
        """
        if any(found != of_ranks[0] for found in of_ranks):
            restore_global_state(broadcast_object(get_global_state(), _PURPOSE))

    def report(self) -> list[Any]:
        """Return :meth:`checksums` and a report of draws, for :meth:`take`. Local."""
        return [self.checksums(), self.draws and self.draws.report()]

    def take(self, reports: Iterable[Sequence[Any]]) -> None:
        """Like :meth:`follow`, after noting ranks that have drawn another amount than rank 0.

        Args:
            reports: Each rank's :meth:`report`, at one moment.
        """
        checksums, of_draws = zip(*reports, strict=True)
        if self.draws is not None:
            self.draws.compare(checksums, of_draws)
        self.follow(checksums)

    def state_dict(self) -> dict[str, Any]:
        """Return the random state as tensors and plain data. Local."""
        return {"global": get_global_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the random state of a :meth:`state_dict`: pass that of one rank on all. Local.

        This also sets CUDA's state, as soon as CUDA is in use.
        """
        restore_global_state(state["global"])
