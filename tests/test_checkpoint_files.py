"""The file that a run goes on from: whole at every moment, the last two kept, one job at a time, clear refusals."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from distributed import run_distributed

from ddp_callbacks.checkpoints import CheckpointFile, Saved
from ddp_callbacks.process_group import get_rank

ABOUT = {"batch size": "8"}


def own_state(step: int) -> dict[str, Any]:
    """Of another size on each rank."""
    return {"rank": get_rank(), "step": step, "random": torch.arange(1000 * get_rank() + step)}


def numbers_of(saved: Saved) -> list[Any]:
    """What a test compares."""
    own = [saved.own(rank) for rank in range(saved.world_size)]
    return [
        saved.shared["step"],
        saved.about,
        [
            (state["rank"], state["step"], state["random"].tolist() == list(range(len(state["random"]))))
            for state in own
        ],
        [len(state["random"]) for state in own],
    ]


def write_and_read(shared_folder: str) -> dict[str, Any]:
    """On the ranks: what each reads, from a folder that all see and from one that rank 0 alone sees."""
    own_folder = tempfile.mkdtemp(dir=shared_folder)
    found: dict[str, Any] = {}
    for name, folder in (("all see it", shared_folder), ("rank 0 alone sees it", own_folder)):
        with CheckpointFile(Path(folder, "run.pt")) as file:
            found[name] = [file.read()]
            for step in (1, 2, 3):
                file.write(lambda step=step: {"step": step, "rank": get_rank()}, own_state(step), ABOUT)
            found[name].append(numbers_of(file.read()))
            found[name].append(file.read().shared["rank"])
    return found


def expected(world_size: int, step: int) -> list[Any]:
    ranks = range(world_size)
    return [step, ABOUT, [(rank, step, True) for rank in ranks], [1000 * rank + step for rank in ranks]]


def test_all_ranks_get_the_shared_state_and_those_of_all_ranks(tmp_path: Path) -> None:
    for result in run_distributed(write_and_read, 3, str(tmp_path)):
        for found in result.values():
            assert found[:3] == [None, expected(3, 3), 0]
    assert {"run.previous.pt", "run.pt"} < set(os.listdir(tmp_path))
    host_alone = torch.load(tmp_path / "run.pt", weights_only=True)
    assert host_alone["step"] == 3 and host_alone["ddp_callbacks"]["world_size"] == 3
    assert torch.load(tmp_path / "run.previous.pt", weights_only=True)["step"] == 2
