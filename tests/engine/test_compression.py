"""Gradients that are compressed between hosts, and the two-level sum under DistributedDataParallel."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import live_on_hosts
from shared_worlds import TWO, WIDE, World, by_rank
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_callbacks import GradientSynchronizer, PowerSGD, hierarchical_allreduce_hook
from ddp_callbacks.comm import ddp_hook
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
def of_one_process(weights: tuple[int, ...], step: int) -> list[Tensor]:
    net = model()
    for rank, weight in enumerate(weights):
        (loss_of(net, rank, step) * weight / sum(weights)).backward()
    return gradients(net)


def of_whole_batch(size: int, step: int) -> list[Tensor]:
    return of_one_process(SAMPLES[:size], step)


def synchronize(compress: Any, layout: tuple[int, ...] = (), known: bool = True) -> list[list[Tensor]]:
    """The gradients of each step."""
    group = dist.new_group()
    if layout:
        live_on_hosts(layout, group)
    net, rank = model(), dist.get_rank()
    synchronizer = GradientSynchronizer(net, bucket_cap_mb=0.002, compress=compress, process_group=group)
    seen = []
    for step in range(STEPS):
        net.zero_grad()
        synchronizer.weigh(SAMPLES[rank], sum(SAMPLES[: dist.get_world_size()]) if known else None)
        loss_of(net, rank, step).backward()
        seen.append(gradients(net))
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
            wrong = error(grads, of_whole_batch(size, step))
            assert wrong < bound and by_rank(wrong) == [wrong] * size
            assert compress is None or wrong > bound / 30  # it was rounded


@WORLD
def test_on_one_host_nothing_is_sent_so_nothing_is_compressed() -> None:
    for compress in ("bf16", PowerSGD(start=2)):
        for step, grads in enumerate(synchronize(compress)):
            assert error(grads, of_whole_batch(2, step)) < 1e-6


@WORLD.on(TWO, WIDE)
def test_power_sgd_is_exact_where_the_gradient_has_no_higher_rank() -> None:
    # A batch of n samples makes gradients of rank n; 8 columns hold the samples of three ranks.
    size = dist.get_world_size()
    for layout in [(1, 1)] if size == 2 else [(2, 1), (1, 2), (1, 1, 1)]:
        for step, grads in enumerate(synchronize(PowerSGD(rank=8, start=2), layout)):
            assert error(grads, of_whole_batch(size, step)) < 1e-4


@WORLD
def test_power_sgd_is_that_of_torch() -> None:
    """`PowerSGD` is torch's, exact for low ranks."""
    # Each rank is on a host of its own, with equal weights; rank 1 matrices, so that what is left out is fed back.
    live_on_hosts((1, 1), group := dist.new_group())
    ours, theirs, rank = model(), model(), dist.get_rank()
    synchronizer = GradientSynchronizer(ours, compress=PowerSGD(rank=1, start=2), process_group=group)
    ddp = DistributedDataParallel(theirs)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    for step in range(STEPS):
        for net, call in ((ours, ours), (theirs, ddp)):
            net.zero_grad()
            loss_of(call, rank, step).backward()
        assert error(gradients(ours), gradients(theirs)) < 1e-5
        assert step < 2 or error(gradients(theirs), of_one_process((1, 1), step)) > 1e-3
    synchronizer.close()


@WORLD
def test_power_sgd_for_the_cpu_is_the_same_where_there_is_a_gpu() -> None:
    # A GPU that cannot wait for a CPU.

    def synchronize_with_gpu(device: Any = None) -> None:
        raise ValueError(f"Expected a cuda device, but got: {device}")

    plain = synchronize(PowerSGD(rank=1, start=2), (1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "synchronize", synchronize_with_gpu)
        beside = synchronize(PowerSGD(rank=1, start=2), (1, 1))
    assert all(map(torch.equal, itertools.chain(*plain), itertools.chain(*beside)))
    assert error(beside[1], of_whole_batch(2, 1)) < 1e-6
    assert error(beside[STEPS - 1], of_whole_batch(2, STEPS - 1)) > 1e-3  # it was compressed


# --- under DistributedDataParallel ------------------------------------------------------------------------------------


@WORLD.on(TWO, WIDE)
def test_the_hook_gives_distributed_data_parallel_the_same_gradients() -> None:
    """`hierarchical_allreduce_hook` gives DDP the same gradients."""
    size = dist.get_world_size()
    for layout in ((size,), (size - 1, 1), (1,) * size):
        live_on_hosts(layout, group := dist.new_group())
        nets = [DistributedDataParallel(model(), bucket_cap_mb=0.002, process_group=group) for _ in range(2)]
        nets[0].register_comm_hook(group, hierarchical_allreduce_hook)
        for step in range(4):
            for net in nets:
                net.zero_grad()
                loss_of(net, dist.get_rank(), step).backward()
            assert error(*map(gradients, nets)) < 1e-6


class Group:
    """All that is asked of a process group here is which it is."""


def test_the_sums_of_one_group_do_not_wait_for_those_of_another() -> None:
    # On another rank they may come in the other order, and both would wait.
    done, groups = threading.Event(), [Group(), Group()]

    class First:
        def wait(self, doing: str) -> None:
            assert done.wait(60)

    class Second:
        def wait(self, doing: str) -> None:
            done.set()

    kinds: Any = (First, Second)
    futures = [
        ddp_hook.future_of(kind(), torch.tensor([float(index)]), group)
        for index, (kind, group) in enumerate(zip(kinds, groups, strict=True))
    ]
    assert [future.wait().item() for future in futures] == [0.0, 1.0]


def test_gradients_on_a_gpu_go_by_torchs_own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that hook is torch's own."""
    # Its future knows the streams of the GPU; a plain one would be done before the sum is.
    with FakeTensorMode():
        on_a_gpu = torch.ones(3, device="cuda")
    bucket: Any = SimpleNamespace(buffer=lambda: on_a_gpu)
    group: Any = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(ddp_hook, "allreduce_hook", lambda *arguments: arguments)
    assert hierarchical_allreduce_hook(group, bucket) == (group, bucket)


# --- refusals ---------------------------------------------------------------------------------------------------------


@WORLD
def test_power_sgd_without_numpy_and_ranks_that_compress_otherwise_are_refused() -> None:
    live_on_hosts((1, 1), group := dist.new_group())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError, match="needs numpy") as caught:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        GradientSynchronizer(model(), compress=PowerSGD(), process_group=group)
    assert "pip install numpy" in str(caught.value)
    with pytest.raises(MismatchError, match="compress: None on rank 0; bf16 on rank 1"):
        GradientSynchronizer(model(), compress="bf16" if dist.get_rank() else None)


NO_COMPRESSION = r'compress must be "bf16", "fp16", PowerSGD\(\.\.\.\) or None, got'


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GradientSynchronizer(model(), compress="bf61"), NO_COMPRESSION),
        (lambda: GradientSynchronizer(model(), compress=torch.bfloat16), NO_COMPRESSION),
        (lambda: GradientSynchronizer(model(), compress=PowerSGD), NO_COMPRESSION),
        (
            lambda: GradientSynchronizer(model(), compress="bf16", comm_hook=powerSGD_hook),
            "both define how gradients are sent",
        ),
        (lambda: PowerSGD(rank=0), "rank .* at least 1, got 0"),
        (lambda: PowerSGD(start=1), "start .* at least 2"),
    ],
)
def test_compression_that_cannot_be_is_named(make: Any, says: str) -> None:
    """The library names impossible compression."""
    with pytest.raises(ConfigurationError, match=says):
        make()
