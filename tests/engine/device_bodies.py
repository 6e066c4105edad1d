"""What ranks do with the gradient engine, on CPUs and on GPUs alike; the steps themselves are in step_programs.py.

Each body takes the device to compute on, runs on every rank of a group, and raises if a number is wrong. The truth is
computed by plain torch in the same process, on the same device, from the whole batch.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_batch_norm as batch_norm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_callbacks import (
    DiLoCo,
    GradientSynchronizer,
    ParameterAverager,
    broadcast_optimizer_state,
    broadcast_parameters,
    merge_buffers,
)
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.replicas.parameters import require_equal_replicas

RELATIVE = 1e-10  # of the largest element of a tensor, in float64
PARTS = ((5, 2), (1, 6), (3, 3), (7, 1))  # samples of each of two ranks, by step
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
MIB = 1 << 20


# --- numbers ----------------------------------------------------------------------------------------------------------


def mlp(device: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).to(device, dtype)


def normalized(device: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).to(device, dtype)


def loss_of(net: Any, rank: int, step: int) -> Tensor:
    """Of this rank's part of the batch of a step."""
    generator, like = torch.Generator().manual_seed(100 * step + rank), next(net.parameters())
    samples = PARTS[step % len(PARTS)][rank]
    x, y = (torch.randn(samples, size, generator=generator, dtype=torch.float64).to(like) for size in (16, 8))
    return mse_loss(net(x), y)


def samples(step: int) -> tuple[int, int]:
    """This rank's samples in a step, and those of all ranks."""
    parts = PARTS[step % len(PARTS)]
    return parts[dist.get_rank()], sum(parts)


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in net.parameters() if parameter.grad is not None]


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str, relative: float = RELATIVE) -> None:
    """Each tensor, to ``relative`` of its largest element."""
    for one, two in zip(actual, expected, strict=True):
        atol = relative * float(two.abs().max())
        torch.testing.assert_close(one, two, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def sgd_step(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)


@contextlib.contextmanager
def synchronized(net: nn.Module, **options: Any) -> Iterator[GradientSynchronizer]:
    synchronizer = GradientSynchronizer(net, **options)
    try:
        yield synchronizer
    finally:
        synchronizer.close()


@contextlib.contextmanager
def host_must_not_wait(device: str) -> Iterator[None]:
    """An operation that makes the host wait for the GPU raises."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_sum(device: str) -> None:
    """By the process group itself, as torch does it: whether the ranks can exchange anything."""
    number = torch.ones(1000, device=device)
    dist.all_reduce(number)
    assert number.tolist() == [dist.get_world_size()] * 1000


# --- on every device --------------------------------------------------------------------------------------------------


def hooks_and_compression(device: str) -> None:
    """Those of ours have the gradients of torch's hooks under DistributedDataParallel."""

    def power_sgd() -> tuple[Any, Any]:
        return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook

    state, hook = power_sgd()
    # Between the CPUs of one host nothing is sent, so nothing is compressed.
    compressed = allreduce_hook if device == "cpu" else bf16_compress_hook
    train_beside_ddp(device, (None, fp16_compress_hook), comm_hook=fp16_compress_hook)
    train_beside_ddp(device, power_sgd(), comm_hook=hook, comm_state=state)
    train_beside_ddp(device, (None, compressed), compress="bf16")


def train_beside_ddp(device: str, hook: tuple[Any, Any], **options: Any) -> None:
    """Six steps with equal weights."""
    net, wrapped = mlp(device), mlp(device)
    ddp = DistributedDataParallel(wrapped)
    ddp.register_comm_hook(*hook)
    relative = 1e-8 if hook[1] is powerSGD_hook else 1e-12
    with synchronized(net, **options):
        for step in range(6):
            for each, call in ((net, net), (wrapped, ddp)):
                each.zero_grad()
                loss_of(call, dist.get_rank(), step).backward()
            assert_near(gradients(net), gradients(wrapped), f"{options}, step {step}", relative)
            sgd_step(net)
            sgd_step(wrapped)


def batch_norm_of_the_whole_batch(device: str) -> None:
    place = batch_norm.Device(lambda tensor: tensor.to(device), lambda module: module.to(device))
    for name in ("1d", "2d, channels last", "cumulative average", "mixed precision"):
        relative = max(batch_norm.CASES[name].relative, RELATIVE)
        batch_norm.equals_one_process(name, relative, contextlib.nullcontext(place))


def outer_steps(device: str) -> None:
    """DiLoCo's parameters, of ragged batches, are those that the same ranks get on their CPUs."""
    found = []
    for where in (device, "cpu"):
        net = mlp(where)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        averager = ParameterAverager(net, DiLoCo(2), optimizer, bucket_cap_mb=MANY_BUCKETS)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
            averager.step(samples(step)[0])
        require_equal_replicas(net, "after the last window")
        found.append([value.cpu() for value in values(net)])
    assert_near(*found, "parameters")


def replicas_become_equal(device: str) -> None:
    rank = dist.get_rank()
    expected, net = normalized(device, torch.float64), normalized(device, torch.float64)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.add_(rank)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        require_equal_replicas(net, "before the broadcast")
    broadcast_parameters(net)
    assert all(map(torch.equal, values(net), values(expected)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 + rank)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    optimizer.step()
    broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    moment = optimizer.state[net[0].weight]["exp_avg"]
    assert moment.device.type == device
    assert_near([moment], [torch.full_like(moment, 0.1)], "the state of Adam", 1e-12)
    broadcast_parameters(net)
    with torch.no_grad():
        net[1].running_mean.fill_(rank)
    merge_buffers(net, samples=(1, 3)[rank])
    assert_near([net[1].running_mean], [torch.full_like(net[1].running_mean, 0.75)], "the merged mean", 1e-12)
    require_equal_replicas(net, "after the merge")


BODIES: dict[str, Callable[[str], None]] = {
    body.__name__: body
    for body in (
        hooks_and_compression,
        batch_norm_of_the_whole_batch,
        outer_steps,
        replicas_become_equal,
    )
}


def a_world_of_one(device: str) -> None:
    """Nothing is registered and nothing is sent: the bits are those of plain torch."""
    net, truth = mlp(device), mlp(device)
    broadcast_parameters(net)
    with synchronized(net) as synchronizer, host_must_not_wait(device):
        x = torch.ones(3, 16, device=device, dtype=torch.float64)
        synchronizer.weigh(3, 3)
        for each in (net, truth):
            each(x).square().mean().backward()
    assert all(map(torch.equal, gradients(net), gradients(truth)))


# --- on GPUs alone ----------------------------------------------------------------------------------------------------


def a_graphed_callable(device: str) -> None:
    """Forward and backward of the model are replayed as CUDA graphs; the sums are launched beside them."""
    net, truth, own = mlp(device), mlp(device), slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    graphed = torch.cuda.make_graphed_callables(net, (torch.randn(6, 16, device=device, dtype=torch.float64),))
    with synchronized(net):
        for step in range(4):
            x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(device)
            net.zero_grad()
            truth.zero_grad()
            graphed(x[own]).square().mean().backward()
            truth(x).square().mean().backward()
            assert_near(gradients(net), gradients(truth), f"step {step}")
            sgd_step(net)
            sgd_step(truth)


def a_compiled_model(device: str) -> None:
    net, truth = mlp(device, torch.float32), mlp(device, torch.float32)
    compiled = torch.compile(net, dynamic=True)
    with synchronized(net) as synchronizer:
        for step in range(4):
            net.zero_grad()
            truth.zero_grad()
            synchronizer.weigh(*samples(step))
            loss_of(compiled, dist.get_rank(), step).backward()
            for rank, count in enumerate(PARTS[step]):
                (loss_of(truth, rank, step) * (count / sum(PARTS[step]))).backward()
            assert_near(gradients(net), gradients(truth), f"step {step}", 1e-4)
            sgd_step(net)
            sgd_step(truth)
    torch.compiler.reset()


ON_GPUS = BODIES | {"a_graphed_callable": a_graphed_callable, "a_compiled_model": a_compiled_model}


def sums_overlap_backward(device: str) -> None:
    """The first all-reduce starts on the GPU before the last matrix product of backward."""
    from torch.profiler import ProfilerActivity, profile

    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(24))).to(device)
    x = torch.randn(4096, 4096, device=device)
    with synchronized(net):
        for _ in range(3):
            net.zero_grad()
            net(x).square().mean().backward()
        net.zero_grad()
        loss = net(x).square().mean()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            loss.backward()
            torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    sums = [event for event in kernels if "nccl" in event.name.lower()]
    products = [event for event in kernels if re.search("gemm|nvjet|cutlass|xmma", event.name, re.IGNORECASE)]
    names = sorted({event.name for event in kernels})
    assert len(sums) >= 4 and len(products) >= 24, f"{len(sums)} sums, {len(products)} products in {names}"
    first, last = min(sum_.time_range.start for sum_ in sums), max(product.time_range.start for product in products)
    assert first < last, f"the first sum starts {first - last} us after the last product of backward"


def peak_memory(device: str, set_to_none: bool, layers: int = 100) -> dict[str, float]:
    """MiB beyond what was allocated before, of one process, ours and DDP, each alone."""
    x = torch.randn(4, 1024, device=device)
    found = {"parameters": 4.0 * layers}
    for way in ("warm-up", "one process", "ours", "DDP"):  # the first allocates the workspace of matrix products
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        count = 1 if way == "warm-up" else layers
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count))).to(device)  # 4 MiB each
        call = DistributedDataParallel(net, gradient_as_bucket_view=True) if way == "DDP" else net
        with synchronized(net) if way == "ours" else contextlib.nullcontext():
            found[way] = (peak_of_steps(call, x, set_to_none) - before) / MIB
        del net, call
    return found


def peak_of_steps(call: nn.Module, x: Tensor, set_to_none: bool) -> int:
    """Bytes, of three steps after three others."""
    optimizer = torch.optim.SGD(call.parameters(), lr=1e-3)
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=set_to_none)
        call(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
