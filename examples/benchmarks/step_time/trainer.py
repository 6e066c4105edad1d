"""Time a Lightning training step under several strategies, interleaved in one run.

    ddprun --nproc-per-node 2 examples/benchmarks/step_time/trainer.py
    ddprun --nproc-per-node 2 examples/benchmarks/step_time/trainer.py --dropout

The models and the way of measuring are those of main.py; here a block is a ``Trainer.fit``, of which the steps are
timed after the first few. Every process computes a batch of the same size under each strategy, and the module logs its
loss, as modules do. With ``--dropout`` the models draw random numbers: as one process does, or each process its own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from main import WORKLOADS, Workload, quartiles
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.lightning import CallbackStrategy

Ways = dict[str, Callable[[], Any]]  # what makes each strategy

STRATEGIES: Ways = {
    "ddp": lambda: "ddp",
    "ddp_find_unused_parameters_true": lambda: "ddp_find_unused_parameters_true",
    "ddp_callbacks": lambda: CallbackStrategy(verify=None),
}
OF_DRAWS: Ways = {
    "each its own": lambda: CallbackStrategy(verify=None, randomness="by_process"),
    "as one process": lambda: CallbackStrategy(verify=None),
}
WARM_UP = 5  # steps that are not timed


class Encoder(nn.Module):
    """Two layers of a transformer, and a linear layer on the mean of their output."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def perceptron(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers[:-2])


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise([1, 16, 32, 64]):
        layers += [nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))


WITH_DROPOUT = [
    Workload("MLP, 80 k", lambda: perceptron(784, 100, 10), (784,), 32),
    Workload("MLP, 5.1 M", lambda: perceptron(784, 1600, 2400, 10), (784,), 32),
    Workload("transformer, two layers", Encoder, (32, 64), 16),
    Workload("convolutional", convolutional, (1, 16, 16), 32),
]


class Classifier(pl.LightningModule):
    """What a user writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class GradientNorm(pl.Callback):
    """A hook behind the step, as many people have one."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        norms = torch.stack([parameter.grad.norm() for parameter in pl_module.parameters()])
        pl_module.log("norm", norms.norm())


class Clock(pl.Callback):
    """Seconds per step, from the end of the warm-up to the last step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_UP:
            dist.barrier()
            self._start = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        dist.barrier()
        self.seconds = (time.perf_counter() - self._start) / (trainer.global_step - WARM_UP)


def time_block(strategy: Any, model: nn.Module, workload: Workload, steps: int, hooks: list[pl.Callback]) -> float:
    """Seconds per step."""
    world_size, steps = dist.get_world_size(), steps + WARM_UP
    # ddp_callbacks divides a batch among the processes, ddp gives each its own.
    divides = isinstance(strategy, CallbackStrategy)
    batch = workload.batch * (world_size if divides else 1)
    samples = workload.batch * world_size * 64
    data = TensorDataset(torch.randn(samples, *workload.sample), torch.randint(0, 10, (samples,)))
    clock = Clock()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        callbacks=[clock, *hooks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(copy.deepcopy(model)), DataLoader(data, batch, shuffle=True))
    return clock.seconds


def time_rounds(
    strategies: Ways, workload: Workload, rounds: int, block_seconds: float, hooks: list[pl.Callback]
) -> dict[str, list[float]]:
    """Seconds per step under each strategy, one entry per round."""
    torch.manual_seed(0)
    model, (baseline, *_) = workload.build(), strategies.values()
    count = torch.tensor(max(10, int(block_seconds / time_block(baseline(), model, workload, 20, hooks))))
    dist.broadcast(count, 0)
    times: dict[str, list[float]] = {name: [] for name in strategies}
    for index in range(rounds):
        names, turn = list(strategies), index % len(strategies)
        for name in names[turn:] + names[:turn]:
            times[name].append(time_block(strategies[name](), model, workload, int(count), hooks))
    return times


def table(model: str, times: dict[str, list[float]]) -> str:
    lines, baseline = [], next(iter(times.values()))
    for name, values in times.items():
        first, median, third = quartiles([own / base for own, base in zip(values, baseline, strict=True)])
        step = quartiles(values)[1] * 1e3
        lines.append(f"| {model} | {name} | {step:.2f} | **{median:.2f}** | {first:.2f} to {third:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="blocks per strategy (default 20)")
    parser.add_argument("--block-seconds", type=float, default=0.5, help="about how long a block takes (default 0.5)")
    parser.add_argument("--hook", action="store_true", help="log the norm of the gradients in a hook behind the step")
    parser.add_argument("--dropout", action="store_true", help="time models with dropout, instead of strategies")
    arguments = parser.parse_args()
    hooks: list[pl.Callback] = [GradientNorm()] if arguments.hook else []
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    env = join_process_group()
    if env.world_size == 1:
        parser.error("start it with ddprun or torchrun, on at least two processes")
    if env.rank == 0:
        print(
            "| model | strategy | median step, ms | ratio to the first, median | quartiles |\n|---|---|---|---|---|",
            flush=True,
        )
    strategies, workloads = (OF_DRAWS, WITH_DROPOUT) if arguments.dropout else (STRATEGIES, WORKLOADS)
    for workload in workloads:
        times = time_rounds(strategies, workload, arguments.rounds, arguments.block_seconds, hooks)
        if env.rank == 0:
            print(table(workload.name, times), flush=True)
    leave_process_group()


if __name__ == "__main__":
    main()
