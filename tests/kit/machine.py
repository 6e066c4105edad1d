"""How busy the machine is while something is measured, so that a promise about time can be tested beside other work.

A promise is made for a machine with nothing else to do; there the factor is 1.05. Beside eight processes that compute,
on two cores, the starts of an interpreter that go on beside what is measured take five times as long, as everything
does: they need a core, the kernel and the disk's cache. What only decides when a test gives up needs none of this.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

_PAUSE = 0.1  # seconds between two starts, so that they are not in the way themselves


class Slowness:
    """Watches the machine while its ``with`` block runs.

    Attributes:
        factor: How much longer starts took than their own work, on the average; at least 1. Known after the block.
        took: Seconds from the begin of the block to its end. Known after the block.
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
        said, _ = self._process.communicate()
        self.factor = max(1.0, float(said))


def _start_interpreters() -> float:
    """The duration of all starts until standard input ends, of one at least, in terms of their CPU time."""
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
