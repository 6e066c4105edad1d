"""Compare the synchronized gradient of a batch with the gradient of the whole batch: do N ranks train like one process?

The ranks' gradients add up to that of the whole batch if the loss is a mean, a sum or a weighted mean over samples.
With a contrastive loss, a mean over the known targets, or a wrong weight, training runs too, but with other numbers.
So every rank computes both its part of the batch and the whole batch, and rank 0 compares the gradients.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_callbacks._torch import BatchNorm, Dropout
from ddp_callbacks.batch_norm.layers import synchronize_copy
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, any_rank, broadcast_object
from ddp_callbacks.data.global_state import GLOBAL, get_global_state, is_same_state, set_global_state
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError, MismatchError, warn
from ddp_callbacks.gradients.copies import calling_only, copied, shares_state
from ddp_callbacks.gradients.weighing import silence
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.randomness import Rows, WholeDraws

Verify = Literal["warn", "first_batch"]

Weight = Callable[[], tuple[float, float | None]]
"""The weight of the loss of this rank's part, and the sum over all ranks, ``None`` if unknown."""

_PURPOSE = "the comparison of a batch's gradients"
_COMPILED = ("_compiled_call_impl", "_orig_mod", "_compiler_ctx")  # set in a module by torch or Lightning
_TELLING = 0.01  # of the largest gradient: a warning needs this difference; rounding causes smaller ones
_ROUNDING = 1e-6  # of a logged value near 0
_log = logging.getLogger("ddp_callbacks")


@dataclass(frozen=True)
class Computation:
    """A loss, and the objects that computing it may change. A comparison computes it on copies of them.

    Attributes:
        parts: The module whose gradients are compared, and other objects, such as a loss function.
        loss_of: Called with a copy of ``parts`` and a batch; returns a scalar.
        instead: By the ``id`` of an object that ``parts`` may refer to, what a copy has in its place.
        logged: Returns what the last call of ``loss_of`` has logged as means over its samples, by name.
        draws: Lets it draw what one process would draw; ``None``: each rank draws numbers of its own.
    """

    parts: Sequence[Any]
    loss_of: Callable[[Sequence[Any], Any], torch.Tensor]
    instead: Mapping[int, Any] = field(default_factory=dict)
    logged: Callable[[], Mapping[str, float]] = dict
    draws: WholeDraws | None = None

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


class FirstBatch(NamedTuple):
    """The whole first batch, this rank's part, its weight, and its rows in the whole; ``None``: unknown."""

    whole: Any
    part: Any
    weight: Weight
    rows: Rows | None = None


def check_verify(verify: str | None, sync: object) -> None:
    """Raise :class:`ConfigurationError` unless ``verify`` is valid, and ``"first_batch"`` has exact gradients."""
    if verify not in (None, "warn", "first_batch"):
        raise ConfigurationError(
            'verify must be "warn", "first_batch" (the gradient of the first batch is compared with that of one '
            f"process, and a difference is a warning or an error) or None, got {verify!r}."
        )
    if verify == "first_batch" and sync != "every_step":
        raise ConfigurationError(
            f'verify="first_batch" compares synchronized gradients, but sync={sync!r} has none. Verify with '
            'sync="every_step" once, then train without verify.'
        )


def is_to_verify(verify: str | None, sync: object, *settings: object) -> bool:
    """Whether to compare the first batch. A mere warning is left out if the user has said how the loss counts.

    Args:
        settings: The user's settings that say so. ``"sum"`` does not say it of terms of the parameters alone.
    """
    is_default = all(setting in (None, "mean", "sum", "global") for setting in settings)
    return verify == "first_batch" or (verify == "warn" and sync == "every_step" and is_default)


def verify_gradient(
    module: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    whole: Any,
    part: Any,
    weight: Weight,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise unless the ranks' weighted gradients add up to the gradient of the whole batch. A collective.

    Each rank computes ``part`` and ``whole``, each on a copy of ``module``, in which dropout layers are off. If the
    gradients differ, it computes ``whole`` once more, to see whether the model draws random numbers. The module and the
    global random states do not change. What ``loss_of`` changes elsewhere stays changed. With a single process it does
    nothing.

    Args:
        module: The gradients of its trainable parameters are compared, on rank 0. ``copy.deepcopy`` must accept it.
        loss_of: Returns the loss, a scalar. Called with a copy of ``module``, which it must use, and with ``part`` or
            ``whole``; must not call ``backward``.
        whole: The whole batch, the same on every rank.
        part: This rank's part of ``whole``; rank 0 must have samples. Parts of equal size would hide a wrong weight.
        weight: Called after the loss of ``part`` is computed.
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank alike; names the parameter that differs most and a remedy.
        ConfigurationError: On every rank alike: the module cannot be copied; the loss does not depend on the copy; the
            gradients are not finite on one process either, or the model draws random numbers outside dropout layers, so
            that two computations of one batch differ.
        PeerError: Another rank failed or died.
    """
    computation = Computation([module], lambda copies, batch: loss_of(copies[0], batch))
    check_first_batch("first_batch", computation, lambda: FirstBatch(whole, part, weight), process_group)


def check_first_batch(
    verify: Verify,
    computation: Computation,
    load: Callable[[], FirstBatch],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Like :func:`verify_gradient`; with ``"warn"`` it only warns, if it can compare at all. A collective.

    For a warning, BatchNorm layers that normalize by each rank's part use running statistics meanwhile. The comparison
    ends without a warning if a rank cannot copy the module, or cannot load or compute its part or the whole batch,
    which may need more memory than a step, or if a module is called that is not copied, such as a global one. It does
    not begin for a compiled model, with BatchNorm layers without running statistics, or if a copy would share state
    with the original. A message at level ``DEBUG`` says why.

    Args:
        load: Returns the batch; see :func:`verify_gradient`.
    """
    is_strict = verify == "first_batch"
    if get_world_size(process_group) == 1:
        return
    hint = 'verify="first_batch" makes this warning an error, and verify=None leaves the comparison out.'
    with nullcontext() if is_strict else _warning("The first batch", hint, process_group):
        if not is_strict:
            _attempt(process_group, is_strict, lambda: _check_comparable(computation.parts))
        with _random_states_kept(computation.parts[0]), torch.enable_grad():
            _compare(computation, _attempt(process_group, is_strict, load), process_group, is_strict)


def check_logged(
    computation: Computation,
    load: Callable[[], FirstBatch],
    step: str,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Warn if the means over the ranks of what a step logs are not those of the whole batch. A collective.

    It ends without a warning where :func:`check_first_batch` does. No gradients are computed, unless by the step.

    Args:
        computation: What its ``loss_of`` returns is not used.
        load: See :func:`check_first_batch`.
        step: The name of the step, for the message.
    """
    group, attempt = process_group, functools.partial(_attempt, process_group, False)

    def compute(batch: Any, rows: Rows | None, fraction: float) -> dict[str, float]:
        with ExitStack() as stack:
            copies = attempt(lambda: _copies(computation, stack, is_strict=False))
            with computation.drawing(rows, copies):
                attempt(lambda: (computation.loss_of(copies, batch),))
            return _weighed(computation.logged(), fraction)

    with _warning(f"What {step} logs", "verify=None leaves the comparison out.", group):
        attempt(lambda: _check_comparable(computation.parts))
        with _random_states_kept(computation.parts[0]):
            first, draws = attempt(load), _Draws(computation, group)

            def of_whole() -> dict[str, float]:
                with draws.of_whole(first) as rows:
                    return compute(first.whole, rows, 1.0)

            expected = of_whole()
            with draws.of_part(first):
                own = compute(first.part, first.rows, _fraction(first.weight, group))
            if text := _differing(own, expected, of_whole, group):
                draws.require_told()
                raise MismatchError(
                    f"the mean over the processes of what {step} logs for its first batch is not that of one process: "
                    f"{text}{draws.remedy()}"
                )


class _Draws:
    """The random numbers of a comparison: as on one process if that is known, else those of the whole batch differ.

    The constructor is a collective.
    """

    def __init__(self, computation: Computation, group: dist.ProcessGroup | None) -> None:
        self._shared, self._draws, self._group = SharedRandomState(group=group), computation.draws, group

    def of_part(self, first: FirstBatch) -> AbstractContextManager[None]:
        """Surround the computation of this rank's part, after one of the whole batch."""
        if not self._is_exact(first):
            return nullcontext()
        self._shared.rewind()
        return self._shared.drawing()

    @contextmanager
    def of_whole(self, first: FirstBatch) -> Iterator[Rows | None]:
        """Surround a computation of the whole batch; yield its rows."""
        rows = first.rows if self._is_exact(first) else None
        if rows is not None:
            self._shared.rewind()
        with self._shared.drawing():
            yield rows and Rows(0, rows.total, rows.total)

    def _is_exact(self, first: FirstBatch) -> bool:
        return self._draws is not None and first.rows is not None

    def require_told(self) -> None:
        """Raise if a draw of a part was not that of one process: the run tells which, by its layer. A collective."""
        refusals = {} if self._draws is None else self._draws.refused
        if any_rank(bool(refusals), _PURPOSE, self._group):
            raise ConfigurationError(
                "the first batch cannot be compared, as its random numbers are not those of one process: "
                f"{refusals or 'see another rank'}."
            )

    def remedy(self) -> str:
        """Return what to do about random numbers, if any were drawn since the last rewind."""
        if is_same_state(self._shared.state, self._shared.begin[:GLOBAL]):
            return ""
        return (
            " It draws random numbers: draw those of the samples by torch, with the batch in the first dimension "
            "(torch.randn_like(x)); NumPy and random draw the same on every process."
        )


@contextmanager
def _warning(what: str, hint: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let rank 0 warn of a difference that is found inside; if nothing can be compared, only a message says so."""
    try:
        yield
    except MismatchError as error:
        if get_rank(group) == 0:
            warn(f"{error} ({hint})")
    except ConfigurationError as error:
        _log.debug("%s is not compared: %s", what, error)


def _check_comparable(parts: Sequence[Any]) -> bool:
    """Raise unless a comparison is useful for this model, and leaves no trace: torch compiles code for each size."""
    layers = list(parts[0].modules())
    is_compiled = any(getattr(layer, name, None) for layer in layers for name in _COMPILED)
    if is_compiled or any(_normalizes_by_part(layer, always=True) for layer in layers) or any(map(shares_state, parts)):
        raise ConfigurationError("the model is compiled, or it has BatchNorm without running statistics, or closures.")
    return True


def _compare(
    computation: Computation,
    first: FirstBatch,
    group: dist.ProcessGroup | None,
    is_strict: bool,
) -> None:
    attempt, draws = functools.partial(_attempt, group, is_strict), _Draws(computation, group)

    def compute(
        batch: Any, rows: Rows | None, fraction_of: Callable[[], float]
    ) -> tuple[float, list[torch.Tensor], dict[str, float]]:
        with ExitStack() as stack:
            copies = attempt(lambda: _copies(computation, stack, is_strict))
            stack.enter_context(computation.drawing(rows, copies))
            loss = attempt(lambda: computation.loss_of(copies, batch))
            fraction = fraction_of()
            logged = _weighed(computation.logged(), fraction)
            return fraction, attempt(lambda: _weighed_gradients(loss, fraction, copies[0])), logged

    def of_whole() -> tuple[list[torch.Tensor], dict[str, float]]:
        with draws.of_whole(first) as rows:
            return compute(first.whole, rows, lambda: 1.0)[1:]

    expected, logged_whole = of_whole()
    with draws.of_part(first):
        fraction, own, logged = compute(first.part, first.rows, lambda: _fraction(first.weight, group))
    if not any(map(_largest, expected)):
        raise ConfigurationError(
            "the gradients of the first batch cannot be compared: its loss depends on no parameter of the copy of the "
            "module that computes it. Use the module that is given, and none that is global."
        )
    found = _differences(_sum(own, 1.0, group), expected, 0.0 if is_strict else _TELLING)
    differing = broadcast_object(found, _PURPOSE, group)
    if not differing:
        if text := _differing(logged, logged_whole, lambda: of_whole()[1], group):
            draws.require_told()
            raise MismatchError(
                "the gradient of the first batch is that of one process, but the mean over the processes of what the "
                f"training step logs is not: {text}{draws.remedy()}"
            )
        return
    if broadcast_object(_differences(of_whole()[0], expected), _PURPOSE, group):
        raise ConfigurationError(
            'verify="first_batch" cannot compare the gradients: two computations of one batch on one process differ. '
            "The model is random, or its gradients are not finite."
        )
    draws.require_told()
    _require_same_batch(expected, group)
    adds_up = not _differences(_sum(own, 1 / fraction if fraction else 0.0, group), expected)
    name, most = max(zip(_trainable(computation.parts[0]), differing, strict=True), key=operator.itemgetter(1))
    text = (
        f"the gradient of the first batch on {get_world_size(group)} processes is not that of one process: for "
        f"parameter {name} it differs by up to {most:.2g}; the largest gradient is {max(map(_largest, expected)):.2g}. "
    )
    text += f"{draws.remedy()} {_remedy(computation.parts[0], adds_up)}".lstrip()
    raise MismatchError(broadcast_object(text, _PURPOSE, group))


def _weighed(logged: Mapping[str, float], fraction: float) -> dict[str, float]:
    return {name: fraction and fraction * value for name, value in logged.items()}  # without samples they may be NaN


def _differing(
    own: Mapping[str, float],
    expected: Mapping[str, float],
    again: Callable[[], Mapping[str, float]],
    group: dist.ProcessGroup | None,
) -> str:
    """Return which logged values are not those of the whole batch, and a remedy; empty if none. A collective.

    Args:
        own: The values of this rank's part, times its fraction.
        again: Computes those of the whole batch once more: some, such as times, differ each time.
    """
    parts = all_gather_object(dict(own), _PURPOSE, group)
    joint = {name: sum(part.get(name, 0.0) for part in parts) for name in expected}
    sizes = {name: sum(abs(part.get(name, 0.0)) for part in parts) for name in expected}
    differ = [n for n, size in sizes.items() if abs(joint[n] - expected[n]) > _TELLING * size + _ROUNDING]
    if not broadcast_object(differ, _PURPOSE, group):
        return ""
    repeated = again()
    named = [f"{n} ({joint[n]:.4g} for {expected[n]:.4g})" for n in differ if repeated.get(n) == expected[n]]
    if not broadcast_object(named, _PURPOSE, group):
        return ""
    remedy = (
        'Log a mean over the samples, or over what weight= counts, if it is given; a count with reduce_fx="sum" or as '
        "a torchmetrics.SumMetric; anything else, computed from all samples, as a metric."
    )
    return str(broadcast_object(f"{', '.join(named)}. {remedy}", _PURPOSE, group))


def _require_same_batch(expected: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise if ranks have different gradients of the whole batch, which each of them has loaded. A collective."""
    squares = all_gather_object(sum(float(gradient.norm()) ** 2 for gradient in expected), _PURPOSE, group)
    others = [rank for rank, own in enumerate(squares) if not math.isclose(own, squares[0], rel_tol=_TELLING)]
    if others:
        raise MismatchError(
            f"the data set is not the same on every process: in the first batch, rank {others[0]} has loaded other "
            "samples than rank 0. Seed each process alike before the samples are drawn, split or shuffled "
            "(torch.manual_seed(0)), or read them from a file. Or does it keep samples that have drawn (a cache)? Then "
            "let it draw each time."
        )


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _attempt(group: dist.ProcessGroup | None, is_strict: bool, compute: Callable[[], Any]) -> Any:
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
    if any_rank(found is None, _PURPOSE, group):
        raise ConfigurationError(f"the gradient cannot be computed during training ({failure!r} on this rank).")
    return found


def _differences(found: Iterable[torch.Tensor], expected: list[torch.Tensor], least: float = 0.0) -> list[float]:
    """Return the largest difference in each gradient; an empty list if rounding can explain all of them.

    Args:
        least: The smallest difference that counts, as a fraction of the largest gradient.
    """
    largest = [_largest(one - other) for one, other in zip(found, expected, strict=True)]
    relative = max(least, math.sqrt(max(map(_epsilon, expected), default=0.0)))
    most = relative * max(map(_largest, expected), default=0.0)
    return [] if all(each <= most and math.isfinite(each) for each in largest) else largest


def _remedy(module: nn.Module, adds_up: bool) -> str:
    if adds_up:
        return (
            "Added up without weights the gradients are right: the loss is a sum over the samples, so give "
            'reduction="sum" to DDPCallback (of a Trial or Trainer), CallbackStrategy (Trainer(strategy=...)) or '
            "CallbackFabricStrategy (Fabric(strategy=...)), in a loop of your own weigh(float(share.local > 0), 1.0); "
            "or take the mean."
        )
    layers = [name for name, layer in module.named_modules() if _normalizes_by_part(layer)]
    if layers:
        return (
            f"{layers[0]} normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True. If "
            "that is not all, the loss is not a mean over the samples: see the next run."
        )
    return (
        "The loss must be a mean over the samples, a sum over them, or a mean over what weight= counts (tokens, "
        "targets that are known, class weights): give weight=, or correct it. A sum must not have terms of the "
        "parameters alone, unless divided by the number of processes, each of which adds them. What compares samples "
        "with each other, as a contrastive loss does, needs the whole batch on each process."
    )


def _fraction(weight: Weight, group: dist.ProcessGroup | None) -> float:
    """Return this rank's fraction of the total weight. A collective if the total is unknown."""
    own, total = weight()
    if total is None:
        total = float(all_reduce(torch.tensor([own], dtype=torch.float64), _PURPOSE, group))
    return own / total if total else 0.0


def _weighed_gradients(loss: torch.Tensor, fraction: float, module: nn.Module) -> list[torch.Tensor]:
    """Return the dense gradients of this rank's part, times its fraction; zeros if it has none.

    With weight 0 they may be NaN. They count if layers exchange gradients in backward: those of other ranks' losses.
    """
    weighed = loss * fraction  # before backward, for these layers
    counts = fraction or bool(silence(weighed))
    inputs = list(_trainable(module).values())
    found = torch.autograd.grad(weighed, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
    return [
        (gradient.to_dense() if counts and gradient is not None else torch.zeros_like(parameter)).contiguous()
        for gradient, parameter in zip(found, inputs, strict=True)
    ]


def _sum(gradients: list[torch.Tensor], factor: float, group: dist.ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Yield the sums of the gradients times ``factor`` over the ranks, one at a time to save memory. A collective."""
    return (all_reduce((own * factor).view(-1), _PURPOSE, group).view_as(own) for own in gradients)


@contextmanager
def _random_states_kept(module: nn.Module) -> Iterator[None]:
    """Restore the global random states on exit, and those of the model's GPUs."""
    state = get_global_state()
    try:
        with torch.random.fork_rng({parameter.device for parameter in module.parameters() if parameter.is_cuda}):
            yield
    finally:
        set_global_state(state)


def _copies(computation: Computation, stack: ExitStack, is_strict: bool) -> list[Any]:
    """Return copies of what a computation changes, unless strict without BatchNorm by each rank's part.

    They live until ``stack`` is closed.
    """
    memo = dict(computation.instead)
    try:
        copies = stack.enter_context(copied(computation.parts, memo))
    except Exception as error:
        names = " or ".join(type(part).__name__ for part in computation.parts)
        raise ConfigurationError(
            f'verify="first_batch" computes copies, but copy.deepcopy cannot copy {names} '
            f"({type(error).__name__}: {error}). Keep outside what cannot be copied, or leave out verify."
        ) from error
    if not is_strict:
        stack.enter_context(calling_only(memo))
    synchronize_copy(computation.parts[0], copies[0])
    for layer in copies[0].modules():
        if not is_strict and _normalizes_by_part(layer):
            layer.training = False
    return copies


def _normalizes_by_part(layer: nn.Module, always: bool = False) -> bool:
    """Whether a BatchNorm layer normalizes by this rank's part now, in training; ``always``: in evaluation, too."""
    if not isinstance(layer, BatchNorm) or getattr(layer, "is_synchronized", False):
        return False
    return layer.running_mean is None if always else layer.training


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; infinity if any value is NaN."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _epsilon(gradient: torch.Tensor) -> float:
    kind = gradient.device.type
    dtypes = [gradient.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    return max(torch.finfo(dtype).eps for dtype in dtypes)
