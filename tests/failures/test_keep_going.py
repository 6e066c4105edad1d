"""``ddprun --keep-going``: whoever dies, and wherever, the others continue with the numbers of one process.

``SEED`` chooses the random moments of the night, ``CUTS`` how many; by default the date does.
"""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from kit.ranks import Nursery, noting_errors, run_distributed
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from misfortunes import suffer
from survival import KINDS, OPTIMIZERS, SEED, Plan, prove

from ddp_callbacks import join_process_group
from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.cluster.environment import KEEP_GOING
from ddp_callbacks.comm.topology import new_subgroup
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.lightning.keep_going import _Begin
from ddp_callbacks.process_group import resolve_group, survivors


@pytest.mark.cold
@pytest.mark.parametrize(
    ("kind", "optimizer", "rank", "copies"),
    [("trial", "sgd", 0, "seldom"), ("trainer", "averaged", 2, "often")],
)
def test_a_run_that_loses_a_process_has_the_numbers_of_one(
    tmp_path: Path, kind: str, optimizer: str, rank: int, copies: str
) -> None:
    """Killed processes change no number."""
    printed = prove(tmp_path, kind, optimizer, 3, {rank: ("backward", 8)}, copies)
    assert f"ddprun: rank {rank} on localhost was killed by SIGKILL; continuing with 2 processes\n" in printed
    assert printed.splitlines()[-1].startswith("ddprun: done, with 1 of 3 processes lost on the way"), printed


@pytest.mark.cold
@pytest.mark.parametrize(
    ("kind", "size", "dies"),
    [
        pytest.param(
            "trainer", 2, {1: ("validation", 1, "for good")}, id="in the sanity check; one trains again, alone"
        ),
        pytest.param("trainer", 3, {0: ("start", 1)}, id="before the first group: the new rank 0 writes"),
        pytest.param("trainer", 3, {0: ("validation", 13)}, id="in a later call: the log keeps its rows"),
        pytest.param(
            "trainer", 4, {3: ("forward", 1, "for good"), 0: ("forward", 3, "for good")}, id="two times in an epoch"
        ),
        pytest.param(
            "trial", 2, {1: ("start", 1), 0: ("forward", 3, "waits")}, id="so that the other one begins alone"
        ),
        pytest.param("trial", 2, {1: ("opening", 1, "for good")}, id="before the other one has opened its log"),
    ],
)
def test_a_process_may_be_lost(tmp_path: Path, kind: str, size: int, dies: Plan) -> None:
    prove(tmp_path, kind, "sgd", size, dies, "often")


@pytest.mark.wide
@pytest.mark.parametrize("program", ["Trial", "Trainer"])
def test_an_exception_still_ends_all_with_its_own_text(nursery: Nursery, tmp_path: Path, program: str) -> None:
    case = (program, "raises at once", "step", [1], [])
    other, unlucky = nursery.run_watched(suffer, 2, tmp_path, *case, environ={KEEP_GOING: "1"})
    assert (other.code, unlucky.code) == (1, 1), other.stderr + unlucky.stderr
    assert unlucky.notes["error"] == ["TheCause", "sensor 7 gave nothing"]
    kind, text = other.notes["error"]
    assert kind == "PeerError" and f"pid {unlucky.pid}) failed with TheCause: sensor 7 gave nothing" in text, text
    assert other.noted_at["error"] - unlucky.noted_at["error"] < 10 * other.slowness  # it awaits no new list of members


@pytest.mark.cold
def test_a_process_dies_when_only_some_know_that_all_have_come_to_the_end_of_a_call(tmp_path: Path) -> None:
    printed = prove(tmp_path, "trial", "sgd", 3, {0: ("unheard", 1), 2: ("ended", 1)}, "often")
    assert "ddprun: done, with 1 of 3 processes lost on the way" in printed, printed


def die_before_a_further_group() -> None:
    """Rank 1 dies when the others connect to it in a group of its own."""
    survivors._CONNECTING = timedelta(seconds=2)
    join_process_group()
    if dist.get_rank() == 1:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with noting_errors():
        new_subgroup([0, 1], resolve_group())


def test_a_rank_that_dies_while_a_further_group_connects_is_named_at_once(nursery: Nursery, tmp_path: Path) -> None:
    other, _ = nursery.run(die_before_a_further_group, 2, tmp_path, environ={KEEP_GOING: "1"})
    kind, text = other.notes["error"]
    assert kind == "PeerError" and "rank 1 (host" in text and "the connections of a further process group" in text, text


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_begins_again_has_the_dtypes_with_which_it_began() -> None:
    # A callback makes an average of the model before the module is converted.
    trainer, module = pl.Trainer(strategy="ddp_callbacks", accelerator="cpu", devices=1, logger=False), BoringModel()
    module.trainer = trainer
    trainer.strategy.connect(module)
    begin = _Begin(trainer)
    module.double()
    begin.begin_again()
    assert module.layer.weight.dtype == torch.float32


def log_where_others_have(folder: str) -> int:
    """Rank 0 is new, and its logger would choose another version; the others have logged to version 0 so far."""
    Path(folder, "lightning_logs", "version_0").mkdir(parents=True, exist_ok=True)
    strategy, logger = CallbackStrategy(), CSVLogger(folder, version=0 if dist.get_rank() else None)
    strategy._trainer, strategy.recovery = SimpleNamespace(loggers=[logger]), Recovery()
    strategy.places = [{"version": 0, "lines": None}] if dist.get_rank() else ()
    strategy.agree_on_logs()
    return int(logger.version)


def test_a_new_process_logs_to_the_version_of_the_others(tmp_path: Path) -> None:
    assert run_distributed(log_where_others_have, 2, str(tmp_path)) == [0, 0]


# --- anywhere ---------------------------------------------------------------------------------------------------------

CUTS = int(os.environ.get("CUTS", "5"))


@pytest.mark.night
@pytest.mark.parametrize("phase", ["meeting", "connecting"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_may_die_while_the_others_meet_again(tmp_path: Path, kind: str, phase: str) -> None:
    printed = prove(tmp_path, kind, "sgd", 4, {0: ("backward", 8), 2: (phase, 2)}, "often")
    assert "ddprun: done, with 2 of 4 processes lost on the way" in printed, printed


@pytest.mark.night
@pytest.mark.parametrize("number", range(CUTS))
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_may_die_at_any_moments(tmp_path: Path, kind: str, number: int) -> None:
    chosen = random.Random(f"{SEED} {kind} {number}")
    plan: Plan = {rank: ("time", chosen.uniform(0, 2)) for rank in chosen.sample(range(4), 2)}
    print(SEED, plan)
    prove(tmp_path, kind, chosen.choice(OPTIMIZERS), 4, plan, chosen.choice(["often", "seldom"]))
