"""The gradient engine where no generated program comes: beside DDP, refusals, memory, one process."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_worlds import World
from step_programs import MANY_BUCKETS, Explodes, synchronizer_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_callbacks.batch_norm.layers import BatchNormSynchronizer
from ddp_callbacks.comm.collectives import all_gather_object, broadcast_object
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.gradients import GradientSynchronizer

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)

FEATURES = 4
SAMPLES = 4  # of each rank in each step
WAYS = ("many buckets", "gloo", "comm hook")


def mlp(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)


def mean_loss(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def backward(model: nn.Module, step: int) -> None:
    """Of this rank's part."""
    mean_loss(model(batch(dist.get_rank(), step))).backward()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def error_of(model: nn.Module, step: int) -> float:
    """Of the gradient, beside that of the mean over both ranks by plain torch."""
    plain = copy.deepcopy(model)
    losses = [mean_loss(plain(batch(rank, step))) for rank in range(2)]
    parts = torch.autograd.grad(torch.stack(losses).mean(), list(plain.parameters()))
    truth = torch.cat([part.flatten() for part in parts])
    return float((flat_gradient(model) - truth).norm() / truth.norm())


@WORLD
def test_with_7_and_3_samples_the_gradient_of_ddp_is_off_by_41_6_percent_and_ours_by_rounding() -> None:
    """7 and 3 samples give 10's gradient; DDP errs by 41.6 %. Equal batches give DDP's."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 10), torch.randn(10, 8), torch.randn(10, 10)
    model, x, y = model.double(), x.double(), y.double()
    whole, ddp = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(model))
    mse_loss(whole(x), y).backward()
    truth = flat_gradient(whole)

    def error_with(net: nn.Module, samples: int) -> float:
        """Of a rank's part: the first or the last samples."""
        net.zero_grad()
        part = slice(samples) if dist.get_rank() == 0 else slice(10 - samples, None)
        mse_loss(net(x[part]), y[part]).backward()
        return float((flat_gradient(net) - truth).norm() / truth.norm())

    own = (7, 3)[dist.get_rank()]
    assert error_with(ddp, 5) < 1e-12
    assert error_with(ddp, own) == pytest.approx(0.41600819, abs=1e-8)
    sync = GradientSynchronizer(model)
    assert error_with(model, 5) < 1e-12
    for total in (10, None):
        sync.weigh(own, total)
        assert error_with(model, own) < 1e-12


@WORLD
def test_weights_of_parts_are_right_where_no_gradient_passes_a_batchnorm() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    sync, whole = GradientSynchronizer(model), torch.cat([batch(0, 0), batch(0, 1)])
    own = slice(3) if dist.get_rank() else slice(3, 8)
    with contextlib.closing(BatchNormSynchronizer(model)):
        mean_loss(model(whole[:4])).backward()  # of equal parts: passes it
        model[2].zero_grad()
        sync.weigh(len(whole[own]), 8)
        mean_loss(model[2](model[1](whole[own, :2]).detach())).backward()
    seen = nn.functional.batch_norm(whole[:, :2], None, None, model[1].weight, model[1].bias, True)
    wanted = torch.autograd.grad(mean_loss(model[2](seen.detach())), list(model[2].parameters()))
    torch.testing.assert_close(flat_gradient(model[2]), torch.cat([each.flatten() for each in wanted]))


# --- around the backward ------------------------------------------------------------------------------------------


@WORLD
def test_a_gradient_that_the_user_keeps_is_not_overwritten() -> None:
    """Gradients that you keep stay; earlier runs release theirs."""
    model = mlp()
    sync = GradientSynchronizer(model)
    weight = model[2].weight
    ways_to_keep: list[Callable[[Tensor], Any]] = [
        lambda gradient: gradient,
        lambda gradient: gradient.detach(),
        lambda gradient: gradient[1:3],
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient.detach().numpy(),
        lambda gradient: gradient.untyped_storage(),
    ]
    kept, copies = [], []
    for step in range(12):
        model.zero_grad(set_to_none=step % 4 != 3)
        backward(model, step)
        if step % 4 != 2:  # plain torch, too, writes over it in a step that begins with zero_grad(set_to_none=False)
            kept.append(ways_to_keep[step % len(ways_to_keep)](weight.grad))
            copies.append(copy.deepcopy(kept[-1]))
    sync.close()
    for one, other in zip(kept, copies, strict=True):
        is_storage = isinstance(one, torch.UntypedStorage)
        assert bytes(one) == bytes(other) if is_storage else (one == other).all()


@WORLD
def test_the_gradients_of_an_earlier_run_are_let_go() -> None:
    model = mlp()
    earlier: list[Any] = []
    for _ in range(2):
        sync = GradientSynchronizer(model)
        model.zero_grad()
        backward(model, 0)
        sync.close()
        assert [reference() for reference in earlier] == [None] * len(earlier)
        earlier = [weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


@WORLD
def test_a_parameter_frozen_after_the_forward_pass_has_no_gradient_instead_of_zeros() -> None:
    # Autograd calls its hook all the same, which said "used" after its bucket had been sent without it.
    sync = synchronizer_of(model := mlp(), "a few buckets")
    loss = mean_loss(model(batch(dist.get_rank(), 0)))
    model[2].requires_grad_(False)  # in one bucket with model[4], whose gradients come first
    loss.backward()
    assert [parameter.grad is None for parameter in model.parameters()] == [False, False, True, True, False, False]
    sync.close()


@WORLD
def test_gradients_that_wait_from_no_sync_are_summed_though_their_bucket_has_been_frozen() -> None:
    for way in WAYS:
        sync = synchronizer_of(model := mlp(), way)
        with sync.no_sync():
            backward(model, 0)
        frozen = list(model[2].parameters())
        own = [parameter.requires_grad_(False).grad.clone() for parameter in frozen]
        mean_loss(model[4:](batch(dist.get_rank(), 1))).backward()
        for parameter, gradient in zip(frozen, own, strict=True):
            dist.all_reduce(gradient)
            torch.testing.assert_close(parameter.grad, gradient / 2, rtol=1e-12, atol=0)
        sync.close()


def seconds_of(sync: GradientSynchronizer) -> list[float]:
    return list(sync.times._seconds.values())


@WORLD
def test_the_forward_pass_of_a_batch_that_accumulates_does_not_count_as_backward() -> None:
    sync = GradientSynchronizer(model := mlp())
    with sync.no_sync():
        loss = mean_loss(model(batch(dist.get_rank(), 0)))
        before = seconds_of(sync)
        loss.backward()
        assert [now > 0 for now in seconds_of(sync)] == [False, True, False] and sum(before) == 0
    assert [now > 0 for now in seconds_of(sync)] == [False, True, True]
    sync.close()


@WORLD
def test_a_sum_that_is_added_to_a_mean_counts_as_a_sum() -> None:
    sync = GradientSynchronizer(model := mlp())
    backward(model, 0)
    mean = flat_gradient(model).clone()
    sync.weigh(1, 1)
    backward(model, 0)
    torch.testing.assert_close(flat_gradient(model), 3 * mean, rtol=1e-12, atol=0)
    sync.close()


def new_head(model: Any) -> None:
    model[-2] = nn.Linear(FEATURES, FEATURES).double()  # drawn apart


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def longer(model: Any) -> None:
    for layer, dim in ((model[0], 0), (model[2], 1)):
        layer.weight.data = torch.cat([layer.weight.data, layer.weight.data.narrow(dim, 0, 1)], dim)
    model[0].bias.data = torch.cat([model[0].bias.data, model[0].bias.data[:1]])


def there_and_back(model: nn.Module) -> None:
    model.float()
    model.double()


CHANGES: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (new_head, assigned, longer, there_and_back)
}


@WORLD.each(CHANGES)
def test_a_model_that_changes_between_two_steps_still_has_the_gradient_of_the_whole_batch(name: str) -> None:
    """Parameters that were replaced, added or moved are synchronized, with their weights."""
    sync, rank = GradientSynchronizer(model := mlp()), dist.get_rank()
    sync.weigh(1 + 2 * rank, 4)
    backward(model, 0)
    torch.manual_seed(rank)
    CHANGES[name](model)
    model.zero_grad()
    sync.weigh(1 + 2 * rank, 4)
    backward(model, 1)
    losses = [mean_loss(model(batch(other, 1))) for other in range(2)]
    expected = torch.autograd.grad((losses[0] + 3 * losses[1]) / 4, list(model.parameters()))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected), rtol=1e-12, atol=0)
    sync.close()


@WORLD
def test_what_a_program_computes_by_autograd_grad_is_not_weighted() -> None:
    sync = GradientSynchronizer(model := mlp())
    expected = torch.autograd.grad(mean_loss(model(batch(0, 0))), list(model.parameters()))
    sync.weigh(1 + 2 * dist.get_rank(), 4)
    found = torch.autograd.grad(mean_loss(model(batch(0, 0))), list(model.parameters()))
    assert all(map(torch.equal, found, expected))
    sync.close()


def looks(model: nn.Module) -> Any:
    values = [(name, value.tolist()) for name, value in model.state_dict().items()]
    hooks = [bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]
    return [(type(module), *vars(module)) for module in model.modules()], values, hooks


@WORLD
def test_the_model_and_its_copies_are_plain() -> None:
    """Nothing wraps your model; its copies are plain."""
    model, plain = mlp(), looks(mlp())
    sync = GradientSynchronizer(model)
    backward(model, 0)
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    assert looks(model)[:2] == plain[:2]
    sync.close()
    assert [*map(looks, copies), looks(model)] == [plain] * 4


@WORLD.each(WAYS)
def test_a_backward_that_fails_leaves_the_same_collectives_behind_on_every_rank(way: str) -> None:
    """Training goes on after an exception in mid-backward."""
    # A bucket was given to the hook only if the hook had finished the one before by then. That is a matter of time,
    # so that a backward which raised half-way had started more collectives on one rank than on another, and from
    # then on gloo paired up those of different buckets: it ended the process, or the run stood still.
    model = mlp(6)
    sync = synchronizer_of(model, way)
    for _ in range(40):
        for middle in (Explodes.apply, torch.clone):
            model.zero_grad()
            with contextlib.suppress(ZeroDivisionError):
                mean_loss(model[6:](middle(model[:6](batch(dist.get_rank(), 2))))).backward()
        assert error_of(model, 2) < 1e-12
    sync.close()


class Tells(torch.autograd.Function):
    """Sets a key in the ranks' store once backward has come here."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, store: dist.Store) -> Tensor:
        context.store = store
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.store.set("rank 0 has launched a later sum", "")
        return gradient, None


@WORLD
def test_a_sum_that_a_failed_backward_has_left_in_flight_does_not_change_later_gradients() -> None:
    # The other rank joins in the abandoned sum when rank 0 has filled the next one, in the same memory.
    model = nn.Sequential(nn.Linear(FEATURES, 300), nn.Linear(300, 300), nn.Linear(300, FEATURES)).double()
    store = dist.PrefixStore("in flight", dist.distributed_c10d._get_default_store())
    sync = synchronizer_of(model, "gloo")  # an all-reduce of 720 kB is in place
    if dist.get_rank():
        store.wait(["rank 0 has launched a later sum"])
    with pytest.raises(ZeroDivisionError):
        mean_loss(model[1:](Explodes.apply(model[:1](batch(dist.get_rank(), 0))))).backward()
    model.zero_grad()
    mean_loss(model[1:](Tells.apply(model[:1](batch(dist.get_rank(), 1)), store))).backward()
    assert error_of(model, 1) < 1e-12
    sync.close()


@WORLD
def test_a_sparse_gradient_stays_as_the_dense_ones_do_where_no_rank_counts() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    sync = GradientSynchronizer(model)
    before = []
    for weight in (1 + dist.get_rank(), 0):  # without a total
        sync.weigh(weight)
        model(torch.tensor([dist.get_rank(), 2])).sum().backward()
        before.append([parameter.grad.to_dense().clone() for parameter in model.parameters()])
    for first, second in zip(*before, strict=True):
        assert first.any() and torch.equal(first, second)
    sync.close()


# --- refused ------------------------------------------------------------------------------------------------------


@WORLD.each(WAYS)
def test_parameters_that_only_some_ranks_freeze_are_named_with_the_ranks(way: str) -> None:
    """An error names ranks that freeze other parameters."""
    model = mlp()
    sync = synchronizer_of(model, way)
    backward(model, 0)
    model[2 * dist.get_rank()].requires_grad_(False)
    with pytest.raises(MismatchError, match="the ranks disagree about what this backward trains:") as caught:
        backward(model, 0)
    assert "0.weight: frozen on rank 0; trained on rank 1" in str(caught.value)
    assert "2.bias: trained on rank 0; frozen on rank 1" in str(caught.value)
    model.requires_grad_(True)
    model.zero_grad()
    backward(model, 1)
    assert error_of(model, 1) < 1e-12  # the same buckets are summed again
    sync.close()


@WORLD
def test_a_rank_that_weighs_no_part_is_named() -> None:
    sync = GradientSynchronizer(model := mlp())
    sync.weigh(7 - 5 * dist.get_rank(), 9)
    backward(model, 0)
    if dist.get_rank():
        sync.weigh(1, 4)  # a smaller batch, in which rank 0 has no sample
    says = "the weights of this backward:\n  total weight: 9 on rank 0; 4 on rank 1"
    with pytest.raises(MismatchError, match=says):
        backward(model, 0)
    sync.close()


def other_shapes() -> None:
    rank = dist.get_rank()
    last = nn.Linear(3, 2).requires_grad_(rank == 0)
    GradientSynchronizer(nn.ModuleDict({"first": nn.Linear(2, 3 + rank), "last": last}))


def a_negative_weight() -> None:
    GradientSynchronizer(mlp()).weigh(-1, 2)


def change_a_weight_without_total() -> None:
    sync = GradientSynchronizer(model := mlp())
    for weight in (5, 7):
        sync.weigh(weight)
        with sync.no_sync():
            backward(model, 0)


def step_in_backward(parameter: Tensor) -> None:
    """Would see gradients before they are summed."""
    raise AssertionError("it was called")


def a_hook_before() -> None:
    model = mlp()
    model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
    GradientSynchronizer(model)


def a_hook_afterwards() -> None:
    sync = GradientSynchronizer(model := mlp())
    model[0].weight.register_post_accumulate_grad_hook(step_in_backward)
    sync.weigh(1)
    backward(model, 0)


def a_layer_that_the_forward_pass_makes() -> None:
    sync = GradientSynchronizer(model := mlp())
    sync.weigh(1)
    new_head(model)
    backward(model, 0)


def step_with_gradients_of_no_sync() -> None:
    sync = GradientSynchronizer(model := mlp())
    optimizer, other = (torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2]))
    sync.weigh(1, 2)
    with sync.no_sync():
        mean_loss(model(batch(0, 0))).backward()
    other.zero_grad()
    other.step()  # nothing is lost: it has no gradient
    optimizer.step(lambda: sync.synchronize())  # as the backward of a closure does
    with sync.no_sync():
        mean_loss(model(batch(0, 0))).backward()
    optimizer.step()


def two_models_in_another_order() -> None:
    models = [nn.Linear(3, 1) for _ in range(2)]
    kept = [GradientSynchronizer(model) for model in models]
    order = models if dist.get_rank() else models[::-1]
    mean_loss(sum(model(torch.ones(1, 3)) for model in order)).backward()
    del kept


def weigh_behind_layers_that_mix_gradients() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    sync = GradientSynchronizer(model)
    with contextlib.closing(BatchNormSynchronizer(model)):
        for weights in ((4.0, 8.0), (3.0 + 2 * dist.get_rank(), 8.0)):  # those of equal parts are right
            sync.weigh(*weights)
            backward(model, 0)


def models_that_nobody_has_broadcast() -> None:
    sync = GradientSynchronizer(model := mlp())
    model[2].weight.data += dist.get_rank()
    sync.weigh(1, 2)
    backward(model, 0)
    torch.optim.SGD(model.parameters(), 0.1).step()


def warnings_of(*optimizers: torch.optim.Optimizer) -> ConfigurationError:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            optimizer.step()
    return ConfigurationError(" ".join(broadcast_object([str(each.message) for each in caught], "the warnings")))


def a_parameter_that_no_synchronizer_has() -> None:
    sync = GradientSynchronizer(model := mlp())
    loose = nn.Parameter(torch.zeros(3))
    sync.weigh(1, 2)
    (mean_loss(model(batch(dist.get_rank(), 0))) * loose.exp().sum()).backward()
    told = warnings_of(torch.optim.SGD([*model.parameters(), loose], 0.1))
    sync.close()
    raise told


def a_model_that_no_synchronizer_has() -> None:
    sync = GradientSynchronizer(generator := mlp())
    discriminator, alike = mlp(1), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(alike.weight)
    sync.weigh(1, 2)
    for model in (generator, discriminator):
        backward(model, 0)
    alike(torch.ones(1)).backward()
    told = warnings_of(*(torch.optim.SGD(model.parameters(), 0.1) for model in (alike, discriminator, generator)))
    sync.close()
    raise told


def a_line_search_by_the_loss_of_the_part() -> None:
    sync = GradientSynchronizer(model := mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=2, line_search_fn="strong_wolfe")
    sync.weigh(1, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model(batch(dist.get_rank(), 0) * 3 ** dist.get_rank()))
        loss.backward()
        return loss

    optimizer.step(closure)


HOOK = "has a hook of register_post_accumulate_grad_hook: step_in_backward"
TOLD: dict[Callable[[], None], tuple[str, ...]] = {
    other_shapes: (
        "parameter first.weight: [3, 2] float32 on rank 0; [4, 2] float32 on rank 1",
        "parameter last.bias: [2] float32 on rank 0; [2] float32 frozen on rank 1",
    ),
    a_negative_weight: ("weights must not be negative, got weigh(-1, 2).",),
    change_a_weight_without_total: (
        "a weight without a total must not change while gradients",
        "it was weigh(5), got weigh(7)",
    ),
    a_hook_before: (f"2.weight {HOOK}",),
    a_hook_afterwards: (f"0.weight {HOOK}",),
    a_layer_that_the_forward_pass_makes: ("parameter 4.weight was added, replaced or moved since", "call weigh()"),
    step_with_gradients_of_no_sync: ("stepped with a gradient of parameter 0.weight", "call synchronize() of the"),
    weigh_behind_layers_that_mix_gradients: ("1 is a BatchNorm that mixes", "Call weigh_loss(loss, weight, total)"),
    models_that_nobody_has_broadcast: (
        "the ranks hold different models after step 1 (is there a broadcast_parameters in front",
        "parameter 2.weight: rank 1",
    ),
    a_parameter_that_no_synchronizer_has: ("each process trains parameters of its own", "Their shapes: [3]. Make a"),
    a_model_that_no_synchronizer_has: (
        "each process trains parameters of its own",
        "Their shapes: [4, 4], [4]. Make a",
    ),
    a_line_search_by_the_loss_of_the_part: (
        "the ranks hold different models after step 1",
        "(a logged loss, or what a closure returns to LBFGS)",
    ),
    two_models_in_another_order: ("waits for the gradients of bias to weight (synchronizer ", "in the same order"),
}
MISTAKES = {mistake.__name__: mistake for mistake in TOLD}


@WORLD.each(MISTAKES)
def test_what_would_give_wrong_gradients_is_refused_with_the_reason(name: str) -> None:
    """The engine refuses what makes gradients wrong."""
    with pytest.raises((ConfigurationError, MismatchError)) as caught:
        MISTAKES[name]()
    assert all(text in str(caught.value) for text in TOLD[MISTAKES[name]]), caught.value


@WORLD
def test_parameters_may_differ_where_nothing_compares_them() -> None:
    sync = GradientSynchronizer(model := mlp(), compare_replicas=False)
    model[2].weight.data += dist.get_rank()
    sync.weigh(1, 2)
    backward(model, 0)
    torch.optim.SGD(model.parameters(), 0.1).step()
    gradients = all_gather_object(flat_gradient(model).tolist(), "the gradients")
    assert gradients[0] == gradients[1]
    sync.close()


def test_gradients_under_weights_without_a_total_are_refused_on_another_number_of_ranks() -> None:
    states = [{"gradients": {"0.weight": torch.ones(4, 4)}, "weighing": {"total": None}}] * 2
    with pytest.raises(ConfigurationError, match=r"that 2 processes have accumulated .* Start 2, or give"):
        GradientSynchronizer(mlp()).load_state_dict(states)


# --- one process --------------------------------------------------------------------------------------------------


def test_a_world_of_one_registers_nothing_and_changes_nothing() -> None:
    """On one process the engine registers nothing."""
    with_us, without = mlp(), mlp()
    before = looks(with_us)
    sync = GradientSynchronizer(with_us, bucket_cap_mb=MANY_BUCKETS)
    sync.weigh(3, 7)
    with sync.no_sync():
        mean_loss(with_us(batch(0, 0))).backward()
    mean_loss(with_us(batch(0, 1))).backward()
    sync.synchronize()
    for step in range(2):
        mean_loss(without(batch(0, step))).backward()
    assert torch.equal(flat_gradient(with_us), flat_gradient(without))
    assert looks(with_us) == before and sync.rounds == 0
