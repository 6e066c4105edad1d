"""Classify molecules by their SMILES strings, with stratified k-fold cross-validation, on one process or many.

    python smiles_rnn_kfold.py                                    one process
    ddprun --nproc-per-node 2 smiles_rnn_kfold.py                 two processes on this machine
    ddprun -H node1,node2 smiles_rnn_kfold.py                     one on each of two machines

Has a molecule an aliphatic amine? In each fold a recurrent network of its own learns that from the train molecules. The
dev molecules choose the best epoch, and the held-out ones say how good it is. Two lines differ from the script for one
process: the import, and the name of the strategy. All folds share one process group.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from molecules import read_molecules, tokenize
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import BinaryAUROC

import ddp_callbacks.lightning  # noqa: F401  <- the first added line

Sample = tuple[torch.Tensor, float]  # the tokens of a molecule, and its label


def main() -> None:
    args = parse_arguments()
    smiles, labels = read_molecules(args.molecules)
    samples, n_tokens = encode(smiles, labels)
    folds = StratifiedKFold(args.folds, shuffle=True, random_state=args.seed)
    folders, scores = [], []

    for fold, (visible, heldout) in enumerate(folds.split(smiles, labels), start=1):
        visible_labels = [labels[index] for index in visible]
        train, dev = train_test_split(visible, stratify=visible_labels, test_size=0.2, random_state=args.seed)
        pl.seed_everything(args.seed, verbose=False)
        trainer = pl.Trainer(
            strategy="ddp_callbacks",  # <- the second
            max_epochs=args.epochs,
            logger=TensorBoardLogger(args.runs, name=f"fold_{fold}"),
            callbacks=[ModelCheckpoint(monitor="dev_roc_auc", mode="max")],
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Classifier(n_tokens, dropout=args.dropout)
        trainer.fit(
            model,
            loader(samples, train, args.batch_size, shuffle=True),
            loader(samples, dev, args.batch_size),
        )
        [tested] = trainer.test(model, loader(samples, heldout, args.batch_size), ckpt_path="best", verbose=False)
        scores.append(tested["heldout_roc_auc"])
        if trainer.is_global_zero:
            best = float(trainer.checkpoint_callback.best_model_score)
            print(f"fold {fold}: ROC AUC {best:.4f} on dev in the best epoch, {scores[-1]:.4f} held out", flush=True)
            folders.append(trainer.logger.log_dir)

    if trainer.is_global_zero:
        processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        print(f"{processes}: held-out ROC AUC {mean:.4f}, standard deviation {spread:.4f} over {args.folds} folds")
        if args.plot:
            plot(folders, scores, args.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify molecules by their SMILES strings, with cross-validation.")
    parser.add_argument("--molecules", type=int, metavar="N", help="take so many, for a quick look (default: all)")
    parser.add_argument("--folds", type=int, default=5, help="parts of the data, each held out once (default 5)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs in each fold (default 8)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="molecules per step, over all processes (default 32)"
    )
    parser.add_argument("--dropout", type=float, default=0.2, help="between the layers (default 0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the folds and of each training (default 0)")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="for TensorBoard and checkpoints (default runs)")
    parser.add_argument("--plot", metavar="FILE", help="draw the dev ROC AUC of each epoch and fold")
    return parser.parse_args()


class Classifier(pl.LightningModule):
    """A bidirectional recurrent network that reads the tokens of a molecule."""

    def __init__(self, n_tokens: int, d_model: int = 128, num_layers: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, d_model)
        self.rnn = nn.GRU(d_model, d_model, num_layers, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(2 * d_model, 1)
        self.dev_auc, self.heldout_auc = BinaryAUROC(), BinaryAUROC()

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits, of shape [molecules], from tokens of shape [molecules, longest]; padding is not read."""
        embedded = self.embedding(tokens)
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        logits: torch.Tensor = self.head(torch.cat([last[-2], last[-1]], dim=1)).squeeze(1)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, lengths, labels = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(tokens, lengths), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, lengths, labels = batch
        self.dev_auc.update(self(tokens, lengths), labels.int())
        self.log("dev_roc_auc", self.dev_auc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        tokens, lengths, labels = batch
        self.heldout_auc.update(self(tokens, lengths), labels.int())
        self.log("heldout_roc_auc", self.heldout_auc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001, weight_decay=0.0001)


def encode(smiles: Sequence[str], labels: Sequence[int]) -> tuple[list[Sample], int]:
    """The molecules as numbers of tokens, and how many there are; 0 is left to the padding."""
    molecules = [tokenize(molecule) for molecule in smiles]
    vocabulary = sorted({token for tokens in molecules for token in tokens})
    number = {token: place for place, token in enumerate(vocabulary, start=1)}
    samples = [
        (torch.tensor([number[token] for token in tokens]), float(label))
        for tokens, label in zip(molecules, labels, strict=True)
    ]
    return samples, len(vocabulary) + 1


def loader(samples: Any, indices: Sequence[int], batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(Subset(samples, indices), batch_size, shuffle, collate_fn=collate)


def collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, padded to the longest of these molecules; lengths; labels."""
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), torch.tensor([*map(len, tokens)]), torch.tensor(labels)


def read_curve(folder: str) -> list[float]:
    """The dev ROC AUC of each epoch, from what was written for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.value for event in EventAccumulator(folder).Reload().Scalars("dev_roc_auc")]


def plot(folders: list[str], scores: list[float], file: str) -> None:
    """Each fold's curve, with a mark at the chosen epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="ROC AUC on the dev molecules")
    for fold, (folder, score) in enumerate(zip(folders, scores, strict=True), start=1):
        curve = read_curve(folder)
        best = curve.index(max(curve))
        axes.plot(range(1, len(curve) + 1), curve, "-o", markevery=[best], label=f"fold {fold}, {score:.3f} held out")
    axes.legend()
    figure.savefig(file)


if __name__ == "__main__":
    # Lightning's hints would come again in each fold.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", "Some random numbers may not be")  # dropout of packed sequences
    main()
