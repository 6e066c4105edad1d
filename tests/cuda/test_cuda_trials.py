"""Torchbearer's Trial on a GPU: two processes give the numbers of one, by gloo and by NCCL."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from kit.compare import assert_equal
from kit.worlds import World

pytest.importorskip("torchbearer", reason="Torchbearer is not installed")

import device_trials as trials

RELATIVE = 1e-10


@functools.cache
def in_one_process(one: World, name: str) -> Any:
    return one.run(trials.run_scenario, "cuda", name, False)[0]


@pytest.mark.parametrize("name", trials.NAMES)
def test_a_trial_on_a_gpu_gives_the_numbers_of_one_process(pair: World, one: World, name: str) -> None:
    """A Trial on a GPU gives one process's numbers."""
    for rank, found in enumerate(pair.run(trials.run_scenario, "cuda", name, True)):
        assert_equal(found, in_one_process(one, name), RELATIVE, f"rank {rank}")
