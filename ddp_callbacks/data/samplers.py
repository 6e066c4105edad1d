"""Samplers: begin at the n-th batch, and shuffle a data set of any size without drawing its order first."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from ddp_callbacks.data.global_state import digest_of

_CHUNK = 4096  # indices computed at a time
_ROUNDS = 4
_END = object()
_FIXED = {type(iter([])), type(iter(())), type(iter(range(0)))}  # iterators over values that exist already


def begin_at(sampler: Any, start: int) -> tuple[Iterator[Any], bool]:
    """Return an iterator over ``sampler`` from item ``start`` on, and whether its order is fixed.

    A fixed order does not depend on when you draw the items. torch's own ``BatchSampler`` does not build the skipped
    batches: its inner sampler skips their indices. A sampler with a method ``iterate_from(start)`` need not draw the
    skipped items.
    """
    if type(sampler) is BatchSampler:
        rest = copy.copy(sampler)
        rest.sampler, is_fixed = begin_at(sampler.sampler, start * sampler.batch_size)
        return iter(rest), is_fixed
    if start and hasattr(sampler, "iterate_from"):
        return iter(sampler.iterate_from(start)), _draws_first(sampler)
    if type(sampler) is SequentialSampler:
        return iter(range(start, len(sampler))), True
    found = iter(sampler)
    return itertools.islice(_items(found), start, None), _draws_first(sampler) or type(found) in _FIXED


def _items(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield what is left. To call ``iter`` again would begin a pass of some, as of Lightning's sampler for predict."""
    while (item := next(iterator, _END)) is not _END:
        yield item


def name_of_sampler(sampler: Any) -> str:
    """Return the class name of the sampler, or of the sampler inside torch's own ``BatchSampler``."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler).__name__


def _draws_first(sampler: Any) -> bool:
    """Whether the sampler draws its order when the pass begins, or from a generator of its own."""
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler).__module__.startswith(("torch.utils.data", "ddp_callbacks."))


class LazyRandomSampler(Sampler[int]):
    """Shuffles a data set of any size: each index is computed when it is asked for.

    torch's ``RandomSampler`` draws the whole order first: for 10^8 samples it takes seconds, and 4 GB. This one begins
    at once anywhere in the order, and needs little memory. Each pass yields every index once. The order is a
    pseudorandom permutation, not one drawn uniformly from all.

    Args:
        data_source: The data set; only its length is used.
        seed: Determines the order, together with :meth:`set_epoch`. ``None``: each pass draws a seed from torch's
            global random state, as ``RandomSampler`` does.
    """

    def __init__(self, data_source: Sized, seed: int | None = None) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Give each epoch its own order, if there is a ``seed``. Call it before each pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, start: int) -> Iterator[int]:
        """Yield the indices of a pass from item ``start`` on. The time to begin does not depend on ``start``."""
        if self.seed is None:
            key = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        else:
            key = digest_of(self.seed, self.epoch)
        return _permuted(start, len(self), key)


def _permuted(start: int, size: int, key: int) -> Iterator[int]:
    """Yield items ``start`` to ``size`` of a pseudorandom permutation of ``range(size)``.

    A Feistel network permutes the cells of a square with at least ``size`` cells: it shifts row and column in turn,
    each by a random number that depends on the other. It permutes a result outside of the range again, until it is
    inside.
    """
    columns = max(1, math.isqrt(size))
    rows = max(1, -(-size // columns))
    generator = torch.Generator().manual_seed(key)
    shifts = [
        (torch.randint(rows, (columns,), generator=generator), torch.randint(columns, (rows,), generator=generator))
        for _ in range(_ROUNDS)
    ]

    def permute(numbers: torch.Tensor) -> torch.Tensor:
        row, column = numbers // columns, numbers % columns
        for by_column, by_row in shifts:
            row = (row + by_column[column]) % rows
            column = (column + by_row[row]) % columns
        return row * columns + column

    for first in range(start, size, _CHUNK):
        numbers = permute(torch.arange(first, min(first + _CHUNK, size), device="cpu"))
        while (outside := numbers >= size).any():
            numbers[outside] = permute(numbers[outside])
        yield from numbers.tolist()
