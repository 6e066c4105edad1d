"""``LazyRandomSampler`` shuffles at once however many samples there are; others go on as fast as torch draws."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from ddp_callbacks import LazyRandomSampler, resumable_loader
from ddp_callbacks.comm.checksums import checksum_of


@pytest.mark.parametrize("size", [1, 2, 3, 10, 4096, 5001])
def test_a_lazy_shuffle_yields_each_index_once(size: int) -> None:
    """`LazyRandomSampler` yields each index once, evenly spread."""
    sampler = LazyRandomSampler(range(size), seed=3)
    whole = list(sampler)
    assert sorted(whole) == list(range(size)) and len(sampler) == size
    assert list(sampler.iterate_from(size // 2)) == whole[size // 2 :]
    sampler.set_epoch(1)
    assert size < 10 or list(sampler) != whole
    torch.manual_seed(1)
    drawn = list(LazyRandomSampler(range(size)))
    assert size < 10 or drawn != list(LazyRandomSampler(range(size)))  # each pass its own
    torch.manual_seed(1)
    assert list(LazyRandomSampler(range(size))) == drawn


def test_a_lazy_shuffle_spreads_evenly() -> None:
    # How often index i comes at position j, over 40 x 40 cells: chi square as for random permutations.
    size, cells, epochs = 400, 40, 200
    counts = torch.zeros(cells, cells, dtype=torch.float64)
    sampler = LazyRandomSampler(range(size), seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        places = torch.tensor(list(sampler)) * cells // size
        counts.view(-1).index_add_(0, torch.arange(size) * cells // size * cells + places, torch.ones(size).double())
    expected = epochs * size / cells**2
    chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), (cells - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def resumed(sampler: Any, batch_size: int, batches: int, last: list[int]) -> tuple[list[int], float]:
    """The next batch after so many, of which this was the last, and the seconds of CPU until it is there."""
    torch.manual_seed(0)
    loader = resumable_loader(DataLoader(range(len(sampler)), batch_size, sampler=sampler))  # type: ignore[arg-type]
    next(iter(loader))
    state = loader.state_dict()
    state["pass"] |= {"batches": batches, "drawn": batches, "checksum": checksum_of(last)}
    begin = time.thread_time()
    loader.load_state_dict(state)
    return next(iter(loader)).tolist(), time.thread_time() - begin


def test_the_first_batch_after_a_million_of_a_huge_data_set_comes_at_once() -> None:
    """After a million batches it goes on at once."""
    huge = range(10**8)
    order = LazyRandomSampler(huge, seed=1)
    last, expected = (list(itertools.islice(order.iterate_from(64 * batch), 64)) for batch in (999_999, 10**6))
    first, took = resumed(LazyRandomSampler(huge, seed=1), 64, 10**6, last)
    assert first == expected
    assert took < 2


def test_torchs_sampler_takes_as_long_as_torch_needs_to_draw() -> None:
    numbers = range(10**6)
    torch.manual_seed(0)
    for _ in range(2):  # the first seed is for workers
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    begin = time.thread_time()
    order = list(RandomSampler(numbers, generator=torch.Generator().manual_seed(seed)))
    to_draw = time.thread_time() - begin
    end = 8 * 10**5
    first, took = resumed(RandomSampler(numbers), 8, 10**5, order[end - 8 : end])
    assert first == order[end : end + 8]
    assert took < 3 * to_draw + 0.5
