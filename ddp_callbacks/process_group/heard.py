"""What a rank has heard from rank 0, for the threads that wait for it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ddp_callbacks.process_group.connection import Message
from ddp_callbacks.process_group.coordinator import FOREVER

_NAMES = 2.0  # seconds that we wait for the names of the ranks, for a message


class Heard:
    """What a rank has heard.

    Attributes:
        ends: What has ended runs, by their number.
        words: What rank 0 has said last about a wait, by its purpose.
        missing: The ranks that have not joined yet.
        names: Of all ranks, once all have joined.
        closing: What rank 0 said when it left, after which nothing more is heard.
    """

    def __init__(self) -> None:
        self.ends: dict[int, Message] = {}
        self.words: dict[str, Message] = {}
        self.closing: Message | None = None
        self.missing: list[int] = []
        self.names: list[str] = []
        self._gatherings: weakref.WeakValueDictionary[str, Gathering] = weakref.WeakValueDictionary()
        self._count = 0
        self._news = threading.Condition()

    def note(self, message: Message) -> None:
        """Note a message, and wake those that wait."""
        event = message["event"]
        with self._news:
            if event == "end":
                self.ends.setdefault(message["run"], message)
            elif event == "names":
                self.names = message["names"]
            elif event == "missing":
                self.missing = message["ranks"]
            elif event == "gathered" and (gathering := self._gatherings.get(message["name"])):
                gathering.values = message["values"]
            elif event in ("absent", "because"):
                self.words[message["doing"]] = message
            elif event == "closing":
                self.closing = message["leaver"]
            self._count += 1
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait up to ``seconds`` until ``condition`` is true after a message; return it."""
        with self._news:
            return self._news.wait_for(condition, seconds)

    def wait_for_news(self, condition: Callable[[], Any], seconds: float) -> Any:
        """As :meth:`wait_for`, but return after any message."""
        before = self._count
        self.wait_for(lambda: condition() or self._count != before, seconds)
        return condition()

    def expect(self, name: str, timeout: timedelta) -> Gathering:
        """A gathering of this name; to be called before this rank puts its part."""
        with self._news:
            gathering = self._gatherings[name] = Gathering(self, timeout)
            return gathering

    def forget(self, run: int) -> None:
        """Forget what concerns the runs before ``run``."""
        with self._news:
            self.ends = {number: end for number, end in self.ends.items() if number >= run or number == FOREVER}
            self.words.clear()

    def name_of(self, rank: int) -> str:
        """``rank 1 (host node2, pid 4711)``; shorter where the ranks have not heard of each other."""
        names = self.wait_for(lambda: self.names or self.closing or self.ends, _NAMES) and self.names
        return names[rank] if names else f"rank {rank}"


class Gathering:
    """A value of each rank, as something to wait for.

    Attributes:
        values: By rank, once they are all here; none before.
    """

    def __init__(self, heard: Heard, timeout: timedelta) -> None:
        self.values: list[Any] = []
        self._heard, self._timeout, self._since = heard, timeout, time.monotonic()

    def wait_slice(self, seconds: float) -> bool:
        """See :class:`.failures.Waitable`. Returns early if there are news."""
        if self._heard.wait_for_news(lambda: self.values, seconds):
            return True
        if self._heard.closing:
            raise RuntimeError("rank 0 has left")
        if time.monotonic() - self._since > self._timeout.total_seconds():
            raise RuntimeError(f"not every rank came within {self._timeout}")
        return False
