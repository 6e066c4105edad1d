"""Communication hooks that were written for DistributedDataParallel run unchanged, with the same numbers."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    mixed_precision_hooks,
    optimizer_overlap_hooks,
)
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

DDP_TAKES_COMPLEX = torch.__version__ >= (2, 11)  # that of torch 2.8 drops imaginary parts, or raises
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
STEPS = 6
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
BF16 = {"bf16_compress_hook": bf16_compress_hook, "bf16_compress_wrapper": bf16_compress_wrapper(allreduce_hook)}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)]
    return nn.Sequential(*layers).double()


def make_batch(rank: int, step: int, samples: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, 16, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 8, generator=generator, dtype=torch.float64)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int = STEPS) -> list[Tensor]:
    """The gradients of each step of plain SGD."""
    seen = []
    for step in range(steps):
        model.zero_grad()
        x, y = make_batch(dist.get_rank(), step)
        mse_loss(forward(x), y).backward()
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


# --- what runs on the ranks -------------------------------------------------------------------------------------


def stock(name: str) -> dict[str, Any]:
    return {
        "DDP": train_ddp(STOCK[name]),
        "one bucket": train_ours(STOCK[name]),
        "many buckets": train_ours(STOCK[name], bucket_cap_mb=MANY_BUCKETS),
    }


def bf16(name: str) -> dict[str, Any]:
    """DDP refuses these hooks on gloo, so the truth is computed by hand."""
    found: dict[str, Any] = {"ours": train_ours(lambda: (None, BF16[name]), bucket_cap_mb=MANY_BUCKETS)[0]}
    model = make_model()
    total = torch.zeros(1, dtype=torch.bfloat16)
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        x, y = make_batch(rank, 0)
        mse_loss(model(x), y).backward()
        total = total + flat_gradient(model).bfloat16() / dist.get_world_size()
    found["by hand"] = total.double()
    try:
        train_ddp(lambda: (None, BF16[name]))
    except (TypeError, RuntimeError) as error:
        found["DDP"] = str(error)
    return found


def complex_parameters() -> dict[str, Any]:
    found = {}
    for name in ("ours", "by hand", *(("DDP",) if DDP_TAKES_COMPLEX else ())):
        torch.manual_seed(0)
        model = nn.Linear(16, 8, dtype=torch.complex128)
        x, _ = make_batch(dist.get_rank(), 0)
        if name == "ours":
            sync = GradientSynchronizer(model, comm_hook=allreduce_hook)
            model(x.to(torch.complex128)).abs().square().mean().backward()
            sync.close()
        elif name == "by hand":
            model(x.to(torch.complex128)).abs().square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(torch.view_as_real(parameter.grad))
                parameter.grad /= dist.get_world_size()
        else:
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(None, allreduce_hook)
            ddp(x.to(torch.complex128)).abs().square().mean().backward()
        found[name] = flat_gradient(model)
    return found


def unequal_weights() -> dict[str, Any]:
    """7 and 3 samples, two steps; the second has 2 and 6, a total that the first cannot tell."""
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    for total_known in (True, False):
        model = make_model()
        sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=allreduce_hook)
        errors = []
        for step, samples in enumerate([(7, 3), (2, 6)]):
            model.zero_grad()
            sync.weigh(samples[rank], sum(samples) if total_known else None)
            x, y = make_batch(rank, step, samples[rank])
            mse_loss(model(x), y).backward()
            plain = make_model()
            parts = [make_batch(other, step, count) for other, count in enumerate(samples)]
            whole_x, whole_y = (torch.cat(part) for part in zip(*parts, strict=True))
            mse_loss(plain(whole_x), whole_y).backward()
            truth = flat_gradient(plain)
            errors.append(float((flat_gradient(model) - truth).norm() / truth.norm()))
        sync.close()
        found["total known" if total_known else "total unknown"] = errors
    return found


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


def users_hook() -> dict[str, Any]:
    recorder = Recorder()
    seen = train_ours(lambda: (None, recorder), bucket_cap_mb=MANY_BUCKETS)
    calls = [recorder.calls[start : start + 6] for start in range(0, len(recorder.calls), 6)]
    return {"calls": calls, "problems": recorder.problems, "seen": seen, "plain": train_ours(STOCK["allreduce_hook"])}


def hook_with_a_bucket_sent_again() -> list[list[tuple[int, bool]]]:
    """The calls of each backward in which the last layer's gradient comes twice, the second time at the end."""
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
    return calls


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


def hook_with_memory() -> dict[str, Any]:
    hook = Allocating()
    model = make_model()
    sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=hook)
    train(model, model, steps=3)
    own = [memory.untyped_storage().data_ptr() for memory in hook.given]
    gradients = [parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()]
    sync.close()
    return {
        "asked": hook.asked,
        "sizes": [parameter.numel() for parameter in reversed(list(model.parameters()))],
        "reduced elsewhere": hook.reduced_elsewhere,
        "gradients lie in it": gradients == own[::-1],
    }


def failing_hook() -> str:
    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        raise ZeroDivisionError("in the hook")

    model = make_model()
    sync = GradientSynchronizer(model, comm_hook=hook)
    try:
        train(model, model, steps=1)
    except ZeroDivisionError as error:
        return str(error)
    finally:
        sync.close()
    return "nothing raised"


BODIES: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(stock, name) for name in STOCK},
    **{name: functools.partial(bf16, name) for name in BF16},
    "complex": complex_parameters,
    "unequal": unequal_weights,
    "user": users_hook,
    "again": hook_with_a_bucket_sent_again,
    "allocate": hook_with_memory,
    "failing": failing_hook,
}


def run_body(name: str) -> Any:
    return BODIES[name]()


@functools.cache
def on_ranks(name: str) -> list[Any] | str:
    try:
        return run_distributed(run_body, 2, name)
    except AssertionError as error:
        return str(error)  # cached as well, so that a start that failed is not repeated for every test


def results_of(name: str) -> list[Any]:
    found = on_ranks(name)
    assert not isinstance(found, str), found
    return found


# --- the numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_hook_gives_the_gradients_that_it_gives_under_ddp(name: str) -> None:
    for found in results_of(name):
        assert len(found["DDP"]) == STEPS
        for ours, theirs in zip(found["one bucket"], found["DDP"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in STOCK if not name.startswith("powerSGD")])
def test_a_hook_without_state_per_bucket_does_not_depend_on_the_buckets(name: str) -> None:
    for found in results_of(name):
        for many, one in zip(found["many buckets"], found["one bucket"], strict=True):
            torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-14)


def test_the_compression_of_powersgd_sets_in_after_its_warm_up() -> None:
    for exact, compressed in zip(results_of("allreduce_hook"), results_of("powerSGD_hook"), strict=True):
        for step, (one, other) in enumerate(zip(exact["one bucket"], compressed["one bucket"], strict=True)):
            error = float((one - other).norm() / one.norm())
            assert error < 1e-12 if step < COMPRESSED else error > 0.1, (step, error)


def test_post_local_sgd_stops_communicating_after_its_warm_up_and_noop_never_starts() -> None:
    first, second = results_of("post_localSGD_hook")
    for step in range(STEPS):
        assert torch.equal(first["one bucket"][step], second["one bucket"][step]) == (step < COMPRESSED), step
    first, second = results_of("noop_hook")
    assert not torch.equal(first["one bucket"][0], second["one bucket"][0])


@pytest.mark.parametrize("name", BF16)
def test_bf16_compression_works_on_gloo_where_ddp_refuses_it(name: str) -> None:
    for found in results_of(name):
        assert torch.equal(found["ours"], found["by hand"])
        # A build of torch for CUDA lets DDP do it on gloo, too.
        assert "BF16" in found["DDP"] if torch.version.cuda is None else "DDP" not in found


def test_complex_gradients_pass_through_a_hook_as_under_ddp() -> None:
    for found in results_of("complex"):
        assert found["ours"].dtype is torch.complex128
        torch.testing.assert_close(found["ours"], found["by hand"], rtol=1e-12, atol=1e-14)
        if DDP_TAKES_COMPLEX:
            torch.testing.assert_close(found["ours"], found["DDP"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("total", ["total known", "total unknown"])
def test_a_hook_with_7_and_3_samples_gives_the_gradient_of_one_process(total: str) -> None:
    for found in results_of("unequal"):
        assert max(found[total]) < 1e-12


# --- the contract of a bucket -----------------------------------------------------------------------------------


def test_buckets_come_in_the_order_of_their_index_and_the_last_says_so_once() -> None:
    expected = [(index, index == 5) for index in range(6)]
    for found in results_of("user"):
        assert found["calls"] == [expected] * STEPS
        assert found["problems"] == []


def test_a_users_hook_keeps_state_by_bucket_index() -> None:
    for found in results_of("user"):
        torch.testing.assert_close(found["seen"][0], found["plain"][0] / 2, rtol=1e-12, atol=1e-14)
        # Parameters differ from then on; the first average is worth a half of a half in the second step.
        assert not torch.equal(found["seen"][1], found["seen"][0])


def test_is_last_is_said_once_also_where_a_bucket_is_sent_again() -> None:
    once = [(index, index == 5) for index in range(6)]
    for first, *later in results_of("again"):
        assert [call for call in first if call[1]] == [(5, True)]
        assert first[:6] == once
        assert {index for index, _ in first[6:]} == {0, 1}  # weight and bias of the layer that came twice
        assert later == [once, once]  # from then on these buckets wait for the end


def test_a_hook_that_allocates_supplies_the_memory_that_gradients_live_in() -> None:
    for found in results_of("allocate"):
        assert len(found["asked"]) == 6  # once per bucket, not once per step
        for (numel, dtype, device), size in zip(found["asked"], found["sizes"], strict=True):
            assert numel >= size
            assert (dtype, device.type) == (torch.float64, "cpu")
        assert found["reduced elsewhere"] == 0
        assert found["gradients lie in it"]


def test_an_exception_in_a_hook_comes_out_of_backward() -> None:
    assert results_of("failing") == ["in the hook"] * 2


def test_grad_bucket_has_the_methods_of_torchs_and_views_with_the_shapes_of_the_parameters() -> None:
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


# --- refusals ---------------------------------------------------------------------------------------------------


class Weakly:
    """Something that a weak reference can point to."""

    process_group = None
    _overlap_with_ddp = True


def zero_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    return zero_hooks(monkeypatch).hook_with_zero_step(allreduce_hook, Weakly(), Weakly())


def interleaved_zero_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    return zero_hooks(monkeypatch).hook_with_zero_step_interleaved(allreduce_hook, Weakly(), Weakly())


def zero_hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")  # torch itself refuses gloo
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's farewell
        return importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")


def optimizer_hook(_: pytest.MonkeyPatch) -> Any:
    return optimizer_overlap_hooks._hook_then_optimizer(allreduce_hook, Weakly())


def optimizer_in_backward_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "Stream", Weakly)  # needs an accelerator
    return optimizer_overlap_hooks._apply_optim_in_backward_hook(gradient_is_bucket_view=False)


def mixed_precision_hook(_: pytest.MonkeyPatch) -> Any:
    return mixed_precision_hooks._reducer_allreduce_and_upcast_hook


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (zero_hook, "hook_with_zero_fn", "it drives a ZeroRedundancyOptimizer"),
        (interleaved_zero_hook, "hook_with_zero_interleaved_fn", "it drives a ZeroRedundancyOptimizer"),
        (optimizer_hook, "hook_then_optimizer_wrapper", "it runs the optimizer from inside"),
        (optimizer_in_backward_hook, "apply_optim_in_backward_hook", "it runs the optimizer from inside"),
        (mixed_precision_hook, "_reducer_allreduce_and_upcast_hook", "use bf16_compress_hook instead"),
    ],
)
def test_a_hook_that_needs_ddp_itself_is_refused_by_name_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], Any], name: str, reason: str
) -> None:
    hook = make(monkeypatch)
    with pytest.raises(ConfigurationError) as caught:
        GradientSynchronizer(make_model(), comm_hook=hook)
    assert name in str(caught.value)
    assert "needs DistributedDataParallel" in str(caught.value)
    assert reason in str(caught.value)


def test_what_cannot_be_called_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigurationError, match=r"must be callable as hook\(state, bucket\), got 'allreduce'"):
        GradientSynchronizer(make_model(), comm_hook="allreduce")  # type: ignore[arg-type]


def one_argument(bucket: Any) -> Any: ...


def three_arguments(state: Any, bucket: Any, more: Any) -> Any: ...


def keyword_only(state: Any, *, bucket: Any) -> Any: ...


@pytest.mark.parametrize(
    ("hook", "signature"),
    [
        (one_argument, r"one_argument has the signature \(bucket"),
        (three_arguments, r"three_arguments has the signature \(state.*more"),
        (keyword_only, r"keyword_only has the signature \(state.*\*, bucket"),
        (torch.futures.Future.then, "then has the signature"),
    ],
)
def test_a_hook_with_another_signature_is_refused_with_it(hook: Any, signature: str) -> None:
    if hook is torch.futures.Future.then:
        hook = torch.futures.Future().then  # a bound method takes the callback alone
    with pytest.raises(ConfigurationError, match=rf"called as hook\(state, bucket\), but .*{signature}"):
        GradientSynchronizer(make_model(), comm_hook=hook)


@pytest.mark.parametrize(
    "hook", [allreduce_hook, functools.partial(three_arguments, more=1), Recorder(), lambda *_: None]
)
def test_functions_partials_objects_and_lambdas_are_accepted(hook: Any) -> None:
    GradientSynchronizer(make_model(), comm_hook=hook).close()
