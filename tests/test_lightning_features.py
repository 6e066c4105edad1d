"""Whatever a Trainer is given gives the numbers of one process on N, also the numbers that callbacks record."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from comparing import assert_equal
from distributed import run_distributed
from lightning_features import FEATURES, missing
from lightning_scenarios import quiet

pytestmark = [pytest.mark.usefixtures("variables_of_lightning"), pytest.mark.shares_results("world_size")]


@pytest.fixture
def variables_of_lightning(seed_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Trainer(deterministic=True)`` sets one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run_all() -> dict[str, Any]:
    """Every feature on this rank, one after another in one process."""
    import ddp_callbacks.lightning  # noqa: F401

    with quiet():
        return {name: FEATURES[name]("ddp_callbacks") for name in FEATURES if missing(name) is None}


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(run_all, world_size)


@functools.cache
def one_process(name: str) -> Any:
    with quiet():
        return FEATURES[name]("auto")


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.wide) for size in (3, 4))])
def test_what_a_trainer_is_given_does_on_n_processes_what_it_does_on_one(world_size: int, name: str) -> None:
    if missing(name) is not None:
        pytest.skip(f"{missing(name)} is not installed")
    for rank, results in enumerate(on_ranks(world_size)):
        assert_equal(results[name], one_process(name), 1e-10, f"rank {rank}")
