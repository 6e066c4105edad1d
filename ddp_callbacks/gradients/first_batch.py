"""Compute the loss of a batch on copies: this rank's part of it, and the whole batch as one process would."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_callbacks._torch import BatchNorm, Dropout
from ddp_callbacks.batch_norm.layers import synchronize_copy
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, any_rank, broadcast_object
from ddp_callbacks.data.global_state import GLOBAL, get_global_state, is_same_state, set_global_state
from ddp_callbacks.data.nested import map_arrays
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.copies import calling_only, copied
from ddp_callbacks.gradients.outside import outside_copied
from ddp_callbacks.gradients.side_effects import refusing_collectives, warn_of_files, writing_nowhere
from ddp_callbacks.gradients.weighing import silence
from ddp_callbacks.process_group.default_group import as_one_process, in_step
from ddp_callbacks.randomness import Rows, WholeDraws

Weight = Callable[[], tuple[float, float | None]]
"""The weight of the loss of this rank's part, and the sum over all ranks, ``None`` if unknown."""

PURPOSE = "the comparison of a batch's gradients"


@dataclass(frozen=True)
class Computation:
    """A loss, and the objects that computing it may change. A comparison computes it on copies of them.

    Attributes:
        parts: The module whose gradients are compared, and other objects, such as a loss function.
        loss_of: Called with a copy of ``parts`` and a batch; returns a scalar.
        instead: By the ``id`` of an object that ``parts`` may refer to, what a copy has in its place.
        logged: Returns what the last call of ``loss_of`` has logged, by name; NaN is not compared.
        operations: By name, ways in which the values of parts may become that of a batch, the likeliest first:
            ``"mean"``, ``"sum"``, ``"max"``, ``"min"``. The comparison leaves those that are right, if any is.
        fixed: The names of values that are joined in no other way.
        draws: Lets it draw what one process would draw; ``None``: each rank draws numbers of its own.
        refused: Gets the names of torch's collectives that ``loss_of`` has called.
        written: Gets the names of the files that the last call of ``loss_of`` has opened to be written, and whether to
            append.
        normalizing: Gets the names of the BatchNorm layers that a copy has called, which normalize by a rank's part.
        is_whole_step: Whether ``loss_of`` computes all that a step computes.
        made: Gets the modules that ``loss_of`` has made, unless the comparison is strict.
    """

    parts: Sequence[Any]
    loss_of: Callable[[Sequence[Any], Any], torch.Tensor]
    instead: Mapping[int, Any] = field(default_factory=dict)
    logged: Callable[[], Mapping[str, float]] = dict
    operations: dict[str, list[str]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    draws: WholeDraws | None = None
    refused: list[str] = field(default_factory=list)
    written: dict[str, bool] = field(default_factory=dict)
    normalizing: set[str] = field(default_factory=set)
    is_whole_step: bool = True
    made: list[weakref.ref[nn.Module]] = field(default_factory=list)

    def compute(self, copies: Sequence[Any], batch: Any) -> torch.Tensor:
        """Return the loss of a copy of a batch, which the step may change. What it prints is dropped.

        Ranks have other parts here than in training, so torch's collectives are refused, and no file is written.

        Raises:
            ConfigurationError: The step has called a collective of torch, which was not begun.
        """
        self.written.clear()
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            for context in (in_step(), refusing_collectives(self.refused), writing_nowhere(self.written), _eagerly()):
                stack.enter_context(context)
            return self.loss_of(copies, _copy_of(batch))

    def kept(self) -> list[str]:
        """Return the classes of layers that were made, and live on: something outside of the copies keeps them.

        Those without parameters have drawn nothing.
        """
        if any(made() is not None for made in self.made):
            gc.collect()  # most have references to themselves
        living = [module for made in self.made if (module := made()) is not None]
        return [type(module).__name__ for module in living if any(True for _ in module.parameters())]

    def drawing(self, rows: Rows | None, copies: Sequence[Any]) -> AbstractContextManager[None]:
        """Surround ``loss_of`` for these rows. Without draws of one process, dropout layers are off."""
        if self.draws is not None and rows is not None:
            return self.draws.comparing(rows, copies[0])
        for layer in copies[0].modules():
            if isinstance(layer, Dropout):
                layer.training = False
            if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
                layer.dropout = 0.0
        return nullcontext()


def _eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled layers run as Python: torch compiles code for each size. Its import takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _copy_of(batch: Any) -> Any:
    """Return a deep copy, or what cannot be copied itself."""
    with suppress(Exception):
        return copy.deepcopy(batch)
    return batch


class FirstBatch(NamedTuple):
    """The whole batch that is compared, this rank's part, its weight, and its rows in the whole; ``None``: unknown.

    ``logs`` weighs what the step logs as means, if it is not weighed as the loss. ``samples`` is 0 for a padding batch.
    """

    whole: Any
    part: Any
    weight: Weight
    rows: Rows | None = None
    logs: Weight | None = None
    samples: int = 1


class Draws:
    """The random numbers of a comparison: as on one process if that is known, else those of the whole batch differ.

    The constructor is a collective.
    """

    def __init__(self, computation: Computation, group: dist.ProcessGroup | None) -> None:
        self._shared, self._draws, self._group = SharedRandomState(group=group), computation.draws, group

    def of_part(self, first: FirstBatch) -> AbstractContextManager[None]:
        """Surround the computation of this rank's part, after one of the whole batch."""
        return self._comparing_draws() if self._is_exact(first) else nullcontext()

    @contextmanager
    def _comparing_draws(self) -> Iterator[None]:
        """Draw as after :meth:`of_whole`, and note if that was another amount."""
        after_whole = self._shared.state
        self._shared.rewind()
        with self._shared.drawing():
            yield
        if self._draws is not None and not is_same_state(after_whole, self._shared.state):
            self._draws.note_otherwise()

    @contextmanager
    def of_whole(self, first: FirstBatch) -> Iterator[Rows | None]:
        """Surround a computation of the whole batch; yield its rows."""
        rows = first.rows if self._is_exact(first) else None
        if rows is not None:
            self._shared.rewind()
        with as_one_process(), self._shared.drawing():
            yield rows and Rows(0, rows.total, rows.total)

    def _is_exact(self, first: FirstBatch) -> bool:
        return self._draws is not None and first.rows is not None

    def require_told(self) -> None:
        """Raise if a draw of a part was not that of one process: the run tells which, by its layer. A collective."""
        refusals = {} if self._draws is None else self._draws.refused
        if any_rank(bool(refusals), PURPOSE, self._group):
            raise ConfigurationError(
                "the batch cannot be compared, as its random numbers are not those of one process: "
                f"{refusals or 'see another rank'}."
            )

    def remedy(self) -> str:
        """Return what to do about random numbers that may differ from one process's, if any were drawn."""
        first = int(self._draws is not None)  # the state of torch, which draws for the whole batch then
        if is_same_state(self._shared.state[first:], self._shared.begin[first:GLOBAL]):
            return ""
        return (
            " It draws random numbers: draw those of the samples by torch, with the batch in the first dimension "
            "(torch.randn_like(x)); NumPy and random draw the same on every process."
        )


def check_comparable(parts: Sequence[Any]) -> bool:
    """Raise unless a comparison is useful for this model."""
    if any(normalizes_by_part(layer, always=True) for layer in parts[0].modules()):
        raise ConfigurationError("the model has BatchNorm without running statistics.")
    return True


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def attempt_on_all(group: dist.ProcessGroup | None, is_strict: bool, compute: Callable[[], Any]) -> Any:
    """Return ``compute()``. Unless the comparison is strict, all ranks give it up if one fails; then a collective.

    Raises:
        ConfigurationError: The comparison is not strict, and ``compute`` has failed on some rank.
    """
    if is_strict:
        return compute()
    found = failure = None
    try:
        found = compute()
    except Exception as error:  # also if memory does not suffice
        failure = error
    if any_rank(failure is not None, PURPOSE, group):
        raise ConfigurationError(f"the gradient cannot be computed during training ({failure!r} on this rank).")
    return found


def fraction_of(weight: Weight, group: dist.ProcessGroup | None) -> float:
    """Return this rank's fraction of the total weight. A collective if the total is unknown."""
    own, total = weight()
    if total is None:
        total = float(all_reduce(torch.tensor([own], dtype=torch.float64), PURPOSE, group))
    return own / total if total else 0.0


def weighed_gradients(loss: torch.Tensor, fraction: float, module: nn.Module) -> list[torch.Tensor]:
    """Return the dense gradients of this rank's part, times its fraction; zeros if it has none.

    With weight 0 they may be NaN. They count if layers exchange gradients in backward: those of other ranks' losses.
    """
    weighed = loss * fraction  # before backward, for these layers
    counts = fraction or bool(silence(weighed))
    inputs = list(trainable(module).values())
    found = torch.autograd.grad(weighed, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
    return [
        (gradient.to_dense() if counts and gradient is not None else torch.zeros_like(parameter)).contiguous()
        for gradient, parameter in zip(found, inputs, strict=True)
    ]


class Gradients(NamedTuple):
    """What the whole batch and this rank's part give.

    Attributes:
        expected: The gradients of the whole batch.
        own: Those of this rank's part, times ``fraction``.
        fraction: The weight of this rank's part in the batch.
        logs: This rank's samples, its fraction of what is logged, the values of its part, and those of the whole batch.
    """

    expected: list[torch.Tensor]
    own: list[torch.Tensor]
    fraction: float
    logs: tuple[int, float, dict[str, float], dict[str, float]]


class GradientsOnCopies:
    """Computes the gradients of one batch, each time on new copies. The methods are collectives.

    Args:
        computation: The loss.
        first: The batch.
        group: The ranks' process group.
        is_strict: See :func:`attempt_on_all`.
    """

    def __init__(
        self, computation: Computation, first: FirstBatch, group: dist.ProcessGroup | None, is_strict: bool
    ) -> None:
        self._computation, self._first, self._group, self._is_strict = computation, first, group, is_strict
        self.draws, self._buffers = Draws(computation, group), _buffers_of_rank_zero(computation.parts[0], group)
        self._attempt = functools.partial(attempt_on_all, group, is_strict)
        # Layers that communicate wait for the other ranks, which must know first whether this one has got that far.
        meets = any(getattr(layer, "is_synchronized", False) for layer in computation.parts[0].modules())
        self._attempt_here = functools.partial(attempt_on_all, group, is_strict or not meets)

    def compute(self, change: float = 0.0) -> Gradients:
        """Return the gradients of the whole batch and of this rank's part.

        Args:
            change: By how much of its value each parameter is changed at most, at random, alike on every rank; and by
                how much numbers of the batch with a fraction, and the loss, whose gradient may not depend on others.
        """
        first = self._first
        with ExitStack() as stack:
            expected, logged_whole = self._attempt(lambda: self._whole(change))  # it may fail on one rank alone
            copy, loss, logged = self._attempt(lambda: self._part(stack, change))
            warn_of_files(self._computation.written, "the training step", self._group)
            fraction = fraction_of(first.weight, self._group)
            fraction_of_logs = fraction_of(first.logs, self._group) if first.logs else fraction
            own = self._attempt(lambda: weighed_gradients(loss, (1 + change) * fraction, copy))
        return Gradients(expected, own, fraction, (first.samples, fraction_of_logs, logged, logged_whole))

    def of_whole(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Return the gradients of the whole batch, and what the step has logged."""
        return self._attempt(lambda: self._whole(0.0))  # type: ignore[no-any-return]

    def logs_of_whole(self) -> dict[str, float]:
        """Return what the step logs of the whole batch; without gradients."""
        with self.draws.of_whole(self._first) as rows, ExitStack() as stack:
            return self._loss(stack, self._first.whole, rows, 0.0)[2]

    def logs_of_part(self) -> dict[str, float]:
        """Return what the step logs of this rank's part, after that of the whole batch; without gradients."""
        with self.draws.of_part(self._first), ExitStack() as stack:
            return self._loss(stack, self._first.part, self._first.rows, 0.0)[2]

    def _whole(self, change: float) -> tuple[list[torch.Tensor], dict[str, float]]:
        with self.draws.of_whole(self._first) as rows, ExitStack() as stack:
            copy, loss, logged = self._loss(stack, self._first.whole, rows, change)
            return self._attempt_here(lambda: weighed_gradients(loss, 1 + change, copy)), logged

    def _part(self, stack: ExitStack, change: float) -> tuple[nn.Module, torch.Tensor, dict[str, float]]:
        stack.enter_context(self.draws.of_part(self._first))
        return self._loss(stack, self._first.part, self._first.rows, change)

    def _loss(
        self, stack: ExitStack, batch: Any, rows: Rows | None, change: float
    ) -> tuple[nn.Module, torch.Tensor, dict[str, float]]:
        copies = self._attempt_here(lambda: copies_of(self._computation, stack, self._is_strict))
        _set_values(copies[0], self._buffers, change)
        stack.enter_context(self._computation.drawing(rows, copies))
        batch = map_arrays(batch, lambda array: _shrunk(array, change)) if change else batch
        loss = self._attempt_here(lambda: self._computation.compute(copies, batch))
        return copies[0], loss, dict(self._computation.logged())


def _buffers_of_rank_zero(module: nn.Module, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return rank 0's buffers of which other ranks have other values, such as statistics of their parts. A collective.

    All must compute the same from the whole batch.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if is_dense(buffer)}
    checksums = {name: checksum_of(buffer) for name, buffer in buffers.items()}
    first, *others = all_gather_object(checksums, PURPOSE, group)
    differing = [name for name in first if any(other.get(name) != first[name] for other in others)]
    own = {name: buffers[name] for name in differing if name in buffers}
    return dict(broadcast_object(own, PURPOSE, group)) if differing else {}


@torch.no_grad()
def _set_values(module: nn.Module, buffers: Mapping[str, torch.Tensor], change: float) -> None:
    for name, buffer in buffers.items():
        module.get_buffer(name).copy_(buffer)
    generator = torch.Generator().manual_seed(0)
    for parameter in trainable(module).values() if change else ():
        parameter.mul_(1 + change * (2 * torch.rand(parameter.shape, generator=generator) - 1))


def _shrunk(array: Any, change: float) -> Any:
    is_real = isinstance(array, torch.Tensor) and array.is_floating_point()
    return torch.where(array == array.round(), array, array * (1 - change)) if is_real else array


@contextmanager
def random_states_kept(module: nn.Module) -> Iterator[None]:
    """Restore the global random states on exit, and those of the model's GPUs."""
    state = get_global_state()
    try:
        with torch.random.fork_rng({parameter.device for parameter in module.parameters() if parameter.is_cuda}):
            yield
    finally:
        set_global_state(state)


def copies_of(computation: Computation, stack: ExitStack, is_strict: bool) -> list[Any]:
    """Return copies of what a computation changes, unless strict without BatchNorm by each rank's part.

    They live until ``stack`` is closed.
    """
    memo = dict(computation.instead)
    try:
        copies = stack.enter_context(copied(computation.parts, memo, ignores=not is_strict))
    except Exception as error:
        names = " or ".join(type(part).__name__ for part in computation.parts)
        raise ConfigurationError(
            f'verify="first_batch" computes copies, but copy.deepcopy cannot copy {names} '
            f"({type(error).__name__}: {error}). Keep outside what cannot be copied, or leave out verify."
        ) from error
    stack.enter_context(outside_copied(computation.parts, memo))
    if not is_strict:
        stack.enter_context(calling_only(memo, computation.made))
    synchronize_copy(computation.parts[0], copies[0])
    for name, layer in copies[0].named_modules():
        if not is_strict and normalizes_by_part(layer):
            layer.training = False
            layer.register_forward_pre_hook(functools.partial(_note, computation.normalizing, name))
    return copies


def _note(found: set[str], name: str, *_: Any) -> None:
    found.add(name)


def normalizes_by_part(layer: nn.Module, always: bool = False) -> bool:
    """Whether a BatchNorm layer normalizes by this rank's part now, in training; ``always``: in evaluation, too."""
    if not isinstance(layer, BatchNorm) or getattr(layer, "is_synchronized", False):
        return False
    return layer.running_mean is None if always else layer.training
