"""The node's end of the connection to the launcher: messages on standard input, frames on standard output."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

GREETING = b"\0ddprun\0\n"  # a login shell may print something before it
HEADER = struct.Struct("!ciI")
MOST = 1 << 16  # bytes of a pipe, as many as it holds
_ENOUGH = 1 << 20  # bytes waiting for the launcher; beyond that, the job's writes wait


class Link:
    """Neither reading nor writing blocks.

    Attributes:
        is_open: Whether the launcher is still there.
        silence: Seconds without a message after which it counts as gone; ``None`` while it has not said.
    """

    def __init__(self) -> None:
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        self.is_open = True
        self.silence: float | None = None
        self._heard = time.monotonic()
        self._inbox = b""
        self._outbox = bytearray(GREETING)

    @property
    def has_more(self) -> bool:
        """Whether something is to be written."""
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        return len(self._outbox) >= _ENOUGH

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come for too long."""
        return self.is_open and self.silence is not None and time.monotonic() - self._heard > self.silence

    def messages(self) -> Iterator[dict[str, Any]]:
        """What has come; afterwards the link may be closed."""
        # None if there is no data. Not os.read: some may have been read ahead with this program.
        data: bytes | None = sys.stdin.buffer.read(MOST)
        if data == b"":
            self.close()
        if not data:
            return
        self._heard = time.monotonic()
        self._inbox += data
        while True:
            length, newline, rest = self._inbox.partition(b"\n")
            if not newline or len(rest) < int(length):
                return
            self._inbox = rest[int(length) :]
            yield json.loads(rest[: int(length)])

    def put(self, kind: bytes, rank: int = -1, data: bytes = b"") -> None:
        if self.is_open:
            self._outbox += HEADER.pack(kind, rank, len(data)) + data + b"\n"

    def report(self, **values: Any) -> None:
        self.put(b"m", data=json.dumps(values).encode())

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
