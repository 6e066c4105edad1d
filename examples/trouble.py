"""Make a job fail on purpose, to see what it prints: the page "My job hangs" explains each.

ddprun --nproc-per-node 2 examples/trouble.py raises         rank 1 raises an exception
ddprun --nproc-per-node 2 examples/trouble.py is-killed      rank 1 is killed
ddprun --nproc-per-node 2 examples/trouble.py validates      rank 0 alone calls trainer.validate
ddprun --nproc-per-node 2 examples/trouble.py disagrees      rank 0 validates while rank 1 trains
python examples/trouble.py alone 0                           rank 0 waits for a rank that nobody starts
python examples/trouble.py alone 1                           rank 1 waits for a rank 0 that nobody starts
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import join_process_group
from ddp_callbacks.lightning import CallbackStrategy

TROUBLE = sys.argv[1]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        if TROUBLE == "raises" and self.global_rank == 1:
            raise ValueError("sensor 7 gave nothing")
        if TROUBLE == "is-killed" and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    if TROUBLE == "alone":  # each on a port of its own, so the two never meet
        rank = int(sys.argv[2])
        join_process_group(rank, 2, "127.0.0.1", 29713 + rank, timeout=timedelta(seconds=5))
    module, data = Module(), TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=8)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = CallbackStrategy(timeout=timedelta(seconds=30))
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    trainer.fit(module, loader)
    if TROUBLE in ("validates", "disagrees") and trainer.global_rank == 0:
        trainer.validate(module, loader, verbose=False)
    elif TROUBLE == "disagrees":
        trainer.fit(module, loader)


if __name__ == "__main__":
    main()
