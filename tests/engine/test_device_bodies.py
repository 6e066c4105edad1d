"""What the tests on GPUs do (tests/cuda), on two CPUs: the same functions, with another device."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import device_bodies as bodies
import device_failures as failures
import device_trainers as trainers
import pytest
from device_trainers import OURS, PLAIN
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import Nursery
from shared_worlds import World

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]
WORLD = World(__name__)


@WORLD.each(bodies.BODIES)
def test_what_ranks_do_on_a_gpu_they_do_on_cpus(name: str) -> None:
    bodies.BODIES[name]("cpu")


def test_what_one_process_does_on_a_gpu_it_does_on_a_cpu() -> None:
    bodies.a_world_of_one("cpu")


@pytest.mark.parametrize("table", trainers.NAMES)
def test_the_scenarios_of_the_tests_on_gpus_are_there(table: str) -> None:
    assert set(trainers.NAMES[table]) <= set(importlib.import_module(table).SCENARIOS)


def precisions() -> dict[str, Any]:
    return trainers.precisions("cpu", OURS)


def runs_after_failures() -> dict[str, Any]:
    return trainers.runs_after_failures("cpu", OURS)


WORLD.add("precisions", precisions)
WORLD.add("runs_after_failures", runs_after_failures)


@once
def in_one_process() -> dict[str, Any]:
    return trainers.precisions("cpu", PLAIN)


@pytest.mark.parametrize("name", trainers.PRECISIONS)
def test_a_trainer_of_any_precision_gives_the_numbers_of_one_process(name: str) -> None:
    """A Trainer gives one process's numbers in every precision."""
    trainers.assert_near_one_process(WORLD.results("precisions"), in_one_process(), name)


def test_a_scaled_loss_of_a_trainer_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    """All skip a step that overflows on one."""
    scales = [found["16-mixed"][2] for found in (*WORLD.results("precisions"), in_one_process())]
    assert scales == [trainers.FIRST_SCALE / 4] * 3


def test_a_run_after_two_that_failed_is_that_of_one_process() -> None:
    alone = trainers.runs_after_failures("cpu", PLAIN)
    assert_equal(WORLD.results("runs_after_failures"), [alone, alone], 1e-10)


@pytest.mark.night
@pytest.mark.parametrize(("misfortune", "within"), [("is killed", 6.0), ("votes", 4.0)])
def test_a_rank_that_fails_between_ordinary_steps_is_named(
    nursery: Nursery, tmp_path: Path, misfortune: str, within: float
) -> None:
    ranks = nursery.run_watched(failures.train_until, 2, tmp_path, "cpu", misfortune, misfortune == "votes")
    failures.assert_named(ranks, misfortune, within)
