"""Division before loading: a map-style ``DataLoader`` loads only this rank's samples."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate

from ddp_callbacks._torch import (
    copied_loader,
    has_persistent_workers,
    is_torchs_iterator,
    iterates_as_torch,
    keeps_iterator,
    note_workers,
    override,
)
from ddp_callbacks.data.global_state import (
    get_global_state,
    is_same_state,
    set_generators,
    set_global_state,
    states_of_generators,
)
from ddp_callbacks.data.iterator import DividedLoader, Pass, ShardedIterator, Start
from ddp_callbacks.data.nested import has_state, is_data_loader, name_of, undividable
from ddp_callbacks.data.order import Order
from ddp_callbacks.data.order_state import objects_of_order
from ddp_callbacks.data.random_state import SharedRandomState, without_draws
from ddp_callbacks.data.same_data import require_same_data
from ddp_callbacks.data.sample_seeds import Loading, SeededIndex, SeededIndices, generators_of
from ddp_callbacks.data.shares import Divider, Step, WholeBatch
from ddp_callbacks.data.workers import spared_workers
from ddp_callbacks.errors import ConfigurationError, warn

_WATCHED = 10  # batches of a process in which a collate_fn is looked at: comparing random states takes 0.1 ms


class BeforeLoading(DividedLoader):
    """A copy of the user's ``DataLoader`` that loads only this rank's samples, with this object as its sampler.

    Attributes:
        sampler: The user's batch sampler; the sampler if there is none.
        has_batches: Whether the sampler yields lists of indices, one per batch. Otherwise each index is one sample of
            any shape.
        indices: The indices of this rank's batches in the most recent pass, if batches are dealt out.
    """

    loader: DataLoader[Any]
    _begun: Pass
    _order: Order

    def __init__(self, loader: DataLoader[Any], divider: Divider, group: dist.ProcessGroup | None) -> None:
        self.sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        objects = {"loader": loader} | objects_of_order(sampler=self.sampler)
        super().__init__(copied_loader(loader), objects, divider, group)
        self._original = loader
        self.has_batches = loader.batch_sampler is not None or isinstance(self.sampler, BatchSampler)
        kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
        override(self.loader, **{kind: self}, in_order=True)
        if divider.world_size > 1 and divider.division == "global":
            if not self.has_batches:
                raise undividable(name_of(loader), "(one index at a time) is taken for one sample (batch_size=None)")
            override(self.loader, collate_fn=_Collate(loader.collate_fn, name_of(loader)))
        self._generator = loader.generator
        self._is_checked = divider.division == "own" or divider.world_size == 1
        self._loading = None if self.loader.num_workers else Loading(loader.dataset)
        self.indices = list[list[Any]]()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's indices for the pass that has begun. ``next`` is a collective."""
        if self._begun.is_begun:
            raise ConfigurationError(
                f"{type(self.loader).__name__}.__iter__ begins several passes over its samples in one, which cannot be "
                "divided among the processes. Let its sampler repeat the samples."
            )
        self._order.call()
        return self._draw(self._begun, self._order, self.indices)

    def _draw(self, begun: Pass, order: Order, indices: list[list[Any]]) -> Iterator[Any]:
        if not self._is_checked:
            self._is_checked = True
            require_same_data(self.loader.dataset, name_of(self.loader), self.group)
        is_dealt = self.divider.deals and self.loader.batch_sampler is not None
        for number, step in enumerate(begun.draw(iter(order)), begun.used + 1):
            if is_dealt:
                indices.append(list(step.part))
            yield self._seeded(step, number, order.seed)

    def _seeded(self, step: Step, number: int, seed: int) -> Any:
        """Return the indices of a step, with what the seeds of its samples are made from."""
        divider, rows = self.divider, step.share.rows
        if divider.deals:  # the number of the batch
            number = (number - 1) * divider.world_size + divider.rank + 1
        seeds = (seed, number, divider.rank) if divider.division == "own" else (seed, number)
        if self.has_batches:
            return SeededIndices(step.part, seeds, 0 if rows is None else rows.start, self._loading)
        if self._loading is None:
            return SeededIndex(step.part, seeds)
        self._loading.seed(*seeds)
        return step.part

    def _loaded(self, batches: Iterator[Any], loading: Loading) -> Iterator[Any]:
        """Yield the batches, which this process loads."""
        if not is_torchs_iterator(batches):
            loading.draws = True  # another one may change them, and load them ahead
        while True:
            try:
                batch = next(batches)
                if (samples := loading.load_again()) is not None:
                    batch = self.loader.collate_fn(samples)
            except StopIteration:
                return
            finally:
                loading.end()
            yield batch

    def iterate(self, steps: deque[Step], limit: int | None, start: Start | None) -> ShardedIterator:
        if start and start.last:
            Order(self.sampler, self, start.of_last()).begin()
        # Workers that wait for a pass of the user's loader, whichever copies of it make the passes, need no new seed.
        keeps_workers = has_persistent_workers(self._original)
        self._order, self.indices = Order(self.sampler, self, start), []
        self._begun = Pass(self, self._order, limit, start)
        self.loader.generator = torch.default_generator.clone_state() if keeps_workers else self._generator
        with spared_workers(self.loader):
            batches = iter(self.loader)
        note_workers(self._original, has_persistent_workers(self.loader))
        self._order.resume()
        loaded = batches if self._loading is None else self._loaded(batches, self._loading)
        if not is_torchs_iterator(batches):
            self._refuse_thread(batches)
            loaded = self._begun.checked(loaded)
        return ShardedIterator(self, self._begun, batches, loaded, steps)

    def _refuse_thread(self, batches: object) -> None:
        """Raise if a thread draws the samples: what it exchanges would meet what this one does."""
        if isinstance(batches, Thread) and self._loading is not None and self.divider.world_size > 1:
            raise ConfigurationError(
                f"{type(self.loader).__name__}.__iter__ loads in a thread, where processes cannot agree about the next "
                "samples while others train. Give it num_workers=1 instead: a worker loads ahead, too."
            )

    def size_of(self, drawn: Any) -> int:
        return len(drawn) if self.has_batches else 1

    def compared(self, drawn: list[Any]) -> WholeBatch | None:
        if self.loader.batch_sampler is None:
            return None
        indices = list(itertools.chain(*drawn))
        part, share = self.divider.to_compare(len(indices))
        own = generators_of(self.loader.dataset)
        states = states_of_generators(own)
        try:
            with SharedRandomState(own, group=self.group).drawing():
                return WholeBatch(*_load_again(self.loader, indices, part), share)
        finally:
            set_generators(own, states)


class _Collate:
    """The user's ``collate_fn``, which gets this process's part of each batch of the loader called ``name``."""

    def __init__(self, collate: Callable[[Any], Any], name: str) -> None:
        self._collate, self._name = collate, name
        self._watched = 0 if collate is default_collate else _WATCHED

    def __call__(self, samples: Any) -> Any:
        before = get_global_state([self._collate]) if self._watched else []
        try:
            batch = self._collate(samples)
        except Exception as error:
            error.add_note(
                f"collate_fn has got this process's {len(samples)} samples of a batch of {self._name}. If it leaves "
                "out samples, a part may lose all of them: leave them out in the data set or the sampler, or keep one."
            )
            raise
        if before:
            self._watched -= 1
            if not is_same_state(before, get_global_state([self._collate])):
                warn(
                    f"the collate_fn for {self._name} draws random numbers: they depend on this process's part of the "
                    "batch, so they are not those of one process. Draw them in the data set's __getitem__, or in the "
                    "step."
                )
        return batch


def _load_again(loader: DataLoader[Any], indices: list[Any], part: slice) -> tuple[Any, Any]:
    """Load a batch, and a part of it, as the loader does.

    If the loader has workers, a worker loads them: a data set may open its files in each process that reads.
    """
    again = DataLoader(
        loader.dataset,
        batch_sampler=[indices],
        collate_fn=functools.partial(_collate_both, loader.collate_fn, part),
        num_workers=min(1, loader.num_workers),
        worker_init_fn=functools.partial(_begin_alike, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    whole_and_part: tuple[Any, Any] = next(iter(again))
    return whole_and_part


def _begin_alike(init: Callable[[int], None] | None, worker: int) -> None:
    """Call a ``worker_init_fn``, but not let it seed: it may do so by the rank, as Lightning's does."""
    if init is not None:
        before = get_global_state()
        init(worker)
        set_global_state(before)


def _collate_both(collate: Callable[[Any], Any], part: slice, samples: Any) -> tuple[Any, Any]:
    with without_draws("collate_fn"):
        return collate(samples), collate(samples[part])


def divide_before_loading(loader: Any, divider: Divider, group: dist.ProcessGroup | None) -> BeforeLoading | None:
    """Return this rank's part of a map-style ``DataLoader``; ``None`` for other loaders."""
    if not is_data_loader(loader):
        return None
    begins_pass = iterates_as_torch(loader) and not keeps_iterator(loader)
    if _has_samples_by_index(loader) and not has_state(loader) and begins_pass:
        return BeforeLoading(loader, divider, group)
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
