"""Loops of one's own for the ways (see ways.py): Adam, a schedule, accumulation over two batches, losses of epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ways import Way

from ddp_callbacks import (
    DiLoCo,
    GradientSynchronizer,
    LocalSGD,
    ParameterAverager,
    load_checkpoint,
    resumable_loader,
    save_checkpoint,
    seed_by_rank,
    with_shares,
)
from ddp_callbacks.batch_norm.layers import samples_needed
from ddp_callbacks.checkpoints.own_loop import LocalSums
from ddp_callbacks.comm import all_reduce
from ddp_callbacks.process_group import get_world_size

SAMPLES, BATCH_SIZE, EPOCHS = 34, 8, 3  # four batches, and one of two samples, of which some of three ranks have none
BATCHES = 5
WINDOWS: dict[str, LocalSGD | DiLoCo] = {"LocalSGD": LocalSGD(every=3), "DiLoCo": DiLoCo(every=3)}  # of three batches


class Loop:
    """A user's.

    Args:
        kind: "no_sync" accumulates with it, "synchronized" without. "dropout" draws, and has running statistics, which
            differ between the ranks.
    """

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        self.model = nn.Sequential(
            nn.Linear(5, 7),
            nn.BatchNorm1d(7) if kind == "dropout" else nn.Tanh(),
            nn.Dropout(0.5 if kind == "dropout" else 0.0),
            nn.Linear(7, 1),
        ).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        at_least = samples_needed(self.model, BATCH_SIZE, get_world_size())
        self.loader = resumable_loader(DataLoader(data, BATCH_SIZE, shuffle=True), at_least=at_least)
        self.progress: dict[str, Any] = {"epoch": 0, "batch": 0, "losses": []}
        self.sums = LocalSums(loss=0.0, samples=0)
        self.averager = None
        if kind in WINDOWS:
            self.averager = ParameterAverager(self.model, WINDOWS[kind], self.optimizer if kind == "DiLoCo" else None)
        self.synchronizer = None if self.averager else GradientSynchronizer(self.model)
        engine = self.averager or self.synchronizer
        names = ("model", "optimizer", "schedule", "loader", "progress", "sums")
        self.objects = {name: getattr(self, name) for name in names} | {"engine": engine}
        if kind == "dropout":
            seed_by_rank()

    def step(self, batch: Any, share: Any) -> None:
        inputs, targets = batch
        self.progress["batch"] += 1
        is_last = self.progress["batch"] % 2 == 0 or self.progress["batch"] == BATCHES
        accumulates = self.kind in ("no_sync", "dropout") and not is_last
        if self.synchronizer is not None:
            self.synchronizer.weigh(share.local, share.total)
        no_sync = self.synchronizer.no_sync() if self.synchronizer is not None and accumulates else None
        with no_sync or contextlib.nullcontext():
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
        if share.local:
            self.sums["loss"] += loss.item() * share.local
            self.sums["samples"] += share.local
        if is_last or self.averager is not None:
            if self.kind == "clipped":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averager is not None:
            self.averager.step(share.local)

    def end_epoch(self) -> None:
        total = all_reduce(torch.tensor([self.sums["loss"], self.sums["samples"]], dtype=torch.float64), "the loss")
        self.progress["losses"].append((total[0] / total[1]).item())
        self.progress.update(epoch=self.progress["epoch"] + 1, batch=0)
        self.sums.update(loss=0.0, samples=0)
        self.schedule.step()

    def run(self, cut: int | None = None, save: Callable[[], None] = lambda: None) -> int:
        """To the end, or until it saves at this moment, a batch or the end of an epoch; how many there were."""
        moments = 0
        while self.progress["epoch"] < EPOCHS:
            for batch, share in with_shares(self.loader):
                self.step(batch, share)
                moments += 1
                if moments == cut:
                    save()
                    return moments
            self.end_epoch()
            moments += 1
            if moments == cut:
                save()
                return moments
        return moments

    def result(self) -> Any:
        if self.averager is not None:
            self.averager.outer_step()
        if self.synchronizer is not None:
            self.synchronizer.close()
        return self.progress["losses"], [value.detach().clone() for value in self.model.state_dict().values()]


SCENARIOS: dict[str, Any] = dict.fromkeys(("no_sync", "synchronized", "clipped"), Loop)
APART: dict[str, Any] = dict.fromkeys(("dropout", *WINDOWS), Loop)


def names(way: Way) -> list[str]:
    return [*SCENARIOS, *APART]


def run(name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
    """See :class:`ways.Table`."""
    made, path = Loop(name), Path(folder, "run.pt")
    load_checkpoint(path, made.objects)
    moments = made.run(cut, lambda: save_checkpoint(path, made.objects))
    return made.result(), moments


def joined(first: Any, second: Any) -> Any:
    return second
