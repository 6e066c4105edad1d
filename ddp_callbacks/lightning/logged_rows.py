"""The rows that ``self.log`` has recorded since the last join, and how the rows of all ranks become values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch


class Row(NamedTuple):
    """One call of ``self.log`` with a number.

    Attributes:
        key: Lightning's key of the value.
        position: The number of the batch in its pass; -1 outside of a batch.
        samples: This rank's samples in the batch; 0 for a padding batch, 1 outside of a batch.
        total: The samples of all ranks in the batch; ``None`` if unknown, or outside of a batch.
        weight: The number that the value is the mean over; 0 for a padding batch, or for a mean over nothing.
        size: Lightning's batch size: the weight of the value among batches.
        is_given: Whether the user has passed that size.
        value: A scalar, on any device.
    """

    key: str
    position: int
    samples: int
    total: int | None
    weight: float
    size: float
    is_given: bool
    value: torch.Tensor | float


Way = Literal["samples", "constant", "sizes"]
"""What a value is a mean over, and counts by: the samples; these, but all batches count alike; the sizes."""


class Joined(NamedTuple):
    """The value of a whole batch, or of a hook outside of batches.

    Attributes:
        key: Lightning's key of the value.
        value: The value of all ranks together.
        size: The weight of the value among batches.
        missed: What Lightning's sums of values and of sizes would have more in the other ways, if it is a mean.
        ends: The lowest and the highest of the ranks' values, if it was logged outside of batches.
    """

    key: str
    value: float
    size: float
    missed: dict[Way, Sequence[float]]
    ends: tuple[float, float] | None


def plain(rows: Sequence[Row]) -> list[list[Any]]:
    """Convert rows to lists of plain data; ``Row(*each)`` is the inverse. Waits for the devices of the values."""
    values = _stack([row.value for row in rows]).tolist()
    return [[*row[:-1], value] for row, value in zip(rows, values, strict=True)]


class Sizes:
    """What the sizes that the user has passed say about the values of each key, in all batches so far.

    Attributes:
        by_size: The keys whose values are means over these sizes.
        seen: By key: up to two different sizes, and whether one was not the number of the part's samples.
    """

    def __init__(self, by_size: Iterable[str] = (), seen: Mapping[str, Any] | None = None) -> None:
        self.by_size, self.seen = set(by_size), {**(seen or {})}

    def way_of(self, key: str) -> Way:
        """Return how the values of a key count. Later batches may tell that it is another way."""
        if key in self.by_size:
            return "sizes"
        sizes, differs = self.seen.get(key, ([], False))
        return "constant" if len(sizes) == 1 and differs else "samples"

    def note(self, rows: Sequence[Row], is_alike: bool) -> None:
        """Note the parts of a batch.

        Sizes that are the samples say nothing new. A constant is at least a part's samples, or 1, logged alike on each
        rank; everything else is what the value is a mean over.

        Args:
            is_alike: Whether the ranks have logged the key equally often in this batch, and not for each sample.
        """
        key = rows[0].key
        if not rows[0].is_given or key in self.by_size:
            return
        sizes, differs = self.seen.get(key, ([], False))
        sizes = sorted({*sizes, *(row.size for row in rows)})[:2]
        differs = differs or any(row.size != row.samples for row in rows)
        self.seen[key] = [sizes, differs]
        least = 1 if is_alike and sum(row.samples for row in rows) >= (rows[0].total or 0) else 0
        if differs and (len(sizes) > 1 or any(least < row.size < row.samples for row in rows)):
            self.by_size.add(key)


def join(ranks: Sequence[Sequence[Row]], operation_of: Callable[[str], str], sizes: Sizes) -> list[Joined]:
    """Return the values of whole batches, in the order of the batches, from the rows of each rank.

    Args:
        operation_of: Returns how the parts of a key are combined: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        sizes: What the sizes say so far. Takes in what these rows say.
    """
    groups: dict[tuple[int, int, str], list[Row]] = {}
    calls: dict[tuple[int, str], set[tuple[int, int]]] = {}  # of the ranks: their calls and their samples
    for rows in ranks:
        counts = Counter[tuple[int, str]]()  # a key may be logged several times in a batch
        for row in rows:
            at = row.position, row.key
            groups.setdefault((row.position, counts[at], row.key), []).append(row)
            counts[at] += 1
        samples = {(row.position, row.key): row.samples for row in rows}
        for at in counts.keys() & {at for at, number in samples.items() if number}:
            calls.setdefault(at, set()).add((counts[at], samples[at]))
    ordered = sorted(groups.items(), key=lambda group: group[0][:2])
    parts = [[row for row in rows if row.samples] or rows for _, rows in ordered]
    are_alike = [_are_alike(calls.get((rows[0].position, rows[0].key), set())) for rows in parts]
    for rows, is_alike in zip(parts, are_alike, strict=True):
        sizes.note(rows, is_alike)
    return [
        _join(rows, operation_of(rows[0].key), sizes.way_of(rows[0].key), _size_of(rows, is_alike))
        for rows, is_alike in zip(parts, are_alike, strict=True)
    ]


def _are_alike(calls: set[tuple[int, int]]) -> bool:
    """Whether ranks have logged equally often, as with LBFGS, and not once for each sample. Once may be either."""
    numbers = {number for number, _ in calls}
    return len(numbers) <= 1 and (numbers <= {1} or any(number != samples for number, samples in calls))


def _size_of(rows: Sequence[Row], is_alike: bool) -> float:
    """Return the size of the whole batch. If only some ranks have logged, one process logs for all samples."""
    size, samples = sum(row.size for row in rows), sum(row.samples for row in rows)
    if rows[0].position < 0:
        return max(row.size for row in rows)
    return size * rows[0].total / samples if is_alike and rows[0].total and samples else size


def _join(rows: Sequence[Row], operation: str, way: Way, size: float) -> Joined:
    """Combine the parts of one batch. A mean leaves out ranks with weight 0, unless all ranks have weight 0.

    Args:
        size: That of the whole batch, if it is its samples.
    """
    values, sizes = [float(row.value) for row in rows], [row.size for row in rows]
    value, is_outside = _combine(values, [row.weight for row in rows], operation), rows[0].position < 0
    ways: dict[Way, tuple[float, float]] = {
        "samples": (value, size),
        "constant": (value, max(sizes)),
        "sizes": (_combine(values, sizes, operation) if operation == "mean" else value, sum(sizes)),
    }
    value, size = ways.pop(way)
    missed: dict[Way, Sequence[float]]
    missed = {other: [mean * total - value * size, total - size] for other, (mean, total) in ways.items()}
    counted = [float(row.value) for row in rows if row.weight] or values
    ends = (min(counted), max(counted)) if is_outside else None
    return Joined(rows[0].key, value, size, missed, ends)


def _combine(values: list[float], weights: list[float], operation: str) -> float:
    if operation != "mean":
        return float(getattr(torch.tensor(values, dtype=torch.float64, device="cpu"), operation)())
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight)


def _stack(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Stack values as float64 on the CPU. If all are on one device, one operation copies them."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    tensors = [torch.as_tensor(value) for value in values]
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack([tensor.to(torch.float64) for tensor in tensors]).cpu()
