"""Loaders that go on where an earlier run has stopped, and are not divided before loading.

============================  =========================================================================================
``DataLoader`` with           map-style: its sampler is drawn again, and nothing that was done is loaded
``batch_size=None``
loader with a ``state_dict``  by its own ``state_dict``
any other iterable            produced again on every rank and dropped: this costs as much time as it took to produce
============================  =========================================================================================
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ddp_callbacks._torch import (
    copied_loader,
    keeps_iterator,
    replace_sampler,
    start_workers_for_each_pass,
)
from ddp_callbacks.data.before_loading import has_state
from ddp_callbacks.data.drawing import CountedSampler
from ddp_callbacks.data.global_state import plain_state
from ddp_callbacks.data.nested import arrays_in, length_of, name_of
from ddp_callbacks.data.passes import BatchEnd, Pass
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.data.samplers import is_torchs
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_world_size


class Whole:
    """A loader that produces whole batches, and the record of the pass. This one is of any iterable.

    Args:
        loader: The user's; it is not changed.
        group: Of the ranks, which all produce the same batches.

    Attributes:
        loader: What is iterated over: a copy if it is a ``DataLoader``.
        record: Of the pass under way.
        sources: What may have random generators in it.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None) -> None:
        self.loader: Any = copied_loader(loader) if isinstance(loader, DataLoader) else loader
        self.record: Pass | None = None
        self.sources: tuple[Any, ...] = (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None))
        self._group = group
        self._is_kept_apart = get_world_size(group) > 1 or not _draws_first(loader)
        if isinstance(loader, DataLoader) and type(self) is Whole:
            start_workers_for_each_pass(self.loader)  # or what they draw would depend on earlier passes

    def begin(self) -> SharedRandomState:
        """The state to draw from. A collective; call it before ``iter``."""
        assert self.record is not None
        self.record.before_drawing()
        shared = SharedRandomState(self.sources, group=self._group, always=self._is_kept_apart)
        self.record.draws_from(shared)
        return shared

    def skip(self, batches: Iterator[Any], shared: SharedRandomState) -> None:
        """Leave out what an earlier run has done. Call it after ``iter``."""
        assert self.record is not None
        if drawn := self.record.done.drawn:
            with shared.drawing():
                batch = next(itertools.islice(batches, drawn - 1, None), None)
            self.record.require_same(self.end_of(batch, drawn), name_of(self.loader))
        self.record.has_drawn()

    def will_produce(self) -> None:
        """Call it before each batch."""
        assert self.record is not None
        self.record.will_draw()

    def end_of(self, batch: Any, drawn: int) -> BatchEnd:
        """Where the loader is after a batch. Call it when the batch has been produced.

        Args:
            batch: The last one.
            drawn: The number of batches.
        """
        assert self.record is not None
        self.record.has_drawn()
        return BatchEnd(drawn, checksum_of_content(batch))

    def hand_out(self, end: BatchEnd, shared: SharedRandomState) -> None:
        """A step of one or more batches has been handed out."""
        assert self.record is not None
        self.record.hand_out(end, self._beside(shared))

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        assert self.record is not None
        return self.record.position(batches)

    def _beside(self, shared: SharedRandomState) -> Any:
        """What else the state after a batch needs."""
        return None


class IndexedWhole(Whole):
    """A ``DataLoader`` that loads one index of a map-style data set at a time: ``batch_size=None``."""

    def __init__(self, loader: DataLoader[Any], group: dist.ProcessGroup | None) -> None:
        super().__init__(loader, group)
        self._is_kept_apart = get_world_size(group) > 1  # its sampler's draws are kept apart from it
        self.sources = (loader, loader.sampler)
        self._counted = CountedSampler(loader.sampler, is_alike=True, has_workers=loader.num_workers > 0)
        replace_sampler(self.loader, self._counted)

    def begin(self) -> SharedRandomState:
        self._counted.record = self.record
        return SharedRandomState([*self.sources, self.loader.dataset], group=self._group, always=self._is_kept_apart)

    def skip(self, batches: Iterator[Any], shared: SharedRandomState) -> None:
        assert self.record is not None
        if self.record.can_skip:
            with shared.drawing():
                self._counted.drawing.begin()
        if self._is_kept_apart and self.record.beside:
            shared.state = self.record.beside
        self.record.begin_beside(self._beside(shared))

    def will_produce(self) -> None:
        pass  # its sampler notices

    def end_of(self, batch: Any, drawn: int) -> BatchEnd:
        return self._counted.draw.ends.popleft()

    def position(self, batches: int | None) -> dict[str, Any]:
        position = super().position(batches)
        beside = position["beside"]
        return position | {"beside": plain_state(beside) if beside else None}

    def _beside(self, shared: SharedRandomState) -> Any:
        return shared.state if self._is_kept_apart else None


class StatefulWhole(Whole):
    """A loader with a ``state_dict`` of its own, such as torchdata's ``StatefulDataLoader``."""

    def begin(self) -> SharedRandomState:
        assert self.record is not None
        if self.record.beside:
            self.loader.load_state_dict(self.record.beside["loader"])
        return super().begin()

    def skip(self, batches: Iterator[Any], shared: SharedRandomState) -> None:
        assert self.record is not None
        if self._is_kept_apart and self.record.beside and self.record.beside["drawing"]:
            shared.state = self.record.beside["drawing"]
        self.record.has_drawn()
        self.record.begin_beside(self._beside(shared))

    def end_of(self, batch: Any, drawn: int) -> BatchEnd:
        assert self.record is not None
        self.record.has_drawn()
        return BatchEnd(drawn, 0)

    def position(self, batches: int | None) -> dict[str, Any]:
        assert self.record is not None
        position = super().position(batches)
        drawing, state = position["beside"]
        if state is None and position["batches"] < self.record.handed_out:
            raise ConfigurationError(
                f"batches must be {self.record.handed_out}, those handed out, as a state of {name_of(self.loader)} is "
                f"that after its last batch, got {batches}. Draw no batch ahead from a loader that knows its length."
            )
        loader = self.loader.state_dict() if state is None else state
        return position | {"beside": {"drawing": drawing and plain_state(drawing), "loader": loader}}

    def _beside(self, shared: SharedRandomState) -> Any:
        # Hosts draw ahead only if they do not know the number of batches.
        state = self.loader.state_dict() if length_of(self.loader) is None else None
        return shared.state if self._is_kept_apart else None, state


def whole_of(loader: Any, group: dist.ProcessGroup | None) -> Whole:
    """How a loader that is not divided before loading goes on."""
    if isinstance(loader, DataLoader) and keeps_iterator(loader):
        raise ConfigurationError(
            f"{type(loader).__name__} keeps an iterator of its own from pass to pass, and where it is cannot be saved. "
            "Use a plain DataLoader with persistent_workers=True, or do not make the run resumable."
        )
    if has_state(loader):
        return StatefulWhole(loader, group)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return IndexedWhole(loader, group)
    return Whole(loader, group)


def _draws_first(loader: Any) -> bool:
    """Whether the order is drawn before anything is loaded; what loading draws is then no business of the order's."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    samplers = loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return all(is_torchs(sampler) or type(sampler).__module__.startswith("torchdata.") for sampler in samplers)


def checksum_of_content(batch: Any) -> int:
    """Of the first numbers in each tensor and array of a batch in memory."""
    checksum = 0
    for array in arrays_in(batch):
        if isinstance(array, torch.Tensor) and (array.is_sparse or array.device.type != "cpu"):
            continue
        raw = array.detach().reshape(-1)[:64] if isinstance(array, torch.Tensor) else array.reshape(-1)[:64]
        checksum = zlib.crc32(repr((tuple(array.shape), raw.tolist())).encode(), checksum)
    return checksum
