"""An ordinary LightningModule and LightningDataModule: nothing in this file knows of more than one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitsModule(pl.LightningModule):
    """A convolutional network for images of 8x8 pixels."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(images)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self(images), digits)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, digits = batch
        logits = self(images)
        self.accuracy(logits, digits)
        self.log("val_loss", nn.functional.cross_entropy(logits, digits), prog_bar=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


class DigitsData(pl.LightningDataModule):
    """scikit-learn's 1797 handwritten digits, which come with the package; 360 of them for the validation."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        bunch = load_digits()
        images = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
        data = TensorDataset(images, torch.tensor(bunch.target))
        train, test = train_test_split(range(len(data)), test_size=360, random_state=0, stratify=bunch.target)
        self.train, self.test = TensorDataset(*data[train]), TensorDataset(*data[test])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.test, batch_size=self.batch_size)
