"""N processes give the numbers of one: history, parameters, evaluation and predictions, in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from distributed import run_distributed
from scenarios import SCENARIOS

from ddp_callbacks.torchbearer import DDPCallback

RELATIVE = 1e-10


def run_all() -> dict[str, Any]:
    """Every scenario on this rank, one after another in one process."""
    return {name: SCENARIOS[name]([DDPCallback()]) for name in SCENARIOS}


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(run_all, world_size)


@functools.cache
def one_process(name: str) -> Any:
    return SCENARIOS[name]([])


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_is_bit_for_bit_the_trial_without_us(name: str) -> None:
    assert_equal(SCENARIOS[name]([DDPCallback()]), one_process(name), relative=0.0)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_n_processes_equal_one(world_size: int, name: str) -> None:
    for rank, results in enumerate(on_ranks(world_size)):
        assert_equal(results[name], one_process(name), relative=RELATIVE, where=f"rank {rank}")


def assert_equal(actual: Any, expected: Any, relative: float, where: str = "") -> None:
    """Compare nested results number by number."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_equal(actual[key], expected[key], relative, f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, relative, f"{where} [{index}]")
    elif expected is None:
        assert actual is None, where
    else:
        torch.testing.assert_close(
            torch.as_tensor(actual, dtype=torch.float64),
            torch.as_tensor(expected, dtype=torch.float64),
            rtol=relative,
            atol=0.0,
            msg=lambda text: f"{where}: {text}",
        )
