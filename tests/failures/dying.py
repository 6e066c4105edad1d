"""Trains until processes of it die: ``dying.py trial sgd`` or ``dying.py trainer adam``. By itself, it is the truth.

``dying.py trainer averaged`` also has callbacks of Lightning that change themselves, the Trainer and its schedulers.

``DIES`` is a plan, by the rank that a process was started with: ``{"0": ["backward", 5]}`` kills rank 0 in its fifth
backward, ``{"2": ["time", 0.3]}`` kills rank 2 so many seconds after it was about to join, and
``{"2": ["backward", 5, "stays"]}`` lets rank 2 say that it is there, and stay, until something else ends it;
``{"2": ["backward", 5, "waits"]}`` lets it wait there for a new process, which does not join before. After
``{"2": ["backward", 5, "for good"]}`` no new process joins. "end" is before the wait for the others at the end of a
call, "ended" after it. ``{"0": ["unheard", 1]}`` kills nobody: rank 0 has not heard that all have come to the end of
its first call. With ``COPIES=often`` a copy of the run follows each step.

Rank 0 leaves the results in "result.pt". Each process adds the samples of its steps to a file as it goes.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks import get_rank
from ddp_callbacks.checkpoints import recovery
from ddp_callbacks.cluster.environment import SUCCESSOR
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group import survivors

SAMPLES, BATCH, EPOCHS, FEATURES, CLASSES = 45, 10, 3, 6, 4
IS_TRUTH = "RANK" not in os.environ
STARTED_AS = os.environ.get("RANK", "0")
LIVES = ("", 0)
PLANS: dict[str, Any] = json.loads(os.environ.get("DIES", "{}"))
DIES = tuple(PLANS.get(STARTED_AS, LIVES))
PLAN = LIVES if SUCCESSOR in os.environ else DIES
_counts = Counter[str]()


def await_that(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def has_new_member() -> bool:
    members = survivors._members
    return members is not None and not {*members._newest()[1]} <= {*members._ranks}


def die() -> None:
    if PLAN[2:] == ("stays",):
        Path("there").touch()
        signal.pause()
    if PLAN[2:] == ("waits",):
        Path("waits").touch()
        await_that(has_new_member)
        return
    os.kill(os.getpid(), signal.SIGKILL)


timer = threading.Timer(PLAN[1], die)
timer.daemon = True


def moment(phase: str) -> None:
    """A moment at which the plan may let this process die."""
    _counts[phase] += 1
    if (phase, _counts[phase]) == PLAN[:2]:
        die()


def before(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        moment(phase)
        return function(*args)

    return call


def ending(wait: Callable[..., Any]) -> Callable[..., Any]:
    """The wait at the end of a call; the plan may let this process fail to hear that all have come."""

    def call(*args: Any) -> None:
        moment("end")
        wait(*args)
        moment("ended")
        if ("unheard", _counts["ended"]) == PLAN:
            raise PeerError("a message was lost")

    return call


def prepare() -> None:
    if SUCCESSOR in os.environ and DIES[2:] == ("for good",):
        sys.exit("nobody comes instead")
    if SUCCESSOR in os.environ and any(plan[2:] == ["waits"] for plan in PLANS.values()):
        await_that(Path("waits").exists)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if os.environ.get("COPIES") == "often":  # about each step; by default most jobs here are over before the second one
        recovery._SECONDS, recovery._SHARE = 1e-6, 0
    for phase, name in (("meeting", "meet"), ("connecting", "form_group")):
        setattr(survivors, name, before(phase, getattr(survivors, name)))
    recovery.any_rank = ending(recovery.any_rank)
    if PLAN[0] == "time":
        timer.start()
    moment("start")


class Rows(Dataset[Any]):
    """Samples whose last feature tells their index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
        self.x = torch.cat([x, torch.arange(samples, dtype=torch.float64)[:, None] / samples], 1)
        self.y = torch.arange(samples) % CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        moment("loading")
        return self.x[index], self.y[index]


class Network(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(FEATURES + 1, 8, bias=False), norm, nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moment("forward" if self.training else "validation")
        hidden = self.first(x)
        if hidden.requires_grad:  # then the gradients of the last layer are under way
            hidden.register_hook(lambda _: moment("backward"))
        return self.last(torch.tanh(self.norm(hidden)))


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9) if name == "sgd" else torch.optim.Adam(parameters, 0.02)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Rows(SAMPLES), BATCH, shuffle=True), DataLoader(Rows(23), BATCH)


def note(epoch: int, batch: int, x: torch.Tensor) -> None:
    """The samples of a step, in a group of this number."""
    group = 0 if IS_TRUTH else survivors._members.generation  # type: ignore[union-attr]
    line = [epoch, batch, group, (x[:, -1] * SAMPLES).round().int().tolist()]
    with Path(f"steps-{STARTED_AS}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def table(path: Path) -> list[dict[str, str]]:
    if get_rank():
        return []  # rank 0 may still write it
    with path.open() as file:
        return list(csv.DictReader(file))


def trial(optimizer: str) -> dict[str, Any]:
    import torchbearer
    from torchbearer import Callback, Trial
    from torchbearer.callbacks import CSVLogger, on_end_training, on_start

    from ddp_callbacks.torchbearer import DDPCallback

    class Watch(Callback):  # type: ignore[misc]
        def on_sample(self, state: Any) -> None:
            note(state[torchbearer.EPOCH], state[torchbearer.BATCH], state[torchbearer.X])

        def on_backward(self, state: Any) -> None:
            moment("step")

        def state_dict(self) -> dict[str, Any]:
            moment("copy")
            return {}

    model = Network(nn.Identity())
    before = [on_start(lambda _: moment("opening")), on_end_training(lambda _: moment("merge"))]
    ours = [] if IS_TRUTH else [DDPCallback()]
    made = Trial(
        model,
        optimizer_of(optimizer, model.parameters()),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[*before, *ours, Watch(), log := CSVLogger("log.csv")],
        verbose=0,
    ).to("cpu", torch.float64)
    torch.manual_seed(5)
    made.with_generators(*loaders())
    history = made.run(EPOCHS)
    made.state[torchbearer.CALLBACK_LIST].callback_list.remove(log)  # an evaluation would write it anew
    values = {"history": [dict(epoch) for epoch in history], "evaluation": dict(made.evaluate())}
    return {"values": values, "parameters": model.state_dict(), "rows": table(Path("log.csv"))}


def trainer(optimizer: str) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
    from lightning.pytorch.loggers import CSVLogger

    import ddp_callbacks.lightning  # noqa: F401

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network(nn.BatchNorm1d(8))
            self.steps = 0

        def on_fit_start(self) -> None:
            moment("opening")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            note(self.current_epoch, batch_idx, batch[0])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.steps += 1
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            moment("step")

        def on_train_epoch_end(self) -> None:
            moment("merge")

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

        def on_save_checkpoint(self, _: Any) -> None:
            moment("copy")

        def configure_optimizers(self) -> Any:
            made = optimizer_of(optimizer, self.parameters())
            return [made], [torch.optim.lr_scheduler.StepLR(made, 1, 0.5)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    best = ModelCheckpoint(monitor="val_loss")  # in the folder of the log, whose version rank 0 chooses
    changing = [GradientAccumulationScheduler({1: 2}), StochasticWeightAveraging(0.05, 1, 1)]  # what a fit begins with
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if IS_TRUTH else "ddp_callbacks",
        sync_batchnorm=not IS_TRUTH,
        max_epochs=EPOCHS,
        logger=CSVLogger("logs"),
        callbacks=[best, *changing] if optimizer == "averaged" else [best],
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    torch.manual_seed(5)
    made.fit(module, *loaders())
    numbers = {"global_step": made.global_step, "epoch": made.current_epoch, "steps": module.steps}
    values = {"logged": _floats(made.callback_metrics), "best": float(best.best_model_score), "numbers": numbers}
    name = re.sub(r"-v\d+", "", Path(best.best_model_path).name)  # if the others repeat the epoch, the file is there
    values |= {"name": name, "lr": made.optimizers[0].param_groups[0]["lr"]}
    values["evaluation"] = [_floats(found) for found in made.validate(module, loaders()[1], verbose=False)]
    rows = table(Path("logs/lightning_logs/version_0/metrics.csv"))
    return {"values": values, "parameters": module.state_dict(), "rows": rows}


def _floats(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(values.items())}


if __name__ == "__main__":
    prepare()
    result = {"trial": trial, "trainer": trainer}[sys.argv[1]](sys.argv[2])
    timer.cancel()  # nobody else would write the results
    if get_rank() == 0:
        torch.save(result, "result.pt")
