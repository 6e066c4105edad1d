"""Replicas that differ are named at the end of the epoch, and those that do not are left alone."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.ranks import HOSTNAME, run_distributed
from shared_worlds import TWO, WIDE, Bodies, in_ways
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchbearer import Callback
from trainers import Net, fit, loader, quiet, trainer
from trials import data, network, trial
from ways import Way

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.sharding import shard_loader, with_shares
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replicas import require_equal_replicas
from ddp_callbacks.torchbearer import DDPCallback

WORLD = Bodies(__name__)
pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]


class Odd(nn.Module):
    """Tensors of all kinds; the cache differs between ranks by its nature."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.large = nn.Parameter(torch.randn(300, 301, generator=generator).t())
        self.small = nn.Parameter(torch.randn(7, dtype=torch.bfloat16, generator=generator))
        self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=generator))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("broken", torch.tensor([torch.nan, 0.0, torch.inf]))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def changes(model: Odd) -> dict[str, Any]:
    """By name: what a rank may do to its replica."""
    return {
        "nothing": lambda: None,
        "the cache": lambda: model.cache.fill_(dist.get_rank()),
        "a bit": lambda: model.large.view(torch.int32)[7, 9].bitwise_xor_(1),
        "an order": lambda: model.large.copy_(model.large[torch.randperm(301)]),
        "a small one": lambda: model.small[6].mul_(2),
        "a number": lambda: model.wave[0].add_(1j),
        "a flag": lambda: model.flags.logical_not_(),
        "a count": lambda: model.count.add_(1),
        "a NaN": lambda: model.broken[1].fill_(torch.nan),
        "the sign of zero": lambda: model.broken[1].neg_(),
        "the bits of a NaN": lambda: model.broken.view(torch.int32)[0].add_(1),
    }


@WORLD.runs(TWO, WIDE)
def compare() -> dict[str, str]:
    found = {}
    for name in changes(Odd()):
        model = Odd()
        if dist.get_rank() == 1:
            with torch.no_grad():
                changes(model)[name]()
        found[name] = message(model)
    model = Odd()
    with torch.no_grad():
        model.large.add_(dist.get_rank() == 0)
        model.count.add_(dist.get_rank() == 0)
    found["all but one"] = message(model)
    return found


@WORLD
def compare_on_different_processors() -> list[Any]:
    """The warning, and whether the replica is rank 0's afterwards."""
    name = f"processor {dist.get_rank()}"
    model = Odd()
    with torch.no_grad():
        model.large.add_(1e-6 * dist.get_rank())
    with (
        mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: name),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        text = message(model)
    return [text, str(caught[0].message), torch.equal(model.large, Odd().large)]


def message(model: nn.Module) -> str:
    try:
        require_equal_replicas(model, "at the end of epoch 3")
    except MismatchError as error:
        return str(error)
    return ""


@in_ways(TWO, WIDE)
def test_a_replica_that_differs_is_named_with_tensor_rank_host_and_distance(way: Way) -> None:
    """An error names replicas that differ."""
    found, *others = WORLD.returned(compare, way)
    assert all(other == found for other in others)
    equal = {name for name, text in found.items() if not text}
    assert equal == {"nothing", "the cache", "the sign of zero", "the bits of a NaN"}
    named = {name: text.splitlines()[1].strip() for name, text in found.items() if text}
    who = f"rank 1 ({HOSTNAME}) differs from rank 0{', 2' * (way.size > 2)}, by up to"
    assert named["a bit"].startswith(f"parameter large: {who} ") and 0 < float(named["a bit"].split()[-1]) < 1e-5
    assert named["an order"].startswith(f"parameter large: {who} ")
    assert named["a small one"].startswith(f"parameter small: {who} ")
    assert named["a number"] == f"parameter wave: {who} 1"
    assert named["a flag"] == f"buffer flags: {who} 1"
    assert named["a count"] == f"buffer count: {who} 1"
    assert named["a NaN"] == f"buffer broken: {who} inf"
    if way.size > 2:
        assert named["all but one"] == f"parameter large: rank 0 ({HOSTNAME}) differs from rank 1, 2, by up to 1"
    assert "the ranks hold different models at the end of epoch 3" in found["a bit"]


def test_where_processors_differ_all_go_on_with_rank_0s_replica() -> None:
    for error, warning, is_first in WORLD.returned(compare_on_different_processors):
        assert not error and "all go on with rank 0's" in warning and is_first


class Perturbs(Callback):
    def on_step_training(self, state: Any) -> None:
        if dist.get_rank() == 1 and state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 0:
            with torch.no_grad():
                state[torchbearer.MODEL][0].weight[0, 0].add_(1e-6)


@WORLD
def trial_with_a_perturbed_replica() -> tuple[str, int, float]:
    made = trial([DDPCallback(), Perturbs()]).with_train_generator(DataLoader(data(16), 8))
    with pytest.raises(MismatchError) as error:
        made.run(4)
    drawn = float(torch.rand(()))
    begin_run()
    return str(error.value), len(made.state[torchbearer.HISTORY]), drawn


def test_a_trial_whose_replicas_have_gone_apart_says_so_at_the_end_of_the_epoch() -> None:
    (text, epochs, drawn), (other, _, drawn_there) = WORLD.returned(trial_with_a_perturbed_replica)
    assert text == other and epochs == 2
    assert drawn == drawn_there, "a run that has ended leaves the ranks drawing alike"
    assert "at the end of epoch 1:\n  parameter 0.weight: rank 1 (" in text


class PerturbsModule(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            with torch.no_grad():
                module.layers[2].bias[0].add_(1e-6)


@WORLD
def trainer_with_a_perturbed_replica() -> str:
    with quiet(), pytest.raises(MismatchError) as error:
        fit("ddp_callbacks", Net(), callbacks=[PerturbsModule()], max_epochs=4)
    begin_run()
    return str(error.value)


def test_a_trainer_whose_replicas_have_gone_apart_says_so_at_the_end_of_the_epoch() -> None:
    text, other = WORLD.returned(trainer_with_a_perturbed_replica)
    assert text == other
    assert "at the end of epoch 1:\n  parameter layers.2.bias: rank 1 (" in text


# --- what ranks resume from -------------------------------------------------------------------------------------------


def resume_trainer(paths: list[str]) -> tuple[int, str]:
    """From equal copies, then from two checkpoints."""
    same, other = paths[dist.get_rank()], paths[-1 if dist.get_rank() else 0]
    with quiet():
        made = trainer("ddp_callbacks", max_epochs=3)
        made.fit(Net(), loader(), ckpt_path=same)
        with pytest.raises(MismatchError) as error:
            trainer("ddp_callbacks", max_epochs=3).fit(Net(), loader(), ckpt_path=other)
    return made.current_epoch, str(error.value)


def test_ranks_of_a_trainer_that_resume_from_two_checkpoints_are_named_with_both(tmp_path: Path) -> None:
    """An error names ranks that resume from two checkpoints."""
    paths = [str(tmp_path / name) for name in ("one.ckpt", "copy.ckpt", "two.ckpt")]
    with quiet():
        for epochs, path in ((1, paths[0]), (2, paths[2])):
            made = trainer("auto", max_epochs=epochs)
            made.fit(Net(), loader())
            made.save_checkpoint(path)
    shutil.copy(paths[0], paths[1])
    for epochs, text in run_distributed(resume_trainer, 2, paths):
        assert epochs == 3
        assert f"resumes from: {paths[0]} (epoch 1, global_step 4, checksum " in text
        assert f"on rank 0; {paths[2]} (epoch 2, global_step 8, checksum " in text


def resume_trial(paths: list[str]) -> tuple[int, str]:
    def resumed(path: str) -> Any:
        made = trial([DDPCallback()]).with_train_generator(DataLoader(data(16), 8))
        return made.load_state_dict(torch.load(path, weights_only=False))

    same = resumed(paths[0])
    same.run(3)
    with pytest.raises(MismatchError) as error:
        resumed(paths[dist.get_rank()]).run(3)
    return len(same.state[torchbearer.HISTORY]), str(error.value)


def test_ranks_of_a_trial_that_resume_from_two_checkpoints_are_named_with_both(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one.pt", "other.pt")]
    for seed, path in enumerate(paths):
        made = trial([], model=network(seed)).with_train_generator(DataLoader(data(16), 8))
        made.run(1)
        torch.save(made.state_dict(), path)
    for epochs, text in run_distributed(resume_trial, 2, paths):
        assert epochs == 3
        assert "resumes from: a state (epochs 1, checksum " in text
        assert "on rank 0; a state (epochs 1, checksum " in text


# --- data that must be equal ------------------------------------------------------------------------------------------


class Key:
    """Has no repr of its own: Python's says the address."""

    def __init__(self, index: int) -> None:
        self.index = index


class Keyed(Dataset[Any]):
    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor(float(key.index))

    def __len__(self) -> int:
        return 6


@WORLD
def divided_data() -> tuple[list[float], dict[str, str]]:
    rank = dist.get_rank()
    elsewhere = [Key(index) for index in range(100 * rank)]
    keys = [Key(index) for index in range(6)]
    del elsewhere
    loader = DataLoader(Keyed(), batch_sampler=[keys[:4], keys[4:]])
    seen = [float(value) for batch, _ in with_shares(shard_loader(loader)) for value in batch]
    found = {}
    generator = torch.Generator().manual_seed(rank)
    labels = TensorDataset(torch.zeros(9, 2), (torch.arange(9) + rank) % 3)
    for name, dataset in {"split": random_split(range(9), [6, 3], generator)[0], "labels": labels}.items():  # type: ignore[arg-type]
        with pytest.raises(MismatchError) as error:
            next(with_shares(shard_loader(DataLoader(dataset, 3))))
        found[name] = str(error.value)
        begin_run()
    return seen, found


@WORLD
def shares_of_a_copy() -> list[int]:
    whole = shard_loader(DataLoader(range(7), 4), at_least=2)  # type: ignore[arg-type]
    return [share.local for _, share in with_shares(copy.deepcopy(whole))]


def test_a_copy_of_a_divided_loader_gives_no_process_a_part_that_is_too_short() -> None:
    assert WORLD.returned(shares_of_a_copy) == [[2, 3], [2, 0]]


def test_data_that_differ_are_named_and_keys_without_a_repr_are_not() -> None:
    """An unseeded `random_split` or differing labels raise an error."""
    (first, found), (second, others) = WORLD.returned(divided_data)
    assert (first, second) == ([0.0, 1.0, 4.0], [2.0, 3.0, 5.0])
    assert found.keys() == others.keys()
    assert "the ranks disagree about the data:\n  Subset: checksum of its indices and labels: " in found["split"]
    assert "TensorDataset: checksum of its indices and labels: " in found["labels"]
    assert "give random_split a seed" in found["split"]


def test_a_checksum_sees_every_entry_of_a_long_array_and_no_address() -> None:
    long = numpy.arange(5000)
    changed = long.copy()
    changed[2500] = 0
    assert checksum_of([long]) != checksum_of([changed])
    assert checksum_of(torch.from_numpy(long)) != checksum_of(torch.from_numpy(changed))
    assert checksum_of([Key(1), "a"]) == checksum_of([Key(1), "a"]) != checksum_of([Key(1), "b"])
    assert checksum_of([[1], [2]]) != checksum_of([[1, 2], []])
