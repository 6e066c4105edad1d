"""The gradient engine on a GPU: two processes by gloo and by NCCL, against one process and DDP on the same GPU."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import device_bodies as bodies
import pytest
from kit.worlds import run_on
from step_programs import draw, run_all

SLACK = 24.0  # MiB: activations, numbers beside the gradients, rounding of the allocator
BUCKET = 25.0


def test_two_processes_on_a_gpu_give_the_gradients_of_one(pair: Callable[..., Any]) -> None:
    """Two processes share a GPU and equal one."""
    seeds = range(60)
    first, second = pair(run_all, seeds, "cuda", deadline=400.0)
    for seed in seeds:
        assert first[seed][0] == second[seed][0] == "", f"{draw(seed, 2, 'cuda')}\n{first[seed]}\n{second[seed]}"
        assert first[seed][1] == second[seed][1], "the gradients of the ranks differ in their bits"


@pytest.mark.parametrize("name", bodies.ON_GPUS)
def test_what_ranks_do_on_cpus_they_do_on_a_gpu(pair: Callable[..., Any], name: str) -> None:
    """Hooks, BatchNorm, `DiLoCo`, `torch.compile` and graphed callables work on GPUs."""
    if "compiled" in name and (importlib.util.find_spec("triton") is None or not shutil.which("cc")):
        pytest.skip("torch.compile needs Triton and a C compiler")
    pair(bodies.ON_GPUS[name], "cuda", deadline=400.0)


@pytest.mark.parametrize("kind", ["nccl"], indirect=True)
def test_the_first_sum_starts_while_backward_still_runs(pair: Callable[..., Any]) -> None:
    """The first sum starts while backward still runs."""
    pair(bodies.sums_overlap_backward, "cuda")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_need_the_memory_of_parameters_gradients_and_one_bucket(
    pair: Callable[..., Any], set_to_none: bool, record_property: Callable[[str, Any], None]
) -> None:
    """A step needs one bucket more than one process."""
    for found in pair(bodies.peak_memory, "cuda", set_to_none):
        record_property("MiB", found)
        assert found["one process"] > 1.9 * found["parameters"], f"the measurement is wrong: {found}"
        assert found["ours"] <= 2 * found["parameters"] + BUCKET + SLACK, found
        assert found["ours"] <= found["DDP"] + BUCKET + SLACK, found


def test_one_process_on_a_gpu_trains_bit_for_bit_as_without_us() -> None:
    """One process on a GPU keeps every bit."""
    run_on("one", bodies.a_world_of_one, "cuda")
