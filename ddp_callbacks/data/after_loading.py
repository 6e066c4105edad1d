"""Division after loading: every rank produces the whole batch and keeps its slice, or takes whole batches in turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.nested import arrays_in, name_of, undividable
from ddp_callbacks.data.shares import Share, WholeBatch, common_size, slice_batch, slice_samples, uneven_bounds
from ddp_callbacks.data.whole import Whole, checksum_of_content
from ddp_callbacks.data.workers import StartingWorkers
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size


class _WholeIterator(ShardedIterator):
    """Produces the batches of a loader that can't be divided before loading, the same ones on every rank."""

    def __init__(self, whole: Whole, group: dist.ProcessGroup | None, shares: deque[Share]) -> None:
        self._group, self._rank, self._world_size = group, get_rank(group), get_world_size(group)
        self._whole, self._name = whole, name_of(whole.loader)
        self._items_are_samples = _yields_samples(whole.loader)
        self._first: WholeBatch | None = None
        self._shared = whole.begin()
        with self._shared.drawing(), StartingWorkers(whole.loader):
            super().__init__(iter(whole.loader), shares)
        whole.skip(self.batches)
        self._start = whole.drawn

    def __next__(self) -> Any:
        try:
            part, share = self._take()
        except StopIteration:
            self._whole.is_over = True
            raise
        self._whole.hand_out()
        self._shares.append(share)
        return part

    def _take(self) -> tuple[Any, Share]:
        """This rank's part of the next step."""
        raise NotImplementedError

    def _next_whole(self) -> Any:
        with self._shared.drawing():
            batch = next(self.batches)
        self._whole.has_produced(batch)
        if self._position == self._start and self._world_size > 1:
            self._require_equal(batch)
            _require_samples_first(self._whole.loader, batch)
        return batch

    @property
    def _position(self) -> int:
        """The number of the last batch."""
        return self._whole.drawn - 1

    def first_batch(self) -> WholeBatch:
        if self._first is None:
            raise ConfigurationError(
                f"the whole first batch of {self._name} is not available: it is no longer kept, or "
                'batch_size="per_process" makes a step of several batches.'
            )
        size = self._size(self._first.whole)
        bounds = None if size is None else uneven_bounds(size, self._rank, self._world_size)
        if size is None or bounds is None:
            return self._first
        part = slice_samples(self._first.whole, size, slice(*bounds))
        return WholeBatch(self._first.whole, part, Share(bounds[1] - bounds[0], size))

    def _keep(self, whole: Any, part: Any, share: Share) -> None:
        """Release the first batch: Lightning and Torchbearer draw one batch ahead."""
        if self._position == self._start:
            self._first = WholeBatch(whole, part, share)
        elif self._position == self._start + 2:
            self._first = None

    def _require_equal(self, batch: Any) -> None:
        """Raise unless the first batch is equal on all ranks."""
        require_agreement(
            {f"{self._name}: checksum of the first batch": checksum_of_content(batch)},
            f"the batches that {self._name} yields",
            f"Every process yields the batches of {self._name} under rank 0's random state (torch's, Python's and "
            "NumPy's global ones), and takes its part of each. Yield the same on every process. (In Lightning, "
            "Trainer(use_distributed_sampler=False) leaves loaders alone that yield each process's own.)",
            self._group,
        )

    def _size(self, batch: Any) -> int | None:
        return None if self._items_are_samples else common_size(batch)


class SlicingIterator(_WholeIterator):
    """Keeps this rank's slice of every tensor."""

    def __init__(self, *args: Any, at_least: int) -> None:
        super().__init__(*args)
        self._at_least = at_least

    def _take(self) -> tuple[Any, Share]:
        batch = self._next_whole()
        size = self._size(batch)
        if self._world_size == 1:
            part, share = batch, Share(size or 1, size or 1)
        elif size is None:
            shapes = ", ".join(str(list(array.shape)) for array in itertools.islice(arrays_in(batch), 4))
            why = "is taken for one sample" if self._items_are_samples else "has no common first dimension"
            raise undividable(self._name, f"({type(batch).__name__}: {shapes or 'no tensors'}) {why}")
        else:
            part, share = slice_batch(batch, size, self._rank, self._world_size, self._at_least)
        self._keep(batch, part, share)
        return part, share


class TakingIterator(_WholeIterator):
    """Takes every ``world_size``-th batch; of the last ones a padding batch, unless they are dealt out."""

    def __init__(self, *args: Any, is_dealt: bool) -> None:
        super().__init__(*args)
        self._is_dealt = is_dealt
        self._wholes = itertools.islice(self._all_wholes(), self._whole.limit)

    def _all_wholes(self) -> Iterator[Any]:
        while True:
            try:
                yield self._next_whole()
            except StopIteration:
                return

    def _take(self) -> tuple[Any, Share]:
        turn = list(itertools.islice(self._wholes, self._world_size))
        sizes = [size if (size := self._size(batch)) is not None else 1 for batch in turn]
        if self._rank < len(turn):
            local = sizes[self._rank]
            return turn[self._rank], Share(local, local if self._is_dealt else sum(sizes))
        if not turn or self._is_dealt:
            raise StopIteration
        return turn[0], Share(0, sum(sizes))


def _yields_samples(loader: Any) -> bool:
    """Whether its items are those of a map-style data set under one index, whose first dimension can be anything."""
    if isinstance(loader, DataLoader):
        return loader.batch_sampler is None and _is_map_style(loader.dataset)
    return _is_map_style(loader)


def _is_map_style(data: Any) -> bool:
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _require_samples_first(loader: Any, batch: Any) -> None:
    """Raise if the loader's ``collate_fn`` has put the samples of the first batch along the second dimension."""
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.collate_fn is default_collate:
        return
    size = loader.batch_size
    shapes = [list(tensor.shape) for tensor in arrays_in(batch) if tensor.ndim > 1]
    if size > 1 and shapes and all(first != size == second for first, second, *_ in shapes):
        raise ConfigurationError(
            "samples must lie along the first dimension of a batch, which is divided, got tensors of shape "
            f"{', '.join(map(str, shapes))} with batch_size={size}. Let collate_fn put the samples first "
            "(batch_first), and transpose in the model."
        )
