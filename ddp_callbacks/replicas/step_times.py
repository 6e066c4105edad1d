"""How long each rank computes in a step before it waits for the others, and which rank is slow. Local.

On GPUs these are the times of the host, which does not see how long its GPU computes: only "between steps" says much.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from ddp_callbacks.reporting.recorder import WAITING, recorder
from ddp_callbacks.reporting.stopwatch import Stopwatch

Part = Literal["between steps", "in forward", "in backward"]
"""From the last wait to the next batch (optimizer, hooks, loading), then until backward, then until the next wait."""

_FACTOR = 1.5
_PATIENCE, _AT_LEAST = 60.0, 3  # seconds, and steps: one that stops for a minute is not slow


class StepTimes:
    """The seconds of a step of this rank by part, without its waits.

    Args:
        module: The module that is trained.
        settings: How its gradients are synchronized, for the report.
    """

    def __init__(self, module: Any = None, **settings: object) -> None:
        self._seconds = dict.fromkeys(get_args(Part), 0.0)  # of this step
        self._sums = self._longest = [0.0] * len(self._seconds)
        self._count = 0
        self._watch = Stopwatch()
        self._recorder = recorder()
        if self._recorder is not None and module is not None:
            self._recorder.describe(module, settings)

    def mark(self, part: Part | None) -> None:
        """Count the seconds since the last mark as those of ``part``; of no part with ``None``, after a sum."""
        begin, end, waited = self._watch.lap()
        if part is not None:
            self._seconds[part] += end - begin - waited
        if self._recorder is not None:
            self._recorder.mark(part or WAITING)

    def note_epoch(self, epoch: int) -> None:
        """Note the number of the epoch, from 0: passes may be repeated."""
        if self._recorder is not None:
            self._recorder.progress.epoch = epoch

    def launch(self, bucket: int) -> None:
        """Note that the sum of a bucket begins."""
        if self._recorder is not None:
            self._recorder.launch(bucket)

    def finish(self, bucket: int) -> None:
        """Note that this rank has waited for the sum of a bucket."""
        if self._recorder is not None:
            self._recorder.finish(bucket)

    def end_step(self) -> None:
        """Note that a step is over."""
        self.mark("between steps")
        own = list(self._seconds.values())
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._sums, self._count = [a + b for a, b in zip(self._sums, own, strict=True)], self._count + 1
        self._longest = max(self._longest, own, key=sum)

    def take(self) -> list[float]:
        """Return the mean seconds of each part without the longest step, a checkpoint maybe, and begin again."""
        others = self._count - 1
        left = [(whole - own) / others for whole, own in zip(self._sums, self._longest, strict=True)] if others else []
        taken = left or self._sums
        self._sums = self._longest = [0.0] * len(self._seconds)
        self._count = 0
        return taken


class Stragglers:
    """Finds ranks that take 1.5 times as long as the median for a minute; with two ranks, as the other.

    Of an even number of ranks, the median is the faster of the two in the middle.
    """

    def __init__(self) -> None:
        self._slow: dict[int, tuple[float, int]] = {}  # for how many seconds and steps

    def note(self, seconds: float, steps: int, times: Sequence[Sequence[float]]) -> Iterator[tuple[int, str]]:
        """Yield each rank that has been slow for a minute now, and what to say. Not again until it was fast.

        Args:
            seconds, steps: How long the last call is ago.
            times: For each rank, what :meth:`StepTimes.take` has returned.
        """
        totals = [sum(own) for own in times]
        usual = statistics.median_low(totals)
        for rank, total in enumerate(totals):
            before = self._slow.pop(rank, (0.0, 0))
            if total > _FACTOR * usual > 0:
                self._slow[rank] = before[0] + seconds, before[1] + steps
                if _is_lasting(*self._slow[rank]) and not _is_lasting(*before):
                    yield rank, _line(total / usual, times[rank], times)


def _is_lasting(seconds: float, steps: int) -> bool:
    return seconds >= _PATIENCE and steps >= _AT_LEAST


def _line(factor: float, own: Sequence[float], times: Sequence[Sequence[float]]) -> str:
    usual = map(statistics.median_low, zip(*times, strict=True))
    parts = zip(get_args(Part), own, usual, strict=True)
    part, mine, others = max(parts, key=lambda each: each[1] - each[2])
    where = "loading or between steps" if part == "between steps" else part
    measure = "median" if len(times) > 2 else "other rank"
    return (
        f"has taken {factor:.1f} times as long for a step as the {measure}, for a minute now; most of it {where} "
        f"({_in_ms(mine)}, {measure} {_in_ms(others)})"
    )


def _in_ms(seconds: float) -> str:
    return f"{float(f'{seconds * 1e3:.3g}'):g} ms"  # three digits, but 1200 instead of 1.2e+03
