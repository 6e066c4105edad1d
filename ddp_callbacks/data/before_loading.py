"""Division before loading: a map-style ``DataLoader`` loads only this rank's samples."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
)

from ddp_callbacks._torch import keeps_iterator, replace_batch_sampler
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.data.drawing import Draw, Indices, name_of_sampler
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.passes import Pass
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.data.samplers import is_torchs
from ddp_callbacks.data.shares import BatchSize, Share, WholeBatch, slice_bounds, uneven_bounds
from ddp_callbacks.data.workers import StartingWorkers
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

_COMPARED_ROWS = 1 << 16


@dataclass(frozen=True)
class _Division:
    """The indices of one step, divided among the ranks.

    Attributes:
        whole: The indices of all ranks.
        part: This rank's indices.
        start: The position of ``part`` in ``whole``.
    """

    whole: Sequence[Any]
    part: Sequence[Any]
    start: int
    share: Share


class _Draw(Draw):
    """One pass over a batch sampler.

    Attributes:
        shares: Of the batches that have been drawn and not handed out.
        indices: Of this rank's parts, if requested.
        first: The first batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shares: deque[Share] = deque()
        self.indices: list[list[Any]] = []
        self.first: _Division | None = None


class _SlicedBatchSampler:
    """Yields this rank's indices of each batch that ``batch_sampler`` yields, under rank 0's random state."""

    def __init__(
        self, loader: DataLoader[Any], batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
    ) -> None:
        self._loader = loader
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler = getattr(self.batch_sampler, "sampler", None)
        self._divide = functools.partial(_slices, at_least=at_least) if batch_size == "global" else _turns
        self.group = group
        self.keeps_indices = False
        self.draw = _Draw()
        self.record: Pass | None = None  # of a resumable loader
        self.sources = (loader, self.batch_sampler, self.sampler)
        self.drawing = Indices(lambda: iter(()))
        self.starting = StartingWorkers(None)
        self._compared = type(loader.dataset).__module__ != "torch.utils.data.dataset"

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.draw = draw = _Draw()
        self.drawing = Indices(lambda: self._begin(draw, self.record))
        return self.drawing

    def _begin(self, draw: _Draw, record: Pass | None) -> Iterator[Any]:
        # Runs at the first next(): rank 0's DataLoader has drawn its workers' seed by then, as without this library.
        torch_only = is_torchs(self.batch_sampler) and is_torchs(self.sampler)
        self.starting.end()
        if record is not None:
            record.before_drawing()
        shared = SharedRandomState(self.sources, torch_only=torch_only, group=self.group, always=record is not None)
        if record is not None:
            record.draws_from(shared)
        batches = draw.batches(self.batch_sampler, shared, record)
        divided = self._divide(batches, get_rank(self.group), get_world_size(self.group))
        return self._parts(divided, draw, record)

    def _parts(self, divided: Iterator[_Division], draw: _Draw, record: Pass | None) -> Iterator[Any]:
        for number, division in enumerate(divided, record.skipped if record else 0):
            if draw.first is None:
                draw.first = division
                self._require_same_data()
                self.check_agreement(draw)
            draw.shares.append(division.share)
            draw.ends.append(draw.end)
            if self.keeps_indices:
                draw.indices.append(list(division.part) if division.share.local else [])
            yield record.for_worker(division.part, number) if record and self._loader.num_workers else division.part

    def _require_same_data(self) -> None:
        """Raise unless the cheap-to-compare properties of the data set are equal on all ranks. Once per loader."""
        if self._compared:
            return
        self._compared = True
        name = type(self._loader.dataset).__name__
        require_agreement(
            {f"{name}: checksum of its indices and labels": checksum_of(_cheaply_described(self._loader.dataset))},
            "the data",
            "Every process takes its part of the same data: give random_split a seed, and read the same files.",
            self.group,
        )

    def check_agreement(self, draw: _Draw) -> None:
        """Raise unless all ranks have drawn the same indices so far."""
        name = name_of_sampler(self.batch_sampler)
        require_agreement(
            {f"{name}: checksum of the indices drawn so far": draw.checksum},
            f"the batches that {name} draws",
            f"Every process runs {name} under rank 0's random state (torch's, Python's and NumPy's global ones "
            "and generators that are its attributes). Take its randomness from one of these, not from the clock, the "
            "process id or os.urandom.",
            self.group,
        )


def _cheaply_described(dataset: Any) -> Any:
    """The exact properties of torch's data sets that are quick to compare: subset indices, integer labels."""
    if isinstance(dataset, Subset):
        return [torch.as_tensor(dataset.indices), _cheaply_described(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return list(map(_cheaply_described, dataset.datasets))
    if isinstance(dataset, TensorDataset):
        return [(str(found.dtype), found.shape, _integers(found)) for found in dataset.tensors]
    return None


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    is_exact = is_dense(tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return tensor[:_COMPARED_ROWS] if is_exact and tensor.dim() == 1 else None


class Part:
    """A copy of the user's ``DataLoader`` that loads only this rank's samples."""

    def __init__(
        self, loader: DataLoader[Any], batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
    ) -> None:
        self.sampler = _SlicedBatchSampler(loader, batch_size, group, at_least)
        self.loader = copy.copy(loader)
        # A shallow copy keeps the user's class and options. Shares come in the order of the sampler's batches.
        replace_batch_sampler(self.loader, self.sampler)
        if get_rank(group) != 0:
            self.loader.generator = None  # the workers' seeds come from this rank's random state
        self.sources = self.sampler.sources

    @property
    def record(self) -> Pass | None:
        """Of the pass under way, if the loader is resumable."""
        return self.sampler.record

    @record.setter
    def record(self, record: Pass) -> None:
        self.sampler.record = record

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        assert self.record is not None
        return self.record.position(batches)


class PartIterator(ShardedIterator):
    def __init__(self, part: Part, shares: deque[Share]) -> None:
        self._record = part.sampler.record
        with StartingWorkers(part.loader if self._record else None) as part.sampler.starting:
            super().__init__(iter(part.loader), shares)
        self._loader = part.loader
        self._sampler = part.sampler
        self._draw = part.sampler.draw
        if self._record is not None and self._record.can_skip:
            part.sampler.drawing.begin()

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            if self._record is not None:
                self._record.is_over = True
            raise
        self._shares.append(self._draw.shares.popleft())
        end = self._draw.ends.popleft()
        if self._record is not None:
            self._record.hand_out(end)
        return batch

    def first_batch(self) -> WholeBatch:
        division, group = self._draw.first, self._sampler.group
        if division is None:
            raise ConfigurationError(
                "the whole first batch is available only after it has been drawn; none has been drawn."
            )
        with SharedRandomState(group=group).drawing():
            samples = _load(self._loader.dataset, division.whole)
        collate, size = self._loader.collate_fn, len(division.whole)
        start, end = division.start, division.start + len(division.part)
        share = division.share
        if bounds := uneven_bounds(size, get_rank(group), get_world_size(group)):
            start, end = bounds
            share = Share(end - start, size)
        return WholeBatch(collate(samples), collate(samples[start:end]), share)

    def check_agreement(self) -> None:
        self._sampler.check_agreement(self._draw)


def _load(dataset: Any, indices: Sequence[Any]) -> Any:
    """Load samples the way ``DataLoader`` does."""
    load_many = getattr(dataset, "__getitems__", None)
    return load_many(indices) if load_many else [dataset[index] for index in indices]


def divide_before_loading(
    loader: Any, batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
) -> Part | None:
    if not isinstance(loader, DataLoader):
        return None
    is_map_style = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
    if is_map_style and not has_state(loader) and not keeps_iterator(loader):
        return Part(loader, batch_size, group, at_least)
    if loader.num_workers and not loader.in_order:
        raise ConfigurationError(
            "DataLoader(in_order=False) must be in_order=True here: every process loads all batches and takes its part "
            "of each, so all must load them in the same order."
        )
    return None


def has_state(loader: Any) -> bool:
    """Whether a loader's progress can be saved: a part of it would have the progress of one rank only."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _slices(batches: Iterator[Sequence[Any]], rank: int, world_size: int, at_least: int) -> Iterator[_Division]:
    for batch in batches:
        start, end = slice_bounds(len(batch), rank, world_size, at_least)
        # The padding batch is the whole batch. It has too few samples for all ranks, but as many as a single process
        # sees.
        part = batch[start:end] if end > start else batch
        yield _Division(batch, part, start if end > start else 0, Share(end - start, len(batch)))


def _turns(batches: Iterator[Sequence[Any]], rank: int, world_size: int) -> Iterator[_Division]:
    while turn := list(itertools.islice(batches, world_size)):
        mine = turn[rank] if rank < len(turn) else None
        share = Share(len(mine or ()), sum(map(len, turn)))
        start = sum(map(len, turn[:rank])) if mine is not None else 0
        yield _Division(list(itertools.chain(*turn)), turn[0] if mine is None else mine, start, share)
