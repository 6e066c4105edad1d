"""Generated training steps: with the gradient engine, N ranks have the gradients of one process."""

from __future__ import annotations

import os
from datetime import date

import pytest
import step_programs
from kit.once import once
from kit.ranks import run_distributed
from step_programs import draw

pytestmark = pytest.mark.shares_results()

PROGRAMS = {"cpu": 120, "made-up": 40}
TONIGHT = int(os.environ.get("SEED", date.today().strftime("%Y%m%d")))
OF_A_NIGHT = 500


@once
def differences(device: str, world_size: int, first: int, count: int) -> dict[int, list[str]]:
    """By seed, what is wrong on each rank."""
    seeds = range(first, first + count)
    ranks = run_distributed(step_programs.run_all, world_size, seeds, device)
    found = {seed: [rank[seed][0] for rank in ranks] for seed in seeds}
    for seed in seeds:
        if len({rank[seed][1] for rank in ranks}) > 1:
            found[seed].append("the gradients of the ranks differ in their bits")
    return found


def require_right(device: str, world_size: int, seed: int, first: int, count: int) -> None:
    wrong = "\n".join(filter(None, differences(device, world_size, first, count)[seed]))
    assert not wrong, f"{draw(seed, world_size, device)}\n{wrong}"


@pytest.mark.parametrize("seed", range(PROGRAMS["cpu"]))
def test_gradients_of_two_ranks_are_those_of_one_process(seed: int) -> None:
    """Ragged, accumulated, frozen and checkpointed steps give exact gradients."""
    require_right("cpu", 2, seed, 0, PROGRAMS["cpu"])


@pytest.mark.parametrize("seed", range(PROGRAMS["made-up"]))
def test_gradients_on_a_made_up_gpu_are_those_of_one_process_and_the_host_never_waits(seed: int) -> None:
    """A steady step never waits for a GPU; parameters may be on two devices."""
    require_right("made-up", 2, seed, 0, PROGRAMS["made-up"])


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(60))
def test_gradients_of_three_ranks_are_those_of_one_process(seed: int) -> None:
    """Unused parameters keep `None`; numbers travel along bit for bit; weight 0 counts nowhere."""
    require_right("cpu", 3, seed, 0, 60)


@pytest.mark.night
@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cpu", 3), ("made-up", 2)])
def test_gradients_of_many_programs_are_those_of_one_process(device: str, world_size: int) -> None:
    """Convolutions, GRUs, tied, sparse, complex and low-precision parameters work."""
    for seed in range(TONIGHT, TONIGHT + OF_A_NIGHT):
        require_right(device, world_size, seed, TONIGHT, OF_A_NIGHT)
