"""Kill ranks that were stopped for long, by SIGSTOP for example, so that the job can continue without them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection


class Stopped:
    """Notes which child processes are stopped.

    Attributes:
        patience: Seconds after which a stopped rank is killed; ``None``: never.
        killed: That of each rank that was killed, by process id.
    """

    def __init__(self) -> None:
        self.patience: float | None = None
        self.killed: dict[int, float] = {}
        self._since: dict[int, float] = {}  # by process id

    def note(self, pid: int, status: int) -> bool:
        """Note what waitpid(2) has returned for a child. Return whether the child was stopped or continues."""
        self._since.pop(pid, None)
        if os.WIFSTOPPED(status):
            self._since[pid] = time.monotonic()
        return os.WIFSTOPPED(status) or os.WIFCONTINUED(status)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill the ranks, given by process id, that were stopped for too long."""
        patience = self.patience or math.inf
        for pid in [pid for pid, since in self._since.items() if time.monotonic() - since > patience]:
            del self._since[pid]
            if pid in ranks:
                os.kill(pid, signal.SIGKILL)
                self.killed[pid] = patience
