"""The value of a step from those of the ranks, on the host or on a GPU: pure arithmetic.

A rank with weight 0 holds a padding batch, or a mean over nothing, and counts nowhere, whatever its value is. Where no
rank counts, rank 0's value stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ddp_callbacks.comm.device_scalars import to_device


def combine(parts: Sequence[tuple[float, float]], operation: str) -> float:
    """One value from (weight, value) of each rank.

    Args:
        operation: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``.
    """
    counted = [(weight, value) for weight, value in parts if weight] or [(1.0, parts[0][1])]
    if operation == "mean":
        total = sum(weight for weight, _ in counted)
        return sum(value * (weight / total) for weight, value in counted)
    values = torch.tensor([value for _, value in counted], dtype=torch.float64)
    return float(getattr(values, operation)())


def combine_on_device(
    values: torch.Tensor, weights: Sequence[Sequence[float]], kinds: Sequence[tuple[str, torch.dtype]]
) -> list[torch.Tensor]:
    """As :func:`combine`, of several values at once, on their device. The host does not wait for it.

    Args:
        values: float64, of shape ``[ranks, count]``.
        weights: For each value, those of the ranks.
        kinds: For each value, the operation and the dtype of the result.

    Returns:
        ``count`` tensors of shape ``[]``.
    """
    factors = [_factors(own, operation) for own, (operation, _) in zip(weights, kinds, strict=True)]
    by = to_device(torch.tensor(factors, dtype=torch.float64), values.device).T
    joined = {kind: _joined(values, by, kind[0]).to(kind[1]) for kind in dict.fromkeys(kinds)}
    return [joined[kind][index] for index, kind in enumerate(kinds)]


def _factors(weights: Sequence[float], operation: str) -> list[float]:
    counted = list(weights) if any(weights) else [1.0, *[0.0] * (len(weights) - 1)]
    total = sum(counted)
    return [weight / total if operation == "mean" else float(weight != 0) for weight in counted]


def _joined(values: torch.Tensor, factors: torch.Tensor, operation: str) -> torch.Tensor:
    counted = factors != 0
    if operation == "max":
        return torch.where(counted, values, -math.inf).amax(0)
    if operation == "min":
        return torch.where(counted, values, math.inf).amin(0)
    return torch.where(counted, factors * values, 0.0).sum(0)
