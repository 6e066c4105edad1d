"""Forking the workers of a ``DataLoader`` beside gloo's threads.

Up to Python 3.11, a process forked while another thread holds the interpreter's list of threads waits for that list
forever (https://github.com/python/cpython/issues/112275). gloo's threads hold it for some microseconds when they free
the tensors of a collective, without the GIL; and the workers of a loader are forked right after collectives.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

_HAS_BUG = sys.version_info < (3, 12)
_NAMES = ("pt_gloo", "pt_nccl")  # what torch names the threads that complete collectives
_LIMIT = 1.0  # seconds; threads that are busy for longer communicate beside the fork
_PAUSE = 1e-4


@functools.cache
def make_forks_wait() -> None:
    """From now on, a fork waits until those threads are asleep: they have freed their tensors then."""
    if _HAS_BUG:
        os.register_at_fork(before=_await_threads)


def _await_threads() -> None:
    end = time.monotonic() + _LIMIT
    while _any_runs() and time.monotonic() < end:
        time.sleep(_PAUSE)  # lets go of the GIL, which they may wait for


def _any_runs() -> bool:
    """Whether one of the threads is not asleep; ``False`` where there is no /proc."""
    return any(_runs(task) for task in Path("/proc/self/task").glob("*"))


def _runs(task: Path) -> bool:
    try:
        name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith(_NAMES) and fields.split()[0] != "S"
