"""Replicas that differ are named in mid-epoch or at its end, or repaired; those that do not differ are left alone."""

from __future__ import annotations

import copy
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.ranks import HOSTNAME, run_distributed
from shared_worlds import TWO, WIDE, World, by_rank
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchbearer import Callback
from trainers import Net, fit, loader, quiet, trainer
from trials import data, network, trial
from ways import Way

from ddp_callbacks.data.sharding import shard_loader, with_shares
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replicas import checks as replica_checks
from ddp_callbacks.replicas import equality, step_times
from ddp_callbacks.replicas.checks import ReplicaChecks
from ddp_callbacks.replicas.parameters import broadcast_parameters, merge_buffers, require_equal_replicas
from ddp_callbacks.replicas.step_times import StepTimes
from ddp_callbacks.reporting import stopwatch
from ddp_callbacks.torchbearer import DDPCallback

WORLD = World(__name__)
NIGHT = Way(3, tier="night")
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
        self.register_buffer("levels", torch.zeros(1 << 16, dtype=torch.int16))
        self.register_buffer("codes", torch.zeros(3).to(torch.float8_e4m3fn))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


# What rank 1 does to its replica, and what is said of that; nothing if the replicas still count as equal.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda model: None, ""),
    "the cache": (lambda model: model.cache.fill_(1), ""),
    "a bit": (lambda model: model.large.view(torch.int32)[7, 9].bitwise_xor_(1), "parameter large: {who} "),
    "an order": (lambda model: model.large.copy_(model.large[torch.randperm(301)]), "parameter large: {who} "),
    "a small one": (lambda model: model.small[6].mul_(2), "parameter small: {who} "),
    "a number": (lambda model: model.wave[0].add_(1j), "parameter wave: {who} 1"),
    "a flag": (lambda model: model.flags.logical_not_(), "buffer flags: {who} 1"),
    "a count": (lambda model: model.count.add_(1), "buffer count: {who} 1"),
    "a number of a dtype that gloo does not know": (lambda model: model.levels[0].add_(1), "buffer levels: {who} 1"),
    "a number of eight bits": (lambda model: model.codes.fill_(1), "buffer codes: {who} 1"),
    "a NaN": (lambda model: model.broken[1].fill_(torch.nan), "buffer broken: {who} inf"),
    "the sign of zero": (lambda model: model.broken[1].neg_(), ""),
    "the bits of a NaN": (lambda model: model.broken.view(torch.int32)[0].add_(1), ""),
}


def changed(change: Callable[[Any], Any], odd: int = 1) -> Odd:
    """A replica, on one rank with a change."""
    model = Odd()
    if dist.get_rank() == odd:
        with torch.no_grad():
            change(model)
    return model


def said_of(model: nn.Module, on_divergence: Any = "raise") -> str:
    """The message, which is the same on all ranks."""
    text = ""
    try:
        require_equal_replicas(model, "at the end of epoch 3", on_divergence=on_divergence)
    except MismatchError as error:
        text = str(error)
    assert by_rank(text) == [text] * dist.get_world_size()
    return text


@WORLD.each(CHANGES, TWO, WIDE)
def test_a_replica_that_differs_is_named_with_tensor_rank_host_and_distance(name: str) -> None:
    """An error names replicas that differ."""
    change, says = CHANGES[name]
    text = said_of(changed(change))
    assert bool(text) == bool(says), text
    if says:
        others = ", ".join(str(rank) for rank in range(dist.get_world_size()) if rank != 1)
        headline, named, *_ = text.splitlines()
        assert "the ranks hold different models at the end of epoch 3" in headline
        assert named.strip().startswith(says.format(who=f"rank 1 ({HOSTNAME}) differs from rank {others}, by up to"))
        assert 0 < float(named.split()[-1]) < 1e-5 or name != "a bit"


@WORLD
def test_a_buffer_that_follows_each_ranks_data_is_named_before_rank_0s_overwrites_it() -> None:
    """Rank 0 names buffers outside BatchNorm that differ; non-persistent ones stay each rank's own."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(2), Odd())
    model[1].graph = None  # sparse tensors are not sent
    model[1].count.add_(rank)
    model[0].running_mean.add_(rank)
    model[0].num_batches_tracked.add_(rank)
    model[1].cache = torch.zeros(4 + rank)
    model[1].register_buffer("memory", torch.full((3,), float(rank)), persistent=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merge_buffers(model, 1)
        merge_buffers(model, 1)
    said = [str(warning.message) for warning in caught]
    named = [text.partition(" differed between the ranks, each of which has other data; ")[::2] for text in said]
    assert [name for name, _ in named] == ["buffer 1.count", "buffer 1.memory", "buffer 1.memory"] * (rank == 0)
    assert all(follows.startswith(("all got rank 0's", "each keeps its own. Unless")) for _, follows in named), said
    assert (int(model[1].count), len(model[1].cache)) == (3, 4 + rank)
    assert model[0].running_mean.tolist() == [0.5, 0.5]
    broadcast_parameters(model)
    assert len(model[1].cache) == 4 + rank


@WORLD
def test_a_buffer_of_another_shape_on_a_rank_is_named_before_an_evaluation() -> None:
    model = Odd()
    model.count = torch.zeros(2 + dist.get_rank(), 3)
    with pytest.raises(MismatchError, match=re.escape("buffer count: [2, 3] float32 on rank 0; [3, 3] float32 on")):
        merge_buffers(model, 1)


@WORLD.on(WIDE)
def test_the_one_of_three_that_differs_is_named_also_if_it_is_the_first() -> None:
    text = said_of(changed(lambda model: model.large.add_(1), odd=0))
    assert f"parameter large: rank 0 ({HOSTNAME}) differs from rank 1, 2, by up to 1" in text


@WORLD
def test_of_two_that_differ_neither_repairs_the_other() -> None:
    assert "there is no such majority. All ranks" in said_of(changed(lambda model: model.large.add_(1)), "repair")


@WORLD
def test_where_processors_differ_all_go_on_with_rank_0s_replica() -> None:
    model = changed(lambda model: model.large.add_(1e-6))
    processor = f"processor {dist.get_rank()}"
    with (
        mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: processor),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        text = said_of(model)
    assert not text and "all continue with rank 0's" in str(caught[0].message) and torch.equal(model.large, Odd().large)


# --- in mid-epoch -----------------------------------------------------------------------------------------------------


@contextmanager
def compared_in_each_step() -> Iterator[None]:
    with mock.patch.multiple(replica_checks, FIRST=1, steps_until_next=lambda *_: 1):
        yield


def stepped() -> tuple[Odd, torch.optim.Optimizer]:
    """A replica whose parameters, and what Adam keeps of them, are nowhere zero."""
    model, generator = Odd(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        optimizer.step()
    return model, optimizer


@WORLD
def test_in_mid_epoch_different_processors_are_left_as_they_are() -> None:
    model, optimizer = stepped()
    with torch.no_grad():
        model.large.add_(1e-6 * dist.get_rank())
    before, processor = model.large.clone(), f"processor {dist.get_rank()}"
    with compared_in_each_step(), mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: processor):
        ReplicaChecks(model, StepTimes(), "raise").after_step([optimizer], 0, 0)
    assert torch.equal(model.large, before)


def flip(turns: int) -> None:
    """One random bit, of one random tensor, on one random rank."""
    model, optimizer = stepped()
    tensors: dict[str, torch.Tensor] = {f"parameter {name}": p.data for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{key} of {name}": optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")}
    # Where all bits of a tensor are: its elements may be in any order.
    bits = {
        name: (tensor.t() if tensor.dim() == 2 else tensor).view(-1).view(torch.uint8)
        for name, tensor in tensors.items()
    }
    untouched = copy.deepcopy(bits)
    draw, rank = random.Random(3), dist.get_rank()
    with compared_in_each_step(), mock.patch.object(equality, "say") as said:
        raises, repairs = (ReplicaChecks(model, StepTimes(), way) for way in ("raise", "repair"))
        for turn in range(turns):
            odd, name = draw.randrange(3), draw.choice(list(bits))
            byte, bit = draw.randrange(bits[name].numel()), draw.randrange(8)
            for check in (raises, repairs):
                bits[name][byte] ^= (1 << bit) * (rank == odd)
                if check is repairs:
                    repairs.after_step([optimizer], 7, turn)
                    continue
                with pytest.raises(MismatchError) as caught:
                    raises.after_step([optimizer], 7, turn)
                first, second = [other for other in range(3) if other != odd]
                assert f"models after step {turn} of epoch 7:\n  {name}: rank {odd} (" in str(caught.value)
                assert f") differs from rank {first}, {second}, by up to " in str(caught.value)
                assert len(str(caught.value).splitlines()) == 3
            assert all(torch.equal(bits[each], untouched[each]) for each in bits), f"{name} in turn {turn}"
        repairs.after_step([optimizer], 7, turns)
    assert len(said.mock_calls) == (0 if rank else turns)


for turns, way in ((30, WIDE), (1000, NIGHT)):
    WORLD.add(f"flip {turns}", partial(flip, turns), way)


@pytest.mark.parametrize(
    "turns", [pytest.param(30, marks=pytest.mark.wide), pytest.param(1000, marks=pytest.mark.night)]
)
def test_a_flipped_bit_is_named_with_tensor_step_and_rank_or_repaired(turns: int) -> None:
    WORLD.results(f"flip {turns}", WIDE if turns == 30 else NIGHT)


class OnRank1(Callback, pl.Callback):  # type: ignore[misc]
    """Of a Trial and a Trainer: in the middle of the second epoch it changes what Adam keeps."""

    def on_step_training(self, state: Any) -> None:
        self.change(state[torchbearer.OPTIMIZER], state[torchbearer.EPOCH], state[torchbearer.BATCH])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.change(trainer.optimizers[0], trainer.current_epoch, batch_idx)

    def change(self, optimizer: Any, epoch: int, step: int) -> None:
        if (dist.get_rank(), epoch, step) == (1, 1, 2):
            optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][0, 0] *= 1 + 1e-9


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.05)


def run_trial(on_divergence: Any, *callbacks: Any) -> Any:
    made = trial([DDPCallback(on_divergence=on_divergence), *callbacks], optimizer=adam)
    made.with_train_generator(DataLoader(data(20), 4)).run(2)
    return dict(made.state[torchbearer.MODEL].state_dict())


def run_trainer(on_divergence: Any, *callbacks: Any) -> Any:
    strategy: Any = CallbackStrategy(on_divergence=on_divergence)
    with quiet():
        net = Net(optimizer=lambda net: adam(net.parameters()))
        return fit(strategy, net, loader(20, 4), callbacks=list(callbacks), max_epochs=2)["parameters"]


RUNS = {"0": run_trial, "layers.0": run_trainer}


@WORLD.each(RUNS, TWO, WIDE)
def test_a_run_names_the_step_in_which_a_rank_has_gone_apart(name: str) -> None:
    says = rf"different models after step 2 of epoch 1:\n  exp_avg of {name}\.weight: rank 1 \("
    with compared_in_each_step(), pytest.raises(MismatchError, match=says):
        RUNS[name]("raise", OnRank1())
    begin_run()


@WORLD.each(RUNS, WIDE)
def test_a_run_that_is_repaired_ends_as_if_nothing_had_happened(name: str) -> None:
    with compared_in_each_step():
        found, expected = RUNS[name]("repair", OnRank1()), RUNS[name]("raise")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@WORLD
def test_what_an_optimizer_keeps_on_one_rank_alone_is_not_compared() -> None:
    model, optimizer = stepped()
    if dist.get_rank():
        optimizer.state[model.small]["of this rank"] = torch.ones(3)
    optimizer.state[model.wave]["indices"] = torch.eye(3).to_sparse() * dist.get_rank()
    with compared_in_each_step():
        ReplicaChecks(model, StepTimes(), "raise").after_step([optimizer, object()], 0, 0)


class Dawdles(Callback, pl.Callback):  # type: ignore[misc]
    """Of a Trial and a Trainer, on rank 1."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def on_forward(self, *_: Any) -> None:
        self.dawdle("in forward")

    def on_step_training(self, *_: Any) -> None:
        self.dawdle("between steps")

    on_before_backward, on_train_batch_end = on_forward, on_step_training

    def dawdle(self, part: str) -> None:
        end = time.thread_time() + 0.02 * (dist.get_rank() == 1 and part == self.part)
        while time.thread_time() < end:
            pass


@WORLD.each([f"{name} {part}" for name in RUNS for part in ("in forward", "between steps")])
def test_a_rank_that_dawdles_is_named_with_the_part_of_the_step(name: str) -> None:
    run, _, part = name.partition(" ")
    with (
        mock.patch.object(replica_checks, "FIRST", 10),
        mock.patch.object(step_times, "_PATIENCE", 1e-9),
        # Time that other programs take from a rank does not count.
        mock.patch.object(stopwatch, "time", SimpleNamespace(perf_counter=time.thread_time)),
        mock.patch.object(replica_checks, "say") as said,
    ):
        RUNS[run]("raise", Dawdles(part))
    lines = [text for call in said.mock_calls for text in call.args]
    assert not dist.get_rank() or not lines
    assert dist.get_rank() or re.match(
        rf"rank 1 \(host {HOSTNAME}, pid \d+\) has .*; most of it (loading or )?{part} \(", lines[0]
    )


# --- at the end of an epoch -------------------------------------------------------------------------------------------


class Perturbs(Callback, pl.Callback):  # type: ignore[misc]
    """Of a Trial and a Trainer."""

    def on_step_training(self, state: Any) -> None:
        self.perturb(state[torchbearer.MODEL][0].weight, state[torchbearer.EPOCH])

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.perturb(module.layers[0].weight, trainer.current_epoch)

    def perturb(self, weight: torch.Tensor, epoch: int) -> None:
        if dist.get_rank() == 1 and epoch == 1:
            with torch.no_grad():
                weight[0, 0].add_(1e-6)


@WORLD
def test_a_trial_whose_replicas_have_gone_apart_says_so_at_the_end_of_the_epoch() -> None:
    made = trial([DDPCallback(), Perturbs()]).with_train_generator(DataLoader(data(16), 8))
    with pytest.raises(MismatchError, match=r"at the end of epoch 1:\n  parameter 0\.weight: rank 1 \("):
        made.run(4)
    drawn = float(torch.rand(()))
    begin_run()
    assert by_rank(drawn) == [drawn] * 2, "a run that has ended leaves the ranks drawing alike"
    assert len(made.state[torchbearer.HISTORY]) == 2


@WORLD
def test_a_trainer_whose_replicas_have_gone_apart_says_so_at_the_end_of_the_epoch() -> None:
    with quiet(), pytest.raises(MismatchError, match=r"epoch 1:\n  parameter layers\.0\.weight: rank 1 \("):
        fit("ddp_callbacks", Net(), callbacks=[Perturbs()], max_epochs=4)
    begin_run()


# --- what ranks resume from -------------------------------------------------------------------------------------------


def resume_trainer(paths: list[str]) -> None:
    """From equal copies, then from two checkpoints."""
    same, other = paths[dist.get_rank()], paths[-1 if dist.get_rank() else 0]
    one, two = rf"{paths[0]} \(epoch 1, global_step 4, checksum ", rf"{paths[2]} \(epoch 2, global_step 8, checksum "
    with quiet():
        made = trainer("ddp_callbacks", max_epochs=3)
        made.fit(Net(), loader(), ckpt_path=same)
        with pytest.raises(MismatchError, match=rf"resumes from: {one}.*on rank 0; {two}"):
            trainer("ddp_callbacks", max_epochs=3).fit(Net(), loader(), ckpt_path=other)
    assert made.current_epoch == 3


def test_ranks_of_a_trainer_that_resume_from_two_checkpoints_are_named_with_both(tmp_path: Path) -> None:
    """An error names ranks that resume from two checkpoints."""
    paths = [str(tmp_path / name) for name in ("one.ckpt", "copy.ckpt", "two.ckpt")]
    with quiet():
        for epochs, path in ((1, paths[0]), (2, paths[2])):
            made = trainer("auto", max_epochs=epochs)
            made.fit(Net(), loader())
            made.save_checkpoint(path)
    shutil.copy(paths[0], paths[1])
    run_distributed(resume_trainer, 2, paths)


@WORLD
def test_ranks_of_a_trial_that_resume_from_two_states_are_named_with_both() -> None:
    def resumed(state: Any) -> Any:
        made = trial([DDPCallback()]).with_train_generator(DataLoader(data(16), 8))
        return made.load_state_dict(copy.deepcopy(state))

    states = []
    for seed in range(2):
        alone = trial([], model=network(seed)).with_train_generator(DataLoader(data(16), 8))
        alone.run(1)
        states.append(alone.state_dict())
    same = resumed(states[0])
    same.run(3)
    assert len(same.state[torchbearer.HISTORY]) == 3
    says = r"resumes from: a state \(epochs 1, checksum .*on rank 0; a state \(epochs 1, checksum "
    with pytest.raises(MismatchError, match=says):
        resumed(states[dist.get_rank()]).run(3)
    begin_run()


# --- data that must be equal ------------------------------------------------------------------------------------------


class Keyed(Dataset[Any]):
    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor(float(key[0]))

    def __len__(self) -> int:
        return 6


def keyed(*keys: Any) -> Any:
    return shard_loader(DataLoader(Keyed(), batch_sampler=[keys[:4], keys[4:]]))


@WORLD
def test_data_that_differ_are_named_and_so_are_keys_that_cannot_be_sent() -> None:
    """Differing splits or labels raise an error."""
    rank = dist.get_rank()
    for keys in ("012345", [(index, "any") for index in range(6)]):
        seen = [float(value) for batch, _ in with_shares(keyed(*keys)) for value in batch]
        assert seen == ([2.0, 3.0, 5.0] if rank else [0.0, 1.0, 4.0])
    with pytest.raises(ConfigurationError, match="must yield integers or strings, or lists and"):
        next(iter(with_shares(keyed({1}, {2}))))
    begin_run()
    numbers: Any = range(9)
    split, _ = random_split(numbers, [6, 3], torch.Generator().manual_seed(rank))
    labels = TensorDataset(torch.zeros(9, 2), (torch.arange(9) + rank) % 3)
    different = {
        r"Subset: checksum of its indices and labels: (.|\n)*seed what draws or splits it": split,
        "TensorDataset: checksum of its indices and labels: ": labels,
    }
    for says, dataset in different.items():
        with pytest.raises(MismatchError, match=rf"the ranks disagree about the data:\n  {says}"):
            next(iter(with_shares(shard_loader(DataLoader(dataset, 3)))))
        begin_run()


@WORLD
def test_a_copy_of_a_divided_loader_gives_no_process_a_part_that_is_too_short() -> None:
    whole = shard_loader(DataLoader(range(7), 4), at_least=2)  # type: ignore[arg-type]
    shares = [share.local for _, share in with_shares(copy.deepcopy(whole))]
    assert shares == ([2, 0] if dist.get_rank() else [2, 3])
