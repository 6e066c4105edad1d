"""What ranks do with Trainers and Trials, on CPUs and on GPUs alike.

Each body returns by name what must not depend on the number of processes; tests compare it with one process, without
the library.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import trainers
from device_bodies import assert_near
from lightning.pytorch.plugins import MixedPrecision
from trainers import Net, fit, loader, quiet, trainer
from ways import Way, run_each

from ddp_callbacks.errors import NonFiniteLossWarning, PeerError

OURS, PLAIN = "ddp_callbacks", "auto"

# Of the tables: what has or keeps something on its device, and whose own code knows no device.
NAMES = {
    "trainers": (
        "plain",
        "accumulate_ragged",
        "clip_by_norm",
        "checkpoints",
        "every_function_of_the_trainer",
        "logs",
        "synchronized_batchnorm",
        "means_over_what_counts",
        "gan",
    ),
    "trials": ("shuffled_ragged_adam", "clipping_and_decay", "sum_reduction", "synchronized_batch_norm", "resumed"),
}
# How near one process, of the largest parameter.
PRECISIONS = {"64-true": 1e-10, "32-true": 1e-4, "bf16-true": 0.1, "bf16-mixed": 0.1, "16-mixed": 0.02}
FIRST_SCALE = 1024.0  # of the losses in 16-mixed


def compute_on(device: str) -> None:
    trainers.ACCELERATOR = "cpu" if device == "cpu" else "gpu"


def run_scenarios(device: str, strategy: str, table: str) -> dict[str, Any]:
    compute_on(device)
    module: Any = importlib.import_module(table)
    module.DEVICE = device
    found = run_each(table, Way() if strategy == OURS else None, NAMES[table])
    return {name: result for name, (result, _) in found.items()}


class Single(Net):
    """In the precision of the Trainer; the data are in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype))


class Overflows(Single):
    """In the third batch the loss of one rank is infinite, and in one process that of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_hit = batch_idx == 2 and self.global_rank == self.trainer.world_size - 1
        return self.loss(batch) * (float("inf") if is_hit else 1.0)


def precisions(device: str, strategy: str) -> dict[str, Any]:
    """The parameters after two epochs, and the scale of the losses; in 16-mixed a loss overflows in each."""
    compute_on(device)
    found: dict[str, Any] = {}
    with quiet():
        warnings.filterwarnings("ignore", category=NonFiniteLossWarning)
        for name in PRECISIONS:
            scaler, module = torch.amp.GradScaler(device, init_scale=FIRST_SCALE), Single()
            options: dict[str, Any] = {"precision": name}
            if name == "16-mixed":
                options, module = {"plugins": MixedPrecision(name, device, scaler)}, Overflows()
            made = trainer(strategy, logger=False, **options)
            made.fit(module, loader(29, 8))
            parameters = [parameter.detach().double() for parameter in module.parameters()]
            found[name] = module.layers[0].weight.dtype, made.global_step, scaler.get_scale(), parameters
    return found


def assert_near_one_process(two: list[Any], one: Any, name: str) -> None:
    """Results of :func:`precisions`."""
    for found in two:
        assert found[name][:-1] == one[name][:-1]
        assert_near(found[name][-1], one[name][-1], "parameters", PRECISIONS[name])
        assert all(map(torch.equal, found[name][-1], two[0][name][-1])), "the ranks differ"


class Unlucky(Net):
    """In its second batch the second rank raises."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("sensor 7 gave nothing")
        return super().training_step(batch, batch_idx)


def runs_after_failures(device: str, strategy: str) -> dict[str, Any]:
    """A script that catches what ends its first run, twice, and trains again."""
    compute_on(device)
    found: dict[str, Any] = {}
    with quiet():
        for turn in ("first", "second"):
            try:
                fit(strategy, Unlucky())
            except (ValueError, PeerError) as error:
                assert "sensor 7 gave nothing" in str(error)
            found[turn] = fit(strategy)
    return found
