"""Measure how busy the machine is during a test, so that a promise about time can be tested beside other work.

A promise is made for an idle machine; there the factor is 1.05. Meanwhile interpreters are started again and again:
beside eight busy processes on two cores, a start takes five times as long, as everything does, because it needs a core,
the kernel and the disk's cache. A time after which a test gives up needs none of this.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

_PAUSE = 0.1  # seconds between two starts, so that they don't slow the machine themselves


class Slowness:
    """Watches the machine while its ``with`` block runs.

    Attributes:
        factor: Time of the starts divided by their CPU time, at least 1. Known after the block.
        took: Seconds that the block took. Known after the block.
    """

    factor: float
    took: float

    def __enter__(self) -> Slowness:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._begin = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.took = time.monotonic() - self._begin
        self.factor = max(1.0, float(self._process.communicate()[0]))


def _start_interpreters() -> float:
    """Start interpreters until standard input ends, at least one; return their total time divided by their CPU time."""
    durations = work = 0.0
    while not durations or not select.select([0], [], [], _PAUSE)[0]:
        begin = time.perf_counter()
        pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "pass"], os.environ)
        _, _, used = os.wait4(pid, 0)
        durations += time.perf_counter() - begin
        work += used.ru_utime + used.ru_stime
    return durations / work


if __name__ == "__main__":
    print(_start_interpreters())
