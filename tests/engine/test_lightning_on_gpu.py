"""What a Trainer logs on GPUs, without one: the host does not wait for them, and the values are those of CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from device_bodies import host_must_not_wait
from kit.made_up_gpu import CUDA, HostWaits, MadeUpGpu, put_on_gpu
from lightning.pytorch.utilities import move_data_to_device
from shared_worlds import World
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import Net, data, quiet, trainer

from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.replicas import checks as replica_checks

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results(), pytest.mark.wide]
WORLD = World(__name__, quiet)

SIZES = (8, 5, 1, 6, 2, 7, 1, 4, 8)  # of the batches; ranks without a sample compute a padding batch
WARM = 2  # batches at the begin of a pass in which the ranks find out what is logged
DEVICES = {"cpu": torch.device("cpu"), "made-up": CUDA, "cuda": CUDA}  # tests/cuda has the last one


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
    device = property(lambda self: self.where)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleList([Metrics(), Metrics()])

    def put(self, device: str) -> None:
        self.where = DEVICES[device]
        if device == "cuda":
            nn.Module.cuda(self)
        elif device == "made-up":
            put_on_gpu(self)
        for metric in self.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.to(self.where)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return move_data_to_device(batch, self.where)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.of_the_step = self.log_all(batch, batch_idx)
        if batch_idx >= WARM - 1:  # more, from the batch on that is allowed to wait
            values = {f"value {number}": number * self.of_the_step.detach() for number in range(40)}
            self.log_dict(values, on_step=True)
        return self.of_the_step

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("behind", self.of_the_step.detach() * 2, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all(batch, batch_idx)

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("of the step", value + 1, on_step=True, on_epoch=False)
        self.log("of the epoch", value + 2, on_step=False, on_epoch=True)
        values, metrics = self(batch[0]).detach(), self.metrics[int(self.training)]
        for name in ("sum", "max", "min"):
            self.log(name, getattr(values, name)(), on_step=True, on_epoch=True, reduce_fx=name)
        self.log("given", value - 1, on_step=True, on_epoch=True, batch_size=7 * len(batch[0]))
        self.log("single", value.float(), on_step=True, on_epoch=True)
        self.log("integer", (batch[1] == 0).sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("of the host", torch.tensor(0.1 + batch_idx), on_step=True, on_epoch=True)
        metrics.spread(values[:, 0])
        metrics.mean(values[:, 1])
        self.log("spread", metrics.spread, on_step=True, on_epoch=True)
        self.log("mean", metrics.mean, on_step=True, on_epoch=False)
        return loss


class Skips(LogsAll):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 4 else loss


class LogsNaN(LogsAll):
    """A rank without a sample has NaN."""

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        share = self.trainer.strategy._run.batches.share.local if dist.is_initialized() else 1
        self.log("nan", torch.zeros((), dtype=torch.float64, device=self.where) / float(bool(share)), on_step=True)
        return super().log_all(batch, batch_idx)


class LogsElse(LogsAll):
    """Rank 1 logs one value more, between the others."""

    def log_all(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx % 2:
            self.log("own", torch.full((), 2.0 + batch_idx, dtype=torch.float64, device=self.where), on_step=True)
        return super().log_all(batch, batch_idx)


class Reads(pl.Callback):
    """Keeps what epochs have logged; between the warm batches and the last one, nothing may wait.

    In the last one, the replicas are compared.

    On rank 0 it looks more often, as a progress bar does.
    """

    def __init__(self, without_waiting: Callable[[], AbstractContextManager[None]] | None) -> None:
        self.without_waiting, self.open = without_waiting, ExitStack()
        self.values: list[dict[str, Tensor]] = []

    def look(self, trainer: pl.Trainer, batch_idx: int) -> None:
        found = dict(trainer.callback_metrics)
        if batch_idx == 0:
            self.values.append(found)
        if batch_idx == len(SIZES) - 1:
            self.open.close()
        elif batch_idx == WARM and self.without_waiting is not None:
            self.open.enter_context(self.without_waiting())

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.open.close()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, batch_idx)
        if trainer.current_epoch == 0 and batch_idx == WARM + 2:
            self.devices = {name: value.device for name, value in trainer.callback_metrics.items()}

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            assert trainer.callback_metrics

    on_before_optimizer_step = on_before_backward

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.look(trainer, batch_idx)


def batches(seed: int) -> DataLoader[Any]:
    rows = iter(range(sum(SIZES)))
    return DataLoader(data(sum(SIZES), seed), batch_sampler=[[next(rows) for _ in range(size)] for size in SIZES])


@contextmanager
def computing_on(device: str) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """What forbids the host to wait."""
    if device != "made-up":
        yield partial(host_must_not_wait, device)
        return
    with MadeUpGpu() as gpu:
        yield gpu.forbid_waiting


CASES: dict[str, tuple[Callable[[], LogsAll], bool, dict[str, Any]]] = {
    "all": (LogsAll, True, {}),
    "accumulated": (LogsAll, True, {"accumulate_grad_batches": 2}),
    "skipped": (Skips, True, {}),
    "nan": (LogsNaN, True, {}),
    "different keys": (LogsElse, False, {}),
}
OURS = "ddp_callbacks"
BY_RANK = ("nan", "different keys")  # depend on the rank


def train(device: str, strategy: str, case: str) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """What is logged in each step and at the end, and the parameters."""
    make, forbids, options = CASES[case]
    last = mock.patch.multiple(replica_checks, FIRST=len(SIZES), steps_until_next=lambda *_: len(SIZES))
    with last, computing_on(device) as without_waiting:
        module, reads = make(), Reads(without_waiting if forbids else None)
        module.put(device)
        defaults = {"max_epochs": 2, "log_every_n_steps": 10**6, "num_sanity_val_steps": 0, "logger": False}
        defaults["accelerator"] = "gpu" if device == "cuda" else "cpu"
        ours: Any = CallbackStrategy(verify=None)  # the made-up GPU has no random state to put back
        made = trainer(ours if strategy == OURS else strategy, **defaults | options, callbacks=[reads])
        made.fit(module, batches(0), batches(9))
        if strategy != "auto":
            assert reads.devices.pop("of the host") == reads.devices.pop("of the host_step") == DEVICES["cpu"]
            assert len(reads.devices) > 10 and set(reads.devices.values()) == {DEVICES[device]}
        steps = [*reads.values, dict(made.callback_metrics)]
        numbers = [{name: value.cpu().clone() for name, value in found.items()} for found in steps]
        return numbers, [parameter.detach().cpu().clone() for parameter in module.parameters()]


for name in CASES:
    WORLD.add(f"made-up {name}", partial(train, "made-up", OURS, name))
for name in BY_RANK:
    WORLD.add(f"cpu {name}", partial(train, "cpu", OURS, name))


@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_RANK])
def test_what_is_logged_on_gpus_is_what_one_process_logs(case: str) -> None:
    """GPUs log one process's values, and no step waits."""
    with quiet():
        numbers, parameters = train("cpu", "auto", case)
    on_gpu, parameters_on_gpu = WORLD.results(f"made-up {case}")[0]
    torch.testing.assert_close(exact(on_gpu), exact(numbers), rtol=0, atol=1e-10)
    torch.testing.assert_close(parameters_on_gpu, parameters, rtol=0, atol=1e-10)


def exact(numbers: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Without what is logged in single precision."""
    single = ("single", "mean", "of the host")
    return [{name: value for name, value in found.items() if not name.startswith(single)} for found in numbers]


@pytest.mark.parametrize("case", BY_RANK)
def test_what_some_ranks_log_on_gpus_is_what_they_log_on_cpus(case: str) -> None:
    on_gpu, on_cpu = (WORLD.results(f"{device} {case}") for device in ("made-up", "cpu"))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-12, equal_nan=True)


class LogsNumbers(LogsAll):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.log("number", 0.5)
        return super().training_step(batch, batch_idx)


def test_lightning_s_own_log_copies_a_python_number_to_the_gpu_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own log of Python numbers waits for GPUs."""
    monkeypatch.setitem(CASES, "numbers", (LogsNumbers, True, {}))
    with quiet(), pytest.raises(HostWaits, match="tensor"):
        train("made-up", "auto", "numbers")
