"""Compute which samples of a batch each rank gets. No communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddp_callbacks.data.nested import arrays_in, is_array, rebuild_mapping, rebuild_sequence
from ddp_callbacks.errors import ConfigurationError

BatchSize = Literal["global", "per_process"]
BATCH_SIZES = ("global", "per_process")


@dataclass(frozen=True)
class Share:
    """This rank's part of a batch.

    Attributes:
        local: Number of samples on this rank; 0 for a padding batch.
        total: Number of samples on all ranks; ``None`` if unknown here.
    """

    local: int
    total: int | None

    def __add__(self, other: Share) -> Share:
        total = None if self.total is None or other.total is None else self.total + other.total
        return Share(self.local + other.local, total)


def check_batch_size(batch_size: str) -> None:
    """Raise :class:`ConfigurationError` unless it is one of :data:`BATCH_SIZES`."""
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
        rank, world_size: Which part, and the number of parts.
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
    """This rank's slice of a loaded batch of ``size`` samples; if it is empty, the whole batch as a padding batch."""
    start, end = slice_bounds(size, rank, world_size, at_least)
    part = slice_samples(batch, size, slice(start, end)) if end > start else batch
    return part, Share(end - start, size)


def common_size(batch: Any) -> int | None:
    """The number of samples: the first dimension of all tensors and arrays of ``batch``; ``None`` if they differ."""
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
