"""Scripts with a Trainer whose numbers depend on the number of processes: they draw for themselves, say.

On as many ranks a run that is cut and resumed has the bits of one that is not cut; both have a ``Resume``.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trainers import FEATURES, Net, Scenario, Shuffled, TwoSources, data, fail, fit, given, joined, loader, run_script
from ways import Way

from ddp_callbacks import DiLoCo, LocalSGD, get_rank, get_world_size

__all__ = ["APART", "SCENARIOS", "fail", "joined", "names", "run"]  # see ways.Table

SCENARIOS: dict[str, Scenario] = {}
APART: dict[str, Scenario] = {}


def apart(function: Scenario) -> Scenario:
    APART[function.__name__] = function
    return function


def names(way: Way) -> list[str]:
    return [*APART]


def run(name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
    return run_script(APART[name], way, folder, cut, way is not None)


class Random(Net):
    """Each process draws its own dropout, and its attributes collect what its steps return, and have a generator."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dropout = nn.Dropout(0.3)
        self.outputs: list[torch.Tensor] = []
        self.seen: dict[str, int] = {"samples": 0}
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.dropout(x + 0.1 * torch.randn(x.shape, generator=self.own, dtype=x.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach() * len(batch[1]))
        self.seen["samples"] += len(batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("outputs", torch.stack(self.outputs).sum(), sync_dist=True)
        self.log("seen", float(self.seen["samples"]), sync_dist=True)
        self.outputs.clear()


def random_fit(strategy: Any, train: Any = None, **options: Any) -> Any:
    module = Random(optimizer=lambda net: torch.optim.Adam(net.parameters(), 0.02))
    return fit(strategy, module, train or loader(40, 8, shuffle=True), loader(10, 5, 9), **options)


@apart
def dropout_and_attributes(strategy: Any) -> Any:
    return random_fit(strategy)


@apart
def streams_that_are_shuffled(strategy: Any) -> Any:
    """By the process that draws: of several streams, each process draws in its own order."""
    streams = {name: DataLoader(Shuffled(size), 4, drop_last=True) for name, size in (("a", 22), ("b", 13))}
    return fit(strategy, TwoSources(), streams, DataLoader(Shuffled(12), 5))


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(FEATURES, dtype=torch.float64), y


@apart
def workers_that_augment(strategy: Any) -> Any:
    train = DataLoader(Augmented(*data(24).tensors), 8, shuffle=True, num_workers=2)
    return random_fit(strategy, train, val_check_interval=2, callbacks=[EarlyStopping("val_loss", patience=3)])


@apart
def local_steps(strategy: Any) -> Any:
    return [random_fit(given(strategy, sync=sync), accumulate_grad_batches=2) for sync in (LocalSGD(3), DiLoCo(3))]


@apart
def compressed_gradients(strategy: Any) -> Any:
    return random_fit(given(strategy, compress="fp16"))


@apart
def batches_per_process(strategy: Any) -> Any:
    return random_fit(given(strategy, batch_size="per_process"), loader(48, 8, shuffle=True))


@apart
def samplers_that_the_user_divides(strategy: Any) -> Any:
    def divided(samples: int) -> Any:
        return loader(samples, 4, sampler=DistributedSampler(data(samples), get_world_size(), get_rank()))

    return fit(strategy, Random(), divided(32), divided(8), use_distributed_sampler=False)


class Single(Random):
    """In the precision of the Trainer; the data are in float64."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.float()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.layers[0].weight.dtype))


@apart
def low_precisions(strategy: Any) -> Any:
    scaled: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
    options: dict[str, Any] = {"max_epochs": 3}
    return [
        fit(strategy, Single(), loader(40, 8), plugins=[scaled], **options),
        scaled.scaler.get_scale(),
        fit(strategy, Single(), loader(40, 8), precision="bf16-true", **options),
    ]


class Spoiled(Random):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("nan") if float(batch[0][0, 0]) > 1.2 else 1.0)


@apart
def skipped_batches(strategy: Any) -> Any:
    """What is bad depends on the first row of a part, so a comparison with one process would tell."""
    return fit(given(strategy, skip_batch="any", verify=None), Spoiled(), loader(40, 8, shuffle=True))
