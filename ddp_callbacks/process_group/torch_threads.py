"""Wait until gloo's threads have freed the tensors of a collective, for which they need the interpreter.

- Up to Python 3.11, a process forked while another thread holds the lock of the interpreter's list of threads waits for
  that lock forever (https://github.com/python/cpython/issues/112275). gloo's threads hold it for some microseconds,
  without the GIL, and loader workers are forked right after collectives.
- Up to Python 3.13, the interpreter ends a thread that asks for the GIL while it shuts down. In C++ this aborts the
  process: "terminate called without an active exception". Threads of groups without references were joined before.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

_HAS_BUG = sys.version_info < (3, 12)
_NAMES = ("pt_gloo", "pt_nccl")  # torch's names for the threads that complete collectives
_LIMIT = 1.0  # seconds; a thread that is busy for longer is communicating
_PAUSE = 1e-4  # seconds between two looks


@functools.cache
def make_forks_wait() -> None:
    """From now on, make forks wait until these threads sleep: they have then freed their tensors."""
    if _HAS_BUG:
        os.register_at_fork(before=await_threads)


def await_threads() -> None:
    """Return when torch's threads that complete collectives sleep, or after a second."""
    end = time.monotonic() + _LIMIT
    before = None
    while ((now := _sleeps()) is None or now != before) and time.monotonic() < end:
        before = now
        time.sleep(_PAUSE)  # releases the GIL: a thread that slept to get it wakes up, or has slept once more


def _sleeps() -> dict[str, str] | None:
    """Return how often each of these threads has gone to sleep; ``None`` if one is awake. Empty without /proc."""
    sleeps = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        except OSError:  # the thread has ended
            continue
        if status["Name"].startswith(_NAMES):
            if not status["State"].startswith("S"):
                return None
            sleeps[task.name] = status["voluntary_ctxt_switches"]
    return sleeps
