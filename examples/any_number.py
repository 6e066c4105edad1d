"""Train a model with dropout, augmentation and BatchNorm on any number of processes: each step has the same loss.

    python any_number.py                              one process
    ddprun --nproc-per-node 3 any_number.py           three

    python any_number.py --draw any_number.svg        one to four, and what lies between them

The folder ``any_number`` gets the losses (metrics.csv).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks.lightning import CallbackStrategy

PROCESSES = (1, 2, 3, 4)


class MovedDigits(Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's 1797 handwritten digits of 8x8 pixels. Each is moved by a pixel, and gets noise."""

    def __init__(self) -> None:
        bunch = load_digits()
        self._images, self._digits = bunch.images / 16, torch.tensor(bunch.target)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = numpy.roll(self._images[index], numpy.random.randint(-1, 2, size=2), axis=(0, 1))
        return torch.tensor(moved + numpy.random.normal(0, 0.1, moved.shape)).unsqueeze(0), self._digits[index]


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.1), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5)),
            nn.Linear(64, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        loss = cross_entropy(self.model(images), digits)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on any number of processes.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="any_number", help="for the losses")
    parser.add_argument("--draw", metavar="PATH", help="train on one to four processes, and draw their losses")
    args = parser.parse_args()
    if args.draw:
        draw(args.draw, args.epochs)
        return
    seed_everything(0)
    trainer = Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        precision="64-true",
        strategy=CallbackStrategy(randomness="by_sample"),  # each sample draws for itself, on one process, too
        sync_batchnorm=True,
        logger=CSVLogger(args.folder, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), DataLoader(MovedDigits(), batch_size=50, shuffle=True))


# --- the drawing ------------------------------------------------------------------------------------------------------


def draw(path: str, epochs: int) -> None:
    """Train on each number of processes, and draw the losses and their distance from those of one process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = {processes: train(processes, epochs) for processes in PROCESSES}
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1))
    largest = 0.0
    for processes, found in losses.items():
        label, width = f"{processes} process{'es' if processes > 1 else ''}", 9 - 2.5 * (processes - 1)
        above.plot(range(1, len(found) + 1), found, linewidth=width, label=label)
        if processes > 1:
            apart = [max(abs(a - b), 1e-18) for a, b in zip(losses[1], found, strict=True)]
            below.plot(range(1, len(found) + 1), apart, ".", markersize=3, color=f"C{processes - 1}")
            largest = max(largest, *apart)
    above.set(ylabel="loss of the batch")
    above.legend(title="with dropout, augmentation and BatchNorm", loc="upper right", ncols=2)
    below.set(xlabel="step", ylabel="difference", yscale="log", ylim=(1e-19, 1e-11))
    figure.tight_layout()
    figure.savefig(path)
    print(f"largest difference {largest:.1e}, of {len(losses[1])} steps")


def train(processes: int, epochs: int) -> list[float]:
    """Return the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddp_callbacks.launcher", "--nproc-per-node", str(processes)]
        subprocess.run([*command, __file__, "--folder", folder, "--epochs", str(epochs)], check=True, cwd=folder)
        with (Path(folder) / "metrics.csv").open() as file:
            return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


if __name__ == "__main__":
    main()
