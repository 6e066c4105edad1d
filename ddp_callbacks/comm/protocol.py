"""The interface of every all-reduce: :class:`AllReduce` starts a sum and returns a :class:`Work` handle."""

from __future__ import annotations

import weakref
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Work(Protocol):
    """The work handle of a sum."""

    def wait(self) -> None:
        """Block until the sum is complete.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """


class AllReduce(Protocol):
    """Sums tensors over the ranks. Every rank launches the same sums in the same order.

    Attributes:
        exact: Whether only the additions round, and no number is rounded before it is sent.
    """

    exact: bool

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a flat tensor in the memory that suits this all-reduce best. Local."""

    def launch(self, tensor: torch.Tensor, purpose: str) -> Work:
        """Start to sum ``tensor`` over the ranks, in place. Does not block.

        Args:
            tensor: A flat tensor from :meth:`allocate`, or a part of one.
            purpose: For error messages: "the gradients of 0.weight". The same on every rank.
        """


@torch.inference_mode(False)
def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a flat tensor in this process's own memory."""
    return torch.empty(numel, dtype=dtype, device=device)


def alive(reference: weakref.ref[T]) -> T:
    """Return the object that ``reference`` refers to, which must exist: nothing here outlives its process group."""
    found = reference()
    assert found is not None
    return found


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, flat, as real numbers: gloo has no complex dtypes."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
