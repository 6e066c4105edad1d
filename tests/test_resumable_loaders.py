"""A loader that was cut goes on at the next sample, on any number of processes, and loads nothing that was done."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from distributed import run_distributed
from resumable_scenarios import OTHERS, PLAIN, WORKERS, draw, draw_plainly, go_on

WORLD_SIZES = (1, 2, 3, 4)
PAIRS = [
    pytest.param(before, after, marks=[pytest.mark.wide] if max(before, after) > 2 else [])
    for before in WORLD_SIZES
    for after in WORLD_SIZES
]
WITH_WORKERS = ((1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (1, 3), (4, 1), (2, 4), (3, 3))
pytestmark = pytest.mark.shares_results


@functools.cache
def uncut(world_size: int, augments: bool) -> list[dict[str, Any]]:
    """What each rank draws, and the states at the cuts, as a checkpoint has them."""
    ranks = run_distributed(draw, world_size, list(PLAIN | WORKERS | OTHERS), augments)
    for results in ranks:
        for name, (whole, cuts, states) in results.items():
            results[name] = whole, cuts, [through_a_file(state) for state in states]
    return ranks


@functools.cache
def plainly() -> dict[str, Any]:
    return run_distributed(draw_plainly, 1, [*PLAIN, "workers"])[0]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def joined(ranks: list[Any]) -> list[list[int]]:
    """The numbers of the samples in each batch, of all ranks' parts."""
    return [[int(row[0]) for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", PLAIN)
def test_on_one_process_batches_are_those_of_the_plain_loader(name: str) -> None:
    assert uncut(1, True)[0][name][0] == plainly()[name]


def test_with_workers_the_order_is_that_of_the_plain_loader() -> None:
    found, expected = uncut(1, True)[0]["workers"][0], plainly()["workers"]
    assert [joined([rows]) for rows in found] == [joined([rows]) for rows in expected]


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.wide), pytest.param(4, marks=pytest.mark.wide)]
)
def test_all_ranks_together_draw_what_one_process_draws(world_size: int) -> None:
    for name in PLAIN | WORKERS | OTHERS:
        one, several = uncut(1, False)[0][name][0], [rank[name][0] for rank in uncut(world_size, False)]
        for number, rows in enumerate(one):
            assert joined([rank[number] for rank in several]) == joined([rows]), name


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_cut_pass_goes_on_at_the_next_sample(before: int, after: int) -> None:
    names = [name for name in PLAIN | WORKERS | OTHERS if name not in WORKERS or (before, after) in WITH_WORKERS]
    ranks, calls, expected = uncut(before, before == after), [], []
    for name in names:
        whole, cuts, _ = ranks[0][name]
        for index, (number, used) in enumerate(cuts):
            calls.append((name, [rank[name][2][index] for rank in ranks], len(whole) - number - 1))
            expected.append((name, number, used))
    results = run_distributed(go_on, after, calls, before == after)
    for index, (name, number, used) in enumerate(expected):
        found = [rank[index][0] for rank in results]
        whole = [rank[name][0] for rank in ranks]
        left = [[rows[number][used:], *rows[number + 1 :]] for rows in whole]
        for turn in range(len(left[0])):
            assert joined([rank[turn] for rank in found]) == joined([rank[turn] for rank in left]), (name, number, used)
        if before == after:
            assert found == left, (name, number, used)  # bit for bit, with what the samples have drawn
        assert [rank[index][1] for rank in results] == [rank[index][2] for rank in results], name
