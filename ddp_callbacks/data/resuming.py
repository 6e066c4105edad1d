"""Loaders that go on where an earlier run has stopped, on any number of processes.

A pass is drawn again, not loaded again: the batch sampler runs under the random state from which the earlier run has
drawn, and the batches that it has used are left out. A checksum of the last of them tells whether it is the same pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_callbacks._torch import has_persistent_workers
from ddp_callbacks.data.before_loading import Part
from ddp_callbacks.data.global_state import get_global_state, plain_state, set_global_state
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.passes import Pass, set_generators, states_of_generators
from ddp_callbacks.data.sharding import ShardedDataLoader, ShardedLoader
from ddp_callbacks.data.shares import BatchSize, check_batch_size
from ddp_callbacks.data.whole import Whole, whole_of
from ddp_callbacks.data.workers import keep_workers
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

_NAMES = {"samples": "samples in the data set", "samples_per_batch": "samples in a batch", "division": "batch_size"}


class Resumable(ShardedLoader):
    """A sharded loader with a state. See :func:`ddp_callbacks.resumable_loader`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._sliced is None:
            self._whole = whole_of(self.loader, self._group)
        if isinstance(self._part.loader, DataLoader):
            keep_workers(self._part.loader)
        self._record: Pass | None = None
        self._resumed: Mapping[str, Any] | None = None  # where the next pass begins
        self._had_workers = False

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this rank is in the pass under way, and its generators' states: plain data and tensors. Local.

        A pass is under way from ``iter()`` until the loader has no batch left. If none is, the next pass begins at the
        first batch after :meth:`load_state_dict`, too.

        Args:
            batches: Number of batches of this pass that have been used. ``None``: as many as were handed out. A host
                that draws ahead has used fewer.

        Raises:
            ConfigurationError: More batches than that were handed out, or many fewer.
        """
        under_way = self._record is not None and self.iterator is not None and not self._record.is_over
        position = self._resumed
        if position is None and under_way and self._record is not None:
            position = (self._whole or self._record).position(batches)
        return self._about() | {
            "rank": get_rank(self._group),
            "world_size": get_world_size(self._group),
            "passes": self._passes - (self._resumed is None and under_way),
            "generators": [plain_state(state) for state in states_of_generators(self._sources)],
            "has_workers": self._had_workers or self._keeps_workers(),
            "pass": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass begins at the batch after the last one used. Local.

        Every rank gives its own state, or, if the number of ranks has changed, rank 0's. The next ``iter()`` then draws
        again, without loading it, what was used; it leaves the global random state as it was.

        Raises:
            ConfigurationError: In the middle of a pass: the loader has another data set, or another batch size; or
                ``batch_size="per_process"``, and the number of ranks has changed.
        """
        if state["pass"] is not None:
            self._require_same(state)
        self.end()
        self.shares.clear()
        self._resumed, self._record = state["pass"], None
        self._passes, self._had_workers = state["passes"], state["has_workers"]
        set_generators(self._sources, state["generators"])

    def start_afresh(self) -> None:
        """Forget the position that :meth:`load_state_dict` has set: the next pass begins at the first batch. Local."""
        if self._resumed is not None:
            self._resumed, self._passes = None, self._passes + 1

    def __iter__(self) -> ShardedIterator:
        resumed, self._resumed = self._resumed, None
        self._record = Pass(self._sources, self._passes, get_rank(self._group), resumed)
        if self._had_workers and not self._keeps_workers():
            self._record.begin_from_here()
        self._had_workers = False
        if resumed is None:
            return self._begin(self._record)
        before = get_global_state(False)
        iterator = self._begin(self._record)
        self._record.has_begun()
        set_global_state(before)
        return iterator

    def _begin(self, record: Pass) -> ShardedIterator:
        self._part.record = record
        return super().__iter__()

    @property
    def _sources(self) -> tuple[Any, ...]:
        return self._part.sources

    @property
    def _part(self) -> Part | Whole:
        part = self._sliced or self._whole
        assert part is not None
        return part

    def _keeps_workers(self) -> bool:
        return isinstance(self._part.loader, DataLoader) and has_persistent_workers(self._part.loader)

    def _about(self) -> dict[str, Any]:
        try:
            samples = len(self.loader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            samples = None
        return {
            "samples": samples,
            "samples_per_batch": getattr(self.loader, "batch_size", None),
            "division": self._batch_size,
        }

    def _require_same(self, state: Mapping[str, Any]) -> None:
        about = self._about()
        for key, name in _NAMES.items():
            if state[key] != about[key]:
                raise ConfigurationError(
                    f"{name} must be {state[key]!r}, as in the run that was saved in the middle of a pass, got "
                    f"{about[key]!r}. Go on with the same loader, or start the pass afresh."
                )
        world_size = get_world_size(self._group)
        if self._batch_size == "per_process" and state["world_size"] != world_size:
            raise ConfigurationError(
                f'with batch_size="per_process" the number of processes must be {state["world_size"]}, as in the run '
                f"that was saved in the middle of a pass, got {world_size}: a step is of other samples. Go on with "
                f'{state["world_size"]}, or use batch_size="global".'
            )


class ResumableLoader(Resumable):
    """A sharded loader with a state."""


class ResumableDataLoader(Resumable, ShardedDataLoader):  # type: ignore[misc]
    """A sharded ``DataLoader`` with a state."""


def resumable_loader(
    loader: Any, batch_size: BatchSize = "global", group: dist.ProcessGroup | None = None, at_least: int = 1
) -> Any:
    """As :func:`ddp_callbacks.shard_loader`, with ``state_dict`` and ``load_state_dict``; also with a single process.

    A later run goes on at the next batch, on any number of processes (:class:`Resumable`). This call is local;
    iterating over the result is a collective.

    Args:
        loader, batch_size, group, at_least: See :func:`ddp_callbacks.shard_loader`.

    Raises:
        ConfigurationError: As there.
    """
    check_batch_size(batch_size)
    if loader is None or isinstance(loader, Resumable):
        return loader
    if isinstance(loader, ShardedLoader):
        loader = loader.loader
    kind = ResumableDataLoader if isinstance(loader, DataLoader) else ResumableLoader
    return kind(loader, batch_size, group, at_least)
