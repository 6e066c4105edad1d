"""Settings that cannot work are errors before the first step, on every rank, with the same text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.ranks import HOSTNAME
from shared_worlds import TWO, WIDE, Bodies, in_ways
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchbearer import Trial
from ways import Way

from ddp_callbacks.errors import DDPCallbacksError
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()

WORLD = Bodies(__name__)
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


# What rank ODD has instead of the default, and what the message says of it.
DIFFERENCES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "parameter names": (
        lambda: {"model": nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 1)}).double()},
        ["parameter 0.weight: [3, 4] float64 on {others}; (none) on rank 1"],
    ),
    "shapes": (
        lambda: {"model": sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()},
        [
            "parameter 0.weight: [3, 4] float64 on {others}; [5, 4] float64 on rank 1",
            "parameter 0.bias: [3] float64 on {others}; [5] float64 on rank 1",
        ],
    ),
    "number of layers": (
        lambda: {"model": sequential(nn.Linear(4, 3), nn.Linear(3, 1), nn.BatchNorm1d(1)).double()},
        ["parameter 2.weight: (none) on {others}; [1] float64 on rank 1", "buffer 2.running_mean: (none)"],
    ),
    "frozen": (
        lambda: {"model": frozen()},
        ["parameter 0.bias: [3] float64 on {others}; [3] float64 frozen on rank 1"],
    ),
    "optimizer class": (
        lambda: {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
        ["optimizer: SGD on {others}; Adam on rank 1"],
    ),
    "learning rate": (
        lambda: {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3)},
        ["optimizer group 0: lr: 0.1 on {others}; 0.3 on rank 1", f"(host {HOSTNAME}, pid "],
    ),
    "optimizer groups": (
        lambda: {"optimizer": two_groups},
        [
            "optimizer group 0: number of parameters: 4 on {others}; 1 on rank 1",
            "optimizer group 1: lr: (none) on {others}; 0.2 on rank 1",
        ],
    ),
    "length of the loader": (
        lambda: {"samples": 30},
        ["train_data: batches: 4 on {others}; 5 on rank 1", "train_data: steps: 4 on {others}; 5 on rank 1"],
    ),
    "steps": (lambda: {"train_steps": 2}, ["train_data: steps: 4 on {others}; 2 on rank 1"]),
}
# By what the ranks do: the kind of error, and what it says.
IN_TRAINING: dict[str, tuple[str, list[str]]] = {
    "call": ("MismatchError", ["what is called: run on {others}; evaluate on rank 1"]),
    "sampler": (
        "MismatchError",
        [
            "the ranks disagree about the batches that Urandom draws",
            "Urandom: checksum of the indices drawn so far: ",
            "not from the clock, the process id or os.urandom",
        ],
    ),
    "metrics": (
        "MismatchError",
        [
            "rank 0: loss, running_loss, mse, running_mse\n",
            "rank 1: loss, running_loss, mse, running_mse, lr\n",
            "Give every process the same metrics=[...], in the same order.",
        ],
    ),
    "order of metrics": (
        "MismatchError",
        ["rank 0: loss, running_loss, mse, running_mse\n", "rank 1: mse, running_mse, loss, running_loss\n"],
    ),
    "closure": (
        "ConfigurationError",
        [
            "the gradients of step 0 were not synchronized: 0.weight has a gradient",
            "must fill gradients by loss.backward(), not by torch.autograd.grad",
        ],
    ),
}

Error = tuple[str, str]  # type and text


def caught(action: Callable[[], Any]) -> Error:
    try:
        action()
    except DDPCallbacksError as error:
        return type(error).__name__, str(error)
    return "", ""


def ours() -> DDPCallback:
    """In a group of its own: what one Trial reports in its group's store must not reach the next."""
    return DDPCallback(process_group=dist.new_group())


@WORLD.runs(TWO, WIDE)
def differ() -> dict[str, tuple[Error, int]]:
    """By difference: the error of ``run`` and the number of training steps that this rank made before."""
    results = {}
    for name, (changes, _) in DIFFERENCES.items():
        steps: list[int] = []
        counting = torchbearer.callbacks.on_sample(lambda _, steps=steps: steps.append(1))
        trial = make_trial([ours(), counting], **(changes() if dist.get_rank() == ODD else {}))
        results[name] = caught(lambda trial=trial: trial.run(1)), len(steps)
    return results


@WORLD.runs(TWO, WIDE)
def differ_in_training() -> dict[str, Error]:
    odd = dist.get_rank() == ODD
    calls = make_trial([ours()])
    trials = {
        "sampler": make_trial([ours()], sampler=Urandom()),
        "metrics": make_trial([ours()], metrics=("loss", "mse", "lr") if odd else ("loss", "mse")),
        "order of metrics": make_trial([ours()], metrics=("mse", "loss") if odd else ("loss", "mse")),
        "closure": make_trial([ours()]).with_closure(functional_closure),
    }
    return {name: caught(lambda trial=trial: trial.run(1)) for name, trial in trials.items()} | {
        "call": caught(lambda: calls.evaluate(data_key=torchbearer.TRAIN_DATA) if odd else calls.run(1))
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


@WORLD
def train_with_a_closure() -> tuple[list[float], list[torch.Tensor]]:
    return trained_with_a_closure([DDPCallback()])


# --- tests ------------------------------------------------------------------------------------------------------------


def assert_says(text: str, parts: list[str]) -> None:
    missing = [part for part in parts if part not in text]
    assert not missing, f"{text} does not say {missing}"


def others_of(way: Way) -> str:
    return "rank 0" if way.size == 2 else "ranks 0, 2"


@in_ways(TWO, WIDE)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_named_before_the_first_step(way: Way, name: str) -> None:
    """All hear of differing models, optimizers or data."""
    results = [results[name] for results in WORLD.returned(differ, way)]
    (kind, text), steps = results[0]
    assert kind == "MismatchError" and steps == 0
    assert all(result == results[0] for result in results), "the same text on all ranks"
    assert_says(text, [part.replace("{others}", others_of(way)) for part in DIFFERENCES[name][1]])
    assert_says(text, ["the ranks disagree about the Trial", "Run the same script with the same arguments"])


@in_ways(TWO, WIDE)
@pytest.mark.parametrize("name", IN_TRAINING)
def test_ranks_that_go_apart_in_training_are_told_the_difference(way: Way, name: str) -> None:
    """Differing samplers, metrics and calls raise an error everywhere."""
    first, *others = [results[name] for results in WORLD.returned(differ_in_training, way)]
    assert all(error == first for error in others) or name == "closure"
    for kind, text in (first, *others):
        assert kind == IN_TRAINING[name][0]
        assert_says(text, [part.replace("{others}", others_of(way)) for part in IN_TRAINING[name][1]])


def test_a_closure_that_calls_backward_gives_the_numbers_of_one_process() -> None:
    """A closure must call `backward`; then it is exact."""
    losses, parameters = trained_with_a_closure([])
    for found, trained in WORLD.returned(train_with_a_closure):
        assert found == pytest.approx(losses, rel=1e-10, abs=0)
        torch.testing.assert_close(trained, parameters, rtol=1e-10, atol=0)
