"""Programs in which something happens to one rank; if nothing does, they give the numbers of one process."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from kit.ranks import note, noting_errors
from side_by_side import be_ready, wait_for_the_other_worlds
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from torchbearer import Trial
from torchbearer.callbacks import Callback, MostRecent, on_step_training

from ddp_callbacks import (
    GradientSynchronizer,
    LocalSGD,
    join_process_group,
    save_checkpoint,
    shard_loader,
    with_shares,
)
from ddp_callbacks.cluster import environment
from ddp_callbacks.comm import any_rank
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

SAMPLES, BATCH_SIZE, EPOCHS = 12, 4, 2
AT = 2  # the misfortune happens when a rank is so often at its place
PATIENCE = 5  # seconds, of those that wait for one that goes silent
LONG = 2.5  # seconds, more than two looks of who waits


class TheCause(Exception):
    """An exception class of the user's own."""


def my_rank() -> int:
    return int(os.environ["RANK"])


@dataclass
class Misfortune:
    """What happens to a rank at a place of its program, once; nothing if it has no kind."""

    kind: str = ""
    place: str = ""
    times: int = field(default=0, init=False)

    def may_happen(self, place: str) -> None:
        """Called at each place of a program."""
        if place == self.place:
            self.times += 1
            if self.times == AT and self.kind:
                HAPPENS[self.kind]()

    @property
    def epochs(self) -> int:
        return EPOCHS - (self.kind == "leaves")


def raise_the_cause() -> None:
    raise TheCause("sensor 7 gave nothing")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room for the batch")


def when_all_are_ready(action: Callable[[], Any]) -> Callable[[], Any]:
    def happen() -> None:
        wait_for_the_other_worlds()
        note("happens")
        action()

    return happen


def go_silent() -> None:
    """At once: the other ranks wait only for so long."""
    note("happens")
    os.kill(os.getpid(), signal.SIGSTOP)


HAPPENS: dict[str, Callable[[], Any]] = {
    "raises": when_all_are_ready(raise_the_cause),
    "raises at once": raise_the_cause,
    "runs out of memory": when_all_are_ready(run_out_of_memory),
    "is killed": when_all_are_ready(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "is interrupted": when_all_are_ready(lambda: os.kill(os.getpid(), signal.SIGINT)),
    "exits": when_all_are_ready(lambda: sys.exit(0)),
    "votes alone": when_all_are_ready(lambda: any_rank(False, "the vote of one rank")),
    "goes silent": go_silent,
    "takes long": lambda: time.sleep(LONG),
}
NOT_READY = ("goes silent", "leaves", "skips the evaluation")


# --- the programs -----------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Random rows, of which each is read in the ``place``."""

    def __init__(self, misfortune: Misfortune, place: str) -> None:
        self.misfortune, self.place = misfortune, place

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.misfortune.may_happen(self.place)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double()


def batches(misfortune: Misfortune) -> DataLoader[Any]:
    """Read by a worker if something happens there."""
    is_worker = misfortune.place == "worker"
    return DataLoader(Rows(misfortune, "worker" if is_worker else "data"), BATCH_SIZE, num_workers=int(is_worker))


def validation(misfortune: Misfortune) -> DataLoader[Any]:
    return DataLoader(Rows(misfortune, "validation"), BATCH_SIZE)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_plainly() -> list[float]:
    """In torch alone, on one process."""
    model = new_model()
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for x, y in batches(Misfortune()):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


class Saved(Callback):
    """What a checkpoint holds; a callback of a Trial, too."""

    def __init__(self, misfortune: Misfortune) -> None:
        self.misfortune = misfortune

    def state_dict(self) -> dict[str, Any]:
        self.misfortune.may_happen("checkpoint")
        return {}


def run_loop(misfortune: Misfortune, timeout: timedelta) -> nn.Module:
    """A loop of one's own."""
    join_process_group(timeout=timeout)
    model = new_model()
    optimizer, loader = sgd(model), shard_loader(batches(misfortune))
    with closing(GradientSynchronizer(model)) as synchronizer:
        for _ in range(misfortune.epochs):
            for (x, y), share in with_shares(loader):
                misfortune.may_happen("step")
                synchronizer.weigh(share.local, share.total)
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
            if misfortune.place == "checkpoint":
                save_checkpoint("run.pt", {"model": model, "saved": Saved(misfortune)})
    return model


def run_trial(misfortune: Misfortune, timeout: timedelta, sync: Any = "every_step") -> nn.Module:
    """A Trial; the ranks meet after each step for a callback of the user's own, so it has one only where needed."""
    model = new_model()
    callbacks: list[Any] = [DDPCallback(timeout=timeout, sync=sync, verify=None)]  # as in run_trainer
    if misfortune.place == "callback":
        callbacks.append(on_step_training(lambda _: misfortune.may_happen("callback")))
    if misfortune.place == "checkpoint":
        callbacks += [Saved(misfortune), MostRecent("run.pt")]

    def criterion(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        misfortune.may_happen("step")
        return mse_loss(prediction, target)

    trial = Trial(model, sgd(model), criterion, metrics=["loss"], callbacks=callbacks, verbose=0).to(torch.float64)
    trial.with_generators(batches(misfortune), validation(misfortune)).run(misfortune.epochs)
    if misfortune.place == "evaluation" and misfortune.kind != "skips the evaluation":
        trial.evaluate()
    return model


def run_local_trial(misfortune: Misfortune, timeout: timedelta) -> nn.Module:
    """A Trial whose ranks first meet where its only window closes."""
    return run_trial(misfortune, timeout, LocalSGD(EPOCHS * 3))


class Module(pl.LightningModule):
    def __init__(self, misfortune: Misfortune) -> None:
        super().__init__()
        self.model, self.misfortune = new_model(), misfortune

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.misfortune.may_happen("step")
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", mse_loss(self.model(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.misfortune.may_happen("hook")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.misfortune.may_happen("checkpoint")

    def configure_optimizers(self) -> Any:
        return sgd(self)


def run_trainer(misfortune: Misfortune, timeout: timedelta) -> nn.Module:
    """A Trainer."""
    module = Module(misfortune)
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"enable_checkpointing": misfortune.place == "checkpoint", "num_sanity_val_steps": 0}
    warnings.simplefilter("ignore")  # what Lightning says of such small runs
    strategy: Any = CallbackStrategy(timeout=timeout, verify=None)  # a comparison would pass the places, too
    trainer = pl.Trainer(max_epochs=misfortune.epochs, accelerator="cpu", strategy=strategy, **options)
    trainer.fit(module, batches(misfortune), validation(misfortune))
    return module.model


RUNS: dict[str, Callable[[Misfortune, timedelta], nn.Module]] = {
    "loop": run_loop,
    "Trial": run_trial,
    "Trial with local steps": run_local_trial,
    "Trainer": run_trainer,
}


# --- what a rank does with them ---------------------------------------------------------------------------------------


def suffer(program: str, kind: str, place: str, unlucky: list[int], layout: list[int]) -> None:
    """A run, in which something happens to one rank, or to all.

    All ranks catch an exception in the middle of a run, and train again; the next one ends them.
    """
    torch.set_num_threads(1)
    believe_in_hosts(layout)
    timeout = timedelta(seconds=PATIENCE if kind == "goes silent" else 120)
    is_mine = my_rank() in unlucky
    if kind in NOT_READY:
        be_ready()

    def run(kind: str, place: str) -> nn.Module:
        return RUNS[program](Misfortune(kind, place), timeout)

    if place == "before the run":
        join_process_group()
    if place == "between two runs":
        run("", "")
    if place in OUTSIDE:
        if is_mine:
            HAPPENS[kind]()
    elif kind in CAUGHT:
        try:
            run(kind if is_mine else "", place)
        except Exception as error:
            note("caught", [type(error).__name__, str(error)])
        note("weights", weights(run("" if is_mine else "takes long", "step")))
    with noting_errors():
        run(kind if is_mine else "", place)
    note("happens" if is_mine else "over")


OUTSIDE = ("before the run", "between two runs")
CAUGHT = ("raises", "runs out of memory")


def believe_in_hosts(layout: list[int]) -> None:
    """Let the ranks take themselves for ranks of several hosts, with so many on each."""
    names = [f"host {host}" for host, count in enumerate(layout) for _ in range(count)]
    if names:
        environment.host_identity = lambda: names[my_rank()]
