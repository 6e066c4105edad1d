"""What ranks do with Lightning's Trainer, on CPUs and on GPUs alike.

Most bodies return what must not depend on the number of processes; tests compare it with a Trainer in one process.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
import trainers as scenarios
from device_bodies import MANY_BUCKETS, assert_near
from device_failures import share_the_gpu
from kit.compare import assert_equal
from kit.ranks import Rank, note
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainers import CLASSES, FEATURES, Net, fit, loader, outcome, quiet, trainer

from ddp_callbacks import LocalSGD
from ddp_callbacks.errors import NonFiniteLossWarning, PeerError
from ddp_callbacks.lightning import CallbackStrategy

OURS, PLAIN = "ddp_callbacks", "auto"

# Of tests/scenarios/trainers.py: a handful for each kind of thing.
NAMES = (
    "plain",
    "accumulate_ragged",
    "clip_by_norm",
    "schedulers",
    "checkpoints",
    "odd_loaders",
    "every_function_of_the_trainer",
    "logs",
    "logs_of_small_batches",
    "synchronized_batchnorm",
    "means_over_what_counts",
    "gan",
    "skipped_parameters",
)
# How near one process, of the largest parameter.
PRECISIONS = {"64-true": 1e-10, "32-true": 1e-4, "bf16-true": 0.1, "bf16-mixed": 0.1, "16-mixed": 0.02}
FIRST_SCALE = 1024.0  # of the losses in 16-mixed


def run_scenario(accelerator: str, name: str, strategy: str) -> Any:
    scenarios.ACCELERATOR = accelerator
    with quiet():
        return scenarios.SCENARIOS[name](strategy)


def resumed(accelerator: str, strategy: str) -> Any:
    """Two epochs, and two more from their checkpoint; Adam's state and the scheduler's go along."""
    scenarios.ACCELERATOR = accelerator

    def module() -> Net:
        return Net(
            optimizer=lambda net: torch.optim.Adam(net.parameters(), 0.02),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )

    with quiet(), tempfile.TemporaryDirectory() as folder:
        saves = ModelCheckpoint(folder, save_last=True)
        fit(strategy, module(), loader(29, 8), callbacks=[saves], enable_checkpointing=True)
        made, second = trainer(strategy, max_epochs=4), module()
        made.fit(second, loader(29, 8), ckpt_path=saves.last_model_path)
        return outcome(made, second)


def local_steps(accelerator: str, strategy: str) -> Any:
    """Parameters averaged after each step are those of one process, for plain SGD."""
    scenarios.ACCELERATOR = accelerator
    chosen: Any = CallbackStrategy(sync=LocalSGD(1)) if strategy == OURS else PLAIN
    with quiet():
        return fit(chosen, Net(optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.2)))


class Single(Net):
    """In the precision of the Trainer; the data are in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype))


def precision(accelerator: str, name: str, strategy: str) -> Any:
    """The parameters after two epochs, and the scale of the losses."""
    scenarios.ACCELERATOR = accelerator
    with quiet():
        made, module = trainer(strategy, precision=name, logger=False), Single()
        made.fit(module, loader(29, 8))
        scaler = getattr(made.precision_plugin, "scaler", None)
        return {
            "parameters": {name: value.double() for name, value in module.state_dict().items()},
            "dtype": str(module.layers[0].weight.dtype),
            "scale": None if scaler is None else scaler.get_scale(),
            "steps": made.global_step,
        }


def assert_near_one_process(two: list[Any], one: Any, relative: float) -> None:
    """Results of :func:`precision` and :func:`a_scaled_loss_that_overflows`."""
    for found in two:
        assert {key: found[key] for key in found if key != "parameters"} == {
            key: one[key] for key in one if key != "parameters"
        }
        assert_near(list(found["parameters"].values()), list(one["parameters"].values()), "parameters", relative)
        assert_equal(found["parameters"], two[0]["parameters"], 0.0, "the ranks differ")


class Overflows(Single):
    """In the third batch the loss of one rank is infinite, and in one process that of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        is_hit = self.global_rank == self.trainer.world_size - 1
        return loss * (float("inf") if batch_idx == 2 and is_hit else 1.0)


def a_scaled_loss_that_overflows(accelerator: str, strategy: str) -> Any:
    """16-mixed: all skip the step and halve the scale."""
    scenarios.ACCELERATOR = accelerator
    kind = "cpu" if accelerator == "cpu" else "cuda"
    plugin = MixedPrecision("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=FIRST_SCALE))
    with quiet():
        warnings.filterwarnings("ignore", category=NonFiniteLossWarning)
        made, module = trainer(strategy, plugins=plugin, logger=False, max_epochs=1), Overflows()
        made.fit(module, loader(32, 8))
        return {
            "parameters": {name: value.double() for name, value in module.state_dict().items()},
            "scale": plugin.scaler.get_scale(),
        }


# --- the host does not wait for the GPU -------------------------------------------------------------------------------


class HostMustNotWait(pl.Callback):
    """From batch 3 on, an operation that makes the host wait raises: within each batch, or also between them."""

    def __init__(self, between: bool, last: int) -> None:
        self._between, self._last = between, last
        self.guarded = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 3 and module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.guarded += batch_idx >= 3
        if module.device.type == "cuda" and not (self._between and batch_idx < self._last):
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class LogsInEachStep(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.layers(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss)
        self.log("accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def steady_batches(accelerator: str, between: bool, strategy: str) -> int:
    """Ten batches of a Trainer that logs a value and a metric in each; how many were guarded."""
    generator = torch.Generator().manual_seed(0)
    rows = TensorDataset(
        torch.randn(80, FEATURES, generator=generator), torch.randint(0, CLASSES, (80,), generator=generator)
    )
    guard = HostMustNotWait(between, last=9)
    chosen: Any = CallbackStrategy(bucket_cap_mb=MANY_BUCKETS) if strategy == OURS else PLAIN
    with quiet():
        made = pl.Trainer(
            strategy=chosen,
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            logger=False,
            callbacks=[guard],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        made.fit(LogsInEachStep(), DataLoader(rows, 8, pin_memory=accelerator == "gpu"))
    return guard.guarded


# --- the next run -----------------------------------------------------------------------------------------------------


class Unlucky(Net):
    """In its second batch the second rank raises."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("sensor 7 gave nothing")
        return super().training_step(batch, batch_idx)


def numbers(found: dict[str, Any]) -> list[float]:
    return [float(value) for tensor in found["parameters"].values() for value in tensor.reshape(-1)]


def train_after_a_failure(kind: str) -> None:
    """A script that catches what ends its first run, twice, and trains again; in ranks that have not joined."""
    torch.set_num_threads(1)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ[name] = "0"
    scenarios.ACCELERATOR = "cpu" if kind == "cpu" else "gpu"
    if kind == "nccl":
        share_the_gpu()

    def strategy() -> Any:
        return CallbackStrategy(process_group_backend="gloo" if kind == "gloo" else None)

    with quiet():
        note("alone", numbers(fit(PLAIN)))
        for turn in range(2):
            try:
                fit(strategy(), Unlucky())
            except (ValueError, PeerError) as error:
                note(f"error {turn}", [type(error).__name__, str(error)])
            note(f"run {turn}", numbers(fit(strategy())))


def assert_trained_after(ranks: list[Rank]) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), [rank.stderr for rank in ranks]
    alone = torch.tensor(ranks[0].notes["alone"], dtype=torch.float64)
    for turn in range(2):
        kinds = [rank.notes[f"error {turn}"][0] for rank in ranks]
        assert kinds == ["PeerError", "ValueError"], [rank.notes[f"error {turn}"] for rank in ranks]
        assert "failed with ValueError: sensor 7 gave nothing" in ranks[0].notes[f"error {turn}"][1]
        for rank in ranks:
            assert_near([torch.tensor(rank.notes[f"run {turn}"], dtype=torch.float64)], [alone], f"run {turn}")
