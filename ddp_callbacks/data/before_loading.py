"""Division before loading: a map-style ``DataLoader`` loads only this rank's samples."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from ddp_callbacks._torch import copied_loader, keeps_iterator, override
from ddp_callbacks.data.global_state import digest_of
from ddp_callbacks.data.iterator import Pass, ShardedIterator, Source
from ddp_callbacks.data.nested import has_state, name_of, undividable
from ddp_callbacks.data.order import Order
from ddp_callbacks.data.random_state import SharedRandomState, without_draws
from ddp_callbacks.data.same_data import require_same_data
from ddp_callbacks.data.shares import Share, WholeBatch, common_size, slice_samples
from ddp_callbacks.data.steps import Divider
from ddp_callbacks.data.workers import SeededIndices, StartingWorkers
from ddp_callbacks.errors import ConfigurationError


class _PartPass(Pass):
    """A pass over a part of a ``DataLoader``.

    Attributes:
        order: Of all ranks.
        shares: Of the steps that have been drawn and not handed out.
        indices: Of this rank's batches, if they are dealt out.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        drawn = 0
        if position := part.resumed:
            self.used = position["batches"]
            drawn = min(self.used * part.divider.per_step, position["drawn"])
        self.order = Order(
            part.sampler, part.sources, part.group, is_shared=not part.is_own, start=part.start, used=drawn
        )
        self.shares: deque[Share] = deque()
        self.indices: list[list[Any]] = []

    def draw(self) -> Iterator[Any]:
        """This rank's indices of each step."""
        part = self._part
        part.starting.end()
        part.check_data()
        is_seeded = part.start is not None and part.loader.num_workers
        order = itertools.islice(self.order, part.limit)
        for number, step in enumerate(part.divider.steps(order, part.size_of, operator.getitem), self.used + 1):
            if self.first is None and step.batches and part.has_batches:
                self.first = list(itertools.chain(*step.batches))
            self.shares.append(step.share)
            if part.divider.division == "dealt" and part.loader.batch_sampler is not None:
                self.indices.append(list(step.part))
            yield SeededIndices(step.part, self._seed(number)) if is_seeded else step.part

    def _seed(self, number: int) -> int:
        return digest_of(self.order.seed, self._part.divider.rank, number)

    def position(self, batches: int | None) -> dict[str, Any]:
        return {**self.order.position(), "batches": self.count_used(batches)}


class Part(Source):
    """A copy of the user's ``DataLoader`` that loads only this rank's samples. It stands for the copy's sampler.

    Attributes:
        sampler: The user's, or the batch sampler.
        has_batches: It yields the indices of batches. Otherwise each index is that of a sample of any shape.
        begun: The last pass that has begun.
        starting: The workers start.
    """

    loader: DataLoader[Any]
    begun: _PartPass

    def __init__(self, loader: DataLoader[Any], divider: Divider, group: dist.ProcessGroup | None) -> None:
        self.sampler: Any = loader.batch_sampler or loader.sampler
        sources = (loader, self.sampler, getattr(self.sampler, "sampler", None))
        super().__init__(copied_loader(loader), sources, divider, group)
        self.has_batches = loader.batch_sampler is not None or isinstance(self.sampler, BatchSampler)
        kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
        override(self.loader, **{kind: self}, in_order=True)
        self.is_own = divider.division == "own"
        if divider.rank and not self.is_own:
            self.loader.generator = None  # the workers' seeds come from this rank's random state
        self.starting = StartingWorkers(None)
        self._is_checked = self.is_own or divider.world_size == 1

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """What this rank draws in a pass. Local; ``next`` is a collective."""
        if not self.has_batches and self.divider.division == "global" and self.divider.world_size > 1:
            raise undividable(name_of(self.loader), "(one index at a time) is taken for one sample (batch_size=None)")
        self.begun = _PartPass(self)
        return self.begun.draw()

    def iterate(self, shares: deque[Share]) -> ShardedIterator:
        with StartingWorkers(self.loader) as self.starting:
            batches = iter(self.loader)
        if self.resumed and self.resumed["drawn"]:
            self.begun.order.begin()
        return PartIterator(self, self.begun, batches, shares)

    def size_of(self, batch: Any) -> int:
        """The number of samples that a batch of the sampler stands for."""
        return len(batch) if self.has_batches else 1

    def check_data(self) -> None:
        """Raise unless the cheap-to-compare properties of the data set are equal on all ranks. Once per loader."""
        if not self._is_checked:
            self._is_checked = True
            require_same_data(self.loader.dataset, name_of(self.loader), self.group)

    def compared(self, first: Any) -> WholeBatch:
        part, share = self.divider.to_compare(len(first))
        with SharedRandomState(group=self.group).drawing():
            return WholeBatch(*_load_again(self.loader, first, part), share)


class PartIterator(ShardedIterator):
    """Iterates over this rank's part of a ``DataLoader``."""

    current: _PartPass

    def _take(self) -> tuple[Any, Share]:
        return next(self.batches), self.current.shares.popleft()


def _load_again(loader: DataLoader[Any], indices: list[Any], part: slice) -> tuple[Any, Any]:
    """A batch and a part of it, as the loader makes them.

    Of a loader with workers, a worker loads them: a data set may open its files in each process that reads.
    """
    options = {name: getattr(loader, name) for name in ("worker_init_fn", "multiprocessing_context", "timeout")}
    options["num_workers"] = min(1, loader.num_workers)
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": [indices]}
    else:
        options["batch_sampler"] = [indices]
    collate = _collate_and_slice if loader.batch_sampler is None else _collate_both
    again = DataLoader(loader.dataset, collate_fn=functools.partial(collate, loader.collate_fn, part), **options)
    whole_and_part: tuple[Any, Any] = next(iter(again))
    return whole_and_part


def _collate_both(collate: Callable[[Any], Any], part: slice, samples: Any) -> tuple[Any, Any]:
    with without_draws("collate_fn"):
        return collate(samples), collate(samples[part])


def _collate_and_slice(collate: Callable[[Any], Any], part: slice, samples: Any) -> tuple[Any, Any]:
    whole = collate(samples)
    size = common_size(whole)
    return whole, whole if size is None else slice_samples(whole, size, part)


def divide_before_loading(loader: Any, divider: Divider, group: dist.ProcessGroup | None) -> Part | None:
    """This rank's part of a map-style ``DataLoader``; ``None`` for other loaders."""
    if not isinstance(loader, DataLoader):
        return None
    if _has_samples_by_index(loader) and not has_state(loader) and not keeps_iterator(loader):
        return Part(loader, divider, group)
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
