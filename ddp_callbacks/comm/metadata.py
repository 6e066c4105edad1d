"""What the ranks tell each other behind the gradients of a backward, as numbers that are summed.

[Note: metadata]
Two things are known only when backward ends: which parameters were used, and whether a bucket must be sent again. If
control flow differs between ranks, so do these. They are sent behind the gradients of the last bucket, which is
therefore never launched before the end: ``[weight, trained, dirty (one per bucket), used (one per parameter)]``, each
summed over the ranks. A message of their own would cost a tenth of the step of a small model; they get one, in float64,
only if the last bucket cannot carry them: low precision, compression, a communication hook. Gradients on GPUs never
carry them: they are sent between the CPUs. So the host never waits for its GPU, whose buckets are reduced in a stream,
and still notices in each step if another rank has failed.

Behind them there is room for numbers from the caller, which saves a message. Each rank writes to its own place, which
is zero on all other ranks, so the sum is a gather. The numbers are encoded as 16-bit integers, which float32 holds
exactly, whatever their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_PIECES = 4  # 16-bit integers in a float64


class Metadata(NamedTuple):
    """The metadata of one rank, or of all ranks together.

    Attributes:
        weight: The weight, or the sum of all.
        trained: The checksum of the trained parameters, or the sum of all.
        dirty: Per bucket, whether it must be sent again.
        used: Per parameter, whether there is a gradient for it.
    """

    weight: float
    trained: float
    dirty: list[bool]
    used: list[bool]


@dataclass(frozen=True)
class MetadataFormat:
    """Encodes the metadata of a rank as float64, and decodes the sum over the ranks.

    Attributes:
        buckets, parameters: Their numbers.
        rank, world_size: This rank, and how many there are.
        room: How many numbers of each rank can travel along.
    """

    buckets: int
    parameters: int
    rank: int
    world_size: int
    room: int

    @property
    def numel(self) -> int:
        """The length of a message."""
        return self._flags + self.world_size * self.room * _PIECES

    @property
    def _flags(self) -> int:
        return 2 + self.buckets + self.parameters

    def encode(self, own: Metadata, numbers: torch.Tensor | None) -> torch.Tensor:
        """This rank's message; ``numbers`` is float64, of shape ``[room]``."""
        flags = [own.weight, own.trained, *map(float, own.dirty), *map(float, own.used)]
        message = torch.tensor(flags, dtype=torch.float64)
        if not self.room:
            return message
        places = torch.zeros(self.world_size, self.room * _PIECES, dtype=torch.float64)
        if numbers is not None:
            places[self.rank] = numbers.view(torch.int16)
        return torch.cat([message, places.view(-1)])

    def decode(self, summed: torch.Tensor) -> Metadata:
        """The metadata of all ranks together."""
        weight, trained, *flags = summed[: self._flags].tolist()
        dirty, used = flags[: self.buckets], flags[self.buckets :]
        return Metadata(weight, trained, [flag > 0 for flag in dirty], [flag > 0 for flag in used])

    def decode_numbers(self, summed: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks: float64, of shape ``[world size, room]``."""
        places = summed[self._flags :].view(self.world_size, -1)
        return places.to(torch.int16).view(torch.float64)
