"""Ranks whose Trials differ are told the difference: before the first step, or where they go apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.ranks import HOSTNAME
from shared_worlds import TWO, WIDE, World, by_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from ddp_callbacks.errors import DDPCallbacksError
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()

WORLD = World(__name__)
ODD = 1  # the rank that differs


def layers(outer: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, outer), nn.Linear(outer, 1)).double()


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def make_trial(
    extra: list[Any],
    model: Callable[[], nn.Module] = layers,
    optimizer: Callable[[Any], Any] = sgd,
    samples: int = 20,
    metrics: tuple[str, ...] = ("loss", "mse"),
    **steps: int,
) -> Trial:
    made = model()
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :1] * 2), 6)
    trial = Trial(
        made,
        optimizer(made.parameters()),
        nn.MSELoss(),
        metrics=list(metrics),
        callbacks=[*extra, DDPCallback()],
        verbose=0,
    )
    return trial.to("cpu", torch.float64).with_generators(loader, None, **steps)


def frozen() -> nn.Module:
    model: Any = layers()
    model[0].bias.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def functional_closure(state: Any) -> None:
    """Fills the gradients by hand: no backward accumulates anything, so no hook sees it."""
    model = state[torchbearer.MODEL]
    loss = nn.functional.mse_loss(model(state[torchbearer.X]), state[torchbearer.Y_TRUE])
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.grad = gradient
    state[torchbearer.Y_PRED], state[torchbearer.LOSS] = model(state[torchbearer.X]).detach(), loss.detach()


@torchbearer.callbacks.on_step_training  # type: ignore[untyped-decorator]
def evaluate_in_step(state: Any) -> None:
    state[torchbearer.SELF].evaluate(data_key=torchbearer.TRAIN_DATA)


# What rank ODD has instead of the default, and what the message says of it.
BEFORE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "parameter names": (
        {"model": lambda: nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(3, 1)}).double()},
        ["parameter 0.weight: [3, 4] float64 on {others}; (none) on rank 1"],
    ),
    "shapes": (
        {"model": lambda: layers(5)},
        [
            "parameter 0.weight: [3, 4] float64 on {others}; [5, 4] float64 on rank 1",
            "parameter 0.bias: [3] float64 on {others}; [5] float64 on rank 1",
        ],
    ),
    "frozen": ({"model": frozen}, ["parameter 0.bias: [3] float64 on {others}; [3] float64 frozen on rank 1"]),
    "optimizer class": ({"optimizer": torch.optim.Adam}, ["optimizer: SGD on {others}; Adam on rank 1"]),
    "learning rate": (
        {"optimizer": lambda parameters: sgd(parameters, 0.3)},
        ["optimizer group 0: lr: 0.1 on {others}; 0.3 on rank 1", f"(host {HOSTNAME}, pid "],
    ),
    "length of the loader": (
        {"samples": 30},
        ["train_data: batches: 4 on {others}; 5 on rank 1", "train_data: steps: 4 on {others}; 5 on rank 1"],
    ),
}
LOGGED = "rank 0: loss, running_loss, mse, running_mse\n"
# By what the ranks do: what the message says.
IN_TRAINING: dict[str, list[str]] = {
    "call": ["what is called: run on {others}; evaluate on rank 1"],
    "metrics": [
        LOGGED,
        "rank 1: loss, running_loss, mse, running_mse, lr\n",
        "Give every process the same metrics=[...], in the same order.",
    ],
    "order of metrics": [LOGGED, "rank 1: mse, running_mse, loss, running_loss\n"],
    "memory layout": [
        "the ranks disagree about how gradients are synchronized",
        "parameter 0.weight in memory: (none) on {others}; strides [1, 3] on rank 1",
    ],
    "closure": [
        "the gradients of step 0 were not synchronized: 0.weight has a gradient",
        "must fill gradients by loss.backward(), not by torch.autograd.grad",
    ],
    "evaluation in a step": [
        "the Trial was evaluated, or has predicted, in the middle of a training pass",
        "Call evaluate() and predict() between passes: in on_end_epoch for example.",
    ],
}


def raised_by(action: Callable[[], Any]) -> list[tuple[str, str]]:
    """Type and text, by rank."""
    error = "", ""
    try:
        action()
    except DDPCallbacksError as caught:
        error = type(caught).__name__, str(caught)
    return by_rank(error)


def assert_says(text: str, *parts: str) -> None:
    others = "rank 0" if dist.get_world_size() == 2 else "ranks 0, 2"
    missing = [part for part in parts if part.replace("{others}", others) not in text]
    assert not missing, f"{text} does not say {missing}"


@WORLD.each(BEFORE, TWO, WIDE)
def test_ranks_that_differ_are_named_before_the_first_step(name: str) -> None:
    """All hear of differing models, optimizers or data."""
    changes, says = BEFORE[name]
    steps: list[int] = []
    counting = torchbearer.callbacks.on_sample(lambda _: steps.append(1))
    trial = make_trial([counting], **(changes if dist.get_rank() == ODD else {}))
    errors = raised_by(lambda: trial.run(1))
    kind, text = errors[0]
    assert kind == "MismatchError" and not steps
    assert len(set(errors)) == 1, "the same text on all ranks"
    assert_says(text, "the ranks disagree about the Trial", "Run the same script with the same arguments", *says)


@WORLD.each(IN_TRAINING, TWO, WIDE)
def test_ranks_that_go_apart_in_training_are_told_the_difference(name: str) -> None:
    """Differing metrics and calls raise everywhere; so does a closure without `backward`."""
    odd, is_refused = dist.get_rank() == ODD, name in ("closure", "evaluation in a step")
    metrics = {"metrics": ("loss", "mse", "lr"), "order of metrics": ("mse", "loss")}.get(name) if odd else None
    extra = [evaluate_in_step] if name == "evaluation in a step" else []
    trial = make_trial(extra, metrics=metrics or ("loss", "mse"))
    if name == "closure":
        trial.with_closure(functional_closure)
    if name == "memory layout" and odd:
        weight = trial.state[torchbearer.MODEL][0].weight
        weight.data = weight.data.t().contiguous().t()
    evaluates = odd and name == "call"
    errors = raised_by(lambda: trial.evaluate(data_key=torchbearer.TRAIN_DATA) if evaluates else trial.run(1))
    assert len(set(errors)) == 1 or is_refused, "the same text on all ranks"
    for kind, text in errors:
        assert kind == ("ConfigurationError" if is_refused else "MismatchError")
        assert_says(text, *IN_TRAINING[name])
