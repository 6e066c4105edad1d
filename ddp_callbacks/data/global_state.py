"""Read and set random states: the global one, and those of generators that are attributes.

The global random state is torch's CPU generator, Python's :mod:`random`, NumPy's if the program has imported it, and
the current device's generator if the process uses CUDA. A generator's state is a tensor, or lists, dicts and numbers:
what messages and checkpoints hold.
"""

from __future__ import annotations

import hashlib
import marshal
import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.codec import bytes_of

State = Sequence[Any]
"""The states of torch's, Python's, NumPy's and CUDA's global generators, in this order; ``None`` for one not in use.
The states of generators that are attributes of a loader and its samplers follow, if you ask for them."""

GLOBAL = 4  # number of global generators
_MARSHAL = 2  # the newest version in which equal data have equal bytes


def get_global_state(sources: Sequence[object] = ()) -> State:
    """Return the global random state, followed by the states of generators that are attributes of ``sources``."""
    generators = [*_global_generators(), *own_generators(*sources)]
    return [None if generator is None else get_state_of(generator) for generator in generators]


def set_global_state(state: State, sources: Sequence[object] = ()) -> None:
    """Set a state from :func:`get_global_state`. Generators that are not in use here or in ``state`` stay unchanged.

    If the number of generators of ``sources`` has changed, they stay unchanged, too.
    """
    for generator, of_generator in zip(_global_generators(), state, strict=False):
        if generator is not None and of_generator is not None:
            set_state_of(generator, of_generator)
    set_generators(sources, state[GLOBAL:])


def restore_global_state(state: State) -> None:
    """Like :func:`set_global_state`, for a state of an earlier run: sets CUDA's state even if CUDA starts later."""
    set_global_state(state)
    if state[3] is not None and not torch.cuda.is_initialized() and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[3])  # torch waits with this until CUDA starts


def _global_generators() -> list[Any]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.default_generators[torch.cuda.current_device()] if torch.cuda.is_initialized() else None
    return [torch.default_generator, random, numpy and numpy.random, cuda]


def checksums_of(state: State) -> list[int]:
    """Return one checksum of the generators of torch, and one of Python's and NumPy's."""
    torchs, python, numpys, cuda = state[:GLOBAL]
    return [checksum_of([torchs, cuda]), zlib.crc32(marshal.dumps([python, numpys], _MARSHAL))]


def seed_global(seed: int) -> None:
    """Seed all global generators with 63 bits."""
    seed_cpu(seed)
    if torch.cuda.is_available():  # torch.manual_seed formats a stack for every kind of device, which takes 1 ms
        torch.cuda.manual_seed_all(seed)


def seed_cpu(seed: int) -> None:
    """Seed the global generators of torch on the CPU, of Python and of NumPy with 63 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % (1 << 32))


def digest_of(*values: Any) -> int:
    """Hash all values to a 63-bit integer, the same on every process."""
    parts = [bytes_of(value) if isinstance(value, torch.Tensor) else repr(value).encode() for value in values]
    return int.from_bytes(hashlib.blake2b(b"|".join(parts), digest_size=8).digest(), "big") >> 1


def own_generators(*sources: object) -> list[Any]:
    """Return generators of torch, Python and NumPy: among ``sources``, and their attributes, sorted by name."""
    kinds = generator_types()
    found = [[source] if isinstance(source, kinds) else _by_name(source) for source in sources]
    return [value for each in found for value in each if isinstance(value, kinds)]


def _by_name(source: object) -> list[Any]:
    return [value for _, value in sorted(getattr(source, "__dict__", {}).items())]


def generator_types() -> tuple[type, ...]:
    """Return the classes of generators."""
    numpy = sys.modules.get("numpy")
    return (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of torch, Python or NumPy with 63 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "seed"):
        generator.seed(seed % (1 << 32))
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def get_state_of(generator: Any) -> Any:
    """Return the state of a generator, or of the module ``random`` or ``numpy.random``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):
        version, internal, gauss = generator.getstate()
        return [version, list(internal), gauss]
    has_state = hasattr(generator, "get_state")
    return _plain(generator.get_state(legacy=False) if has_state else generator.bit_generator.state)


def set_state_of(generator: Any, state: Any) -> None:
    """Inverse of :func:`get_state_of`."""
    if hasattr(generator, "setstate"):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def states_of_generators(sources: Sequence[object]) -> list[Any]:
    """The states of the generators that are attributes of ``sources``."""
    return [get_state_of(generator) for generator in own_generators(*sources)]


def set_generators(sources: Sequence[object], states: Sequence[Any]) -> None:
    """Inverse of :func:`states_of_generators`. Sets nothing if the number of generators has changed."""
    generators = own_generators(*sources)
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            set_state_of(generator, state)


def is_same_state(one: State, other: State) -> bool:
    """Whether two global states of the same generators are equal."""
    return all(
        torch.equal(mine, its) if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor) else mine == its
        for mine, its in zip(one, other, strict=True)
    )


def _plain(value: Any) -> Any:
    """Convert the state of a NumPy generator to plain data."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
