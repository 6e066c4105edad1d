"""The time of this process, apart from that in which it waits for other ranks. Local."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar


class Stopwatch:
    """Counts the seconds of laps, and of the waits in them.

    Attributes:
        waited: The seconds of all waits of this process that have ended.
        since: When a wait began that has not ended.
        listeners: What to call after a wait, with its begin and its end.
    """

    waited: ClassVar[float] = 0.0
    since: ClassVar[float | None] = None
    listeners: ClassVar[list[Callable[[float, float], None]]] = []

    def __init__(self) -> None:
        self._last, self._waited = time.perf_counter(), Stopwatch.waited

    def lap(self) -> tuple[float, float, float]:
        """Return when the last lap ended, when this one ends, which is now, and the seconds of the waits in it."""
        begin, waited = self._last, self._waited
        self._last, self._waited = time.perf_counter(), Stopwatch.waited
        return begin, self._last, self._waited - waited

    def running(self) -> tuple[float, float]:
        """Return the seconds of the lap until now, and those of its waits, also of one that has not ended."""
        now, since = time.perf_counter(), Stopwatch.since
        return now - self._last, Stopwatch.waited - self._waited + (0.0 if since is None else now - since)


def begin_wait() -> None:
    """Note that this process waits for others from now on."""
    Stopwatch.since = time.perf_counter()


def end_wait() -> None:
    """Note that it does not wait any more."""
    begin, end = Stopwatch.since, time.perf_counter()
    Stopwatch.since = None
    if begin is not None:
        Stopwatch.waited += end - begin
        for listener in Stopwatch.listeners:
            listener(begin, end)
