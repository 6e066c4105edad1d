"""Local steps in a Trial: the papers' algorithm, and the averaged model wherever a model is evaluated or saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchbearer
from diloco import OuterStep, vector
from kit.compare import assert_equal
from shared_worlds import Bodies
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchbearer import Callback
from torchbearer.callbacks import MostRecent
from trials import SCENARIOS, Extra, data, normalized, train, trial
from ways import Way, alone

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer import SHARE, DDPCallback

pytestmark = pytest.mark.shares_results()
WORLD = Bodies(__name__)


@pytest.mark.parametrize("name", ["shuffled_ragged_adam", "clipping_and_decay"])
def test_in_a_world_of_one_local_sgd_changes_nothing(name: str) -> None:
    way = Way(1, options=(("sync", LocalSGD(3)),))
    assert_equal(SCENARIOS[name](Extra(way)), alone("trials", name)[0], 0.0)


class Watch(Callback):  # type: ignore[misc]
    """Keeps what each step was trained on, and the parameters at the end of each pass and in each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []
        self.trained: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def on_forward(self, state: Any) -> None:
        count = state[SHARE].local  # a rank without a sample computes a stand-in
        self.batches.append((state[torchbearer.X][:count].clone(), state[torchbearer.Y_TRUE][:count].clone()))

    def on_end_training(self, state: Any) -> None:
        self.trained.append(vector(state[torchbearer.MODEL]))

    def on_start_validation(self, state: Any) -> None:
        self.evaluated.append(vector(state[torchbearer.MODEL]))


@WORLD
def diloco() -> Any:
    """Five steps in an epoch, windows of three: one of two steps at the end of each. One rank has no last batch."""
    watch = Watch()
    made = trial([DDPCallback(sync=DiLoCo(3))], optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), callbacks=[watch])
    start = vector(made.state[torchbearer.MODEL])
    result = train(made, DataLoader(data(33), 8, shuffle=True), DataLoader(data(13, 9), 4))
    return result | {"watch": {**vars(watch)}, "start": start, "evaluation": made.evaluate()}


def simulated(batches: list[list[Any]], start: torch.Tensor) -> list[torch.Tensor]:
    """The model at the end of each epoch by the paper's algorithm, with all ranks in this process."""
    made = trial([])
    replicas = [copy.deepcopy(made.state[torchbearer.MODEL]) for _ in batches]
    optimizers = [torch.optim.AdamW(replica.parameters(), lr=0.05) for replica in replicas]
    outer_step, weights, models = OuterStep(start), [0] * len(replicas), []
    for step in range(10):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            x, y = batches[rank][step]
            if len(x):
                optimizer.zero_grad()
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
            weights[rank] += len(x)
        if step % 5 in (2, 4):
            outer_step(replicas, weights)
            weights = [0] * len(replicas)
        if step % 5 == 4:
            models.append(outer_step.anchor)
    return models


def test_a_trial_trains_by_the_papers_algorithm() -> None:
    ranks = WORLD.returned(diloco)
    batches = [rank["watch"]["batches"] for rank in ranks]
    assert sorted(len(own[4][0]) for own in batches) == [0, 1]
    expected = simulated(batches, ranks[0]["start"])
    for rank in ranks:
        assert_equal(rank["watch"]["trained"], expected, 1e-10)


def test_evaluations_see_the_averaged_model_on_all_ranks() -> None:
    """Evaluations and checkpoints use the averaged model."""
    first, second = WORLD.returned(diloco)
    assert_equal(first["watch"]["evaluated"][:2], first["watch"]["trained"], 0.0)
    assert_equal(second["watch"]["evaluated"], first["watch"]["evaluated"], 0.0)
    assert_equal(second["history"], first["history"], 0.0)
    assert_equal(second["parameters"], first["parameters"], 0.0)
    alone = trial([]).with_val_generator(DataLoader(data(13, 9), 4))
    alone.state[torchbearer.MODEL].load_state_dict(first["parameters"])
    assert_equal(first["evaluation"], alone.evaluate(), 1e-10)


@WORLD
def files_and_statistics() -> Any:
    """The model in the ranks' folder, which only rank 0 writes; the BatchNorm statistics of each."""
    saving = MostRecent("model.pt", save_model_params_only=True)
    made = trial([DDPCallback(sync=LocalSGD(3))], model=normalized(), callbacks=[saving])
    result = train(made, DataLoader(data(42), 12, shuffle=True), DataLoader(data(12, 9), 5))
    return torch.load(Path("model.pt")), result


def test_a_checkpoint_has_the_averaged_model_and_merged_statistics() -> None:
    (saved, first), (_, second) = WORLD.returned(files_and_statistics)
    assert_equal(dict(saved), first["parameters"], 0.0)
    assert_equal(second["parameters"], first["parameters"], 0.0)
    assert_equal(second["history"], first["history"], 0.0)


def test_a_sum_whose_local_steps_would_be_shorter_on_more_processes_is_refused() -> None:
    made = trial([DDPCallback(sync=LocalSGD(1))], criterion=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ConfigurationError, match=r'local steps, which would be shorter .* \(reduction="mean"\)'):
        train(made, DataLoader(data(12), 4))
