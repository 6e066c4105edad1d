"""What every way to sum over the ranks offers: :class:`AllReduce` starts a sum and returns a :class:`Work` handle."""

from __future__ import annotations

import weakref
from typing import Protocol, TypeVar

import torch

from ddp_callbacks._torch import outside_inference_mode

T = TypeVar("T")


class Work(Protocol):
    """The handle of a sum that is under way."""

    def wait(self) -> None:
        """Block until the sum is there.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """


class AllReduce(Protocol):
    """A way to sum over the ranks. Every rank launches the same sums in the same order.

    Attributes:
        exact: Whether nothing is rounded but the sums themselves.
    """

    exact: bool

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in the memory that suits this way best. Local."""

    def launch(self, tensor: torch.Tensor, doing: str) -> Work:
        """Start to sum ``tensor`` over the ranks, in place. Does not block.

        Args:
            tensor: From :meth:`allocate`, or a part of one; flat.
            doing: The purpose, for error messages: "the gradients of bucket 3". The same on every rank.
        """


@outside_inference_mode
def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor in this process's own memory."""
    return torch.empty(numel, dtype=dtype, device=device)


def alive(reference: weakref.ref[T]) -> T:
    """What it refers to: what hangs on a process group is not used after its end."""
    found = reference()
    assert found is not None
    return found


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as real numbers: gloo knows no complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
