"""What a user may do in a hook does on N processes what it does on one: every hook with every action."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import run_distributed
from trainer_hooks import ACTIONS, BY_HAND, HOOKS, Cell, call_counts, cells, run_cells
from trainers import quiet

from ddp_callbacks.replacement import Replaced

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results("part")]

OURS = "ddp_callbacks"
OF_ONE_RANK = {"prepare_data"}  # which Lightning calls on one process of a host
REFUSED = "ConfigurationError: prepare_data runs on one process while the others wait for it"
COVERING = ["use", "stop", "fail"]
DIAGONALS = 2 * len(COVERING)  # of hooks and these actions: each of them has every second hook


@once
def table(part: Any) -> list[Cell]:
    """A diagonal, or every hook with every action alone."""
    with quiet():
        if part not in range(DIAGONALS):
            return cells([*ACTIONS])
        found = cells(COVERING)
    return [
        cell for cell in found if (HOOKS[cell.kind].index(cell.hook) + COVERING.index(cell.action)) % DIAGONALS == part
    ]


class Results:
    """Of a part of the table, on two processes and on one, with the folders that they wrote to."""

    def __init__(self, part: Any) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.cells = table(part)
        self.ranks = run_distributed(run_cells, 2, self.cells, OURS, self.root / "ranks")
        self.one = run_cells(self.cells, "auto", self.root / "one")

    def files(self, which: str, index: int) -> list[str]:
        folder = self.root / which / str(index)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def saved(self, which: str, index: int) -> dict[str, Any]:
        """What the checkpoint that a hook has saved says of the training."""
        path = self.root / which / str(index) / BY_HAND
        found = torch.load(path, weights_only=False) if path.exists() else {}
        found.get("loops", {}).pop("predict_loop", None)  # each process counts the batches that it predicts
        return {name: found.get(name) for name in ("epoch", "global_step", "state_dict", "optimizer_states", "loops")}


results = once(Results)


def is_refused(cell: Cell, found: Results, index: int) -> bool:
    """Whether it needs all processes in a hook that one process runs; all of them must say so then."""
    if cell.hook not in OF_ONE_RANK or cell.action not in ("count_steps", "save", "use"):
        return False
    said = [outcomes[index]["seen" if cell.action == "use" else "errors"] for outcomes in found.ranks]
    assert any(str(each).startswith(REFUSED) for each in said[0])
    assert cell.action == "use" or all(texts[0].startswith(REFUSED) for texts in said)
    return True


def check(found: Results, index: int) -> None:
    """Compare a cell on all ranks with that on one process."""
    cell, one = found.cells[index], found.one[index]
    if is_refused(cell, found, index):
        return
    for rank, outcomes in enumerate(found.ranks):
        calls = len(one["seen"])
        if cell.hook in OF_ONE_RANK and rank > 0:
            calls = 0
        elif cell.function == "predict":  # each process predicts batches of its own
            calls = len(outcomes[index]["seen"])
            assert calls in (len(one["seen"]), len(one["seen"]) // 2)
        assert_equal(outcomes[index], one | {"seen": one["seen"][:calls]}, 1e-10, f"rank {rank}")
    assert found.files("ranks", index) == found.files("one", index)
    assert_equal(found.saved("ranks", index), found.saved("one", index), 1e-10, "the checkpoint")


PARTS = [0, *(pytest.param(part, marks=pytest.mark.night) for part in range(1, DIAGONALS))]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("part", [*PARTS, pytest.param("every action alone", marks=pytest.mark.night)])
def test_a_hook_does_on_n_processes_what_it_does_on_one(part: Any, kind: str) -> None:
    """Any hook may log, read, save, stop or raise."""
    found, differ = results(part), []
    for index, cell in enumerate(found.cells):
        if cell.kind == kind:
            try:
                check(found, index)
            except AssertionError as error:
                differ.append(f"{cell.action} in {cell.hook} of {cell.function}: {error}")
    assert not differ, "\n".join(differ)


BEFORE_THE_FIRST_BATCH = [
    Cell("callback", hook, "fit", call, "stop_on_one")
    for hook, call in (("on_sanity_check_end", 0), ("on_train_start", 0), ("on_train_epoch_start", 1))
]


def test_a_stop_that_one_process_decides_on_before_the_first_batch_of_an_epoch_stops_all(tmp_path: Path) -> None:
    """`should_stop` between epochs stops all, at the latest after a step."""
    ranks = run_distributed(run_cells, 2, BEFORE_THE_FIRST_BATCH, OURS, tmp_path / "ranks")
    one = run_cells(BEFORE_THE_FIRST_BATCH, "auto", tmp_path / "one")
    assert_equal(ranks[1], ranks[0], 1e-10)
    assert [outcome["global_step"] for outcome in one] == [0, 0, 3]
    for outcome, alone in zip(ranks[0], one, strict=True):
        assert not outcome["errors"] and outcome["global_step"] - alone["global_step"] in (0, 1)


def test_each_hook_of_lightning_is_called_by_a_script_of_the_table() -> None:
    # A new one appears here: it needs a script that makes Lightning call it, or it is no hook.
    with quiet():
        counts = call_counts()
    hooks = {(kind, hook) for kind, names in HOOKS.items() for hook in names}
    assert hooks == set().union(*counts.values())


@pytest.mark.parametrize("order", sorted({"".join(order) for order in itertools.permutations("abca")}))
def test_a_run_that_ended_in_another_order_leaves_nothing_for_the_next_one(order: str) -> None:
    # A process that had lost another one called a hook of the ended run, and its new peer waited elsewhere.
    owner = SimpleNamespace(say=lambda: "")
    replaced = {name: Replaced(owner, "say", lambda say, name=name: name + say()) for name in "abc"}
    kept = set("abc")
    for name in order:
        replaced[name].undo()
        kept.discard(name)
        assert owner.say() == "".join(sorted(kept, reverse=True))
    assert "say" not in vars(owner) or not isinstance(owner.say, Replaced)
