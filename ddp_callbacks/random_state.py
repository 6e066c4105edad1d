"""Random state over the ranks: shared where the ranks must draw the same, distinct everywhere else.

"Global" are torch's CPU generator, Python's :mod:`random` and, where the program has imported it, NumPy's.
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

from ddp_callbacks.collectives import broadcast_tensors
from ddp_callbacks.process_group import get_rank, get_world_size

State = tuple[Any, ...]  # JSON for Python's and NumPy's, a uint8 tensor for torch's


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


def make_distinct(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank but 0 a global random state of its own, derived from rank 0's, which stays. A collective.

    The states are torch's on the CPU and on GPUs, Python's and NumPy's. So dropout and augmentation differ between
    the ranks, and a run with the same seed on rank 0 and as many ranks repeats itself.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) == 1:
        return
    (state,) = _broadcast_states([get_global_state(False)], group)
    rank = get_rank(group)
    if rank == 0:
        return
    seed = zlib.crc32(f"{rank}".encode(), zlib.crc32(bytes(state[0].tolist())))
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def make_equal(group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's global random state: torch's on the CPU, Python's and NumPy's. A collective.

    Args:
        group: ``None`` is the default group.
    """
    if get_world_size(group) > 1:
        set_global_state(_broadcast_states([get_global_state(False)], group)[0])


def get_global_state(torch_only: bool) -> State:
    """torch's state, and unless ``torch_only`` Python's and NumPy's (``None`` where NumPy is not imported)."""
    state = torch.get_rng_state()
    if torch_only:
        return (state,)
    numpy = sys.modules.get("numpy")
    return state, random.getstate(), _plain(numpy.random.get_state(legacy=False)) if numpy else None


def set_global_state(state: State) -> None:
    """The inverse of :func:`get_global_state`; leaves alone what ``state`` does not hold."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        random.setstate(_tuples(state[1]))
        if state[2] is not None and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(state[2])


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
    header = [[part for part in state if not isinstance(part, torch.Tensor)] for state in states]
    tensors = [part for state in states for part in state if isinstance(part, torch.Tensor)]
    holds_tensor = [isinstance(state[0], torch.Tensor) for state in states]
    (header, holds_tensor), tensors = broadcast_tensors([header, holds_tensor], tensors, "the random state", group)
    remaining = iter(tensors)
    return [
        (next(remaining), *rest) if tensor else tuple(rest) for rest, tensor in zip(header, holds_tensor, strict=True)
    ]


def _same(one: State, other: State) -> bool:
    return torch.equal(one[0], other[0]) and _tuples(one[1:]) == _tuples(other[1:])


def _plain(value: Any) -> Any:
    """NumPy's state as JSON can hold it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _tuples(value: Any) -> Any:
    """Lists as tuples, as ``random.setstate`` wants them back from JSON."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
