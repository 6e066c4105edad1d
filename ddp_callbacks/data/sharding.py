"""Shard a data loader: each rank iterates over its own part of every batch.

With ``batch_size="global"`` the loader's batch is the global batch: all ranks have the same batches, in the same order,
and each takes its slice. The number of steps, schedules and logging need no change. With ``"per_process"`` each rank
takes whole batches in turn, so N ranks consume N batches per step.

The kind of loader decides how a batch is divided:

==============================  =======================================================================================
map-style ``DataLoader``        before loading: a rank loads only its samples (:mod:`.before_loading`), of an order
                                that rank 0 draws (:mod:`.order`)
any other iterable of batches,  after loading: every rank produces the whole batch under rank 0's random state and
any loader with a state_dict    keeps its slice of every tensor (:mod:`.after_loading`)
``DistributedSampler`` inside   not divided: it is this rank's part already
==============================  =======================================================================================

A rank without samples in a batch gets a padding batch, so that all ranks make the same calls. Its :class:`Share` has 0
samples, and its result doesn't count.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_callbacks._torch import forget_workers
from ddp_callbacks.comm.collectives import broadcast_object
from ddp_callbacks.data.after_loading import AfterLoading
from ddp_callbacks.data.before_loading import divide_before_loading
from ddp_callbacks.data.iterator import DividedLoader, ShardedIterator, Start
from ddp_callbacks.data.nested import has_state, is_data_loader, length_of, name_of
from ddp_callbacks.data.shares import BatchSize, Divider, Division, Share, Step, check_batch_size, common_size
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.randomness import Rows, WholeDraws
from ddp_callbacks.randomness.generators import default_generators, states_of
from ddp_callbacks.reporting.recorder import timed_loading

_LEFT_ALONE = (
    "The loader of {name} has a DistributedSampler, so it is left unchanged: its batch is that of one process, not "
    "divided among all, and there are fewer steps than on one process. Give the loader without that sampler, or say by "
    'batch_size="per_process" that this is meant. (A library may put the sampler there because it finds "ddp" in the '
    'name of the Trainer\'s strategy: strategy="callbacks" is another name for "ddp_callbacks".)'
)


class ShardedLoader:
    """This rank's part of a loader. It has the loader's length and delegates attribute access to it.

    :func:`ddp_callbacks.shard_loader` makes it. Iterating is a collective: all ranks must start together and ask for
    the same number of batches.

    Args:
        loader: The user's loader; it is not changed.
        division: ``"global"`` or ``"per_process"``, see :func:`ddp_callbacks.shard_loader`; or ``"own"``: its sampler
            gives each rank its part; or ``"dealt"`` or ``"unpadded"``, see ``deal_out``.
        group: ``None`` is the default group.
        at_least: See :func:`ddp_callbacks.shard_loader`.

    Attributes:
        limit: The number of batches to take of each pass, if they are dealt out; ``None``: all.
        steps: Those of the batches drawn so far that no caller has taken, without their parts, oldest first.
    """

    is_resumable = False

    def __init__(self, loader: Any, division: Division, group: dist.ProcessGroup | None, at_least: int) -> None:
        self.loader = loader
        self.steps: deque[Step] = deque()
        self.limit: int | None = None
        self._running: weakref.ref[ShardedIterator] | None = None
        divider = Divider(division, get_rank(group), get_world_size(group), at_least)
        source: DividedLoader | None = divide_before_loading(loader, divider, group)
        self._source = AfterLoading(loader, divider, group, self.is_resumable) if source is None else source
        if has_state(loader) and not has_state(type(self)):
            # Protocols look for attributes of the object. Every rank draws all batches of such a loader, so its state
            # is that of a single process, the same on all ranks, and can be loaded with any number of ranks.
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __reduce__(self) -> Any:
        """A copy or pickle uses the default group and starts from the beginning."""
        divider = self._source.divider
        return type(self), (self.loader, divider.division, None, divider.at_least)

    @property
    def passes(self) -> int:
        """The number of passes that have begun."""
        return self._source.passes

    @passes.setter
    def passes(self, number: int) -> None:
        self._source.passes = number

    @property
    def iterator(self) -> ShardedIterator | None:
        """The most recent iterator; ``None`` if nothing else refers to it, as after a ``break``."""
        return None if self._running is None else self._running()

    def end(self) -> None:
        """End the last pass. Its workers, if any, have ended when this returns."""
        iterator, self._running = self.iterator, None
        if iterator is not None:
            iterator.end()
        for loader in (self.loader, self._source.loader):
            if is_data_loader(loader):
                forget_workers(loader)

    def take_share(self) -> Share | None:
        """Return the share of the oldest batch that was drawn and not taken; ``None`` if there is none."""
        step = self._source.take(self.steps)
        return None if step is None else step.share

    def passes_shares(self) -> list[Share]:
        """Return this rank's share of the usual batch and of the last one of a pass; nothing if a batch may differ."""
        size, samples = getattr(self.loader, "batch_size", None), length_of(getattr(self.loader, "sampler", None))
        divider = self._source.divider
        if divider.division != "global" or not size or not samples or (samples < size and self.loader.drop_last):
            return []
        last = size if self.loader.drop_last else (samples - 1) % size + 1
        return [divider.share_of(size), divider.share_of(last)]

    @property
    def indices(self) -> list[list[Any]] | None:
        """This rank's indices of each batch of the current pass, if batches are dealt out and have indices."""
        return getattr(self._source, "indices", None) or None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        length, divider = len(self.loader), self._source.divider
        if self.limit is None and divider.deals:
            return length
        length = length if self.limit is None else min(length, self.limit)
        return -(-length // divider.per_step)

    def __iter__(self) -> ShardedIterator:
        return self._iterate(None)

    def _iterate(self, start: Start | None) -> ShardedIterator:
        last = self.iterator
        if last is None or not last.current.is_over:
            self.steps.clear()  # nobody uses what was fetched ahead of a pass that a limit, or a new pass, has ended
        iterator = self._source.iterate(self.steps, self.limit, start)
        self._running = weakref.ref(iterator)
        self.passes += 1
        return iterator


class ShardedDataLoader(ShardedLoader, DataLoader[Any]):  # type: ignore[misc]
    """A sharded ``DataLoader``: it passes ``isinstance`` checks and has the attributes of the user's loader."""

    @property
    def _iterator(self) -> Any:
        """The loader's iterator, as in ``DataLoader``, for code that ends the workers."""
        return None if self.iterator is None else self.iterator.batches

    @_iterator.setter
    def _iterator(self, _: Any) -> None:
        self.end()


def shard_loader(
    loader: Any, batch_size: BatchSize = "global", group: dist.ProcessGroup | None = None, at_least: int = 1
) -> Any:
    """Return this rank's part of ``loader``, or ``loader`` itself if it needs no division.

    The part is a :class:`~ddp_callbacks.data.sharding.ShardedLoader`. A loader needs no division with a single process,
    if it was sharded before, or if it has a ``DistributedSampler``. It is never changed. This call is local; iterating
    over the result is a collective.

    Args:
        loader: A ``DataLoader``, or any iterable of batches. A batch is a tensor, or tensors in lists, tuples and
            dicts, with the samples along the first dimension.
        batch_size: ``"global"``: each rank gets its slice of every batch. ``"per_process"``: each rank takes whole
            batches in turn.
        group: ``None`` is the default group.
        at_least: A rank gets at least this many samples of a ``"global"`` batch, or none. Pass the result of
            :func:`ddp_callbacks.batch_norm.samples_needed`.

    Raises:
        ConfigurationError: ``batch_size`` is invalid, or the loader must be divided after loading, but has workers and
            ``in_order=False``.
    """
    check_batch_size(batch_size)
    return _part_of(loader, batch_size, group, at_least)


def deal_out(loader: Any) -> Any:
    """Like :func:`shard_loader`, for predictions: rank r gets batch r, r + N and so on, whole. No rank gets padding.

    Before :attr:`ShardedLoader.limit` is set, the length is that of the user's loader.
    """
    return _part_of(loader, "unpadded", None, 1)


def deal_next_pass(part: ShardedLoader) -> ShardedLoader:
    """Return what deals out the next pass over the loader of ``part``, with padding; samples draw as in ``part``."""
    dealt: ShardedLoader = _part_of(part.loader, "dealt", None, 1)
    dealt.passes, part.passes = part.passes, part.passes + 1
    return dealt


def _part_of(loader: Any, division: Division, group: dist.ProcessGroup | None, at_least: int) -> Any:
    if get_world_size(group) == 1 or loader is None or isinstance(loader, ShardedLoader):
        return loader
    if is_distributed(loader):
        if division != "per_process" and get_rank(group) == 0:
            warn(_LEFT_ALONE.format(name=name_of(loader)))
        return loader
    kind = ShardedDataLoader if is_data_loader(loader) else ShardedLoader
    return kind(loader, division, group, at_least)


def is_distributed(loader: Any) -> bool:
    """Whether the loader's sampler gives each rank its part."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


class _Undivided:
    """Times the loading of batches that no iterator of ours yields."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    @timed_loading
    def __next__(self) -> Any:
        return next(self._batches)


class _WithShares:
    """Begins a pass each time, as the loader does: a generator that is kept would be empty from the second epoch on."""

    def __init__(self, loader: Iterable[Any], draws: WholeDraws | None) -> None:
        self._loader, self._draws = loader, draws

    def __iter__(self) -> Iterator[tuple[Any, Share]]:
        batches = iter(self._loader)
        drawn = batches if isinstance(batches, ShardedIterator) else _Undivided(batches)
        begin: list[torch.Tensor] = []
        for number, batch in enumerate(drawn):
            if number and self._draws is not None:
                self._draws.note_loading(begin)
            if number == 0 and self._draws is not None and get_world_size() > 1:
                self._draws.accept(broadcast_object(states_of(default_generators()), "the random state", None))
            share = batches.take_share() if isinstance(batches, ShardedIterator) else None
            before = [] if self._draws is None else states_of(default_generators())
            yield batch, share or share_of_own(batch)
            if self._draws is not None:
                self._draws.note_outside(before)
                begin = states_of(default_generators())
        if self._draws is not None:
            self._draws.warn()


def with_shares(loader: Iterable[Any], draws: WholeDraws | None = None) -> Iterable[tuple[Any, Share]]:
    """Return the batches of a sharded loader, each with its :class:`Share`, for a loop in plain PyTorch.

    To iterate over the result begins a pass, as over the loader itself, and is a collective.

    Call ``synchronizer.weigh(share.local, share.total)`` before backward (:class:`ddp_callbacks.GradientSynchronizer`).
    If this rank has no sample of a batch, you get a padding batch with a local share of 0: run it like any other.

    Args:
        loader: The result of :func:`shard_loader`; with a single process, the loader itself.
        draws: What gives the batches' random numbers: it continues on all ranks from rank 0's random state,
            after rank 0 has drawn the order of the batches. A pass that ends warns of what it could not draw so.
    """
    return _WithShares(loader, draws)


def share_of_own(batch: Any) -> Share:
    """Return the share of an undivided batch: all of a single process's, or the part of a ``DistributedSampler``."""
    size = common_size(batch)
    local = 1 if size is None else size
    return Share(local, local, Rows(0, local, local)) if get_world_size() == 1 else Share(local, None)
