"""Exact merging of what the ranks saw of the same batches: pure arithmetic, no communication.

A metric of a batch comes in two forms. One value per sample adds up: the sums and counts of the ranks are those of the
whole. One value per batch, such as a mean loss, does not: each rank saw the mean over its part only. Those are logged
per batch with their weight (:class:`BatchLog`), joined to the value of the whole batch, and only then aggregated, so
that a mean over batches of unequal size, or a standard deviation over batches, is the one-process value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class BatchLog:
    """This rank's scalar of each batch, by step, with the weight that it is a mean over.

    Steps may be missing: the rank had no sample of that batch.
    """

    steps: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def add(self, step: int, weight: float, value: torch.Tensor) -> None:
        """Log a scalar (shape ``[]``)."""
        self.steps.append(step)
        self.weights.append(weight)
        self.values.append(value.detach().clone())


def join_batch_logs(logs: Sequence[BatchLog], reduction: str) -> list[torch.Tensor]:
    """The scalar of each whole batch, in the order of the steps.

    Args:
        logs: One per rank.
        reduction: ``"mean"``: the weighted mean of the ranks' values; ``"sum"``: their sum.
    """
    parts: dict[int, list[tuple[float, torch.Tensor]]] = {}
    for log in logs:
        for step, weight, value in zip(log.steps, log.weights, log.values, strict=True):
            parts.setdefault(step, []).append((weight, value))
    return [_join(parts[step], reduction) for step in sorted(parts)]


def interleave_rows(parts: Sequence[torch.Tensor | None], rows: Sequence[Sequence[int]]) -> torch.Tensor | None:
    """Rows that the ranks collected batch by batch, in the order in which one process collects them.

    Args:
        parts: One per rank, shape ``[sum of its rows, ...]``, ``None`` for no rows.
        rows: One list per rank: how many rows it added at each step. Where they do not add up to the part's length
            (the metric filters rows), the parts are concatenated by rank.
    """
    filled = [(part, counts) for part, counts in zip(parts, rows, strict=True) if part is not None]
    if not filled:
        return None
    if any(part.shape[0] != sum(counts) for part, counts in filled):
        return torch.cat([part for part, _ in filled])
    split = [part.split(list(counts)) for part, counts in filled]
    steps = max(len(chunks) for chunks in split)
    return torch.cat([chunks[step] for step in range(steps) for chunks in split if step < len(chunks)])


def _join(parts: list[tuple[float, torch.Tensor]], reduction: str) -> torch.Tensor:
    if reduction == "sum":
        return torch.stack([value for _, value in parts]).sum()
    if len(parts) == 1:
        return parts[0][1]
    # A rank whose weight is 0 may hold NaN, the mean over nothing; it is not part of the sum.
    total = sum(weight for weight, _ in parts)
    weighted = [value * (weight / total) for weight, value in parts if weight]
    return torch.stack(weighted).sum() if weighted else parts[0][1]
