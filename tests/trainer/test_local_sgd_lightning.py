"""Local steps in a Trainer: exact where they can be, nothing sent inside a window, the averaged model everywhere."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diloco import OuterStep, vector
from kit.compare import assert_equal
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from trainer_cases import GLOO, RELATIVE, Bodies, quiet
from trainers import Net, data, fit, loader, outcome, trainer

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


def strategy(sync: Any = None, **settings: Any) -> Any:
    """With local steps; Lightning's own for ``None``."""
    return "auto" if sync is None else CallbackStrategy(sync=sync, **settings)


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2)


def test_in_a_world_of_one_local_sgd_changes_nothing() -> None:
    with quiet():
        assert_equal(fit(strategy(LocalSGD(3))), fit("auto"), 0.0)


# --- windows ----------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Keeps what each step was trained on, and the parameters and the number of messages at several moments."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.evaluated: list[torch.Tensor] = []
        self.ended: list[torch.Tensor] = []
        self.messages: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(tuple(part.clone() for part in batch))
        self.messages.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.evaluated.append(vector(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended.append(vector(pl_module))


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


@WORLD.runs(GLOO)
def diloco() -> Any:
    """Four steps of accumulated batches in an epoch: windows of three and one."""
    watch, module = Watch(), Net(optimizer=adamw)
    start, rows = vector(module), (loader(52, 7, shuffle=True), loader(13, 5, 9))
    result = fit(strategy(DiLoCo(3)), module, *rows, callbacks=[watch], accumulate_grad_batches=2)
    return result | {"start": start, **vars(watch)}


def simulated(batches: list[list[Any]], start: torch.Tensor) -> list[torch.Tensor]:
    """The model at the end of each epoch by the paper's algorithm, with all ranks in this process."""
    replicas = [Net(optimizer=adamw) for _ in batches]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    outer_step, weights, models = OuterStep(start), [0] * len(replicas), []
    for step in range(8):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            for x, y in batches[rank][2 * step : 2 * step + 2]:
                weights[rank] += len(x)
                (F.cross_entropy(replica(x), y) / 2).backward()
            optimizer.step()
        if step % 4 in (2, 3):
            outer_step(replicas, weights)
            weights = [0] * len(replicas)
        if step % 4 == 3:
            models.append(outer_step.anchor)
    return models


def test_a_trainer_trains_by_the_papers_algorithm() -> None:
    ranks = WORLD.returned(diloco, GLOO)
    expected = simulated([rank["batches"] for rank in ranks], ranks[0]["start"])
    for rank in ranks:
        assert_equal(rank["ended"], expected, RELATIVE)
        assert_equal(rank["evaluated"][-2:], expected, RELATIVE)


def test_epochs_and_evaluations_are_those_of_one_model_on_all_ranks() -> None:
    first, other = WORLD.returned(diloco, GLOO)
    epochs = [{k: v for k, v in line.items() if "step" not in k} for line in first["logged"]]
    assert any("loss_epoch" in line for line in epochs) and any("val_loss" in line for line in epochs)
    assert_equal(other["parameters"], first["parameters"], 0.0)
    assert_equal([{k: v for k, v in line.items() if "step" not in k} for line in other["logged"]], epochs, 0.0)


def test_nothing_is_sent_inside_a_window() -> None:
    """Processes send nothing inside a window, and stop together."""
    for rank in WORLD.returned(diloco, GLOO):
        steps = [after - before for before, after in itertools.pairwise(rank["messages"][:8])]
        # Batches 4 and 5 are those of the step that closes the window.
        assert steps[:4] == [0, 0, 0, 0] and steps[4] > 0 and steps[5] > 0 and steps[6] == 0


@WORLD
def stopped() -> Any:
    """One rank wants to stop, in the middle of a window, and in the epoch's last one."""

    class Stop(Callback):
        def __init__(self, step: int) -> None:
            self.step = step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if dist.get_rank() == 1 and trainer.global_step == self.step:
                trainer.should_stop = True

    def steps(step: int) -> int:
        made = fit(strategy(LocalSGD(3)), Net(), loader(64, 8), max_epochs=3, callbacks=[Stop(step)])
        return made["global_step"]

    return [steps(2), steps(8)]


def test_all_ranks_stop_together_when_the_window_closes() -> None:
    assert WORLD.returned(stopped) == [[3, 8]] * 2


# --- checkpoints ------------------------------------------------------------------------------------------------------


def train(sync: Any, folder: Path, checkpoint: Any = None, **when: Any) -> tuple[Any, list[Any]]:
    """The parameters after two epochs of four steps, and the checkpoints of this rank."""
    if checkpoint is not None:
        torch.save(checkpoint, path := folder.with_suffix(".ckpt"))
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **when)
    made = trainer(strategy(sync), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    module = Net(optimizer=sgd)
    made.fit(module, loader(32, 8), ckpt_path=None if checkpoint is None else path)
    made.strategy.barrier()
    saved = sorted(folder.glob("*.ckpt")) if made.is_global_zero else []
    return outcome(made, module)["parameters"], [torch.load(path, weights_only=False) for path in saved]


@WORLD
def checkpoints() -> Any:
    """Saved each three steps of windows of two, so in the middle of the second; and after each epoch."""
    _, saved = train(DiLoCo(2), Path("steps"), every_n_train_steps=3)
    whole, of_epochs = train(DiLoCo(2), Path("epochs"), every_n_epochs=1)
    received = of_epochs[:1] or [None]
    dist.broadcast_object_list(received)
    resumed, _ = train(DiLoCo(2), Path(f"more-{dist.get_rank()}"), received[0], every_n_epochs=1)
    return {"saved": saved, "whole": whole, "resumed": resumed}


def test_a_checkpoint_in_the_middle_of_a_window_has_the_averaged_model() -> None:
    first, other = WORLD.returned(checkpoints)
    assert (len(first["saved"]), len(other["saved"])) == (2, 0)
    state = first["saved"][0]
    assert state["global_step"] == 3
    assert_equal(state["state_dict"], three_steps(), RELATIVE)


def three_steps() -> dict[str, torch.Tensor]:
    """Windows of two steps and of one, closed for the checkpoint, by the paper's algorithm; shares of 4 samples."""
    x, y = data(32).tensors
    replicas = [Net(optimizer=sgd), Net(optimizer=sgd)]
    outer_step = OuterStep(vector(replicas[0]))
    for step in range(3):
        for rank, replica in enumerate(replicas):
            begin = 8 * step + 4 * rank
            optimizer = replica.configure_optimizers()
            F.cross_entropy(replica(x[begin : begin + 4]), y[begin : begin + 4]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step:
            outer_step(replicas, [4, 4])
    return copy.deepcopy(replicas[0].state_dict())


def test_the_outer_momentum_is_resumed() -> None:
    for rank in WORLD.returned(checkpoints):
        assert_equal(rank["resumed"], rank["whole"], 0.0)


@WORLD
def resumed_elsewhere() -> Any:
    """Windows of one step of SGD do not depend on the number of ranks."""
    return train(DiLoCo(1), Path("single"), every_n_epochs=1)


def test_the_outer_momentum_is_resumed_at_another_number_of_processes(tmp_path: Path) -> None:
    whole, (checkpoint, _) = WORLD.returned(resumed_elsewhere)[0]
    with quiet():
        alone, _ = train(DiLoCo(1), tmp_path / "alone", checkpoint, every_n_epochs=1)
    assert_equal(alone, whole, RELATIVE)
