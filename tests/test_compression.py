"""Gradients that are compressed between hosts, and the two-level sum under DistributedDataParallel."""

from __future__ import annotations

import functools
import importlib.util
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from two_hosts import live_on_hosts

from ddp_callbacks import GradientSynchronizer, PowerSGD, hierarchical_allreduce_hook
from ddp_callbacks.comm import ddp_hook
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.process_group import resolve_group

pytestmark = pytest.mark.shares_results()

SAMPLES = (5, 2, 1, 4)  # by rank
STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return net(torch.randn(SAMPLES[rank], 20, generator=generator)).square().mean()


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def of_whole_batch(world_size: int, step: int) -> list[Tensor]:
    """In one process."""
    net, total = model(), sum(SAMPLES[:world_size])
    for rank in range(world_size):
        (loss_of(net, rank, step) * SAMPLES[rank] / total).backward()
    return gradients(net)


def synchronize(compress: Any, layout: tuple[int, ...] | None, known: bool = True) -> list[list[Tensor]]:
    """The gradients of each step."""
    if layout is not None:
        live_on_hosts(layout, resolve_group())
    net, rank = model(), dist.get_rank()
    synchronizer = GradientSynchronizer(net, bucket_cap_mb=0.002, compress=compress)
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


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("compress", "bound"), [(None, 1e-6), ("fp16", 6e-4), ("bf16", 5e-3)])
@pytest.mark.parametrize("layout", [(2, 1), (1, 1)])
def test_gradients_are_those_of_one_process_but_for_the_rounding(
    layout: tuple[int, ...], compress: str | None, bound: float, known: bool
) -> None:
    results = run_distributed(synchronize, sum(layout), compress, layout, known)
    for step in range(STEPS):
        errors = [error(result[step], of_whole_batch(sum(layout), step)) for result in results]
        assert max(errors) < bound and len(set(errors)) == 1
        assert compress is None or min(errors) > bound / 30  # it was rounded


@pytest.mark.parametrize("compress", ["bf16", PowerSGD(start=2)])
def test_on_one_host_nothing_is_sent_so_nothing_is_compressed(compress: Any) -> None:
    for step, seen in enumerate(run_distributed(synchronize, 2, compress, None)[0]):
        assert error(seen, of_whole_batch(2, step)) < 1e-6


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2), (1, 1, 1)])
def test_power_sgd_is_exact_where_the_gradient_has_no_higher_rank(layout: tuple[int, ...]) -> None:
    """A batch of n samples makes gradients of rank n; 8 columns hold the 8 samples of three ranks, 12 those of four."""
    world_size = sum(layout)
    results = run_distributed(synchronize, world_size, PowerSGD(rank=12 if world_size == 4 else 8, start=2), layout)
    for result in results:
        for step in range(STEPS):
            assert error(result[step], of_whole_batch(world_size, step)) < 1e-4


def power_sgd_beside_ddp() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Every rank on a host of its own, with equal weights; rank 1 matrices, so that what is left out is fed back."""
    live_on_hosts((1, 1), resolve_group())
    ours, theirs, rank = model(), model(), dist.get_rank()
    synchronizer = GradientSynchronizer(ours, compress=PowerSGD(rank=1, start=2))
    ddp = DistributedDataParallel(theirs)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    seen = []
    for step in range(STEPS):
        for net, call in ((ours, ours), (theirs, ddp)):
            net.zero_grad()
            loss_of(call, rank, step).backward()
        seen.append((gradients(ours), gradients(theirs)))
    synchronizer.close()
    return seen


def test_power_sgd_is_that_of_torch() -> None:
    for result in run_distributed(power_sgd_beside_ddp, 2):
        for step, (ours, theirs) in enumerate(result):
            assert error(ours, theirs) < 1e-5
            assert step < 2 or error(theirs, gradients_of_equal_weights(step)) > 1e-3


@functools.cache
def gradients_of_equal_weights(step: int) -> list[Tensor]:
    net = model()
    for rank in range(2):
        (loss_of(net, rank, step) / 2).backward()
    return gradients(net)


def under_ddp(layout: tuple[int, ...] | None) -> list[float]:
    if layout is not None and len(layout) > 1:
        live_on_hosts(layout, resolve_group())
    plain, hooked = (DistributedDataParallel(model(), bucket_cap_mb=0.002) for _ in range(2))
    hooked.register_comm_hook(None, hierarchical_allreduce_hook)
    errors = []
    for step in range(4):
        for net in (plain, hooked):
            net.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
        errors.append(error(gradients(hooked), gradients(plain)))
    return errors


@pytest.mark.parametrize("layout", [None, (1,), (2, 1), (1, 1, 1)])
def test_the_hook_gives_distributed_data_parallel_the_same_gradients(layout: tuple[int, ...] | None) -> None:
    for errors in run_distributed(under_ddp, 3 if layout is None else sum(layout), layout):
        assert max(errors) < 1e-6


class Group:
    """All that is asked of a process group here is which it is."""


def test_the_sums_of_one_group_do_not_wait_for_those_of_another() -> None:
    """On another rank they may come in the other order, and both would wait."""
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
    """Its future knows the streams of the GPU; a plain one would be done before the sum is."""
    with FakeTensorMode():
        on_a_gpu = torch.ones(3, device="cuda")
    bucket: Any = SimpleNamespace(buffer=lambda: on_a_gpu)
    group: Any = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(ddp_hook, "allreduce_hook", lambda *arguments: arguments)
    assert hierarchical_allreduce_hook(group, bucket) == (group, bucket)


def power_sgd_beside_a_gpu() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """What :func:`synchronize` gives where torch sees no GPU, and where it sees one that cannot wait for a CPU."""

    def synchronize_with_gpu(device: Any = None) -> None:
        raise ValueError(f"Expected a cuda device, but got: {device}")

    setting = PowerSGD(rank=1, start=2)
    plain = synchronize(setting, (1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "synchronize", synchronize_with_gpu)
        return plain, synchronize(setting, (1, 1))


def test_power_sgd_for_the_cpu_is_the_same_where_there_is_a_gpu() -> None:
    for plain, beside in run_distributed(power_sgd_beside_a_gpu, 2):
        assert all(torch.equal(*pair) for pairs in zip(plain, beside, strict=True) for pair in zip(*pairs, strict=True))
        assert error(beside[1], of_whole_batch(2, 1)) < 1e-6
        assert error(beside[STEPS - 1], of_whole_batch(2, STEPS - 1)) > 1e-3  # it was compressed


def power_sgd_without_numpy() -> str:
    live_on_hosts((1, 1), resolve_group())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError) as caught:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        GradientSynchronizer(model(), compress=PowerSGD())
    return str(caught.value)


def test_power_sgd_without_numpy_is_refused_at_once() -> None:
    for message in run_distributed(power_sgd_without_numpy, 2):
        assert "needs numpy" in message and "pip install numpy" in message


def compress_on_one_rank() -> str:
    with pytest.raises(MismatchError) as caught:
        GradientSynchronizer(model(), compress="bf16" if dist.get_rank() else None)
    return str(caught.value)


def test_ranks_that_compress_otherwise_are_named() -> None:
    for message in run_distributed(compress_on_one_rank, 2):
        assert "compress: None on rank 0; bf16 on rank 1" in message


@pytest.mark.parametrize("compress", ["bf61", 16, torch.bfloat16, PowerSGD])
def test_what_is_no_compression_is_an_error_with_the_words(compress: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'compress must be "bf16", "fp16", PowerSGD\(\.\.\.\) or None, got'):
        GradientSynchronizer(model(), compress=compress)


def test_compression_beside_a_hook_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="both define how gradients are sent"):
        GradientSynchronizer(model(), compress="bf16", comm_hook=powerSGD_hook)


@pytest.mark.parametrize(
    ("rank", "start", "says"), [(0, 10, "rank .* at least 1, got 0"), (1, 1, "start .* at least 2")]
)
def test_settings_of_power_sgd_that_cannot_be(rank: int, start: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        PowerSGD(rank=rank, start=start)
