"""The loggers of a fit that goes on write where the one that was cut has written."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_scenarios import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks.errors import Preempted
from ddp_callbacks.lightning import Resume


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        if self.current_epoch == 1:
            self.log("late", loss)  # a column that comes later
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CutAt(pl.Callback):
    """Asks to stop, or fails, in a batch of the training."""

    def __init__(self, resume: Resume, batch: int | None, fails: bool) -> None:
        self.resume, self.batch, self.fails = resume, batch, fails

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            if self.fails:
                raise RuntimeError("the power is cut")
            self.resume.preemption.request("a test")


def fit(folder: Path, logger: Any, cut: int | None = None, fails: bool = False) -> ModelCheckpoint:
    resume, saving = Resume(folder / "run.ckpt", every=3), ModelCheckpoint(monitor="val", save_top_k=2)
    data = DataLoader(TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(1))), batch_size=2)
    with quiet():
        trainer = pl.Trainer(
            strategy="ddp_callbacks",
            accelerator="cpu",
            max_epochs=3,
            log_every_n_steps=1,
            logger=logger,
            callbacks=[resume, saving, CutAt(resume, cut, fails)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), data, data)
    return saving


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("version", [None, 7])
@pytest.mark.parametrize(("cut", "fails"), [(4, False), (8, False), (10, True)])
def test_a_csv_file_goes_on_where_it_was_cut(tmp_path: Path, version: int | None, cut: int, fails: bool) -> None:
    whole = fit(tmp_path / "whole", CSVLogger(tmp_path / "whole", flush_logs_every_n_steps=2))
    with pytest.raises(RuntimeError if fails else Preempted):
        fit(tmp_path / "cut", CSVLogger(tmp_path / "cut", version=version, flush_logs_every_n_steps=2), cut, fails)
    saving = fit(tmp_path / "cut", CSVLogger(tmp_path / "cut", version=version, flush_logs_every_n_steps=2))
    folder = tmp_path / "cut/lightning_logs"
    assert [path.name for path in folder.iterdir()] == [f"version_{version or 0}"]
    expected = rows(tmp_path / "whole/lightning_logs/version_0/metrics.csv")
    assert len(expected) == 18 + 3
    assert rows(folder / f"version_{version or 0}/metrics.csv") == expected
    assert {Path(path).name for path in saving.best_k_models} == {Path(path).name for path in whole.best_k_models}


def test_tensorboard_goes_on_in_the_same_version(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        fit(tmp_path, TensorBoardLogger(tmp_path), cut=4)
    fit(tmp_path, TensorBoardLogger(tmp_path))
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
