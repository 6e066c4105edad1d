"""A loop of one's own, without a host framework: what each process computes is its part of the same batches."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from kit.machine import Slowness
from shared_worlds import TWO, WIDE, Bodies, in_ways
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from ways import Way

from ddp_callbacks import GradientSynchronizer, Share, shard_loader, with_shares
from ddp_callbacks.errors import ConfigurationError

WORLD = Bodies(__name__)
BATCH_SIZE = 8
SAMPLES = 25  # three batches, and one of a single sample, which most processes don't have
RELATIVE = 1e-12
pytestmark = pytest.mark.shares_results()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def map_style(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=workers)


LOADERS = {"map-style": map_style, "workers": lambda: map_style(1), "stream": lambda: DataLoader(Stream(), BATCH_SIZE)}


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def train(kind: str) -> tuple[list[torch.Tensor], list[Share]]:
    """Two epochs; the parameters, and this process's shares."""
    model, optimizer = network()
    part, shares = shard_loader(LOADERS[kind]()), []
    with closing(GradientSynchronizer(model)) as synchronizer:
        for batch, share in (drawn for _ in range(2) for drawn in with_shares(part)):
            synchronizer.weigh(share.local, share.total)
            step(model, optimizer, *batch)
            shares.append(share)
    return [parameter.detach() for parameter in model.parameters()], shares


def train_plainly(kind: str) -> list[torch.Tensor]:
    """The same in torch alone."""
    model, optimizer = network()
    loader = LOADERS[kind]()
    for batch in (drawn for _ in range(2) for drawn in loader):
        step(model, optimizer, *batch)
    return [parameter.detach() for parameter in model.parameters()]


@WORLD.runs(TWO, WIDE)
def train_by_each_loader() -> Any:
    return {kind: train(kind) for kind in LOADERS}


@pytest.mark.parametrize("kind", LOADERS)
@in_ways(TWO, WIDE)
def test_the_processes_of_a_loop_train_as_one(way: Way, kind: str) -> None:
    """Your own loop trains as on one process."""
    expected = train_plainly(kind)
    sizes = [[(size - rank + way.size - 1) // way.size for size in (8, 8, 8, 1)] for rank in range(way.size)]
    for rank, results in enumerate(WORLD.returned(train_by_each_loader, way)):
        parameters, shares = results[kind]
        torch.testing.assert_close(parameters, expected, rtol=RELATIVE, atol=0)
        assert shares == [Share(local, total) for local, total in zip(sizes[rank], (8, 8, 8, 1), strict=True)] * 2


def test_one_process_has_the_whole_of_each_batch() -> None:
    parameters, shares = train("map-style")
    torch.testing.assert_close(parameters, train_plainly("map-style"), rtol=0, atol=0)
    assert shares == [Share(size, size) for size in (8, 8, 8, 1)] * 2


@WORLD
def shares_of_a_distributed_sampler() -> list[Share]:
    own = DataLoader(samples(), BATCH_SIZE, sampler=DistributedSampler(samples(), shuffle=False))
    return [share for _, share in with_shares(shard_loader(own, "per_process"))]


def test_the_total_of_a_distributed_sampler_s_batches_is_not_known() -> None:
    assert WORLD.returned(shares_of_a_distributed_sampler) == [[Share(8, None), Share(5, None)]] * 2


def time_first(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.stack([row[0], row[0], row[0]]) for row in rows], dim=1)


@WORLD
def refuse_loaders() -> list[str]:
    found = []
    for loader in (
        DataLoader(Stream(), BATCH_SIZE, collate_fn=time_first),
        DataLoader(Stream(), BATCH_SIZE, num_workers=1, in_order=False),
    ):
        with pytest.raises(ConfigurationError) as caught:
            next(iter(shard_loader(loader)))
        found.append(str(caught.value))
    return found


def test_batches_that_cannot_be_divided_are_refused_with_the_remedy() -> None:
    """Loaders refuse batches with time first and unordered streams."""
    for with_time_first, in_any_order in WORLD.returned(refuse_loaders):
        assert with_time_first.startswith("samples must lie along the first dimension of a batch, which is divided")
        assert f"with batch_size={BATCH_SIZE}. Let collate_fn put the samples first" in with_time_first
        assert in_any_order.startswith("DataLoader(in_order=False) must be in_order=True here")


def leave_a_loop(dataset: Any) -> tuple[int, int, float]:
    """Workers before and after the garbage collector has found a loop that was left; how long it took, in CPU terms."""
    part: Any = shard_loader(DataLoader(dataset, BATCH_SIZE, num_workers=2))
    batches = iter(part)
    next(batches)
    dataset.loop = {"batches": batches, "part": part}  # as a Trial, its callbacks and its data refer to each other
    before = len(multiprocessing.active_children())
    del dataset, part, batches
    with Slowness() as slowness:
        gc.collect()
    return before, len(multiprocessing.active_children()), slowness.took / slowness.factor


@WORLD
def leave_loops() -> list[tuple[int, int, float]]:
    return [leave_a_loop(Stream()), leave_a_loop(samples())]


def test_the_workers_of_a_loop_that_was_left_end_at_once() -> None:
    """A loader's workers end with your loop."""
    for before, after, took in (found for rank in WORLD.returned(leave_loops) for found in rank):
        assert (before, after) == (2, 0)
        assert took < MP_STATUS_CHECK_INTERVAL, "torch waits so long for each worker that has not heard of its end"
