"""Lightning's Trainer on a GPU: two processes give the numbers of one, by gloo and by NCCL."""

from __future__ import annotations

import functools
from typing import Any

import device_trainers as trainers
import pytest
from kit.compare import assert_equal
from kit.worlds import World, WorldFailed

RELATIVE = 1e-10
GPU = "gpu"


def assert_equals_one(pair: World, one: World, body: Any, *arguments: Any, relative: float = RELATIVE) -> None:
    expected = _in_one_process(one, body, arguments)
    for rank, found in enumerate(pair.run(body, GPU, *arguments, trainers.OURS)):
        assert_equal(found, expected, relative, f"rank {rank}")


@functools.cache
def _in_one_process(one: World, body: Any, arguments: tuple[Any, ...]) -> Any:
    """Once for gloo and NCCL."""
    return one.run(body, GPU, *arguments, trainers.PLAIN)[0]


@pytest.mark.parametrize("name", trainers.NAMES)
def test_a_trainer_on_a_gpu_gives_the_numbers_of_one_process(pair: World, one: World, name: str) -> None:
    """A Trainer on a GPU gives one process's numbers."""
    assert_equals_one(pair, one, trainers.run_scenario, name)


def test_a_trainer_on_a_gpu_resumes_from_its_checkpoint(pair: World, one: World) -> None:
    assert_equals_one(pair, one, trainers.resumed)


def test_local_steps_on_a_gpu_that_are_averaged_each_time_are_those_of_one_process(pair: World, one: World) -> None:
    assert_equals_one(pair, one, trainers.local_steps)


@pytest.mark.parametrize("name", trainers.PRECISIONS)
def test_a_trainer_on_a_gpu_of_any_precision_gives_the_numbers_of_one_process(
    pair: World, one: World, name: str
) -> None:
    expected = _in_one_process(one, trainers.precision, (name,))
    found = pair.run(trainers.precision, GPU, name, trainers.OURS)
    trainers.assert_near_one_process(found, expected, trainers.PRECISIONS[name])


def test_in_16_mixed_a_loss_that_overflows_on_one_rank_skips_the_step_on_all(pair: World, one: World) -> None:
    expected = _in_one_process(one, trainers.a_scaled_loss_that_overflows, ())
    found = pair.run(trainers.a_scaled_loss_that_overflows, GPU, trainers.OURS)
    trainers.assert_near_one_process(found, expected, trainers.PRECISIONS["16-mixed"])
    assert expected["scale"] == trainers.FIRST_SCALE / 2


@pytest.mark.parametrize("between", [False, True], ids=["within batches", "between them, too"])
def test_a_trainer_that_logs_in_each_step_never_makes_the_host_wait(nccl: World, one: World, between: bool) -> None:
    """A Trainer that logs never makes its host wait."""
    try:
        _in_one_process(one, trainers.steady_batches, (between,))
    except WorldFailed as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        pytest.skip(f"Lightning alone makes the host wait there: {str(error)[-400:]}")
    assert nccl.run(trainers.steady_batches, GPU, between, trainers.OURS) == [7, 7]
