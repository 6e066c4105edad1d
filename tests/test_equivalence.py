"""N processes give the numbers of one: history, parameters, evaluation and predictions, in float64."""

from __future__ import annotations

import functools
import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_equal
from distributed import run_distributed
from scenarios import SCENARIOS, data, outcome, trial
from torch.utils.data import DataLoader
from torchbearer import Trial
from two_hosts import live_on_hosts

from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()

RELATIVE = 1e-10


def run_all(checkpoint: bytes | None, way: str) -> dict[str, Any]:
    """Every scenario on this rank, one after another in one process; then save a Trial, or resume the one saved."""
    os.environ[SWITCH] = "0" if way == "gloo" else "1"
    if way == "two levels":
        live_on_hosts((2, 1), resolve_group())
    results = {name: SCENARIOS[name]([DDPCallback()]) for name in SCENARIOS}
    if checkpoint is None:
        return results | {"checkpoint": train_and_save([DDPCallback()])}
    resumed = resume([DDPCallback()], checkpoint)
    only_here = resume([DDPCallback()], checkpoint if dist.get_rank() == 0 else None)
    return results | {"resumed": resumed, "resumed on rank 0": only_here}


@functools.cache
def on_ranks(world_size: int, way: str) -> list[dict[str, Any]]:
    """The results of each rank; three and four ranks resume what two have saved."""
    return run_distributed(
        run_all, world_size, None if world_size == 2 else on_ranks(2, "shared memory")[0]["checkpoint"], way
    )


@functools.cache
def one_process(name: str) -> Any:
    return SCENARIOS[name]([])


def resumable(extra: list[Any]) -> Trial:
    made = trial(extra, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    return made.with_generators(DataLoader(data(30), 8), DataLoader(data(13, 9), 4))


def train_and_save(extra: list[Any]) -> bytes:
    made = resumable(extra)
    made.run(2)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    return file.getvalue()


def resume(extra: list[Any], checkpoint: bytes | None) -> Any:
    made = resumable(extra)
    if checkpoint is not None:
        made.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=False))
    return outcome(made, made.run(4))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_is_bit_for_bit_the_trial_without_us(name: str) -> None:
    assert_equal(SCENARIOS[name]([DDPCallback()]), one_process(name), relative=0.0)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (2, "shared memory"),
        pytest.param(3, "two levels", marks=pytest.mark.wide),
        pytest.param(4, "shared memory", marks=pytest.mark.wide),
        pytest.param(3, "gloo", marks=pytest.mark.wide),
    ],
)
def test_n_processes_equal_one(world_size: int, way: str, name: str) -> None:
    for rank, results in enumerate(on_ranks(world_size, way)):
        assert_equal(results[name], one_process(name), relative=RELATIVE, where=f"rank {rank}")


@pytest.mark.wide
def test_a_trial_resumes_at_another_number_of_processes() -> None:
    one = resumable([])
    expected = outcome(one, one.run(4))
    assert_equal(
        resume([DDPCallback()], on_ranks(2, "shared memory")[0]["checkpoint"]), expected, RELATIVE, "one process"
    )
    for result in on_ranks(3, "gloo") + on_ranks(4, "shared memory"):
        assert_equal(result["resumed"], expected, RELATIVE, "loaded on all ranks")
        assert_equal(result["resumed on rank 0"], expected, RELATIVE, "loaded on rank 0 alone")
