"""What the engines must know to go on: with its states saved and loaded, a training has the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.once import once
from kit.ranks import live_on_hosts, run_distributed
from shared_worlds import World, by_rank
from torch import nn

from ddp_callbacks import DiLoCo, GradientSynchronizer, LocalSGD, ParameterAverager, PowerSGD
from ddp_callbacks.errors import ConfigurationError

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
STEPS, CUT = 9, 4
Bits = list[list[float]]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)


def samples(step: int) -> torch.Tensor:
    """A batch; their sizes differ, so that the last total is not the next one."""
    return torch.randn(7 - step % 3, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def parameters(model: nn.Module) -> Bits:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- gradients --------------------------------------------------------------------------------------------------------


def descend(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: GradientSynchronizer, step: int, way: str
) -> None:
    """A step on this rank's part of a batch; ``accumulation`` takes an optimizer's step in each third."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = samples(step).to(next(model.parameters()).dtype)
    part = whole[rank::world_size]
    if way != "never weighed":
        engine.weigh(len(part), None if way == "total unknown" else len(whole))
    loss = model(part).square().mean() / (3 if way == "accumulation" else 1)
    if way == "accumulation" and step % 3 < 2:
        with engine.no_sync():
            loss.backward()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


Parts = tuple[nn.Module, torch.optim.Optimizer, GradientSynchronizer]


def make(way: str, dtype: torch.dtype = torch.float32, saved: Any = None, states: Any = None) -> Parts:
    """What trains, perhaps as it was saved, with the engines' states of all ranks."""
    model = make_model(dtype)
    if way == "powersgd on two hosts":
        live_on_hosts((1, 1), group := dist.new_group())
        engine = GradientSynchronizer(model, compress=PowerSGD(rank=1, start=2), process_group=group)
    else:
        engine = GradientSynchronizer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch keeps the tensors
        engine.load_state_dict(states)
    return model, optimizer, engine


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, engine: GradientSynchronizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}


def train(way: str, cut: int) -> Bits:
    parts = make(way)
    for step in range(STEPS):
        if step == cut:
            saved = through_a_file(state_of(*parts))
            parts[2].close()
            parts = make(way, saved=saved, states=by_rank(saved["engine"]))
        descend(*parts, step, way)
    return parameters(parts[0])


@WORLD.each(["total known", "total unknown", "never weighed", "accumulation", "powersgd on two hosts"])
def test_a_training_that_goes_on_from_the_engine_s_state_has_the_same_bits(way: str) -> None:
    """The engines' states resume with the same bits."""
    assert train(way, CUT) == train(way, -1)


def save_in_accumulation() -> dict[str, Any]:
    parts = make("accumulation", torch.float64)
    for step in range(CUT):
        descend(*parts, step, "accumulation")
    return state_of(*parts)


def go_on_in_accumulation(saved: Mapping[str, Any], states: list[Any]) -> Bits:
    parts = make("accumulation", torch.float64, saved, states)
    for step in range(CUT, STEPS):
        descend(*parts, step, "accumulation")
    return parameters(parts[0])


@once
def saved_on(world_size: int) -> list[dict[str, Any]]:
    return on_ranks(save_in_accumulation, world_size)


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return [body(*args)] if world_size == 1 else run_distributed(body, world_size, *args)


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), (2, 1), pytest.param(2, 3, marks=pytest.mark.wide), pytest.param(3, 2, marks=pytest.mark.wide)],
)
def test_gradients_that_were_accumulated_on_any_number_of_ranks_go_on_on_any_other(before: int, after: int) -> None:
    """Accumulated gradients go on on any number of processes."""
    (alone,), saved = saved_on(1), saved_on(before)
    whole = go_on_in_accumulation(alone, [alone["engine"]])
    for bits in on_ranks(go_on_in_accumulation, after, saved[0], [state["engine"] for state in saved]):
        for got, expected in zip(bits, whole, strict=True):
            assert got == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_gradients_under_weights_without_a_total_are_refused_on_another_number_of_ranks() -> None:
    model = make_model()
    weighing = {"total": None}
    states = [{"gradients": {"0.weight": torch.ones(16, 6)}, "weighing": weighing}] * 2
    with pytest.raises(ConfigurationError, match=r"that 2 processes have accumulated .* Start 2, or give"):
        GradientSynchronizer(model).load_state_dict(states)


# --- local steps ------------------------------------------------------------------------------------------------------


def local_steps(sync: LocalSGD | DiLoCo, cut: int) -> Bits:
    """Adam's steps on each rank, with the state saved and loaded before step ``cut``."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    averager = ParameterAverager(model, sync, optimizer)
    for step in range(STEPS):
        if step == cut:
            state = through_a_file(averager.state_dict())
            averager.outer_step()  # as for a checkpoint that other numbers of ranks can read
            shared = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = make_model()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            model.load_state_dict(shared[0])
            optimizer.load_state_dict(shared[1])
            averager = ParameterAverager(model, sync, optimizer)
            averager.load_state_dict(state)
        optimizer.zero_grad()
        model(samples(step)[rank::2].float()).square().mean().backward()
        optimizer.step()
        averager.step(4 - rank)
    averager.outer_step()
    return parameters(model)


@WORLD
def test_a_window_of_local_steps_goes_on_with_the_same_bits() -> None:
    for sync in (LocalSGD(every=4), DiLoCo(every=3)):
        whole = local_steps(sync, -1)
        for cut in (2, 4, 5, 6):
            assert local_steps(sync, cut) == whole
