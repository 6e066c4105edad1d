"""Read and set random states: the global one, and those of generators that are attributes.

The global random state is torch's CPU generator, Python's :mod:`random`, NumPy's if the program has imported it, and
the current device's generator if the process uses CUDA.
"""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddp_callbacks.comm.codec import bytes_of

State = tuple[Any, ...]  # torch's as uint8 tensors, Python's and NumPy's as objects or JSON


def get_global_state(torch_only: bool) -> State:
    """torch's state; unless ``torch_only``, also Python's, NumPy's and CUDA's (``None`` if not in use)."""
    state = torch.get_rng_state()
    if torch_only:
        return (state,)
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state(legacy=False) if numpy else None
    return state, random.getstate(), of_numpy, torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_global_state(state: Sequence[Any]) -> None:
    """Inverse of :func:`get_global_state`; generators missing in ``state`` stay unchanged."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        random.setstate(state[1] if isinstance(state[1], tuple) else as_tuples(state[1]))
        if state[2] is not None and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(state[2])
        if state[3] is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state[3])


def restore_global_state(state: Sequence[Any]) -> None:
    """As :func:`set_global_state`, once, for a state of an earlier run: CUDA's is set even if it starts later."""
    set_global_state(state)
    if len(state) > 1 and state[3] is not None and not torch.cuda.is_initialized() and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[3])  # which torch does as soon as CUDA has started


def plain_global_state() -> list[Any]:
    """The global random state as tensors and plain data, for a checkpoint; pass it to :func:`set_global_state`."""
    return plain_state(get_global_state(False))


def plain_state(state: Sequence[Any]) -> list[Any]:
    """A state as tensors and plain data."""
    return [plain(part) for part in state]


def seed_global(*salt: str | int) -> None:
    """Seed all global generators with ``salt``."""
    seed = zlib.crc32(repr(salt).encode())
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def checksum_of_state(state: State) -> int:
    """A checksum of torch's part."""
    return zlib.crc32(bytes_of(state[0]))


def digest_of(*values: Any) -> int:
    """63 bits that depend on all values, and are the same on every process. Tensors are taken by their values."""
    text = repr([value.tolist() if isinstance(value, torch.Tensor) else value for value in values])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def own_generators(source: object) -> list[Any]:
    """The torch, Python and NumPy generators that are attributes of ``source``, by attribute name."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    attributes = getattr(source, "__dict__", {})
    return [value for _, value in sorted(attributes.items()) if isinstance(value, kinds)]


def get_state_of(generator: Any) -> State:
    """The state of a generator that :func:`own_generators` has found."""
    if isinstance(generator, torch.Generator):
        return (generator.get_state(),)
    if isinstance(generator, random.Random):
        return (None, generator.getstate())
    if hasattr(generator, "bit_generator"):
        return (None, plain(generator.bit_generator.state))
    return (None, plain(generator.get_state(legacy=False)))


def set_state_of(generator: Any, state: Sequence[Any]) -> None:
    """Inverse of :func:`get_state_of`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state[0])
    elif isinstance(generator, random.Random):
        generator.setstate(as_tuples(state[1]))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state[1]
    else:
        generator.set_state(state[1])


def generators_of(sources: Sequence[object]) -> list[Any]:
    """The generators that are attributes of any of ``sources``."""
    return [generator for source in sources for generator in own_generators(source)]


def states_of_generators(sources: Sequence[object]) -> list[State]:
    """Their states."""
    return [get_state_of(generator) for generator in generators_of(sources)]


def set_generators(sources: Sequence[object], states: Sequence[Sequence[Any]]) -> None:
    """Inverse of :func:`states_of_generators`. If the sources have another number of generators now, nothing is set."""
    generators = generators_of(sources)
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            set_state_of(generator, state)


class RandomStates(NamedTuple):
    """A global random state, and those of generators that are attributes of a loader and its samplers."""

    of_process: Sequence[Any]
    of_generators: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, sources: Sequence[object]) -> RandomStates:
        """Those of this moment."""
        return cls(get_global_state(False), states_of_generators(sources))

    @classmethod
    def from_plain(cls, states: Sequence[Any]) -> RandomStates:
        """Inverse of :meth:`plain`."""
        return cls(*states)

    def put_back(self, sources: Sequence[object]) -> None:
        """Set them."""
        set_global_state(self.of_process)
        set_generators(sources, self.of_generators)

    def plain(self) -> list[Any]:
        """As tensors and plain data."""
        return [plain_state(self.of_process), list(map(plain_state, self.of_generators))]

    def seed(self, number: int) -> int:
        """A seed that follows from torch's state, those of the generators, and a number."""
        return digest_of(number, self.of_process[0], *(part for state in self.of_generators for part in state))


def same_state(one: State, other: State) -> bool:
    """Whether two states of the same generators are equal."""
    return all(map(same_part, one, other))


def same_part(one: Any, other: Any) -> bool:
    """Whether two parts of states are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return all(same_part(value, other[key]) for key, value in one.items())
    if type(one) is type(other) and hasattr(one, "dtype"):
        return bool((one == other).all())
    return bool(as_tuples(plain(one)) == as_tuples(plain(other)))


def plain(value: Any) -> Any:
    """Keep tensors; convert NumPy's state to JSON types."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def as_tuples(value: Any) -> Any:
    """Convert lists to tuples, which ``random.setstate`` requires."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
