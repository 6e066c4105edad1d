"""What ranks do with the gradient engine, on CPUs and on GPUs alike.

Each body takes the device to compute on, runs on every rank of a group that has been joined, and raises if a number is
wrong. The truth is computed by plain torch in the same process, on the same device, from the whole batch.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    BatchNormSynchronizer,
    DiLoCo,
    GradientSynchronizer,
    ParameterAverager,
    PowerSGD,
    broadcast_optimizer_state,
    broadcast_parameters,
    merge_buffers,
    require_equal_replicas,
)
from ddp_callbacks.errors import ConfigurationError, MismatchError

RELATIVE = 1e-10  # of the largest element of a tensor, in float64
PARTS = ((5, 2), (1, 6), (3, 3), (7, 1))  # samples of each of two ranks, by step
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
MIB = 1 << 20

Loss = Callable[[Any, int, int], Tensor]  # of a model, for a rank, in a step


# --- numbers ----------------------------------------------------------------------------------------------------------


def mlp(device: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).to(device, dtype)


def batch(rank: int, step: int, device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = PARTS[step % len(PARTS)][rank]
    x, y = (torch.randn(samples, size, generator=generator, dtype=torch.float64) for size in (16, 8))
    return x.to(device, dtype), y.to(device, dtype)


def loss_on(device: str, dtype: torch.dtype = torch.float64) -> Loss:
    def loss(net: Any, rank: int, step: int) -> Tensor:
        x, y = batch(rank, step, device, dtype)
        return mse_loss(net(x), y)

    return loss


def samples(step: int) -> tuple[int, int]:
    """This rank's samples in a step, and those of all ranks."""
    parts = PARTS[step % len(PARTS)]
    return parts[dist.get_rank()], sum(parts)


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in net.parameters() if parameter.grad is not None]


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def add_gradients_of_one_process(net: nn.Module, loss: Loss, step: int) -> None:
    """Of the mean over the samples of all ranks, by plain torch."""
    parts = PARTS[step % len(PARTS)]
    for rank, count in enumerate(parts):
        (loss(net, rank, step) * (count / sum(parts))).backward()


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str, relative: float = RELATIVE) -> None:
    """Each tensor, to ``relative`` of its largest element."""
    assert len(actual) == len(expected) > 0, f"{what}: {len(actual)} tensors, expected {len(expected)}"
    for index, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == two.shape, f"{what} [{index}]: {tuple(one.shape)}, expected {tuple(two.shape)}"
        if not two.numel():
            continue
        error, size = float((one - two).abs().max()), float(two.abs().max())
        assert error <= relative * size, f"{what} [{index}]: off by {error:.3g}, where the largest is {size:.3g}"


def sgd_step(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@contextlib.contextmanager
def synchronized(net: nn.Module, **options: Any) -> Iterator[GradientSynchronizer]:
    synchronizer = GradientSynchronizer(net, **options)
    try:
        yield synchronizer
    finally:
        synchronizer.close()


def a_sum(device: str) -> None:
    """By the process group itself, as torch does it: whether the ranks can exchange anything."""
    number = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    for _ in range(3):
        dist.all_reduce(number)
    expected = 3.0 * dist.get_world_size() ** 2
    assert number.tolist() == [expected] * 1000, f"the sum is {float(number[0])}, expected {expected}"


def train_beside_one_process(net: nn.Module, call: Any, truth: nn.Module, loss: Loss, relative: float) -> None:
    """Four steps; ``call`` is ``net`` in another form."""
    with synchronized(net) as synchronizer:
        for step in range(4):
            net.zero_grad()
            truth.zero_grad()
            synchronizer.weigh(*samples(step))
            loss(call, dist.get_rank(), step).backward()
            add_gradients_of_one_process(truth, loss, step)
            assert_near(gradients(net), gradients(truth), f"step {step}", relative)
            sgd_step(net)
            sgd_step(truth)


def ragged_batches(device: str) -> None:
    """The plainest training. Others are generated, in step_programs.py."""
    net = mlp(device)
    train_beside_one_process(net, net, mlp(device), loss_on(device), RELATIVE)


# --- communication hooks and compression ------------------------------------------------------------------------------


def power_sgd_state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


# The state and the hook, made on the ranks; what one needs beside rounding in float64.
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce_hook": lambda: (None, allreduce_hook),
    "fp16_compress_hook": lambda: (None, fp16_compress_hook),
    "bf16_compress_hook": lambda: (None, bf16_compress_hook),
    "powerSGD_hook": lambda: (power_sgd_state(), powerSGD_hook),
}
COMPRESSED: dict[str, tuple[Any, str]] = {
    "bf16": ("bf16", "bf16_compress_hook"),
    "fp16": ("fp16", "fp16_compress_hook"),
    "PowerSGD": (PowerSGD(rank=1, start=2), "powerSGD_hook"),
}


def train_beside_ddp(device: str, hook: str, **options: Any) -> None:
    """Six steps with equal weights; the same hook under DistributedDataParallel."""
    net, wrapped, loss = mlp(device), mlp(device), loss_on(device)
    ddp = DistributedDataParallel(wrapped)
    ddp.register_comm_hook(*HOOKS[hook]())
    relative = 1e-8 if hook == "powerSGD_hook" else 1e-12
    with synchronized(net, **options):
        for step in range(6):
            for each, call in ((net, net), (wrapped, ddp)):
                each.zero_grad()
                loss(call, dist.get_rank(), step).backward()
            assert_near(gradients(net), gradients(wrapped), f"step {step}", relative)
            sgd_step(net)
            sgd_step(wrapped)


def a_hook_beside_ddp(device: str, name: str) -> None:
    state, hook = HOOKS[name]()
    train_beside_ddp(device, name, comm_hook=hook, comm_state=state)


def compression_beside_ddp(device: str, name: str) -> None:
    """On GPUs as torch's hook; between the CPUs of one host nothing is sent, so nothing is compressed."""
    compress, hook = COMPRESSED[name]
    train_beside_ddp(device, "allreduce_hook" if device == "cpu" else hook, compress=compress)


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


# --- memory -----------------------------------------------------------------------------------------------------------


def large_mlp(device: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))).to(device)  # 4 MiB each


def peak_of_steps(step: Callable[[], None]) -> int:
    """Bytes, of three steps after three others."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def plain_step(call: Any, net: nn.Module, x: Tensor, set_to_none: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        call(x).square().mean().backward()
        optimizer.step()

    return step


def peak_memory(device: str, set_to_none: bool, layers: int = 100) -> dict[str, float]:
    """MiB beyond what was allocated before, of one process, ours and DDP, each alone."""
    x = torch.randn(4, 1024, device=device)
    found = {"parameters": 4.0 * layers}
    ways = ("warm-up", "one process", "ours", "DDP")  # the first allocates the workspace of matrix products
    for way in ways:
        gc.collect()
        before = torch.cuda.memory_allocated()
        net = large_mlp(device, 1 if way == "warm-up" else layers)
        synchronizer = GradientSynchronizer(net) if way == "ours" else None
        call = DistributedDataParallel(net, gradient_as_bucket_view=True) if way == "DDP" else net
        step = plain_step(call, net, x, set_to_none)
        found[way] = (peak_of_steps(step) - before) / MIB
        if synchronizer is not None:
            synchronizer.close()
        del net, call, step, synchronizer
    return found


# --- the host does not wait for the GPU -------------------------------------------------------------------------------


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


def normalized(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).to(device, dtype)


def steady_steps(device: str, way: str) -> None:
    """Whole steps after a warm-up: "total", "no total", "accumulation" or "BatchNorm"."""
    net = normalized(device) if way == "BatchNorm" else mlp(device, torch.float32)
    layers = BatchNormSynchronizer(net) if way == "BatchNorm" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = [batch(dist.get_rank(), step, device, torch.float32) for step in range(12)]
    with synchronized(net, bucket_cap_mb=MANY_BUCKETS) as synchronizer:

        def step(number: int) -> None:
            x, y = batches[number]
            own, total = samples(number)
            is_local = way == "accumulation" and number % 3 < 2
            with synchronizer.no_sync() if is_local else contextlib.nullcontext():
                loss = mse_loss(net(x), y)
                undo = None
                if way == "BatchNorm":
                    undo = synchronizer.weigh_loss(loss, own, total)
                else:
                    synchronizer.weigh(own, None if way == "no total" else total)
                loss.backward()
                if undo is not None:
                    undo()
            if not is_local:
                optimizer.step()
                optimizer.zero_grad()

        for number in range(6):
            step(number)
        with host_must_not_wait(device):
            for number in range(6, 12):
                step(number)
    if layers is not None:
        layers.close()
    require_equal_replicas(net, "after steps in which the host did not wait")


# --- BatchNorm --------------------------------------------------------------------------------------------------------


NORMALIZED = ("1d", "2d, channels last", "cumulative average", "mixed precision")  # cases of test_batch_norm.py


def batch_norm_of_the_whole_batch(device: str, name: str) -> None:
    place = batch_norm.Device(lambda tensor: tensor.to(device), lambda module: module.to(device))
    relative = max(batch_norm.CASES[name].relative, RELATIVE)
    batch_norm.equals_one_process(name, relative, contextlib.nullcontext(place))


def batch_norm_in_autocast(device: str, dtype: str) -> None:
    """Near one process in the same autocast: half precision rounds the inputs of the layers."""
    kind: torch.dtype = getattr(torch, dtype)
    relative = 0.01 if kind is torch.float16 else 0.06
    net, truth, rank, parts = normalized(device), normalized(device), dist.get_rank(), (21, 11)
    x = torch.randn(sum(parts), 16, generator=torch.Generator().manual_seed(0)).to(device)
    layers = BatchNormSynchronizer(net)
    with synchronized(net) as synchronizer:
        with torch.autocast(torch.device(device).type, kind):
            whole, output = truth(x), net(x.split(parts)[rank])
        assert output.dtype == whole.dtype == kind
        whole.float().square().mean().backward()
        loss = output.float().square().mean()
        undo = synchronizer.weigh_loss(loss, parts[rank], sum(parts))
        loss.backward()
        undo()
    layers.close()
    expected = [whole.detach().split(parts)[rank].float()]
    assert_near([output.detach().float()], expected, "outputs", relative)
    assert_near(list(net.buffers()), list(truth.buffers()), "running statistics", relative)
    assert_near(gradients(net)[2:], gradients(truth)[2:], "gradients", 2 * relative)


# --- torch.compile and CUDA graphs ------------------------------------------------------------------------------------


def a_compiled_model(device: str, backend: str) -> None:
    net = mlp(device, torch.float32)
    compiled = torch.compile(net, backend=backend, dynamic=True)
    train_beside_one_process(net, compiled, mlp(device, torch.float32), loss_on(device, torch.float32), 1e-4)
    torch.compiler.reset()


def a_graphed_callable(device: str) -> None:
    """Forward and backward of the model are replayed as CUDA graphs; the sums are launched beside them."""
    net, truth, rank = mlp(device), mlp(device), dist.get_rank()
    graphed = torch.cuda.make_graphed_callables(net, (torch.randn(6, 16, device=device, dtype=torch.float64),))
    net.zero_grad()
    with synchronized(net) as synchronizer:
        for step in range(4):
            x, y = (
                torch.randn(12, size, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(device)
                for size in (16, 8)
            )
            net.zero_grad()
            truth.zero_grad()
            synchronizer.weigh(6, 12)
            mse_loss(graphed(x[6 * rank : 6 * rank + 6]), y[6 * rank : 6 * rank + 6]).backward()
            mse_loss(truth(x), y).backward()
            assert_near(gradients(net), gradients(truth), f"step {step}")
            sgd_step(net)
            sgd_step(truth)


def a_backward_that_is_captured(device: str) -> None:
    """It is refused with the reason, and an ordinary step works afterwards."""
    net, x = mlp(device), torch.ones(3, 16, device=device, dtype=torch.float64)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), synchronized(net):  # all on the stream of the capture, as torch asks for
        for _ in range(3):
            net.zero_grad()
            net(x).sum().backward()
        net.zero_grad()
        torch.cuda.synchronize()
        refused = refusal_of_a_capture(lambda: net(x).sum().backward(), stream)
    torch.cuda.synchronize()
    assert "captur" in refused.lower() and "graph" in refused.lower(), refused
    truth = mlp(device)
    with synchronized(net):
        for each in (net, truth):
            each.zero_grad()
            each(x).sum().backward()
        assert_near(gradients(net), gradients(truth), "the step after the capture")


def refusal_of_a_capture(step: Callable[[], None], stream: torch.cuda.Stream) -> str:
    """The text of the ConfigurationError; to end the capture after it may be an error of torch, too."""
    raised: BaseException | None = None
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            step()
    except Exception as error:
        raised = error
    assert raised is not None, "the capture was not refused"
    first = raised
    while not isinstance(raised, ConfigurationError):
        raised = raised.__cause__ or raised.__context__
        assert raised is not None, f"not refused by us: {first!r}"
    return str(raised)


def outer_steps(device: str) -> None:
    """DiLoCo's parameters, of ragged batches, are those that the same ranks get on their CPUs."""
    found = []
    for where in (device, "cpu"):
        net, loss = mlp(where), loss_on(where)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        averager = ParameterAverager(net, DiLoCo(2), optimizer, bucket_cap_mb=MANY_BUCKETS)
        for step in range(6):
            optimizer.zero_grad()
            loss(net, dist.get_rank(), step).backward()
            optimizer.step()
            averager.step(samples(step)[0])
        require_equal_replicas(net, "after the last window")
        found.append([value.cpu() for value in values(net)])
    assert_near(*found, "parameters")


# --- replicas ---------------------------------------------------------------------------------------------------------


def replicas_become_equal(device: str) -> None:
    rank = dist.get_rank()
    expected, net = normalized(device, torch.float64), normalized(device, torch.float64)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.add_(rank)
    try:
        require_equal_replicas(net, "before the broadcast")
    except MismatchError as error:
        assert "0.weight" in str(error), error
    else:
        raise AssertionError("replicas that differ were not found")
    broadcast_parameters(net)
    assert_near(values(net), values(expected), "parameters of rank 0", 0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 + rank)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    optimizer.step()
    broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    moment = optimizer.state[net[0].weight]["exp_avg"]
    assert moment.device.type == torch.device(device).type
    assert_near([moment], [torch.full_like(moment, 0.1)], "the state of Adam", 1e-12)
    broadcast_parameters(net)
    with torch.no_grad():
        net[1].running_mean.fill_(rank)
    merge_buffers(net, samples=(1, 3)[rank])
    assert_near([net[1].running_mean], [torch.full_like(net[1].running_mean, 0.75)], "the merged mean", 1e-12)
    require_equal_replicas(net, "after the merge")


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
    require_equal_replicas(net, "in a world of one")


def a_group_of_one_process(device: str, folder: str) -> None:
    """As :func:`a_world_of_one`, in a group of one that the user has made; on a GPU by NCCL."""
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        if device != "cpu":
            number = torch.ones(1, device=device)
            dist.all_reduce(number)  # NCCL works
            assert float(number) == 1.0
        a_world_of_one(device)
        ddp, net = DistributedDataParallel(mlp(device)), mlp(device)
        x = torch.ones(3, 16, device=device, dtype=torch.float64)
        with synchronized(net):
            for call in (ddp, net):
                call(x).square().mean().backward()
        assert_near(gradients(net), gradients(ddp), "gradients beside DDP", 1e-14)
    finally:
        dist.destroy_process_group()


STEADY = ("total", "no total", "accumulation", "BatchNorm")
HALF = ("float16", "bfloat16")

# All that runs on every device, with its arguments.
BODIES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    *((body, ()) for body in (ragged_batches, replicas_become_equal, outer_steps)),
    *((a_hook_beside_ddp, (name,)) for name in HOOKS),
    *((compression_beside_ddp, (name,)) for name in COMPRESSED),
    *((steady_steps, (way,)) for way in STEADY),
    *((batch_norm_of_the_whole_batch, (kind,)) for kind in NORMALIZED),
    *((batch_norm_in_autocast, (dtype,)) for dtype in HALF),
    (a_compiled_model, ("aot_eager",)),
]


def name_of(value: Any) -> str:
    """Of a body, perhaps with its arguments, for the name of a test."""
    body, arguments = value if isinstance(value, tuple) else (value, ())
    return "_".join([body.__name__, *map(str, arguments)]).replace(" ", "_")
