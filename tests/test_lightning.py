"""What the strategy promises beyond equality with one process; each case runs on ranks and says what it saw."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from distributed import run_distributed
from lightning.pytorch.callbacks import BasePredictionWriter, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.utilities import CombinedLoader
from lightning_scenarios import (
    FEATURES,
    LogsAll,
    Net,
    Normalized,
    Stream,
    TwoSources,
    data,
    fit,
    loader,
    outcome,
    quiet,
    trainer,
)
from nursery import HOSTNAME, Nursery, Rank, note, noting_errors
from test_equivalence import assert_equal
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from ddp_callbacks import LocalSGD
from ddp_callbacks.errors import ConfigurationError, MismatchError, PeerError
from ddp_callbacks.lightning import CallbackStrategy, DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

Case = Callable[[], Any]
CASES: dict[str, Case] = {}
WORLD_SIZE = 2
OURS = "ddp_callbacks"


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    with quiet():
        return {name: function() for name, function in CASES.items()}


@functools.cache
def seen() -> list[dict[str, Any]]:
    return run_distributed(run_cases, WORLD_SIZE)


def by_rank(function: Case) -> list[Any]:
    return [results[function.__name__] for results in seen()]


def alone(function: Callable[[], Any]) -> Any:
    with quiet():
        return function()


# --- what the strategy is asked ---------------------------------------------------------------------------------------


class Asks(Net):
    """Asks in the middle of a run."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask, self.answer = ask, None

    def on_train_start(self) -> None:
        self.answer = self.ask(self.trainer)


def ask(question: Callable[[Any], Any]) -> Any:
    module = Asks(question)
    fit(OURS, module, max_steps=1)
    return module.answer


@case
def reductions() -> Any:
    def question(trainer: Any) -> Any:
        rank, strategy = dist.get_rank(), trainer.strategy
        return [
            strategy.reduce(torch.tensor(3 + rank)),
            strategy.reduce(torch.tensor([1, 2]) * (1 + rank), reduce_op="avg"),
            strategy.reduce(torch.tensor([2**40 + rank]), reduce_op="sum"),
            strategy.reduce(torch.tensor([0.5, 4.0]) * (1 + rank), reduce_op=dist.ReduceOp.MAX),
            strategy.reduce(torch.tensor([3, 4]) * (1 + rank), reduce_op="min"),
            strategy.reduce(torch.tensor(3 + rank), reduce_op="product"),
            strategy.reduce(torch.tensor([300.0, 300.0], dtype=torch.float16)),
            strategy.reduce(torch.tensor(rank == 1), reduce_op="sum"),
        ]

    return ask(question)


def test_reductions_are_exact() -> None:
    expected = [
        torch.tensor(3.5),  # Lightning's own: 3
        torch.tensor([1.5, 3.0]),
        torch.tensor([2**41 + 1]),
        torch.tensor([1.0, 8.0]),
        torch.tensor([3, 4]),
        torch.tensor(12),
        torch.tensor([300.0, 300.0], dtype=torch.float16),
        torch.tensor(1),
    ]
    for answers in by_rank(reductions):
        for answer, right in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer, right, rtol=0, atol=0)


@case
def decisions() -> Any:
    def question(trainer: Any) -> Any:
        first, decide = trainer.is_global_zero, trainer.strategy.reduce_boolean_decision
        return [decide(first), decide(True), decide(first, all=False), decide(False, all=False)]

    return ask(question)


def test_decisions_are_of_all_or_of_any() -> None:
    assert by_rank(decisions) == [[False, True, True, False]] * WORLD_SIZE


@case
def objects() -> Any:
    def question(trainer: Any) -> Any:
        rank, broadcast = dist.get_rank(), trainer.strategy.broadcast
        mine = {"path": f"a{rank}", "numbers": [rank, 1.5, None], "tensor": torch.arange(3) + rank}
        return [broadcast(mine), broadcast(Path(f"p{rank}")), broadcast(f"r{rank}", src=1), broadcast({rank})]

    return ask(question)


def test_objects_are_rank_zero_s() -> None:
    for plain, path, of_one, pickled in by_rank(objects):
        assert plain["path"] == "a0" and plain["numbers"] == [0, 1.5, None]
        assert plain["tensor"].tolist() == [0, 1, 2]
        assert (path, of_one, pickled) == (Path("p0"), "r1", {0})


@case
def gathering() -> Any:
    def question(trainer: Any) -> Any:
        rank = dist.get_rank()
        trainer.strategy.barrier("here")
        same = trainer.strategy.all_gather(torch.full((2,), float(rank)))
        try:
            trainer.strategy.all_gather(torch.zeros(2 + rank))
        except MismatchError as error:
            return same, str(error)
        return None

    return ask(question)


def test_tensors_of_several_shapes_cannot_be_stacked() -> None:
    for same, message in by_rank(gathering):
        assert same.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert "all_gather needs tensors of the same shape, got [[2], [3]] by rank" in message


# --- nothing is wrapped, checkpoints are free -------------------------------------------------------------------------


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def save_in_the_middle(strategy: str, folder: str) -> str:
    """A checkpoint in the middle of the second of two epochs; its path."""
    made, module = trainer(strategy, max_steps=6), Net(scheduler=halving)
    made.fit(module, loader(), loader(13, 5, 9))
    path = f"{folder}/{strategy}.ckpt"
    made.save_checkpoint(path)
    return path


def resume(strategy: str, path: str) -> Any:
    devices = int(os.environ["WORLD_SIZE"]) if strategy == "ddp" else 1
    batch_size = {1: 8, 2: 4, 3: 3}[devices]  # ddp's is that of each process
    made, module = trainer(strategy, max_epochs=3, devices=devices), Net(scheduler=halving)
    made.fit(module, loader(29, batch_size), loader(13, 5, 9), ckpt_path=path)
    return outcome(made, module)


def save_and_resume(folder: str, saved_by_one: str) -> Any:
    with quiet():
        path = save_in_the_middle(OURS, folder)
        return resume(OURS, saved_by_one), resume(OURS, path), resume("ddp", path)["global_step"]


def test_checkpoints_move_between_one_process_ddp_and_ours(tmp_path: Path) -> None:
    by_one = alone(lambda: save_in_the_middle("auto", str(tmp_path)))
    expected = alone(lambda: resume("auto", by_one))
    for world_size in (2, 3):
        for of_one, of_ours, steps in run_distributed(save_and_resume, world_size, str(tmp_path), by_one):
            assert_equal(of_one, expected, 1e-10, f"saved by one process, resumed on {world_size}")
            assert_equal(of_ours, expected, 1e-10, f"saved and resumed on {world_size}")
            assert steps == expected["global_step"]
        assert_equal(alone(lambda: resume("auto", f"{tmp_path}/{OURS}.ckpt")), expected, 1e-10, "resumed on one")
    one, ours = (torch.load(path, weights_only=False) for path in (by_one, f"{tmp_path}/{OURS}.ckpt"))
    assert list(one) == list(ours)
    assert list(one["state_dict"]) == list(ours["state_dict"]) == list(Net().state_dict())


# --- rank 0 speaks ----------------------------------------------------------------------------------------------------


def write_files(folder: str) -> Any:
    with quiet():
        options = {"logger": CSVLogger(folder), "enable_progress_bar": True, "enable_model_summary": True}
        made = trainer(OURS, callbacks=[ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True, **options)
        made.fit(Net(), loader(), loader(13, 5, 9))
        return made.is_global_zero, made.global_rank, made.world_size


def test_files_and_bars_come_from_rank_zero_alone(tmp_path: Path) -> None:
    ranks = run_distributed(write_files, 3, str(tmp_path))
    assert ranks == [(True, 0, 3), (False, 1, 3), (False, 2, 3)]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    checkpoints = [name for name in files if name.endswith(".ckpt")]
    assert len(checkpoints) == 1
    assert sorted(set(files) - set(checkpoints)) == [
        "lightning_logs/version_0/metrics.csv",
    ]


# --- the callback alone -----------------------------------------------------------------------------------------------


def train_with_the_callback(strategy: str, folder: str) -> str:
    checkpoint = ModelCheckpoint(folder, save_last=True)
    with quiet():
        try:
            devices = 2 if strategy == "ddp" else 1
            fit(strategy, callbacks=[DDPCallback(), checkpoint], enable_checkpointing=True, devices=devices)
        except ConfigurationError as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_the_callback_alone_refuses_and_names_the_remedy(strategy: str, tmp_path: Path) -> None:
    kind = "SingleDeviceStrategy" if strategy == "auto" else "DDPStrategy"
    for message in run_distributed(train_with_the_callback, 2, strategy, str(tmp_path)):
        assert message == (
            'DDPCallback needs strategy="ddp_callbacks" for these 2 processes: Trainer(strategy="ddp_callbacks"). '
            f"This Trainer has {kind}. A callback comes too late to tell Lightning which process this is."
        )
    assert not list(tmp_path.iterdir())


def test_the_callback_is_welcome_in_one_process_and_beside_the_strategy(tmp_path: Path) -> None:
    with quiet():
        expected = fit("auto")
        assert_equal(fit("auto", callbacks=[DDPCallback()]), expected, 0.0)
    assert run_distributed(train_with_the_callback, 2, OURS, str(tmp_path)) == ["trained"] * 2


# --- failures ---------------------------------------------------------------------------------------------------------


class Fails(Net):
    """``how`` happens on one rank in the third step."""

    def __init__(self, how: str, rank: int = 1) -> None:
        super().__init__()
        self.how, self.rank = how, rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.trainer.global_rank == self.rank:
            if self.how == "raises":
                raise ZeroDivisionError("a bad sample")
            return None
        return super().training_step(batch, batch_idx)


def fail(how: str) -> None:
    with quiet(), noting_errors():
        fit(OURS, Fails(how))


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("raises", "ZeroDivisionError", "a bad sample"),
        ("returns None", "SkippedBatchError", "returned None in epoch 0, batch 2, where rank 0 has a loss"),
    ],
)
def test_a_failure_reaches_the_other_ranks(nursery: Nursery, tmp_path: Path, how: str, kind: str, says: str) -> None:
    ranks: list[Rank] = nursery.run_watched(fail, 2, tmp_path, how)
    assert [rank.code for rank in ranks] == [1, 1]
    assert ranks[1].notes["error"][0] == kind and says in ranks[1].notes["error"][1]
    name, message = ranks[0].notes["error"]
    assert name == "PeerError"
    assert f"rank 1 (host {HOSTNAME}, pid {ranks[1].pid}) failed with {kind}: " in message and says in message
    assert ranks[0].noted_at["error"] - ranks[1].noted_at["error"] < 4 * ranks[0].slowness


def unlike() -> None:
    with quiet(), noting_errors():
        fit(OURS, None, loader(29 + 8 * int(os.environ["RANK"])))


def test_ranks_with_other_data_are_told_apart(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(unlike, 2, tmp_path):
        name, message = rank.notes["error"]
        assert name == "MismatchError"
        assert "the ranks disagree about the train dataloader:\n  batches: 4 on rank 0; 5 on rank 1" in message


def unlike_optimizers() -> None:
    rank = int(os.environ["RANK"])
    with quiet(), noting_errors():
        fit(OURS, Net(optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1 * (1 + rank))))


def test_ranks_with_another_learning_rate_are_told_apart(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(unlike_optimizers, 2, tmp_path):
        name, message = rank.notes["error"]
        assert name == "MismatchError"
        assert (
            "the ranks disagree about the optimizers:\n  optimizer group 0: lr: 0.1 on rank 0; 0.2 on rank 1" in message
        )


def fail_and_save(rank: int) -> None:
    module = Fails("raises", rank)
    with quiet(), noting_errors():
        callbacks = [ModelCheckpoint("saved", save_on_exception=True), OnExceptionCheckpoint("saved")]
        fit(OURS, module, callbacks=callbacks, enable_checkpointing=True)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_that_is_saved_on_an_exception_does_not_wait_for_the_others(
    nursery: Nursery, tmp_path: Path, failing: int
) -> None:
    ranks = nursery.run_watched(fail_and_save, 2, tmp_path, failing)
    names = [rank.notes["error"][0] for rank in ranks]
    assert names[failing] == "ZeroDivisionError" and names[1 - failing] == "PeerError"
    assert abs(ranks[0].noted_at["error"] - ranks[1].noted_at["error"]) < 4 * ranks[0].slowness


class OneSided(LogsAll):
    """Rank 0 alone sees to one metric, and reads many logged values in the middle of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({f"loss{index}": loss * index for index in range(60)})
        if self.trainer.is_global_zero:
            self.log("mine", loss)
        copy.deepcopy(self)
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.is_global_zero:
            assert "loss59" in self.trainer.callback_metrics

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@case
def one_sided() -> Any:
    return fit(OURS, OneSided())["callback_metrics"]


def test_what_rank_zero_alone_does_with_metrics_and_logs_disturbs_nobody() -> None:
    expected = alone(lambda: fit("auto", OneSided()))["callback_metrics"]
    for metrics in by_rank(one_sided):
        for index in range(60):
            torch.testing.assert_close(metrics[f"loss{index}"], expected[f"loss{index}"], rtol=1e-10, atol=0)


class LogsEachValidation(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)


@case
def kept_records() -> Any:
    rows = data(16, 9)
    made = trainer(OURS, max_epochs=3)
    made.fit(LogsEachValidation(), loader(), DataLoader(rows, 2, sampler=DistributedSampler(rows, shuffle=False)))
    return len(made.fit_loop.epoch_loop.val_loop._results._step)


def test_no_record_is_kept_of_steps_that_are_not_joined() -> None:
    assert by_rank(kept_records) == [0] * WORLD_SIZE


class StopsAlone(Net):
    """Rank 1 wants to stop after the third step, when its time is over, say."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


@case
def stopping_alone() -> Any:
    module = StopsAlone()
    made = trainer(OURS)
    made.fit(module, loader(), loader(13, 5, 9))
    return made.global_step, len(made.logger.lines)


def test_a_stop_on_one_rank_stops_all_after_the_next_step() -> None:
    (steps, lines), second = by_rank(stopping_alone)
    assert (steps, lines) == second
    assert steps == 4


class Signalled(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def get_signal() -> None:
    module = Signalled()
    with quiet():
        made = trainer(OURS)
        try:
            made.fit(module, loader())
        except BaseException as error:
            note("ended", [type(error).__name__, made.global_step])


def test_a_sigterm_on_one_rank_ends_all_after_the_same_step(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(get_signal, 2, tmp_path):
        assert rank.notes["ended"] == ["SIGTERMException", 2], rank.stderr


# --- settings ---------------------------------------------------------------------------------------------------------


class Noise(Dataset[Any]):
    """Each sample says what its process draws."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, torch.rand(()).item(), random.random()


class Collects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.append(torch.stack([part.double() for part in batch], 1))
        self.rows.append(torch.full((1, 3), torch.rand(()).item()))
        return self(torch.ones(1, FEATURES, dtype=torch.float64)).sum()


@case
def random_states() -> Any:
    module = Collects()
    made = trainer(OURS, max_epochs=1)
    pl.seed_everything(5, workers=True, verbose=False)
    made.fit(module, DataLoader(Noise(), 4, num_workers=1))
    return torch.cat(module.rows)


def test_ranks_draw_apart_in_the_step_and_in_the_workers() -> None:
    first, second = by_rank(random_states)
    drawn = torch.cat([first[:, 1:].flatten(), second[:, 1:].flatten()])
    assert sorted(torch.cat([first[first[:, 0] % 1 == 0], second[second[:, 0] % 1 == 0]])[:, 0].tolist()) == list(
        range(8)
    )
    # Each process fills one row with one number, so each appears twice there.
    assert len(drawn.unique()) == len(drawn) - 2 * WORLD_SIZE


class Langevin(torch.optim.SGD):
    """Adds noise to the parameters, as some samplers do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))
        return loss


class DrawsInBatches(pl.Callback):
    """Noise on gradients and parameters, and a picture for the log of rank 0."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter) + 0.01 * random.random())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter) + 0.01 * float(numpy.random.normal()))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            torch.rand(3)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_end(trainer, module)


class SplitsItsData(Net):
    """Splits in ``setup``, and draws by the part of the batch."""

    def setup(self, stage: str) -> None:
        self.order = torch.randperm(20).tolist()
        self.drawn: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(data(20), self.order), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(len(batch[0]))[0]))
        return self.loss(batch)


@case
def random_changes() -> Any:
    module = SplitsItsData(optimizer=lambda net: Langevin(net.parameters(), 0.1))
    made = trainer(OURS, max_epochs=3, callbacks=[DrawsInBatches()])
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(made.global_rank)  # a user who seeds nothing
    made.fit(module)
    after = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return module.state_dict(), module.order, after, module.drawn


def test_hooks_that_change_parameters_at_random_change_them_alike_on_all_processes() -> None:
    (*first, own), (*second, other) = by_rank(random_changes)
    assert_equal(second, first, 0.0)
    assert len({*own, *other}) == 2 * len(own)


@case
def averaged_statistics() -> Any:
    module = Normalized()
    fit(OURS, module, callbacks=[EMAWeightAveraging(decay=0.7)], max_epochs=2)
    return module.state_dict()


def test_the_statistics_of_an_averaged_model_are_equal_on_all_processes() -> None:
    first, second = by_rank(averaged_statistics)
    assert any("running_mean" in name for name in first)
    assert_equal(second, first, 0.0)


@case
def loaders_of_the_user() -> Any:
    module = Collects()
    sampler = DistributedSampler(Noise(), shuffle=False)
    fit(OURS, module, DataLoader(Noise(), 2, sampler=sampler), max_epochs=1)
    own = [int(row[0]) for row in torch.cat(module.rows) if row[0] % 1 == 0]
    untouched = Collects()
    fit(OURS, untouched, DataLoader(Noise(), 4), max_epochs=1, use_distributed_sampler=False)
    return own, len(torch.cat(untouched.rows)) - 2


def test_loaders_are_left_alone_where_the_user_says_so() -> None:
    (first, all_first), (second, all_second) = by_rank(loaders_of_the_user)
    assert (first, second) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert all_first == all_second == 8


@case
def per_process() -> Any:
    strategy = CallbackStrategy(batch_size="per_process")
    return fit(strategy, None, loader(32, 4), loader(16, 4, 9))


def test_per_process_batches_are_those_of_a_trainer_with_larger_ones() -> None:
    expected = alone(lambda: fit("auto", None, loader(32, 8), loader(16, 8, 9)))
    for result in by_rank(per_process):
        assert_equal(result, expected, 1e-10)


class Tokens(Net):
    """The loss is the mean over the samples that count."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, ignore_index=0)
        self.log("loss", loss, on_epoch=True, batch_size=int((y != 0).sum()))
        return loss


@case
def weighed() -> Any:
    strategy = CallbackStrategy(weight=lambda batch: (batch[1] != 0).sum())
    return fit(strategy, Tokens(), loader(29, 8), accumulate_grad_batches=2)


def test_a_loss_is_weighed_by_what_it_is_the_mean_over() -> None:
    expected = alone(lambda: fit("auto", Tokens(), loader(29, 8), accumulate_grad_batches=2))
    for result in by_rank(weighed):
        assert_equal(result, expected, 1e-10)


@case
def with_a_comm_hook() -> Any:
    torch.manual_seed(0)
    return fit(CallbackStrategy(comm_hook=bf16_compress_hook), None, loader(32, 8))["parameters"]


def test_a_comm_hook_is_used() -> None:
    exact = alone(lambda: fit("auto", None, loader(32, 8)))["parameters"]
    for result in by_rank(with_a_comm_hook):
        for name, value in result.items():
            difference = (value - exact[name]).abs().max()
            assert 0 < difference < 0.02, name


@case
def running_statistics() -> Any:
    parameters = fit(OURS, Normalized(), loader(32, 8), max_epochs=1)["parameters"]
    return parameters["layers.0.running_mean"], parameters["layers.0.num_batches_tracked"]


def test_running_statistics_are_those_of_the_whole_data() -> None:
    for average, batches in by_rank(running_statistics):
        torch.testing.assert_close(average, data(32).tensors[0].mean(0))
        assert batches == 4


@case
def precisions() -> Any:
    made = {name: fit(OURS, Net().float(), loader_of_floats(), precision=name) for name in ("bf16-mixed", "32-true")}
    double = fit(OURS, Net().float(), loader_of_floats(), precision="64-true")
    return {name: next(iter(result["parameters"].values())) for name, result in {**made, "64-true": double}.items()}


def loader_of_floats() -> Any:
    return DataLoader([(x.float(), y) for x, y in data(16)], 8)


def test_precisions_are_lightning_s() -> None:
    first, second = by_rank(precisions)
    one = alone(lambda: fit("auto", Net().float(), loader_of_floats(), precision="64-true"))["parameters"]
    torch.testing.assert_close(first["64-true"], next(iter(one.values())), rtol=1e-10, atol=0)
    for name, rtol in (("bf16-mixed", 0.05), ("32-true", 1e-5)):
        assert first[name].dtype == torch.float32
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name].double(), first["64-true"].double(), rtol=rtol, atol=0.01)


class Uneven(LogsAll):
    """Only rank 0 logs one of the values, and calls it first."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.is_global_zero:
            self.log("mine", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@case
def uneven_logs() -> Any:
    return fit(OURS, Uneven())["callback_metrics"]


def test_a_value_that_one_rank_alone_logs_does_not_disturb_the_others() -> None:
    expected = alone(lambda: fit("auto", LogsAll()))["callback_metrics"]
    first, second = by_rank(uneven_logs)
    assert set(first) - set(second) == {"mine", "mine_step", "mine_epoch"}
    assert first["mine_epoch"] == pytest.approx((0 * 4 + 1 * 4 + 2 * 4 + 3 * 3) / 15)
    assert_equal({name: first[name] for name in expected}, expected, 1e-10)
    assert_equal(second, expected, 1e-10)


@case
def metrics_afterwards() -> Any:
    module = LogsAll()
    fit(OURS, module)
    return [(m.dist_sync_fn, m.dist_sync_on_step) for m in module.modules() if isinstance(m, torchmetrics.Metric)]


def test_metrics_are_left_as_they_were() -> None:
    for found in by_rank(metrics_afterwards):
        assert found == [(None, False)] * len(found) and found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": "local"}, 'batch_size must be "global"'),
        ({"weight": 3}, 'weight must be a function of a batch, or "cross_entropy", got 3'),
        (
            {"find_unused_parameters": True},
            "CallbackStrategy has no find_unused_parameters: unused parameters are found",
        ),
        ({"ddp_comm_hook": print}, "CallbackStrategy has no ddp_comm_hook: it is called comm_hook here"),
        ({"batchsize": 3}, "CallbackStrategy has no batchsize."),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        CallbackStrategy(**options)


def test_plugins_of_other_strategies_are_refused_by_name() -> None:
    with (
        quiet(),
        pytest.raises(ConfigurationError, match="does not work with FSDPPrecision: FSDP divides the parameters"),
    ):
        trainer(OURS, plugins=[FSDPPrecision("32-true")]).fit(Net(), loader())


def layers_of_a_fit() -> Any:
    """During a fit, in a pickle made during it, after it, and after one that raised."""
    during: list[Any] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            layer = module.layers[0]
            during.append((type(layer).__name__, type(pickle.loads(pickle.dumps(layer))), list(module.state_dict())))

    class Raises(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("enough")

    module = Normalized()
    layer, found = module.layers[0], {"keys": list(module.state_dict())}
    with quiet():
        fit(OURS, module, sync_batchnorm=True, callbacks=[Looks()])
        found["after"] = type(layer), module.layers[0] is layer
        with contextlib.suppress(KeyError, PeerError):
            fit(OURS, module, sync_batchnorm=True, callbacks=[Raises()])
    return found | {"during": during[0], "after an exception": type(layer)}


def test_layers_that_sync_batchnorm_has_synchronized_are_given_back() -> None:
    for found in run_distributed(layers_of_a_fit, WORLD_SIZE):
        assert found["during"] == ("SynchronizedBatchNorm1d", nn.BatchNorm1d, found["keys"])
        assert found["after"] == (nn.BatchNorm1d, True)
        assert found["after an exception"] is nn.BatchNorm1d


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((prediction, list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append((predictions, indices))


class Looks(pl.Callback):
    """Whether what hooks get belongs together."""

    def __init__(self) -> None:
        self.rows = 0

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        torch.testing.assert_close(outputs, module(batch[0]).softmax(1))
        self.rows += len(outputs)


def write_predictions(strategy: str, samples: int = 13, return_predictions: bool = True) -> Any:
    writer, looks = Writer(), Looks()
    made = trainer(strategy, callbacks=[writer, looks])
    returned = made.predict(Net(), loader(samples, 5, 3), return_predictions=return_predictions)
    assert made.callbacks[:2] == [writer, looks]
    return {"batches": writer.batches, "epochs": writer.epochs, "returned": returned, "rows": looks.rows}


@case
def predictions_written() -> Any:
    return write_predictions(OURS), write_predictions(OURS, 11), write_predictions(OURS, 11, return_predictions=False)


def rows_by_index(batches: list[Any]) -> dict[int, torch.Tensor]:
    """Of what writers have got, each row once."""
    pairs = [(index, row) for rows, indices in batches for index, row in zip(indices, rows, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_prediction_writers_get_each_row_once_with_its_index() -> None:
    for position, samples in enumerate((13, 11, 11)):
        expected = alone(lambda: write_predictions("auto", samples))  # noqa: B023
        ranks = [found[position] for found in by_rank(predictions_written)]
        written = rows_by_index([batch for found in ranks for batch in found["batches"]])
        assert sorted(written) == list(range(samples))
        assert_equal(dict(sorted(written.items())), rows_by_index(expected["batches"]), 1e-10)
        for found in ranks:
            ((rows, (indices,)),) = found["epochs"]
            assert_equal(list(zip(rows, indices, strict=True)), found["batches"], 0.0)
            assert_equal(found["returned"], None if position == 2 else expected["returned"], 1e-10)
    # The last batch of the second has one sample: rank 1 computes a stand-in, which is nobody's row.
    assert [len(found[1]["batches"]) for found in by_rank(predictions_written)] == [3, 2]


class Fetches(Net):
    def predict_step(self, dataloader_iter: Any) -> Any:
        (x, _), _, _ = next(dataloader_iter)
        return self(x), [object.__class__ for _ in x], x


@case
def predictions_fetched() -> Any:
    return trainer(OURS).predict(Fetches(), loader(11, 5, 3))


def test_predictions_of_a_step_that_draws_itself_are_whole() -> None:
    expected = alone(lambda: trainer("auto").predict(Fetches(), loader(11, 5, 3)))
    for found in by_rank(predictions_fetched):
        assert [rows for _, rows, _ in found] == [rows for _, rows, _ in expected]
        assert_equal([(one, other) for one, _, other in found], [(one, other) for one, _, other in expected], 1e-10)


class Copies(pl.Callback):
    """Copies a Trainer and what belongs to it by all means, in the middle of a fit."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.found["during"] = copied_metrics(trainer)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.found["validating"] = copied_metrics(trainer)


def copied_metrics(made: pl.Trainer) -> Any:
    """Which values the copies have, beside those of the original; of one process's own objects."""
    copies = [pickle.loads(pickle.dumps(made)), copy.deepcopy(made), pickle.loads(pickle.dumps(made.strategy))._trainer]
    file = io.BytesIO()
    torch.save(made.callbacks, file)
    for thing in (made.strategy, made.callbacks, made.fit_loop, made.lightning_module):
        copy.deepcopy(thing)
    kinds = {type(each.fit_loop.epoch_loop._results).__name__ for each in copies}
    names = {type(each.strategy) is type(made.strategy) for each in copies}
    return kinds, names, [dict(each.callback_metrics) for each in (made, *copies)]


@case
def lent_loaders(strategy: str = OURS) -> Any:
    """A loader of the user's own that combines others, given to two fits; one leaves its workers in mid-pass."""
    workers = [loader(22, 4, shuffle=True, num_workers=1, persistent_workers=kept) for kept in (False, True)]
    combined = CombinedLoader({"a": workers[0], "b": workers[1]}, "max_size_cycle")
    during: list[Any] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for each in trainer.train_dataloader.values():
                during.append((isinstance(each, DataLoader), each.dataset is workers[0].dataset, each.num_workers))

    results = [fit(strategy, TwoSources(), combined, max_epochs=1, limit_train_batches=3, callbacks=[Looks()])]
    alive = [child.name for child in multiprocessing.active_children()]
    results.append(fit(strategy, TwoSources(), combined, max_epochs=1))
    return results, alive, [each is own for each, own in zip(combined.flattened, workers, strict=True)], set(during)


def test_loaders_are_given_back_and_their_workers_end_with_the_fit() -> None:
    expected = alone(lambda: lent_loaders("auto"))[0]
    for results, alive, own, during in by_rank(lent_loaders):
        assert_equal(results, expected, 1e-10)
        assert (alive, own, during) == ([], [True, True], {(True, False, 1), (True, True, 1)})


class Unsized(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


class Wrapped(IterableDataset[Any]):
    """Batches of a Mapping that is no dict; of rows that go together in no dimension."""

    def __init__(self, like: type, ragged: bool) -> None:
        self.like, self.ragged = like, ragged

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(12, 4):
            rows = {"x": batch[0], "y": batch[1]}
            yield self.like(rows | {"lengths": torch.ones(3)} if self.ragged else rows)


class TakesMappings(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append((type(batch).__name__, len(batch["x"])))
        return self.loss((batch["x"], batch["y"]))


def odd_loader_warnings(make: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [
        str(each.message)
        for each in caught
        if "istributedSampler" in str(each.message) or "dimension" in str(each.message)
    ]


@case
def odd_batches() -> Any:
    mapped, ragged = TakesMappings(), TakesMappings()
    parameters = fit(OURS, mapped, DataLoader(Wrapped(collections.UserDict, False), batch_size=None), max_epochs=1)
    in_turn = odd_loader_warnings(
        lambda: fit(OURS, ragged, DataLoader(Wrapped(dict, True), batch_size=None), max_epochs=2)
    )
    rows = data(16)
    left = odd_loader_warnings(
        lambda: fit(OURS, None, DataLoader(rows, 2, sampler=DistributedSampler(rows)), max_epochs=2)
    )
    unsized = fit(OURS, None, DataLoader(Unsized(19), 4), max_epochs=1)
    return mapped.sizes, parameters, in_turn, left, unsized


def test_batches_of_any_mapping_are_divided_and_what_is_not_is_said_once() -> None:
    expected = alone(
        lambda: (
            fit(
                "auto", TakesMappings(), DataLoader(Wrapped(collections.UserDict, False), batch_size=None), max_epochs=1
            ),
            fit("auto", None, DataLoader(Unsized(19), 4), max_epochs=1),
        )
    )
    for rank, (sizes, parameters, in_turn, left, unsized) in enumerate(by_rank(odd_batches)):
        assert sizes == [("UserDict", 2)] * 3
        assert_equal((parameters, unsized), expected, 1e-10)
        assert (len(in_turn), len(left)) == ((1, 1) if rank == 0 else (0, 0))
        if rank == 0:
            assert "A batch of Wrapped (dict: [4, 6], [4], [3]) has no common first dimension" in in_turn[0]
            assert "Yield tensors that all have the samples in front; or a data set with samples by index" in in_turn[0]
            assert left[0].startswith("The loader of TensorDataset has a DistributedSampler, so it is left as it is")
            assert 'strategy="callbacks" is another name' in left[0]


def test_the_other_name_of_the_strategy_is_the_same_strategy() -> None:
    with quiet():
        assert type(trainer("callbacks").strategy) is type(trainer(OURS).strategy) is CallbackStrategy


@case
def copied_trainers() -> Any:
    copies = Copies()
    made, module = trainer(OURS, callbacks=[copies]), Net()
    made.fit(module, loader(), loader(13, 5, 9))
    copied = copy.deepcopy(made)
    validated = [each.validate(Net(), loader(13, 5, 9), verbose=False) for each in (made, copied)]
    return {"after": copied_metrics(made), **copies.found}, validated


def test_a_trainer_can_be_copied_and_pickled_in_the_middle_of_a_run_and_after_it() -> None:
    for found, (original, copied) in by_rank(copied_trainers):
        assert list(found) == ["after", "during", "validating"]
        for kinds, same, (expected, *metrics) in found.values():
            assert (kinds, same) == ({"_ResultCollection"}, {True})
            for values in metrics:
                assert_equal(values, expected, 0.0)
        assert_equal(copied, original, 0.0)


@case
def a_divided_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer as zero

    module = Net(optimizer=lambda net: zero(net.parameters(), torch.optim.Adam, lr=0.05))
    return fit(OURS, module)["parameters"]


def test_an_optimizer_that_divides_its_state_works_as_under_ddp() -> None:
    whole = Net(optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.05))
    expected = alone(lambda: fit("auto", whole)["parameters"])
    for parameters in by_rank(a_divided_optimizer):
        assert_equal(parameters, expected, 1e-10)


class Accumulates(Net):
    """By hand: two backwards without an exchange, a third with one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 3 < 2:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 3)
        else:
            self.manual_backward(self.loss(batch) / 3)
            optimizer.step()
            optimizer.zero_grad()


@case
def accumulation_by_hand() -> Any:
    return fit(OURS, Accumulates(), loader(29, 5))["parameters"]


def test_gradients_are_accumulated_by_hand_without_an_exchange() -> None:
    expected = alone(lambda: fit("auto", Accumulates(), loader(29, 5))["parameters"])
    for parameters in by_rank(accumulation_by_hand):
        assert_equal(parameters, expected, 1e-10)


@case
def again_and_again() -> Any:
    made, module = trainer(OURS), Net()
    results = []
    for epochs in (1, 3):
        made.fit_loop.max_epochs = epochs
        made.fit(module, loader(), loader(13, 5, 9))
        results.append(made.validate(module, loader(13, 5, 9), verbose=False))
    return results, outcome(made, module)


def test_a_trainer_runs_again() -> None:
    with quiet():
        made, module = trainer("auto"), Net()
        results = []
        for epochs in (1, 3):
            made.fit_loop.max_epochs = epochs
            made.fit(module, loader(), loader(13, 5, 9))
            results.append(made.validate(module, loader(13, 5, 9), verbose=False))
        expected = results, outcome(made, module)
    for found in by_rank(again_and_again):
        assert_equal(found, expected, 1e-10)


class FailsEverywhere(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training" and batch_idx == 1:
            raise KeyError(self.where)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "validation":
            raise KeyError(self.where)
        return super().validation_step(batch, batch_idx)


@case
def fits_after_an_exception(strategy: str = OURS) -> Any:
    results = []
    for where in ("training", "validation"):
        made, module = trainer(strategy), FailsEverywhere(where)
        with contextlib.suppress(KeyError):
            made.fit(module, loader(), loader(13, 5, 9))
            raise AssertionError("it did not fail")
        results.append(fit(strategy))
        module.where = ""
        made.fit(module, loader(), loader(13, 5, 9))
        results.append(outcome(made, module))
    return results


def test_an_exception_that_all_processes_catch_leaves_the_next_fit_as_it_is_on_one() -> None:
    expected = alone(lambda: fits_after_an_exception("auto"))
    for results in by_rank(fits_after_an_exception):
        assert_equal(results, expected, 1e-10)


# --- as scripts -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
{first}
sys.path.insert(0, {tests!r})
import ddp_callbacks.lightning
from lightning_scenarios import Net, fit, loader, quiet, trainer
from ddp_callbacks.lightning import CallbackStrategy
if __name__ == "__main__":
    with quiet():
        made, module = trainer({strategy}, devices=2, max_epochs=1), Net()
        made.fit(module, loader())
        total = sum(value.sum() for value in module.state_dict().values()).item()
        # In one write: two processes share the pipe.
        print(f"rank {{made.global_rank}} of {{made.world_size}} sum {{total!r}}" + chr(10), end="", flush=True)
"""


NOTEBOOK = "sys.ps1 = '>>> '"  # what Python defines where someone types


@pytest.mark.cold
@pytest.mark.parametrize(
    ("first", "strategy"),
    [("", '"ddp_callbacks"'), ("", 'CallbackStrategy(start_method="fork")'), (NOTEBOOK, '"ddp_callbacks"')],
)
def test_the_trainer_starts_processes_of_its_own(first: str, strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first, tests=str(Path(__file__).parent), strategy=strategy))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with quiet():
        module = Net()
        trainer("auto", max_epochs=1).fit(module, loader())
    expected = sum(value.sum() for value in module.state_dict().values()).item()
    lines = sorted(line.split(" sum ") for line in done.stdout.splitlines() if line.startswith("rank"))
    # Processes that were forked have ended when fit returns, to rank 0 of one process.
    assert [line[0] for line in lines] in (["rank 0 of 2", "rank 1 of 2"], ["rank 0 of 2"])
    assert [float(line[1]) for line in lines] == [pytest.approx(expected, rel=1e-10)] * len(lines)


OTHER_PACKAGE = """
import sys
import pytorch_lightning
import ddp_callbacks.lightning as ours
assert "lightning.pytorch" not in sys.modules
from pytorch_lightning.demos.boring_classes import BoringModel
trainer = pytorch_lightning.Trainer(strategy="ddp_callbacks", accelerator="cpu", fast_dev_run=True, logger=False)
assert type(trainer.strategy) is ours.CallbackStrategy
assert isinstance(trainer.strategy, pytorch_lightning.strategies.DDPStrategy)
module = BoringModel()
trainer.fit(module)
sys.stdout.write(f"trained on {trainer.world_size} {trainer.model is module}\\n")  # at once: two processes write
"""
SORTED = """
from ddp_callbacks.lightning import CallbackStrategy
import pytorch_lightning as pl
import pickle
options = {"accelerator": "cpu", "logger": False}
trainers = [pl.Trainer(strategy=CallbackStrategy(compress="bf16"), **options)]
trainers.append(pl.Trainer(strategy="ddp_callbacks", **options))
other = {"options": options, "CallbackStrategy": CallbackStrategy}
exec("import lightning.pytorch as pl; made = pl.Trainer(strategy=CallbackStrategy(), **options)", other)
trainers.append(other["made"])
assert all(type(pickle.loads(pickle.dumps(made.strategy))) is type(made.strategy) for made in trainers)
print([type(made.strategy).__module__.rpartition(".")[2] for made in trainers])
"""
BOTH = """
import ddp_callbacks.lightning
import lightning.pytorch, pytorch_lightning
for package in (lightning.pytorch, pytorch_lightning):
    strategy = package.Trainer(strategy="ddp_callbacks", accelerator="cpu", logger=False).strategy
    assert isinstance(strategy, package.strategies.DDPStrategy), package
registered = lightning.pytorch.strategies.StrategyRegistry.get("ddp_callbacks")
assert type(registered) is ddp_callbacks.lightning.CallbackStrategy
print("both")
"""
NEITHER = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "lightning" in name.split(".")[0] else find(name, *rest)
try:
    import ddp_callbacks.lightning
except ImportError as error:
    print(error)
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("script", "ranks", "says"),
    [
        (OTHER_PACKAGE, 2, "trained on 2 True"),
        (BOTH, 1, "both"),
        (SORTED, 1, "['for_pytorch_lightning', 'for_pytorch_lightning', 'for_lightning']"),
        (NEITHER, 1, 'Lightning is not installed: pip install "lightning'),
    ],
)
def test_either_package_will_do(script: str, ranks: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *(torchrun if ranks > 1 else []), "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(says) == ranks, done.stdout + done.stderr


YAML = """
trainer:
  accelerator: cpu
  logger: false
  strategy:
    class_path: ddp_callbacks.lightning.CallbackStrategy
    init_args: {batch_size: per_process, bucket_cap_mb: 3, timeout: 0:05:00, sync: %s}
"""


@pytest.mark.parametrize("sync", ["every_step", "{class_path: ddp_callbacks.LocalSGD, init_args: {every: 4}}"])
def test_options_of_the_strategy_come_from_a_yaml(sync: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    (tmp_path / "config.yaml").write_text(YAML % sync)
    with quiet():
        made = LightningCLI(Net, args=["--config", str(tmp_path / "config.yaml")], run=False).trainer.strategy
    assert type(made) is CallbackStrategy
    assert (made._batch_size, made._synchronizer_options["bucket_cap_mb"]) == ("per_process", 3.0)
    assert made._timeout.total_seconds() == 300
    assert made._sync == ("every_step" if sync == "every_step" else LocalSGD(every=4))


def test_the_versions_that_were_compromised_are_excluded() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert "lightning>=2.6,!=2.6.2,!=2.6.3" in text
