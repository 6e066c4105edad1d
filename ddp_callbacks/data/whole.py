"""Loaders whose batches every rank produces, whole and alike: how they draw, and how they go on in a later run.

============================  =========================================================================================
with ``state_dict``, length   goes on by its own ``state_dict``
any other iterable            is produced again on every rank and dropped: this costs as much time as it took to produce
============================  =========================================================================================
"""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_callbacks._torch import copied_loader, keeps_iterator, start_workers_for_each_pass
from ddp_callbacks.data.before_loading import has_state, used_of
from ddp_callbacks.data.global_state import RandomStates, plain_state, states_of_generators
from ddp_callbacks.data.nested import arrays_in, length_of, name_of
from ddp_callbacks.data.order import Start
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError


class Whole:
    """A loader that produces whole batches.

    Args:
        loader: The user's; it is not changed.
        group: Of the ranks, which all produce the same batches.
        per_step: The number of batches of a step.

    Attributes:
        loader: What is iterated over.
        sources: What may have random generators.
        start: Of the next pass, if the loader is resumable.
        drawn: The number of batches that it has produced in this pass.
        is_over: The pass has no batch left.
        limit: The number of batches to take of each pass; ``None``: all.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None, per_step: int) -> None:
        self.loader: Any = loader
        self.sources: tuple[Any, ...] = (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None))
        self.start: Start | None = None
        self.drawn = self._handed_out = 0
        self.is_over = False
        self.limit: int | None = None
        self._group, self._per_step = group, per_step
        self._first = 0  # the checksum of the first batch

    def begin(self) -> SharedRandomState:
        """The state to draw from. A collective; call it before ``iter``."""
        self.drawn, self._handed_out, self.is_over = 0, 0, False
        if position := self._resumed:
            RandomStates.from_plain(position["begin"]).put_back(self.sources)
        # Kept apart with a single process, too: other draws in between must not change what is produced again.
        self._shared = SharedRandomState(self.sources, group=self._group, always=self.start is not None)
        self._begin = RandomStates(self._shared.state, states_of_generators(self.sources))
        return self._shared

    @property
    def _resumed(self) -> Any:
        return self.start.position if self.start else None

    def skip(self, batches: Iterator[Any]) -> None:
        """Leave out what an earlier run has done. Call it after ``iter``."""
        if position := self._resumed:
            self.drawn, self._handed_out, self._first = position["drawn"], position["batches"], position["first"]
            self._go_on(position, batches)

    def _go_on(self, position: Mapping[str, Any], batches: Iterator[Any]) -> None:
        if not self.drawn:
            return
        with self._shared.drawing():
            found = checksum_of_content(next(batches, None))
            collections.deque(itertools.islice(batches, self.drawn - 1), maxlen=0)
        if found != self._first:
            raise ConfigurationError(
                f"{name_of(self.loader)} does not yield the batches of the run that was saved: the first batch of the "
                f"pass has the checksum {found}, and had {self._first}. Resume with the data set and the batch size of "
                "that run, and take its randomness from torch's, Python's or NumPy's global random state, or from "
                "generators that are its attributes."
            )

    def has_produced(self, batch: Any) -> None:
        """Call it for each batch."""
        if self.start is not None and not self.drawn:
            self._first = checksum_of_content(batch)
        self.drawn += 1

    def hand_out(self) -> None:
        """A step of one or more batches has been handed out."""
        self._handed_out += 1

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        used = used_of(batches, self._handed_out)
        drawn = min(used * self._per_step, self.drawn)
        return {"batches": used, "drawn": drawn, "first": self._first, "begin": self._begin.plain()}


class StatefulWhole(Whole):
    """A loader with a ``state_dict`` of its own, such as torchdata's ``StatefulDataLoader``."""

    def begin(self) -> SharedRandomState:
        if position := self._resumed:
            self.loader.load_state_dict(position["loader"])
        return super().begin()

    def _go_on(self, position: Mapping[str, Any], batches: Iterator[Any]) -> None:
        assert self.start is not None
        self._shared.state = position["drawing"]
        self.start.before.put_back(self.sources)

    def position(self, batches: int | None) -> dict[str, Any]:
        if batches not in (None, self._handed_out):
            raise ConfigurationError(
                f"batches must be {self._handed_out}, those handed out, as a state of {name_of(self.loader)} is "
                f"that after its last batch, got {batches}. Draw no batch ahead from it."
            )
        state = {"drawing": plain_state(self._shared.state), "loader": self.loader.state_dict()}
        return super().position(batches) | state


def resumable_whole(loader: Any, group: dist.ProcessGroup | None, per_step: int) -> Whole:
    """How a loader that is not divided before loading goes on."""
    if isinstance(loader, DataLoader) and keeps_iterator(loader):
        raise ConfigurationError(
            f"{type(loader).__name__} keeps an iterator of its own from pass to pass, and where it is cannot be saved. "
            "Use a plain DataLoader with persistent_workers=True, or do not make the run resumable."
        )
    # Hosts draw a batch ahead from a loader without a length, and its state would be that after this batch.
    is_stateful = has_state(loader) and length_of(loader) is not None
    whole = (StatefulWhole if is_stateful else Whole)(loader, group, per_step)
    if isinstance(loader, DataLoader):
        whole.loader = copied_loader(loader)
        if not is_stateful:
            start_workers_for_each_pass(whole.loader)  # or what they draw would depend on earlier passes
    return whole


def checksum_of_content(batch: Any) -> int:
    """Of the first numbers in each tensor and array of a batch in memory."""
    checksum = 0
    for array in arrays_in(batch):
        if isinstance(array, torch.Tensor) and (array.is_sparse or array.device.type != "cpu"):
            continue
        raw = array.detach().reshape(-1)[:64] if isinstance(array, torch.Tensor) else array.reshape(-1)[:64]
        checksum = zlib.crc32(repr((tuple(array.shape), raw.tolist())).encode(), checksum)
    return checksum
