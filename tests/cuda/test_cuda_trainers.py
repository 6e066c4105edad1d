"""Trainers and Trials on a GPU: two processes give the numbers of one, by gloo and by NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import device_trainers as trainers
import pytest
import test_lightning_on_gpu as logs
from device_trainers import OURS, PLAIN
from kit.compare import assert_equal
from kit.once import once
from kit.worlds import run_on

RELATIVE = 1e-10


@once
def by_one(body: Callable[..., Any], *args: Any) -> Any:
    return run_on("one", body, "cuda", PLAIN, *args)[0]


@once
def by_two(kind: str, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_on(kind, body, "cuda", OURS, *args, deadline=400.0)


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table in trainers.NAMES for name in trainers.NAMES[table]]
)
def test_a_trainer_or_trial_on_a_gpu_gives_the_numbers_of_one_process(kind: str, table: str, name: str) -> None:
    """A Trainer or Trial on a GPU gives one process's numbers."""
    if table == "trials":
        pytest.importorskip("torchbearer", reason="Torchbearer is not installed")
    for rank, found in enumerate(by_two(kind, trainers.run_scenarios, table)):
        assert_equal(found[name], by_one(trainers.run_scenarios, table)[name], RELATIVE, f"rank {rank}")


@pytest.mark.parametrize("name", trainers.PRECISIONS)
def test_a_trainer_on_a_gpu_of_any_precision_gives_the_numbers_of_one_process(kind: str, name: str) -> None:
    trainers.assert_near_one_process(by_two(kind, trainers.precisions), by_one(trainers.precisions), name)


def test_on_a_gpu_a_run_after_two_that_failed_is_that_of_one_process(kind: str) -> None:
    for found in by_two(kind, trainers.runs_after_failures):
        assert_equal(found, by_one(trainers.runs_after_failures), RELATIVE)


@pytest.mark.parametrize("kind", ["nccl"], indirect=True)
def test_a_trainer_that_logs_in_each_step_never_makes_the_host_wait(kind: str) -> None:
    """A Trainer that logs never makes its host wait."""
    try:
        expected = by_one(logs.train, "all")
    except AssertionError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        pytest.skip(f"Lightning alone makes the host wait there: {str(error)[-400:]}")
    for numbers, parameters in by_two(kind, logs.train, "all"):
        assert_equal((logs.exact(numbers), parameters), (logs.exact(expected[0]), expected[1]), RELATIVE)
