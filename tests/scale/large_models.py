"""Models as large as people train: ``large_models.py transformer`` or ``large_models.py buckets``.

``transformer`` is one of 124 million parameters in a Trainer, whose module kills its process in its sixth step if its
rank is ``DIES``, and asks to stop in the fourth one with ``STOPS``. Rank 0 leaves its parameters in "result.pt".
``buckets`` sums 0.96 GB of gradients in 40 buckets, for which the last rank is late by ``LATE`` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STARTED_AS = os.environ.get("RANK", "")
WIDTH, LAYERS, VOCABULARY, LENGTH, CLASSES = 768, 12, 50257, 8, 4
SAMPLES, BATCH, EPOCHS = 24, 6, 2


def transformer() -> None:
    import lightning.pytorch as pl

    from ddp_callbacks import get_rank
    from ddp_callbacks.lightning import CallbackStrategy, Resume

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, LAYERS)
            self.head = nn.Linear(WIDTH, CLASSES)
            self.double()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            if self.global_step == 5 and os.environ.get("DIES") == STARTED_AS:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.global_step == 3 and "STOPS" in os.environ:
                os.kill(os.getpid(), signal.SIGTERM)
            return F.cross_entropy(self.head(self.layers(self.embedding(batch[0])).mean(1)), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    torch.manual_seed(0)
    x, y = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH)), torch.randint(0, CLASSES, (SAMPLES,))
    module, loader = Module(), DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    ours = {"strategy": CallbackStrategy(), "callbacks": [Resume("run.ckpt")]} if STARTED_AS else {}
    pl.Trainer(**ours, accelerator="cpu", max_epochs=EPOCHS, **dict.fromkeys(names, False)).fit(module, loader)
    if get_rank() == 0:
        torch.save(module.state_dict(), "result.pt")


def buckets() -> None:
    from ddp_callbacks import GradientSynchronizer, get_rank, get_world_size, join_process_group

    join_process_group()
    rank, size = get_rank(), get_world_size()
    model = nn.ParameterList(torch.zeros(6_000_000) for _ in range(40))
    synchronizer = GradientSynchronizer(model, bucket_cap_mb=24)
    for step in range(3):
        model.zero_grad()
        loss = torch.stack([(rank + step + number) * weight.sum() for number, weight in enumerate(model)]).sum()
        if step == 1 and rank == size - 1:
            time.sleep(float(os.environ["LATE"]))
        loss.backward()
        for number, weight in enumerate(model):
            torch.testing.assert_close(weight.grad, torch.full_like(weight, step + number + (size - 1) / 2))
    synchronizer.close()
    print(f"rank {rank} has the sums")


if __name__ == "__main__":
    {"transformer": transformer, "buckets": buckets}[sys.argv[1]]()
