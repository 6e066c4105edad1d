"""Start processes, and read their state from the kernel.

A process group is not enough to end a job: a rank's children may start sessions of their own. This process is a
subreaper (prctl(2)), so everything that the ranks start stays its descendant, however often it forks. The ranks are
killed if this process dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    words: list[str], cores: set[int] | None = None, ignored: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; it dies with this one.

    Args:
        cores: The cores that the process may use; ``None`` for all.
        ignored: Signals that the process ignores.
        options: Options for :class:`subprocess.Popen`.
    """
    prepare = partial(_prepare, os.getpid(), ignored, cores)
    return subprocess.Popen(words, start_new_session=True, preexec_fn=prepare, **options)


def _prepare(parent: int, ignored: Sequence[int], cores: set[int] | None) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, cores)
    if os.getppid() != parent:
        os._exit(1)


def descendants() -> set[int]:
    """Return the process ids of all running descendants of this process."""
    children = _children()
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return set(found)


def _children() -> dict[int, list[int]]:
    """Return the ids of the running children of each process, by its id."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    return children


def handled_by(pid: int) -> set[int] | None:
    """Return the signals for which a process has a handler; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, ValueError):
        return None
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
