"""Runs of a Trial that can be cut: each is a user's script with ``Resume``, on any number of processes.

``scenario(cut, path)`` builds everything from fixed seeds, and runs it with the checkpoint ``path``. With a ``cut`` it
asks to stop at that moment of the run, counted from 1: each batch of training and validation, and each end of an epoch.
It raises :class:`Preempted` then, unless the run ends before all ranks have heard of it. Called again with ``None`` and
the same path, it goes on. It returns what must not depend on cuts: a nested structure of numbers and tensors.

``SCENARIOS`` have the numbers of one process on any number of them. Those of ``LOCAL`` depend on that number: their
ranks draw for themselves, or take local steps.
"""

from __future__ import annotations

import csv
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torchbearer import Callback, Trial
from torchbearer.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientNormClipping,
    MostRecent,
    StepLR,
)
from torchbearer.callbacks.torch_scheduler import TorchScheduler
from torchbearer.metrics import EpochLambda, lambda_metric, mean, running_mean, std, to_dict

from ddp_callbacks import DiLoCo, LocalSGD, get_rank, get_world_size
from ddp_callbacks.torchbearer import SHARE, DDPCallback, Resume

Scenario = Callable[[int | None, str], dict[str, Any]]
FEATURES, CLASSES = 5, 4
SCENARIOS: dict[str, Scenario] = {}
LOCAL: dict[str, Scenario] = {}
MOMENTS: dict[str, int] = {}
"""The number of moments of each scenario."""


def add(name: str, moments: int, scenario: Scenario, is_local: bool = False) -> None:
    (LOCAL if is_local else SCENARIOS)[name] = scenario
    MOMENTS[name] = moments


# --- what all have ----------------------------------------------------------------------------------------------------


def rows(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, the number of the sample in front; and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    numbers = torch.arange(samples, dtype=torch.float64).view(-1, 1) + 1000 * seed
    return torch.cat([numbers, x], 1), (torch.arange(samples) * 3 + seed) % CLASSES


class Network(nn.Module):
    """Leaves out the number of the sample."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout) if dropout else nn.Identity(),
            nn.Linear(8, CLASSES),
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, 1:])


class Watch(Callback):  # type: ignore[misc]
    """Asks to stop at a moment, on the last rank; keeps the numbers of the samples of each step, and the steps'."""

    def __init__(self, resume: Resume, cut: int | None) -> None:
        super().__init__()
        self.resume, self.cut = resume, cut
        self.moments = 0
        self.seen: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])

    def on_sample(self, state: Any) -> None:
        numbers = state[torchbearer.X][:, 0].tolist() if SHARE not in state or state[SHARE].local else []
        parts = [numbers]
        if get_world_size() > 1:
            parts = [[]] * get_world_size()
            dist.all_gather_object(parts, numbers)
        step = [float(state[torchbearer.EPOCH]), float(state[torchbearer.BATCH]), float(state[torchbearer.STEPS])]
        self.seen.append(step + [number for part in parts for number in part])

    def on_sample_validation(self, state: Any) -> None:
        self.on_sample(state)

    def on_step_training(self, state: Any) -> None:
        self._count()

    def on_step_validation(self, state: Any) -> None:
        self._count()

    def on_checkpoint(self, state: Any) -> None:
        self._count()

    def _count(self) -> None:
        self.moments += 1
        if self.moments == self.cut and get_rank() == get_world_size() - 1:
            self.resume.preemption.request("the test")


def make_trial(watch: Watch, model: nn.Module, optimizer: Any, callbacks: list[Any], **options: Any) -> Trial:
    options = {"batch_size": "global"} | options
    ddp = DDPCallback(**{name: value for name, value in options.items() if name not in ("metrics", "criterion")})
    made = Trial(
        model,
        optimizer,
        options.get("criterion", nn.CrossEntropyLoss()),
        metrics=options.get("metrics", ["acc", "loss"]),
        callbacks=[ddp, watch.resume, watch, *callbacks],
        verbose=0,
    ).to("cpu", torch.float64)
    torch.manual_seed(5)
    random.seed(5)
    return made


def outcome(trial: Trial, watch: Watch, history: Any, **more: Any) -> dict[str, Any]:
    state = trial.state[torchbearer.MODEL].state_dict()
    return {
        "history": [dict(epoch) for epoch in history],
        "parameters": {key: value.clone() for key, value in state.items()},
        "seen": list(watch.seen),
        "draw": [float(torch.rand(())), random.random()],
        **more,
    }


def without_running(result: dict[str, Any]) -> dict[str, Any]:
    """The result without what a progress bar shows, which each rank computes of its own samples."""
    history = [{k: v for k, v in epoch.items() if not k.startswith("running_")} for epoch in result["history"]]
    return result | {"history": history}


# --- metrics, weights of classes, validation --------------------------------------------------------------------------


def own_metrics() -> list[Any]:
    """New ones for each run: a running mean keeps its values."""

    @running_mean
    @std
    @mean
    @lambda_metric("square")
    def square(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = nn.functional.one_hot(target, CLASSES).to(prediction.dtype)
        return (prediction.softmax(1) - wanted).square().sum(1)

    @std
    @mean
    @lambda_metric("batch_error")
    def batch_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction.argmax(1) != target).double().mean()

    return [square, batch_error, to_dict(EpochLambda("in_order", in_order, running=True, step_size=2))]


def in_order(prediction: torch.Tensor, target: torch.Tensor) -> float:
    """Depends on the order of an epoch's samples."""
    places = torch.arange(1, len(target) + 1, dtype=prediction.dtype)
    return float((prediction[:, 0] * places).sum() + (target * places).sum())


def metrics(cut: int | None, path: str, dropout: float = 0.0) -> dict[str, Any]:
    watch = Watch(Resume(path), cut)
    model = Network(dropout)
    made = make_trial(
        watch,
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        [],
        criterion=nn.CrossEntropyLoss(torch.arange(1.0, CLASSES + 1, dtype=torch.float64)),
        metrics=["acc", "loss", *own_metrics()],
    )
    train = DataLoader(TensorDataset(*rows(45, 0)), 10, shuffle=True)
    made.with_generators(train, DataLoader(TensorDataset(*rows(17, 1)), 5, shuffle=True))
    return outcome(made, watch, made.run(3))


add("metrics", 3 * (5 + 4 + 1), metrics)
add("dropout", 3 * (5 + 4 + 1), functools.partial(metrics, dropout=0.3), is_local=True)


# --- workers, schedulers, early stopping ------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Adds noise that it draws while it loads."""

    def __init__(self, samples: int, noise: float) -> None:
        self.x, self.y = rows(samples, 0)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        noise = self.noise * torch.randn(FEATURES, dtype=torch.float64) if self.noise else torch.zeros(FEATURES)
        return self.x[index] + torch.cat([torch.zeros(1), noise]), self.y[index]


def workers(cut: int | None, path: str, noise: float = 0.0) -> dict[str, Any]:
    watch = Watch(Resume(path, every=4), cut)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.05)
    callbacks = [
        StepLR(3, 0.9, step_on_batch=True),
        TorchScheduler(plateau, monitor="val_loss"),
        EarlyStopping("val_loss", min_delta=0.02, patience=2),
    ]
    made = make_trial(watch, model, optimizer, callbacks)
    train = DataLoader(Augmented(26, noise), 8, shuffle=True, num_workers=1)
    made.with_generators(train, DataLoader(TensorDataset(*rows(12, 1)), 6))
    history = made.run(6)
    return outcome(made, watch, history, lr=[group["lr"] for group in optimizer.param_groups])


add("workers", 3 * (4 + 2 + 1), workers)  # then it stops
add("augmentation", 3 * (4 + 2 + 1), functools.partial(workers, noise=0.2), is_local=True)


# --- an own closure that accumulates, a weighted sampler --------------------------------------------------------------


class EveryThird(torch.optim.Adam):
    """Takes a step in every third call, from the gradients of three backwards."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        group = self.param_groups[0]
        closure()
        group["calls"] = group.get("calls", 0) + 1
        if group["calls"] % 3 == 0:
            super().step()
            self.zero_grad()


def accumulating(state: Any) -> None:
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.CALLBACK_LIST].on_forward(state)
    state[torchbearer.LOSS] = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    (state[torchbearer.LOSS] / 3).backward()
    state[torchbearer.CALLBACK_LIST].on_backward(state)


def accumulation(cut: int | None, path: str) -> dict[str, Any]:
    watch = Watch(Resume(path), cut)
    model = Network()
    made = make_trial(watch, model, EveryThird(model.parameters(), lr=0.05), []).with_closure(accumulating)
    generator = torch.Generator().manual_seed(11)
    sampler = WeightedRandomSampler(torch.arange(1.0, 31.0), 31, generator=generator)
    made.with_generators(DataLoader(TensorDataset(*rows(30, 0)), 4, sampler=sampler), None)
    return outcome(made, watch, made.run(3), generator=int(torch.randint(0, 1000, (), generator=generator)))


add("accumulation", 3 * (8 + 1), accumulation)


# --- an iterable data set, BatchNorm, clipping, files of the callbacks ------------------------------------------------


class Stream(IterableDataset[Any]):
    """Shuffles itself with Python's global generator."""

    def __init__(self, samples: int, seed: int) -> None:
        self.rows = list(TensorDataset(*rows(samples, seed)))

    def __iter__(self) -> Iterator[Any]:
        shuffled = list(self.rows)
        random.shuffle(shuffled)
        yield from shuffled

    def __len__(self) -> int:
        return len(self.rows)


def stream(cut: int | None, path: str) -> dict[str, Any]:
    watch = Watch(Resume(path, every=3, async_save=True), cut)
    model = Network(norm=True)
    files = [MostRecent(f"{path}.most-recent"), CSVLogger(f"{path}.csv", batch_granularity=False)]
    callbacks = [GradientNormClipping(0.1), *files]
    made = make_trial(watch, model, torch.optim.SGD(model.parameters(), lr=0.3), callbacks, sync_batchnorm=True)
    made.with_generators(DataLoader(Stream(27, 0), 8), DataLoader(Stream(10, 1), 4))
    history = made.run(3)
    saved = torch.load(f"{path}.most-recent", weights_only=False)
    return outcome(made, watch, history, csv=read_rows(f"{path}.csv"), kept=saved[torchbearer.MODEL])


def read_rows(path: str) -> list[list[float]]:
    with Path(path).open(newline="") as file:
        found = list(csv.DictReader(file))
    return [[float(value) for name, value in row.items() if not name.startswith("running_")] for row in found]


add("stream", 3 * (4 + 3 + 1), stream)


# --- local steps ------------------------------------------------------------------------------------------------------


def local_steps(cut: int | None, path: str, sync: Any) -> dict[str, Any]:
    watch = Watch(Resume(path, every=4), cut)
    model = Network(norm=True)
    made = make_trial(watch, model, torch.optim.Adam(model.parameters(), lr=0.05), [], sync=sync)
    train = DataLoader(TensorDataset(*rows(64, 0)), 8, shuffle=True)
    with warnings.catch_warnings():
        made.with_generators(train, DataLoader(TensorDataset(*rows(17, 1)), 6))
        return outcome(made, watch, made.run(3))


add("local_sgd", 3 * (8 + 3 + 1), functools.partial(local_steps, sync=LocalSGD(every=3)), is_local=True)
add("diloco", 3 * (8 + 3 + 1), functools.partial(local_steps, sync=DiLoCo(every=3)), is_local=True)
