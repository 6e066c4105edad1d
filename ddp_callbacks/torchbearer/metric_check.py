"""Warn of metrics whose value of a batch is no mean over its samples, so that those of its parts do not tell it.

The ranks send predictions and targets of the first batch of a pass, and rank 0 computes the metrics of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import torch
import torchbearer
from torchbearer.metrics import Loss, Mean, Metric, Var

from ddp_callbacks.errors import warn
from ddp_callbacks.torchbearer.state import State, share_of

REMEDY = (
    "For one process's value, make it a mean of values per sample (@mean), or a function of all predictions and "
    "targets (EpochLambda), which may be a count."
)
LossMetric = type(Loss().root)  # the class inside Torchbearer's decorators
_KEYS = (torchbearer.Y_PRED, torchbearer.Y_TRUE)
_LARGEST = 1 << 24  # bytes of each of the two that a rank sends


class MetricCheck:
    """Compares the metrics of the first training pass and of the first evaluation; tells of each metric once."""

    def __init__(self) -> None:
        self._passes, self._told = set[bool](), set[str]()

    def begin(self, metrics: Sequence[tuple[Metric, Metric]], is_training: bool) -> list[int]:
        """Return the places of the metrics to compare in a pass: means of what Torchbearer computes from a batch.

        Args:
            metrics: Each metric with the root of its tree.
        """
        if is_training in self._passes:
            return []
        self._passes.add(is_training)
        return [
            place for place, (metric, root) in enumerate(metrics) if _is_known(root) and isinstance(metric, Mean | Var)
        ]

    def compare(self, name: str, root: Metric, parts: Sequence[tuple[float, float, list[torch.Tensor] | None]]) -> None:
        """Warn if a metric of the whole batch is not the mean of those of its parts. Local.

        Args:
            name: The metric's name.
            root: Computes it.
            parts: For each rank with samples, their number, its value, and its :func:`rows_of` the batch.
        """
        rows = [found for _, _, found in parts if found is not None]
        if not rows or len(rows) < len(parts) or name in self._told:
            return
        joined = sum(samples * value for samples, value, _ in parts) / sum(samples for samples, _, _ in parts)
        whole = math.nan
        with torch.no_grad(), suppress(Exception):  # parts may be padded apart, and a metric may read more of the state
            batch = dict(zip(_KEYS, map(torch.cat, zip(*rows, strict=True)), strict=True))
            whole = float(root.process(batch))
        if math.isfinite(whole) and not math.isclose(joined, whole, rel_tol=_rounding(rows[0][0]), abs_tol=1e-6):
            self._told.add(name)
            warn(
                f"The metric {name} is no mean over samples: of the first batch it is {whole:.6g}, but the mean over "
                f"the parts that the processes have is {joined:.6g}, and so in each batch. {REMEDY}"
            )


def rows_of(state: State) -> list[torch.Tensor] | None:
    """Return this rank's predictions and targets of a batch; ``None``: these are no tensors of rows, or too large."""
    found, local = [state.get(key) for key in _KEYS], share_of(state).local
    are_rows = all(isinstance(each, torch.Tensor) and each.dim() and len(each) == local for each in found)
    return [each.detach() for each in found] if are_rows and all(each.nbytes <= _LARGEST for each in found) else None


def _is_known(root: Metric) -> bool:
    """Whether the root of a metric's tree is a class of Torchbearer's, also around a function, and no loss."""
    return type(root).__module__.startswith("torchbearer.") and not isinstance(root, LossMetric)


def _rounding(predictions: torch.Tensor) -> float:
    """Return which part of a value rounding does not explain."""
    kinds = (torch.float32, predictions.dtype if predictions.is_floating_point() else torch.float32)
    return min(0.01, math.sqrt(max(torch.finfo(kind).eps for kind in kinds)))
