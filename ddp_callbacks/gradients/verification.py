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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ddp_callbacks.batch_norm.layers import unsynchronized
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, any_rank, broadcast_object
from ddp_callbacks.data.nested import arrays_in
from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import ConfigurationError, MismatchError, warn
from ddp_callbacks.gradients.first_batch import (
    PURPOSE,
    Computation,
    FirstBatch,
    Gradients,
    GradientsOnCopies,
    Weight,
    attempt_on_all,
    check_comparable,
    fraction_of,
    random_states_kept,
    trainable,
)
from ddp_callbacks.gradients.side_effects import warn_of_files
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.reporting.recorder import recorder

Verify = Literal["warn", "first_batch"]

OF_RANK_ZERO = "rank 0"
"""In place of an operation: what a step gives to a logger itself is that of rank 0's part."""
_FREELY, _RARELY = 0.5, 200  # seconds of comparisons at first; then, times as long as one takes until the next
_TELLING, _EXACT = 0.01, 0.001  # of the largest gradient: a difference to tell, and in float64; rounding makes less
_OWN = 0.1  # a tenth of that is told, too, if it is so much of the largest gradient of its own parameter
_NEGLIGIBLE, _ROUNDINGS = 1e-5, 64  # of the largest gradient, and of its dtype's: smaller differences are left alone
_CHANGE, _STEADY = 2.0**-12, 0.1  # of the parameters; a steady difference changes by a tenth at most with them
_LARGE_STEADY = 0.5  # a large one, as masks may change; that of rounding changes by more than itself
_ROUNDING = 1e-6  # of a logged value near 0
_UNCLEAR = 16  # roundings by which two ways to join values may differ unseen
_SUMMED_NBYTES = 1 << 22  # of gradients in one sum
_TERMS = (
    "A sum must not have terms of the parameters alone, unless divided by the number of processes, each of which adds "
    "them. "
)
_LOG_A_MEAN = (
    "Log a mean over the samples, or over what weight= counts, if it is given, or a sum over them; anything else, "
    "computed from all samples, as a metric."
)
_LOG_THE_MEAN = (
    "These metrics get one number of each process's part, such as its mean. Give them those of the samples, or log the "
    'number instead: self.log(..., reduce_fx="max"), "min" or "mean".'
)
_COMMUNICATES = (
    "the loss calls torch.distributed.{name}, so it is not compared with one process, and the parts of a batch are not "
    "equal ({local} of {total} samples here). Each counts by its samples, while a loss that takes a mean over the "
    "processes, or multiplies by their number, counts all alike. Choose batch sizes that are multiples of the number "
    'of processes, with drop_last=True. Or divide a sum by the number in all parts, and give reduction="sum".'
)
_PADDED = (
    "The parts have other lengths than the whole batch: collate_fn pads each to its own longest sample. If the model "
    "or the loss sees the padding, pad all to one length. Otherwise: "
)
_OWN_VALUE = (
    "rank {rank} computes other gradients than rank 0 of the same batch: the step or a hook reads a value that each "
    "process has for itself, such as a logged one (trainer.callback_metrics), or one that follows the samples of its "
    "part. Compute it from all of them: self.all_gather(value) of a LightningModule, or all_gather_object(value, "
    "'what') of ddp_callbacks.comm."
)
_log = logging.getLogger("ddp_callbacks")


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
    global random states do not change, nor do global variables and the like that its code names. With a single process
    it does nothing.

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


class Comparisons:
    """Compares the first batch of a training, and, to warn, later ones.

    A loss may get a term later, or a mask that the first batch does not have. At first each comparison follows a third
    of the batches before it later, for 0.5 s in all; then they take 0.5 % of the time. They end with the first
    difference, or the first that is not possible.

    Args:
        verify: See :func:`check_first_batch`; ``None`` compares nothing.

    Attributes:
        called: A collective of torch that the loss calls, equal on all ranks; empty if none, or nothing was compared.
    """

    def __init__(self, verify: Verify | None) -> None:
        self.verify = verify
        self.called, self._has_told = "", False
        self._batch, self._next = -1, 0  # that was looked at last; that is compared next
        self._compared, self._end, self._spent = 0, 0.0, 0.0  # the last comparison: its batch, and its end; all seconds

    def is_due(self, batch: int) -> bool:
        """Whether to compare a batch. Equal on all ranks; local.

        Args:
            batch: Its number in the training, from 0.
        """
        looked_at, self._batch = self._batch, batch
        if self.verify is None or looked_at == batch:  # LBFGS computes a batch repeatedly
            return False
        return batch >= self._next if self.verify == "warn" else not batch

    def compare(self, computation: Computation, load: Callable[[], FirstBatch]) -> None:
        """Compare the batch that is due; see :func:`check_first_batch`. A collective."""
        begin = time.perf_counter()
        assert self.verify is not None
        draws = computation.draws if self._batch else None
        with nullcontext() if draws is None else draws.learning_nothing():  # time decides whether there is a later one
            agrees = check_first_batch(self.verify, computation, load, batch=self._batch)
        self.verify = self.verify if agrees and self.verify == "warn" else None
        seconds, until = time.perf_counter() - begin, self._until_next(begin)
        self._compared, self._end, self._spent = self._batch, begin + seconds, self._spent + seconds
        if (report := recorder()) is not None:
            report.compared += seconds
        self.called, until = broadcast_object([next(iter(computation.refused), ""), until], PURPOSE)
        self._next = self._batch + until

    def _until_next(self, begin: float) -> int:
        """Return the number of batches until the next comparison, at the end of one with this ``begin``."""
        seconds, batches = time.perf_counter() - begin, self._batch - self._compared if self._end else 0
        if self._spent + seconds < _FREELY:
            return max(1, self._batch // 3)
        per_batch = (begin - self._end) / batches if batches else seconds
        return math.ceil(_RARELY * seconds / per_batch)

    def look(self, share: Share) -> None:
        """Warn on rank 0, once, of a loss that communicates, if the parts of a batch are unequal. Local.

        Call it for losses that are means over the samples.
        """
        if not self.called or self._has_told or get_rank() > 0:
            return
        if share.total and share.local * get_world_size() != share.total:
            self._has_told = True
            warn(_COMMUNICATES.format(name=self.called, local=share.local, total=share.total))


def check_first_batch(
    verify: Verify,
    computation: Computation,
    load: Callable[[], FirstBatch],
    process_group: dist.ProcessGroup | None = None,
    batch: int = 0,
) -> bool:
    """Like :func:`verify_gradient`; with ``"warn"`` it only warns, if it can compare at all. A collective.

    For a warning, BatchNorm layers that normalize by each rank's part use running statistics meanwhile. The comparison
    ends without a warning if a rank cannot copy the module, or cannot load or compute its part or the whole batch,
    which may need more memory than a step, or if a module is called that is not copied, such as a global one. It does
    not begin for a compiled model, or with BatchNorm layers without running statistics. A message at level ``DEBUG``
    says why.

    Args:
        load: Returns the batch; see :func:`verify_gradient`.
        batch: Its number in the training, from 0.

    Returns:
        Whether the gradients were compared, and agree.
    """
    is_strict, agrees = verify == "first_batch", False
    if get_world_size(process_group) == 1:
        return True
    hint = "verify=None leaves the comparison out."
    if not batch:
        hint = f'verify="first_batch" makes this warning an error, and {hint}'
    with nullcontext() if is_strict else _warning("A batch", hint, process_group):
        if not is_strict:
            attempt_on_all(process_group, is_strict, lambda: check_comparable(computation.parts))
        with random_states_kept(computation.parts[0]), torch.enable_grad():
            first = attempt_on_all(process_group, is_strict, load)
            which = f"batch {batch} of the training" if batch else "the first batch"
            _compare(computation, first, process_group, is_strict, which)
        agrees = True
    if not is_strict and not batch and get_rank(process_group) == 0:
        _warn_of_batch_norm(computation, agrees)
        _warn_of_kept(computation)
    return agrees


def check_logged(computation: Computation, load: Callable[[], FirstBatch], step: str) -> bool:
    """Warn if the means over the ranks of what a step logs are not those of the whole batch. A collective.

    It ends without a warning where :func:`check_first_batch` does. No gradients are computed, unless by the step.

    Args:
        computation: What its ``loss_of`` returns is not used.
        load: See :func:`check_first_batch`.
        step: The name of the step, for the message.

    Returns:
        Whether each value is joined in one way, or nothing could be compared: equal on all ranks.
    """
    group, is_told = None, True  # the default group
    attempt = functools.partial(attempt_on_all, group, False)

    with _warning(f"What {step} logs", "verify=None leaves the comparison out.", group):
        attempt(lambda: check_comparable(computation.parts))
        with random_states_kept(computation.parts[0]):
            first = attempt(load)
            computed = GradientsOnCopies(computation, first, group, is_strict=False)
            expected, own = attempt(computed.logs_of_whole), attempt(computed.logs_of_part)
            warn_of_files(computation.written, step, group)
            logged = first.samples, fraction_of(first.logs or first.weight, group), own, expected
            if text := _differing(computation, logged, lambda: attempt(computed.logs_of_whole), group):
                computed.draws.require_told()
                raise MismatchError(
                    f"the mean over the processes of what {step} logs for a batch is not that of one process: "
                    f"{text}{computed.draws.remedy()}"
                )
            ways = [*computation.operations.values()]
            is_told = bool(broadcast_object(all(len(each) == 1 for each in ways), PURPOSE, group))
    if get_rank(group) == 0:
        _warn_of_kept(computation)
    return is_told


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


def _warn_of_batch_norm(computation: Computation, is_computed: bool) -> None:
    layers, called = _normalizing_by_part(computation.parts[0]), computation.normalizing
    if computation.is_whole_step and (is_computed or called):
        layers = [name for name in layers if name in called]  # a model may have layers that it does not use
    if layers:
        warn(
            f"layer {layers[0]} normalizes by each process's part of the batch (BatchNorm), not as one process: "
            "sync_batchnorm=True of Trainer or DDPCallback makes them equal. (verify=None leaves the comparison out.)"
        )


def _warn_of_kept(computation: Computation) -> None:
    if kept := computation.kept():
        warn(
            f"the step makes a {kept[0]} that something outside of the model keeps, such as a cache. The comparison of "
            "the first batch has made it, so other random numbers follow than on one process. Make it before the "
            "training. (verify=None leaves the comparison out.)"
        )


def _normalizing_by_part(module: nn.Module) -> list[str]:
    return [name for name, layer in unsynchronized(module).items() if layer.training]


def _compare(
    computation: Computation, first: FirstBatch, group: dist.ProcessGroup | None, is_strict: bool, which: str
) -> None:
    computed = GradientsOnCopies(computation, first, group, is_strict)
    draws, found = computed.draws, computed.compute()
    expected = found.expected
    if not any(map(_largest, expected)):
        raise ConfigurationError(
            f"the gradients of {which} cannot be compared: its loss depends on no parameter of the copy of the "
            "module that computes it. Use the module that is given, and none that is global."
        )
    differing = _differences(_sum(found.own, 1.0, group), expected)
    is_rounding = _is_rounding(differing, expected)
    is_telling = not is_rounding and (is_strict or _is_telling(differing, expected))
    shown = is_rounding, is_telling, None if is_strict and is_telling else _doubtful(differing, expected)
    is_rounding, is_telling, doubtful = broadcast_object(shown, PURPOSE, group)
    if doubtful is not None:
        change = _change_of(doubtful, found, computed.compute(_CHANGE), group)
        is_telling = change <= (_LARGE_STEADY if is_telling else _STEADY)
    if not is_telling:
        if is_rounding and computation.draws is not None:
            computation.draws.confirm()
        if text := _differing(computation, found.logs, lambda: computed.of_whole()[1], group):
            draws.require_told()
            raise MismatchError(
                f"the gradient of {which} is that of one process, but the mean over the processes of what the "
                f"training step logs is not: {text}{draws.remedy()}"
            )
        return
    again = _differences(computed.of_whole()[0], expected)
    if broadcast_object(not _is_rounding(again, expected), PURPOSE, group):
        raise ConfigurationError(
            'verify="first_batch" cannot compare the gradients: two computations of one batch on one process differ. '
            "The model is random, or its gradients are not finite."
        )
    draws.require_told()
    _require_same_batch(first.whole, expected, group)
    # Values that are sums are joined as such, whatever is wrong with the gradient.
    _differing(computation, found.logs, lambda: computed.of_whole()[1], group)
    unweighed = _sum(found.own, 1 / found.fraction if found.fraction else 0.0, group)
    adds_up = _is_rounding(_differences(unweighed, expected), expected)
    name, most = max(zip(trainable(computation.parts[0]), differing, strict=True), key=operator.itemgetter(1))
    text = (
        f"the gradient of {which} on {get_world_size(group)} processes is not that of one process: for "
        f"parameter {name} it differs by up to {most:.2g}; the largest gradient is {max(map(_largest, expected)):.2g}. "
    )
    by_part = _normalizing_by_part(computation.parts[0]) if is_strict else []  # otherwise these do not, here
    padding = _PADDED if any_rank(_has_other_length(first), PURPOSE, group) else ""
    text += f"{draws.remedy()} {padding}{_remedy(by_part, adds_up, found.fraction == 1)}".lstrip()
    raise MismatchError(broadcast_object(text, PURPOSE, group))


def _telling_value(module: nn.Module) -> float:
    """Return which part of a logged value rounding does not explain: more with half precision, and GPUs use TF32."""
    parameters = trainable(module).values()
    if any(each.is_cuda for each in parameters):
        return _TELLING
    return min(_TELLING, math.sqrt(max([torch.finfo(torch.float32).eps, *map(_epsilon, parameters)])))


def _differing(
    computation: Computation,
    logged: tuple[int, float, Mapping[str, float], Mapping[str, float]],
    again: Callable[[], Mapping[str, float]],
    group: dist.ProcessGroup | None,
) -> str:
    """Return which logged values are not those of the whole batch, and a remedy; empty if none. A collective.

    Args:
        computation: Gets the operations by which values become those of the whole batch.
        logged: This rank's samples, its fraction of the batch, the values of its part, and those of the whole batch.
        again: Computes those of the whole batch once more: some, such as times, differ each time.
    """
    gathered = all_gather_object(logged, PURPOSE, group)
    telling, expected = _telling_value(computation.parts[0]), gathered[0][3]
    found, joint = dict[str, list[str]](), dict[str, float]()
    for name, value in expected.items():
        of_parts = [(fraction, part.get(name)) for samples, fraction, part, _ in gathered if samples]
        # A part that logs nothing does not count, but if none does.
        parts = [(fraction, own) for fraction, own in of_parts if own is not None] or [(f, 0.0) for f, _ in of_parts]
        known = computation.operations.get(name, ())
        ways = dict.fromkeys(known if name in computation.fixed else [*known, "mean", "sum"])
        right = _right_ways(parts, ways, value, telling) if parts else []
        if right:
            found[name] = right
        elif parts and not math.isnan(_joined(parts, next(iter(ways))) - value):
            joint[name] = _joined(parts, next(iter(ways)))
    repeated = again() if joint else {}
    computation.operations.update(found)  # once nothing more is computed
    named = [f"{n} ({own:.6g} for {expected[n]:.6g})" for n, own in joint.items() if repeated.get(n) == expected[n]]
    if not joint or not broadcast_object(named, PURPOSE, group):
        return ""
    remedy = _LOG_A_MEAN
    if any(OF_RANK_ZERO in computation.operations.get(name, ()) for name in joint):
        remedy += " A logger gets that of rank 0's part: use self.log."
    elif joint.keys() <= computation.fixed:
        remedy = _LOG_THE_MEAN
    return str(broadcast_object(f"{', '.join(named)}. {remedy}", PURPOSE, group))


def _joined(parts: Iterable[tuple[float, float]], operation: str) -> float:
    """Return a value of the whole batch, from the fractions of parts and their values."""
    if operation == "mean":
        counted = [(fraction, value) for fraction, value in parts if fraction]  # others may be NaN
        whole = sum(fraction for fraction, _ in counted) or 1.0
        return sum(fraction * value for fraction, value in counted) / whole
    values = [value for _, value in parts]
    if operation == OF_RANK_ZERO:
        return values[0]
    return sum(values) if operation == "sum" else max(values) if operation == "max" else min(values)


def _right_ways(parts: Sequence[tuple[float, float]], ways: Iterable[str], value: float, telling: float) -> list[str]:
    """Return by which operations the parts' values become that of the whole batch, as far as rounding lets one tell."""
    sizes = {way: _joined([(fraction, abs(own)) for fraction, own in parts], way) for way in ways}
    errors = {way: abs(_joined(parts, way) - value) for way in ways}
    right = [way for way in ways if errors[way] <= telling * sizes[way] + _ROUNDING]
    least = min((errors[way] for way in right), default=0.0)
    return [way for way in right if errors[way] <= least + _UNCLEAR * telling**2 * sizes[way]]


def _require_same_batch(whole: Any, expected: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise if ranks have different gradients of the whole batch, which each of them has loaded. A collective."""
    own = [checksum_of(whole), sum(float(gradient.norm()) ** 2 for gradient in expected)]
    checksums, squares = zip(*all_gather_object(own, PURPOSE, group), strict=True)
    rounding = 2 * math.sqrt(max(map(_epsilon, expected)))
    others = [rank for rank, own in enumerate(squares) if not math.isclose(own, squares[0], rel_tol=rounding)]
    if others and len({*checksums}) == 1:
        raise MismatchError(_OWN_VALUE.format(rank=others[0]))
    if others:
        raise MismatchError(
            f"the data set is not the same on every process: in a batch that is compared, rank {others[0]} has "
            "loaded other samples than rank 0. Seed each process alike before the samples are drawn, split or shuffled "
            "(torch.manual_seed(0)), or read them from a file. Or does it keep samples that have drawn (a cache)? Then "
            "let it draw each time."
        )


def _differences(found: Iterable[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Return the largest difference in each gradient."""
    return [_largest(one - other) for one, other in zip(found, expected, strict=True)]


def _is_rounding(differences: Sequence[float], expected: Sequence[torch.Tensor]) -> bool:
    """Whether rounding can explain all differences."""
    most = math.sqrt(max(map(_epsilon, expected), default=0.0)) * max(map(_largest, expected), default=0.0)
    return all(each <= most and math.isfinite(each) for each in differences)


def _doubtful(differences: Sequence[float], expected: Sequence[torch.Tensor]) -> int | None:
    """Return which gradient has the largest difference, if that is more than rounding usually makes it on a CPU."""
    most, usual = max(differences), max(_NEGLIGIBLE, _ROUNDINGS * max(map(_epsilon, expected)))
    is_doubtful = usual * max(map(_largest, expected)) < most < math.inf and not any(each.is_cuda for each in expected)
    return differences.index(most) if is_doubtful else None


def _change_of(index: int, found: Gradients, changed: Gradients, group: dist.ProcessGroup | None) -> float:
    """Return by how much of it a difference changes with the parameters; that of rounding by more. A collective.

    Args:
        index: Which gradient.
        found, changed: The gradients before and after the change.
    """
    pairs = [(each.own[index], each.expected[index]) for each in (found, changed)]
    before, after = (next(_sum([own], 1.0, group)) - expected for own, expected in pairs)
    return float(broadcast_object(float((after - before).norm() / before.norm()), PURPOSE, group))


def _is_telling(found: Sequence[float], expected: Sequence[torch.Tensor]) -> bool:
    """Whether a difference is larger than rounding makes it in any case."""
    largest, epsilon = [*map(_largest, expected)], max(map(_epsilon, expected))
    most = (_EXACT if epsilon <= torch.finfo(torch.float64).eps else _TELLING) * max(largest)
    pairs = zip(found, largest, strict=True)
    return any(each > most or each > max(_OWN * mine, most / 10) for each, mine in pairs)


def _remedy(by_part: Sequence[str], adds_up: bool, is_sum: bool) -> str:
    """Return what to do about another gradient; ``by_part`` names BatchNorm layers that may be the reason."""
    if adds_up:
        return (
            "Added up without weights the gradients are right: the loss is a sum over the samples, so give "
            'reduction="sum" to DDPCallback (of a Trial or Trainer), CallbackStrategy (Trainer(strategy=...)) or '
            "CallbackFabricStrategy (Fabric(strategy=...)), in a loop of your own weigh(float(share.local > 0), 1.0); "
            "or take the mean."
        )
    if by_part:
        return (
            f"layer {by_part[0]} normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True. "
            "If that is not all, the loss is not a mean over the samples: see the next run."
        )
    return (_TERMS if is_sum else "") + (
        "The loss must be a mean over the samples, a sum over them, or a mean over what weight= counts (tokens, known "
        'targets, class weights): give weight=, in a Trainer weight="cross_entropy" for ignore_index and class '
        "weights. What compares samples with each other (a contrastive loss, a normalization of your own) needs the "
        "whole batch on each process: self.all_gather(outputs, sync_grads=True) in a LightningModule. Take the size of "
        "a batch from the batch."
    )


def _has_other_length(first: FirstBatch) -> bool:
    """Whether a tensor of this rank's part differs from that of the whole batch in more than the number of samples."""
    pairs = zip(arrays_in(first.whole), arrays_in(first.part), strict=False)
    return any(whole.ndim == part.ndim and whole.shape[1:] != part.shape[1:] for whole, part in pairs)


def _sum(gradients: list[torch.Tensor], factor: float, group: dist.ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Yield the sums of the gradients times ``factor`` over the ranks, a few at a time to save memory. A collective."""
    for some in _limited(gradients):
        flat = torch.cat([own.view(-1) * factor for own in some])
        sums = all_reduce(flat, PURPOSE, group).split([own.numel() for own in some])
        yield from (found.view_as(own) for found, own in zip(sums, some, strict=True))


def _limited(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors of one dtype and device, each of one tensor, or of :data:`_SUMMED_NBYTES` at most."""
    some: list[torch.Tensor] = []
    for own in gradients:
        is_like = some and (own.dtype, own.device) == (some[0].dtype, some[0].device)
        if some and not (is_like and sum(each.nbytes for each in [*some, own]) <= _SUMMED_NBYTES):
            yield some
            some = []
        some.append(own)
    if some:
        yield some


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; infinity if any value is NaN."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _epsilon(gradient: torch.Tensor) -> float:
    kind = gradient.device.type
    dtypes = [gradient.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    return max(torch.finfo(dtype).eps for dtype in dtypes)
