"""What a Trainer logs on GPUs, without one: the host does not wait for them, and the values are those of CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from kit.made_up_gpu import CUDA, HostWaits, MadeUpGpu, put_on_gpu
from kit.once import once
from kit.ranks import run_distributed
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import Net, data, quiet, trainer

import ddp_callbacks.lightning  # noqa: F401
from ddp_callbacks.comm.device_scalars import DeviceExchange
from ddp_callbacks.lightning.history import History, Record

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

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
    device = property(lambda self: self.where)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleList([Metrics(), Metrics()])

    def put(self, where: torch.device) -> None:
        self.where = where
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
        values, metrics = self(batch[0]).detach(), self.metrics[int(self.training)]
        for name in ("sum", "max", "min"):
            self.log(name, getattr(values, name)(), on_step=True, on_epoch=True, reduce_fx=name)
        self.log("given", value - 1, on_step=True, on_epoch=True, batch_size=7)
        self.log("single", value.float(), on_step=True, on_epoch=True)
        self.log("integer", (batch[1] == 0).sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("of the host", torch.tensor(0.1 + batch_idx), on_step=True, on_epoch=True)
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
        self.gpu, self.open = gpu, ExitStack()
        self.values: list[dict[str, Tensor]] = []

    def look(self, trainer: pl.Trainer, batch_idx: int) -> None:
        self.values.append(dict(trainer.callback_metrics))
        if batch_idx == len(SIZES) - 1:
            self.open.close()
        elif batch_idx == WARM and self.gpu is not None:
            self.open.enter_context(self.gpu.forbid_waiting())

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.open.close()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, batch_idx)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.look(trainer, batch_idx)


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


class ReadsOnRankZero(pl.Callback):
    """As a progress bar, in hooks where what was sent has arrived, or may have."""

    def __init__(self) -> None:
        self.values: list[dict[str, Tensor]] = []

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.values.append(dict(trainer.callback_metrics))

    on_before_optimizer_step = on_before_backward


CASES: dict[str, tuple[Callable[[], LogsAll], bool, dict[str, Any]]] = {
    "all": (LogsAll, True, {}),
    "more later": (LogsMoreLater, True, {}),
    "behind the step": (LogsBehind, True, {}),
    "accumulated": (LogsAll, True, {"accumulate_grad_batches": 2}),
    "skipped": (Skips, True, {}),
    "read by one rank": (LogsAll, True, {"callbacks": [ReadsOnRankZero]}),
    "nan": (LogsNaN, True, {}),
    "different keys": (LogsElse, False, {}),
}
BESIDE_CPUS = ("all", "nan", "different keys")  # the others are compared with one process alone
ALIKE = [case for case in CASES if case not in ("nan", "different keys")]  # those depend on the rank


def train(case: str, on_gpu: bool, strategy: str = "ddp_callbacks") -> Any:
    """What is logged in each step and at the end, and the parameters; and where the values of a step are."""
    make, forbids, options = CASES[case]
    with made_up_gpu(on_gpu) as gpu:
        module, reads = make(), Reads(gpu if forbids else None)
        module.put(CUDA if on_gpu else torch.device("cpu"))
        others = [make_one() for make_one in options.get("callbacks", [])]
        defaults = {"max_epochs": 2, "log_every_n_steps": 10**6, "num_sanity_val_steps": 0, "logger": False}
        made = trainer(strategy, **defaults | options | {"callbacks": [reads, *others]})
        made.fit(module, batches(0), batches(9))
        steps = [*reads.values, *(found for each in others for found in each.values), dict(made.callback_metrics)]
        numbers = [{name: value.cpu().clone() for name, value in found.items()} for found in steps]
        parameters = [parameter.detach().cpu().clone() for parameter in module.parameters()]
        return numbers, parameters, {name: value.device for name, value in reads.values[5].items()}


def train_all(cases: list[str]) -> dict[str, Any]:
    with quiet():
        return {case: (train(case, False) if case in BESIDE_CPUS else None, train(case, True)) for case in cases}


def on_two() -> dict[str, Any]:
    found = {"exchange": exchange_between_gpus(), "trained": train_all(list(CASES))}
    return found | {"waits": train_where_collectives_wait()}  # which leaves a run in its middle


@once
def by_rank(world_size: int) -> list[dict[str, Any]]:
    if world_size == 2:
        return run_distributed(on_two, 2)
    return [{"trained": found} for found in run_distributed(train_all, world_size, list(BESIDE_CPUS))]


@once
def trained_alone(case: str) -> Any:
    with quiet():
        return train(case, False, "auto")


def exact(numbers: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Without what is logged in single precision."""
    single = ("single", "mean", "of the host")
    return [{name: value for name, value in found.items() if not name.startswith(single)} for found in numbers]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.night)])
@pytest.mark.parametrize("case", BESIDE_CPUS)
def test_what_is_logged_on_gpus_is_what_is_logged_on_cpus_and_no_step_waits(case: str, world_size: int) -> None:
    for found in by_rank(world_size):
        (on_cpu, parameters, _), (on_gpu, parameters_on_gpu, _) = found["trained"][case]
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(parameters_on_gpu, parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_logged_on_gpus_is_what_one_process_logs(case: str) -> None:
    """GPUs log one process's values, and no step waits."""
    numbers, parameters, _ = trained_alone(case)
    on_gpu, parameters_on_gpu, devices = by_rank(2)[0]["trained"][case][1]
    torch.testing.assert_close(exact(on_gpu), exact(numbers), rtol=0, atol=1e-10)
    torch.testing.assert_close(parameters_on_gpu, parameters, rtol=0, atol=1e-10)
    assert devices.pop("of the host") == devices.pop("of the host_step") == torch.device("cpu")
    assert len(devices) > 10 and set(devices.values()) == {CUDA}


# --- the tests can fail -----------------------------------------------------------------------------------------------


def train_where_collectives_wait() -> str:
    """As on a group that takes a GPU's tensors through the CPU: what is logged is read in each step."""
    with quiet(), pytest.raises(HostWaits) as caught, mock.patch.object(DeviceExchange, "takes", lambda *_: False):
        train("all", True)
    return str(caught.value)


def test_values_that_are_read_in_a_step_are_noticed() -> None:
    assert [found["waits"] for found in by_rank(2)] == ["tolist"] * 2


class LogsNumbers(LogsAll):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.log("number", 0.5)
        return self.log_all(batch, batch_idx)


def test_lightning_s_own_log_copies_a_python_number_to_the_gpu_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own log of Python numbers waits for GPUs."""
    monkeypatch.setitem(CASES, "numbers", (LogsNumbers, True, {}))
    with quiet(), pytest.raises(HostWaits, match="tensor") as caught:
        train("numbers", True, "auto")
    assert "__to_tensor" in [entry.name for entry in caught.traceback]


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("operation", ["mean", "sum", "max", "min"])
def test_an_epoch_of_many_batches_on_a_gpu_is_summed_up_without_a_wait(operation: str, given: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(600, generator=generator, dtype=torch.float64)
    values[7] = torch.nan  # of a padding batch
    sizes = torch.randint(1, 4, (600,), generator=generator).tolist()
    found = []
    for device in (torch.device("cpu"), CUDA):
        history = History(operation)
        with MadeUpGpu() as gpu:
            logged = values.to(device)
            with gpu.forbid_waiting():
                for batch, size in enumerate(sizes):
                    weight = 0.0 if batch == 7 else float(size)
                    record = Record(batch, weight, 9.0, 3.0, weight, given, not weight, logged[batch])
                    history.add(record)
            found.append(history.parts()[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert bool(found[0].isfinite().all())


def exchange_between_gpus() -> Any:
    rank, found = dist.get_rank(), []
    with MadeUpGpu() as gpu:
        exchange = DeviceExchange()
        exact = torch.tensor([2**53 - 1, -(2**52) - rank])
        half, flag = torch.tensor([0.1], dtype=torch.float16), torch.tensor(rank == 1)
        own = [part.to(CUDA) for part in (exact, half, flag, torch.tensor([[0.1 + rank, torch.inf]] * rank))]
        assert all(map(exchange.takes, own)) and not exchange.takes(exact)
        lengths = [4 + 2 * other for other in range(2)]
        first = exchange.send(own, "numbers")
        found.append((first.hold(lengths), first.arrive().shape, first.read()))
        exchange.note(lengths, "numbers")
        exchange.note([0, 1], "others")
        with gpu.forbid_waiting():
            second, empty = exchange.send(own, "numbers"), exchange.send([], "numbers")
            many = exchange.send([torch.ones(65, dtype=torch.float64, device=CUDA)], "numbers")
            others = exchange.send(own, "others")  # rank 0 has never had any
            arrived = [second.arrive(), empty.arrive(), many.arrive(), others.arrive()]
        holds = [second.hold(lengths), many.hold([65, 0]), others.hold(lengths), others.hold([0, 0])]
        found.append((holds, [tensor.cpu() for tensor in arrived], many.read()))
    return found


def test_vectors_travel_between_gpus_once_all_ranks_know_that_each_has_one() -> None:
    half = float(torch.tensor(0.1, dtype=torch.float16))
    for rank, (first, second) in enumerate(found["exchange"] for found in by_rank(2)):
        vectors = [
            [2.0**53 - 1, -(2.0**52) - other, half, float(other == 1)]
            + [float(torch.tensor(0.1 + other)), torch.inf] * other
            for other in range(2)
        ]
        assert first == (False, (2, 0), vectors[rank])
        holds, (arrived, empty, many, others), read = second
        assert holds == [True, False, False, True]
        assert arrived.tolist() == [vector + [0.0] * (64 - len(vector)) for vector in vectors]
        assert empty.tolist() == [[0.0] * 64] * 2
        assert many.tolist() == [[1.0] * 64] * 2 and read == [1.0] * 65
        assert others.shape == (2, 0)
