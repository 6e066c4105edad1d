"""Semaphores between the processes of one node, with a check whether the other process still lives.

[Note: semaphores]
On a channel each ordered pair of ranks has a POSIX semaphore (``sem_init`` with ``pshared``) that counts the posts of
one to the other. All ranks post in the same order, so the n-th post of a rank belongs to the n-th operation, and
operations that were abandoned are passed over by counting on. POSIX lists ``sem_post`` and ``sem_wait`` among the
functions that synchronize memory (IEEE Std 1003.1-2017, section 4.12): whoever has waited for a post sees what the
other rank wrote before it, on weakly ordered processors too. A rank that waits longer than a moment sleeps in the
kernel.

[Note: locks]
Each rank holds a POSIX record lock on its own byte of the segment. The kernel takes it away when the process ends,
however it ends, and does not hand it to forked children.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from datetime import timedelta

from ddp_callbacks.process_group.diagnosis import ProcessEnded

LINE = 64  # bytes; a cache line, and at least sizeof(sem_t)
_PULSE = 0.1  # seconds between a waiting rank's checks that the others are alive
_SPINS = 50  # attempts before sleeping: the usual wait is shorter than falling asleep and waking up


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SemaphoreChannel:
    """One rank's semaphores, to and from all ranks of its node. One thread posts and one waits.

    Attributes:
        posted: How often this rank has posted.

    Args:
        fd: Descriptor of a segment that all ranks have opened for writing. This rank counts as alive until the process
            closes any descriptor of it.
        offset: Start of the channel's :meth:`nbytes` in the segment; a multiple of the page size.
        ranks: The ranks of this node, with their numbers for messages.
        here: The position of this rank among them.
        timeout: The longest wait for one post.

    Raises:
        OSError: This system has no semaphores between processes.
    """

    def __init__(self, fd: int, offset: int, ranks: list[int], here: int, timeout: timedelta) -> None:
        self.timeout = timeout
        self.ranks = ranks
        size = len(ranks)
        self._fd = fd
        self._memory = mmap.mmap(fd, self.nbytes(size), offset=offset)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._to = [ctypes.c_void_p(start + (here * size + other) * LINE) for other in range(size)]
        self._from = [ctypes.c_void_p(start + (other * size + here) * LINE) for other in range(size)]
        self._others = [other for other in range(size) if other != here]
        self.posted = 0
        self._received = [0] * size
        libc = ctypes.CDLL(None, use_errno=True)
        # Calls that never block go through PyDLL and keep the GIL; the timed wait releases it.
        quick = ctypes.PyDLL(None, use_errno=True)
        self._post, self._try_wait = quick.sem_post, quick.sem_trywait
        self._timed_wait = libc.sem_timedwait
        for other in range(size):
            if quick.sem_init(self._from[other], 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init between processes")
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, here)

    @staticmethod
    def nbytes(size: int) -> int:
        """The size of a channel in the segment: whole pages."""
        return -(-size * size * LINE // mmap.PAGESIZE) * mmap.PAGESIZE

    def post(self) -> int:
        """Post to all others; returns how often this rank has posted. Does not block."""
        for other in self._others:
            self._post(self._to[other])
        self.posted += 1
        return self.posted

    def missing(self, number: int) -> Arrival | None:
        """The first rank whose post ``number`` does not arrive within a moment, as an :class:`Arrival` to wait for."""
        for other in self._others:
            while self._received[other] < number:
                if not self._look(other):
                    return Arrival(self, other, number, time.monotonic())
        return None

    def sleep(self, other: int, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next post of ``other``."""
        at = time.time() + seconds  # if the clock is set, the next post still ends the wait
        spec = _TimeSpec(int(at), int(at % 1 * 1e9))
        if self._timed_wait(self._from[other], ctypes.byref(spec)):
            if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
                return False
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        self._received[other] += 1
        return True

    def has_come(self, other: int, number: int) -> bool:
        """Whether this post of ``other`` has arrived."""
        while self._received[other] < number and self._look(other):
            pass
        return self._received[other] >= number

    def dead(self, number: int | None = None) -> set[int]:
        """The ranks whose processes have ended; with ``number``, only those that have not posted so often."""
        dead = [other for other in self._others if not self._lives(other)]
        return {self.ranks[other] for other in dead if number is None or not self.has_come(other, number)}

    def _look(self, other: int) -> bool:
        semaphore = self._from[other]
        for _ in range(_SPINS):
            if not self._try_wait(semaphore):
                self._received[other] += 1
                return True
            os.sched_yield()
        return False

    def _lives(self, other: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, other)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, other)
        return False


@dataclass
class Arrival:
    """The next post of a rank, as :func:`ddp_callbacks.process_group.failures.wait` waits for it."""

    channel: SemaphoreChannel
    other: int
    number: int
    since: float

    def wait_slice(self, seconds: float) -> bool:
        """Whether it came within ``seconds``.

        Raises:
            ProcessEnded: The process of a rank has ended before it has posted.
            RuntimeError: The timeout has passed.
        """
        channel = self.channel
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if channel.sleep(self.other, _PULSE):
                return True
            if dead := channel.dead(self.number):  # the post may have come before its sender ended
                raise ProcessEnded(dead)
            if channel.has_come(self.other, self.number):
                return True
        if time.monotonic() - self.since > channel.timeout.total_seconds():
            raise RuntimeError(f"nothing came from rank {channel.ranks[self.other]} within {channel.timeout}")
        return False
