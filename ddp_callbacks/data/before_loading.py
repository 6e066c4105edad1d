"""Division before loading: a map-style ``DataLoader`` loads only this rank's samples.

============  =====================================================================================================
division      what a rank gets of the order
============  =====================================================================================================
global        its slice of each batch; of a loader with ``batch_size=None``, of each list of indices
per_process   whole batches in turn
dealt         the same, without padding at the end: for predictions
own           the batches that its own sampler draws, a ``DistributedSampler``
============  =====================================================================================================
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
)

from ddp_callbacks._torch import copied_loader, keeps_iterator, override
from ddp_callbacks.data.global_state import digest_of
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.nested import name_of, undividable
from ddp_callbacks.data.order import Order, Start
from ddp_callbacks.data.random_state import SharedRandomState, without_draws
from ddp_callbacks.data.same_data import require_same_data
from ddp_callbacks.data.shares import Share, WholeBatch, common_size, slice_bounds, slice_samples, uneven_bounds
from ddp_callbacks.data.workers import SeededIndices, StartingWorkers
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

Division = Literal["global", "per_process", "dealt", "own"]


@dataclass(frozen=True)
class _Step:
    """The indices of one step, divided among the ranks.

    Attributes:
        whole: The indices of all ranks; ``None``: unknown here.
        part: This rank's indices.
        start: The position of ``part`` in ``whole``.
    """

    whole: Any
    part: Any
    start: int
    share: Share


class _Pass(Iterator[Any]):
    """What stands for the sampler of one pass: yields this rank's indices of each step.

    Attributes:
        order: Of all ranks.
        shares: Of the steps that have been drawn and not handed out.
        indices: Of this rank's parts, if requested.
        first: The first step.
        used: The number of steps handed out, with those of an earlier run.
    """

    def __init__(self, part: Part, order: Order, start: Start | None) -> None:
        self._part, self._start = part, start
        self.order = order
        self.shares: deque[Share] = deque()
        self.indices: list[list[Any]] = []
        self.first: _Step | None = None
        self.used = self._drawn = start.position["batches"] if start and start.position else 0
        self.is_over = False
        self._steps = part.divide(order)

    def __next__(self) -> Any:
        self._part.starting.end()
        self._part.check_data()
        step = next(self._steps)
        self.first = self.first or step
        self.shares.append(step.share)
        if self._part.keeps_indices:
            self.indices.append(list(step.part) if step.share.local else [])
        self._drawn += 1
        if self._start is None or not self._part.loader.num_workers:
            return step.part
        return SeededIndices(step.part, digest_of(self.order.seed, self._part.rank, self._drawn))


class _Sampler:
    """Stands for the sampler, or batch sampler, of a copy of the user's loader."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __len__(self) -> int:
        return len(self._part.sources[1])

    def __iter__(self) -> Iterator[Any]:
        return self._part.begin_pass()


class Part:
    """A copy of the user's ``DataLoader`` that loads only this rank's samples.

    Attributes:
        loader: The copy.
        sources: What may have random generators: the user's loader, its sampler or batch sampler, and that one's.
        has_batches: Its sampler yields the indices of batches. Otherwise each index is that of a sample of any shape.
        current: The pass under way.
        start: Of the next pass, if the loader is resumable.
        starting: Its workers start.
        limit: The number of batches to take of each pass; ``None``: all.
    """

    def __init__(
        self, loader: DataLoader[Any], division: Division, group: dist.ProcessGroup | None, at_least: int
    ) -> None:
        self.group, self.rank, self._world_size = group, get_rank(group), get_world_size(group)
        self._division, self._at_least = division, at_least
        sampler: Any = loader.batch_sampler or loader.sampler
        self.sources = (loader, sampler, getattr(sampler, "sampler", None))
        self.has_batches = loader.batch_sampler is not None or isinstance(sampler, BatchSampler)
        self.loader = copied_loader(loader)
        kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
        override(self.loader, **{kind: _Sampler(self)}, in_order=True)
        if self.rank and division != "own":
            self.loader.generator = None  # the workers' seeds come from this rank's random state
        self.keeps_indices = False
        self.current: _Pass | None = None
        self.start: Start | None = None
        self.starting = StartingWorkers(None)
        self.limit: int | None = None
        self._is_checked = division == "own" or self._world_size == 1

    def begin_pass(self) -> _Pass:
        """The pass that begins. Local: its first ``next`` is a collective."""
        position = self.start.position if self.start else None
        used = self._batches_in(position["batches"], position["drawn"]) if position else 0
        is_shared = self._division != "own"
        order = Order(self.sources[1], self.sources, self.group, is_shared=is_shared, start=self.start, used=used)
        self.current = _Pass(self, order, self.start)
        return self.current

    def divide(self, order: Order) -> Iterator[_Step]:
        """The steps of this rank."""
        if self._division == "own":
            return (_Step(None, batch, 0, Share(self.count(batch), None)) for batch in order)
        if self._division == "dealt":
            return self._deal(itertools.islice(order, self.limit))
        if self._division == "per_process":
            return self._turns(itertools.islice(order, self.limit))
        if self.has_batches:
            return map(self._slice, order)
        if self._world_size > 1:
            raise undividable(name_of(self.loader), "(one index at a time) is taken for one sample (batch_size=None)")
        return (_Step(batch, batch, 0, Share(1, 1)) for batch in order)

    def _slice(self, batch: Any) -> _Step:
        start, end = slice_bounds(len(batch), self.rank, self._world_size, self._at_least)
        # The padding batch is the whole batch. It has too few samples for all ranks, but as many as a single process
        # sees.
        part = batch[start:end] if end > start else batch
        return _Step(batch, part, start if end > start else 0, Share(end - start, len(batch)))

    def _turns(self, order: Iterator[Any]) -> Iterator[_Step]:
        rank = self.rank
        while turn := list(itertools.islice(order, self._world_size)):
            sizes, is_mine = list(map(self.count, turn)), rank < len(turn)
            whole = list(itertools.chain(*turn)) if self.has_batches else None
            share = Share(sizes[rank] if is_mine else 0, sum(sizes))
            yield _Step(whole, turn[rank if is_mine else 0], sum(sizes[:rank]) if is_mine else 0, share)

    def _deal(self, order: Iterator[Any]) -> Iterator[_Step]:
        while turn := list(itertools.islice(order, self._world_size)):
            if self.rank < len(turn):
                size = self.count(turn[self.rank])
                yield _Step(None, turn[self.rank], 0, Share(size, size))

    def count(self, batch: Any) -> int:
        """The number of samples that a batch of the sampler stands for."""
        return len(batch) if self.has_batches else 1

    def _batches_in(self, steps: int, drawn: int) -> int:
        return min(steps * self._world_size, drawn) if self._division == "per_process" else steps

    @property
    def is_over(self) -> bool:
        """Whether the pass has no batch left."""
        return self.current is not None and self.current.is_over

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        assert self.current is not None
        return {"batches": used_of(batches, self.current.used)} | self.current.order.position()

    def check_data(self) -> None:
        """Raise unless the cheap-to-compare properties of the data set are equal on all ranks. Once per loader."""
        if not self._is_checked:
            self._is_checked = True
            require_same_data(self.loader.dataset, name_of(self.loader), self.group)


def used_of(batches: int | None, handed_out: int) -> int:
    """The number of batches used, of which ``None`` means all that were handed out."""
    if batches is not None and not 0 <= batches <= handed_out:
        raise ConfigurationError(
            f"batches must be the number of batches used in this pass, of which {handed_out} were handed out, got "
            f"{batches}."
        )
    return handed_out if batches is None else batches


class PartIterator(ShardedIterator):
    """Iterates over this rank's part of a ``DataLoader``."""

    def __init__(self, part: Part, shares: deque[Share]) -> None:
        with StartingWorkers(part.loader) as part.starting:
            super().__init__(iter(part.loader), shares)
        assert part.current is not None
        self._part, self._pass = part, part.current
        if part.start is not None and part.start.position is not None and part.start.position["drawn"]:
            self._pass.order.begin()

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            self._pass.is_over = True
            raise
        self._shares.append(self._pass.shares.popleft())
        self._pass.used += 1
        return batch

    def first_batch(self) -> WholeBatch:
        step, group, loader = self._pass.first, self._part.group, self._part.loader
        if step is None or step.whole is None:
            raise ConfigurationError(
                "the whole first batch is available only after it has been drawn, from a loader without a "
                "DistributedSampler."
            )
        with SharedRandomState(group=group).drawing():
            take = _loaded(loader, step.whole, self._part.has_batches)
        size, start, share = self._part.count(step.whole), step.start, step.share
        end = start + self._part.count(step.part)
        if bounds := uneven_bounds(size, get_rank(group), get_world_size(group)):
            start, end = bounds
            share = Share(end - start, size)
        with without_draws("collate_fn"):
            return WholeBatch(take(0, size), take(start, end), share)


def _loaded(loader: DataLoader[Any], indices: Any, has_batches: bool) -> Callable[[int, int], Any]:
    """Load samples the way ``DataLoader`` does; any part of them can then be made a batch."""
    if loader.batch_sampler is None:
        batch = loader.collate_fn(loader.dataset[indices])
        size = common_size(batch) if has_batches else None
        return lambda start, end: batch if size is None else slice_samples(batch, size, slice(start, end))
    samples = _samples(loader, indices)
    return lambda start, end: loader.collate_fn(samples[start:end])


def _samples(loader: DataLoader[Any], indices: Any) -> list[Any]:
    """Of a loader with workers, a worker loads them: a data set may open its files in each process that reads."""
    if loader.num_workers:
        options = {name: getattr(loader, name) for name in ("worker_init_fn", "multiprocessing_context", "timeout")}
        again = DataLoader(loader.dataset, batch_sampler=[indices], num_workers=1, collate_fn=list, **options)
        return list(next(iter(again)))
    load_many = getattr(loader.dataset, "__getitems__", None)
    return list(load_many(indices) if load_many else [loader.dataset[index] for index in indices])


def divide_before_loading(
    loader: Any, division: Division, group: dist.ProcessGroup | None, at_least: int
) -> Part | None:
    """This rank's part of a map-style ``DataLoader``; ``None`` for other loaders."""
    if not isinstance(loader, DataLoader):
        return None
    if _has_samples_by_index(loader) and not has_state(loader) and not keeps_iterator(loader):
        return Part(loader, division, group, at_least)
    if loader.num_workers and not loader.in_order:
        raise ConfigurationError(
            "DataLoader(in_order=False) must be in_order=True here: every process loads all batches and takes its part "
            "of each, so all must load them in the same order."
        )
    return None


def _has_samples_by_index(loader: DataLoader[Any]) -> bool:
    """Whether the data set is map-style. With ``batch_size=None``, a list is taken for one of batches."""
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    return is_map_style and (loader.batch_sampler is not None or isinstance(loader.dataset, Dataset))


def has_state(loader: Any) -> bool:
    """Whether a loader's progress can be saved: a part of it would have the progress of one rank only."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
