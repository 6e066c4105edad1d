"""The metadata of a backward: numbers that the ranks send behind its gradients, and sum.

[Note: metadata]
Two things are known only when backward ends: which parameters were used, and whether a bucket must be sent again. If
control flow differs between ranks, so do these. They are sent behind the gradients of the last bucket, which is
therefore launched only at the end: ``[trained, dirty (one per bucket), used (one per parameter)]``, each summed
over the ranks. A message of their own would cost a tenth of the step of a small model; they get one, in float64, only
if the last bucket cannot carry them: low precision, compression, a communication hook. Gradients on GPUs never carry
them: they are sent between the CPUs. So the host never waits for its GPU, whose buckets are reduced in a stream, and
still notices in each step if another rank has failed.

After them come numbers of each rank: its weight, and whether it skips the step. Each rank writes to its own place,
which is zero on all other ranks, so the sum is a gather. The numbers are encoded as 16-bit integers, which float32
holds exactly, whatever their bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECES = 4  # 16-bit integers in a float64
_NUMBERS = 2  # of each rank


@dataclass(frozen=True)
class MetadataFormat:
    """Encodes the metadata of a rank as float64, and decodes the sum over the ranks.

    Attributes:
        buckets, parameters: How many there are; the message has a flag for each.
        rank, world_size: This rank, and the number of ranks.
    """

    buckets: int
    parameters: int
    rank: int
    world_size: int

    @property
    def numel(self) -> int:
        """The length of a message."""
        return 1 + self.buckets + self.parameters + self.world_size * _NUMBERS * _PIECES

    def encode(
        self, trained: float, dirty: Sequence[bool], used: Sequence[bool], numbers: Sequence[float]
    ) -> torch.Tensor:
        """Return this rank's message: what is summed, then ``numbers`` in its own place."""
        width = _NUMBERS * _PIECES
        places = [0] * (self.world_size * width)
        places[self.rank * width : (self.rank + 1) * width] = array("h", array("d", numbers).tobytes())
        return torch.tensor([trained, *dirty, *used, *places], dtype=torch.float64, device="cpu")

    def decode(self, summed: torch.Tensor) -> tuple[float, list[bool], list[bool], list[list[float]]]:
        """Return the sum of ``trained``, which flags any rank has set, and the numbers of each rank, by rank."""
        trained, *values = summed.tolist()
        flags, places = values[: self.buckets + self.parameters], values[self.buckets + self.parameters :]
        is_set = [count > 0 for count in flags]
        numbers = array("d", array("h", map(int, places)).tobytes()).tolist()
        by_rank = [numbers[rank * _NUMBERS : (rank + 1) * _NUMBERS] for rank in range(self.world_size)]
        return trained, is_set[: self.buckets], is_set[self.buckets :], by_rank
