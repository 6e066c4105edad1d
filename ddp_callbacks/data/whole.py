"""Loaders whose batches every rank produces, whole and alike: how they draw, and how they go on in a later run.

============================  =========================================================================================
loader with a ``state_dict``  goes on by its own ``state_dict``
any other iterable            is produced again on every rank and dropped: this costs as much time as it took to produce
============================  =========================================================================================
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_callbacks._torch import copied_loader, keeps_iterator, start_workers_for_each_pass
from ddp_callbacks.data.before_loading import has_state, require_kept
from ddp_callbacks.data.global_state import RandomStates, plain_state, states_of_generators
from ddp_callbacks.data.nested import arrays_in, length_of, name_of
from ddp_callbacks.data.order import Start
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError

_KEPT = 16  # of the last batches handed out; a host may have drawn this many that it has not used


class Whole:
    """A loader that produces whole batches.

    Args:
        loader: The user's; it is not changed.
        group: Of the ranks, which all produce the same batches.

    Attributes:
        loader: What is iterated over.
        sources: What may have random generators.
        drawn: The number of batches that it has produced in this pass.
        is_over: The pass has no batch left.
        limit: The number of batches to take of each pass; ``None``: all.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None) -> None:
        self.loader: Any = loader
        self.sources: tuple[Any, ...] = (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None))
        self._group = group
        self.drawn = 0
        self.is_over = False
        self.limit: int | None = None

    def begin(self) -> SharedRandomState:
        """The state to draw from. A collective; call it before ``iter``."""
        self.drawn, self.is_over = 0, False
        return SharedRandomState(self.sources, group=self._group)

    def skip(self, batches: Iterator[Any]) -> None:
        """Leave out what an earlier run has done. Call it after ``iter``."""

    def has_produced(self, batch: Any) -> None:
        """Call it for each batch."""
        self.drawn += 1

    def hand_out(self) -> None:
        """A step of one or more batches has been handed out."""


class ResumableWhole(Whole):
    """As :class:`Whole`, with a state. This one is of any iterable.

    Attributes:
        start: Of the next pass.
    """

    start: Start | None

    def __init__(self, loader: Any, group: dist.ProcessGroup | None) -> None:
        super().__init__(loader, group)
        if isinstance(loader, DataLoader):
            self.loader = copied_loader(loader)
        self._handed_out = 0
        self._begin: RandomStates | None = None
        self._last = 0  # the checksum of the last batch
        self._ends: deque[dict[str, Any]] = deque(maxlen=_KEPT)  # where the loader was after each step

    def begin(self) -> SharedRandomState:
        super().begin()
        if position := self._resumed:
            RandomStates.from_plain(position["begin"]).put_back(self.sources)
        # Kept apart with a single process, too: other draws in between must not change what is produced again.
        self._shared = SharedRandomState(self.sources, group=self._group, always=True)
        self._begin = RandomStates(self._shared.state, states_of_generators(self.sources))
        return self._shared

    @property
    def _resumed(self) -> Any:
        return self.start.position if self.start else None

    def skip(self, batches: Iterator[Any]) -> None:
        position = self._resumed or {"batches": 0, "drawn": 0}
        self._handed_out, self.drawn = position["batches"], position["drawn"]
        self._go_to(position, batches)
        self._ends.clear()
        self._ends.append(self._end())
        if self.start and self._resumed:
            self.start.before.put_back(self.sources)

    def _go_to(self, position: dict[str, Any], batches: Iterator[Any]) -> None:
        if not self.drawn:
            return
        with self._shared.drawing():
            self._last = checksum_of_content(next(itertools.islice(batches, self.drawn - 1, None), None))
        if self._last != position["checksum"]:
            raise ConfigurationError(
                f"{name_of(self.loader)} does not yield the batches of the run that was saved: batch {self.drawn - 1} "
                f"of the pass has the checksum {self._last}, and had {position['checksum']}. Go on with the data set "
                "and the batch size of that run, and take its randomness from torch's, Python's or NumPy's global "
                "random state, or from generators that are its attributes."
            )

    def has_produced(self, batch: Any) -> None:
        super().has_produced(batch)
        self._last = checksum_of_content(batch)

    def hand_out(self) -> None:
        self._handed_out += 1
        self._ends.append(self._end())

    def _end(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "checksum": self._last, "generators": states_of_generators(self.sources)}

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        assert self._begin is not None
        used = self._handed_out if batches is None else batches
        require_kept(used, self._handed_out - len(self._ends) + 1, self._handed_out)
        end = self._ends[used - self._handed_out - 1]
        generators = states_of_generators(self.sources) if used == self._handed_out else end["generators"]
        plain = [plain_state(state) for state in generators]
        return {"batches": used, "begin": self._begin.plain(), **end, "generators": plain}


class StatefulWhole(ResumableWhole):
    """A loader with a ``state_dict`` of its own, such as torchdata's ``StatefulDataLoader``."""

    def begin(self) -> SharedRandomState:
        if position := self._resumed:
            self.loader.load_state_dict(position["loader"])
        return super().begin()

    def _go_to(self, position: dict[str, Any], batches: Iterator[Any]) -> None:
        if self._resumed:
            self._shared.state = position["drawing"]

    def _end(self) -> dict[str, Any]:
        # Hosts draw ahead only if they do not know the number of batches.
        state = self.loader.state_dict() if length_of(self.loader) is None else None
        return super()._end() | {"drawing": plain_state(self._shared.state), "loader": state}

    def position(self, batches: int | None) -> dict[str, Any]:
        position = super().position(batches)
        if position["loader"] is None and position["batches"] < self._handed_out:
            raise ConfigurationError(
                f"batches must be {self._handed_out}, those handed out, as a state of {name_of(self.loader)} is "
                f"that after its last batch, got {batches}. Draw no batch ahead from a loader that knows its length."
            )
        return position | {"loader": position["loader"] or self.loader.state_dict()}


def resumable_whole(loader: Any, group: dist.ProcessGroup | None) -> ResumableWhole:
    """How a loader that is not divided before loading goes on."""
    if isinstance(loader, DataLoader) and keeps_iterator(loader):
        raise ConfigurationError(
            f"{type(loader).__name__} keeps an iterator of its own from pass to pass, and where it is cannot be saved. "
            "Use a plain DataLoader with persistent_workers=True, or do not make the run resumable."
        )
    if has_state(loader):
        return StatefulWhole(loader, group)
    whole = ResumableWhole(loader, group)
    if isinstance(loader, DataLoader):
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
