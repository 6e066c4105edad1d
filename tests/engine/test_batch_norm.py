"""BatchNorm over all ranks against torch's own BatchNorm in one process on the whole batch.

A case is a model and the batches it trains on. On N ranks each takes its slice of a batch and weighs its loss; as the
truth one process takes the whole. What is compared: outputs, gradients of inputs and parameters, and all buffers.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.made_up_gpu import CUDA, MadeUpGpu, put_on_gpu
from kit.once import once
from kit.ranks import live_on_hosts, run_distributed
from shared_worlds import GLOO, TWO, WIDE, World, by_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from ways import Way

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.batch_norm import layers as batch_norm
from ddp_callbacks.batch_norm.layers import BatchNormSynchronizer
from ddp_callbacks.errors import ConfigurationError, MismatchError, PeerError
from ddp_callbacks.process_group.failures import announce_join, report_failure
from ddp_callbacks.replicas.parameters import merge_buffers

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
NIGHT = Way(3, layout=(2, 1), tier="night")

RELATIVE = 1e-10  # of the largest element of a tensor, in float64
CHANNELS = 4
# Samples of each rank, by step: ragged, one or several without any, and more than one sample in all.
SHARES = {2: ((5, 2), (0, 3), (4, 0), (3, 3)), 3: ((4, 3, 1), (5, 0, 2), (0, 0, 6), (2, 2, 2))}
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


class To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(CHANNELS, CHANNELS), *layers, nn.Tanh(), nn.Linear(CHANNELS, 2))


def normalized_inputs() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2))


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


class WithActivation(nn.BatchNorm1d):
    """A layer that adds an activation, as those of many model libraries do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


class OwnSync(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


norm = functools.partial(nn.BatchNorm1d, CHANNELS)
CASES = {
    "1d": Case(lambda: around(norm())),
    "1d of sequences": Case(lambda: nn.Sequential(nn.Conv1d(2, CHANNELS, 2), norm()), (2, 5)),
    "2d": Case(lambda: images(nn.BatchNorm2d(CHANNELS)), (2, 4, 3)),
    "2d, channels last": Case(
        lambda: images(nn.BatchNorm2d(CHANNELS)).to(memory_format=torch.channels_last),
        (2, 4, 3),
        memory_format=torch.channels_last,
    ),
    "3d": Case(lambda: nn.Sequential(nn.Conv3d(1, CHANNELS, 2), nn.BatchNorm3d(CHANNELS)), (1, 3, 2, 3)),
    "not affine": Case(lambda: around(norm(affine=False))),
    "no bias": Case(lambda: around(without_bias(norm()))),
    "frozen weight": Case(lambda: around(norm().requires_grad_(False))),
    "no running statistics": Case(lambda: around(norm(track_running_stats=False))),
    "cumulative average": Case(lambda: around(norm(momentum=None))),
    "momentum 0 and 1": Case(lambda: around(norm(momentum=0), norm(momentum=1.0))),
    "own forward": Case(lambda: around(WithActivation(CHANNELS))),
    "first layer": Case(normalized_inputs),
    "several times": Case(Shared),
    "checkpoint": Case(lambda: Checkpointed(False)),
    "reentrant checkpoint": Case(lambda: Checkpointed(True)),
    "large mean": Case(normalized_inputs, offset=1e4),
    "frozen layer": Case(frozen),
    "other parameters on each rank": Case(Branching),
    "float32": Case(lambda: around(norm()), dtype=torch.float32, relative=2e-6),
    "bfloat16": Case(normalized_inputs, dtype=torch.bfloat16, relative=0.03),
    # The layer's input has half precision, its parameters do not.
    "mixed precision": Case(
        lambda: around(To(torch.bfloat16), norm(), To(torch.float32)), dtype=torch.float32, relative=0.02
    ),
}


ON_GPUS = [name for name in CASES if "checkpoint" not in name]  # torch's would save the random state of a real one
EXACT_ON_GPUS = 1e-12  # an input of 10,000 has rounding errors of that size


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
    x = batch_of(case, 9, 5)[0].to(next(model.parameters()).device).requires_grad_()
    model.starts = [0, 5, 5]  # type: ignore[assignment]
    return [*seen, {"evaluation": model.eval()(x).detach()} if has_statistics(model) else {}]


def has_statistics(model: nn.Module) -> bool:
    return all(getattr(module, "track_running_stats", True) for module in model.modules())


@once
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


CPU = Device()


@contextmanager
def on_gpu() -> Iterator[Device]:
    with MadeUpGpu() as gpu:
        yield Device(lambda tensor: tensor.to(CUDA), put_on_gpu, gpu.forbid_waiting)


def anywhere(body: Callable[[Device], None]) -> Callable[..., None]:
    """A test on ranks, with CPUs, and then with GPUs."""

    @functools.wraps(body)
    def in_both_places() -> None:
        body(CPU)
        with on_gpu() as device:
            body(device)

    return WORLD(in_both_places)


def on_rank(case: Case, stand_in: str, device: Device) -> list[Step]:
    """The same on this rank, with its slice of each batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, mine = device.move_module(model_of(case)), 0
    synchronizers = [
        BatchNormSynchronizer(model, counts=lambda: mine > 0),
        GradientSynchronizer(model, bucket_cap_mb=1e-5),
    ]

    def step_of(step: int, x: Tensor, y: Tensor) -> Step:
        nonlocal mine
        shares, own = SHARES[world][step], slice_of(step)
        mine = shares[rank]
        if mine or stand_in == "empty":
            x, y = x[own], y[own]
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


def slice_of(step: int) -> slice:
    """This rank's samples."""
    shares, rank = SHARES[dist.get_world_size()][step], dist.get_rank()
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def equals_one_process(name: str, relative: float, place: AbstractContextManager[Device]) -> None:
    expected = truth(name, dist.get_world_size())
    with place as device:
        found = {stand_in: to_cpu(on_rank(CASES[name], stand_in, device)) for stand_in in STAND_INS}
    for stand_in, steps in found.items():
        for step, (one, own) in enumerate(zip(expected, steps, strict=True)):
            for key, wanted in one.items():
                part = wanted[slice_of(step)] if key in ("output", "input") else wanted
                largest = largest_of(wanted) if key != "buffers" else 0.0
                assert_close(own[key], part, relative, f"{stand_in}, {key} of step {step}", largest)
            bits = {name: buffer.tolist() for name, buffer in own.get("buffers", {}).items()}
            assert by_rank(bits) == [bits] * dist.get_world_size()


def to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: to_cpu(each) for key, each in value.items()}
    return [*map(to_cpu, value)] if isinstance(value, list) else value.cpu().clone()


@WORLD.each(CASES, TWO, GLOO, WIDE)
def test_ranks_equal_one_process_on_the_whole_batch(name: str) -> None:
    """`sync_batchnorm=True` gives one process's numbers."""
    equals_one_process(name, CASES[name].relative, nullcontext(CPU))


@WORLD.each(ON_GPUS, TWO, NIGHT)
def test_on_gpus_ranks_equal_one_process_and_no_host_waits(name: str) -> None:
    """No host waits for it on GPUs."""
    case = CASES[name]
    is_exact = case.dtype == torch.float64 and not case.offset
    equals_one_process(name, EXACT_ON_GPUS if is_exact else case.relative, on_gpu())


def assert_close(actual: Any, expected: Any, relative: float, where: str, largest: float) -> None:
    """Relative to ``largest``; 0: to the largest element of each tensor."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name, wanted in expected.items():
            assert_close(actual[name], wanted, relative, f"{where}: {name}", largest or largest_of(wanted))
        return
    assert actual.dtype == expected.dtype, where
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=relative * largest, msg=lambda text: f"{where}: {text}"
    )


def largest_of(value: Any) -> float:
    """Of all gradients together: that of a bias before a normalization is only rounding."""
    if isinstance(value, dict):
        return max((largest_of(each) for each in value.values()), default=0.0)
    return float(value.double().abs().max()) if value.numel() else 0.0


# --- what else is promised --------------------------------------------------------------------------------------------


@contextmanager
def synchronized(model: nn.Module, **options: Any) -> Iterator[None]:
    opened = BatchNormSynchronizer(model, **options)
    try:
        yield
    finally:
        opened.close()


@anywhere
def test_a_layer_without_running_statistics_uses_the_whole_batch_in_evaluations_too(device: Device) -> None:
    """Evaluations synchronize layers without running statistics."""
    model, rank = device.move_module(nn.BatchNorm1d(1, track_running_stats=False)).eval(), dist.get_rank()
    with synchronized(model), torch.inference_mode():
        output = float(model(device.move(torch.tensor([[2.0 * rank]]))))
    assert output == pytest.approx(1 if rank else -1, abs=1e-5)


@anywhere
def test_one_value_per_channel_on_all_ranks_is_refused_on_all(device: Device) -> None:
    model, rank = device.move_module(nn.Sequential(nn.BatchNorm1d(3))), dist.get_rank()
    alone, each = device.move(torch.ones(int(rank == 0), 3)), device.move(torch.ones(1, 3))
    says = "Expected more than 1 value per channel when training, got 1 on all ranks together in 0"
    with synchronized(model):
        with pytest.raises(ValueError, match=f"^{says}$"):
            model(alone)
        assert model(each)[0].tolist() == [0, 0, 0]


@anywhere
def test_an_empty_batch_changes_nothing(device: Device) -> None:
    model, one = device.move_module(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    one(torch.ones(0, 3))
    with synchronized(model):
        output = model(device.move(torch.ones(0, 3)).requires_grad_())
        output.sum().backward()
    assert output.shape == (0, 3) and torch.equal(model.running_mean.cpu(), one.running_mean)
    assert int(model.num_batches_tracked) == int(one.num_batches_tracked)


@anywhere
def test_a_fixed_input_that_all_ranks_pass_through_the_model_counts_once(device: Device) -> None:
    one, fixed = nn.BatchNorm1d(3).double(), torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3)
    model = device.move_module(copy.deepcopy(one))
    one(fixed)
    with synchronized(model):
        model(device.move(fixed))
    torch.testing.assert_close(model.running_var.cpu(), one.running_var, rtol=1e-14, atol=0)


@anywhere
def test_equal_samples_one_on_each_rank_are_a_batch_and_no_fixed_input(device: Device) -> None:
    model = device.move(nn.BatchNorm1d(3).double())
    with synchronized(model):
        model(device.move(torch.ones(1, 3, dtype=torch.float64)))
    assert to_cpu(model.running_var).tolist() == pytest.approx([0.9] * 3)  # that of one process is 0, not NaN


@WORLD
def test_modules_stay_the_users_own() -> None:
    """You get your BatchNorm layers back."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.InstanceNorm2d(2, affine=True))
    layers, keys, own = list(model), list(model.state_dict()), [(type(layer), *vars(layer)) for layer in model]
    calls: list[nn.Module] = []
    model[1].register_forward_hook(lambda layer, *_: calls.append(layer))
    with synchronized(model):
        model(torch.randn(2, 1, 2, 2))
        assert calls == [layers[1]] and list(model.state_dict()) == keys
        assert isinstance(model[1], nn.BatchNorm2d) and type(model[1]) is not nn.BatchNorm2d
        model[1]._forward_hooks.clear()
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for other in (*copies, model):
        assert [(type(layer), *vars(layer)) for layer in other] == own
        assert torch.equal(other[1].running_mean, layers[1].running_mean)


@WORLD
def test_torchs_synchronized_layer_runs_on_cpus() -> None:
    """torch's `SyncBatchNorm` runs on CPUs."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(1)))
    with synchronized(model):
        output = float(model(torch.tensor([[2.0 * dist.get_rank()]])).detach())
    assert output == pytest.approx(1 if dist.get_rank() else -1, abs=1e-4)
    assert type(model[0]) is nn.SyncBatchNorm


class ByHand(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


@WORLD
def test_layers_that_cannot_be_synchronized_are_refused_by_name() -> None:
    """The library refuses layers that normalize by themselves."""
    patched = nn.BatchNorm1d(1)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    own = r"has its own forward\. Such a layer cannot use the whole batch"
    for model, says in (
        (nn.Sequential(nn.Linear(1, 1), OwnSync(1)), f"^1, a OwnSync, {own}"),
        (patched, f"^the model, a BatchNorm1d, {own}"),
        (
            nn.Sequential(nn.LazyBatchNorm1d()),
            "^0, a LazyBatchNorm1d, has no parameters yet. Call the model on a batch",
        ),
    ):
        with pytest.raises(ConfigurationError, match=says):
            BatchNormSynchronizer(model)
    alone = ByHand(1)
    with (
        synchronized(alone),
        pytest.raises(ConfigurationError, match=r"ByHand, .* which doesn.t call F\.batch_norm\. Such"),
    ):
        alone(torch.randn(3, 1))


@WORLD
def test_second_derivatives_are_refused() -> None:
    """It refuses second derivatives."""
    model, x = nn.BatchNorm1d(2), torch.randn(3, 2, requires_grad=True)
    with synchronized(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@WORLD.on(NIGHT)
def test_compiled_models() -> None:
    torch.manual_seed(1)
    model = around(nn.BatchNorm1d(CHANNELS)).double()
    whole = torch.arange(24.0, dtype=torch.float64).view(-1, CHANNELS).sin()
    expected, rank, size = copy.deepcopy(model)(whole), dist.get_rank(), dist.get_world_size()
    with synchronized(model):
        output = torch.compile(model, backend="eager")(whole.tensor_split(size)[rank])
    torch.testing.assert_close(output, expected.tensor_split(size)[rank])


@anywhere
def test_a_batch_with_infinities_does_not_spoil_the_next(device: Device) -> None:
    model, plain = (nn.BatchNorm1d(2, track_running_stats=False) for _ in range(2))
    x = torch.arange(8.0).view(4, 2)
    with synchronized(device.move_module(model)):
        model(device.move(torch.full((4, 2), float("inf"))))
        assert torch.allclose(model(device.move(x)).cpu(), plain(x))


@anywhere
def test_nan_in_a_part_that_does_not_count_reaches_nobody(device: Device) -> None:
    """NaN, infinities and empty batches spoil no statistics."""
    model, plain, rank = device.move_module(nn.BatchNorm1d(2)), nn.BatchNorm1d(2), dist.get_rank()
    whole = torch.arange(6.0).view(3, 2).requires_grad_()
    x = device.move(whole.detach() / (1 - rank)).requires_grad_()
    with synchronized(model, counts=lambda: rank == 0):
        output = model(x)
        output.square().sum().backward()
    expected = plain(whole)
    expected.square().sum().backward()
    assert x.grad is not None and whole.grad is not None
    if rank == 0:
        torch.testing.assert_close([output.cpu(), x.grad.cpu()], [expected, whole.grad])
    assert rank == 0 or not x.grad.any()
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(model, name).cpu(), getattr(plain, name))


@anywhere
def test_samples_without_a_target_get_the_gradient_of_the_others_losses(device: Device) -> None:
    """Samples without targets get the others' gradient."""
    # The loss of rank 1, a mean over nothing, is NaN and counts 0, but rank 0's depends on the samples of rank 1.
    case, rank = CASES["1d"], dist.get_rank()
    model, plain = device.move_module(model_of(case)), model_of(case)
    whole, targets = batch_of(case, 0, 8)
    (plain(whole)[:5] - targets[:5]).square().mean().backward()
    sync, own = GradientSynchronizer(model), slice(5 * rank, 5 + 3 * rank)
    with synchronized(model):
        loss = loss_of(model, device.move(whole[own]), device.move(targets[own]))[1] * (float("nan") if rank else 1)
        undo = sync.weigh_loss(loss, 5 * (1 - rank), 5)
        loss.backward()
        undo()
    sync.close()
    for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.cpu(), parameter.grad, rtol=0, atol=1e-12)


@WORLD
def test_ranks_at_different_layers_are_told() -> None:
    tell_ranks_at_different_layers(dist.new_group())


@WORLD.on(WIDE)
def test_ranks_at_different_layers_are_told_on_two_hosts() -> None:
    live_on_hosts((2, 1), batch_norm._own_group(group := dist.new_group()))
    tell_ranks_at_different_layers(group)


def tell_ranks_at_different_layers(group: dist.ProcessGroup) -> None:
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    last = dist.get_world_size() - 1
    says = rf"^rank 0.* waits for the statistics of 0 \(.*\), while rank {last}.* for the statistics of 1 \(.*\)\. "
    with synchronized(model, process_group=group), pytest.raises(MismatchError, match=says) as caught:
        model[dist.get_rank() // last](torch.ones(3, 2))
    assert by_rank(str(caught.value)) == [str(caught.value)] * (last + 1)


def meet_a_peer_that_fails() -> None:
    announce_join()
    model = nn.BatchNorm1d(2)
    with synchronized(model):
        if dist.get_rank() == 1:
            report_failure(RuntimeError("out of coffee"))
        else:
            with pytest.raises(PeerError, match=r"rank 1.*out of coffee"):
                model(torch.ones(3, 2))


def test_a_peer_that_fails_in_an_exchange_is_named() -> None:
    run_distributed(meet_a_peer_that_fails, 2)


def test_in_a_world_of_one_nothing_changes() -> None:
    model = nn.Sequential(OwnSync(1), nn.BatchNorm1d(1))
    with synchronized(model):
        assert [type(layer) for layer in model] == [OwnSync, nn.BatchNorm1d]
