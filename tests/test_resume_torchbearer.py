"""A run that is cut and goes on has the numbers of one that was not cut: on as many processes, and on other numbers."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comparing import assert_equal
from distributed import run_distributed
from resume_torchbearer_scenarios import LOCAL, MOMENTS, SCENARIOS, without_running

from ddp_callbacks.errors import Preempted

pytestmark = pytest.mark.shares_results()

RELATIVE = 1e-10
CUTS = 2  # of each scenario on each number of processes
SIZES = (1, 2, pytest.param(3, marks=pytest.mark.wide), pytest.param(4, marks=pytest.mark.wide))
ALL = {**SCENARIOS, **LOCAL}


def cuts(name: str, size: int) -> list[int]:
    return sorted(random.Random(f"{name} {size}").sample(range(1, MOMENTS[name] + 1), CUTS))


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name


def cut_all(folder: str, size: int) -> dict[str, Any]:
    """The results without a cut; and cut each scenario at its moments, which leaves files in ``folder``."""
    uncut = {name: ALL[name](None, f"{folder}/{name}-{size}-uncut.pt") for name in ALL}
    for name in ALL:
        for cut in cuts(name, size):
            try:
                ALL[name](cut, f"{folder}/{name}-{size}-{cut}.pt")
            except Preempted:
                pass  # otherwise the run was over before all ranks had heard of the request
    return uncut


def go_on_all(folder: str, size: int, sizes: tuple[int, ...]) -> dict[Any, Any]:
    """The results of all that was cut on ``sizes`` processes, by name, number of processes and cut."""
    results = {}
    for before in sizes:
        for name in SCENARIOS if size != before else ALL:
            for cut in cuts(name, before):
                results[name, before, cut] = ALL[name](None, f"{folder}/{size}/{name}-{before}-{cut}.pt")
    return results


def on_ranks(body: Any, size: int, *args: Any) -> list[Any]:
    return [body(*args)] if size == 1 else run_distributed(body, size, *args)


@functools.cache
def uncut(folder: str, size: int) -> list[dict[str, Any]]:
    return on_ranks(cut_all, size, folder, size)


@functools.cache
def gone_on(folder: str, size: int, sizes: tuple[int, ...]) -> list[dict[Any, Any]]:
    """What ``size`` processes make of copies of the files of ``sizes``."""
    own = Path(folder) / str(size)
    own.mkdir(exist_ok=True)
    for before in sizes:
        uncut(folder, before)
        for name in ALL:
            for file in Path(folder).glob(f"{name}-{before}-*"):
                shutil.copy(file, own)
    return on_ranks(go_on_all, size, folder, size, sizes)


def results(folder: str, before: int, size: int) -> list[dict[Any, Any]]:
    """Few process starts: those of one number of processes serve several tests."""
    groups = ((1, 2), (3, 4)) if size <= 2 else ((1, 2, 3, 4),)
    return gone_on(folder, size, next(group for group in groups if before in group))


PAIRS = [
    pytest.param(before, size, marks=pytest.mark.wide if max(before, size) > 2 else ())
    for before in (1, 2, 3, 4)
    for size in (1, 2, 3, 4)
]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("before", "size"), PAIRS)
def test_a_run_goes_on_at_the_next_batch_on_another_number_of_processes(
    folder: str, before: int, size: int, name: str
) -> None:
    expected = without_running(uncut(folder, 1)[0][name])
    for rank, found in enumerate(results(folder, before, size)):
        for cut in cuts(name, before):
            where = f"cut at {cut}, rank {rank}"
            assert_equal(without_running(found[name, before, cut]), expected, RELATIVE, where)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", SIZES)
def test_on_as_many_processes_a_run_goes_on_bit_for_bit(folder: str, size: int, name: str) -> None:
    for rank, found in enumerate(results(folder, size, size)):
        for cut in cuts(name, size):
            assert_equal(found[name, size, cut], uncut(folder, size)[rank][name], 0.0, f"cut at {cut}, rank {rank}")
