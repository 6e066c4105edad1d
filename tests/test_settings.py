"""Settings that cannot work are errors before the first step, on every rank, with the same text."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from distributed import run_distributed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torchbearer import Trial

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.data.sharding import shard_loader
from ddp_callbacks.errors import ConfigurationError, DDPCallbacksError, MismatchError
from ddp_callbacks.torchbearer import AllReduceGradients, DDPCallback, ShardData

pytestmark = pytest.mark.shares_results()

WORLD = 3
ODD = 1  # the rank that differs


# --- bodies ---------------------------------------------------------------------------------------------------------


def rows(samples: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x[:, :1] * 2)


def make_trial(
    extra: list[Any],
    model: nn.Module | None = None,
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    samples: int = 20,
    metrics: tuple[str, ...] = ("loss",),
    sampler: Sampler[int] | None = None,
    **steps: int,
) -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double() if model is None else model
    trial = Trial(model, optimizer(model.parameters()), nn.MSELoss(), metrics=list(metrics), callbacks=extra, verbose=0)
    return trial.to("cpu", torch.float64).with_generators(DataLoader(rows(samples), 6, sampler=sampler), None, **steps)


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def frozen() -> nn.Module:
    model = sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.2}], lr=0.1)


class Urandom(Sampler[int]):
    """Draws from the operating system, so that no seed makes two processes draw the same."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int.from_bytes(os.urandom(4), "little") % 20

    def __len__(self) -> int:
        return 20


# What rank ODD has instead of the default; then what the message says of it.
DIFFERENCES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "parameter names": (
        lambda: {"model": nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 1)}).double()},
        ["parameter 0.weight: [3, 4] float64 on ranks 0, 2; (none) on rank 1"],
    ),
    "shapes": (
        lambda: {"model": sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()},
        [
            "parameter 0.weight: [3, 4] float64 on ranks 0, 2; [5, 4] float64 on rank 1",
            "parameter 0.bias: [3] float64 on ranks 0, 2; [5] float64 on rank 1",
            "parameter 1.weight: [1, 3] float64 on ranks 0, 2; [1, 5] float64 on rank 1",
        ],
    ),
    "number of layers": (
        lambda: {"model": sequential(nn.Linear(4, 3), nn.Linear(3, 1), nn.BatchNorm1d(1)).double()},
        ["parameter 2.weight: (none) on ranks 0, 2; [1] float64 on rank 1", "buffer 2.running_mean: (none)"],
    ),
    "frozen": (
        lambda: {"model": frozen()},
        ["parameter 0.bias: [3] float64 on ranks 0, 2; [3] float64 frozen on rank 1"],
    ),
    "optimizer class": (
        lambda: {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
        ["optimizer: SGD on ranks 0, 2; Adam on rank 1"],
    ),
    "learning rate": (
        lambda: {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3)},
        ["optimizer group 0: lr: 0.1 on ranks 0, 2; 0.3 on rank 1"],
    ),
    "optimizer groups": (
        lambda: {"optimizer": two_groups},
        [
            "optimizer group 0: number of parameters: 4 on ranks 0, 2; 1 on rank 1",
            "optimizer group 1: lr: (none) on ranks 0, 2; 0.2 on rank 1",
        ],
    ),
    "length of the loader": (
        lambda: {"samples": 30},
        ["train_data: batches: 4 on ranks 0, 2; 5 on rank 1", "train_data: steps: 4 on ranks 0, 2; 5 on rank 1"],
    ),
    "steps": (lambda: {"train_steps": 2}, ["train_data: steps: 4 on ranks 0, 2; 2 on rank 1"]),
}


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of the error."""
    try:
        action()
    except DDPCallbacksError as error:
        return type(error).__name__, str(error)
    return "", ""


def errors_of_differing_ranks() -> dict[str, tuple[str, str, int]]:
    """By difference: the error of ``run`` and the number of training steps that this rank made before."""
    torch.set_num_threads(1)
    results = {}
    for name, (changes, _) in DIFFERENCES.items():
        steps: list[int] = []
        counting = torchbearer.callbacks.on_sample(lambda _, steps=steps: steps.append(1))
        # A group for each: what one Trial reports in its group's store must not reach the next.
        group = dist.new_group()
        trial = make_trial(
            [DDPCallback(process_group=group), counting], **(changes() if dist.get_rank() == ODD else {})
        )
        results[name] = (*caught(lambda trial=trial: trial.run(1)), len(steps))
    return results


def errors_in_training() -> dict[str, tuple[str, str]]:
    torch.set_num_threads(1)
    odd = dist.get_rank() == ODD
    sampled = make_trial([DDPCallback(process_group=dist.new_group())], sampler=Urandom())
    metrics = make_trial(
        [DDPCallback(process_group=dist.new_group())], metrics=("loss", "mse", "lr") if odd else ("loss", "mse")
    )
    order = make_trial(
        [DDPCallback(process_group=dist.new_group())], metrics=("mse", "loss") if odd else ("loss", "mse")
    )
    closed = make_trial([DDPCallback(process_group=dist.new_group())]).with_closure(functional_closure)
    calls = make_trial([DDPCallback(process_group=dist.new_group())])
    return {
        "sampler": caught(lambda: sampled.run(1)),
        "metrics": caught(lambda: metrics.run(1)),
        "order of metrics": caught(lambda: order.run(1)),
        "closure": caught(lambda: closed.run(1)),
        "calls": caught(lambda: calls.evaluate(data_key=torchbearer.TRAIN_DATA) if odd else calls.run(1)),
    }


def functional_closure(state: Any) -> None:
    """Fills the gradients by hand: no backward accumulates anything, so no hook sees it."""
    model = state[torchbearer.MODEL]
    loss = nn.functional.mse_loss(model(state[torchbearer.X]), state[torchbearer.Y_TRUE])
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.grad = gradient
    state[torchbearer.Y_PRED], state[torchbearer.LOSS] = model(state[torchbearer.X]).detach(), loss.detach()


def backward_closure(state: Any) -> None:
    """A closure of the user's own, without Torchbearer's events."""
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.LOSS] = nn.functional.mse_loss(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
    state[torchbearer.LOSS].backward()


def trained_with_a_closure(extra: list[Any]) -> tuple[list[float], list[torch.Tensor]]:
    trial = make_trial(extra).with_closure(backward_closure)
    losses = [epoch["loss"] for epoch in trial.run(3)]
    return losses, [parameter.detach().clone() for parameter in trial.state[torchbearer.MODEL].parameters()]


def train_with_a_closure() -> tuple[list[float], list[torch.Tensor]]:
    torch.set_num_threads(1)
    return trained_with_a_closure([DDPCallback()])


def all_bodies() -> tuple[Any, Any, Any]:
    """In one spawn, since a start costs seconds."""
    return train_with_a_closure(), errors_of_differing_ranks(), errors_in_training()


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_ranks() -> list[tuple[Any, Any, Any]]:
    return run_distributed(all_bodies, WORLD)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_named_before_the_first_step(on_ranks: list[Any], name: str) -> None:
    results = [differences[name] for _, differences, _ in on_ranks]
    kind, text, _ = results[0]
    assert kind == "MismatchError"
    assert [result for result in results if result != (kind, text, 0)] == [], "same text on all ranks, no step made"
    for part in DIFFERENCES[name][1]:
        assert part in text, text
    assert "the ranks disagree about the Trial" in text and "Run the same script with the same arguments" in text


def test_the_text_of_a_difference_names_the_hosts(on_ranks: list[Any]) -> None:
    _, text, _ = on_ranks[0][1]["learning rate"]
    assert text.count(f"(host {os.uname().nodename}, pid ") == WORLD, text


def test_evaluate_where_others_run_is_an_error_at_once(on_ranks: list[Any]) -> None:
    results = [errors["calls"] for *_, errors in on_ranks]
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == "MismatchError" and "what is called: run on ranks 0, 2; evaluate on rank 1" in text, text


def test_a_sampler_that_draws_differently_is_named(on_ranks: list[Any]) -> None:
    results = [errors["sampler"] for *_, errors in on_ranks]
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == "MismatchError"
    assert "the ranks disagree about the batches that Urandom draws" in text, text
    assert "Urandom: checksum of the indices drawn so far: " in text
    assert "not from the clock, the process id or os.urandom" in text


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("metrics", ("loss, running_loss, mse, running_mse", "loss, running_loss, mse, running_mse, lr")),
        ("order of metrics", ("loss, running_loss, mse, running_mse", "mse, running_mse, loss, running_loss")),
    ],
)
def test_metrics_that_differ_are_listed_for_every_rank(on_ranks: list[Any], name: str, keys: tuple[str, str]) -> None:
    results = [errors[name] for *_, errors in on_ranks]
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == "MismatchError"
    for rank in range(WORLD):
        assert f"rank {rank}: {keys[rank == ODD]}\n" in text, text
    assert "Give every process the same metrics=[...], in the same order." in text


def test_a_closure_without_backward_is_named_with_a_parameter_and_the_remedy(on_ranks: list[Any]) -> None:
    for *_, errors in on_ranks:
        kind, text = errors["closure"]
        assert kind == "ConfigurationError"
        assert "the gradients of step 0 were not synchronized: 0.weight has a gradient" in text, text
        assert "must fill gradients by loss.backward(), not by torch.autograd.grad" in text


def test_a_closure_that_calls_backward_gives_the_numbers_of_one_process(on_ranks: list[Any]) -> None:
    losses, parameters = trained_with_a_closure([])
    for (rank_losses, rank_parameters), *_ in on_ranks:
        assert rank_losses == pytest.approx(losses, rel=1e-10, abs=0)
        for actual, expected in zip(rank_parameters, parameters, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)


def hook_of_one_argument(bucket: Any) -> Any:
    raise AssertionError


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"batch_size": "globl"}, ['"global"', '"per_process"', "got 'globl'"]),
    ({"batch_size": 64}, ['batch_size must be "global"', "got 64"]),
    ({"reduction": "average"}, ['reduction must be "mean", "sum" or None', "'average'"]),
    ({"reduction": "none"}, ['reduction must be "mean", "sum" or None', "'none'"]),
    ({"weight": 0.5}, ["weight must be a function of the Trial's state", "0.5"]),
    ({"bucket_cap_mb": 0}, ["bucket_cap_mb must be positive", "got 0"]),
    ({"bucket_cap_mb": -25}, ["bucket_cap_mb must be positive", "got -25"]),
    ({"bucket_cap_mb": float("nan")}, ["bucket_cap_mb must be positive", "got nan"]),
    ({"bucket_cap_mb": "25"}, ["bucket_cap_mb must be", "'25'"]),
    ({"comm_hook": "fp16"}, ["comm_hook must be callable as hook(state, bucket)", "'fp16'"]),
    ({"comm_hook": hook_of_one_argument}, ["hook(state, bucket)", "hook_of_one_argument has the signature (bucket"]),
]


@pytest.mark.parametrize(
    ("setting", "says"), BAD, ids=[f"{name}-{number}" for number, (setting, _) in enumerate(BAD) for name in setting]
)
def test_a_setting_that_cannot_be_is_refused_at_construction(setting: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError) as info:
        DDPCallback(**setting)
    assert isinstance(info.value, ConfigurationError)
    assert [part for part in says if part not in str(info.value)] == [], str(info.value)


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("ddp_zero_hook", "hook_with_zero_step", "ZeroRedundancyOptimizer"),
        ("optimizer_overlap_hooks", "_hook_then_optimizer", "runs the optimizer"),
        ("mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook", "use bf16_compress_hook instead"),
    ],
)
def test_torchs_hooks_that_need_ddp_are_refused_by_name(module: str, name: str, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        hook = getattr(importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}"), name)
    with pytest.raises(ConfigurationError) as info:
        DDPCallback(comm_hook=hook)
    assert f"{name} needs DistributedDataParallel" in str(info.value) and why in str(info.value)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def shard_without_order() -> str:
    with pytest.raises(ConfigurationError) as caught:
        shard_loader(DataLoader(Stream(), 4, num_workers=1, in_order=False))
    return str(caught.value)


def test_a_stream_from_workers_in_any_order_is_refused_with_the_setting() -> None:
    for message in run_distributed(shard_without_order, 2):
        assert message.startswith("DataLoader(in_order=False) must be in_order=True here")


def test_the_small_callbacks_refuse_the_same() -> None:
    with pytest.raises(ConfigurationError, match="globl"):
        ShardData("globl")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="bucket_cap_mb must be positive, got 0"):
        AllReduceGradients(bucket_cap_mb=0)
    with pytest.raises(ConfigurationError, match="bucket_cap_mb must be positive, got 0"):
        GradientSynchronizer(nn.Linear(1, 1), bucket_cap_mb=0)
    assert issubclass(MismatchError, ValueError)
