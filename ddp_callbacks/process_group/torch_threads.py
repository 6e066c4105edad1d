"""Wait until gloo's threads have freed the tensors of a collective, for which they need the interpreter.

- Up to Python 3.11, a process that is forked while another thread holds the interpreter's list of threads waits for
  that list forever (https://github.com/python/cpython/issues/112275). gloo's threads hold it for some microseconds,
  without the GIL; and loader workers are forked right after collectives.
- Up to Python 3.13, a thread that asks for the GIL while the interpreter ends is ended itself, which in C++ aborts the
  process: "terminate called without an active exception". Threads of a group that nobody refers to have been joined.
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
_PAUSE = 1e-4


@functools.cache
def make_forks_wait() -> None:
    """From now on, make forks wait until those threads sleep, as they have then freed their tensors."""
    if _HAS_BUG:
        os.register_at_fork(before=await_threads)


def await_threads() -> None:
    """Return when torch's threads that complete collectives sleep, or after a second."""
    end = time.monotonic() + _LIMIT
    before = None
    while ((now := _sleeps()) is None or now != before) and time.monotonic() < end:
        before = now
        time.sleep(_PAUSE)  # releases the GIL: a thread that has slept to wait for it sleeps once more, or is awake


def _sleeps() -> dict[str, str] | None:
    """How often each of the threads has gone to sleep; ``None`` if one is awake. Empty without /proc."""
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
