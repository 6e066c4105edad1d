"""Workers and loaders that keep something beyond a pass: programs, iterators, processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from shared_worlds import TWO, Bodies
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trials import data, trial

from ddp_callbacks import resumable_loader, shard_loader, with_shares
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer import DDPCallback, Resume

WORLD = Bodies(__name__)


class Programs(Dataset[int]):
    """Each sample needs a program, which is terminated; a scheduler signals the worker meanwhile."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["sleep", "60"])
        os.kill(os.getpid(), signal.SIGTERM)
        program.terminate()
        return program.wait(30)


def test_a_program_that_a_worker_of_a_resumable_loader_terminates_ends() -> None:
    """Workers may start programs and terminate them."""
    loader = resumable_loader(DataLoader(Programs(), 2, num_workers=1))
    assert [batch.tolist() for batch in loader] == [[-signal.SIGTERM] * 2] * 2


class Repeated:
    """A batch sampler that does not end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


class Endless(DataLoader[Any]):
    """As timm and ultralytics have it: its workers go on from pass to pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


def endless() -> Endless:
    torch.manual_seed(3)
    return Endless(TensorDataset(torch.arange(20)), batch_size=6, shuffle=True, num_workers=1)


@WORLD.on(TWO)
def test_an_endless_loader_is_divided_as_it_draws_on_one_process() -> None:
    """Endless loaders are divided."""
    alone = endless()
    expected = [[batch.tolist() for (batch,) in alone] for _ in range(2)]
    sharded = shard_loader(endless())
    for whole in expected:
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, [batch.tolist()[: share.local] for (batch,), share in with_shares(sharded)])
        assert [first + second for first, second in zip(*parts, strict=True)] == whole


def test_an_endless_loader_cannot_be_resumed_and_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"Endless keeps an iterator of its own .* persistent_workers=True"):
        resumable_loader(endless())


@WORLD.on(TWO)
def test_the_workers_of_a_trial_end_with_its_run() -> None:
    made = trial([DDPCallback()]).with_generators(DataLoader(data(20), 6, num_workers=1), DataLoader(data(12), 6))
    made.run(2)
    assert multiprocessing.active_children() == []
    made.evaluate()


def test_an_evaluation_in_the_middle_of_a_run_leaves_the_pass_under_way(tmp_path: Path) -> None:
    under_way: list[bool] = []

    @torchbearer.callbacks.on_step_training
    def evaluate(state: Any) -> None:
        if state[torchbearer.BATCH] == 1:
            state[torchbearer.SELF].evaluate()
            under_way.append(state[torchbearer.SELF].state[torchbearer.TRAIN_DATA][0].iterator is not None)

    (
        trial([Resume(tmp_path / "run.pt")], callbacks=[evaluate])
        .with_generators(DataLoader(data(20), 6), DataLoader(data(12), 6))
        .run(1)
    )
    assert under_way == [True]
