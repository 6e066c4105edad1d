"""The segments of shared memory that a rank offers to the others of its node."""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch

from ddp_callbacks._torch import descriptor_of, outside_inference_mode
from ddp_callbacks.comm import memfd
from ddp_callbacks.errors import ConfigurationError

Place = tuple[int, int, int, int]
"""Where a sum is, as its rank tells the others: number and descriptor of the segment, offset in it, number of bytes."""


class _Segment(NamedTuple):
    number: int
    fd: int


class Segments:
    """The segments of this rank; each is freed with the tensor that was allocated in it.

    Attributes:
        shards: This rank's shards of all ranks' memory, by what identifies them. They keep that memory, so they are
            forgotten whenever a segment of this rank is freed: the other ranks then free theirs.
    """

    def __init__(self) -> None:
        self.shards: dict[tuple[object, ...], torch.Tensor] = {}
        self._by_address: dict[int, _Segment] = {}
        self._numbers = itertools.count()

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
        segment = _Segment(next(self._numbers), descriptor_of(storage))
        address = storage.data_ptr()
        self._by_address[address] = segment
        weakref.finalize(tensor, _forget, self._by_address, address, segment, self.shards).atexit = False
        return tensor[:numel]

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Where a tensor of :meth:`allocate`, or a part of one, is."""
        segment = self._by_address[tensor.untyped_storage().data_ptr()]  # an empty tensor has no address of its own
        return *segment, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes


def _forget(
    by_address: dict[int, _Segment], address: int, segment: _Segment, shards: dict[tuple[object, ...], torch.Tensor]
) -> None:
    shards.clear()
    if by_address.get(address) is segment:  # otherwise its storage was replaced, and another one has the address
        del by_address[address]
