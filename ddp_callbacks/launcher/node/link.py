"""The node's end of the connection to the launcher: messages on standard input and standard output."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddp_callbacks.launcher.node.reports import Report

GREETING = b"\0ddprun\0"  # the end of the first line; a login shell may print something before it
MOST = 1 << 16  # bytes to read or write at once, as many as a pipe holds
_ENOUGH = 1 << 20  # bytes that wait for the launcher; beyond that, the job's writes wait


def encode(*message: Any) -> bytes:
    """Encode a message as :mod:`ddp_callbacks.launcher.node` describes it."""
    return os.fsencode(json.dumps(message, ensure_ascii=False)) + b"\n"


class Link:
    """The connection to the launcher. Neither reading nor writing blocks.

    Attributes:
        is_open: Whether the launcher is still there.
        silence: Seconds without a message after which the launcher counts as gone.
    """

    def __init__(self) -> None:
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        self.is_open = True
        self.silence = math.inf
        self._heard = time.monotonic()
        self._inbox = b""
        self._outbox = bytearray(GREETING + b"\n")

    @property
    def has_more(self) -> bool:
        """Whether data waits to be written."""
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        return len(self._outbox) >= _ENOUGH

    @property
    def is_silent(self) -> bool:
        """Whether the launcher has been silent for too long."""
        return self.is_open and time.monotonic() - self._heard > self.silence

    def messages(self) -> Iterator[tuple[str, int | None, list[Any], dict[str, Any]]]:
        """Yield the messages that have arrived; at the end of standard input, close the link."""
        # None if there is no data. os.read would miss data that was read ahead with this program.
        data: bytes | None = sys.stdin.buffer.read(MOST)
        if data == b"":
            self.close()
        if data:
            self._heard = time.monotonic()
            *lines, self._inbox = (self._inbox + data).split(b"\n")
            yield from (json.loads(os.fsdecode(line)) for line in lines)

    def tell(self, report: Report) -> None:
        """Queue a report for :meth:`write`; no effect once the launcher is gone."""
        self._queue(type(report).__name__, *report)

    def answer(self, question: int | None, values: dict[str, Any]) -> None:
        """Queue the answer to a question."""
        self._queue("answer", question, values)

    def _queue(self, *message: Any) -> None:
        if self.is_open:
            self._outbox += encode(*message)

    def write(self) -> None:
        """Write as much as the connection takes."""
        try:
            del self._outbox[: os.write(1, self._outbox[:MOST])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._outbox.clear()
