"""Local steps in a Trial: exact where they can be, and the averaged model wherever a model is evaluated or saved."""

from __future__ import annotations

import copy
import functools
import io
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from diloco import OuterStep, vector
from distributed import run_distributed
from nursery import Nursery, noting_errors
from scenarios import CLASSES, FEATURES, SCENARIOS, data, outcome, run, trial
from test_equivalence import assert_equal
from test_failures import (
    BATCH,
    STEP,
    Rows,
    assert_all_fail,
    assert_cause_is_known,
    kill_myself,
    my_rank,
    peer_errors,
    raise_the_cause,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchbearer import Callback
from torchbearer.callbacks import MostRecent

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer import SHARE, AllReduceGradients, AverageParameters, DDPCallback

pytestmark = pytest.mark.shares_results()

Case = Callable[[], Any]
CASES: dict[str, Case] = {}
WORLD_SIZE = 3

# Those that train by SGD without momentum, or by the same steps on every rank.
EXACT = [
    "bare_tensor_dataset",
    "batches_of_one",
    "batches_smaller_than_the_world",
    "custom_loader",
    "custom_samplers",
    "early_stopping",
    "evaluate_and_predict",
    "generator_of_the_loader",
    "iterable_dataset",
    "list_of_batches",
    "metrics",
    "no_data",
    "regression",
    "schedulers",
    "stop_in_the_middle_of_an_epoch",
    "sum_reduction",
    "train_steps_below_and_above_an_epoch",
    "weighted_and_ignored_targets",
    "workers",
]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    exact = {name: SCENARIOS[name]([DDPCallback(sync=LocalSGD(1))]) for name in EXACT}
    return exact | {name: function() for name, function in CASES.items()}


@functools.cache
def seen() -> list[dict[str, Any]]:
    return run_distributed(run_cases, WORLD_SIZE)


def by_rank(function: Case) -> list[Any]:
    return [results[function.__name__] for results in seen()]


@pytest.mark.parametrize("name", EXACT)
def test_windows_of_one_step_of_sgd_give_the_numbers_of_one_process(name: str) -> None:
    expected = SCENARIOS[name]([])
    for rank, results in enumerate(seen()):
        assert_equal(results[name], expected, 1e-10, f"rank {rank}")


def test_in_a_world_of_one_local_sgd_changes_nothing() -> None:
    for name in ("shuffled_ragged_adam", "clipping_and_decay", "sum_reduction"):
        assert_equal(SCENARIOS[name]([DDPCallback(sync=LocalSGD(3))]), SCENARIOS[name]([]), 0.0)


# --- windows ----------------------------------------------------------------------------------------------------------


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


@case
def diloco() -> Any:
    """Five steps in an epoch, windows of three: one of two steps at the end of each. One rank has no last batch."""
    watch = Watch()
    made = trial([DDPCallback(sync=DiLoCo(3))], optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), callbacks=[watch])
    start = vector(made.state[torchbearer.MODEL])
    result = run(made, DataLoader(data(34), 8, shuffle=True), DataLoader(data(13, 9), 4), epochs=2)
    return result | {"watch": watch, "start": start, "evaluation": made.evaluate()}


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
    ranks = by_rank(diloco)
    batches = [rank["watch"].batches for rank in ranks]
    assert sorted(len(own[4][0]) for own in batches) == [0, 1, 1]
    expected = simulated(batches, ranks[0]["start"])
    for rank in ranks:
        assert_equal(rank["watch"].trained, expected, 1e-10)


def test_evaluations_see_the_averaged_model_on_all_ranks() -> None:
    first, *others = by_rank(diloco)
    assert_equal(first["watch"].evaluated[:2], first["watch"].trained, 0.0)
    for other in others:
        assert_equal(other["watch"].evaluated, first["watch"].evaluated, 0.0)
        assert_equal(other["history"], first["history"], 0.0)
        assert_equal(other["parameters"], first["parameters"], 0.0)
    alone = trial([]).with_val_generator(DataLoader(data(13, 9), 4))
    alone.state[torchbearer.MODEL].load_state_dict(first["parameters"])
    assert_equal(first["evaluation"], alone.evaluate(), 1e-10)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumable() -> Any:
    made = trial([DDPCallback(sync=DiLoCo(1))])
    return made.with_generators(DataLoader(data(30), 8), DataLoader(data(13, 9), 4))


def resume(checkpoint: bytes | None) -> Any:
    made = resumable()
    if checkpoint is not None:
        made.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=False))
    return outcome(made, made.run(4))


@case
def resumed() -> Any:
    whole, first = resumable(), resumable()
    first.run(2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    checkpoint = file.getvalue()
    return {
        "whole": outcome(whole, whole.run(4)),
        "checkpoint": checkpoint,
        "resumed": resume(checkpoint),
        "only rank 0": resume(checkpoint if dist.get_rank() == 0 else None),
    }


def test_the_outer_momentum_is_resumed_at_any_number_of_processes() -> None:
    ranks = by_rank(resumed)
    for rank in ranks:
        assert_equal(rank["resumed"], rank["whole"], 0.0)
        assert_equal(rank["only rank 0"], rank["whole"], 0.0)
    # Windows of one step of SGD do not depend on the number of ranks.
    assert_equal(resume(ranks[0]["checkpoint"]), ranks[0]["whole"], 1e-10)


@case
def checkpoint_files() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        saving = MostRecent(str(path), save_model_params_only=True)
        made = trial([DDPCallback(sync=LocalSGD(3))], callbacks=[saving])
        made.with_train_generator(DataLoader(data(30), 8)).run(1)
        saved = torch.load(path) if path.exists() else None
        return saved, made.state[torchbearer.MODEL].state_dict()


def test_a_checkpoint_has_the_averaged_model() -> None:
    ranks = by_rank(checkpoint_files)
    assert [saved is None for saved, _ in ranks] == [False, True, True]
    for _, parameters in ranks:
        assert_equal(parameters, ranks[0][0], 0.0)


# --- more -------------------------------------------------------------------------------------------------------------


@case
def batch_norm() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
    made = trial([DDPCallback(sync=LocalSGD(2))], model=model)
    return run(made, DataLoader(data(42), 12, shuffle=True), DataLoader(data(12, 9), 5), epochs=2)


def test_running_statistics_are_merged_before_evaluations() -> None:
    first, *others = by_rank(batch_norm)
    for other in others:
        assert_equal(other["parameters"], first["parameters"], 0.0)
        assert_equal(other["history"], first["history"], 0.0)


def train(action: str, rank: int) -> None:
    """``action`` happens on ``rank`` in the middle of a window."""
    model = nn.Linear(4, 1)
    rows = Rows({"kill": kill_myself, "raise": raise_the_cause}[action] if my_rank() == rank else None, STEP * BATCH)
    made = trial([DDPCallback(sync=LocalSGD(6))], model=model, criterion=nn.MSELoss(), metrics=["loss"])
    made.to("cpu", torch.float32).with_train_generator(DataLoader(rows, BATCH))
    with noting_errors():
        made.run(3)


def test_a_rank_that_dies_in_a_window_is_named_where_it_closes(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(train, 3, tmp_path, "kill", 1)
    assert_all_fail(ranks, 1, code=-signal.SIGKILL)
    for error in peer_errors(ranks, 1, within=5):
        assert "died" in error and f"pid {ranks[1].pid}" in error, error


def test_an_exception_in_a_window_reaches_every_other_rank(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(train, 2, tmp_path, "raise", 0)
    assert_all_fail(ranks, 0)
    assert_cause_is_known(ranks, 0, within=5)


def test_the_bundle_takes_the_word() -> None:
    def kinds(bundle: DDPCallback) -> set[type]:
        return {type(item) for item in bundle} & {AllReduceGradients, AverageParameters}

    assert kinds(DDPCallback()) == kinds(DDPCallback(sync="every_step")) == {AllReduceGradients}
    assert kinds(DDPCallback(sync=LocalSGD(8))) == kinds(DDPCallback(sync=DiLoCo(50))) == {AverageParameters}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPCallback(sync=8), 'sync must be "every_step", LocalSGD'),
        (lambda: DDPCallback(sync=LocalSGD(8), comm_hook=print), "a comm_hook sums gradients"),
        (lambda: DDPCallback(sync=LocalSGD(8), bucket_cap_mb=-1), "bucket_cap_mb must be positive"),
        (lambda: AverageParameters("every_step"), "sync must be LocalSGD"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
