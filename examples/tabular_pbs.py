"""Classify tumours by 30 measurements, of which some rows lack ten, with Lightning, on one process or many.

    python examples/tabular_pbs.py                                                  one process
    ddprun --nproc-per-node 2 examples/tabular_pbs.py                               two processes on this machine
    qsub -v SCRIPT="examples/tabular_pbs.py --epochs 5" examples/jobs/ddp.pbs       four processes on two nodes, by PBS
    sbatch examples/jobs/ddp.slurm examples/tabular_pbs.py --epochs 5               the same, by Slurm

A layer fills in the missing measurements. It is used only where a process has such a row in its part of the batch.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_callbacks.lightning  # noqa: F401  registers the strategy
from ddp_callbacks.comm import all_gather_object

PRESENT, MISSING = 20, 10  # the measurements that every row has, and those that some rows lack


class TumourClassifier(pl.LightningModule):
    """Logits of ``benign``, from rows of 30 standardized measurements of which the last ten may be NaN."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.fill = nn.Linear(PRESENT, MISSING)
        self.network = nn.Sequential(nn.Linear(PRESENT + MISSING, 32), nn.ReLU(), nn.Linear(32, 1))
        self.accuracy = torchmetrics.Accuracy("binary")
        self.auc = torchmetrics.AUROC("binary")
        self.filled: list[bool] = []  # for each training step: did this process use ``fill``?

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        incomplete = rows.isnan().any(dim=1)
        if incomplete.any():
            rows = rows.clone()
            rows[incomplete, PRESENT:] = self.fill(rows[incomplete, :PRESENT])
        logits: torch.Tensor = self.network(rows).squeeze(1)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, benign = batch
        self.filled.append(bool(rows.isnan().any()))
        return nn.functional.binary_cross_entropy_with_logits(self(rows), benign)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, benign = batch
        logits = self(rows)
        self.accuracy(logits, benign)
        self.auc(logits, benign.int())
        self.log("val_loss", nn.functional.binary_cross_entropy_with_logits(logits, benign))
        self.log("val_accuracy", self.accuracy)
        self.log("val_auc", self.auc)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def load_rows() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 569 tumours, which come with the package; a quarter of them for the test.

    They are complete, so every 25th row is made to lack its ten "worst" measurements, the largest ones of each image.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    bunch = load_breast_cancer()
    rows, benign = torch.tensor(bunch.data), torch.tensor(bunch.target)
    train, test = train_test_split(range(len(rows)), test_size=0.25, random_state=0, stratify=benign)
    rows = (rows - rows[train].mean(dim=0)) / rows[train].std(dim=0)
    rows[::25, PRESENT:] = torch.nan
    rows, benign = rows.float(), benign.float()
    return TensorDataset(rows[train], benign[train]), TensorDataset(rows[test], benign[test])


def main() -> None:
    args = parse_arguments()
    pl.seed_everything(0, verbose=False)
    train, test = load_rows()
    options: dict[str, Any] = {
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True, **options)
    test_loader = DataLoader(test, batch_size=args.batch_size, **options)
    module = TumourClassifier()
    trainer = pl.Trainer(
        strategy=args.strategy,  # <- strategy="ddp_callbacks", and nothing about unused parameters
        max_epochs=args.epochs,
        logger=pl.loggers.CSVLogger(args.csv) if args.csv else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_loader, test_loader)
    report(trainer, all_gather_object(module.filled[: len(train_loader)], "the use of the layer"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify tumours by measurements, some of which are missing.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step, over all processes")
    parser.add_argument("--workers", type=int, default=1, help="processes that load data, for each that trains")
    parser.add_argument("--csv", metavar="DIR", help="write the metrics of each epoch below this folder, as CSV")
    parser.add_argument("--strategy", default="ddp_callbacks", help="another of Lightning's, to compare: auto")
    return parser.parse_args()


def report(trainer: pl.Trainer, filled_by_rank: list[Any]) -> None:
    """Rank 0 says in which steps of the first epoch which rank used the layer, and how good the classifier is."""
    if not trainer.is_global_zero:
        return
    print("the layer for missing measurements in the steps of the first epoch, # where it was used:")
    for rank, filled in enumerate(filled_by_rank):
        print(f"  rank {rank}  {''.join('#' if used else '.' for used in filled)}")
    accuracy, auc, loss = (trainer.callback_metrics[f"val_{name}"] for name in ("accuracy", "auc", "loss"))
    processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
    print(f"{processes}: accuracy {accuracy:.3f}, AUC {auc:.4f}, loss {loss:.4f} on the rows for the test")


if __name__ == "__main__":
    main()
