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
    """Keeps the number of messages before each batch, and the parameters that are evaluated."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.evaluated: list[torch.Tensor] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.messages.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.evaluated.append(vector(pl_module))


@WORLD.runs(GLOO)
def watched() -> Any:
    """Four steps of accumulated batches in an epoch: windows of three and one."""
    watch, module = Watch(), Net(optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.05))
    rows = loader(52, 7, shuffle=True), loader(13, 5, 9)
    result = fit(strategy(DiLoCo(3)), module, *rows, callbacks=[watch], accumulate_grad_batches=2)
    return watch.messages, [watch.evaluated, result["parameters"]]


def test_nothing_is_sent_inside_a_window_and_evaluations_are_of_one_model() -> None:
    """Processes send nothing inside a window, and stop together."""
    (messages, first), (others, second) = WORLD.returned(watched, GLOO)
    assert_equal(second, first, 0.0)
    for each in (messages, others):
        steps = [after - before for before, after in itertools.pairwise(each[:8])]
        # Batches 4 and 5 are those of the step that closes the window.
        assert steps[:4] == [0, 0, 0, 0] and steps[4] > 0 and steps[5] > 0 and steps[6] == 0


@WORLD
def stopped() -> Any:
    """Some ranks want to stop, in the middle of a window, and in the epoch's last one."""

    class Stop(Callback):
        def __init__(self, step: int, ranks: list[int]) -> None:
            self.step, self.ranks = step, ranks

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if dist.get_rank() in self.ranks and trainer.global_step == self.step:
                trainer.should_stop = True

    def fitted(step: int, *ranks: int) -> Any:
        return fit(strategy(LocalSGD(3)), Net(), loader(64, 8), max_epochs=3, callbacks=[Stop(step, [*ranks])])

    return [fitted(2, 0, 1), fitted(2, 1), fitted(8, 1)]


def test_all_ranks_stop_together_at_the_latest_when_the_window_closes() -> None:
    made, others = WORLD.returned(stopped)
    for each, other in zip(made, others, strict=True):
        assert_equal([other["global_step"], other["parameters"]], [each["global_step"], each["parameters"]], 0.0)
    at_once, in_the_window, at_its_end = [each["global_step"] for each in made]
    assert at_once == 2 and in_the_window in (2, 3) and at_its_end == 8


# --- checkpoints ------------------------------------------------------------------------------------------------------


def train(folder: Path, every: int, checkpoint: Any = None, steps: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The parameters after two epochs of four steps, and the first checkpoint, after so many steps or an epoch."""
    folder.mkdir()
    if checkpoint is not None:
        torch.save(checkpoint, folder / "given")
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=steps)
    made = trainer(strategy(DiLoCo(every)), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    module = Net(optimizer=sgd)
    made.fit(module, loader(28, 7), ckpt_path=None if checkpoint is None else folder / "given")
    made.strategy.barrier()
    path = min(made.strategy.broadcast(folder).glob("*.ckpt"))
    return outcome(made, module)["parameters"], torch.load(path, weights_only=False)


@WORLD
def checkpoints() -> Any:
    """In the middle of the second window of two steps; and behind windows of one of SGD, which need no other rank."""
    own = Path(f"rank-{dist.get_rank()}").absolute()
    own.mkdir()
    return train(own / "windows", 2, steps=3)[1], train(own / "single", 1)


def test_a_checkpoint_in_the_middle_of_a_window_has_the_averaged_model() -> None:
    expected = three_steps()
    for saved, _ in WORLD.returned(checkpoints):
        assert saved["global_step"] == 3
        assert_equal(saved["state_dict"], expected, RELATIVE)


def three_steps() -> dict[str, torch.Tensor]:
    """Windows of two steps and of one, closed for the checkpoint, by the paper's algorithm; shares of 4 and 3."""
    x, y = data(28).tensors
    replicas = [Net(optimizer=sgd), Net(optimizer=sgd)]
    outer_step = OuterStep(vector(replicas[0]))
    for step in range(3):
        for replica, begin, end in zip(replicas, (0, 4), (4, 7), strict=True):
            part = slice(7 * step + begin, 7 * step + end)
            optimizer = replica.configure_optimizers()
            F.cross_entropy(replica(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step:
            outer_step(replicas, [4, 3])
    return copy.deepcopy(replicas[0].state_dict())


def test_the_outer_momentum_is_resumed_at_another_number_of_processes(tmp_path: Path) -> None:
    """DiLoCo's momentum resumes on another number of processes."""
    _, (whole, checkpoint) = WORLD.returned(checkpoints)[0]
    with quiet():
        alone, _ = train(tmp_path / "alone", 1, checkpoint)
    assert_equal(alone, whole, RELATIVE)
