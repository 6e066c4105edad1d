"""Trains on hosts, a Trial or a Trainer: ``train_on_hosts.py trial 2 1.0``, so many epochs, so many seconds a batch.

It goes on from its file if there is one, and leaves its parameters in a file. With 0 epochs it trains a network whose
gradients take long on a slow link, without end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import get_rank

BATCHES = 8


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    ).double()


def make_loader() -> Any:
    x = torch.randn(8 * BATCHES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 8, shuffle=True)


def say(batch: int) -> None:
    print(f"batch {batch}.", flush=True)
    time.sleep(float(sys.argv[3]))


def train_trial(model: nn.Module, epochs: int) -> None:
    import torchbearer
    from torchbearer import Trial
    from torchbearer.callbacks import on_step_training

    from ddp_callbacks.torchbearer import DDPCallback, Resume

    @on_step_training  # type: ignore[misc]
    def progress(state: Any) -> None:
        say(state[torchbearer.BATCH])

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    resume = [Resume("run.pt", every=3)] if epochs else []
    trial = Trial(model, optimizer, nn.MSELoss(), metrics=["loss"], callbacks=[DDPCallback(), progress, *resume])
    trial.to("cpu", torch.float64).with_train_generator(make_loader())
    trial.run(epochs or 1_000_000, verbose=0)


def train_trainer(model: nn.Module, epochs: int) -> None:
    import lightning.pytorch as pl

    from ddp_callbacks.lightning import Resume

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.model.parameters(), lr=0.01)

        def on_train_batch_end(self, _: Any, batch: Any, batch_idx: int) -> None:
            say(batch_idx)

    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    resume = [Resume("run.pt", every=3)] if epochs else []
    options = {"strategy": "ddp_callbacks", "accelerator": "cpu", "max_epochs": epochs or -1, "callbacks": resume}
    pl.Trainer(**options, **dict.fromkeys(names, False)).fit(Module(), make_loader())


def main() -> None:
    epochs = int(sys.argv[2])
    model = make_model(16 if epochs else 500)
    {"trial": train_trial, "trainer": train_trainer}[sys.argv[1]](model, epochs)
    if get_rank() == 0:
        torch.save(model.state_dict(), "parameters.pt")


if __name__ == "__main__":
    main()
