"""A failure on one rank ends all of them, soon, with an error that names the rank, the host and the cause."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from nursery import HOSTNAME, Nursery, Rank, note, noting_errors
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchbearer import Trial

from ddp_callbacks import join_process_group
from ddp_callbacks.process_group import failures
from ddp_callbacks.torchbearer import DDPCallback

STEP = 3  # of the first epoch: in the middle of training
SAMPLES, BATCH = 48, 6

Action = Callable[[], None]


# --- bodies: a user's script, with a misfortune in it ---------------------------------------------------------------


class Rows(Dataset[Any]):
    """Random rows; ``action`` happens when row ``at`` is read."""

    def __init__(self, action: Action | None = None, at: int = 0) -> None:
        self.action, self.at = action, at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.action is not None and index >= self.at:
            self.action()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(1, generator=generator)


def script(place: str, action: Action | None, timeout: float | None = None, listens: bool = True) -> Trial:
    """A Trial in which ``action`` happens in a step of training on this rank: in the callback, criterion or dataset.

    Args:
        listens: Whether there is a callback that may stop the run, for which the ranks meet after each step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    calls: list[int] = []

    def criterion(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if place == "criterion" and action is not None and len(calls) > STEP:
            action()
        return nn.functional.mse_loss(prediction, target)

    @torchbearer.callbacks.on_step_training
    def callback(state: Any) -> None:
        if place == "callback" and action is not None and state[torchbearer.BATCH] == STEP:
            action()

    ours = DDPCallback() if timeout is None else DDPCallback(timeout=timedelta(seconds=timeout))
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        criterion,
        metrics=["loss"],
        callbacks=[ours, callback] if listens else [ours],
        verbose=0,
    )
    rows = Rows(action if place == "dataset" else None, STEP * BATCH)
    return trial.with_generators(DataLoader(rows, BATCH), DataLoader(Rows(), BATCH))


def my_rank() -> int:
    return int(os.environ["RANK"])


class TheCause(Exception):
    """An exception class of the user's own."""


def raise_the_cause() -> None:
    note("happens")
    raise TheCause("sensor 7 gave nothing")


def kill_myself() -> None:
    note("happens")
    os.kill(os.getpid(), signal.SIGKILL)


def stop_myself() -> None:
    note("happens")
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt_myself() -> None:
    note("happens")
    os.kill(os.getpid(), signal.SIGINT)


def exit_cleanly() -> None:
    note("happens")
    sys.exit(0)


ACTIONS = {
    action.__name__: action for action in (raise_the_cause, kill_myself, stop_myself, interrupt_myself, exit_cleanly)
}


def train(place: str, action: str, rank: int, timeout: float | None = None) -> None:
    trial = script(place, ACTIONS[action] if my_rank() == rank else None, timeout, listens=place == "callback")
    with noting_errors():
        trial.run(3)


def train_unequally(fewer: int) -> None:
    """Rank ``fewer`` trains one epoch and comes to its end; the others train two."""
    trial = script("nowhere", None)
    with noting_errors():
        trial.run(1 if my_rank() == fewer else 2)
    note("happens")


def evaluate_on_one_rank(rank: int) -> None:
    trial = script("nowhere", None)
    trial.run(1)
    if my_rank() == rank:
        with noting_errors():
            trial.evaluate()
    note("happens")


def raise_before_the_trial(rank: int) -> None:
    join_process_group()
    if my_rank() == rank:
        raise_the_cause()
    with noting_errors():
        script("nowhere", None).run(3)


def raise_after_the_trial(rank: int) -> None:
    """Between two runs nobody watches this rank but the interpreter's hook."""
    trial = script("nowhere", None)
    trial.run(1)
    if my_rank() == rank:
        raise_the_cause()
    with noting_errors():
        trial.run(2)


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "rank", "world_size"), [("callback", 1, 2), ("callback", 0, 3), ("criterion", 0, 2), ("dataset", 2, 3)]
)
def test_an_exception_in_the_middle_of_training_reaches_every_other_rank(
    nursery: Nursery, tmp_path: Path, place: str, rank: int, world_size: int
) -> None:
    ranks = nursery.run_watched(train, world_size, tmp_path, place, "raise_the_cause", rank)
    assert_all_fail(ranks, rank)
    assert ranks[rank].notes["error"] == ["TheCause", "sensor 7 gave nothing"]
    assert_cause_is_known(ranks, rank, within=3)


def test_an_exception_before_the_trial_reaches_every_other_rank(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(raise_before_the_trial, 2, tmp_path, 1)
    assert_all_fail(ranks, 1)
    assert_cause_is_known(ranks, 1, within=3)


def test_an_exception_between_two_runs_on_rank_0_reaches_every_other_rank(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(raise_after_the_trial, 2, tmp_path, 0)
    assert_all_fail(ranks, 0)
    assert_cause_is_known(ranks, 0, within=3)


@pytest.mark.parametrize(("place", "rank"), [("callback", 1), ("dataset", 2)])
def test_a_killed_rank_is_named_on_all_others(nursery: Nursery, tmp_path: Path, place: str, rank: int) -> None:
    ranks = nursery.run_watched(train, 3, tmp_path, place, "kill_myself", rank)
    assert_all_fail(ranks, rank, code=-signal.SIGKILL)
    for error in peer_errors(ranks, rank, within=5):
        assert f"rank {rank} (host {HOSTNAME}, pid {ranks[rank].pid}) died" in error, error
        assert "kernel log" in error


def test_rank_0_killed_with_the_store_is_named_on_all_others(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(train, 3, tmp_path, "callback", "kill_myself", 0)
    assert_all_fail(ranks, 0, code=-signal.SIGKILL)
    for error in peer_errors(ranks, 0, within=5):
        assert "rank 0" in error and "died" in error and f"host {HOSTNAME}" in error, error
        assert "rendezvous store at 127.0.0.1:" in error, error  # the store that knew its host name went with it


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_with_0_in_the_middle_is_named(nursery: Nursery, tmp_path: Path, rank: int) -> None:
    ranks = nursery.run_watched(train, 2, tmp_path, "callback", "exit_cleanly", rank)
    assert [r.code for r in ranks] == [0, 1] if rank == 0 else [1, 0]
    for error in peer_errors(ranks, rank, within=5):
        assert f"rank {rank} (host {HOSTNAME}, pid {ranks[rank].pid})" in error, error
        assert "SystemExit" in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_trains_fewer_epochs_is_named_with_the_remedy(nursery: Nursery, tmp_path: Path, rank: int) -> None:
    ranks = nursery.run_watched(train_unequally, 2, tmp_path, rank)
    assert ranks[rank].code == 0 and ranks[1 - rank].code == 1
    assert_left(ranks, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_evaluate_on_one_rank_only_is_an_error_with_the_remedy(nursery: Nursery, tmp_path: Path, rank: int) -> None:
    ranks = nursery.run_watched(evaluate_on_one_rank, 2, tmp_path, rank)
    assert ranks[1 - rank].code == 0 and ranks[rank].code == 1
    assert_left(ranks, 1 - rank)


def test_a_rank_that_goes_silent_is_named_after_the_timeout(nursery: Nursery, tmp_path: Path) -> None:
    ended: list[int] = []

    def kill_the_stopped(rank: int, pids: list[int]) -> None:
        ended.append(rank)
        if sorted(ended) == [0, 2]:
            os.kill(pids[1], signal.SIGKILL)

    ranks = nursery.run_watched(train, 3, tmp_path, "callback", "stop_myself", 1, 5.0, on_end=kill_the_stopped)
    assert_all_fail(ranks, 1, code=-signal.SIGKILL, within=25)
    for error in peer_errors(ranks, 1, within=12):
        assert f"rank 1 (host {HOSTNAME}, pid {ranks[1].pid}) died or went silent" in error, error


def test_ctrl_c_on_one_rank_ends_all(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(train, 3, tmp_path, "callback", "interrupt_myself", 1, finalize=True)
    assert_all_fail(ranks, 1, code=ranks[1].code)
    assert ranks[1].notes["error"][0] == "KeyboardInterrupt" and ranks[1].code != 0
    for error in peer_errors(ranks, 1, within=3):
        assert f"rank 1 (host {HOSTNAME}, pid {ranks[1].pid}) failed with KeyboardInterrupt" in error, error


def assert_all_fail(ranks: list[Rank], rank: int, code: int = 1, within: float = 10) -> None:
    """Every exit code is non-zero, that of ``rank`` is ``code``, and all end ``within`` seconds of what happened."""
    expected = [code if number == rank else 1 for number in range(len(ranks))]
    assert [r.code for r in ranks] == expected, [r.stderr for r in ranks]
    happened = ranks[rank].noted_at["happens"]
    assert max(r.ended for r in ranks) - happened < within * ranks[0].slowness


def peer_errors(ranks: list[Rank], rank: int, within: float) -> list[str]:
    """The texts of the other ranks' errors: each a PeerError, ``within`` seconds of what happened on ``rank``."""
    others = [r for r in ranks if r is not ranks[rank]]
    for other in others:
        assert other.notes["error"][0] == "PeerError", other.notes["error"]
        assert other.noted_at["error"] - ranks[rank].noted_at["happens"] < within * other.slowness
        assert "PeerError" in other.stderr, "the error must end the script, with its traceback"
    return [other.notes["error"][1] for other in others]


def assert_cause_is_known(ranks: list[Rank], rank: int, within: float) -> None:
    for error in peer_errors(ranks, rank, within):
        assert f"rank {rank} (host {HOSTNAME}, pid {ranks[rank].pid}) failed with TheCause: sensor 7" in error, error
        assert "Traceback (most recent call last)" in error and "in raise_the_cause" in error, error


def assert_left(ranks: list[Rank], rank: int) -> None:
    """The other rank says that ``rank`` has left, and what to do."""
    for error in peer_errors(ranks, rank, within=8):
        assert f"rank {rank} (host {HOSTNAME}, pid {ranks[rank].pid}) left the run" in error, error
        assert "Every rank must make the same calls (run, evaluate and predict too)" in error


class LateWork(dist.Work):
    """Comes to its end between the timeout of a wait and the next look."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.done = broken, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")
        if self.broken:
            raise RuntimeError("Connection closed by peer")
        return True

    def is_completed(self) -> bool:
        return self.done


def test_a_sum_that_comes_just_after_a_look_is_no_failure() -> None:
    assert failures._wait_slice(LateWork(broken=False))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        failures._wait_slice(LateWork(broken=True))
