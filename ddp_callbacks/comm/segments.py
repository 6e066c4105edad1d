"""The segments of shared memory that a rank offers to the others of its node."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from ddp_callbacks._torch import descriptor_of, outside_inference_mode
from ddp_callbacks.comm import memfd
from ddp_callbacks.errors import ConfigurationError

_KNOWN = 4  # sums at one place whose shards are known: gradients that a rank keeps are elsewhere in the next step


@dataclass(eq=False)
class Segment:
    """A segment of this rank.

    Attributes:
        serial, fd: Its number and descriptor, as the other ranks know it.
        known: By offset in the segment: this rank's shards in all ranks' memory, after a key that identifies the sum.
    """

    serial: int
    fd: int
    known: dict[int, deque[tuple[Hashable, list[torch.Tensor]]]] = field(default_factory=dict)

    def shards(self, at: int, key: Hashable, cut: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The shards of a sum at this offset. Usually, a step sums the same memory as the previous one."""
        known = self.known.setdefault(at, deque(maxlen=_KNOWN))
        for other, shards in known:
            if other == key:
                return shards
        known.append((key, shards := cut()))
        return shards


class Segments:
    """The segments of this rank; each is freed with the tensor that was allocated in it."""

    def __init__(self) -> None:
        self._by_address: dict[int, Segment] = {}
        self._count = 0
        self._spare: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # for copies

    @outside_inference_mode
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat CPU tensor in a segment of its own. Local."""
        nbytes = max(numel, 1) * dtype.itemsize
        try:
            storage = memfd.create_storage(nbytes)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"no shared memory of {nbytes} bytes for gradients: {error}. Raise that limit (ulimit -n), or set "
                f"{memfd.SWITCH}=0 to sum through gloo."
            ) from error
        tensor = torch.empty(0, dtype=dtype).set_(storage)
        self._count += 1
        segment = self._by_address[_address(tensor)] = Segment(self._count, descriptor_of(storage))
        weakref.finalize(tensor, _forget, self._by_address, _address(tensor), segment).atexit = False
        return tensor[:numel]

    def home_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Segment]:
        """``tensor`` if it lies in a segment, otherwise a copy that does."""
        segment = self._by_address.get(_address(tensor))
        if segment is not None:
            return tensor, segment
        home = self._spare.pop((tensor.numel(), tensor.dtype), None)
        home = self.allocate(tensor.numel(), tensor.dtype) if home is None else home
        return home.copy_(tensor), self._by_address[_address(home)]

    def reuse(self, home: torch.Tensor) -> None:
        """Keep a copy's memory for the next copy of its size."""
        self._spare[home.numel(), home.dtype] = home


def _forget(segments: dict[int, Segment], address: int, segment: Segment) -> None:
    if segments.get(address) is segment:  # otherwise its storage was replaced, and another one has the address
        del segments[address]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # an empty tensor has no address
