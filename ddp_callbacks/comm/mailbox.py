"""Messages between the processes of one host: each has an inbox, a pipe that the others open through /proc.

[Note: posts]
All ranks post in the same order, so each rank's n-th post belongs to the n-th operation. Counting skips the posts of
abandoned operations. A pipe takes a short message whole or not at all. Writes to a pipe and reads from it lock it in
the kernel, which orders memory: a process that has read a post sees everything that the sender wrote to shared memory
before, on weakly ordered processors too.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from ddp_callbacks._torch import timeout_of
from ddp_callbacks.comm.protocol import alive
from ddp_callbacks.comm.segments import SWITCH, path_of
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group.failures import wait

_HEAD = struct.Struct("=HH")  # before each post: the position of its sender, and its length
_USUAL = 1 << 16  # default size of a pipe, in bytes
_CAPACITY = 1 << 18  # bytes of an inbox, if the system allows it; all pipes of a user together may have 64 MiB
_CHUNK = 1 << 16  # bytes per read
_SPINS = 50  # attempts before sleeping: the usual wait is shorter than falling asleep and waking up


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of one host.

    Attributes:
        ranks: The ranks of this host, by their numbers in the group.
        pids: Their process ids.
        local_rank: The position of this rank in ``ranks``.
        leaders: The number of node leaders: the first ranks, each of which sums a shard.
    """

    ranks: list[int]
    pids: list[int]
    local_rank: int
    leaders: int


def make_inbox(opened: ExitStack) -> int:
    """Make a pipe for a :class:`Mailbox`; return the descriptor that the others open. ``opened`` closes it.

    Raises:
        OSError: No descriptor is left, or the system gives this user no more memory for pipes.
    """
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # both stay open: without a writer, reads report the end of the file
    for fd in ends:
        opened.callback(os.close, fd)
    with suppress(OSError):
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _CAPACITY)
    if fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ) < _USUAL:
        raise OSError("the processes of this user have as many pipes as /proc/sys/fs/pipe-user-pages-soft allows")
    return ends[0]


class Mailbox:
    """Sends short posts from each rank of a host to all others of it. One thread posts, and one collects.

    Attributes:
        room: The longest post, in bytes: a rank may post twice before others read it.
        timeout: The timeout of the process group.

    Args:
        group: The process group, which may have ranks on other hosts, too.
        local_ranks: The ranks of this host.
        inboxes: The descriptor of each rank's inbox, in the process of that rank.
        opened: Closes the descriptors that this opens.

    Raises:
        OSError: An inbox cannot be opened.
    """

    def __init__(
        self, group: dist.ProcessGroup, local_ranks: LocalRanks, inboxes: Sequence[int], opened: ExitStack
    ) -> None:
        self._group, self.timeout = weakref.ref(group), timeout_of(group)
        self._here = local_ranks.local_rank
        self._inbox = inboxes[self._here]
        self.room = min(select.PIPE_BUF, _USUAL // (2 * len(inboxes))) - _HEAD.size
        paths = [path_of(pid, fd) for pid, fd in zip(local_ranks.pids, inboxes, strict=True)]
        self._outboxes = []
        for path in paths[: self._here] + paths[self._here + 1 :]:
            # Open it for reading too: writing to the inbox of a process that has ended is then no error.
            self._outboxes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            opened.callback(os.close, self._outboxes[-1])
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._counts = [0] * len(inboxes)  # the number of posts of each rank
        self._posts: list[dict[int, bytes]] = [{} for _ in inboxes]  # each rank's posts, by number
        self._rest = b""  # a post that was read in part

    def post(self, content: bytes = b"") -> int:
        """Post to all others; return how often this rank has posted. Does not block."""
        post = _HEAD.pack(self._here, len(content)) + content
        try:
            for outbox in self._outboxes:
                os.write(outbox, post)
        except BlockingIOError:
            raise ConfigurationError(
                f"too many sums are in flight: raise bucket_cap_mb, or set {SWITCH}=0 to sum through gloo."
            ) from None
        self._note(self._here, content)
        return self._counts[self._here]

    def collect(self, number: int, purpose: str) -> list[bytes]:
        """Return each rank's post with this ``number``. Blocks until all ranks have posted it.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """
        if not self.comes(number):
            wait(Arrival(self, number), purpose, alive(self._group))
        for posts in self._posts:
            posts.pop(number - 1, None)
        return [posts.get(number, b"") for posts in self._posts]

    def exchange(self, content: bytes, purpose: str) -> list[bytes]:
        """Post ``content``; return each rank's post for the same exchange. Blocks until all ranks have posted."""
        return self.collect(self.post(content), purpose)

    def comes(self, number: int, seconds: float = 0.0) -> bool:
        """Return whether every rank's post ``number`` is here. Wait for it, until nothing comes for ``seconds``."""
        while min(self._counts) < number:
            if not self._read() and not (seconds and self._poll.poll(seconds * 1000)):
                return False
        return True

    def _read(self) -> bool:
        """Read the inbox and note its posts; return whether there was anything to read. Does not block."""
        try:
            data, at = self._rest + os.read(self._inbox, _CHUNK), 0
        except BlockingIOError:
            return False
        while len(data) >= (begin := at + _HEAD.size):
            sender, length = _HEAD.unpack_from(data, at)
            if len(data) < begin + length:
                break
            at = begin + length
            self._note(sender, data[begin:at])
        self._rest = data[at:]
        return True

    def _note(self, sender: int, content: bytes) -> None:
        number = self._counts[sender] + 1
        if content:
            self._posts[sender][number] = content
        self._counts[sender] = number


@dataclass
class Arrival:
    """Every rank's post ``number``, for :func:`ddp_callbacks.process_group.failures.wait` to wait for."""

    mailbox: Mailbox
    number: int
    since: float = field(default_factory=time.monotonic)

    def wait_slice(self, seconds: float) -> bool:
        """Wait about ``seconds``; return whether the posts are here.

        Raises:
            RuntimeError: The timeout has passed.
        """
        for _ in range(_SPINS):
            if self.mailbox.comes(self.number):
                return True
            os.sched_yield()
        if self.mailbox.comes(self.number, seconds):
            return True
        if time.monotonic() - self.since > self.mailbox.timeout.total_seconds():
            raise RuntimeError(f"not every rank of this host came within {self.mailbox.timeout}")
        return False
