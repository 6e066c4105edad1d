"""Bernoulli draws on the CPU, which is most of what dropout costs: other ranks' rows are passed over, not drawn.

Where torch draws them one by one, each element takes 64 bits of the generator, in the order of memory. Raw bits cost
less than half of a draw. Where torch draws them by MKL (on Intel's processors), the whole batch costs little anyway.
"""

from __future__ import annotations

import functools
import math

import torch

from ddp_callbacks.randomness.rows import BatchDim, Rows

_MANTISSA = (1 << 53) - 1
_CHUNK = 1 << 14  # elements drawn or passed over at once; they fit in a cache


def is_drawn_from_bits(part: torch.Tensor, at: BatchDim) -> bool:
    """Whether :func:`fill` draws what ``bernoulli_`` draws for this part."""
    if part.device.type != "cpu" or not part.is_contiguous() or not _draws_one_by_one():
        return False
    if at.order is not None:
        return list(at.order) == sorted(at.order)
    return part.stride(at.dim) == math.prod(part.shape[at.dim + 1 :])  # also if there is one sample


def fill(part: torch.Tensor, probability: float, at: BatchDim, rows: Rows, generator: torch.Generator | None) -> None:
    """Fill this rank's rows as ``bernoulli_`` does; the generator advances by the whole batch.

    Args:
        part: A tensor for which :func:`is_drawn_from_bits`.
    """
    if math.prod(part.shape[: at.dim]) != 1:
        bits = torch.empty(at.whole(part.shape, rows), dtype=torch.int64).random_(generator=generator)
        part.copy_(_are_ones(at.rows_of(bits, rows), probability))
        return
    per_sample = part.numel() // rows.samples
    _pass_over(rows.start * per_sample, generator)
    flat, bits = part.view(-1), torch.empty(min(part.numel(), _CHUNK), dtype=torch.int64)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        chunk.copy_(_are_ones(bits[: len(chunk)].random_(generator=generator), probability))
    _pass_over((rows.total - rows.start - rows.samples) * per_sample, generator)


def _are_ones(bits: torch.Tensor, probability: float) -> torch.Tensor:
    return bits.bitwise_and_(_MANTISSA) < math.ceil(probability * (_MANTISSA + 1))


def _pass_over(count: int, generator: torch.Generator | None) -> None:
    bits = torch.empty(min(count, _CHUNK), dtype=torch.int64)
    for passed in range(0, count, _CHUNK):
        bits[: count - passed].random_(generator=generator)


@functools.cache
def _draws_one_by_one() -> bool:
    """Whether this build of torch draws as :func:`fill` assumes, on this processor."""
    drawn, same = (torch.Generator().manual_seed(7) for _ in range(2))
    expected = torch.empty(99).bernoulli_(0.3, generator=drawn)
    bits = torch.empty(99, dtype=torch.int64).random_(generator=same)
    is_same = torch.equal(expected, _are_ones(bits, 0.3).to(expected.dtype))
    return is_same and torch.equal(drawn.get_state(), same.get_state())
