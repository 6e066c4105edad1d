"""Compare the synchronized gradient of a batch with the gradient of the whole batch: do N ranks train like one process?

The ranks' gradients add up to that of the whole batch if the loss is a mean, a sum or a weighted mean over samples.
With a contrastive loss, a mean over the known targets, or a wrong weight, training runs too, but with other numbers.
So every rank computes both its part of the batch and the whole batch, and we compare the two.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ddp_callbacks._torch import BatchNorm, Dropout
from ddp_callbacks.comm.collectives import all_reduce, broadcast_tensors
from ddp_callbacks.data.random_state import SharedRandomState, get_global_state, set_global_state
from ddp_callbacks.errors import ConfigurationError, MismatchError, NonFiniteLossWarning
from ddp_callbacks.process_group import get_world_size
from ddp_callbacks.process_group.presence import describe, presence
from ddp_callbacks.weighing import silence

Verify = Literal["first_batch"]
Loss = Callable[[Any], torch.Tensor]
"""The loss of a batch, as the script computes it: a scalar."""

Weight = Callable[[], tuple[float, float | None]]
"""The weight of the loss of this rank's part, and the sum over all ranks, ``None`` if unknown."""

_DOING = "the comparison of a batch's gradients"


def check_verify(verify: str | None, sync: object) -> None:
    """Raise :class:`ConfigurationError` unless it is ``None``, or ``"first_batch"`` with exact gradients."""
    if verify not in (None, "first_batch"):
        raise ConfigurationError(
            'verify must be None or "first_batch" (the gradient of the first batch is compared with that of one '
            f"process), got {verify!r}."
        )
    if verify and sync != "every_step":
        raise ConfigurationError(
            f'verify="first_batch" compares synchronized gradients, but sync={sync!r} has none. Verify with '
            'sync="every_step" once, then train without verify.'
        )


def verify_gradient(
    module: nn.Module,
    loss_of: Loss,
    whole: Any,
    part: Any,
    weight: Weight,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise unless the ranks' weighted gradients add up to the gradient of the whole batch. A collective.

    Each rank computes ``part`` and ``whole`` once, without touching ``parameter.grad``. If the gradients differ, it
    computes ``whole`` once more, to see whether the model draws random numbers. Dropout layers are off meanwhile.
    Buffers and the global random states are restored; other side effects of ``loss_of`` remain. With a single process
    it does nothing.

    Args:
        module: Its parameters that require a gradient are compared, on rank 0.
        loss_of: Called with ``part`` and with ``whole``; must not call ``backward``.
        whole: The whole batch, the same on every rank.
        part: This rank's part of it; rank 0 must have samples. Parts of equal size would hide a wrong weight.
        weight: Called after the loss of ``part`` is computed.
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank alike; names the parameter that differs most and a remedy.
        ConfigurationError: On every rank alike: the gradients are not finite on one process either, or the model draws
            random numbers outside dropout layers, so that two computations of one batch differ.
        PeerError: Another rank failed or died.
    """
    if get_world_size(process_group) == 1:
        return
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with _undone(module), _without_dropout(module), torch.enable_grad():
        own, fraction = _weighed_gradients(loss_of, part, weight, parameters, process_group)
        summed = _sum(own, 1.0, process_group)
        shared = SharedRandomState(group=process_group)

        def compute_whole() -> list[torch.Tensor]:
            with shared.drawing():
                return _gradients(loss_of(whole), parameters)

        difference = _Difference(list(parameters), summed, compute_whole())
        if not _on_rank_zero(difference.is_too_large, process_group):
            return
        repeated = _Difference(list(parameters), compute_whole(), difference.expected)
        unweighed = _sum(own, 1 / fraction if fraction else 0.0, process_group)
    if _on_rank_zero(repeated.is_too_large, process_group):
        raise ConfigurationError(
            'verify="first_batch" cannot compare the gradients: two computations of one batch on one process differ, '
            "even with dropout layers off. The model is random, or its gradients are not finite."
        )
    adds_up = not _Difference(list(parameters), unweighed, difference.expected).is_too_large
    difference = _Difference(list(parameters), summed, difference.expected, adds_up)
    message = _on_rank_zero(difference.describe(module, get_world_size(process_group)), process_group)
    raise MismatchError(message)


def _on_rank_zero(value: Any, group: dist.ProcessGroup | None) -> Any:
    return broadcast_tensors(value, [], _DOING, group)[0]


class _Difference:
    """The difference between two sets of gradients, by parameter.

    Args:
        adds_up: Whether the ranks' gradients are right without weights.

    Attributes:
        expected: The gradients of the whole batch.
        is_too_large: Whether rounding, in the precision of the computation, cannot explain it.
    """

    def __init__(
        self, names: list[str], summed: list[torch.Tensor], expected: list[torch.Tensor], adds_up: bool = False
    ) -> None:
        self._adds_up = adds_up
        self._names, self._summed, self.expected = names, summed, expected
        self._by_parameter = [_largest(own - other) for own, other in zip(summed, expected, strict=True)]
        self._scale = max(map(_largest, expected), default=0.0)
        self._allowed = math.sqrt(max((_epsilon(gradient) for gradient in expected), default=0.0))
        largest = max(self._by_parameter, default=0.0)
        self.is_too_large = not largest <= self._allowed * self._scale or math.isinf(largest)

    def describe(self, module: nn.Module, world_size: int) -> str:
        worst = max(range(len(self._names)), key=self._by_parameter.__getitem__)
        found = self._by_parameter[worst]
        relative = found / self._scale if self._scale else math.inf
        return (
            f"the gradient of the first batch on {world_size} processes is not that of one process: that of parameter "
            f"{self._names[worst]} differs by up to {found:.2g} ({relative:.1%} of the largest gradient, "
            f"{self._scale:.2g}; rounding explains {self._allowed:.1g}). {self._remedy(module)}"
        )

    def _remedy(self, module: nn.Module) -> str:
        if self._adds_up:
            return (
                "Added up without weights the gradients are right: the loss is a sum over the samples. Say so "
                '(reduction="sum"), or give the mean.'
            )
        layers = [name for name, layer in module.named_modules() if _normalizes_by_part(layer)]
        if layers:
            return (
                f"{layers[0]} normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True. If "
                "that is not all, the loss is not a mean over the samples: see the next run."
            )
        return (
            "The loss must be a mean over the samples, a sum over them, or a mean over what weight= counts (tokens, "
            "targets that are known, class weights): give weight=, or correct it. What compares samples with each "
            "other, as a contrastive loss does, needs the whole batch on each process."
        )


def _weighed_gradients(
    loss_of: Loss, part: Any, weight: Weight, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None
) -> tuple[list[torch.Tensor], float]:
    """The gradients of this rank's part, times its fraction of the total weight, and that fraction.

    Zeros if the part counts nothing, as its gradients may be NaN.
    """
    loss = loss_of(part)
    own, total = weight()
    if total is None:
        summed = torch.tensor([own], dtype=torch.float64)
        total = float(all_reduce(summed, _DOING, group))
    # Before backward, since layers may exchange gradients in it: what the others' losses send through them counts.
    fraction = own / total if total else 0.0
    weighed = loss * fraction
    is_mixed = not own and bool(silence(weighed))
    gradients = _gradients(weighed, parameters)
    return (gradients if own or is_mixed else [torch.zeros_like(gradient) for gradient in gradients]), fraction


def _sum(gradients: list[torch.Tensor], factor: float, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Sum copies over the ranks."""
    return [all_reduce((own * factor).view(-1), _DOING, group).view_as(own) for own in gradients]


def _gradients(loss: torch.Tensor, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
    """The dense gradients of a loss; zeros for parameters that it does not depend on."""
    inputs = list(parameters.values())
    found = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
    return [
        (torch.zeros_like(parameter) if gradient is None else gradient.to_dense()).contiguous()
        for gradient, parameter in zip(found, inputs, strict=True)
    ]


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Restore buffers and global random states on exit."""
    state = get_global_state(False)
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=devices) if devices else ExitStack():
            yield
    finally:
        set_global_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Turn dropout off inside."""
    kinds = {Dropout: ("training", False), nn.RNNBase: ("dropout", 0.0), nn.MultiheadAttention: ("dropout", 0.0)}
    before = []
    for layer in module.modules():
        for kind, (name, value) in kinds.items():
            if isinstance(layer, kind):
                before.append((layer, name, getattr(layer, name)))
                setattr(layer, name, value)
    try:
        yield
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


def _normalizes_by_part(layer: nn.Module) -> bool:
    return isinstance(layer, BatchNorm) and layer.training and not getattr(layer, "is_synchronized", False)


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; infinity if any value is NaN."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def _epsilon(gradient: torch.Tensor) -> float:
    kind = gradient.device.type
    dtypes = [gradient.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    return max(torch.finfo(dtype).eps for dtype in dtypes)


class LossWatch:
    """Warns once per run, on the first rank whose loss is NaN or infinite. Needs at least two ranks.

    It looks at losses on a CPU only: reading one from a GPU would synchronize in each step.
    """

    def __init__(self) -> None:
        self._is_over = False

    def look(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Check the loss of a step. Local, except for one request to the store if the loss is not finite.

        Args:
            loss: This rank's; one number.
            weight: The weight of this loss; a loss with weight 0 is ignored.
            where: The step, for the message.

        Raises:
            NonFiniteLossWarning: If the program turns this warning into an error.
        """
        if self._is_over or not weight or loss.device.type != "cpu" or loss.numel() != 1:
            return
        value = complex(loss.detach().item())
        if math.isfinite(value.real) and math.isfinite(value.imag):
            return
        self._is_over = True
        if presence().store.add(f"{presence().run}/no number", 1) == 1:
            warnings.warn(
                f"{describe(dist.get_rank())}: the loss of {where} is {loss.item()}, the first that is not finite. "
                "Its gradients spoil those of all ranks. Check this rank's part of that batch. (To stop the run there: "
                'warnings.simplefilter("error", ddp_callbacks.errors.NonFiniteLossWarning).)',
                NonFiniteLossWarning,
                stacklevel=2,
            )
