"""Train on handwritten digits with Lightning, and write down when each epoch ended and how accurate the model was.

    python train.py --report report.json                        one process
    ddprun -H node1,node2 train.py --report report.json         one on each of two machines

Two lines make it train on several processes: the import, and ``strategy="ddp_callbacks"``. ``main.py`` runs this script
on hosts that each have a part of a core.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_callbacks.lightning  # noqa: F401  <- the first added line

TEST = 360  # of the 1797 digits
SIDE, DIGIT = 16, 12  # pixels of an image, and of the digit in it
MODELS = ("convolutions", "perceptron")


class Classifier(pl.LightningModule):
    """What a user writes."""

    def __init__(self, network: nn.Module, epochs: int) -> None:
        super().__init__()
        self.network, self.epochs = network, epochs
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        loss = nn.functional.cross_entropy(self.network(images), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        self.accuracy(self.network(images), targets)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=4e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


class Clock(pl.Callback):
    """Seconds since training began, and the accuracy, at the end of each epoch with its validation."""

    def __init__(self) -> None:
        self.epochs: list[tuple[float, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.strategy.barrier()
        self._start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs.append((time.perf_counter() - self._start, float(trainer.callback_metrics["accuracy"])))


def images(copies: int) -> tuple[TensorDataset, TensorDataset]:
    """To train and to test: each digit enlarged, at ``copies`` random places of an image with noise.

    Made in advance, so that every run trains on the same.
    """
    random = torch.Generator().manual_seed(0)
    bunch = load_digits()
    digits = torch.from_numpy(bunch.images).float()[:, None] / 16
    targets = torch.from_numpy(bunch.target)
    order = torch.randperm(len(digits), generator=random)

    def draw(which: torch.Tensor, copies: int) -> TensorDataset:
        which = which.repeat(copies)
        large = nn.functional.interpolate(digits[which], size=(DIGIT, DIGIT), mode="bilinear")
        made = 0.1 * torch.randn(len(which), 1, SIDE, SIDE, generator=random)
        for image, digit in zip(made, large, strict=True):
            top, left = torch.randint(0, SIDE - DIGIT + 1, (2,), generator=random).tolist()
            image[:, top : top + DIGIT, left : left + DIGIT] += digit
        return TensorDataset(made, targets[which])

    return draw(order[TEST:], copies), draw(order[:TEST], 2)


def network(name: str) -> nn.Module:
    if name == "perceptron":
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 64), nn.ReLU(), nn.Linear(64, 10))
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()]
    for inputs, outputs in ((32, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def train(name: str, epochs: int, batch: int) -> list[tuple[float, float]]:
    """The epochs of a run: seconds, and accuracy on the test images."""
    pl.seed_everything(0)
    training, test = images(copies=3)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp_callbacks",  # <- the second
        max_epochs=epochs,
        callbacks=[clock],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(training, batch, shuffle=True), DataLoader(test, 360)
    trainer.fit(Classifier(network(name), epochs), *loaders)
    return clock.epochs


def take_share(groups: Path) -> None:
    """Become a member of the control group of this host, which limits its processor."""
    (groups / os.uname().nodename / "cgroup.procs").write_text("0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["convolutions"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, over all processes (default 128)")
    parser.add_argument("--report", type=Path, help="where rank 0 writes what it saw")
    parser.add_argument("--control-groups", type=Path, help="folder with a control group for each host")
    arguments = parser.parse_args()
    if arguments.control_groups:  # one core for a host, before there are threads
        os.sched_setaffinity(0, {int(os.environ.get("RANK", "0")) % (os.cpu_count() or 1)})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.control_groups:
        take_share(arguments.control_groups)
    report = {name: train(name, arguments.epochs, arguments.batch) for name in arguments.models}
    if int(os.environ.get("RANK", "0")) == 0:
        for name, epochs in report.items():
            print(
                f"{name}: " + ", ".join(f"{seconds:.1f} s {accuracy:.4f}" for seconds, accuracy in epochs), flush=True
            )
        if arguments.report:
            arguments.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
