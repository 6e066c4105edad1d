"""What the tests on GPUs do (tests/cuda), on two CPUs: the same functions, with another device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_bodies
import device_failures as failures
import device_trainers as trainers
import pytest
from comparing import assert_equal
from distributed import run_distributed
from nursery import Nursery

# DDP refuses this hook where torch is built without CUDA.
ON_CPUS = [case for case in device_bodies.BODIES if case[1] != ("bf16_compress_hook",)]


@pytest.mark.parametrize("case", ON_CPUS, ids=device_bodies.name_of)
def test_what_two_processes_do_on_a_gpu_they_do_on_cpus(case: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    body, arguments = case
    run_distributed(body, 2, "cpu", *arguments)


@pytest.mark.parametrize(("misfortune", "within"), [("raises", 4.0), ("is killed", 6.0)])
@pytest.mark.parametrize("reads", [False, True])
def test_a_rank_that_fails_between_ordinary_steps_is_named(
    nursery: Nursery, tmp_path: Path, misfortune: str, within: float, reads: bool
) -> None:
    ranks = nursery.run_watched(failures.train_until, 2, tmp_path, "cpu", misfortune, 1, reads)
    failures.assert_named(ranks, misfortune, within)


def test_a_rank_that_votes_while_the_other_trains_is_named(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(failures.meet_in_different_exchanges, 2, tmp_path, "cpu")
    failures.assert_lost_ranks_are_named(ranks, 4.0)


def test_a_script_that_knows_nothing_of_gpus_trains_in_shared_memory(nursery: Nursery, tmp_path: Path) -> None:
    failures.assert_trained_on_cpus(nursery.run_watched(failures.train_on_cpus, 3, tmp_path), has_gpu=False)


def test_gradients_are_compressed_between_the_cpus_of_two_hosts(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(failures.compress_between_made_up_hosts, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [rank.notes for rank in ranks] == [{"contexts": []}] * 2


@pytest.mark.usefixtures("seed_variables")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("resumed", ()), ("local_steps", ()), ("steady_batches", (False,)), ("steady_batches", (True,))],
)
def test_what_a_trainer_does_on_a_gpu_it_does_on_cpus(name: str, arguments: tuple[Any, ...]) -> None:
    body = getattr(trainers, name)
    one = body("cpu", *arguments, trainers.PLAIN)
    assert_equal(run_distributed(body, 2, "cpu", *arguments, trainers.OURS), [one, one], 1e-10)


@pytest.mark.usefixtures("seed_variables")
@pytest.mark.parametrize("name", [name for name in trainers.PRECISIONS if name != "16-mixed"])
def test_a_trainer_of_any_precision_gives_the_numbers_of_one_process(name: str) -> None:
    two = run_distributed(trainers.precision, 2, "cpu", name, trainers.OURS)
    one = trainers.precision("cpu", name, trainers.PLAIN)
    trainers.assert_near_one_process(two, one, trainers.PRECISIONS[name])


@pytest.mark.usefixtures("seed_variables")
def test_a_scaled_loss_of_a_trainer_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    two = run_distributed(trainers.a_scaled_loss_that_overflows, 2, "cpu", trainers.OURS)
    one = trainers.a_scaled_loss_that_overflows("cpu", trainers.PLAIN)
    trainers.assert_near_one_process(two, one, trainers.PRECISIONS["16-mixed"])
    assert one["scale"] == trainers.FIRST_SCALE / 2


def test_a_run_after_two_that_failed_is_that_of_one_process(nursery: Nursery, tmp_path: Path) -> None:
    trainers.assert_trained_after(nursery.run_watched(trainers.train_after_a_failure, 2, tmp_path, "cpu"))
