"""Gradients that are compressed between hosts."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from kit.ranks import live_on_hosts
from shared_worlds import TWO, WIDE, World, by_rank
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.errors import ConfigurationError, MismatchError

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
SAMPLES = (5, 2, 1)  # by rank
STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return net(torch.randn(SAMPLES[rank], 20, generator=generator)).square().mean()


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@functools.cache
def of_one_process(step: int) -> list[Tensor]:
    net, weights = model(), SAMPLES[: dist.get_world_size()]
    for rank, weight in enumerate(weights):
        (loss_of(net, rank, step) * weight / sum(weights)).backward()
    return gradients(net)


def synchronize(compress: Any, layout: tuple[int, ...] = (), known: bool = True, cut: int = -1) -> list[list[Tensor]]:
    """The gradients of each step. Before step ``cut`` a synchronizer goes on from the states of another."""
    group = dist.new_group()
    if layout:
        live_on_hosts(layout, group)
    net, rank = model(), dist.get_rank()
    seen, states = [], []
    for step in range(STEPS):
        if step in (0, cut):
            synchronizer = GradientSynchronizer(net, bucket_cap_mb=0.002, compress=compress, process_group=group)
            if states:
                synchronizer.load_state_dict(states)
        net.zero_grad()
        synchronizer.weigh(SAMPLES[rank], sum(SAMPLES[: dist.get_world_size()]) if known else None)
        loss_of(net, rank, step).backward()
        seen.append(gradients(net))
        if step == cut - 1:
            torch.save(synchronizer.state_dict(), file := io.BytesIO())
            states = by_rank(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            synchronizer.close()
    synchronizer.close()
    return seen


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Relative, over all gradients together."""
    difference = sum(float((one - two).square().sum()) for one, two in zip(actual, expected, strict=True))
    return float((difference / sum(float(one.square().sum()) for one in expected)) ** 0.5)


BOUNDS = {None: 1e-6, "fp16": 6e-4, "bf16": 5e-3}


@WORLD.on(TWO, WIDE)
def test_gradients_are_those_of_one_process_but_for_the_rounding() -> None:
    """`compress="bf16"` and `"fp16"` round between hosts only."""
    size = dist.get_world_size()
    for (compress, bound), known in itertools.product(BOUNDS.items(), (True, False)):
        for step, grads in enumerate(synchronize(compress, (size - 1, 1), known)):
            wrong = error(grads, of_one_process(step))
            assert wrong < bound and by_rank(wrong) == [wrong] * size
            assert compress is None or wrong > bound / 30  # it was rounded
    for step, grads in enumerate(synchronize("bf16")):
        assert error(grads, of_one_process(step)) < 1e-6  # nothing is sent on one host


@WORLD
def test_a_training_that_goes_on_from_the_engine_s_state_has_the_same_bits() -> None:
    """The engines' states resume with the same bits."""
    for compress, known in (("bf16", True), (None, False)):
        whole = synchronize(compress, (1, 1), known)
        assert_equal(synchronize(compress, (1, 1), known, cut=3), whole, 0.0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@WORLD
def test_ranks_that_compress_otherwise_are_refused() -> None:
    with pytest.raises(MismatchError, match="compress: None on rank 0; bf16 on rank 1"):
        GradientSynchronizer(model(), compress="bf16" if dist.get_rank() else None)


NO_COMPRESSION = r'compress must be "bf16", "fp16" or None, got .* powerSGD_hook as comm_hook'


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GradientSynchronizer(model(), compress="bf61"), NO_COMPRESSION),
        (lambda: GradientSynchronizer(model(), compress=torch.bfloat16), NO_COMPRESSION),
        (lambda: GradientSynchronizer(model(), compress=PowerSGDState), NO_COMPRESSION),
        (
            lambda: GradientSynchronizer(model(), compress="bf16", comm_hook=powerSGD_hook),
            "both define how gradients are sent",
        ),
    ],
)
def test_compression_that_cannot_be_is_named(make: Any, says: str) -> None:
    """The library names impossible compression."""
    with pytest.raises(ConfigurationError, match=says):
        make()
