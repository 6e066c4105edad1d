"""Trains one model in several ways, one after the other: ``many_ranks.py loop trial trainer``.

Rank 0 leaves the parameters in "result.pt". In a Trial or a Trainer, ``FAILS=17`` lets that rank fail in its sixth
batch, with ``PAUSE`` each batch takes so many seconds, with ``RESUMES`` it goes on from "run.pt", and with ``ENDLESS``
it trains on and on, with gradients that take long on a slow link.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import (
    BatchNormSynchronizer,
    GradientSynchronizer,
    get_rank,
    join_process_group,
    shard_loader,
    with_shares,
)

IS_ENDLESS, RESUMES = "ENDLESS" in os.environ, "RESUMES" in os.environ
EPOCHS = 1_000_000 if IS_ENDLESS else 3
SAMPLES, BATCH = 200, 64  # the last batch has 8 samples: most of many ranks have none of it
BATCHES = itertools.count(1)


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    wide = [nn.Linear(16, 500), nn.Linear(500, 500), nn.Linear(500, 16)] if IS_ENDLESS else []
    layers = [nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), *wide, nn.Linear(16, 3)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    data = TensorDataset(x, x[:, :3].argmax(1))
    return model, torch.optim.Adam(model.parameters(), 0.01), DataLoader(data, BATCH, shuffle=True)


def pass_batch() -> None:
    number = next(BATCHES)
    print(f"batch {number}.", flush=True)
    if number == 6 and str(get_rank()) == os.environ.get("FAILS"):
        raise RuntimeError("sensor 7 gave nothing")
    time.sleep(float(os.environ.get("PAUSE", 0)))


def loop() -> nn.Module:
    model, optimizer, loader = make()
    join_process_group()
    synchronizer = GradientSynchronizer(model)
    has_samples = True
    layers = BatchNormSynchronizer(model, counts=lambda: has_samples)
    torch.manual_seed(1)
    part = shard_loader(loader)
    for _ in range(EPOCHS):
        for (x, y), share in with_shares(part):
            has_samples = share.local > 0
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            undo = synchronizer.weigh_loss(loss, share.local, share.total)
            loss.backward()
            undo()
            optimizer.step()
    layers.close()
    synchronizer.close()
    return model


def trial() -> nn.Module:
    from torchbearer import Trial
    from torchbearer.callbacks import on_step_training

    from ddp_callbacks.torchbearer import DDPCallback, Resume

    model, optimizer, loader = make()
    torch.manual_seed(1)
    callbacks = [DDPCallback(sync_batchnorm=True), on_step_training(lambda _: pass_batch())]
    callbacks += [Resume("run.pt", every=3)] if RESUMES else []
    made = Trial(model, optimizer, nn.CrossEntropyLoss(), metrics=["acc", "loss"], verbose=0, callbacks=callbacks)
    made.to("cpu", torch.float64).with_train_generator(loader).run(EPOCHS)
    return model


def trainer() -> nn.Module:
    import lightning.pytorch as pl

    from ddp_callbacks.lightning import Resume

    network, optimizer, loader = make()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            pass_batch()

    torch.manual_seed(1)
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    options: dict[str, Any] = {"strategy": "ddp_callbacks", "accelerator": "cpu", "sync_batchnorm": True}
    options |= {"max_epochs": EPOCHS, "callbacks": [Resume("run.pt", every=3)] if RESUMES else []}
    pl.Trainer(**options, **dict.fromkeys(names, False)).fit(Module(), loader)
    return network


if __name__ == "__main__":
    found = {way: {"loop": loop, "trial": trial, "trainer": trainer}[way]().state_dict() for way in sys.argv[1:]}
    if get_rank() == 0:
        torch.save(found, "result.pt")
