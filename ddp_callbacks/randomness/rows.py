"""Which rows of the whole batch a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """The rows of the whole batch that this rank computes.

    Attributes:
        start: Number of samples before them.
        samples: Number of samples of this rank's part, padding included.
        total: Number of samples of the whole batch.
    """

    start: int
    samples: int
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole batch, so that its draws are those of one process anyway."""
        return self.samples in (0, self.total)


class BatchDim(NamedTuple):
    """Which dimension of a shape holds the batch.

    Attributes:
        dim: The dimension.
        per_sample: How many of its entries one sample has, as an attention's heads.
        order: The dimensions from the outermost in memory to the innermost, if the part alone does not tell it.
        blocks: How many times all samples follow each other in it, as in ``torch.cat([one_view, other_view])``.
    """

    dim: int
    per_sample: int
    order: Sequence[int] | None = None
    blocks: int = 1

    def whole(self, shape: Sequence[int], rows: Rows) -> list[int]:
        """Return a part's shape with the samples of the whole batch."""
        return [*shape[: self.dim], rows.total * self.per_sample, *shape[self.dim + 1 :]]

    def rows_of(self, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return a view of this rank's rows."""
        return whole.narrow(self.dim, rows.start * self.per_sample, rows.samples * self.per_sample)


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost.

    Of two dimensions with one stride, that of size 1 is the inner one.
    """
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], tensor.shape[dim] == 1, dim))


def order_of(part: torch.Tensor, at: BatchDim) -> Sequence[int]:
    """Return the order of the part's dimensions in memory, learned from earlier parts if it does not tell."""
    return at.order if at.order is not None and len(at.order) == part.dim() else memory_order(part)


def is_dense(part: torch.Tensor, order: Sequence[int], batch_dim: int) -> bool:
    """Whether there are no gaps between the elements, also not between samples if there is only one."""
    expected = 1
    for dim in reversed(order):
        if part.stride(dim) != expected and (part.shape[dim] != 1 or dim == batch_dim):
            return False
        expected *= part.shape[dim]
    return True
