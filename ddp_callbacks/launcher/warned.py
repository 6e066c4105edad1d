"""Show what ranks warn of that are not shown, unless one that is shown warns of the same."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ddp_callbacks.launcher.streams import Output

_WITHIN = 5.0  # seconds in which the ranks come to the same line, also while they import


class Warned:
    """This library's warnings of all ranks, each to be shown once.

    Args:
        output: Knows whose output is shown.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown = set[str]()
        self._held: dict[str, tuple[float, str, int]] = {}  # by text: when to show it, node and rank

    def hear(self, node: str, rank: int, text: str) -> None:
        """Take a warning that a rank has printed."""
        if self._output.shows(rank):
            self._shown.add(text)
        else:
            self._held.setdefault(text, (time.monotonic() + _WITHIN, node, rank))

    def due(self, now: float) -> Iterator[tuple[str, int, str]]:
        """Yield node, rank and text of each warning that nobody has seen, and that is to be shown by ``now``."""
        for text in [text for text, (when, *_) in self._held.items() if when <= now]:
            _, node, rank = self._held.pop(text)
            if text not in self._shown:
                self._shown.add(text)
                yield node, rank, text
