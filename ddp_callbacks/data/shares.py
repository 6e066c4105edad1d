"""Which samples of a batch each rank gets, and how the batches of a pass become its steps. No communication.

============  =====================================================================================================
division      what a rank gets
============  =====================================================================================================
global        its slice of each batch
per_process   whole batches in turn
dealt         the same, for predictions: each batch draws as on one process
unpadded      the same as dealt, without padding at the end
own           each batch: its ``DistributedSampler`` yields only this rank's batches
============  =====================================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ddp_callbacks.data.nested import arrays_in, is_array, rebuild_mapping, rebuild_sequence
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.randomness.rows import Rows

BatchSize = Literal["global", "per_process"]
BATCH_SIZES = ("global", "per_process")
Division = Literal["global", "per_process", "dealt", "unpadded", "own"]


@dataclass(frozen=True)
class Share:
    """This rank's part of a batch.

    Attributes:
        local: Number of samples on this rank; 0 for a padding batch.
        total: Number of samples on all ranks; ``None`` if unknown here.
        rows: Which rows of the whole batch this rank computes, padding included; ``None`` if unknown here.
    """

    local: int
    total: int | None
    rows: Rows | None = field(default=None, compare=False, repr=False)

    @property
    def fraction(self) -> float | None:
        """How much of the batch this rank computes; ``None`` if unknown here."""
        return None if self.total is None else self.local / max(1, self.total)

    def __add__(self, other: Share) -> Share:
        total = None if self.total is None or other.total is None else self.total + other.total
        return Share(self.local + other.local, total)


def loss_weight(share: Share, reduction: str, mean_over: Any = None) -> tuple[float, float | None]:
    """Return the weight of the loss of this rank's part, and the total; ``None`` if unknown here. Local.

    Args:
        reduction: ``"mean"`` or ``"sum"``.
        mean_over: The number that the loss is the mean over; ``None``: the samples.
    """
    if reduction == "sum":
        return float(share.local > 0), 1.0
    if mean_over is None:
        return float(share.local), None if share.total is None else float(share.total)
    return float(mean_over) if share.local else 0.0, None


def note_part(error: Exception, share: Share) -> None:
    """Let an error that a part of a batch may cause, as its size differs from that of the batch, say so. Local."""
    numbers = set(map(int, re.findall(r"\d+", str(error))))
    if not share.total or not 0 < share.local < share.total:
        return
    if numbers >= {share.local, share.total}:
        remedy = "Take their number from the batch, as by len(x), not from the batch size of its loader."
    elif share.local == 1 and isinstance(error, IndexError | RuntimeError | ValueError):
        remedy = "x.squeeze() removes the dimension of a single sample, too: name the dimension, as in x.squeeze(-1)."
    else:
        return
    error.add_note(f"This process computes {share.local} of the {share.total} samples of the batch. {remedy}")


def check_batch_size(batch_size: str) -> None:
    """Raise :class:`ConfigurationError` unless ``batch_size`` is one of :data:`BATCH_SIZES`."""
    if batch_size not in BATCH_SIZES:
        raise ConfigurationError(
            f'batch_size must be "global" (the loader\'s batch is divided among the processes) or '
            f'"per_process" (each process takes whole batches), got {batch_size!r}.'
        )


def slice_bounds(size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[int, int]:
    """Start and end of ``rank``'s part of ``size`` samples, divided among ``world_size`` ranks. Local.

    Part sizes differ by at most one sample; the first ranks have the larger parts.

    Args:
        size: Number of samples to divide.
        rank, world_size: The rank that gets the part, and the number of ranks.
        at_least: Each part has at least this many samples or none. If ``size`` is smaller, the first rank gets all.
    """
    world_size = min(world_size, max(1, size // at_least))
    if rank >= world_size:
        return size, size
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


@dataclass(frozen=True)
class WholeBatch:
    """A batch that is the same on every rank, and this rank's part of it.

    Attributes:
        whole: The batch.
        part: This rank's part. If possible, its size differs from training: equal parts would hide wrong weights.
        share: The part's share.
    """

    whole: Any
    part: Any
    share: Share


def slice_batch(batch: Any, size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[Any, Share]:
    """Return this rank's slice of a batch of ``size`` samples, and its share; for an empty slice, that of rank 0."""
    part, share = _slice_and_share(size, rank, world_size, at_least)
    return batch if part == slice(0, size) else slice_samples(batch, size, part), share


def _slice_and_share(size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[slice, Share]:
    """Return the slice of a batch that a rank computes, and its share. A rank without samples computes rank 0's."""
    start, end = slice_bounds(size, rank, world_size, at_least)
    first, last = (start, end) if end > start else slice_bounds(size, 0, world_size, at_least)
    return slice(first, last), Share(end - start, size, Rows(first, last - first, size))


def common_size(batch: Any) -> int | None:
    """Return the number of samples: the first dimension of all arrays of ``batch``; ``None`` if these differ."""
    sizes = {array.shape[0] if array.ndim else None for array in arrays_in(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def slice_samples(batch: Any, size: int, part: slice) -> Any:
    if is_array(batch):
        return batch[part]
    if isinstance(batch, Mapping):
        return rebuild_mapping(batch, {key: slice_samples(value, size, part) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == size and not any(True for _ in arrays_in(batch)):
            return batch[part]  # one entry per sample, such as file names
        return rebuild_sequence(batch, [slice_samples(value, size, part) for value in batch])
    return batch


class Step(NamedTuple):
    """One step of a rank.

    Attributes:
        batches: The batches of all ranks; empty if unknown here.
        part: This rank's batch, or its slice of the batch.
        share: The share of the part.
    """

    batches: list[Any]
    part: Any
    share: Share


@dataclass(frozen=True)
class Divider:
    """Divides batches, or the lists of their indices.

    Attributes:
        division: See the table above.
        rank, world_size: This rank, and the number of ranks.
        at_least: See :func:`ddp_callbacks.shard_loader`.
    """

    division: Division
    rank: int
    world_size: int
    at_least: int = 1

    @property
    def per_step(self) -> int:
        """The number of batches per step."""
        return self.world_size if self.deals or self.division == "per_process" else 1

    @property
    def deals(self) -> bool:
        """Whether batches are dealt out for a prediction."""
        return self.division in ("dealt", "unpadded")

    def share_of(self, size: int) -> Share:
        """Return this rank's share of a batch of ``size`` samples, if batches are divided."""
        start, end = slice_bounds(size, self.rank, self.world_size, self.at_least)
        return Share(end - start, size)

    def steps(
        self, batches: Iterator[Any], size_of: Callable[[Any], int], part_of: Callable[[Any, slice], Any]
    ) -> Iterator[Step]:
        """Yield this rank's steps.

        Args:
            size_of: Returns the number of samples in a batch.
            part_of: Returns a slice of a batch.
        """
        while step := list(itertools.islice(batches, self.per_step)):
            sizes = list(map(size_of, step))
            total = sum(sizes)
            if self.division == "own":
                yield Step([], step[0], Share(total, None))
            elif self.division == "global":
                part, share = _slice_and_share(total, self.rank, self.world_size, self.at_least)
                yield Step(step, step[0] if part == slice(0, total) else part_of(step[0], part), share)
            elif self.rank < len(step):
                yield Step(step, step[self.rank], self._share_of(sizes))
            elif self.division != "unpadded":
                yield Step(step, step[0], Share(0, total, None if self.deals else Rows(0, sizes[0], total)))

    def _share_of(self, sizes: list[int]) -> Share:
        """Return the share of this rank's whole batch, of a step with batches of these sizes."""
        local, total = sizes[self.rank], sum(sizes)
        if self.deals:  # on one process, the batches before have drawn, too
            return Share(local, local, Rows(0, local, local) if self.world_size == 1 else None)
        return Share(local, total, Rows(sum(sizes[: self.rank]), local, total))

    def to_compare(self, size: int) -> tuple[slice, Share]:
        """Return this rank's part of a batch, for comparing the ranks' gradient with that of the whole batch.

        Rank 0 has two of ``world_size + 1`` slices if each has at least two samples: equal parts would hide wrong
        weights.
        """
        extra = int(size >= (self.world_size + 1) * max(2, self.at_least))
        parts = self.world_size + extra
        part, share = _slice_and_share(size, self.rank + extra, parts, self.at_least)
        if extra and not self.rank:
            part = slice(0, part.stop)
            share = Share(part.stop, size, Rows(0, part.stop, size))
        return part, share
