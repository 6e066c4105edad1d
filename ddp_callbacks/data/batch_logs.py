"""Exact merging of the ranks' values of the same batches. No communication.

Batch metrics come in two forms. Values per sample add up: the ranks' sums and counts give those of the whole batch. A
value per batch, such as a mean loss, does not: each rank saw the mean over its part. We log those per batch with their
weight (:class:`BatchLog`), join them to the value of the whole batch, and only then aggregate. So a mean over batches
of unequal size, or a standard deviation over batches, equals that of a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class BatchLog:
    """This rank's value of each batch, by step, with its weight.

    Steps without a sample on this rank may be missing.
    """

    steps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def add(self, step: int, weight: float, value: torch.Tensor) -> None:
        """Log a value, of the same shape in each step; to merge logs, it must be a scalar (shape ``[]``)."""
        self.steps.append(step)
        self.weights.append(weight)
        self.values.append(value.detach().clone())

    def columns(self) -> tuple[list[int], list[float], torch.Tensor | list[torch.Tensor]]:
        """Return steps, weights and values for a message or a file, the values as one tensor (``[]`` if empty)."""
        return self.steps, self.weights, torch.stack(self.values) if self.values else []


def merge_batch_logs(logs: Sequence[BatchLog], reduction: str) -> BatchLog:
    """Return one log with the scalars of the whole batches, as if one rank had had all samples.

    Args:
        logs: One per rank.
        reduction: ``"mean"``: the weighted mean of the ranks' values; ``"sum"``: their sum.
    """
    parts = by_step(logs)
    weights = [sum(weight for weight, _ in found) for found in parts.values()]
    return BatchLog(list(parts), weights, [_join(found, reduction) for found in parts.values()])


def by_step(logs: Sequence[BatchLog]) -> dict[int, list[tuple[float, torch.Tensor]]]:
    """Return the ranks' weights and values of each step, by rank, in the order of the steps."""
    parts: dict[int, list[tuple[float, torch.Tensor]]] = {}
    for log in logs:
        for step, weight, value in zip(log.steps, log.weights, log.values, strict=True):
            parts.setdefault(step, []).append((weight, value))
    return dict(sorted(parts.items()))


def interleave_rows(parts: Sequence[torch.Tensor | None], rows: Sequence[Mapping[int, int]]) -> torch.Tensor | None:
    """Put rows that the ranks collected batch by batch into the order of a single process.

    Args:
        parts: One per rank, shape ``[number of rows, ...]``; ``None`` for no rows.
        rows: For each rank, the number of rows that it added at each step, by step.

    Raises:
        RuntimeError: The numbers of rows do not add up to the part's length, or the parts' other dimensions differ.
    """
    filled = [part for part in parts if part is not None]
    if len(filled) < 2:
        return filled[0] if filled else None
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for rank, (part, counts) in enumerate(zip(parts, rows, strict=True)):
        if part is not None:
            keys = ((step, rank) for step in counts)
            pieces |= dict(zip(keys, part.split(list(counts.values())), strict=True))
    return torch.cat([pieces[key] for key in sorted(pieces)])


def _join(parts: list[tuple[float, torch.Tensor]], reduction: str) -> torch.Tensor:
    if reduction == "sum":
        return torch.stack([value for _, value in parts]).sum()
    # A rank with weight 0 may hold NaN, the mean over nothing: leave it out of the sum.
    total = sum(weight for weight, _ in parts)
    weighted = [value * (weight / total) for weight, value in parts if weight]
    return torch.stack(weighted).sum() if weighted else parts[0][1]
