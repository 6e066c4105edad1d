"""Bernoulli draws on the CPU, which is most of what dropout costs: other ranks' rows are passed over, not drawn.

Where torch draws them one by one, each element takes 64 bits of the generator, in the order of memory. Raw bits cost
less than half of a draw. Where torch draws them by MKL (on Intel's processors), the whole batch costs little anyway.
"""

from __future__ import annotations

import functools
import math

import torch

from ddp_callbacks.randomness.rows import BatchDim, Rows, is_dense, order_of

_MANTISSA = (1 << 53) - 1
_CHUNK = 1 << 14  # elements drawn or passed over at once; they fit in a cache


def is_drawn_from_bits(part: torch.Tensor, at: BatchDim) -> bool:
    """Whether :func:`fill` draws what ``bernoulli_`` draws for this part."""
    if part.device.type != "cpu" or part.numel() == 0 or not is_dense(part, order_of(part, at), at.dim):
        return False
    return _draws_one_by_one()


def fill(part: torch.Tensor, probability: float, at: BatchDim, rows: Rows, generator: torch.Generator | None) -> None:
    """Fill this rank's rows as ``bernoulli_`` does; the generator advances by the whole batch.

    Args:
        part: A tensor for which :func:`is_drawn_from_bits`.
    """
    order = order_of(part, at)
    outside = math.prod(part.shape[dim] for dim in order[: order.index(at.dim)])
    runs = part.permute(*order).reshape(outside, -1)  # this rank's rows, of each run of the whole batch in memory
    own = runs.shape[1]
    before, whole = own // rows.samples * rows.start, own // rows.samples * rows.total
    if whole <= _CHUNK:
        for some in runs.split(_CHUNK // whole):
            bits = torch.empty(len(some), whole, dtype=torch.int64).random_(generator=generator)
            _set(some, bits.narrow(1, before, own), probability)
        return
    for run in runs:
        _pass_over(before, generator)
        for piece in run.split(_CHUNK):
            _set(piece, torch.empty(len(piece), dtype=torch.int64).random_(generator=generator), probability)
        _pass_over(whole - before - own, generator)


def _set(part: torch.Tensor, bits: torch.Tensor, probability: float) -> None:
    torch.lt(bits.bitwise_and_(_MANTISSA), math.ceil(probability * (_MANTISSA + 1)), out=part)


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
    ones = torch.empty(99)
    _set(ones, bits, 0.3)
    return torch.equal(expected, ones) and torch.equal(drawn.get_state(), same.get_state())
