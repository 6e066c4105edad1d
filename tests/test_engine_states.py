"""What the engines must know to go on: with its states saved and loaded, a training has the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import nn
from two_hosts import live_on_hosts

from ddp_callbacks import DiLoCo, GradientSynchronizer, LocalSGD, ParameterAverager, PowerSGD
from ddp_callbacks.errors import ConfigurationError

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


def make(way: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, GradientSynchronizer]:
    model = make_model(dtype)
    if way == "powersgd on two hosts":
        live_on_hosts((1, dist.get_world_size() - 1), dist.group.WORLD)
    options = {"compress": PowerSGD(rank=1, start=2)} if way == "powersgd on two hosts" else {}
    engine = GradientSynchronizer(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), engine


def train_whole(way: str) -> Bits:
    model, optimizer, engine = make(way)
    for step in range(STEPS):
        descend(model, optimizer, engine, step, way)
    return parameters(model)


def train_cut(way: str) -> Bits:
    model, optimizer, engine = make(way)
    for step in range(CUT):
        descend(model, optimizer, engine, step, way)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, through_a_file(engine.state_dict()))
    engine.close()
    model, optimizer, engine = make(way)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    engine.load_state_dict(states)
    for step in range(CUT, STEPS):
        descend(model, optimizer, engine, step, way)
    return parameters(model)


WAYS = ("total known", "total unknown", "never weighed", "accumulation", "powersgd on two hosts")


def train_both(way: str) -> tuple[Bits, Bits]:
    return train_whole(way), train_cut(way)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_goes_on_from_the_engine_s_state_has_the_same_bits(way: str) -> None:
    for whole, cut in run_distributed(train_both, 3, way):
        assert whole == cut


def save_in_accumulation() -> dict[str, Any]:
    model, optimizer, engine = make("accumulation", torch.float64)
    for step in range(CUT):
        descend(model, optimizer, engine, step, "accumulation")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine.state_dict()}


def go_on_in_accumulation(saved: Mapping[str, Any], states: list[Any]) -> Bits:
    model, optimizer, engine = make("accumulation", torch.float64)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch keeps the tensors
    engine.load_state_dict(states)
    for step in range(CUT, STEPS):
        descend(model, optimizer, engine, step, "accumulation")
    return parameters(model)


def on_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return [body(*args)] if world_size == 1 else run_distributed(body, world_size, *args)


def test_gradients_that_were_accumulated_on_any_number_of_ranks_go_on_on_any_other() -> None:
    saved = {size: on_ranks(save_in_accumulation, size) for size in (1, 2, 3)}
    whole = go_on_in_accumulation(saved[1][0], [saved[1][0]["engine"]])
    for before, after in ((1, 2), (2, 3), (3, 1), (3, 2)):
        states = [state["engine"] for state in saved[before]]
        for bits in on_ranks(go_on_in_accumulation, after, saved[before][0], states):
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


def train_local() -> list[list[Bits]]:
    ways = (LocalSGD(every=4), DiLoCo(every=3))
    return [[local_steps(sync, cut) for cut in (-1, 2, 4, 5, 6)] for sync in ways]


def test_a_window_of_local_steps_goes_on_with_the_same_bits() -> None:
    for of_ways in run_distributed(train_local, 2):
        for whole, *cuts in of_ways:
            assert all(cut == whole for cut in cuts)
