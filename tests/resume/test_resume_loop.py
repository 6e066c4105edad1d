"""A loop of one's own that is cut at any batch goes on at the next one, on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loops import Loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ways import Way, in_each, prove

from ddp_callbacks import CheckpointFile, load_checkpoint, resumable_loader, save_checkpoint
from ddp_callbacks.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.shares_results()

WAYS = {
    "one": Way(1, resumed_on=1),
    "two": Way(resumed_on=2),
    "one, resumed on two": Way(1, resumed_on=2),
    "two, resumed on one": Way(resumed_on=1),
    "two by gloo": Way(gloo=True, resumed_on=2, tier="wide"),
    "three on two hosts": Way(3, layout=(2, 1), resumed_on=3, tier="wide"),
    "three on two hosts, resumed on two": Way(3, layout=(2, 1), resumed_on=2, tier="wide"),
    "one, resumed on three on two hosts": Way(1, layout=(2, 1), resumed_on=3, tier="wide"),
}


@in_each("loops", WAYS)
def test_a_loop_that_is_cut_goes_on_at_the_next_batch(way: Way, name: str) -> None:
    """Your own loop resumes at the next batch."""
    prove("loops", way, name)


def test_a_loop_is_refused_what_it_cannot_go_on_from(tmp_path: Path) -> None:
    path, loop = tmp_path / "run.pt", Loop("no_sync")
    loop.run(3)
    assert not load_checkpoint(path, loop.objects)
    save_checkpoint(path, loop.objects)
    data = TensorDataset(torch.zeros(35, 5), torch.zeros(35, 1))
    others = {
        "model": (
            nn.Linear(5, 1),
            r"model: Sequential with parameters 7x5, 7, 1x7, 1 in .* Linear with parameters",
        ),
        "loader": (
            resumable_loader(DataLoader(data, 16)),
            r"samples in the data set of loader: 34 in the file, 35 now; batch size of loader: 8 in the file, 16 now",
        ),
        "another": ({}, r"must hold the objects \['another', 'engine', .*\], got \['engine', .*\]"),
    }
    for name, (value, text) in others.items():
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(path, {**loop.objects, name: value})
    with pytest.raises(ConfigurationError, match="'data' must have state_dict and load_state_dict, or be a dict of"):
        save_checkpoint(path, {"data": DataLoader(data)})
    with CheckpointFile(path) as file:
        file.write({}, {}, {})
    with pytest.raises(CheckpointError, match="belongs to another run"):
        load_checkpoint(path, loop.objects)
