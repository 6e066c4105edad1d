"""The divisor of a mean cross entropy, as the weight of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ddp_callbacks.errors import ConfigurationError

TARGETS = ("labels", "label", "targets", "target", "y")
"""Default keys of the targets in a batch that is a mapping."""


class CrossEntropyWeight:
    """A weight function of a batch: returns the divisor of a mean cross entropy of class indices.

    The divisor is the number of targets that are not ignored or, with class weights, the sum of their weights. Pass the
    function to ``CallbackStrategy(weight=...)``, or its result to :meth:`ddp_callbacks.GradientSynchronizer.weigh`.

    Args:
        criterion: ``nn.CrossEntropyLoss`` or ``nn.NLLLoss`` with the arguments of your loss; ``None``: default
            arguments.
        target: A function of a batch that returns the targets as the criterion gets them. ``None``: the second entry of
            a tuple or list; in a mapping, the entry ``labels``, ``label``, ``targets``, ``target`` or ``y``.

    Raises:
        ConfigurationError: ``criterion`` is another one. When called: the batch has no such entry, or the targets are
            not class indices.
    """

    def __init__(self, criterion: Any = None, target: Callable[[Any], Any] | None = None) -> None:
        if criterion is not None and not _is_cross_entropy(criterion):
            raise ConfigurationError(f"criterion must be nn.CrossEntropyLoss or nn.NLLLoss, got {criterion!r}.")
        self._criterion = F.cross_entropy if criterion is None else criterion
        self._target = target or _target_of

    @classmethod
    def of(cls, module: torch.nn.Module) -> CrossEntropyWeight:
        """Make one for ``module``, which must contain exactly one ``nn.CrossEntropyLoss`` or ``nn.NLLLoss``."""
        found = {name: layer for name, layer in module.named_modules() if _is_cross_entropy(layer)}
        if len(found) == 1:
            return cls(*found.values())
        raise ConfigurationError(
            f'weight="cross_entropy" needs one nn.CrossEntropyLoss or nn.NLLLoss among the modules of '
            f"{type(module).__name__}, which has {', '.join(found) or 'none'}. Give "
            "weight=ddp_callbacks.CrossEntropyWeight(criterion, target=...)."
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        target = self._target(batch)
        weight = cross_entropy_weight(self._criterion, target)
        if weight is None:
            what = f"{target.dtype}" if isinstance(target, torch.Tensor) else type(target).__name__
            raise ConfigurationError(
                f"the targets of a batch must be a tensor of class indices, got {what}. Give "
                "CrossEntropyWeight(criterion, target=function of the batch)."
            )
        return weight


def cross_entropy_weight(criterion: Any, target: Any) -> torch.Tensor | None:
    """Return the divisor of a mean cross entropy, or negative log likelihood, of class indices. Local.

    Args:
        criterion: ``nn.CrossEntropyLoss``, ``nn.NLLLoss``, or their functions with default arguments.
        target: Class indices, of any shape.

    Returns:
        The number of targets that are not ignored, or the sum of their class weights. Shape ``[]``. ``None`` for
        another criterion, and for class probabilities.
    """
    is_function = criterion is F.cross_entropy or criterion is F.nll_loss
    if not is_function and not _is_cross_entropy(criterion):
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    counts = target != getattr(criterion, "ignore_index", -100)
    weight = getattr(criterion, "weight", None)
    return counts.sum() if weight is None else weight.to(target.device)[target[counts]].sum()


def _is_cross_entropy(criterion: Any) -> bool:
    return isinstance(criterion, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)


def _target_of(batch: Any) -> Any:
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return batch[1]
    keys = [key for key in TARGETS if key in batch] if isinstance(batch, Mapping) else []
    if len(keys) == 1:
        return batch[keys[0]]
    has = f"a mapping of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ConfigurationError(
        f"a batch must be a tuple whose second entry is the targets, or a mapping with one of {', '.join(TARGETS)}, "
        f"got {has}. Give CrossEntropyWeight(criterion, target=function of the batch)."
    )
