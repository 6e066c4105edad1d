"""The gradient engine against what it must equal: one process on the whole batch, and DistributedDataParallel.

A case is written once, in terms of a :class:`Run`. On N ranks each rank computes the loss of its own share; as the
truth one process computes the losses of all shares with plain autograd and adds them up, weighted.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import os
import pickle
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import embedding, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from two_hosts import live_on_hosts

from ddp_callbacks.comm.process_group import ProcessGroupAllReduce
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer

pytestmark = pytest.mark.shares_results()

# Of the largest element of a tensor. Both sides round once per rank and once per addition, in their own dtype; the
# float64 tensors show that the numbers are the same ones, and nothing hides behind the rounding of the others.
RELATIVE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}
FEATURES = 4
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own
SAMPLES = ((7, 3, 4), (1, 5, 2), (4, 4, 4))  # by step and rank

VARIANTS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": MANY_BUCKETS},
    "total unknown": {"bucket_cap_mb": MANY_BUCKETS},
    "comm hook": {"bucket_cap_mb": MANY_BUCKETS, "comm_hook": default_hooks.allreduce_hook},
    "gloo": {"bucket_cap_mb": MANY_BUCKETS},
    "two levels": {"bucket_cap_mb": MANY_BUCKETS},
}

ON_TWO_RANKS = [variant for variant in VARIANTS if variant != "two levels"]

Snapshot = dict[str, Tensor | None]
Case = Callable[["Run"], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Compare what ``function`` returns on each rank with what it returns in one process."""
    CASES[function.__name__.replace("_", " ")] = function
    return function


@functools.cache
def group_without_shared_memory() -> dist.ProcessGroup:
    group = dist.new_group()
    os.environ[SWITCH] = "0"
    assert isinstance(choose_all_reduce(group, [torch.device("cpu")]), ProcessGroupAllReduce)
    del os.environ[SWITCH]
    return group


@functools.cache
def group_on_two_hosts() -> dist.ProcessGroup:
    group = dist.new_group()
    live_on_hosts((2, 1), group)
    return group


GROUPS = {"gloo": group_without_shared_memory, "two levels": group_on_two_hosts}


def synchronizer(model: nn.Module, variant: str) -> GradientSynchronizer:
    group = GROUPS[variant]() if variant in GROUPS else None
    return GradientSynchronizer(model, process_group=group, **VARIANTS[variant])


class Run:
    """Where a case runs: on one rank of many, or in one process in the place of all of them."""

    def __init__(self, world_size: int, rank: int | None, variant: str) -> None:
        self.world_size = world_size
        self.rank = rank
        self.variant = variant
        self.sync: GradientSynchronizer | None = None

    @property
    def is_truth(self) -> bool:
        return self.rank is None

    def synchronize(self, model: nn.Module) -> None:
        """Synchronize the gradients of ``model``, unless this is the one process."""
        if not self.is_truth:
            self.sync = synchronizer(model, self.variant)

    def backward(
        self,
        loss: Callable[[int], Tensor],
        weights: Sequence[float] | None = None,
        divide_by: float | None = None,
        **options: Any,
    ) -> None:
        """Backward of the mean of ``loss(rank)`` over the ranks, weighted; without ``weights`` never weighed.

        Or of the weighted sum divided by ``divide_by``, which all ranks know then.
        """
        shares = [1.0] * self.world_size if weights is None else list(weights)[: self.world_size]
        total = sum(shares) if divide_by is None else divide_by
        if self.sync is None:
            parts = [loss(rank) * (share / total) for rank, share in enumerate(shares) if share]
            if parts:
                torch.stack(parts).sum().backward(**options)
            return
        assert self.rank is not None
        if weights is not None:
            is_unknown = self.variant == "total unknown" and divide_by is None
            self.sync.weigh(shares[self.rank], None if is_unknown else total)
        rounds = self.sync.rounds
        loss(self.rank).backward(**options)
        if self.sync.rounds == rounds:
            self.sync.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.sync is None else self.sync.no_sync()

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()


def batch(rank: int, step: int) -> Tensor:
    """This rank's share of the batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SAMPLES[step % 3][rank], FEATURES, generator=generator, dtype=torch.float64)


def mean_loss(output: Tensor) -> Tensor:
    """A mean over the samples, whatever the dtype."""
    return (output - 1).abs().square().mean()


def gradients(model: nn.Module) -> Snapshot:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def train(
    run: Run,
    model: nn.Module,
    forward: Callable[[Tensor, int, int], Tensor] | None = None,
    *,
    lr: float = 0.1,
    steps: int = 4,
    weights: Sequence[Sequence[float]] = SAMPLES,
) -> list[Snapshot]:
    """Train ``steps`` steps; the gradients of each. ``forward(x, rank, step)`` is ``model(x)`` if not given."""
    if run.sync is None:
        run.synchronize(model)
    forward = forward or (lambda x, *_: model(x))
    seen = []
    for step in range(steps):
        model.zero_grad()
        run.backward(lambda rank, step=step: mean_loss(forward(batch(rank, step), rank, step)), weights[step % 3])
        seen.append(gradients(model))
        descend(model, lr)
    return seen


@torch.no_grad()
def descend(model: nn.Module, lr: float = 0.1) -> None:
    """A step of SGD. torch's own imports the compiler first, which takes seconds."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad.to_dense(), alpha=lr)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def mlp(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*layers).double()


# --- model kinds ------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # before a norm the bias has gradient 0
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 1)
        self.to(torch.float64, memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.einsum("bi,bj->bij", x, x)[:, None]
        return self.second(self.norm(self.first(image)).relu())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 3, num_layers=2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.view(len(x), -1, 2))[0]


class Tied(nn.Module):
    """Input and output layers share a weight, and the layer between them runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.between = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.last = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.between(self.first(x)).tanh()).tanh())


class OddShapes(nn.Module):
    """A scalar, two parameters without elements, one of them alone in its dtype, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Parameter(torch.empty(0, 3, dtype=torch.float32))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(3, FEATURES, dtype=torch.float64).t())
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed * self.scalar + self.empty.sum() + self.alone.sum()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "convolutions in channels_last": Convolutions,
    "GRU": Recurrent,
    "tied and shared": Tied,
    "odd shapes": OddShapes,
}
for _name, _make in KINDS.items():
    CASES[_name] = functools.partial(lambda run, make: train(run, seeded(make)), make=_make)


@case
def strides_of_the_gradients(run: Run) -> Any:
    model = seeded(Convolutions)
    train(run, model, steps=1)
    return [parameter.grad.stride() for parameter in model.parameters() if parameter.grad is not None]


@case
def never_weighed_is_the_plain_mean_over_ranks(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    for step in range(2):
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))))
    return gradients(model)


# --- control flow -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(count))
        self.double()


@case
def a_parameter_used_on_no_rank_keeps_none_and_on_some_gets_the_weighted_sum(run: Run) -> Any:
    model = seeded(Branches)
    return train(run, model, lambda x, rank, step: model.branches[rank](x))


@case
def branches_that_depend_on_rank_and_step(run: Run) -> Any:
    model = seeded(Branches)
    return train(run, model, lambda x, rank, step: model.branches[(rank * step) % 4](model.branches[3](x)))


@case
def a_rank_whose_loss_reaches_no_parameter(run: Run) -> Any:
    model = mlp()

    def forward(x: Tensor, rank: int, step: int) -> Tensor:
        return x.clone().requires_grad_() if rank == step % 2 else model(x)

    return train(run, model, forward)


@case
def backward_into_chosen_inputs_only(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for step in range(2):
        run.backward(
            lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step], inputs=[model[2].weight]
        )
        seen.append(gradients(model))
    return seen


@case
def autograd_grad_leaves_the_gradients_alone(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    direct = torch.autograd.grad(mean_loss(model(batch(0, 0))), list(model.parameters()))
    return [*direct, gradients(model), train(run, model, steps=1)]


# --- checkpointing ----------------------------------------------------------------------------------------------


def checkpointed(layers: Sequence[nn.Module], x: Tensor, reentrant: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def each_layer(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpointed(list(model), x, reentrant)


def first_layer(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return model[1:](checkpointed([model[0]], x, reentrant))


def last_layer(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpointed([model[4]], model[:4](x), reentrant)


def same_layer_twice(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    # The last layer's gradient comes first, and once more at the end, when its bucket is already under way.
    return model[2](checkpointed([model[4], model[0], model[2], model[4]], x, reentrant))


def whole_model_twice(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpointed([model, model], x, reentrant)


def nested(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpointed([model[2], model[4], model[2]], model[0](y), reentrant)

    def outer(y: Tensor) -> Tensor:
        return model[4](checkpoint(inner, y, use_reentrant=reentrant).tanh())

    return checkpoint(outer, model[0](x), use_reentrant=reentrant)


def train_checkpointed(run: Run, forward: Callable[[nn.Sequential, Tensor, bool], Tensor], reentrant: bool) -> Any:
    model = mlp()
    with warnings.catch_warnings():
        # The inner one of nested reentrant checkpoints says so in its first pass, which is without gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        return train(run, model, lambda x, *_: forward(model, x.requires_grad_(), reentrant))


for _forward in (each_layer, first_layer, last_layer, same_layer_twice, whole_model_twice, nested):
    for _reentrant in (True, False):
        _name = f"{'' if _reentrant else 'non-'}reentrant checkpoint, {_forward.__name__.replace('_', ' ')}"
        CASES[_name] = functools.partial(train_checkpointed, forward=_forward, reentrant=_reentrant)


@case
def the_same_layer_checkpointed_twice_on_some_ranks_only(run: Run) -> Any:
    model = mlp()

    def forward(x: Tensor, rank: int, step: int) -> Tensor:
        x = x.requires_grad_()
        if rank == step % 2:
            x = checkpoint(model[4], x, use_reentrant=True)
        return checkpointed([model[0], model[2], model[4]], x, reentrant=True)

    return train(run, model, forward)


# --- accumulation -----------------------------------------------------------------------------------------------


@case
def several_forwards_before_one_backward(run: Run) -> Any:
    model = mlp()
    return train(run, model, lambda x, *_: torch.cat([model(x), model(x * 2), model(model(x))]))


@case
def two_backwards_before_a_zero_grad(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for step in range(6):
        if step % 2 == 0:
            model.zero_grad()
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step % 3])
        seen.append(gradients(model))
    return seen


@case
def backward_twice_through_one_graph(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    kept: dict[int, Tensor] = {}

    def loss(rank: int) -> Tensor:
        if rank not in kept:
            kept[rank] = mean_loss(model(batch(rank, 0)))
        return kept[rank]

    for _ in range(2):
        run.backward(loss, SAMPLES[0], retain_graph=True)
    return gradients(model)


def accumulate(run: Run, model: nn.Module, forward: Callable[[Tensor, int], Tensor]) -> Any:
    """Three small batches a step; ``forward(x, micro)``."""
    run.synchronize(model)
    seen = []
    for step in range(3):
        model.zero_grad()
        for micro in range(3):

            def loss(rank: int, micro: int = micro, step: int = step) -> Tensor:
                return mean_loss(forward(batch(rank, step) * (micro + 1), micro)) / 3

            with run.no_sync() if micro < 2 else contextlib.nullcontext():
                run.backward(loss, SAMPLES[step])
        seen.append(gradients(model))
    return seen


@case
def accumulation_in_no_sync(run: Run) -> Any:
    model = mlp()
    return accumulate(run, model, lambda x, micro: model(x))


PARTS = [(3, 1, 0), (0, 5, 2), (4, 4, 4), (7, 0, 1), (0, 0, 3)]  # weights by micro-batch and rank


def parts(model: nn.Module, micro: int) -> Callable[[int], Tensor]:
    """A micro-batch of which a rank with weight 0 has a mean over nothing."""

    def loss(rank: int) -> Tensor:
        value = mean_loss(model(batch(rank, micro) * (micro + 1)))
        return value if PARTS[micro % len(PARTS)][rank] else value * float("nan")

    return loss


def weights_of(micro: int, world_size: int) -> tuple[Sequence[float], float]:
    weights = PARTS[micro % len(PARTS)][:world_size]
    return weights, sum(weights)


@case
def each_micro_batch_of_no_sync_counts_by_its_own_weight(run: Run) -> Any:
    model = seeded(Branches)
    run.synchronize(model)
    seen = []
    for first in range(len(PARTS)):  # which weights come first and last
        model.zero_grad(set_to_none=first % 2 == 0)
        for at in range(3):
            layer = nn.Sequential(model.branches[at], model.branches[3])  # one is used in one micro-batch only
            with run.no_sync() if at < 2 else contextlib.nullcontext():
                run.backward(parts(layer, first + at), *weights_of(first + at, run.world_size))
        seen.append({name: 0 if grad is None else grad for name, grad in gradients(model).items()})
    # In one process nothing reaches a parameter that only ranks with weight 0 use; there its gradient is zero.
    return [{name: grad for name, grad in one.items() if not isinstance(grad, int) and grad.any()} for one in seen]


@case
def each_micro_batch_counts_by_its_own_weight_in_sparse_gradients(run: Run) -> Any:
    model = seeded(Words)
    run.synchronize(model)
    for micro in range(4):
        with run.no_sync() if micro < 3 else contextlib.nullcontext():
            run.backward(parts(model, micro), *weights_of(micro, run.world_size))
    return gradients(model)


@case
def two_synchronized_backwards_of_sums_give_the_sum_of_both(run: Run) -> Any:
    return backwards_of_sums(run, mlp(), [1, 1, 1])


@case
def two_synchronized_backwards_of_sums_that_reach_other_parameters(run: Run) -> Any:
    model = seeded(Branches)
    use = [[0, 1], [0, 2], [3]]  # by backward; one rank leaves out the first of them

    def forward(x: Tensor, rank: int, index: int) -> Tensor:
        return sum((model.branches[at](x) for at in use[index][rank == 1 and len(use[index]) > 1 :]), torch.zeros(()))

    return backwards_of_sums(run, model, [1, 1, 1], forward)


@case
def two_synchronized_backwards_of_sums_into_sparse_gradients(run: Run) -> Any:
    return backwards_of_sums(run, seeded(Words), [1, 1, 1])


@case
def two_synchronized_backwards_of_sums_of_which_a_rank_has_no_part(run: Run) -> Any:
    return backwards_of_sums(run, mlp(), [1, 0, 1])


def backwards_of_sums(
    run: Run, model: nn.Module, weights: Sequence[float], forward: Callable[[Tensor, int, int], Tensor] | None = None
) -> Any:
    """Three backwards in a step, of losses that are sums; two of the steps begin with gradients that are zeros."""
    forward = forward or (lambda x, *_: model(x))
    run.synchronize(model)
    seen = []
    for step in range(4):
        model.zero_grad(set_to_none=step < 2)
        for index in range(3):
            run.backward(
                lambda rank, step=step, index=index: mean_loss(forward(batch(rank, 3 * step + index), rank, index)),
                weights if index else [1, 1, 1],
                divide_by=1,
            )
            seen.append(gradients(model))
    return seen


@case
def accumulation_on_top_of_a_synchronized_backward(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for divide_by in (10.0, None):
        for step in range(2):
            model.zero_grad()
            for micro in range(4):  # synchronized, accumulated, accumulated, synchronized
                weights, total = weights_of(micro + step, run.world_size)
                with run.no_sync() if micro in (1, 2) else contextlib.nullcontext():
                    run.backward(parts(model, micro + step), weights, divide_by or total)
            seen.append(gradients(model))
    return seen


@case
def a_backward_in_which_no_rank_counts_adds_nothing(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for step in range(2):
        model.zero_grad()
        for weights in (SAMPLES[step], (0, 0, 0), SAMPLES[2]):
            run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), weights)
            seen.append(gradients(model))
    return seen


@case
def a_loss_that_is_weighed_itself(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for micro in range(6):
        if micro % 3 == 0:
            model.zero_grad()
        weights, total = weights_of(micro, run.world_size)
        with run.no_sync() if micro % 3 == 0 else contextlib.nullcontext():
            if run.sync is None or run.rank is None:
                run.backward(parts(model, micro), weights)
            else:
                loss = parts(model, micro)(run.rank)
                undo = run.sync.weigh_loss(loss, weights[run.rank], total)
                loss.backward()
                undo()
        if micro % 3:
            seen.append(gradients(model))
    return seen


@case
def a_parameter_used_only_inside_no_sync(run: Run) -> Any:
    model = seeded(Branches)
    return accumulate(run, model, lambda x, micro: model.branches[3](model.branches[micro](x)))


@case
def a_sparse_parameter_used_only_inside_no_sync(run: Run) -> Any:
    model = seeded(Words)
    return accumulate(run, model, lambda x, micro: model(x) if micro == 0 else model.head(x[:, :3]))


@case
def gradients_of_no_sync_that_are_thrown_away_leave_none(run: Run) -> Any:
    model = seeded(Branches)
    run.synchronize(model)
    with run.no_sync():
        run.backward(lambda rank: mean_loss(model.branches[0](batch(rank, 0))), SAMPLES[0])
    model.zero_grad()
    run.backward(lambda rank: mean_loss(model.branches[1](batch(rank, 1))), SAMPLES[1])
    return gradients(model)


@case
def no_sync_is_left_by_an_exception(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    with contextlib.suppress(KeyError), run.no_sync():
        raise KeyError
    return train(run, model, steps=1)


# --- frozen parameters ------------------------------------------------------------------------------------------


@case
def frozen_at_construction_then_unfrozen(run: Run) -> Any:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    seen = train(run, model, steps=2)
    model.requires_grad_(True)
    return seen + train(run, model)


@case
def frozen_later(run: Run) -> Any:
    model = mlp()
    seen = train(run, model, steps=2)
    model[4].requires_grad_(False)
    model[0].weight.requires_grad_(False)
    return seen + train(run, model)


@case
def all_frozen_but_one_layer(run: Run) -> Any:
    model = mlp().requires_grad_(False)
    model[2].requires_grad_(True)
    return train(run, model)


@case
def generator_and_discriminator_in_turns(run: Run) -> Any:
    model = nn.ModuleDict({"generator": mlp(2), "discriminator": mlp(2)})
    run.synchronize(model)
    seen = []
    for step in range(6):
        turn = ("discriminator", "generator")[step % 2]
        for name, part in model.items():
            part.requires_grad_(name == turn)
        model[turn].zero_grad()
        run.backward(
            lambda rank, step=step: mean_loss(model["discriminator"](model["generator"](batch(rank, step)))),
            SAMPLES[step % 3],
        )
        seen.append(gradients(model))
    return seen


@case
def frozen_between_forward_and_backward(run: Run) -> Any:
    # Autograd fires the hook of such a parameter, but does not give it a gradient.
    model = mlp()
    run.synchronize(model)

    def loss(rank: int) -> Tensor:
        model.requires_grad_(True)
        value = mean_loss(model(batch(rank, 0)))
        model[2].requires_grad_(False)
        return value

    run.backward(loss, SAMPLES[0])
    return gradients(model)


# --- dtypes and layouts -----------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The bucket of the first registered layer is the last, so that here float32 carries the control numbers.
        self.single = nn.Linear(FEATURES, FEATURES, dtype=torch.float32)
        self.low = nn.Linear(FEATURES, FEATURES, dtype=torch.bfloat16)
        self.full = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.single(x.float()).double(), self.low(x.bfloat16()).double(), self.full(x)])


@case
def three_dtypes_in_one_model(run: Run) -> Any:
    return train(run, seeded(Mixed), lr=0.0)


@case
def weights_that_no_float32_holds(run: Run) -> Any:
    return train(run, seeded(Mixed), lr=0.0, weights=((0.7, 0.3, 0.4), (1 / 3, 5 / 7, 0.1), (1e-3, 0.9, 0.1)))


@case
def all_bfloat16(run: Run) -> Any:
    model = mlp().bfloat16()
    return train(run, model, lambda x, *_: model(x.bfloat16()).double(), lr=0.0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(FEATURES, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.first * self.phase).exp() * self.real


@case
def complex_parameters(run: Run) -> Any:
    return train(run, seeded(Complex), lr=1e-3)


class Words(nn.Module):
    """Sparse gradients from two layers; the head is dense."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        self.word = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(20, 3, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.word(indices(x)).sum(1) + self.bag(indices(x * 2)))


def indices(x: Tensor) -> Tensor:
    return (x.abs() * 7).long() % 20


@case
def sparse_embeddings(run: Run) -> Any:
    return train(run, seeded(Words))


@case
def a_model_with_sparse_parameters_only(run: Run) -> Any:
    return train(run, seeded(lambda: Words(head=False)))


@case
def a_sparse_gradient_that_one_rank_lacks(run: Run) -> Any:
    model = seeded(Words)
    return train(run, model, lambda x, rank, step: model.head(x[:, :3]) if rank == step % 2 else model(x))


@case
def what_only_a_rank_with_weight_zero_uses_becomes_zero(run: Run) -> Any:
    model = seeded(Words)
    spare = seeded(Words)
    both = nn.ModuleList([model, spare])

    def forward(x: Tensor, rank: int, step: int) -> Tensor:
        return spare(x) * float("nan") if rank == 0 else model(x)

    seen = train(run, both, forward, weights=[(0, 3, 4)] * 3)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in both.named_parameters()}
    return [
        {name: zeros[name] if grad is None else grad.to_dense() for name, grad in snapshot.items()} for snapshot in seen
    ]


@case
def two_backwards_into_sparse_gradients(run: Run) -> Any:
    model = seeded(Words)
    run.synchronize(model)
    for step in range(2):
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step])
    return gradients(model)


@case
def a_sparse_embedding_tied_to_a_dense_layer(run: Run) -> Any:
    model = seeded(Words)
    model.head = nn.Linear(3, 20, dtype=torch.float64)
    model.head.weight = model.word.weight
    return train(run, model)


@case
def a_plain_parameter_with_a_sparse_gradient(run: Run) -> Any:
    # Nothing tells beforehand that it will be sparse, so it arrives dense; the numbers are what counts.
    model = nn.ParameterDict({"table": nn.Parameter(torch.linspace(0, 1, 40, dtype=torch.float64).view(20, 2))})
    seen = train(run, model, lambda x, *_: embedding(indices(x), model["table"], sparse=True))
    return [{name: grad.to_dense() for name, grad in snapshot.items() if grad is not None} for snapshot in seen]


# --- around the backward ----------------------------------------------------------------------------------------


@case
def zero_grad_to_zeros_keeps_the_tensor(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen: list[Any] = []
    homes: list[Any] = []
    for step in range(5):
        model.zero_grad(set_to_none=False)
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step % 3])
        homes.append([parameter.grad for parameter in model.parameters()])
        seen.append(gradients(model))
    same = [all(one is first for one, first in zip(home, homes[0], strict=True)) for home in homes]
    assert same == [True] * 5, same
    return seen


@case
def a_gradient_that_the_user_kept_is_not_overwritten(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    weight = model[2].weight
    keep: list[Callable[[Tensor], Any]] = [
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad[1:3],
        lambda grad: grad.view(-1),
        lambda grad: grad.detach().numpy(),
        lambda grad: grad.untyped_storage(),
    ]
    kept, copies = [], []
    for step in range(12):
        model.zero_grad(set_to_none=step % 4 != 3)
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step % 3])
        if step % 4 != 2:  # plain torch, too, writes over it in a step that begins with zero_grad(set_to_none=False)
            kept.append(keep[step % len(keep)](weight.grad))
            copies.append(copy.deepcopy(kept[-1]))
    equal = [
        bytes(one) == bytes(other) if isinstance(one, torch.UntypedStorage) else (one == other).all()
        for one, other in zip(kept, copies, strict=True)
    ]
    return [bool(flag) for flag in equal]


@case
def gradients_preset_before_construction(run: Run) -> Any:
    model = mlp()
    preset = {parameter: torch.full_like(parameter, 0.25) for parameter in list(model.parameters())[1:4]}
    for parameter, value in preset.items():
        parameter.grad = value
    run.synchronize(model)
    seen = []
    for step in range(3):
        run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step])
        assert all(parameter.grad is value for parameter, value in preset.items())
        seen.append(gradients(model))
        model.zero_grad(set_to_none=False)
    return seen


@case
def a_user_hook_on_a_parameter_and_one_on_its_gradient(run: Run) -> Any:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 3)
    run.synchronize(model)
    model[2].weight.register_hook(lambda grad: grad * 5)
    return train(run, model)


@case
def nan_on_a_rank_with_weight_zero_stays_there(run: Run) -> Any:
    model = seeded(Words)
    return train(
        run,
        model,
        lambda x, rank, step: model(x) * (float("nan") if rank == 0 else 1.0),
        weights=[(0, 3, 4)] * 3,
    )


@case
def an_empty_share_counts_nowhere(run: Run) -> Any:
    model = mlp()
    return train(
        run,
        model,
        lambda x, rank, step: model(x[:0] if rank == step % 2 else x),
        weights=[(0, 3, 4), (7, 0, 4), (0, 4, 4)],
    )


@case
def a_step_in_which_no_rank_has_a_sample(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        if step != 1:
            run.backward(lambda rank, step=step: mean_loss(model(batch(rank, step))), SAMPLES[step % 3])
            seen.append(gradients(model))
        elif run.sync is not None:
            run.sync.weigh(0, None if run.variant == "total unknown" else 0)
            mean_loss(model(batch(0, 0)[:0])).backward()
            assert all((parameter.grad == 0).all() for parameter in model.parameters())
    return seen


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in the middle of backward")


@case
def training_goes_on_after_an_exception_in_the_middle_of_backward(run: Run) -> Any:
    model = seeded(Branches)
    first, second, third, fourth = model.branches
    seen = train(run, model, lambda x, *_: third(second(first(x))), steps=2)
    for _ in range(2):
        model.zero_grad()
        with contextlib.suppress(ZeroDivisionError):
            run.backward(
                lambda rank: mean_loss(fourth(third(Explodes.apply(second(first(batch(rank, 0))))))), SAMPLES[0]
            )
            raise AssertionError("backward did not raise")
    # The fourth branch was reached only by the backwards that failed, so its gradient is None.
    return seen + train(run, model, lambda x, *_: third(second(first(x))))


@case
def autocast_to_bfloat16(run: Run) -> Any:
    model = mlp().float()

    def forward(x: Tensor, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.float()).float()

    # The weighted loss is rounded to bfloat16 on its way back, before the sum in one process and after it on ranks.
    seen = train(run, model, forward, lr=0.0)
    return [{name: grad.bfloat16() for name, grad in snapshot.items() if grad is not None} for snapshot in seen]


@case
def torch_compile(run: Run) -> Any:
    model = mlp()
    run.synchronize(model)
    forward = model if run.is_truth else torch.compile(model, backend="aot_eager")
    return train(run, model, lambda x, *_: forward(x))


@case
def copies_of_the_model_are_plain(run: Run) -> Any:
    model = mlp()
    train(run, model, steps=1)
    during = [describe(model), *map(describe, copies(model))]
    run.close()
    hooks = [bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]
    return [during, describe(model), hooks, *map(describe, copies(model))]


def copies(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for one in copied:
        assert not any(parameter._post_accumulate_grad_hooks for parameter in one.parameters())
        assert all(parameter.grad is None for parameter in one.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's farewell
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(batch(0, 0)), model(batch(0, 0)))
    assert list(scripted.state_dict()) == list(model.state_dict())
    return copied


def describe(model: nn.Module) -> Any:
    parameters = [sorted(vars(parameter)) for parameter in model.parameters()]
    modules = [(type(module).__name__, sorted(vars(module))) for module in model.modules()]
    hooks = [
        [len(value) for name, value in vars(module).items() if name.endswith("_hooks")] for module in model.modules()
    ]
    return [parameters, modules, hooks, list(model.state_dict()), model.state_dict()]


# --- the comparison ---------------------------------------------------------------------------------------------


def selected(world_size: int, variant: str) -> list[str]:
    """The names of the cases; with three ranks only those and only where a third may matter, because ranks are slow."""
    if world_size == 2 and variant in ON_TWO_RANKS:
        return [name for name in CASES if name != "torch compile" or variant == "many buckets"]
    if world_size == 2 or variant not in ("many buckets", "total unknown", "gloo", "two levels"):
        return []
    elsewhere = ("torch compile", "copies of the model are plain")
    return [name for name in CASES if "checkpoint" not in name and name not in elsewhere]


def run_cases() -> dict[tuple[str, str], Any]:
    """Every case in every variant on this rank, and what is compared with DistributedDataParallel."""
    results: dict[tuple[str, str], Any] = {}
    for variant in VARIANTS:
        for name in selected(dist.get_world_size(), variant):
            results[name, variant] = or_traceback(run_case, name, variant, dist.get_world_size(), dist.get_rank())
    if dist.get_world_size() == 2:
        for kind, variant in itertools.product(KINDS, ON_TWO_RANKS):
            results[f"DDP {kind}", variant] = or_traceback(compare_with_ddp, kind, variant)
        results["7 and 3 samples", ""] = seven_and_three()
    return results


def run_case(name: str, variant: str, world_size: int, rank: int | None) -> Any:
    run = Run(world_size, rank, variant)
    try:
        return CASES[name](run)
    finally:
        run.close()


def or_traceback(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns, or why it failed: the other cases go on."""
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc()


@functools.cache
def on_ranks(world_size: int) -> list[dict[tuple[str, str], Any]] | str:
    try:
        return run_distributed(run_cases, world_size)
    except AssertionError as error:
        return str(error)  # cached as well, so that one failed start is not repeated for every test


@functools.cache
def in_one_process(name: str, world_size: int) -> Any:
    return run_case(name, "", world_size, None)


def results_of(world_size: int, name: str, variant: str) -> list[Any]:
    results = on_ranks(world_size)
    assert not isinstance(results, str), results
    return [result[name, variant] for result in results]


SELECTED = [
    pytest.param(world_size, name, variant, marks=pytest.mark.wide if world_size > 2 else ())
    for world_size in (2, 3)
    for variant in VARIANTS
    for name in selected(world_size, variant)
]


@pytest.mark.parametrize("world_size, name, variant", SELECTED)
def test_gradients_of_n_ranks_are_those_of_one_process(world_size: int, name: str, variant: str) -> None:
    for rank, result in enumerate(results_of(world_size, name, variant)):
        assert_same(result, in_one_process(name, world_size), f"rank {rank}")


def assert_same(actual: Any, expected: Any, where: str) -> None:
    """Compare nested results; tensors to rounding, everything else exactly."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual}"
        assert (actual.dtype, actual.layout, actual.shape) == (expected.dtype, expected.layout, expected.shape), where
        error = (actual - expected).to_dense().abs().max() if actual.numel() else torch.tensor(0.0)
        bound = RELATIVE[expected.dtype] * expected.to_dense().abs().max() if actual.numel() else torch.tensor(0.0)
        assert error <= bound, f"{where}: off by {error:.3g}, {bound:.3g} is rounding"
    elif isinstance(expected, dict):
        assert isinstance(actual, dict) and list(actual) == list(expected), f"{where}: {actual}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), f"{where}: {actual}"
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where} [{index}]")
    else:
        assert actual == expected, where


# --- against DistributedDataParallel ----------------------------------------------------------------------------


def equal_batch(step: int) -> Tensor:
    return batch(dist.get_rank(), 3 * step + 2)  # the steps in which every rank has the same number


def compare_with_ddp(kind: str, variant: str) -> tuple[Any, Any]:
    """The gradients of a few steps of ours and of DistributedDataParallel."""
    ours, theirs = seeded(KINDS[kind]), seeded(KINDS[kind])
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=VARIANTS[variant].get("bucket_cap_mb", 25))
    sync = synchronizer(ours, variant)
    seen: tuple[list[Snapshot], list[Snapshot]] = ([], [])
    for step in range(3):
        if variant == "total unknown":
            sync.weigh(4)
        for place, (model, forward) in enumerate([(ours, ours), (theirs, ddp)]):
            model.zero_grad()
            mean_loss(forward(equal_batch(step))).backward()
            seen[place].append(gradients(model))
            descend(model)
    sync.close()
    return seen


@pytest.mark.parametrize("variant", ON_TWO_RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_with_equal_batches_gradients_are_those_of_distributed_data_parallel(kind: str, variant: str) -> None:
    for rank, result in enumerate(results_of(2, f"DDP {kind}", variant)):
        assert isinstance(result, tuple), result
        ours, theirs = result
        assert_same(ours, theirs, f"rank {rank}")


def seven_and_three_setting() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 10), torch.randn(10, 8), torch.randn(10, 10)
    return model.double(), x.double(), y.double()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


def seven_and_three() -> dict[str, Tensor]:
    """The gradient of a linear regression on 10 samples, of which rank 0 has 7 and rank 1 has 3."""
    found = {}
    for name in ("DDP", "ours", "ours, total unknown"):
        model, x, y = seven_and_three_setting()
        share = slice(0, 7) if dist.get_rank() == 0 else slice(7, 10)
        sync = None
        forward: nn.Module = model
        if name == "DDP":
            forward = DistributedDataParallel(model)
        else:
            sync = GradientSynchronizer(model)
            sync.weigh(len(x[share]), 10 if name == "ours" else None)
        mse_loss(forward(x[share]), y[share]).backward()
        found[name] = flat_gradient(model)
        if sync is not None:
            sync.close()
    return found


def test_with_7_and_3_samples_the_gradient_of_ddp_is_off_by_41_6_percent_and_ours_by_rounding() -> None:
    model, x, y = seven_and_three_setting()
    mse_loss(model(x), y).backward()
    truth = flat_gradient(model)
    for found in results_of(2, "7 and 3 samples", ""):
        error = {name: float((gradient - truth).norm() / truth.norm()) for name, gradient in found.items()}
        assert error["DDP"] > 0.1
        assert error["DDP"] == pytest.approx(0.41600819, abs=1e-8)
        assert error["ours"] < 1e-12
        assert error["ours, total unknown"] < 1e-12


# --- bugs -------------------------------------------------------------------------------------------------------


def fail_often(variant: str, weighed: bool) -> list[float]:
    """Alternate a backward that raises half-way with one that does not; the latter's errors."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = mlp(6)
    truth = flat_gradients_of(model, [mean_loss(model(batch(other, 2))) / world_size for other in range(world_size)])
    sync = synchronizer(model, variant)
    errors = []
    for _ in range(40):
        for middle in (Explodes.apply, torch.clone):
            model.zero_grad()
            if weighed:
                sync.weigh(4, 4 * world_size)
            with contextlib.suppress(ZeroDivisionError):
                mean_loss(model[6:](middle(model[:6](batch(rank, 2))))).backward()
        errors.append(float((flat_gradient(model) - truth).norm() / truth.norm()))
    sync.close()
    return errors


def flat_gradients_of(model: nn.Module, losses: Sequence[Tensor]) -> Tensor:
    parts = torch.autograd.grad(torch.stack(list(losses)).sum(), list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("variant", ["many buckets", "comm hook", "gloo"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_a_backward_that_fails_leaves_the_same_collectives_behind_on_every_rank(world_size: int, variant: str) -> None:
    # A bucket was given to the hook only if the hook had finished the one before by then. That is a matter of time,
    # so that a backward which raised half-way had started more collectives on one rank than on another, and from
    # then on gloo paired up those of different buckets: it ended the process, or the run stood still.
    for errors in run_distributed(fail_often, world_size, variant, True):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("variant", ["many buckets", "comm hook", "gloo"])
def test_gradients_stay_synchronized_after_a_backward_that_fails_though_nobody_weighs(variant: str) -> None:
    for errors in run_distributed(fail_often, 2, variant, False):
        assert max(errors) < 1e-12


# --- refused ----------------------------------------------------------------------------------------------------


def error_of(function: Callable[[], Any]) -> str:
    """The type and the text of what it raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mismatches() -> dict[str, Any]:
    """What each of some mistakes says on this rank; the same process goes on after each."""
    rank, said = dist.get_rank(), {}
    for variant in ("many buckets", "gloo", "comm hook"):
        model = mlp()
        sync = synchronizer(model, variant)
        mean_loss(model(batch(rank, 0))).backward()
        model[2 * rank].requires_grad_(False)
        said[f"frozen, {variant}"] = error_of(lambda model=model: mean_loss(model(batch(rank, 0))).backward())
        model.requires_grad_(True)
        model.zero_grad()
        mean_loss(model(batch(rank, 1))).backward()
        said[f"after, {variant}"] = gradients(model)
        sync.close()
    wider = nn.ModuleDict({"first": nn.Linear(2, 3 + rank), "last": nn.Linear(3, 2).requires_grad_(rank == 0)})
    said["other shapes"] = error_of(lambda: GradientSynchronizer(wider))
    said["weights"] = error_of(change_a_weight_without_total)
    said["means and sums"] = error_of(a_sum_on_top_of_a_mean)
    return said


def change_a_weight_without_total() -> None:
    model = mlp()
    sync = GradientSynchronizer(model)
    for weight in (5, 7):
        sync.weigh(weight)
        with sync.no_sync():
            mean_loss(model(batch(0, 0))).backward()


def a_sum_on_top_of_a_mean() -> None:
    model = mlp()
    sync = GradientSynchronizer(model)
    for total in (2, 1):
        sync.weigh(1, total)
        mean_loss(model(batch(0, 0))).backward()


@functools.cache
def refusals() -> list[dict[str, Any]]:
    return run_distributed(mismatches, 2)


@pytest.mark.parametrize("variant", ["many buckets", "gloo", "comm hook"])
def test_parameters_that_only_some_ranks_freeze_are_named_with_the_ranks(variant: str) -> None:
    model = mlp()
    losses = [mean_loss(model(batch(rank, 1))) / 2 for rank in range(2)]
    truth = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(sum(losses), list(model.parameters())), strict=True)
    )
    for rank, said in enumerate(refusals()):
        text = said[f"frozen, {variant}"]
        assert text.startswith("MismatchError: the ranks disagree about which parameters are trained:"), text
        assert "0.weight: frozen on rank 0; trained on rank 1" in text, text
        assert "2.bias: trained on rank 0; frozen on rank 1" in text, text
        assert_same(said[f"after, {variant}"], truth, f"rank {rank}")  # the same buckets are summed again


def test_parameters_of_other_shapes_or_frozen_on_some_ranks_are_named_before_training() -> None:
    for said in refusals():
        text = said["other shapes"]
        assert "parameter first.weight: [3, 2] float32 on rank 0; [4, 2] float32 on rank 1" in text, text
        assert "parameter last.bias: [2] float32 on rank 0; [2] float32 frozen on rank 1" in text, text


def test_a_weight_that_changes_while_its_total_is_unknown_and_gradients_wait_is_refused() -> None:
    for said in refusals():
        text = said["weights"]
        assert text.startswith("ConfigurationError: a weight without a total must not change while gradients"), text
        assert "it was weigh(5), got weigh(7)" in text, text


def test_a_sum_on_top_of_a_mean_that_nobody_could_foresee_is_refused() -> None:
    for said in refusals():
        text = said["means and sums"]
        assert text.startswith("ConfigurationError: the ranks' weights add up to 2, not to the total 1"), text


def train_with_a_hook(when: str) -> str:
    model, moved = mlp(), []

    def step_in_backward(parameter: Tensor) -> None:
        moved.append(parameter)

    if when == "before":
        model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
        return error_of(lambda: GradientSynchronizer(model))
    GradientSynchronizer(model)
    model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
    return error_of(lambda: mean_loss(model(batch(0, 0))).backward())


@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_a_hook_that_would_take_a_gradient_before_it_is_summed_is_refused_by_name(when: str) -> None:
    for text in run_distributed(train_with_a_hook, 2, when):
        assert text.startswith("ConfigurationError: 2.weight has a hook of register_post_accumulate_grad_hook"), text
        assert "step_in_backward" in text, text


# --- memory and threads -----------------------------------------------------------------------------------------


def memory_of_an_earlier_run() -> list[bool]:
    """Whether gradients of before are still held, and whether gradients of each step are handed out as views."""
    model, gone = mlp(), []
    for _ in range(2):
        sync = GradientSynchronizer(model)
        before = [weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        mean_loss(model(batch(0, 0))).backward()
        gone += [reference() is None for reference in before]
        gone += [not bucket.pool._has_given for bucket in sync._buckets]
        sync.close()
    return gone


def test_the_gradients_of_an_earlier_run_are_let_go() -> None:
    for gone in run_distributed(memory_of_an_earlier_run, 2):
        assert len(gone) == 2 + len(list(mlp().parameters()))
        assert all(gone)


def gradients_that_are_kept(set_to_none: bool) -> tuple[list[int], list[bool], list[float]]:
    """How many buffers there are after each step, whether the gradients are the same tensors, and their sums."""
    model = mlp()
    sync = GradientSynchronizer(model)
    counts, same, sums = [], [], []
    before: list[Tensor | None] = [None]
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        mean_loss(model(batch(dist.get_rank(), step))).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        counts.append(sum(len(bucket.pool._memories) for bucket in sync._buckets) // len(sync._buckets))
        same.append(all(new is old for new, old in zip(gradients, before, strict=False)))
        sums.append(float(sum(gradient.sum() for gradient in gradients if gradient is not None)))
        before = gradients
    return counts, same, sums


def test_gradients_that_are_kept_between_steps_are_summed_where_they_are() -> None:
    for (counts, same, kept), (_, _, fresh) in zip(
        run_distributed(gradients_that_are_kept, 2, False),
        run_distributed(gradients_that_are_kept, 2, True),
        strict=True,
    ):
        assert counts == [1, 1, 1]
        assert same == [False, True, True]
        assert kept == fresh


def hooks_in_two_threads() -> list[tuple[int, list[int]]]:
    """How often each backward began, and the buckets in the order in which they were sent."""
    model = mlp(20)
    model.elsewhere = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)  # a second device
    sync = synchronizer(model, "many buckets")
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    kept: list[Any] = []
    sync._call_at_end = kept.append  # type: ignore[method-assign]  # there is no backward
    begin, send = sync._begin, sync._send
    begun: list[int] = []
    sent: list[int] = []
    sync._begin = lambda: (begun.append(1), begin())[-1]  # type: ignore[method-assign]
    sync._send = lambda bucket: (sent.append(bucket.index), send(bucket))[-1]  # type: ignore[method-assign]
    seen = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for _ in range(20):
        begun.clear()
        sent.clear()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        together = threading.Barrier(2, timeout=60)
        halves = parameters[::-2], parameters[-2::-2]
        threads = [threading.Thread(target=call_hooks, args=(half, together)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sync._graph_task = lambda: None
        sync._finish()
        seen.append((len(begun), sent.copy()))
    sys.setswitchinterval(interval)
    sync.close()
    return seen


def call_hooks(parameters: Sequence[nn.Parameter], together: threading.Barrier) -> None:
    """As autograd's thread for a device does."""
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        assert hooks is not None
        together.wait()
        for hook in list(hooks.values()):
            hook(parameter)


def test_parameters_on_two_devices_whose_hooks_run_in_two_threads_are_sent_in_order() -> None:
    count = len(list(mlp(20).parameters()))
    for seen in run_distributed(hooks_in_two_threads, 2):
        assert seen == [(1, list(range(count)))] * 20


# --- one process ------------------------------------------------------------------------------------------------


def test_a_world_of_one_registers_nothing_and_changes_nothing() -> None:
    with_us, without = mlp(), mlp()
    before = describe(with_us)
    sync = GradientSynchronizer(with_us, bucket_cap_mb=MANY_BUCKETS)
    sync.weigh(3, 7)
    sync.weigh(3)
    with sync.no_sync():
        mean_loss(with_us(batch(0, 0))).backward()
    mean_loss(with_us(batch(0, 1))).backward()
    sync.synchronize()
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in with_us.parameters())
    for step in range(2):
        mean_loss(without(batch(0, step))).backward()
    for ours, plain in zip(with_us.parameters(), without.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None
        assert torch.equal(ours.grad, plain.grad)
    sync.close()
    sync.close()
    after = describe(with_us)
    assert after[:-1] == before[:-1]
    assert sync.rounds == 0


@pytest.mark.parametrize("cap", [0, -1, float("nan")])
def test_a_bucket_size_that_is_not_positive_is_refused_with_its_value(cap: float) -> None:
    with pytest.raises(ConfigurationError, match=f"bucket_cap_mb must be positive, got {cap}"):
        GradientSynchronizer(mlp(), bucket_cap_mb=cap)


# --- numbers that travel along ----------------------------------------------------------------------------------------

ROOM = 6


def numbers_of(rank: int) -> Tensor:
    bits = torch.Generator().manual_seed(rank)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (ROOM - len(odd),), generator=bits)
    return torch.cat([odd, words.view(torch.float64)])


def carry_numbers(variant: str, dtype: torch.dtype) -> list[list[int]]:
    """The bits of what each synchronization has brought: with this rank's numbers, without any, and with them again."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 2).to(dtype)
    group = GROUPS[variant]() if variant in GROUPS else None
    sync = GradientSynchronizer(model, process_group=group, room=ROOM, **VARIANTS[variant])
    brought = []
    for turn in range(3):
        if turn != 1:
            sync.carry(numbers_of(dist.get_rank() + turn))
        model(torch.ones(3, FEATURES, dtype=dtype)).sum().backward()
        brought.append(sync.carried.view(torch.int64).flatten().tolist())
    sync.close()
    return brought


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["one bucket", "many buckets", "comm hook", "gloo", "two levels"])
def test_numbers_travel_with_the_gradients_and_keep_every_bit(variant: str, dtype: torch.dtype) -> None:
    first, last = (
        torch.cat([numbers_of(rank + turn) for rank in range(3)]).view(torch.int64).tolist() for turn in (0, 2)
    )
    for brought in run_distributed(carry_numbers, 3, variant, dtype):
        assert brought == [first, first, last]
