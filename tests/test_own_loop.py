"""A loop of one's own, without a host framework: what each process computes is its part of the same batches."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed import run_distributed
from machine import Slowness
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.data.sharding import shard_loader, with_shares
from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import ConfigurationError

WORLD_SIZE = 3
BATCH_SIZE = 8
SAMPLES = 26  # three batches, and one of two samples, of which one process has none
RELATIVE = 1e-12


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def loader(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), BATCH_SIZE)
    return DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=1 if kind == "workers" else 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def train(kind: str) -> tuple[list[torch.Tensor], list[Share]]:
    """Two epochs; the parameters, and this process's shares."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    synchronizer = GradientSynchronizer(model)
    part, shares = shard_loader(loader(kind)), []
    for _ in range(2):
        for (inputs, targets), share in with_shares(part):
            synchronizer.weigh(share.local, share.total)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            shares.append(share)
    synchronizer.close()
    return [parameter.detach() for parameter in model.parameters()], shares


def train_plainly(kind: str) -> list[torch.Tensor]:
    """The same in torch alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = loader(kind)
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["map-style", "workers", "stream"])
def test_the_processes_of_a_loop_train_as_one(kind: str) -> None:
    expected = train_plainly(kind)
    sizes = [[3, 3, 2], [3, 3, 2], [3, 3, 2], [1, 1, 0]]
    for rank, (parameters, shares) in enumerate(run_distributed(train, WORLD_SIZE, kind)):
        torch.testing.assert_close(parameters, expected, rtol=RELATIVE, atol=0)
        assert shares == [Share(size[rank], sum(size)) for size in sizes] * 2


def test_one_process_has_the_whole_of_each_batch() -> None:
    parameters, shares = train("map-style")
    torch.testing.assert_close(parameters, train_plainly("map-style"), rtol=0, atol=0)
    assert shares == [Share(size, size) for size in (8, 8, 8, 2)] * 2


def shares_of_a_distributed_sampler() -> list[Share]:
    data = samples()
    own = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, shuffle=False))
    return [share for _, share in with_shares(shard_loader(own, "per_process"))]


def test_the_total_of_a_distributed_sampler_s_batches_is_not_known() -> None:
    assert run_distributed(shares_of_a_distributed_sampler, 2) == [[Share(8, None), Share(5, None)]] * 2


def time_first(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.stack([row[0], row[0], row[0]]) for row in rows], dim=1)


def batches_with_time_first() -> str:
    try:
        next(iter(shard_loader(DataLoader(Stream(), BATCH_SIZE, collate_fn=time_first))))
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def test_batches_with_time_first_are_refused_with_the_remedy() -> None:
    for text in run_distributed(batches_with_time_first, 2):
        assert text.startswith("samples must lie along the first dimension of a batch, which is divided, got"), text
        assert f"with batch_size={BATCH_SIZE}. Let collate_fn put the samples first" in text, text


def leave_a_loop(kind: str) -> tuple[int, int, float]:
    """Workers before and after the garbage collector has found a loop that was left; how long it took, in CPU terms."""
    dataset: Any = Stream() if kind == "stream" else samples()
    part: Any = shard_loader(DataLoader(dataset, BATCH_SIZE, num_workers=2))
    batches = iter(part)
    next(batches)
    dataset.loop = {"batches": batches, "part": part}  # as a Trial, its callbacks and its data refer to each other
    before = len(multiprocessing.active_children())
    del dataset, part, batches
    with Slowness() as slowness:
        gc.collect()
    return before, len(multiprocessing.active_children()), slowness.took / slowness.factor


@pytest.mark.parametrize(("kind", "workers"), [("map-style", 2), ("stream", 2)])
def test_the_workers_of_a_loop_that_was_left_end_at_once(kind: str, workers: int) -> None:
    """Not after the 5 s for each that torch waits for a worker which has not heard that it is to end."""
    for before, after, took in run_distributed(leave_a_loop, 2, kind):
        assert (before, after) == (workers, 0)
        assert took < MP_STATUS_CHECK_INTERVAL
