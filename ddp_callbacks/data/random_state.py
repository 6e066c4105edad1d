"""Random state over the ranks: shared where the ranks must draw the same, distinct everywhere else.

"Global" are torch's CPU generator, Python's :mod:`random`, where the program has imported it NumPy's, and where the
process uses CUDA the generator of its device.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.process_group import get_rank, get_world_size

State = tuple[Any, ...]  # torch's as uint8 tensors, Python's and NumPy's as they are or as JSON has them
_TENSOR = "tensor"  # in JSON, the place of one


class SharedRandomState:
    """Rank 0's global random state of one moment, which every rank then replays on its own.

    Inside ``with shared.drawing():`` every rank draws what one process would have drawn from then on. Outside, each
    rank's own state is as it was; only rank 0, whose state the shared one is, moves on with it, for as long as nothing
    else has drawn from it in between.

    A collective: all ranks create it at the same time.

    Args:
        sources: Objects to search for generators of their own (a sampler, a loader); rank 0's states of these are
            copied to all ranks for good.
        torch_only: Whether torch's generator is all that can be drawn from. Python's and NumPy's states are large, so
            that switching to and from them for each batch costs half a millisecond.
    """

    def __init__(
        self, sources: Sequence[object] = (), *, torch_only: bool = False, group: dist.ProcessGroup | None = None
    ) -> None:
        self._torch_only = torch_only
        self._world_size = get_world_size(group)
        self._rank = get_rank(group)
        generators = [found for source in sources for found in own_generators(source)]
        if self._world_size > 1:
            states = [get_global_state(torch_only), *(_get_state(generator) for generator in generators)]
            self._state, *own = _broadcast_states(states, group)
            for generator, state in zip(generators, own, strict=True):
                _set_state(generator, state)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the shared state inside. Local, no communication."""
        if self._world_size == 1:
            yield
            return
        before, shared = get_global_state(self._torch_only), self._state
        untouched = _same(before, shared)
        if not untouched:
            set_global_state(shared)
        try:
            yield
        finally:
            self._state = get_global_state(self._torch_only)
            if not (self._rank == 0 and untouched):
                set_global_state(before)


def seed_by_rank(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank but 0 a global random state of its own, derived from rank 0's, which stays. A collective.

    The states are torch's on the CPU and on GPUs, Python's and NumPy's. So dropout and augmentation differ between
    the ranks, and a run with the same seed on rank 0 and as many ranks repeats itself.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) == 1:
        return
    (state,) = _broadcast_states([get_global_state(False)], group)
    if rank := get_rank(group):
        _seed_global(f"{rank}", _checksum(state))


def broadcast_rng_state(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's global random state: torch's on the CPU, Python's and NumPy's. A collective.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) > 1:
        set_global_state(_broadcast_states([get_global_state(False)], group)[0])


class RunRandomState:
    """The global random state during a run: each rank's own while it computes, and one for all in :meth:`alike`.

    What changes parameters at random (a hook that prunes, or initializes a layer again) must draw alike on all ranks;
    dropout, augmentation and the workers of loaders must not. The shared state is rank 0's, the user's: a hook draws
    what it would draw in one process, as far as nothing on rank 0 draws by the part of the batch. In a world of one
    nothing changes.

    Args:
        group: ``None`` is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = get_rank(group)
        self._shared: State | None = None  # between the first synchronize and the end
        self._in_batch: State | None = None
        self._own: State | None = None  # while all draw alike; None where rank 0's own is the shared one
        self._is_alike = False

    @property
    def is_open(self) -> bool:
        """Whether the ranks have states of their own, between the first :meth:`synchronize` and :meth:`end`."""
        return self._shared is not None

    def synchronize(self) -> None:
        """All follow rank 0 from here on: the shared state is rank 0's, and the others derive their own from it.

        A collective. What follows depends on rank 0's state alone, so that a run can go on from it.
        """
        if get_world_size(self._group) == 1:
            return
        (self._shared,) = _broadcast_states([get_global_state(False)], self._group)
        checksum, self._own = _checksum(self._shared), None
        _seed_global("hooks of a batch", checksum)
        self._in_batch = get_global_state(False)
        if self._rank:
            _seed_global(f"{self._rank}", checksum)
            self._own = get_global_state(False)
        set_global_state(self._shared if self._is_alike or self._own is None else self._own)

    def end(self) -> None:
        """What follows draws from the shared state on all ranks. Local."""
        if self._shared is not None and not self._is_alike:
            set_global_state(self._shared)
        self._shared = None

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Draw alike inside. Local, no communication; every rank must draw equally much."""
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
        """The same in the middle of a batch, where rank 0's state has moved on by itself: from a state of its own."""
        if self._is_alike or self._in_batch is None or self._shared is None:
            yield
            return
        self._own, self._is_alike = get_global_state(False), True
        set_global_state(self._in_batch)
        try:
            yield
        finally:
            self._is_alike, self._in_batch = False, get_global_state(False)
            set_global_state(self._own)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside of :meth:`alike_in_batch`, draw each its own."""
        if not self._is_alike or self._own is None:
            yield
            return
        state, self._is_alike = get_global_state(False), False
        set_global_state(self._own)
        try:
            yield
        finally:
            self._own, self._is_alike = get_global_state(False), True
            set_global_state(state)

    def _enter(self) -> None:
        if self._shared is None:
            return
        self._own = get_global_state(False)
        if self._rank == 0 and _same(self._own, self._shared):
            self._own = None
        else:
            set_global_state(self._shared)

    def _leave(self) -> None:
        if self._shared is None:
            return
        self._shared = get_global_state(False)
        if self._own is not None:
            set_global_state(self._own)


def get_global_state(torch_only: bool) -> State:
    """torch's state; unless ``torch_only`` Python's, NumPy's and CUDA's, too (``None`` where these are not in use)."""
    state = torch.get_rng_state()
    if torch_only:
        return (state,)
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state(legacy=False) if numpy else None
    return state, random.getstate(), of_numpy, torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_global_state(state: State) -> None:
    """The inverse of :func:`get_global_state`; leaves alone what ``state`` does not hold."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        random.setstate(state[1] if isinstance(state[1], tuple) else _tuples(state[1]))
        if state[2] is not None and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(state[2])
        if state[3] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state[3])


def plain_global_state() -> list[Any]:
    """The global random state as tensors and plain data, for a checkpoint; :func:`set_global_state` takes it."""
    return [_plain(part) for part in get_global_state(False)]


def _seed_global(*salt: str | int) -> None:
    """Seed everything that is global by ``salt``."""
    seed = zlib.crc32(repr(salt).encode())
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _checksum(state: State) -> int:
    return zlib.crc32(bytes(state[0].tolist()))


def own_generators(source: object) -> list[Any]:
    """The torch, Python and NumPy generators that are attributes of ``source``, by attribute name."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    attributes = getattr(source, "__dict__", {})
    return [value for _, value in sorted(attributes.items()) if isinstance(value, kinds)]


def _get_state(generator: Any) -> State:
    if isinstance(generator, torch.Generator):
        return (generator.get_state(),)
    if isinstance(generator, random.Random):
        return (None, generator.getstate())
    if hasattr(generator, "bit_generator"):
        return (None, _plain(generator.bit_generator.state))
    return (None, _plain(generator.get_state(legacy=False)))


def _set_state(generator: Any, state: State) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state[0])
    elif isinstance(generator, random.Random):
        generator.setstate(_tuples(state[1]))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state[1]
    else:
        generator.set_state(state[1])


def _broadcast_states(states: list[State], group: dist.ProcessGroup | None) -> list[State]:
    tensors = [part for state in states for part in state if isinstance(part, torch.Tensor)]
    header = [[_TENSOR if isinstance(part, torch.Tensor) else _plain(part) for part in state] for state in states]
    header, tensors = broadcast_tensors(header, tensors, "the random state", group)
    remaining = iter(tensors)
    return [tuple(next(remaining) if part == _TENSOR else _tuples(part) for part in state) for state in header]


def _same(one: State, other: State) -> bool:
    return all(map(_same_part, one, other))


def _same_part(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one == other
    return bool(_tuples(_plain(one)) == _tuples(_plain(other)))


def _plain(value: Any) -> Any:
    """Tensors as they are, and NumPy's state as JSON can hold it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _tuples(value: Any) -> Any:
    """Lists as tuples, as ``random.setstate`` wants them back from JSON."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
