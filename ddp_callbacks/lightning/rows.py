"""The rows that ``self.log`` has recorded since the last join, and how the rows of all ranks become values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """One call of ``self.log`` with a number.

    Attributes:
        key: Lightning's key of the value.
        position: The number of the batch in its pass; -1 outside of a batch.
        weight: The number that the value is the mean over; 0 for a padding batch, or for a mean over nothing.
        size: Lightning's batch size: the weight of the value among batches.
        is_given: Whether the user has passed that size.
        is_padding: Whether this rank has no sample of the batch.
        value: A scalar, on any device.
    """

    key: str
    position: int
    weight: float
    size: float
    is_given: bool
    is_padding: bool
    value: torch.Tensor | float


class Joined(NamedTuple):
    """The value of a whole batch, or of a hook outside of batches.

    Attributes:
        key: Lightning's key of the value.
        value: The value of all ranks together.
        size: The weight of the value among batches.
        ends: The lowest and the highest of the ranks' values, for a mean logged outside of batches.
    """

    key: str
    value: float
    size: float
    ends: tuple[float, float] | None


def plain(rows: Sequence[Row]) -> list[list[Any]]:
    """Convert rows to lists of plain data; ``Row(*each)`` is the inverse. Waits for the devices of the values."""
    values = _stack([row.value for row in rows]).tolist()
    return [[*row[:-1], value] for row, value in zip(rows, values, strict=True)]


def join(ranks: Sequence[Sequence[Row]], operation_of: Callable[[str], str]) -> list[Joined]:
    """Return the values of whole batches, in the order of the batches, from the rows of each rank.

    Args:
        operation_of: Returns how the parts of a key are combined: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
    """
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for rows in ranks:
        counts = Counter[tuple[int, str]]()  # a key may be logged several times in a batch
        for row in rows:
            at = row.position, row.key
            groups.setdefault((row.position, counts[at], row.key), []).append(row)
            counts[at] += 1
    ordered = sorted(groups.items(), key=lambda group: group[0][:2])
    return [_join(key, parts, operation_of(key)) for (_, _, key), parts in ordered]


def _join(key: str, rows: list[Row], operation: str) -> Joined:
    """Combine the parts of one batch. A mean leaves out ranks with weight 0, unless all ranks have weight 0."""
    own = [row for row in rows if not row.is_padding] or rows
    counted = [row for row in rows if row.weight and operation == "mean"] or own
    sizes = [row.size for row in own]
    # If the user has passed sizes that differ between the ranks, the values are means over these sizes.
    by_size = own[0].is_given and len(set(sizes)) > 1
    weights = [row.size if by_size else row.weight for row in counted]
    values = [float(row.value) for row in counted]
    is_outside = rows[0].position < 0
    return Joined(
        key,
        _combine(values, weights, operation),
        sum(sizes) / (len(sizes) if is_outside else 1),
        (min(values), max(values)) if is_outside and operation == "mean" else None,
    )


def _combine(values: list[float], weights: list[float], operation: str) -> float:
    if operation != "mean":
        return float(getattr(torch.tensor(values, dtype=torch.float64), operation)())
    total = sum(weights)
    factors = [weight / total for weight in weights] if total else [1 / len(values)] * len(values)
    return sum(value * factor for value, factor in zip(values, factors, strict=True))


def _stack(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Stack values as float64 on the CPU. If all are on one device, one operation copies them."""
    if not values:
        return torch.zeros(0, dtype=torch.float64)
    tensors = [torch.as_tensor(value) for value in values]
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack([tensor.to(torch.float64) for tensor in tensors]).cpu()
