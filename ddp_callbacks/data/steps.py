"""How the batches of a pass become the steps of each rank. No communication.

============  =====================================================================================================
division      what a rank gets
============  =====================================================================================================
global        its slice of each batch
per_process   whole batches in turn
dealt         the same, without padding at the end: for predictions
own           each batch: they are its own, of a ``DistributedSampler``
============  =====================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ddp_callbacks.data.shares import Share, slice_bounds

Division = Literal["global", "per_process", "dealt", "own"]


class Step(NamedTuple):
    """One step of a rank.

    Attributes:
        batches: Those of all ranks; empty: unknown here.
        part: What this rank gets.
        share: The part's.
    """

    batches: list[Any]
    part: Any
    share: Share


@dataclass(frozen=True)
class Divider:
    """Divides batches, or the lists of their indices.

    Attributes:
        division: See above.
        rank, world_size: Which part, and the number of parts.
        at_least: See :func:`ddp_callbacks.shard_loader`.
    """

    division: Division
    rank: int
    world_size: int
    at_least: int = 1

    @property
    def per_step(self) -> int:
        """The number of batches of a step."""
        return self.world_size if self.division in ("per_process", "dealt") else 1

    def steps(
        self, batches: Iterator[Any], size_of: Callable[[Any], int], part_of: Callable[[Any, slice], Any]
    ) -> Iterator[Step]:
        """This rank's steps.

        Args:
            size_of: The number of samples in a batch.
            part_of: Some samples of a batch.
        """
        while step := list(itertools.islice(batches, self.per_step)):
            sizes = list(map(size_of, step))
            total = sum(sizes)
            if self.division == "own":
                yield Step([], step[0], Share(total, None))
            elif self.division == "global":
                start, end = slice_bounds(total, self.rank, self.world_size, self.at_least)
                # The padding batch is the whole batch. It has too few samples for all ranks, but as many as a single
                # process sees.
                is_whole = end - start in (0, total)
                part = step[0] if is_whole else part_of(step[0], slice(start, end))
                yield Step(step, part, Share(end - start, total))
            elif self.rank < len(step):
                local = sizes[self.rank]
                yield Step(step, step[self.rank], Share(local, local if self.division == "dealt" else total))
            elif self.division == "per_process":
                yield Step(step, step[0], Share(0, total))

    def to_compare(self, size: int) -> tuple[slice, Share]:
        """This rank's part of a batch whose gradient is compared with that of the whole batch.

        Rank 0 has about twice as much as another, if possible: equal parts would hide wrong weights.
        """
        parts = self.world_size + 1
        start, _ = slice_bounds(size, self.rank + bool(self.rank), parts, self.at_least)
        _, end = slice_bounds(size, self.rank + 1, parts, self.at_least)
        return slice(start, end) if end > start else slice(0, size), Share(end - start, size)
