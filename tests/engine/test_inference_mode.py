"""An evaluation in inference mode may be the first that needs the transport: training goes on with its memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shared_worlds import GLOO, TWO, World, by_rank
from torch import nn

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.local_sgd import DiLoCo, ParameterAverager

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
CPU = torch.device("cpu")
LONGER = 200  # numbers, more than a row has room for at first


@WORLD.on(TWO, GLOO)
def test_what_an_evaluation_in_inference_mode_has_made_serves_in_training() -> None:
    """Training can use tensors made in inference mode."""
    rank, way = dist.get_rank(), choose_all_reduce(dist.group.WORLD, [CPU])
    with torch.inference_mode():
        rows, memory = ScalarExchange(), way.allocate(10, torch.float64, CPU).fill_(rank + 1.0)
    for is_evaluation in (True, False, True, False):
        with torch.inference_mode(is_evaluation):
            for length in (1, LONGER) if is_evaluation else (LONGER, 1):
                assert rows.exchange([rank + 1.0] * length, "the loss") == [[1.0] * length, [2.0] * length]
            for tensor in (memory, torch.full((3,), rank + 1.0)):
                before = float(sum(by_rank(float(tensor[0]))))
                way.launch(tensor, "a sum").wait("a sum")
                assert tensor.tolist() == [before] * len(tensor)


def train_by_windows(inference: bool) -> list[float]:
    """A window is closed before an evaluation, and one in training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = ParameterAverager(model, DiLoCo(every=3), optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        averager.step()
        if step in (1, 6):
            with torch.inference_mode(inference):
                averager.outer_step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@WORLD
def test_diloco_closes_a_window_in_inference_mode_and_the_next_outside_on_two_ranks() -> None:
    assert train_by_windows(True) == train_by_windows(False)


def test_diloco_closes_a_window_in_inference_mode_and_the_next_outside_on_one_process() -> None:
    assert train_by_windows(True) == train_by_windows(False)
