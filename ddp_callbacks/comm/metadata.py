"""What the ranks tell each other behind the gradients of a backward, as numbers that are summed.

[Note: metadata]
Two things are known only when backward ends: which parameters were used, and whether a bucket must be sent again. If
control flow differs between ranks, so do these. They are sent behind the gradients of the last bucket, which is
therefore never launched before the end: ``[trained, dirty (one per bucket), used (one per parameter)]``, each summed
over the ranks. A message of their own would cost a tenth of the step of a small model; they get one, in float64, only
if the last bucket cannot carry them: low precision, compression, a communication hook. Gradients on GPUs never carry
them: they are sent between the CPUs. So the host never waits for its GPU, whose buckets are reduced in a stream, and
still notices in each step if another rank has failed.

Behind them are numbers of each rank: its weight, and what the caller sends, which saves a message. Each rank writes to
its own place, which is zero on all other ranks, so the sum is a gather. The numbers are encoded as 16-bit integers,
which float32 holds exactly, whatever their bits.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch

_PIECES = 4  # 16-bit integers in a float64


class Metadata(NamedTuple):
    """The metadata of one rank, or of all ranks together.

    Attributes:
        trained: The checksum of the trained parameters, or the sum of all.
        dirty: Per bucket, whether it must be sent again.
        used: Per parameter, whether there is a gradient for it.
    """

    trained: float
    dirty: list[bool]
    used: list[bool]


@dataclass(frozen=True)
class MetadataFormat:
    """Encodes the metadata of a rank as float64, and decodes the sum over the ranks.

    Attributes:
        buckets, parameters: Their numbers.
        rank, world_size: This rank, and how many there are.
        numbers: How many of each rank travel along.
    """

    buckets: int
    parameters: int
    rank: int
    world_size: int
    numbers: int

    @property
    def numel(self) -> int:
        """The length of a message."""
        return 1 + self.buckets + self.parameters + self.world_size * self.numbers * _PIECES

    def encode(self, own: Metadata, numbers: array[float]) -> torch.Tensor:
        """This rank's message."""
        width = self.numbers * _PIECES
        places = [0] * (self.world_size * width)
        places[self.rank * width : (self.rank + 1) * width] = array("h", numbers.tobytes())
        return torch.tensor([own.trained, *own.dirty, *own.used, *places], dtype=torch.float64)

    def decode(self, summed: torch.Tensor) -> tuple[Metadata, array[float]]:
        """The metadata of all ranks together, and their numbers, rank by rank."""
        trained, *values = summed.tolist()
        end = self.buckets + self.parameters
        flags = [value > 0 for value in values[:end]]
        numbers = array("d", array("h", map(int, values[end:])).tobytes())
        return Metadata(trained, flags[: self.buckets], flags[self.buckets :]), numbers
