"""What every way to sum offers, and the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_callbacks.collectives import Reduction
from ddp_callbacks.segments import outside_inference_mode

Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Pending(Protocol):
    """A sum that is under way."""

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` as :func:`ddp_callbacks.failures.wait` does."""


class AllReduce(Protocol):
    """A way to sum. Every rank launches the same sums in the same order.

    Attributes:
        exact: Whether nothing is rounded but the sums themselves.
        unattended: Whether a sum that every rank has launched is made though no other rank waits for it.
    """

    exact: bool
    unattended: bool

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in which this way sums best. Local."""

    def launch(self, tensor: torch.Tensor, doing: str = "") -> Pending:
        """Start to sum ``tensor`` (flat, contiguous) over the ranks, in place. Does not block.

        Args:
            doing: What this is for, the same on every rank: it travels with the sum.
        """


class GroupAllReduce:
    """By the collectives of the process group (gloo, NCCL)."""

    exact = True
    unattended = True

    def __init__(self, group: dist.ProcessGroup, allocate: Allocator) -> None:
        self._group = group
        self.allocate = allocate

    def launch(self, tensor: torch.Tensor, doing: str = "") -> Reduction:
        return Reduction(tensor, self._group, doing)


@outside_inference_mode
def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of this process alone."""
    return torch.empty(numel, dtype=dtype, device=device)
