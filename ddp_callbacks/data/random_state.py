"""Random states of the ranks: shared when all ranks must draw the same, distinct otherwise.

The global random state is torch's CPU generator, Python's :mod:`random`, NumPy's if the program has imported it, and
the current device's generator if the process uses CUDA.
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

State = tuple[Any, ...]  # torch's as uint8 tensors, Python's and NumPy's as objects or JSON
_TENSOR = "tensor"  # placeholder for a tensor in JSON


class SharedRandomState:
    """A snapshot of rank 0's global random state, which every rank replays.

    Inside ``with shared.drawing():`` every rank draws what a single process would have drawn from then on. Outside,
    each rank has its separate state. Only rank 0's state, which is the shared one, advances with the replay, as long as
    nothing else has drawn from it in between.

    The constructor is a collective.

    Args:
        sources: Objects to search for generators (a sampler, a loader). All ranks permanently get rank 0's states of
            them.
        torch_only: Whether all drawing uses torch's generator. Python's and NumPy's states are large: switching them
            costs half a millisecond per batch.
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
    """Give every rank but 0 a distinct global random state, derived from rank 0's, which is unchanged. A collective.

    It sets torch's states on the CPU and on GPUs, Python's and NumPy's. Dropout and augmentation then differ between
    the ranks, and a run with the same seed on rank 0 and the same number of ranks is reproducible.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) == 1:
        return
    (state,) = _broadcast_states([get_global_state(False)], group)
    if rank := get_rank(group):
        _seed_global(f"{rank}", _checksum(state))


def broadcast_rng_state(group: dist.ProcessGroup | None = None) -> None:
    """Copy rank 0's global random state to every rank: torch's on the CPU, Python's and NumPy's. A collective.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) > 1:
        set_global_state(_broadcast_states([get_global_state(False)], group)[0])


class RunRandomState:
    """The global random state during a run: distinct per rank while computing, shared inside :meth:`alike`.

    Code that changes parameters at random (a hook that prunes, or reinitializes a layer) must draw the same on all
    ranks; dropout, augmentation and loader workers must not. The shared state is rank 0's, so a hook draws what it
    would draw in a single process, unless rank 0's draws depend on its part of the batch. With a single process nothing
    changes.

    Args:
        group: ``None`` is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = get_rank(group)
        self._shared: State | None = None  # between the first synchronize and the end
        self._in_batch: State | None = None
        self._own: State | None = None  # while all ranks draw alike; None if rank 0's state is the shared one
        self._is_alike = False

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
        (self._shared,) = _broadcast_states([get_global_state(False)], self._group)
        checksum, self._own = _checksum(self._shared), None
        _seed_global("hooks of a batch", checksum)
        self._in_batch = get_global_state(False)
        if self._rank:
            _seed_global(f"{self._rank}", checksum)
            self._own = get_global_state(False)
        set_global_state(self._shared if self._is_alike or self._own is None else self._own)

    def end(self) -> None:
        """Leave the shared state in place on all ranks. Local."""
        if self._shared is not None and not self._is_alike:
            set_global_state(self._shared)
        self._shared = None

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
        """Inside :meth:`alike_in_batch`, draw from this rank's state."""
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
    """torch's state; unless ``torch_only``, also Python's, NumPy's and CUDA's (``None`` if not in use)."""
    state = torch.get_rng_state()
    if torch_only:
        return (state,)
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state(legacy=False) if numpy else None
    return state, random.getstate(), of_numpy, torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_global_state(state: State) -> None:
    """Inverse of :func:`get_global_state`; generators missing in ``state`` stay unchanged."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        random.setstate(state[1] if isinstance(state[1], tuple) else _tuples(state[1]))
        if state[2] is not None and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(state[2])
        if state[3] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state[3])


def plain_global_state() -> list[Any]:
    """The global random state as tensors and plain data, for a checkpoint; pass it to :func:`set_global_state`."""
    return [_plain(part) for part in get_global_state(False)]


def _seed_global(*salt: str | int) -> None:
    """Seed all global generators with ``salt``."""
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
    """Keep tensors; convert NumPy's state to JSON types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _tuples(value: Any) -> Any:
    """Convert lists to tuples, which ``random.setstate`` requires."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
