"""Find what a test leaves behind: processes, even if their parent has ended, and files in /dev/shm (Linux)."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, a process whose parent ends becomes a child of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Machine:
    """The processes and files at its creation; its methods return those that are new since.

    Args:
        server: The process id of the fork server, whose children count like those of this process.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._processes, self._files = self._children(), _files()

    def processes(self) -> dict[int, str]:
        """Return the command lines of new processes, by id. Reap ended processes, except the server's."""
        found = {}
        for pid in self._children() - self._processes:
            with suppress(ChildProcessError):  # the server waits for its own
                os.waitpid(pid, os.WNOHANG)
            with suppress(FileNotFoundError):
                if line := Path(f"/proc/{pid}/cmdline").read_bytes():  # empty if the process has ended
                    found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    def files(self) -> set[str]:
        """Return new files in /dev/shm, without those that torch made for a process that still runs."""
        new = _files() - self._files
        owners = {name: re.match(r"torch_(\d+)_", name) for name in new}
        return {name for name, owner in owners.items() if owner is None or not Path(f"/proc/{owner[1]}").exists()}

    def _children(self) -> set[int]:
        found: set[int] = set()
        for path in (path for pid in (os.getpid(), self._server) for path in Path(f"/proc/{pid}/task").iterdir()):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found.update(map(int, (path / "children").read_text().split()))
        return found


def _files() -> set[str]:
    """Return the files in /dev/shm, except those of MPI, joblib and spawned processes: killed programs leave these."""
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    return {name for name in names if not name.startswith(("mpich_shm_", "vader_segment.", "sem.loky-", "sem.mp-"))}
