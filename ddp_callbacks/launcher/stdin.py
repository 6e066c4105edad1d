"""Standard input of ``ddprun`` goes to rank 0, so that ``input()`` and a breakpoint there work."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable

_LOOK = 0.25  # seconds between two checks
_MOST = 1 << 16  # bytes to send before rank 0 has taken them


class StandardInput:
    """Reads standard input in a thread, inside a ``with`` block; in the background of a terminal it waits.

    Args:
        send: Called with data for rank 0; with none at the end.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._ended, self._taken = threading.Event(), threading.Event()
        self._taken.set()

    def __enter__(self) -> StandardInput:
        if sys.stdin is None:  # number 0 may be something else's
            self._send(b"")
        else:
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def note_taken(self) -> None:
        """Rank 0 has taken what was sent."""
        self._taken.set()

    def _read(self) -> None:
        data = b"-"
        while data and not self._ended.is_set():
            if not self._taken.wait(_LOOK) or not select.select([0], [], [], _LOOK)[0]:
                continue
            if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
                self._ended.wait(_LOOK)
                continue
            try:
                data = os.read(0, _MOST)
            except OSError:
                data = b""  # the terminal was closed
            self._taken.clear()
            self._send(data)
