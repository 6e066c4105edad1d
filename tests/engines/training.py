"""One small training as a Trainer, a Trial and a loop; rank 0 leaves the parameters in the file RESULT.

With KILL, rank 1 is killed by SIGKILL once, in mid-epoch, and leaves that file; with RESUME, a run resumes from a file.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

EPOCHS = 3
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), 10, shuffle=True)


def leave(trained: nn.Module) -> None:
    if os.environ.get("RANK", "0") == "0":
        torch.save([parameter.detach() for parameter in trained.parameters()], os.environ["RESULT"])


def die_once(step: int) -> None:
    if "KILL" in os.environ and os.environ["RANK"] == "1" and step == 15 and not os.path.exists(os.environ["KILL"]):
        Path(os.environ["KILL"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        die_once(self.trainer.global_step)
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def trainer(**options: Any) -> None:
    module = Module()
    Trainer(accelerator="cpu", max_epochs=EPOCHS, **QUIET, **options).fit(module, loader())
    leave(module.net)


def with_strategy() -> None:
    from ddp_callbacks.lightning import Resume

    callbacks = [Resume(os.environ["RESUME"], every=2)] if "RESUME" in os.environ else []
    trainer(strategy="ddp_callbacks", callbacks=callbacks)


def trial(*callbacks: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    made = Trial(net, optimizer, nn.CrossEntropyLoss(), callbacks=[*callbacks], verbose=0).to("cpu", torch.float64)
    made.with_train_generator(loader()).run(EPOCHS)
    leave(net)


def with_callback() -> None:
    from ddp_callbacks.torchbearer import DDPCallback

    trial(DDPCallback())


def loop() -> None:
    from ddp_callbacks import (
        GradientSynchronizer,
        broadcast_parameters,
        join_process_group,
        shard_loader,
        with_shares,
    )

    join_process_group()
    net = model()
    synchronizer, optimizer = GradientSynchronizer(net), torch.optim.SGD(net.parameters(), 0.5)
    broadcast_parameters(net)
    divided = shard_loader(loader())
    for _ in range(EPOCHS):
        for (inputs, targets), share in with_shares(divided):
            synchronizer.weigh(share.local, share.total)
            optimizer.zero_grad()
            functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    leave(net)


if __name__ == "__main__":
    with_strategy()
