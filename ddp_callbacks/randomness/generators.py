"""States of torch's generators: the default one, and that of the current GPU if the process uses CUDA."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_callbacks.process_group.default_group import get_rank

_SEEDS = 1 << 62


def default_generators() -> list[torch.Generator]:
    """Return torch's generators that operators draw from unless they are given one."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def default_generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that operators on this device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def states_of(generators: list[torch.Generator]) -> list[torch.Tensor]:
    """Return a copy of each generator's state."""
    return [generator.get_state() for generator in generators]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two lists of states are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def drawing_from(states: list[torch.Tensor]) -> Iterator[None]:
    """Inside, the default generators continue from ``states``, which are up to date afterwards.

    Outside, they are as before, unless they were in these states: then they continue together.
    """
    generators = default_generators()
    before = states_of(generators)
    is_same = are_equal(before, states)
    _set(generators, states)
    try:
        yield
    finally:
        states[:] = states_of(generators)
        if not is_same:
            _set(generators, before)


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):  # CUDA may have started since
        generator.set_state(state)


@contextmanager
def drawing_by_rank(generators: list[torch.Generator], rank: int | None = None) -> Iterator[None]:
    """Inside, draw what differs between the ranks; outside, a generator that has drawn advances by one draw on all.

    Args:
        rank: ``None``: this process's rank in the default group.
    """
    rank = get_rank() if rank is None else rank
    before = states_of(generators)
    for generator in generators:
        generator.manual_seed(_mixed(draw_seed(generator), rank))
    fresh = states_of(generators)
    try:
        yield
    finally:
        for generator, state, seeded in zip(generators, before, fresh, strict=True):
            has_drawn = not torch.equal(generator.get_state(), seeded)
            generator.set_state(state)
            if has_drawn:
                draw_seed(generator)


def draw_seed(generator: torch.Generator) -> int:
    """Advance the generator by one draw."""
    return int(torch.randint(_SEEDS, (1,), generator=generator, device=generator.device))


def _mixed(seed: int, rank: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}|{rank}".encode(), digest_size=8).digest(), "big") >> 1
