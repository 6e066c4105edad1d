"""The gradient engine on a GPU: two processes by gloo and by NCCL, against one process and DDP on the same GPU."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_bodies as bodies
import pytest
from kit.worlds import World
from step_programs import draw, run_all

SLACK = 24.0  # MiB: activations, numbers beside the gradients, rounding of the allocator
BUCKET = 25.0


def test_two_processes_on_a_gpu_give_the_gradients_of_one(pair: World) -> None:
    """Two processes share a GPU and equal one."""
    seeds = range(60)
    first, second = pair.run(run_all, seeds, "cuda", deadline=400.0)
    for seed in seeds:
        assert first[seed][0] == second[seed][0] == "", f"{draw(seed, 2, 'cuda')}\n{first[seed]}\n{second[seed]}"
        assert first[seed][1] == second[seed][1], "the gradients of the ranks differ in their bits"


@pytest.mark.parametrize("name", bodies.HOOKS)
def test_on_a_gpu_a_hook_gives_the_gradients_that_it_gives_under_ddp(pair: World, name: str) -> None:
    """Communication hooks on a GPU give DDP's gradients."""
    pair.run(bodies.a_hook_beside_ddp, "cuda", name)


@pytest.mark.parametrize("name", bodies.COMPRESSED)
def test_on_a_gpu_gradients_are_compressed_as_under_ddp(pair: World, name: str) -> None:
    pair.run(bodies.compression_beside_ddp, "cuda", name)


def test_replicas_on_a_gpu_become_equal_to_that_of_rank_0(pair: World) -> None:
    """Replicas and optimizers on a GPU become rank 0's."""
    pair.run(bodies.replicas_become_equal, "cuda")


@pytest.mark.parametrize("name", bodies.NORMALIZED)
def test_batch_norm_on_a_gpu_sees_the_whole_batch(pair: World, name: str) -> None:
    """BatchNorm on a GPU sees the whole batch."""
    pair.run(bodies.batch_norm_of_the_whole_batch, "cuda", name)


@pytest.mark.parametrize("dtype", bodies.HALF)
def test_batch_norm_on_a_gpu_sees_the_whole_batch_in_autocast(pair: World, dtype: str) -> None:
    pair.run(bodies.batch_norm_in_autocast, "cuda", dtype)


def test_diloco_on_a_gpu_gives_the_parameters_that_it_gives_on_cpus(pair: World) -> None:
    """`DiLoCo` on a GPU gives the parameters of CPUs."""
    pair.run(bodies.outer_steps, "cuda")


@pytest.mark.parametrize("way", bodies.STEADY)
def test_in_a_steady_step_the_host_never_waits_for_the_gpu(nccl: World, way: str) -> None:
    nccl.run(bodies.steady_steps, "cuda", way)


def test_the_first_sum_starts_while_backward_still_runs(nccl: World) -> None:
    """The first sum starts while backward still runs."""
    nccl.run(bodies.sums_overlap_backward, "cuda", deadline=240.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_need_the_memory_of_parameters_gradients_and_one_bucket(
    pair: World, set_to_none: bool, record_property: Callable[[str, Any], None]
) -> None:
    """A step needs one bucket more than one process."""
    for found in pair.run(bodies.peak_memory, "cuda", set_to_none, deadline=240.0):
        record_property("MiB", found)
        assert found["one process"] > 1.9 * found["parameters"], f"the measurement is wrong: {found}"
        assert found["ours"] <= 2 * found["parameters"] + BUCKET + SLACK, found
        assert found["ours"] <= found["DDP"] + BUCKET + SLACK, found


def test_a_compiled_model_gives_the_gradients_of_eager_mode(pair: World) -> None:
    """`torch.compile` and graphed callables work on a GPU."""
    if importlib.util.find_spec("triton") is None or not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("torch.compile needs Triton and a C compiler")
    pair.run(bodies.a_compiled_model, "cuda", "inductor", deadline=400.0)


def test_a_model_that_replays_cuda_graphs_gives_the_gradients_of_eager_mode(pair: World) -> None:
    pair.run(bodies.a_graphed_callable, "cuda")


def test_a_backward_that_is_captured_in_a_cuda_graph_is_refused_with_the_reason(pair: World) -> None:
    pair.run(bodies.a_backward_that_is_captured, "cuda")


def test_one_process_on_a_gpu_trains_bit_for_bit_as_without_us(one: World) -> None:
    """One process on a GPU keeps every bit."""
    one.run(bodies.a_world_of_one, "cuda")


def test_a_group_of_one_process_by_nccl_trains_as_ddp(one: World, tmp_path: Path) -> None:
    one.run(bodies.a_group_of_one_process, "cuda", str(tmp_path))
