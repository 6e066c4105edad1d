"""Local steps in a Trainer: exact where they can be, nothing sent inside a window, the averaged model everywhere."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from diloco import OuterStep, vector
from distributed import run_distributed
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_scenarios import CLASSES, Net, data, fit, loader, outcome, quiet, trainer
from test_equivalence import assert_equal
from torch import nn
from torch.nn import functional as F

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.comm.process_group import ProcessGroupWork
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

Case = Callable[[], Any]
CASES: dict[str, Case] = {}
WORLD_SIZE = 3


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def strategy(sync: Any = None, **settings: Any) -> Any:
    """With local steps; Lightning's own for ``None``."""
    return "auto" if sync is None else CallbackStrategy(sync=sync, **settings)


def run_cases() -> dict[str, Any]:
    with quiet():
        exact = {name: script(LocalSGD(1)) for name, script in EXACT.items()}
        return exact | {name: function() for name, function in CASES.items()}


@functools.cache
def seen() -> list[dict[str, Any]]:
    return run_distributed(run_cases, WORLD_SIZE)


def by_rank(function: Case) -> list[Any]:
    return [results[function.__name__] for results in seen()]


# --- equal to one process ---------------------------------------------------------------------------------------------


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2)


class ByHand(Net):
    """Two optimizers in a batch, each with the other's parameters frozen; both losses are made before the first step.

    A window that closed between the steps would change parameters that the second backward still needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        other_loss = F.softplus(-self.other(F.one_hot(batch[1], CLASSES).double())).mean()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(other_loss)
        second.step()
        self.untoggle_optimizer(second)
        self.log("other", other_loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return sgd(self.layers), sgd(self.other)


def scheduled(sync: Any) -> Any:
    def scheduler(optimizer: Any) -> Any:
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20, cycle_momentum=False)
        return {"scheduler": made, "interval": "step"}

    return fit(strategy(sync), Net(optimizer=sgd, scheduler=scheduler))


def weighed(sync: Any) -> Any:
    """The loss is a mean over the targets that are not 0, of which a rank may have none."""

    class Ignoring(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1], ignore_index=0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    chosen = strategy() if sync is None else strategy(sync, weight=lambda batch: (batch[1] != 0).sum())
    return fit(chosen, Ignoring(optimizer=sgd), loader(29, 6, shuffle=True))


EXACT: dict[str, Callable[[Any], Any]] = {
    "plain": lambda sync: fit(strategy(sync), Net(optimizer=sgd)),
    "batches smaller than the world": lambda sync: fit(
        strategy(sync), Net(optimizer=sgd), loader(7, 2, shuffle=True), loader(5, 2, 9)
    ),
    "validation inside of an epoch": lambda sync: fit(strategy(sync), Net(optimizer=sgd), val_check_interval=2),
    "limits": lambda sync: fit(strategy(sync), Net(optimizer=sgd), limit_train_batches=3, max_steps=5),
    "scheduler": scheduled,
    "weighed": weighed,
    "two optimizers by hand": lambda sync: fit(strategy(sync), ByHand()),
}


@pytest.mark.parametrize("name", EXACT)
def test_windows_of_one_step_of_sgd_give_the_numbers_of_one_trainer(name: str) -> None:
    with quiet():
        expected = EXACT[name](None)
    for rank, results in enumerate(seen()):
        assert_equal(results[name], expected, 1e-10, f"rank {rank}")


def test_in_a_world_of_one_local_sgd_changes_nothing() -> None:
    with quiet():
        for make in (Net, ByHand):
            assert_equal(fit(strategy(LocalSGD(3)), make()), fit("auto", make()), 0.0)


# --- windows ----------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Keeps what each step was trained on, and the parameters and the number of messages at several moments."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.evaluated: list[torch.Tensor] = []
        self.ended: list[torch.Tensor] = []
        self.messages: list[int] = []
        self.count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for kind in (SharedMemoryAllReduce, ProcessGroupWork):
            self._count(kind, "launch" if kind is SharedMemoryAllReduce else "__init__")

    def _count(self, kind: Any, name: str) -> None:
        before = getattr(kind, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return before(*args, **kwargs)

        setattr(kind, name, counting)
        self.__dict__.setdefault("undo", []).append((kind, name, before))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        share = trainer.strategy._run.batches.share
        self.batches.append(tuple(part[: share.local].clone() for part in batch))
        self.messages.append(self.count)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.evaluated.append(vector(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended.append(vector(pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for kind, name, before in self.__dict__.pop("undo"):
            setattr(kind, name, before)


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


@case
def diloco() -> Any:
    """Four steps of accumulated batches in an epoch: windows of three and one."""
    watch, module = Watch(), Net(optimizer=adamw)
    start = vector(module)
    result = fit(
        strategy(DiLoCo(3)),
        module,
        loader(50, 7, shuffle=True),
        loader(13, 5, 9),
        callbacks=[watch],
        accumulate_grad_batches=2,
    )
    return result | {"watch": watch, "start": start}


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
                if len(x):
                    (F.cross_entropy(replica(x), y) / 2).backward()
            optimizer.step()
        if step % 4 in (2, 3):
            outer_step(replicas, weights)
            weights = [0] * len(replicas)
        if step % 4 == 3:
            models.append(outer_step.anchor)
    return models


def test_a_trainer_trains_by_the_papers_algorithm() -> None:
    ranks = by_rank(diloco)
    batches = [rank["watch"].batches for rank in ranks]
    assert sorted(len(own[7][0]) for own in batches) == [0, 0, 1]
    expected = simulated(batches, ranks[0]["start"])
    for rank in ranks:
        assert_equal(rank["watch"].ended, expected, 1e-10)
        assert_equal(rank["watch"].evaluated[-2:], expected, 1e-10)


def test_epochs_and_evaluations_are_those_of_one_model_on_all_ranks() -> None:
    first, *others = by_rank(diloco)
    epochs = [{k: v for k, v in line.items() if "step" not in k} for line in first["logged"]]
    assert any("loss_epoch" in line for line in epochs) and any("val_loss" in line for line in epochs)
    for other in others:
        assert_equal(other["parameters"], first["parameters"], 0.0)
        assert_equal([{k: v for k, v in line.items() if "step" not in k} for line in other["logged"]], epochs, 0.0)


def test_nothing_is_sent_inside_a_window() -> None:
    for rank in by_rank(diloco):
        messages = rank["watch"].messages[:8]
        steps = [after - before for before, after in itertools.pairwise(messages)]
        # Batches 4 and 5 are those of the step that closes the window.
        assert steps[:4] == [0, 0, 0, 0] and steps[4] > 0 and steps[5] > 0 and steps[6] == 0


@case
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
    assert by_rank(stopped) == [[3, 8]] * WORLD_SIZE


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumable(folder: Path, **options: Any) -> tuple[pl.Trainer, Net]:
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)
    made = trainer(strategy(DiLoCo(2)), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    return made, Net(optimizer=sgd)


def resume(checkpoint: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resumed.ckpt")
        torch.save(checkpoint, path)
        made, module = resumable(Path(folder, "more"), every_n_epochs=1)
        made.fit(module, loader(32, 8), ckpt_path=path)
        return outcome(made, module)["parameters"]


@case
def checkpoints() -> Any:
    """Saved each three steps of windows of two, so in the middle of the second; and after each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        made, module = resumable(Path(folder, "steps"), every_n_train_steps=3)
        made.fit(module, loader(32, 8))
        saved = [torch.load(path, weights_only=False) for path in sorted(Path(folder, "steps").glob("*.ckpt"))]
        whole, net = resumable(Path(folder, "epochs"), every_n_epochs=1)
        whole.fit(net, loader(32, 8))
        first = [torch.load(path, weights_only=False) for path in Path(folder, "epochs").glob("step=4.ckpt")]
    checkpoint = whole.strategy.broadcast(first[0] if first else None)
    return {"saved": saved, "whole": outcome(whole, net)["parameters"], "resumed": resume(checkpoint)}


def test_a_checkpoint_in_the_middle_of_a_window_has_the_averaged_model() -> None:
    ranks = by_rank(checkpoints)
    assert [len(rank["saved"]) for rank in ranks] == [2, 0, 0]
    batches = [[data(32)[8 * step : 8 * step + 8] for step in range(3)]]
    assert len(batches[0][0][0]) == 8
    state = ranks[0]["saved"][0]
    assert state["global_step"] == 3
    assert_equal(state["state_dict"], three_steps(), 1e-10)


def three_steps() -> dict[str, torch.Tensor]:
    """Windows of two steps and of one, closed for the checkpoint, by the paper's algorithm; shares of 2, 3 and 3."""
    x, y = data(32).tensors
    replicas = [Net(optimizer=sgd) for _ in range(WORLD_SIZE)]
    outer_step = OuterStep(vector(replicas[0]))
    for step in range(3):
        begin = 8 * step
        for replica, size in zip(replicas, SHARES, strict=True):
            optimizer = replica.configure_optimizers()
            F.cross_entropy(replica(x[begin : begin + size]), y[begin : begin + size]).backward()
            optimizer.step()
            optimizer.zero_grad()
            begin += size
        if step:
            outer_step(replicas, SHARES)
    return copy.deepcopy(replicas[0].state_dict())


SHARES = (3, 3, 2)


def test_the_outer_momentum_is_resumed() -> None:
    for rank in by_rank(checkpoints):
        assert_equal(rank["resumed"], rank["whole"], 0.0)


@case
def resumed_elsewhere() -> Any:
    """Windows of one step of SGD do not depend on the number of ranks."""
    return diloco_of_one_step(None)


def diloco_of_one_step(checkpoint: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "resumed.ckpt")
        if checkpoint is not None:
            torch.save(checkpoint, path)
        saving = ModelCheckpoint(Path(folder, "epochs"), "{step}", save_top_k=-1)
        made = trainer(strategy(DiLoCo(1)), callbacks=[saving], enable_checkpointing=True, max_epochs=2)
        module = Net(optimizer=sgd)
        made.fit(module, loader(32, 8), ckpt_path=path if checkpoint is not None else None)
        first = [torch.load(path, weights_only=False) for path in Path(folder, "epochs").glob("step=4.ckpt")]
    return outcome(made, module)["parameters"], first


def test_the_outer_momentum_is_resumed_at_another_number_of_processes() -> None:
    whole, (checkpoint,) = by_rank(resumed_elsewhere)[0]
    with quiet():
        alone, _ = diloco_of_one_step(checkpoint)
    assert_equal(alone, whole, 1e-10)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CallbackStrategy(sync="often"), 'sync must be "every_step", LocalSGD'),
        (lambda: CallbackStrategy(sync=DiLoCo(50), comm_hook=print), "a comm_hook sums gradients"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
