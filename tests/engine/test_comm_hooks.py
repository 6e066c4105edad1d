"""Communication hooks that were written for DistributedDataParallel run unchanged, with the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_worlds import World
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

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.comm_hooks import GradBucket

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)

MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
STEPS = 6
ONCE = [(index, index == 5) for index in range(6)]  # index and is_last of the calls in a backward
COMPRESSED = 2  # the step from which the hooks with a warm-up compress, or stop communicating


def power_sgd_state(**options: Any) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=COMPRESSED, **options)


def local_sgd_state() -> PostLocalSGDState:
    subgroup, _ = dist.new_subgroups(group_size=1)
    return PostLocalSGDState(None, subgroup, start_localSGD_iter=COMPRESSED)


# Name -> the state and the hook, made on the ranks; every stock hook that DDP takes on gloo, and a wrapper.
STOCK: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce_hook": lambda: (None, allreduce_hook),
    "fp16_compress_hook": lambda: (None, fp16_compress_hook),
    "powerSGD_hook": lambda: (power_sgd_state(), powerSGD_hook),
    "powerSGD_hook in a wrapper": lambda: (
        power_sgd_state(use_error_feedback=False, warm_start=False),
        fp16_compress_wrapper(powerSGD_hook),
    ),
    "post_localSGD_hook": lambda: (local_sgd_state(), post_localSGD_hook),
    "noop_hook": lambda: (None, noop_hook),
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


def train(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradients of each step of plain SGD."""
    seen = []
    for step in range(STEPS):
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
    assert_close(one_bucket, under_ddp)
    if not name.startswith("powerSGD"):  # whose state is kept by bucket
        assert_close(train_ours(STOCK[name], bucket_cap_mb=MANY_BUCKETS), one_bucket)


@WORLD
def test_bf16_compression_works_on_gloo() -> None:
    """bfloat16 hooks work on gloo, too."""
    size, expected = dist.get_world_size(), torch.zeros(1, dtype=torch.bfloat16)
    for rank in range(size):
        backward(model := make_model(), *make_batch(rank, 0))
        expected = expected + flat_gradient(model).bfloat16() / size
    for hook in (bf16_compress_hook, bf16_compress_wrapper(allreduce_hook)):
        assert torch.equal(train_ours(lambda hook=hook: (None, hook), bucket_cap_mb=MANY_BUCKETS)[0], expected.double())


# --- the contract of a bucket -----------------------------------------------------------------------------------------


class Recorder:
    """A user's hook that notes index and ``is_last`` of each bucket; the memory of the buckets is its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.given: list[int] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(numel, dtype=dtype, device=device)
        self.given.append(memory.data_ptr())
        return memory

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        parameters, gradients = bucket.parameters(), bucket.gradients()
        assert [gradient.shape for gradient in gradients] == [parameter.shape for parameter in parameters]
        assert gradients[0].data_ptr() == bucket.buffer().data_ptr() in self.given
        self.calls.append((bucket.index(), bucket.is_last()))
        return allreduce_hook(None, bucket)


@WORLD
def test_buckets_come_in_the_order_of_their_index_and_in_the_memory_that_the_hook_has_given() -> None:
    """Hooks get buckets in the order of their index."""
    recorder, model = Recorder(), make_model()
    sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=recorder)
    train(model, model)
    sync.close()
    assert recorder.calls == ONCE * STEPS
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert {gradient.data_ptr() for gradient in gradients} <= {*recorder.given}


@WORLD
def test_is_last_is_said_once_also_where_a_bucket_is_sent_again() -> None:
    # In each backward the last layer's gradient comes twice, the second time at the end.
    recorder = Recorder()
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)))
    sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=recorder)
    for again in ([(0, False), (1, False)], []):  # then these buckets, weight and bias, wait for the end
        model.zero_grad()
        recorder.calls.clear()
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        for layer in (model[2], model[0], model[1], model[2]):
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()
        assert recorder.calls == [*ONCE, *again]
    sync.close()


@WORLD
def test_an_exception_in_a_hook_comes_out_of_backward() -> None:
    """`backward` raises the exception of your hook."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        raise ZeroDivisionError("in the hook")

    with pytest.raises(ZeroDivisionError, match="in the hook"):
        train_ours(lambda: (None, hook))


@WORLD
def test_a_model_whose_buckets_change_is_refused_as_a_hook_may_keep_state_for_each() -> None:
    model = make_model()
    synchronizer = GradientSynchronizer(model, comm_hook=allreduce_hook)
    model[4] = nn.Linear(32, 8).double()  # of the same shapes
    synchronizer.follow()
    model[4] = nn.Linear(32, 9).double()
    with pytest.raises(ConfigurationError, match="keep state for each bucket"):
        synchronizer.follow()
    synchronizer.close()


def test_grad_bucket_has_the_methods_of_torchs() -> None:
    """`GradBucket` has torch's methods."""
    assert {name for name in dir(dist.GradBucket) if not name.startswith("_")} <= set(dir(GradBucket))


# --- what can be a hook -----------------------------------------------------------------------------------------------


def three_arguments(state: Any, bucket: Any, more: Any) -> Any: ...


def keyword_only(state: Any, *, bucket: Any) -> Any: ...


def test_functions_partials_objects_and_lambdas_are_accepted() -> None:
    """Hooks may be functions, partials, objects or lambdas."""
    for hook in (allreduce_hook, functools.partial(three_arguments, more=1), Recorder(), lambda *_: None):
        GradientSynchronizer(make_model(), comm_hook=hook).close()


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (three_arguments, r"called as hook\(state, bucket\), but three_arguments has the signature \(state.*more"),
        (keyword_only, r"keyword_only has the signature \(state.*\*, bucket"),
        (torch.futures.Future().then, "then has the signature"),  # a bound method takes the callback alone
    ],
)
def test_a_hook_with_another_signature_is_refused_with_it(hook: Any, says: str) -> None:
    """The library refuses hooks with another signature."""
    with pytest.raises(ConfigurationError, match=says):
        GradientSynchronizer(make_model(), comm_hook=hook)
