"""The time of this process, apart from that in which it waits for other ranks. Local."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar


class Stopwatch:
    """Counts the seconds of laps, and of the waits in them.

    Attributes:
        waited: The seconds of all waits of this process so far.
        listeners: What to call after a wait, with its begin and its end.
    """

    waited: ClassVar[float] = 0.0
    listeners: ClassVar[list[Callable[[float, float], None]]] = []

    def __init__(self) -> None:
        self._last, self._waited = time.perf_counter(), Stopwatch.waited

    def lap(self) -> tuple[float, float, float]:
        """Return when the last lap ended, when this one ends, which is now, and the seconds of the waits in it."""
        begin, waited = self._last, self._waited
        self._last, self._waited = time.perf_counter(), Stopwatch.waited
        return begin, self._last, self._waited - waited


def note_wait(begin: float) -> None:
    """Note that this process has waited for others since ``begin``, by :func:`time.perf_counter`."""
    end = time.perf_counter()
    Stopwatch.waited += end - begin
    for listener in Stopwatch.listeners:
        listener(begin, end)
