"""Communication hooks that were written for DistributedDataParallel run unchanged, with the same numbers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_worlds import World, by_rank
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_callbacks.comm.hooks import GradBucket
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)

DDP_TAKES_COMPLEX = torch.__version__ >= (2, 11)  # that of torch 2.8 drops imaginary parts, or raises
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
STEPS = 6
ONCE = [(index, index == 5) for index in range(6)]  # index and is_last of the calls in a backward
COMPRESSED = 2  # the step from which the hooks with a warm-up compress, or stop communicating


def power_sgd_state(**options: Any) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=COMPRESSED, **options)


def local_sgd_state() -> PostLocalSGDState:
    subgroup, _ = dist.new_subgroups(group_size=1)
    return PostLocalSGDState(None, subgroup, start_localSGD_iter=COMPRESSED)


# Name -> the state and the hook, made on the ranks; every stock hook that DDP takes on gloo, and the wrappers.
STOCK: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce_hook": lambda: (None, allreduce_hook),
    "fp16_compress_hook": lambda: (None, fp16_compress_hook),
    "fp16_compress_wrapper": lambda: (None, fp16_compress_wrapper(allreduce_hook)),
    "powerSGD_hook": lambda: (power_sgd_state(), powerSGD_hook),
    "powerSGD_hook without memory": lambda: (
        power_sgd_state(use_error_feedback=False, warm_start=False),
        powerSGD_hook,
    ),
    "powerSGD_hook in a wrapper": lambda: (power_sgd_state(), fp16_compress_wrapper(powerSGD_hook)),
    "post_localSGD_hook": lambda: (local_sgd_state(), post_localSGD_hook),
    "noop_hook": lambda: (None, noop_hook),
}
BF16: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bf16_compress_hook": lambda: (None, bf16_compress_hook),
    "bf16_compress_wrapper": lambda: (None, bf16_compress_wrapper(allreduce_hook)),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).double()


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    return x, torch.randn(5, 8, generator=generator, dtype=torch.float64)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


def backward(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    mse_loss(model(x), y).backward()


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int = STEPS) -> list[Tensor]:
    """The gradients of each step of plain SGD."""
    seen = []
    for step in range(steps):
        model.zero_grad()
        backward(forward, *make_batch(dist.get_rank(), step))
        seen.append(flat_gradient(model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
    return seen


def train_ours(make: Callable[[], tuple[Any, Any]], **options: Any) -> list[Tensor]:
    state, hook = make()
    model = make_model()
    sync = GradientSynchronizer(model, comm_hook=hook, comm_state=state, **options)
    try:
        return train(model, model)
    finally:
        sync.close()


def train_ddp(make: Callable[[], tuple[Any, Any]]) -> list[Tensor]:
    state, hook = make()
    model = make_model()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    return train(model, ddp)


# --- the numbers ------------------------------------------------------------------------------------------------------


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@WORLD.each(STOCK)
def test_a_stock_hook_gives_the_gradients_that_it_gives_under_ddp(name: str) -> None:
    """torch's communication hooks give DDP's gradients."""
    under_ddp, one_bucket = train_ddp(STOCK[name]), train_ours(STOCK[name])
    assert len(under_ddp) == STEPS
    assert_close(one_bucket, under_ddp)
    if not name.startswith("powerSGD"):  # whose state is kept by bucket
        assert_close(train_ours(STOCK[name], bucket_cap_mb=MANY_BUCKETS), one_bucket)


@WORLD
def test_the_compression_of_powersgd_sets_in_after_its_warm_up() -> None:
    both = zip(train_ours(STOCK["allreduce_hook"]), train_ours(STOCK["powerSGD_hook"]), strict=True)
    for step, (exact, compressed) in enumerate(both):
        error = float((exact - compressed).norm() / exact.norm())
        assert error < 1e-12 if step < COMPRESSED else error > 0.1, (step, error)


@WORLD
def test_post_local_sgd_stops_communicating_after_its_warm_up_and_noop_never_starts() -> None:
    first, second = by_rank(train_ours(STOCK["post_localSGD_hook"]))
    assert [*map(torch.equal, first, second)] == [step < COMPRESSED for step in range(STEPS)]
    first, second = by_rank(train_ours(STOCK["noop_hook"]))
    assert not torch.equal(first[0], second[0])


@WORLD
def test_bf16_compression_works_on_gloo_where_ddp_refuses_it() -> None:
    """bfloat16 hooks work on gloo, too."""
    size, expected = dist.get_world_size(), torch.zeros(1, dtype=torch.bfloat16)
    for rank in range(size):
        backward(model := make_model(), *make_batch(rank, 0))
        expected = expected + flat_gradient(model).bfloat16() / size
    for name, make in BF16.items():
        assert torch.equal(train_ours(make, bucket_cap_mb=MANY_BUCKETS)[0], expected.double()), name
        # A build of torch for CUDA lets DDP do it on gloo, too.
        refused = pytest.raises((TypeError, RuntimeError), match="BF16")
        with refused if torch.version.cuda is None else contextlib.nullcontext():
            train_ddp(make)


@WORLD
def test_complex_gradients_pass_through_a_hook_as_under_ddp() -> None:
    found = []
    for kind in ("by hand", "ours", *(("DDP",) if DDP_TAKES_COMPLEX else ())):
        torch.manual_seed(0)
        model: Any = nn.Linear(16, 8, dtype=torch.complex128)
        if kind == "ours":
            GradientSynchronizer(model, comm_hook=allreduce_hook)
        elif kind == "DDP":
            model = DistributedDataParallel(model)
            model.register_comm_hook(None, allreduce_hook)
        model(make_batch(dist.get_rank(), 0)[0].to(torch.complex128)).abs().square().mean().backward()
        found.append(flat_gradient(model))
    dist.all_reduce(torch.view_as_real(found[0]))
    for gradient in found[1:]:
        assert_close(gradient, found[0] / 2)


# --- the contract of a bucket -----------------------------------------------------------------------------------------


class Recorder:
    """A user's hook with state by bucket index: an exponential average of the reduced gradients, per bucket."""

    def __init__(self) -> None:
        self.averages: dict[int, Tensor] = {}
        self.calls: list[tuple[int, bool]] = []
        self.parameters: dict[int, list[int]] = {}
        self.problems: list[str] = []

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        self.calls.append((bucket.index(), bucket.is_last()))
        self._check(bucket)
        doubled = bucket.buffer() * 2
        bucket.set_buffer(doubled)
        if bucket.buffer() is not doubled:
            self.problems.append("buffer() after set_buffer")
        dist.all_reduce(doubled)
        doubled.div_(2 * dist.get_world_size())
        average = self.averages.setdefault(bucket.index(), torch.zeros_like(doubled))
        average.mul_(0.5).add_(doubled, alpha=0.5)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(average.clone())
        return future

    def _check(self, bucket: Any) -> None:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        if self.parameters.setdefault(bucket.index(), [*map(id, parameters)]) != [*map(id, parameters)]:
            self.problems.append("the parameters of a bucket changed")
        if [grad.shape for grad in gradients] != [parameter.shape for parameter in parameters]:
            self.problems.append("shapes of gradients()")
        if not torch.equal(torch.cat([grad.reshape(-1) for grad in gradients]), bucket.buffer()):
            self.problems.append("gradients() are not the buffer")
        if gradients[0].data_ptr() != bucket.buffer().data_ptr():
            self.problems.append("gradients() are not views")
        if any(
            not torch.equal(grad, parameter.grad)
            for grad, parameter in zip(gradients, parameters, strict=True)
            if parameter.grad is not None
        ):
            self.problems.append("the buffer is divided already")


@WORLD
def test_buckets_come_in_the_order_of_their_index_and_the_last_says_so_once() -> None:
    """Hooks get buckets in the order of their index."""
    recorder = Recorder()
    seen = train_ours(lambda: (None, recorder), bucket_cap_mb=MANY_BUCKETS)
    assert recorder.calls == ONCE * STEPS and recorder.problems == []
    assert_close(seen[0], train_ours(STOCK["allreduce_hook"])[0] / 2)
    # Parameters differ from then on; the first average is worth a half of a half in the second step.
    assert not torch.equal(seen[1], seen[0])


@WORLD
def test_is_last_is_said_once_also_where_a_bucket_is_sent_again() -> None:
    # In each backward the last layer's gradient comes twice, the second time at the end.
    recorder, calls = Recorder(), []
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)))
    sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=recorder)
    for _ in range(3):
        model.zero_grad()
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        for layer in (model[2], model[0], model[1], model[2]):
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()
        calls.append(list(recorder.calls))
        recorder.calls.clear()
    sync.close()
    first, *later = calls
    assert [call for call in first if call[1]] == [(5, True)]
    assert first[:6] == ONCE
    assert {index for index, _ in first[6:]} == {0, 1}  # weight and bias of the layer that came twice
    assert later == [ONCE, ONCE]  # from then on these buckets wait for the end


class Allocating:
    """A hook that supplies the buckets' memory."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.dtype, torch.device]] = []
        self.given: list[Tensor] = []
        self.reduced_elsewhere = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.asked.append((numel, dtype, device))
        self.given.append(torch.empty(numel, dtype=dtype, device=device))
        return self.given[-1]

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        own = {memory.untyped_storage().data_ptr() for memory in self.given}
        self.reduced_elsewhere += bucket.buffer().untyped_storage().data_ptr() not in own
        return allreduce_hook(None, bucket)


@WORLD
def test_a_hook_that_allocates_supplies_the_memory_that_gradients_live_in() -> None:
    hook, model = Allocating(), make_model()
    sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=hook)
    train(model, model, steps=3)
    parameters = list(model.parameters())[::-1]
    assert len(hook.asked) == 6  # once per bucket, not once per step
    for (numel, dtype, device), parameter in zip(hook.asked, parameters, strict=True):
        assert numel >= parameter.numel() and (dtype, device.type) == (torch.float64, "cpu")
    assert hook.reduced_elsewhere == 0
    own = [memory.untyped_storage().data_ptr() for memory in hook.given]
    assert [parameter.grad.untyped_storage().data_ptr() for parameter in parameters] == own
    sync.close()


@WORLD
def test_an_exception_in_a_hook_comes_out_of_backward() -> None:
    """`backward` raises the exception of your hook."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        raise ZeroDivisionError("in the hook")

    with pytest.raises(ZeroDivisionError, match="in the hook"):
        train_ours(lambda: (None, hook))


def test_grad_bucket_has_the_methods_of_torchs_and_views_with_the_shapes_of_the_parameters() -> None:
    """`GradBucket` has torch's methods."""
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))]
    buffer = torch.arange(7.0)
    bucket = GradBucket(4, buffer, parameters, is_last=True)
    assert {name for name in dir(dist.GradBucket) if not name.startswith("_")} <= set(dir(bucket))
    assert (bucket.index(), bucket.is_last()) == (4, True)
    assert bucket.buffer() is buffer
    assert all(one is other for one, other in zip(bucket.parameters(), parameters, strict=True))
    first, second = bucket.gradients()
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.shape == () and second == 6
    first.zero_()
    assert buffer.tolist() == [0, 0, 0, 0, 0, 0, 6]
    other = torch.ones(7, dtype=torch.float16)
    bucket.set_buffer(other)
    assert bucket.buffer() is other


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("ddp_zero_hook", "hook_with_zero_step", "it drives a ZeroRedundancyOptimizer"),
        ("optimizer_overlap_hooks", "_hook_then_optimizer", "it runs the optimizer from inside"),
        ("mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook", "use bf16_compress_hook instead"),
    ],
)
def test_a_hook_that_needs_ddp_itself_is_refused_by_name_with_the_reason(module: str, name: str, reason: str) -> None:
    """The library refuses hooks that need DDP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's farewell
        hook = getattr(importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}"), name)
    with pytest.raises(ConfigurationError, match=rf"{name} needs DistributedDataParallel: .*{reason}"):
        GradientSynchronizer(make_model(), comm_hook=hook)


def one_argument(bucket: Any) -> Any: ...


def three_arguments(state: Any, bucket: Any, more: Any) -> Any: ...


def keyword_only(state: Any, *, bucket: Any) -> Any: ...


CALLED = r"called as hook\(state, bucket\), but .*"


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("allreduce", r"must be callable as hook\(state, bucket\), got 'allreduce'"),
        (one_argument, rf"{CALLED}one_argument has the signature \(bucket"),
        (three_arguments, rf"{CALLED}three_arguments has the signature \(state.*more"),
        (keyword_only, rf"{CALLED}keyword_only has the signature \(state.*\*, bucket"),
        (torch.futures.Future().then, rf"{CALLED}then has the signature"),  # a bound method takes the callback alone
    ],
)
def test_a_hook_with_another_signature_is_refused_with_it(hook: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        GradientSynchronizer(make_model(), comm_hook=hook)


def test_functions_partials_objects_and_lambdas_are_accepted() -> None:
    """Hooks may be functions, partials, objects or lambdas."""
    for hook in (allreduce_hook, functools.partial(three_arguments, more=1), Recorder(), lambda *_: None):
        GradientSynchronizer(make_model(), comm_hook=hook).close()
