"""BatchNorm over all ranks against torch's own BatchNorm in one process on the whole batch.

A case is a model and the batches it trains on. On N ranks each takes its slice of a batch and weighs its loss; as the
truth one process takes the whole. What is compared: outputs, gradients of inputs and parameters, and all buffers.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batch_norm_kernels import KERNELS
from distributed import run_distributed
from made_up_gpu import CUDA, MadeUpGpu, put_on_gpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.errors import ConfigurationError, MismatchError, PeerError
from ddp_callbacks.process_group.failures import announce_join, report_failure
from ddp_callbacks.replicas import merge_buffers

pytestmark = pytest.mark.shares_results()

RELATIVE = 1e-10  # of the largest element of a tensor, in float64
CHANNELS = 4
# Samples of each rank, by step: ragged, one or several without any, and more than one sample in all.
SHARES = {2: ((5, 2), (0, 3), (4, 0), (3, 3)), 3: ((4, 3, 1), (5, 0, 2), (0, 0, 6), (2, 2, 2))}
WAYS = ("shared memory", "gloo")
GPU = "GPU"  # by tensors that claim to be on one
STAND_INS = ("empty", "another batch")  # what a rank computes that has no sample


@dataclass(frozen=True)
class Case:
    """How a model is made, the shape of a sample, and what is particular."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (CHANNELS,)
    dtype: torch.dtype = torch.float64
    offset: float = 0.0
    relative: float = RELATIVE
    memory_format: torch.memory_format = torch.contiguous_format


class Mixed(nn.Module):
    """The layer's input has half precision, its parameters do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.first(x).bfloat16()).float())
        return output


def around(*layers: nn.Module, inputs: int = CHANNELS) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, CHANNELS), *layers, nn.Tanh(), nn.Linear(CHANNELS, 2))


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, CHANNELS, 2), *layers, nn.Flatten(), nn.Tanh(), nn.Linear(6 * CHANNELS, 2))


class Shared(nn.Module):
    """One layer several times in a forward, a second one that looks at the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.other = nn.BatchNorm1d(CHANNELS, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.linear(x))
        second = self.norm(3 * self.linear(first.tanh()) + 100)
        with torch.no_grad():
            self.other(second)  # updates the running statistics
        return self.other(first * second) + self.norm(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = around(nn.BatchNorm1d(CHANNELS)), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


class Branching(nn.Module):
    """Each rank uses other parameters, above and below of the layers; what they give does not depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(CHANNELS) for _ in range(2)])
        self.above = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS) for _ in range(3)])
        self.use: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tensor_split(torch.arange(len(x)), self.starts[1:])
        for linears, norm in zip((self.below, self.above), self.norms, strict=True):
            if len(x):
                x = torch.cat([linears[rank](x[part]) for rank, part in enumerate(parts) if len(part)])
            x = norm(x)
        return x

    starts: list[int]


def frozen() -> nn.Module:
    model = around(nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS))
    model[1].register_forward_pre_hook(lambda layer, _: layer.eval() and None)
    return model


def without_bias(layer: nn.BatchNorm1d) -> nn.Module:
    """As the argument ``bias=False`` of torch 2.12 makes it."""
    layer.bias = None
    return layer


CASES = {
    "1d": Case(lambda: around(nn.BatchNorm1d(CHANNELS))),
    "1d of sequences": Case(lambda: nn.Sequential(nn.Conv1d(2, CHANNELS, 2), nn.BatchNorm1d(CHANNELS)), (2, 5)),
    "2d": Case(lambda: images(nn.BatchNorm2d(CHANNELS)), (2, 4, 3)),
    "2d, channels last": Case(
        lambda: images(nn.BatchNorm2d(CHANNELS)).to(memory_format=torch.channels_last),
        (2, 4, 3),
        memory_format=torch.channels_last,
    ),
    "3d": Case(lambda: nn.Sequential(nn.Conv3d(1, CHANNELS, 2), nn.BatchNorm3d(CHANNELS)), (1, 3, 2, 3)),
    "not affine": Case(lambda: around(nn.BatchNorm1d(CHANNELS, affine=False))),
    "no bias": Case(lambda: around(without_bias(nn.BatchNorm1d(CHANNELS)))),
    "frozen weight": Case(lambda: around(nn.BatchNorm1d(CHANNELS).requires_grad_(False))),
    "no running statistics": Case(lambda: around(nn.BatchNorm1d(CHANNELS, track_running_stats=False))),
    "cumulative average": Case(lambda: around(nn.BatchNorm1d(CHANNELS, momentum=None))),
    "momentum 0 and 1": Case(lambda: around(nn.BatchNorm1d(CHANNELS, momentum=0), nn.BatchNorm1d(4, momentum=1.0))),
    "first layer": Case(lambda: nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2))),
    "several times": Case(Shared),
    "checkpoint": Case(lambda: Checkpointed(False)),
    "reentrant checkpoint": Case(lambda: Checkpointed(True)),
    "large mean": Case(lambda: nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2)), offset=1e4),
    "frozen layer": Case(frozen),
    "other parameters on each rank": Case(Branching),
    "float32": Case(lambda: around(nn.BatchNorm1d(CHANNELS)), dtype=torch.float32, relative=2e-6),
    "bfloat16": Case(
        lambda: nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2)), dtype=torch.bfloat16, relative=0.03
    ),
    "mixed precision": Case(Mixed, dtype=torch.float32, relative=0.02),
}


ON_GPUS = [name for name in CASES if "checkpoint" not in name]  # torch's would save the random state of a real one
EXACT_ON_GPUS = 1e-12  # nothing is summed relative to a shift; an input of 10,000 has rounding errors of that size


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(3)
    model = case.make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 2)
            if module.bias is not None:
                nn.init.uniform_(module.bias)
    return model.to(case.dtype)


def batch_of(case: Case, step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, *case.shape, dtype=torch.float64, generator=generator) + case.offset
    y = torch.randn(size, 1, dtype=torch.float64, generator=generator) + torch.arange(size).view(-1, 1)
    return x.to(case.dtype).contiguous(memory_format=case.memory_format), y.to(case.dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    output = model(x)
    return output, (output.flatten(1) - y).square().mean()


Step = dict[str, Any]


def steps_of(case: Case, model: nn.Module, step_of: Callable[[int, Tensor, Tensor], Step], world: int) -> list[Step]:
    """Train; what ``step_of`` saw, and what the step has left in the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step, shares in enumerate(SHARES[world]):
        if isinstance(model, Branching):
            model.starts = [sum(shares[:rank]) for rank in range(3)]
        optimizer.zero_grad()
        seen.append(step_of(step, *batch_of(case, step, sum(shares))))
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        seen[-1]["grads"] = {name: grad.clone() for name, grad in grads.items()}
        optimizer.step()
        seen[-1]["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = batch_of(case, 9, 5)[0].requires_grad_()
    model.starts = [0, 5, 5]  # type: ignore[assignment]
    return [*seen, {"evaluation": model.eval()(x).detach()} if has_statistics(model) else {}]


def has_statistics(model: nn.Module) -> bool:
    return all(getattr(module, "track_running_stats", True) for module in model.modules())


@functools.cache
def truth(name: str, world: int) -> list[Step]:
    """One process, torch's own layers."""
    case = CASES[name]
    model = model_of(case)

    def step_of(step: int, x: Tensor, y: Tensor) -> Step:
        output, loss = loss_of(model, x.requires_grad_(), y)
        loss.backward()
        return {"output": output.detach(), "input": x.grad}

    return steps_of(case, model, step_of, world)


@dataclass(frozen=True)
class Device:
    """Where a rank computes. ``without_waiting()``: what makes the host wait for it is an error."""

    move: Callable[[Tensor], Tensor] = lambda tensor: tensor
    move_module: Callable[[nn.Module], nn.Module] = lambda module: module
    without_waiting: Callable[[], AbstractContextManager[None]] = nullcontext


def on_gpu(case: Case, stand_in: str) -> list[Step]:
    with MadeUpGpu(KERNELS) as gpu:
        device = Device(lambda tensor: tensor.to(CUDA), put_on_gpu, gpu.forbid_waiting)
        return [on_cpu(step) for step in on_rank(case, "gloo", stand_in, device)]


def on_cpu(value: Any) -> Any:
    return {key: on_cpu(each) for key, each in value.items()} if isinstance(value, dict) else value.cpu()


def on_rank(case: Case, way: str, stand_in: str, device: Device = Device()) -> list[Step]:
    """The same on this rank, with its slice of each batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, mine = device.move_module(model_of(case)), 0
    synchronizers = [
        BatchNormSynchronizer(model, counts=lambda: mine > 0, process_group=group_of(way)),
        GradientSynchronizer(model, bucket_cap_mb=1e-5),
    ]

    def step_of(step: int, x: Tensor, y: Tensor) -> Step:
        nonlocal mine
        shares = SHARES[world][step]
        start, mine = sum(shares[:rank]), shares[rank]
        if mine or stand_in == "empty":
            x, y = x[start : start + mine], y[start : start + mine]
        if isinstance(model, Branching):
            model.starts = [0] * (rank + 1) + [len(x)] * (2 - rank)
        x = device.move(x.detach().clone(memory_format=torch.preserve_format)).requires_grad_()
        y = device.move(y)
        with device.without_waiting() if step and mine > 1 else nullcontext():
            output, loss = loss_of(model, x, y)
            (loss * (world * mine / sum(shares)) if mine else 0 * output.sum()).backward()
        assert x.grad is not None
        assert mine or not x.grad.any()
        return {"output": output.detach()[:mine], "input": x.grad[:mine] / world}

    steps = steps_of(case, model, step_of, world)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    merge_buffers(model, 1 + rank)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    for synchronizer in synchronizers:
        synchronizer.close()
    return steps


@functools.cache
def group_of(way: str) -> dist.ProcessGroup:
    group = dist.new_group()
    with switched(way):
        BatchNormSynchronizer(nn.BatchNorm1d(1), process_group=group).close()
    return group


@contextmanager
def switched(way: str) -> Iterator[None]:
    os.environ[SWITCH] = "0" if way == "gloo" else "1"
    yield
    del os.environ[SWITCH]


def run_all() -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for way in WAYS:
        for stand_in in STAND_INS:
            for name, case in CASES.items():
                results[way, stand_in, name] = on_rank(case, way, stand_in)
    results |= {(GPU, stand_in, name): on_gpu(CASES[name], stand_in) for stand_in in STAND_INS for name in ON_GPUS}
    return results | {check.__name__: check() for check in CHECKS}


@functools.cache
def seen(world: int) -> list[dict[Any, Any]]:
    return run_distributed(run_all, world)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_ranks_equal_one_process_on_the_whole_batch(world: int, way: str, stand_in: str, name: str) -> None:
    assert_equals_truth(world, way, stand_in, name, CASES[name].relative)


@pytest.mark.parametrize("name", ON_GPUS)
@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_on_gpus_ranks_equal_one_process_and_no_host_waits(world: int, stand_in: str, name: str) -> None:
    case = CASES[name]
    is_exact = case.dtype == torch.float64 and not case.offset
    assert_equals_truth(world, GPU, stand_in, name, EXACT_ON_GPUS if is_exact else case.relative)


def assert_equals_truth(world: int, way: str, stand_in: str, name: str, relative: float) -> None:
    expected = truth(name, world)
    ranks = [result[way, stand_in, name] for result in seen(world)]
    for step, one in enumerate(expected):
        for key in one:
            if key in ("output", "input"):
                joined = torch.cat([steps[step][key] for steps in ranks])
                assert_close(joined, one[key], relative, f"{key} of step {step}")
            else:
                for rank, steps in enumerate(ranks):
                    assert_close(steps[step][key], one[key], relative, f"rank {rank}: {key} of step {step}")


def assert_close(actual: Any, expected: Any, relative: float, where: str, largest: float = 0.0) -> None:
    """Relative to the largest element; of all gradients, as that of a bias before a normalization is only rounding."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        largest = max(map(largest_of, expected.values()), default=0.0) if "grads" in where else 0.0
        for name in expected:
            assert_close(actual[name], expected[name], relative, f"{where}: {name}", largest)
        return
    assert actual.dtype == expected.dtype, where
    atol = relative * max(largest, largest_of(expected))
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=atol, msg=lambda text: f"{where}: {text}"
    )


def largest_of(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


@pytest.mark.parametrize("way", [*WAYS, GPU])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_all_ranks_hold_the_same_bits(world: int, way: str) -> None:
    for name in ON_GPUS if way == GPU else CASES:
        first, *others = [result[way, "empty", name] for result in seen(world)]
        for other in others:
            for step, expected in zip(other, first, strict=True):
                assert_close(step.get("buffers", {}), expected.get("buffers", {}), 0.0, name)


# --- what else is promised --------------------------------------------------------------------------------------------

CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS.append(function)
    return function


def check_anywhere(function: Callable[[Device], Any]) -> Callable[[Device], Any]:
    """A check on CPUs, and another one on GPUs."""

    def on_gpus() -> Any:
        with MadeUpGpu(KERNELS) as gpu:
            return function(Device(lambda tensor: tensor.to(CUDA), put_on_gpu, gpu.forbid_waiting))

    on_gpus.__name__ = f"{function.__name__} on GPUs"
    CHECKS.append(on_gpus)
    CHECKS.append(functools.wraps(function)(lambda: function(Device())))
    return function


anywhere = pytest.mark.parametrize("where", ["", " on GPUs"])


@contextmanager
def synchronized(model: nn.Module, **options: Any) -> Iterator[None]:
    opened = BatchNormSynchronizer(model, **options)
    try:
        yield
    finally:
        opened.close()


def message_of(kind: type[Exception], action: Callable[[], Any]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing was raised"


@check_anywhere
def without_running_statistics_in_evaluation(device: Device) -> Tensor:
    model = device.move_module(nn.BatchNorm1d(1, track_running_stats=False)).eval()
    x = device.move(torch.tensor([[2.0 * dist.get_rank()]]))
    with synchronized(model), torch.inference_mode():
        return model(x).cpu().clone()


@anywhere
def test_a_layer_without_running_statistics_uses_the_whole_batch_in_evaluations_too(where: str) -> None:
    first, second = [result["without_running_statistics_in_evaluation" + where] for result in seen(2)]
    assert float(first) == pytest.approx(-1, abs=1e-5) and float(second) == pytest.approx(1, abs=1e-5)


@check_anywhere
def one_value(device: Device) -> list[str]:
    model, rank = device.move_module(nn.Sequential(nn.BatchNorm1d(3))), dist.get_rank()
    alone, each = device.move(torch.ones(int(rank == 0), 3)), device.move(torch.ones(1, 3))
    with synchronized(model):
        return [message_of(ValueError, lambda: model(alone)), str(model(each)[0].tolist())]


@anywhere
def test_one_value_per_channel_on_all_ranks_is_refused_on_all(where: str) -> None:
    for result in seen(2):
        refused, on_each = result["one_value" + where]
        assert refused == ("Expected more than 1 value per channel when training, got 1 on all ranks together in 0")
        assert on_each == "[0.0, 0.0, 0.0]"


@check_anywhere
def no_value(device: Device) -> Any:
    model = device.move_module(nn.BatchNorm1d(3))
    x = device.move(torch.ones(0, 3)).requires_grad_()
    with synchronized(model):
        output = model(x)
        output.sum().backward()
        return output.shape, model.running_mean.cpu(), int(model.num_batches_tracked)


@anywhere
def test_an_empty_batch_changes_nothing(where: str) -> None:
    one = nn.BatchNorm1d(3)
    one(torch.ones(0, 3))
    for result in seen(2):
        shape, mean, batches = result["no_value" + where]
        assert shape == (0, 3) and torch.equal(mean, one.running_mean) and batches == int(one.num_batches_tracked)


class Doubling(nn.BatchNorm2d):
    """A subclass that only its checks tell from torch's."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() == 4


@check
def same_modules() -> dict[str, Any]:
    """Classes, keys, hooks and copies during and after a run."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), Doubling(2), nn.BatchNorm2d(2), nn.InstanceNorm2d(2, affine=True))
    layers, keys, names = list(model), list(model.state_dict()), [vars(layer).keys() for layer in model]
    calls: list[Any] = []
    model[2].register_forward_hook(lambda layer, *_: calls.append(layer))
    classes = [type(layer) for layer in model]
    opened = BatchNormSynchronizer(model)
    during = [type(layer) for layer in model]
    model(torch.randn(2, 1, 2, 2))
    file = io.BytesIO()
    torch.save(model[:2], file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model[:2])), torch.load(file, weights_only=False)]
    copied = [[type(layer) for layer in other] for other in copies]
    equal = torch.equal(copies[0][1].running_mean, model[1].running_mean)
    found = {
        "same objects": all(a is b for a, b in zip(model, layers, strict=True)),
        "keys": list(model.state_dict()) == keys,
        "nothing added": [vars(layer).keys() for layer in model] == names,
        "hooks": len(calls) == 1 and calls[0] is layers[2],
        "isinstance": isinstance(model[2], nn.BatchNorm2d) and isinstance(model[1], Doubling),
        "converted": [now is not own for now, own in zip(during, classes, strict=True)] == [False, True, True, False],
        "copies are plain": copied == [classes, classes[:2], classes[:2]] and equal,
    }
    opened.close()
    opened.close()
    return found | {"given back": [type(layer) for layer in model] == classes}


def test_modules_stay_the_users_own() -> None:
    for result in seen(2):
        assert all(result["same_modules"].values()), result["same_modules"]


@check
def torchs_synchronized_layer() -> Any:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1)))
    with synchronized(model):
        output = model(torch.tensor([[2.0 * dist.get_rank()]]))
    return float(output.detach()), type(model[0]) is nn.SyncBatchNorm


def test_torchs_synchronized_layer_runs_on_cpus() -> None:
    assert [result["torchs_synchronized_layer"] for result in seen(2)] == [
        (pytest.approx(-1, abs=1e-4), True),
        (pytest.approx(1, abs=1e-4), True),
    ]


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def patched() -> nn.Module:
    model = nn.BatchNorm1d(1)
    model.forward = lambda input: input  # type: ignore[method-assign]
    return model


@check
def refusals() -> list[str]:
    models = [nn.Sequential(nn.Linear(1, 1), Own(1)), patched(), nn.Sequential(nn.LazyBatchNorm1d())]
    return [message_of(ConfigurationError, functools.partial(BatchNormSynchronizer, model)) for model in models]


def test_layers_that_cannot_be_synchronized_are_refused_by_name() -> None:
    for result in seen(2):
        own, instance, lazy = result["refusals"]
        assert own.startswith("1, a Own, has its own forward. Such a layer cannot use the whole batch")
        assert instance.startswith("the model, a BatchNorm1d, has its own forward")
        assert lazy == "0, a LazyBatchNorm1d, has no parameters yet. Call the model on a batch before the run."


@check
def second_derivative() -> str:
    model, x = nn.BatchNorm1d(2), torch.randn(3, 2, requires_grad=True)
    with synchronized(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return message_of(RuntimeError, lambda: grad.sum().backward())


def test_second_derivatives_are_refused() -> None:
    for result in seen(2):
        assert "once_differentiable" in result["second_derivative"]


@check
def compiled() -> Any:
    torch.manual_seed(1)
    model = around(nn.BatchNorm1d(CHANNELS)).double()
    compiled = torch.compile(model, backend="eager")
    x = torch.arange(24.0, dtype=torch.float64).view(-1, CHANNELS).sin()
    part = x.tensor_split(dist.get_world_size())[dist.get_rank()]
    with synchronized(model):
        return compiled(part).detach()


def test_compiled_models() -> None:
    torch.manual_seed(1)
    expected = around(nn.BatchNorm1d(CHANNELS)).double()(torch.arange(24.0, dtype=torch.float64).view(-1, 4).sin())
    torch.testing.assert_close(torch.cat([result["compiled"] for result in seen(2)]), expected.detach())


@check_anywhere
def statistics_after_a_bad_batch(device: Device) -> bool:
    model, plain = nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2, track_running_stats=False)
    x = torch.arange(8.0).view(4, 2)
    with synchronized(device.move_module(model)):
        model(device.move(torch.full((4, 2), float("inf"))))
        return torch.allclose(model(device.move(x)).cpu(), plain(x))


@anywhere
def test_a_batch_with_infinities_does_not_spoil_the_next(where: str) -> None:
    assert all(result["statistics_after_a_bad_batch" + where] for result in seen(2))


@check_anywhere
def nan_that_does_not_count(device: Device) -> Any:
    model, rank = device.move_module(nn.BatchNorm1d(2)), dist.get_rank()
    x = device.move(torch.arange(6.0).view(3, 2) / (1 - rank)).requires_grad_()
    with synchronized(model, counts=lambda: rank == 0):
        output = model(x)
        output.square().sum().backward()
    assert x.grad is not None
    return [tensor.detach().cpu().clone() for tensor in (output, x.grad, model.running_mean, model.running_var)]


@anywhere
def test_nan_in_a_part_that_does_not_count_reaches_nobody(where: str) -> None:
    model, x = nn.BatchNorm1d(2), torch.arange(6.0).view(3, 2).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    (first, gradient, *statistics), (_, zeros, *others) = [
        result["nan_that_does_not_count" + where] for result in seen(2)
    ]
    torch.testing.assert_close([first, gradient], [output.detach(), x.grad])
    torch.testing.assert_close(statistics, [model.running_mean, model.running_var])
    torch.testing.assert_close(others, statistics)
    assert not zeros.any()


@check_anywhere
def no_target_on_rank_1(device: Device) -> list[Tensor]:
    """Its loss, a mean over nothing, is NaN and counts 0, but rank 0's loss depends on its samples."""
    case = CASES["1d"]
    model, rank = device.move_module(model_of(case)), dist.get_rank()
    sync = GradientSynchronizer(model)
    x, y = (device.move(tensor[5 * rank : 5 + 3 * rank]) for tensor in batch_of(case, 0, 8))
    with synchronized(model):
        loss = loss_of(model, x, y)[1] * (float("nan") if rank else 1)
        undo = sync.weigh_loss(loss, 5 * (1 - rank), 5)
        loss.backward()
        undo()
    sync.close()
    return [parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None]


@anywhere
def test_samples_without_a_target_get_the_gradient_of_the_others_losses(where: str) -> None:
    case = CASES["1d"]
    model = model_of(case)
    x, y = batch_of(case, 0, 8)
    (model(x)[:5] - y[:5]).square().mean().backward()
    for result in seen(2):
        for found, parameter in zip(result["no_target_on_rank_1" + where], model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-12)


def unlike_layers() -> str:
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    with synchronized(model):
        return message_of(MismatchError, lambda: model[dist.get_rank()](torch.ones(3, 2)))


def test_ranks_at_different_layers_are_told() -> None:
    first, second = run_distributed(unlike_layers, 2)
    assert first == second
    assert re.match(r"rank 0.* exchanges the statistics of 0, while rank 1.* exchanges the statistics of 1\. ", first)


def failing_peer() -> str:
    announce_join()
    model = nn.BatchNorm1d(2)
    with synchronized(model):
        if dist.get_rank() == 1:
            report_failure(RuntimeError("out of coffee"))
            return ""
        return message_of(PeerError, lambda: model(torch.ones(3, 2)))


def test_a_peer_that_fails_is_named() -> None:
    message, _ = run_distributed(failing_peer, 2)
    assert "rank 1" in message and "out of coffee" in message


def test_in_a_world_of_one_nothing_changes() -> None:
    model = nn.Sequential(Own(1), nn.BatchNorm1d(1))
    with synchronized(model):
        assert [type(layer) for layer in model] == [Own, nn.BatchNorm1d]
