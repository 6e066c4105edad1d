"""What a user may do in a hook does on N processes what it does on one, and ends: every hook with every action."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal
from distributed import run_distributed
from lightning_hooks import ACTIONS, BY_HAND, HOOKS, Cell, call_counts, cells, run_cells
from lightning_scenarios import quiet

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results("world_size", "part")]

LIMIT = 30.0  # seconds for a cell, beside other work
OURS = "ddp_callbacks"
OF_ONE_RANK = {"prepare_data"}  # which Lightning calls on one process of a host
REFUSED = {("prepare_data", "count_steps"), ("prepare_data", "save")}  # all processes are needed
PARTS = 3  # of the table, by diagonals: in each of them every hook, and with every action a third of the hooks


def part_of(kind: str, hook: str, action: str) -> int:
    return (HOOKS[kind].index(hook) + list(ACTIONS).index(action)) % PARTS


@functools.cache
def table(part: int) -> list[Cell]:
    with quiet():
        return [cell for cell in cells() if part_of(cell.kind, cell.hook, cell.action) == part]


class Results:
    """Of a part of the table, on N processes and on one, with the folders that they wrote to."""

    def __init__(self, world_size: int, part: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.cells = table(part)
        self.ranks = run_distributed(run_cells, world_size, self.cells, OURS, self.root / "ranks")
        self.one = run_cells(self.cells, "auto", self.root / "one")

    def files(self, which: str, index: int) -> list[str]:
        folder = self.root / which / str(index)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def saved(self, which: str, index: int) -> dict[str, Any]:
        """What the checkpoint that a hook has saved says of the training."""
        path = self.root / which / str(index) / BY_HAND
        found = torch.load(path, weights_only=False) if path.exists() else {}
        return {name: found.get(name) for name in ("epoch", "global_step", "state_dict", "optimizer_states", "loops")}


results = functools.cache(Results)


def check(found: Results, index: int) -> None:
    """Compare a cell on all ranks with that on one process."""
    cell, one = found.cells[index], found.one[index]
    ranks = [outcomes[index] for outcomes in found.ranks]
    assert max(outcome["seconds"] for outcome in ranks) < LIMIT
    if (cell.hook, cell.action) in REFUSED:
        says = "ConfigurationError: prepare_data runs on one process while the others wait for it"
        assert all(outcome["errors"][0].startswith(says) for outcome in ranks)
        return
    for rank, outcome in enumerate(ranks):
        is_called = cell.hook not in OF_ONE_RANK or rank == 0
        expected = one | ({} if is_called else {"seen": []})
        assert_equal({**outcome, "seconds": 0.0}, {**expected, "seconds": 0.0}, 1e-10, f"rank {rank}")
    assert found.files("ranks", index) == found.files("one", index)
    assert_equal(found.saved("ranks", index), found.saved("one", index), 1e-10, "the checkpoint")


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(
    ("world_size", "part"),
    [(2, 0), *(pytest.param(*each, marks=pytest.mark.wide) for each in ((2, 1), (2, 2)))],
)
def test_a_hook_does_on_n_processes_what_it_does_on_one(world_size: int, part: int, kind: str, action: str) -> None:
    found = results(world_size, part)
    differ = []
    for index, cell in enumerate(found.cells):
        if (cell.kind, cell.action) == (kind, action):
            try:
                check(found, index)
            except AssertionError as error:
                differ.append(f"{cell.hook} of {cell.function}: {error}")
    assert not differ, "\n".join(differ)


BEFORE_THE_FIRST_BATCH = [
    Cell("callback", hook, "fit", call, "stop_on_one")
    for hook, call in (("on_sanity_check_end", 0), ("on_train_start", 0), ("on_train_epoch_start", 1))
]


def test_a_stop_that_one_process_decides_on_before_the_first_batch_of_an_epoch_stops_all(tmp_path: Path) -> None:
    ranks = run_distributed(run_cells, 2, BEFORE_THE_FIRST_BATCH, OURS, tmp_path / "ranks")
    one = run_cells(BEFORE_THE_FIRST_BATCH, "auto", tmp_path / "one")
    assert [outcome["global_step"] for outcome in one] == [0, 0, 3]
    for outcomes in [*ranks, one]:
        for outcome in outcomes:
            del outcome["seconds"]
    assert_equal(ranks, [one, one], 1e-10)


def test_each_hook_of_lightning_is_called_by_a_script_of_the_table() -> None:
    """A new one appears here: it needs a script that makes Lightning call it, or it is no hook."""
    with quiet():
        counts = call_counts()
    hooks = {(kind, hook) for kind, names in HOOKS.items() for hook in names}
    assert hooks == set().union(*counts.values())
