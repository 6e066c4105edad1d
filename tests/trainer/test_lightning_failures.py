"""A process of a Trainer that fails, is told to stop, or was given something else: all hear of it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fabric_loops
import pytest
import torch
import torch.distributed as dist
from kit.ranks import HOSTNAME, Nursery, noting_errors
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from shared_worlds import in_ways
from torch import nn
from trainer_cases import GLOO, OURS, TWO, Bodies, message_of, quiet
from trainers import CLASSES, FEATURES, Net, fit, loader, trainer
from ways import Way

from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import moments
from ddp_callbacks.replicas.step_times import StepTimes

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


# --- failures ---------------------------------------------------------------------------------------------------------


class Fails(Net):
    """On one rank, in the third step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.trainer.global_rank == self.rank:
            raise ZeroDivisionError("a bad sample")
        return super().training_step(batch, batch_idx)


def fail_in_a_trainer(rank: int) -> None:
    with quiet(), noting_errors():
        callbacks = [ModelCheckpoint("saved", save_on_exception=True), OnExceptionCheckpoint("saved")]
        fit(OURS, Fails(rank), callbacks=callbacks, enable_checkpointing=True)


def loop_of_fabric(outputs: int = CLASSES, lr: float = 0.1, samples: int = 29, fails: int | None = None) -> None:
    made = fabric_loops.fabric(OURS)
    module = nn.Linear(FEATURES, outputs).double()
    model, optimizer = made.setup(module, fabric_loops.sgd(module, lr))
    for index, (x, y) in enumerate(made.setup_dataloaders(fabric_loops.loader(samples))):
        if index == 2 and made.global_rank == fails:
            raise ZeroDivisionError("a bad sample")
        made.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def fail_in_a_loop_of_fabric(rank: int) -> None:
    with quiet(), noting_errors():
        loop_of_fabric(fails=rank)


@pytest.mark.parametrize(
    ("fail", "failing"), [(fail_in_a_trainer, 0), (fail_in_a_trainer, 1), (fail_in_a_loop_of_fabric, 1)]
)
def test_a_failure_reaches_the_other_rank_although_a_checkpoint_is_saved(
    nursery: Nursery, tmp_path: Path, fail: Callable[[int], None], failing: int
) -> None:
    """Failures in Fabric loops and Trainers, even while these save, reach all processes."""
    ranks = nursery.run_watched(fail, 2, tmp_path, failing)
    assert [rank.code for rank in ranks] == [1, 1]
    failed, other = ranks[failing], ranks[1 - failing]
    assert failed.notes["error"] == ["ZeroDivisionError", "a bad sample"]
    name, message = other.notes["error"]
    assert name == "PeerError"
    assert f"rank {failing} (host {HOSTNAME}, pid {failed.pid}) failed with ZeroDivisionError: a bad sample" in message
    assert abs(other.noted_at["error"] - failed.noted_at["error"]) < 4 * other.slowness


def different_learning_rates(rank: int) -> Any:
    return fit(OURS, Net(optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1 * (1 + rank))))


DIFFERENCES: dict[str, Callable[[int], Any]] = {  # by what is said
    "the ranks disagree about the train dataloader:\n  batches: 4 on rank 0; 5 on rank 1": (
        lambda rank: fit(OURS, None, loader(29 + 8 * rank))
    ),
    "about the optimizers:\n  optimizer group 0: lr: 0.1 on rank 0; 0.2 on rank 1": different_learning_rates,
    "skip_batch: None on rank 0; any on rank 1": (
        lambda rank: fit(CallbackStrategy(skip_batch="any" if rank else None))  # type: ignore[arg-type]
    ),
    "the model:\n  parameter weight: [3, 6] float64 on rank 0; [4, 6] float64": (
        lambda rank: loop_of_fabric(outputs=CLASSES + rank)
    ),
    "the optimizers:\n  optimizer group 0: lr: 0.1 on rank 0; 0.2": lambda rank: loop_of_fabric(lr=0.1 + 0.1 * rank),
    "the TensorDataset dataloader:\n  batches: 5 on rank 0; 6": lambda rank: loop_of_fabric(samples=29 + 8 * rank),
}


@WORLD
def differences() -> list[str]:
    return [message_of(lambda run=run: run(dist.get_rank())) for run in DIFFERENCES.values()]


def test_ranks_with_other_data_optimizers_or_settings_are_told_apart() -> None:
    for messages in WORLD.returned(differences):
        for says, message in zip(DIFFERENCES, messages, strict=True):
            assert message.startswith("MismatchError") and says in message


# --- stops ------------------------------------------------------------------------------------------------------------


class StopsOn(Net):
    """Some ranks want to stop after the first step, when their time is over, say."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", outputs["loss"], on_step=True)
        if self.trainer.global_step == 1 and self.trainer.global_rank in self.ranks:
            self.trainer.should_stop = True


class StopsAfterValidation(Net):
    """Rank 1 wants to stop after the first validation, in the middle of the epoch."""

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


class StopsAtEnd(Net):
    """Rank 1 wants to stop in a hook at the end of a pass."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.begun = 0
        setattr(self, hook, self.stop)

    def on_train_epoch_start(self) -> None:
        self.begun += 1

    def stop(self) -> None:
        if not self.trainer.sanity_checking and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


@WORLD.on(TWO)
def test_a_stop_of_one_rank_at_the_end_of_a_pass_begins_no_other_epoch() -> None:
    # An empty epoch began, in which a mean over its steps divided by zero.
    for hook, step in (("on_train_epoch_end", 4), ("on_validation_epoch_end", 2)):
        made, module = trainer(OURS, max_epochs=5, val_check_interval=2), StopsAtEnd(hook)
        made.fit(module, loader(), loader(13, 5, 9))
        assert (made.global_step, module.begun) == (step, 1)


@WORLD.runs(TWO, GLOO)
def stopping_alone() -> tuple[list[int], list[str]]:
    steps, said = [], list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "say", said.append)
        for module in (StopsOn(0, 1), StopsOn(0), StopsOn(1), StopsAfterValidation()):
            made = trainer(OURS, max_epochs=5, val_check_interval=2)
            made.fit(module, loader(), loader(13, 5, 9))
            steps.append(made.global_step)
    return steps, said


@in_ways(TWO, GLOO)
def test_what_all_ranks_decide_after_a_step_stops_there_and_what_one_decides_after_the_next(way: Way) -> None:
    """`should_stop` on one process stops all."""
    (steps, said), (others, nothing) = WORLD.returned(stopping_alone, way)
    assert steps == others == [1, 2, 2, 3] and nothing == []
    words = r"rank (\d) \(host .*\) set trainer.should_stop, the other processes did not: all stop at step (\d)\. .*"
    assert [re.sub(words, r"\1 at \2", text) for text in said] == ["0 at 2", "1 at 2", "1 at 3"]


class Signalled(Net):
    """Rank 1 gets a signal in the second step, in the middle of the first epoch; all may want to stop after it."""

    def __init__(self, number: int, stops: bool = False) -> None:
        super().__init__()
        self.number, self.stops = number, stops

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.stops and self.trainer.global_step == 2

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


@WORLD
def terminated() -> Any:
    made = trainer(OURS)
    with pytest.raises(SystemExit) as raised:
        made.fit(Signalled(signal.SIGTERM), loader())
    return type(raised.value).__name__, raised.value.code, made.global_step


def test_a_sigterm_on_one_rank_ends_all_after_the_same_step() -> None:
    """SIGTERM on one process does, too."""
    (name, code, steps), other = WORLD.returned(terminated)
    assert (name, code, steps) == other and name == "SIGTERMException" and code == 143 and steps in (2, 3)


class Slow(Net):
    """Rank 1 computes for 50 ms longer, in batches that no exchange of gradients follows, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.05 * self.trainer.global_rank)
        return super().training_step(batch, batch_idx)


@WORLD
def seconds_in_forward() -> list[float]:
    found: list[float] = []
    mark = StepTimes.mark

    def counting(times: StepTimes, part: Any) -> None:
        before = times._seconds["in forward"]
        mark(times, part)
        found.append(times._seconds["in forward"] - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "mark", counting)
        fit(OURS, Slow(), loader(), accumulate_grad_batches=3)
    return found


def test_a_rank_that_waits_in_an_accumulated_batch_does_not_seem_to_compute() -> None:
    fast, slow = (sum(each) for each in WORLD.returned(seconds_in_forward))
    assert slow - fast > 0.03 * 8, (fast, slow)  # two epochs of four batches


def terminate_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Forks(Net):
    """A child of rank 1 gets SIGTERM, with the handler that it has inherited."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            child = multiprocessing.get_context("fork").Process(target=terminate_myself)
            child.start()
            child.join(20)
        return super().training_step(batch, batch_idx)


@WORLD
def child_terminated() -> int:
    made = trainer(OURS)
    made.fit(Forks(), loader())
    return made.global_step


def test_a_sigterm_to_a_forked_child_ends_no_rank() -> None:
    assert WORLD.returned(child_terminated) == [8, 8]


def scontrol(folder: Path) -> None:
    """A command that notes what it is asked."""
    folder.mkdir()
    tool = folder / "scontrol"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {folder.absolute()}/asked\n')
    tool.chmod(0o755)


@WORLD
def requeued() -> Any:
    """Slurm warns rank 1."""
    rank, tools = str(dist.get_rank()), Path(f"tools-{dist.get_rank()}").absolute()
    scontrol(tools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        for name, value in {"JOB_ID": "7", "JOB_NAME": "job", "NTASKS": "2", "NODEID": "0"}.items():
            patch.setenv(f"SLURM_{name}", value)
        for name, value in {"NTASKS_PER_NODE": "2", "PROCID": rank, "LOCALID": rank}.items():
            patch.setenv(f"SLURM_{name}", value)
        steps = []
        for folder, stops in (("requeued", False), ("stopped", True)):
            made = trainer(OURS, default_root_dir=folder, plugins=[SLURMEnvironment()])
            made.fit(Signalled(signal.SIGUSR1, stops), loader())
            saved = torch.load(f"{folder}/hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
            steps.append((saved, made.global_step))
    return steps, (tools / "asked").read_text() if (tools / "asked").exists() else ""


def test_slurm_s_warning_on_one_rank_saves_a_checkpoint_of_all_and_requeues() -> None:
    """Slurm's warning saves one checkpoint and requeues."""
    (steps, asked), (others, nothing) = WORLD.returned(requeued)
    assert steps == others and (asked, nothing) == ("requeue 7\n" * 2, "")
    assert steps in ([(2, 8), (2, 2)], [(3, 8), (2, 2)])  # exactly where all want something
