"""What a Trainer logs on GPUs, without one: the host does not wait for them, and the values are those of CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from distributed import run_distributed
from lightning.pytorch.utilities import move_data_to_device
from lightning_scenarios import Net, data, quiet, trainer
from made_up_gpu import CUDA, MadeUpGpu, put_on_gpu
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ddp_callbacks.lightning  # noqa: F401

SIZES = (8, 5, 1, 6, 2, 7, 1, 4, 8)  # of the batches; ranks without a sample compute a padding batch
WARM = 2  # batches at the begin of a pass in which the ranks find out what is logged


class Spread(torchmetrics.Metric):
    """Has states of each kind: sums of integers and floats, an extreme, and a list of what it has seen."""

    total: Tensor
    count: Tensor
    highest: Tensor
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(3, dtype=torch.float64), "sum")
        self.add_state("count", torch.tensor(0), "sum")
        self.add_state("highest", torch.tensor(-math.inf, dtype=torch.float64), "max")
        self.add_state("seen", [], "cat")

    def update(self, values: Tensor) -> None:
        self.total = self.total + torch.stack([values.sum(), values.square().sum(), values.abs().sum()])
        self.count = self.count + values.numel()
        self.highest = torch.maximum(self.highest, values.max())
        self.seen.append(values)

    def compute(self) -> Tensor:
        seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        return (self.total / self.count).sum() + self.highest + seen.sort().values[0]


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spread, self.mean = Spread(), torchmetrics.MeanMetric(nan_strategy="disable")


class LogsAll(Net):
    """Logs in every way, and stays where it is when Lightning moves it to its own device, the CPU."""

    where: torch.device

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleList([Metrics(), Metrics()])

    def put(self, where: torch.device) -> None:
        self.where = self._device = where
        if where == CUDA:
            put_on_gpu(self)
        for metric in self.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.to(where)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return move_data_to_device(batch, self.where)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.log_all(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, batch_idx)

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("of the step", value + 1, on_step=True, on_epoch=False)
        self.log("of the epoch", value + 2, on_step=False, on_epoch=True)
        for name in ("sum", "max", "min"):
            self.log(name, value * 3, on_step=True, on_epoch=True, reduce_fx=name)
        self.log("given", value - 1, on_step=True, on_epoch=True, batch_size=7)
        self.log("single", value.float(), on_step=True, on_epoch=True)
        self.log("integer", (batch[1] == 0).sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("of the host", torch.tensor(0.1 + batch_idx), on_step=True, on_epoch=True)
        values, metrics = self(batch[0]).detach(), self.metrics[int(self.training)]
        metrics.spread(values[:, 0])
        metrics.mean(values[:, 1])
        self.log("spread", metrics.spread, on_step=True, on_epoch=True)
        self.log("mean", metrics.mean, on_step=True, on_epoch=False)
        return loss


class LogsMoreLater(LogsAll):
    """From the batch on that is allowed to wait."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.log_all(batch, batch_idx)
        if batch_idx >= WARM - 1:
            self.log_dict({f"value {number}": number * loss.detach() for number in range(40)}, on_step=True)
        return loss


class LogsBehind(LogsAll):
    """A hook logs behind the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("behind", outputs["loss"] * 2, on_step=True, on_epoch=True)


class Skips(LogsAll):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.log_all(batch, batch_idx)
        return None if batch_idx == 4 else loss


class LogsNaN(LogsAll):
    """A rank without a sample has NaN."""

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        share = self.trainer.strategy._run.batches.share.local if dist.is_initialized() else 1
        self.log("nan", torch.zeros((), dtype=torch.float64, device=self.where) / float(bool(share)), on_step=True)
        return super().log_all(batch, batch_idx)


class LogsElse(LogsAll):
    """Rank 1 logs one value more, between the others: in these steps the ranks read what they have logged."""

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx % 2:
            self.log("own", torch.full((), 2.0 + batch_idx, dtype=torch.float64, device=self.where), on_step=True)
        return super().log_all(batch, batch_idx)


class Reads(pl.Callback):
    """Keeps what is logged, without reading it; between the warm batches and the last one, nothing may wait."""

    def __init__(self, gpu: MadeUpGpu | None) -> None:
        self.gpu, self.values, self.open = gpu, [], ExitStack()  # type: ignore[var-annotated]

    def look(self, trainer: pl.Trainer, batch_idx: int) -> None:
        self.values.append(dict(trainer.callback_metrics))
        if batch_idx == len(SIZES) - 1:
            self.open.close()
        elif batch_idx == WARM and self.gpu is not None:
            self.open.enter_context(self.gpu.forbid_waiting())

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, batch_idx)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.look(trainer, batch_idx)

    def numbers(self) -> list[dict[str, Tensor]]:
        return [{name: value.cpu().clone() for name, value in found.items()} for found in self.values]


def batches(seed: int) -> DataLoader[Any]:
    rows = iter(range(sum(SIZES)))
    return DataLoader(data(sum(SIZES), seed), batch_sampler=[[next(rows) for _ in range(size)] for size in SIZES])


@contextmanager
def made_up_gpu(is_needed: bool) -> Iterator[MadeUpGpu | None]:
    if not is_needed:
        yield None
        return
    with MadeUpGpu() as gpu:
        yield gpu


CASES: dict[str, tuple[Callable[[], LogsAll], bool, dict[str, Any]]] = {
    "all": (LogsAll, True, {}),
    "more later": (LogsMoreLater, True, {}),
    "behind the step": (LogsBehind, True, {}),
    "accumulated": (LogsAll, True, {"accumulate_grad_batches": 2}),
    "skipped": (Skips, True, {}),
    "nan": (LogsNaN, True, {}),
    "different keys": (LogsElse, False, {}),
}


def train(case: str, on_gpu: bool, strategy: str = "ddp_callbacks") -> Any:
    make, forbids, options = CASES[case]
    with quiet(), made_up_gpu(on_gpu) as gpu:
        module = make()
        module.put(CUDA if on_gpu else torch.device("cpu"))
        reads = Reads(gpu if forbids else None)
        defaults = {"max_epochs": 2, "log_every_n_steps": 10**6, "num_sanity_val_steps": 0, "logger": False}
        made = trainer(strategy, callbacks=[reads], **defaults | options)
        made.fit(module, batches(0), batches(9))
        final = {name: value.cpu().clone() for name, value in made.callback_metrics.items()}
        parameters = [parameter.detach().cpu().clone() for parameter in module.parameters()]
        devices = {name: value.device for name, value in reads.values[5].items()}
        return reads.numbers(), final, parameters, devices


def train_both(case: str) -> Any:
    return train(case, False)[:3], train(case, True)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_what_is_logged_on_gpus_is_what_is_logged_on_cpus_and_no_step_waits(case: str, world_size: int) -> None:
    for on_cpu, (*on_gpu, devices) in run_distributed(train_both, world_size, case):
        torch.testing.assert_close(tuple(on_gpu), on_cpu, rtol=0, atol=1e-12, equal_nan=True)
        assert devices.pop("of the host") == devices.pop("of the host_step") == torch.device("cpu")
        assert len(devices) > 10 and set(devices.values()) == {CUDA}
