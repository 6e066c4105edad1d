"""Loaders that resume where an earlier run stopped, on any number of processes.

A resumed pass over a map-style ``DataLoader`` draws the used indices again, but loads no used sample: rank 0 runs the
sampler under the random state of the earlier run, and skips the batches that were used. :mod:`.after_loading` says how
other loaders resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddp_callbacks._torch import has_persistent_workers, note_workers
from ddp_callbacks.data.global_state import (
    get_global_state,
    own_generators,
    set_generators,
    set_global_state,
    states_of_generators,
)
from ddp_callbacks.data.iterator import Pass, ShardedIterator, Start
from ddp_callbacks.data.nested import is_data_loader, length_of
from ddp_callbacks.data.order_state import Attributes, OrderAttributes
from ddp_callbacks.data.sharding import ShardedDataLoader, ShardedLoader, is_distributed
from ddp_callbacks.data.shares import BatchSize, check_batch_size
from ddp_callbacks.data.workers import keep_workers
from ddp_callbacks.errors import ConfigurationError


class Resumable(ShardedLoader):
    """A sharded loader with a state. :func:`ddp_callbacks.resumable_loader` returns it.

    Args:
        args: The arguments of :class:`~ddp_callbacks.data.sharding.ShardedLoader`.

    Attributes:
        attributes: The plain attributes on which the order depends, of samplers and iterable data sets.
    """

    is_resumable = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pass: Pass | None = None  # the last one that has begun in this run
        self._resumed: Mapping[str, Any] | None = None  # where the next pass begins
        self._last: Mapping[str, Any] | None = None  # where the pass before, of an earlier run, ended
        self.attributes = OrderAttributes({**self._source.objects, "loader": self._source.loader})
        if is_data_loader(self._source.loader):
            keep_workers(self._source.loader)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return this rank's position in the current pass, and its generators' states. Local.

        The state consists of plain data and tensors. A pass lasts from ``iter()`` until no batch is left, or until the
        program drops the iterator, as a loop with ``break`` does. If you save between passes, the next pass after
        :meth:`load_state_dict` begins at the first batch.

        Args:
            batches: Number of batches of this pass that you have used; ``None``: all that the iterator returned. Give
                it if you draw batches ahead.

        Raises:
            ConfigurationError: The iterator returned fewer batches. Or ``batches`` is smaller than their number, and
                the loader has a ``state_dict`` of its own, which includes every batch drawn.
        """
        is_within = self.iterator is not None and not self.iterator.current.is_over
        position, last = self._resumed, self._last
        if self._pass is not None and is_within:
            position = self._pass.position(batches)
        elif self._pass is not None and not self._source.is_stateful:
            last = self._pass.position(None)
        within, before, now = self.attributes.changed(*map(_attributes_of, (position, last)), self.attributes.take())
        return {
            "about": self._about(),
            "rank": self._source.divider.rank,
            "world_size": self._source.divider.world_size,
            "passes": self._source.passes - (self._pass is not None and is_within),
            "generators": states_of_generators(self._source.sources),
            "attributes": now,
            "has_workers": is_data_loader(self.loader) and has_persistent_workers(self.loader),
            "data": states_of_generators(self._generators_of_data()),
            "pass": position and {**position, "attributes": within},
            "last": last and {**last, "attributes": before},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at the batch after the last one used. Local.

        Pass each rank its own state, or rank 0's if the number of ranks has changed. The next ``iter()`` moves to that
        batch, and does not load used samples of a map-style data set. It leaves the global random state unchanged.

        Raises:
            ConfigurationError: In the middle of a pass: the loader has another data set, or another batch size; or
                ``batch_size="per_process"``, and the number of ranks has changed.
        """
        if state["pass"] is not None:
            self._require_same(state)
        self.end()
        self.steps.clear()
        self._pass, self._resumed = None, state["pass"]
        self._last = _to_compare(state.get("last")) if state["about"] == self._about() else None
        self._source.passes = state["passes"]
        if is_data_loader(self.loader):
            note_workers(self.loader, state["has_workers"])
        set_generators(self._source.sources, state["generators"])
        self.attributes.load(state.get("attributes", {}))
        if (state["rank"], state["world_size"]) == (self._source.divider.rank, self._source.divider.world_size):
            set_generators(self._generators_of_data(), state["data"])

    def start_afresh(self) -> None:
        """Forget the position that :meth:`load_state_dict` has set: the next pass begins at the first batch. Local."""
        if self._resumed is not None:
            self._last = _to_compare(self._resumed)
            self._resumed, self._source.passes = None, self._source.passes + 1

    def __iter__(self) -> ShardedIterator:
        before, resumed = get_global_state(self._source.sources), self._resumed
        if self._last is not None and isinstance(self.loader, Iterator):
            raise ConfigurationError(
                f"a {type(self.loader).__name__} cannot begin a pass again: it continues where the last one ended. To "
                "resume, give an iterable whose __iter__ begins a pass."
            )
        start = Start(before, resumed, self._last, self.attributes, self.attributes.take())
        self._resumed = self._last = None
        iterator = self._iterate(start)
        self._pass = iterator.current
        if resumed is not None:
            set_global_state(before, () if resumed["drawn"] else self._source.sources)
        return iterator

    def _generators_of_data(self) -> list[Any]:
        """Return the data set's generators, from which this rank draws when it loads samples. Workers have copies."""
        dataset = getattr(self.loader, "dataset", None)
        return [] if any(source is dataset for source in self._source.sources) else own_generators(dataset)

    def _about(self) -> dict[str, Any]:
        is_iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return {
            "samples in the data set": length_of(getattr(self.loader, "dataset", None)),
            "samples in a batch": getattr(self.loader, "batch_size", None),
            "batch_size": self._source.divider.division,
            "num_workers of an iterable data set": getattr(self.loader, "num_workers", None) if is_iterable else None,
        }

    def _require_same(self, state: Mapping[str, Any]) -> None:
        for name, found in self._about().items():
            expected = state["about"].get(name, found)
            if found != expected:
                raise ConfigurationError(
                    f"{name} must be {expected!r}, as in the run that was saved in the middle of a pass, got "
                    f"{found!r}. Resume with {expected!r}, or from a state that was saved between two passes."
                )
        saved, world_size = state["world_size"], self._source.divider.world_size
        if self._source.divider.division != "global" and saved != world_size:
            raise ConfigurationError(
                f'with batch_size="per_process" or a DistributedSampler the number of processes must be {saved}, as in '
                f"the run that was saved in the middle of a pass, got {world_size}: each step has other samples. "
                f'Resume with {saved}, or use batch_size="global" and no DistributedSampler.'
            )


def _attributes_of(position: Mapping[str, Any] | None) -> Attributes:
    return position.get("attributes", {}) if position else {}


def _to_compare(position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the part of a pass that is drawn again once it is over: its last batch, or the first of whole batches."""
    if not position or not position["drawn"] or "loader" in position:
        return None
    return {**position, **position.get("again", {})}


class ResumableDataLoader(Resumable, ShardedDataLoader):  # type: ignore[misc]
    """A sharded ``DataLoader`` with a state."""


def resumable_loader(
    loader: Any, batch_size: BatchSize = "global", group: dist.ProcessGroup | None = None, at_least: int = 1
) -> Any:
    """Like :func:`ddp_callbacks.shard_loader`, with ``state_dict`` and ``load_state_dict``; also with a single process.

    A later run resumes at the next batch, on any number of processes (``Resumable``). This call is local;
    iterating over the result is a collective.

    Args:
        loader, batch_size, group, at_least: See :func:`ddp_callbacks.shard_loader`.

    Raises:
        ConfigurationError: As in :func:`ddp_callbacks.shard_loader`; or the loader keeps an iterator of its own from
            pass to pass.
    """
    check_batch_size(batch_size)
    if loader is None or isinstance(loader, Resumable):
        return loader
    if isinstance(loader, ShardedLoader):
        loader = loader.loader
    kind = ResumableDataLoader if is_data_loader(loader) else Resumable
    return kind(loader, "own" if is_distributed(loader) else batch_size, group, at_least)
