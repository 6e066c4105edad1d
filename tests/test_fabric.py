"""Loops of Lightning Fabric: N processes give the numbers of one, and what else the strategy promises."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
from distributed import run_distributed
from fabric_scenarios import SCENARIOS, quiet
from test_equivalence import assert_equal
from two_hosts import live_on_hosts

from ddp_callbacks.process_group import resolve_group

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results("world_size")]

RELATIVE = 1e-10
OURS = "ddp_callbacks"


def run_all() -> dict[str, Any]:
    """Every loop on this rank, one after another in one process; three of them take themselves for two hosts."""
    import ddp_callbacks.lightning  # noqa: F401

    if dist.get_world_size() == 3:
        live_on_hosts((2, 1), resolve_group())
    with quiet():
        return {name: SCENARIOS[name](OURS) for name in SCENARIOS}


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(run_all, world_size)


@functools.cache
def one_process(name: str) -> Any:
    with quiet():
        return SCENARIOS[name]("auto")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.wide) for size in (3, 4))])
def test_n_processes_of_a_loop_equal_one(world_size: int, name: str) -> None:
    for rank, results in enumerate(on_ranks(world_size)):
        assert_equal(results[name], one_process(name), RELATIVE, f"rank {rank}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_is_bit_for_bit_fabric_without_us(name: str) -> None:
    import ddp_callbacks.lightning  # noqa: F401

    with quiet():
        assert_equal(SCENARIOS[name](OURS), one_process(name), relative=0.0)
