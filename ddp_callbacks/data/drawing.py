"""Draw indices from a sampler: again, where an earlier run has stopped, and with a checksum of each batch."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.passes import BatchEnd, Pass
from ddp_callbacks.data.random_state import OwnRandomState, SharedRandomState
from ddp_callbacks.data.samplers import batches_from, is_torchs


class Draw:
    """One pass over a sampler.

    Attributes:
        ends: Where the sampler was after each batch that has been drawn and not handed out.
        end: Where it is.
        checksum: Of all indices drawn.
    """

    def __init__(self) -> None:
        self.ends: deque[BatchEnd] = deque()
        self.end = BatchEnd(0, 0)
        self.checksum = 0

    def batches(self, sampler: Any, shared: SharedRandomState, record: Pass | None) -> Iterator[Any]:
        """The batches that are left, each drawn when it is asked for. What an earlier run has done is drawn here."""
        done = record.done if record else BatchEnd(0, 0)
        with shared.drawing():
            batches = batches_from(sampler, max(0, done.drawn - 1))
            if done.drawn:
                self.end = BatchEnd(done.drawn, checksum_of(next(batches, ())))
        if record is not None:
            record.require_same(self.end, name_of_sampler(sampler))
            record.has_drawn()
        return self._left(batches, shared, record)

    def _left(self, batches: Iterator[Any], shared: SharedRandomState, record: Pass | None) -> Iterator[Any]:
        while True:
            if record is not None:
                record.will_draw()
            with shared.drawing():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            checksum = checksum_of(batch)
            self.checksum = zlib.crc32(repr(checksum).encode(), self.checksum)
            self.end = BatchEnd(self.end.drawn + 1, checksum)
            if record is not None:
                record.has_drawn()
            yield batch


class Indices(Iterator[Any]):
    """What a sampler yields to a ``DataLoader``. Nothing is drawn before the first :meth:`begin` or ``next``."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin, self._indices = begin, iter(())
        self._has_begun = False

    def begin(self) -> None:
        """Share rank 0's random state, and skip what an earlier run has done. A collective."""
        if not self._has_begun:
            self._has_begun = True
            self._indices = self._begin()

    def __next__(self) -> Any:
        self.begin()
        return next(self._indices)


class CountedSampler:
    """Stands for the sampler or batch sampler of a ``DataLoader`` that is not divided before loading.

    Args:
        sampler: What yields the indices of each batch. If all ranks load the same batches, they have the same global
            random state when they draw.
        is_alike: They do, so their workers draw alike.
        has_workers: The loader has workers.
    """

    def __init__(self, sampler: Any, *, is_alike: bool, has_workers: bool) -> None:
        self.sampler = sampler
        self.record: Pass | None = None
        self.draw = Draw()
        self.drawing = Indices(lambda: iter(()))
        self._is_alike, self._has_workers = is_alike, has_workers

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        assert self.record is not None
        draw, record = Draw(), self.record
        self.draw, self.drawing = draw, Indices(lambda: self._begin(draw, record))
        return self.drawing

    def _begin(self, draw: Draw, record: Pass) -> Iterator[Any]:
        record.before_drawing()
        inner = getattr(self.sampler, "sampler", None)
        shared = OwnRandomState(torch_only=is_torchs(self.sampler) and is_torchs(inner))
        record.draws_from(shared)
        if self._is_alike:
            record.draw_alike(shared)
        return self._yield_counted(draw.batches(self.sampler, shared, record), draw, record)

    def _yield_counted(self, batches: Iterator[Any], draw: Draw, record: Pass) -> Iterator[Any]:
        for batch in batches:
            draw.ends.append(draw.end)
            yield record.for_worker(batch, draw.end.drawn) if self._has_workers else batch


def name_of_sampler(sampler: Any) -> str:
    """The class that draws: that of the batch sampler, or of the sampler in torch's own."""
    inner = getattr(sampler, "sampler", None)
    return type(sampler if inner is None or not is_torchs(sampler) else inner).__name__
