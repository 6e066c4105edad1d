"""What the tests on GPUs do (tests/cuda), on two CPUs: the same functions, with another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import device_bodies
import device_failures as failures
import device_trainers as trainers
import device_trials
import pytest
from device_trainers import OURS, PLAIN
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import Nursery, run_distributed

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]


def run_on_cpus() -> None:
    for body, arguments in device_bodies.BODIES:
        if arguments != ("bf16_compress_hook",):  # DDP refuses it where torch is built without CUDA
            body("cpu", *arguments)


def test_the_bodies_of_the_tests_on_gpus_run_on_cpus() -> None:
    run_distributed(run_on_cpus, 2)


def test_the_scenarios_of_the_tests_on_gpus_are_there() -> None:
    assert set(trainers.NAMES) <= set(trainers.scenarios.SCENARIOS)
    assert set(device_trials.NAMES) <= set(device_trials.trials.SCENARIOS)


TRAININGS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "resumed": (trainers.resumed, ()),
    "local steps": (trainers.local_steps, ()),
    "steady batches": (trainers.steady_batches, (True,)),
    "overflow": (trainers.a_scaled_loss_that_overflows, ()),
    **{name: (trainers.precision, (name,)) for name in trainers.PRECISIONS if name != "16-mixed"},
}


def train_all() -> dict[str, Any]:
    return {name: body("cpu", *arguments, OURS) for name, (body, arguments) in TRAININGS.items()}


@once
def on_two_ranks() -> list[dict[str, Any]]:
    return run_distributed(train_all, 2)


def by_two_and_one(name: str) -> tuple[list[Any], Any]:
    body, arguments = TRAININGS[name]
    return [found[name] for found in on_two_ranks()], body("cpu", *arguments, PLAIN)


@pytest.mark.parametrize("name", ["resumed", "local steps", "steady batches"])
def test_what_a_trainer_does_on_a_gpu_it_does_on_cpus(name: str) -> None:
    two, one = by_two_and_one(name)
    assert_equal(two, [one, one], 1e-10)


@pytest.mark.parametrize("name", [name for name in trainers.PRECISIONS if name in TRAININGS])
def test_a_trainer_of_any_precision_gives_the_numbers_of_one_process(name: str) -> None:
    """A Trainer gives one process's numbers in every precision."""
    trainers.assert_near_one_process(*by_two_and_one(name), trainers.PRECISIONS[name])


def test_a_scaled_loss_of_a_trainer_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    """All skip a step that overflows on one."""
    two, one = by_two_and_one("overflow")
    trainers.assert_near_one_process(two, one, trainers.PRECISIONS["16-mixed"])
    assert one["scale"] == trainers.FIRST_SCALE / 2


def test_a_scaled_loss_that_overflows_in_one_process_skips_the_step_as_without_us() -> None:
    assert_equal(*(trainers.a_scaled_loss_that_overflows("cpu", way) for way in (OURS, PLAIN)), 0.0)


@pytest.mark.wide
@pytest.mark.parametrize(("misfortune", "within"), [("raises", 4.0), ("is killed", 6.0)])
def test_a_rank_that_fails_between_ordinary_steps_is_named(
    nursery: Nursery, tmp_path: Path, misfortune: str, within: float
) -> None:
    ranks = nursery.run_watched(failures.train_until, 2, tmp_path, "cpu", misfortune, 1, False)
    failures.assert_named(ranks, misfortune, within)


@pytest.mark.wide
def test_a_rank_that_votes_while_the_other_trains_is_named(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(failures.meet_in_different_exchanges, 2, tmp_path, "cpu")
    failures.assert_lost_ranks_are_named(ranks, 4.0)


@pytest.mark.wide
def test_a_script_that_knows_nothing_of_gpus_trains_in_shared_memory(nursery: Nursery, tmp_path: Path) -> None:
    failures.assert_trained_on_cpus(nursery.run_watched(failures.train_on_cpus, 2, tmp_path), has_gpu=False)


@pytest.mark.wide
def test_gradients_are_compressed_between_the_cpus_of_two_hosts(nursery: Nursery, tmp_path: Path) -> None:
    failures.assert_compressed(nursery.run_watched(failures.compress_between_made_up_hosts, 2, tmp_path))


@pytest.mark.wide
def test_a_run_after_two_that_failed_is_that_of_one_process(nursery: Nursery, tmp_path: Path) -> None:
    trainers.assert_trained_after(nursery.run_watched(trainers.train_after_a_failure, 2, tmp_path, "cpu"))
