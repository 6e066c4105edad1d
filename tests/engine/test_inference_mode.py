"""An evaluation in inference mode may be the first that needs the transport: training goes on with its memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_distributed
from torch import nn

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.local_sgd import DiLoCo, ParameterAverager

CPU = torch.device("cpu")
LONGER = 200  # numbers, more than a row has room for at first


def evaluate_first(way: str) -> dict[str, Any]:
    """Each part of the transport is used in inference mode and then outside of it, or the other way round."""
    if way == "gloo":
        os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = "0"
    rank, found = dist.get_rank(), {}
    with torch.inference_mode():
        rows = ScalarExchange()
        found["rows"] = [rows.exchange([rank + 1.0], "the loss")]
    found["rows"].append(rows.exchange([rank + 2.0], "the loss"))
    with torch.inference_mode():
        rows.exchange([1.0] * LONGER, "a long row")
        found["long"] = [rows.exchange([rank + 3.0], "the loss")]
    found["long"].append(rows.exchange([rank + 4.0] * LONGER, "a long row"))
    way_to_sum = choose_all_reduce(dist.group.WORLD, [CPU])
    with torch.inference_mode():
        memory = way_to_sum.allocate(10, torch.float64, CPU).fill_(rank + 1.0)
        way_to_sum.launch(memory, "a sum").wait("a sum")
    way_to_sum.launch(memory, "a sum").wait("a sum")
    with torch.inference_mode():
        way_to_sum.launch(torch.ones(3), "a sum of another tensor").wait("a sum of another tensor")
    other = torch.ones(3)
    way_to_sum.launch(other, "a sum of another tensor").wait("a sum of another tensor")
    return {**found, "memory": memory.tolist(), "other": other.tolist()}


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_what_an_evaluation_in_inference_mode_has_made_serves_in_training(way: str) -> None:
    """Training can use tensors made in inference mode."""
    for found in run_distributed(evaluate_first, 2, way):
        assert found["rows"] == [[[1.0], [2.0]], [[2.0], [3.0]]]
        assert found["long"] == [[[3.0], [4.0]], [[4.0] * LONGER, [5.0] * LONGER]]
        assert found["memory"] == [6.0] * 10  # 1 + 2 = 3, and once more over two ranks
        assert found["other"] == [2.0] * 3


def train_by_windows(inference: bool) -> list[float]:
    """A window is closed before an evaluation, and one in training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = ParameterAverager(model, DiLoCo(every=3), optimizer)
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        averager.step()
        if step in (1, 6):
            with torch.inference_mode(inference):
                averager.outer_step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def train_by_both_windows() -> list[list[float]]:
    return [train_by_windows(inference) for inference in (True, False)]


def test_diloco_closes_a_window_in_inference_mode_and_the_next_outside_on_two_ranks() -> None:
    (first, expected), (second, _) = run_distributed(train_by_both_windows, 2)
    assert first == second == expected


def test_diloco_closes_a_window_in_inference_mode_and_the_next_outside_on_one_process() -> None:
    assert train_by_windows(True) == train_by_windows(False)
