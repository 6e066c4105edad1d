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
from ddp_callbacks.data.iterator import Pass, ShardedIterator, Source
from ddp_callbacks.data.nested import has_state, name_of, undividable
from ddp_callbacks.data.order import Order, Start
from ddp_callbacks.data.order_state import objects_of_order
from ddp_callbacks.data.random_state import SharedRandomState, without_draws
from ddp_callbacks.data.same_data import require_same_data
from ddp_callbacks.data.shares import Divider, Share, WholeBatch
from ddp_callbacks.data.workers import SeededIndices, spared_workers
from ddp_callbacks.errors import ConfigurationError


class _PartPass(Pass):
    """A pass over a part of a ``DataLoader``.

    Attributes:
        order: The batches of indices of all ranks.
        indices: The indices of this rank's batches, if batches are dealt out.
    """

    def __init__(self, part: Part, limit: int | None, start: Start | None) -> None:
        super().__init__(limit, start)
        self._part = part
        drawn = min(self.used * part.divider.per_step, self.resumed["drawn"]) if self.resumed else 0
        self.order = Order(part.sampler, part.sources, part.group, is_shared=not part.is_own, start=start, used=drawn)
        self.indices: list[list[Any]] = []
        self._shares: deque[Share] = deque()  # of steps drawn but not yet handed out
        self._is_begun = False

    def draw(self) -> Iterator[Any]:
        """Yield this rank's indices for each step."""
        part = self._part
        if self._is_begun:
            raise ConfigurationError(
                f"{type(part.loader).__name__}.__iter__ begins several passes over its samples in one, which cannot be "
                "divided among the processes. Let its sampler repeat the samples."
            )
        self._is_begun = True
        part.check_data()
        is_seeded = self.start is not None and part.loader.num_workers
        order = itertools.islice(self.order, self.limit)
        for number, step in enumerate(part.divider.steps(order, part.size_of, operator.getitem), self.used + 1):
            if self.first is None and step.batches and part.loader.batch_sampler is not None:
                self.first = list(itertools.chain(*step.batches))
            self._shares.append(step.share)
            if part.divider.division == "dealt" and part.loader.batch_sampler is not None:
                self.indices.append(list(step.part))
            yield SeededIndices(step.part, self.order.seed, part.divider.rank, number) if is_seeded else step.part

    def steps(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Share]]:
        return map(self._with_share, batches)

    def _with_share(self, batch: Any) -> tuple[Any, Share]:
        return batch, self._shares.popleft()

    def position(self, batches: int | None) -> dict[str, Any]:
        return {**self.order.position(), "batches": self.count_used(batches)}


class Part(Source):
    """A copy of the user's ``DataLoader`` that loads only this rank's samples, with this object as its sampler.

    Attributes:
        sampler: The user's batch sampler; the sampler if there is none.
        has_batches: Whether the sampler yields lists of indices, one per batch. Otherwise each index is one sample of
            any shape.
        begun: The most recent pass.
    """

    loader: DataLoader[Any]
    begun: _PartPass

    def __init__(self, loader: DataLoader[Any], divider: Divider, group: dist.ProcessGroup | None) -> None:
        self.sampler: Any = loader.batch_sampler or loader.sampler
        objects = {"loader": loader} | objects_of_order(sampler=self.sampler)
        super().__init__(copied_loader(loader), objects, divider, group)
        self.has_batches = loader.batch_sampler is not None or isinstance(self.sampler, BatchSampler)
        kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
        override(self.loader, **{kind: self}, in_order=True)
        self.is_own = divider.division == "own"
        if divider.rank and not self.is_own:
            self.loader.generator = None  # the workers' seeds come from this rank's random state
        self._is_checked = self.is_own or divider.world_size == 1

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's indices for the pass that has begun. Local; ``next`` is a collective."""
        if not self.has_batches and self.divider.division == "global" and self.divider.world_size > 1:
            raise undividable(name_of(self.loader), "(one index at a time) is taken for one sample (batch_size=None)")
        return self.begun.draw()

    def iterate(self, shares: deque[Share], limit: int | None, start: Start | None) -> ShardedIterator:
        if start and start.last:
            past, is_shared = start.of_last(), not self.is_own
            drawn = start.last["drawn"]
            Order(self.sampler, self.sources, self.group, is_shared=is_shared, start=past, used=drawn).begin()
        self.begun = _PartPass(self, limit, start)
        with spared_workers(self.loader):
            batches = iter(self.loader)
        if self.begun.resumed and self.begun.resumed["drawn"]:
            self.begun.order.begin()
        return ShardedIterator(self, self.begun, batches, shares)

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in a batch of indices."""
        return len(batch) if self.has_batches else 1

    def check_data(self) -> None:
        """Raise unless the ranks' data sets are equal, as far as that is quick to compare. Checks once per loader."""
        if not self._is_checked:
            self._is_checked = True
            require_same_data(self.loader.dataset, name_of(self.loader), self.group)

    def compared(self, first: Any) -> WholeBatch:
        part, share = self.divider.to_compare(len(first))
        with SharedRandomState(group=self.group).drawing():
            return WholeBatch(*_load_again(self.loader, first, part), share)


def _load_again(loader: DataLoader[Any], indices: list[Any], part: slice) -> tuple[Any, Any]:
    """Load a batch, and a part of it, as the loader does.

    If the loader has workers, a worker loads them: a data set may open its files in each process that reads.
    """
    again = DataLoader(
        loader.dataset,
        batch_sampler=[indices],
        collate_fn=functools.partial(_collate_both, loader.collate_fn, part),
        num_workers=min(1, loader.num_workers),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    whole_and_part: tuple[Any, Any] = next(iter(again))
    return whole_and_part


def _collate_both(collate: Callable[[Any], Any], part: slice, samples: Any) -> tuple[Any, Any]:
    with without_draws("collate_fn"):
        return collate(samples), collate(samples[part])


def divide_before_loading(loader: Any, divider: Divider, group: dist.ProcessGroup | None) -> Part | None:
    """Return this rank's part of a map-style ``DataLoader``; ``None`` for other loaders."""
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
    """Whether the data set is map-style. With ``batch_size=None``, a plain list counts as a list of batches."""
    is_map_style = not isinstance(loader.dataset, IterableDataset)
    return is_map_style and (loader.batch_sampler is not None or isinstance(loader.dataset, Dataset))
