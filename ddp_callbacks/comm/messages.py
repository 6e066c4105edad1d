"""Two ways to gather bytes from all ranks: through the process group, and through the inboxes of each host.

With several hosts, the ranks of each host gather their messages. One rank of each host exchanges these with the other
hosts, and passes the result to the ranks of its host.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat
from ddp_callbacks.comm.mailbox import Mailbox
from ddp_callbacks.comm.protocol import alive
from ddp_callbacks.comm.segments import path_of
from ddp_callbacks.process_group.failures import launching, wait

_HEAD = 8  # bytes for the length of a message
_ROOM = 8192  # bytes of each message in the first round; the rest of a longer one follows
_SHORT, _LONG = b"s", b"l"  # a post holds the message, or the path in /proc of a file with it


class GroupMessenger:
    """Gathers messages by the collectives of a process group for CPU tensors.

    Args:
        group: The ranks' process group.
        whole: The larger group whose ranks all wait for this exchange, if ``group`` has only some of them.
    """

    def __init__(self, group: dist.ProcessGroup, whole: dist.ProcessGroup | None = None) -> None:
        self._group, self._whole = weakref.ref(group), weakref.ref(whole or group)

    def gather(self, message: bytes, purpose: str) -> list[bytes]:
        """Return every rank's message, of any length, in rank order. Blocks until all have called it.

        If a message does not fit into the first round, its rank broadcasts the rest.
        """
        group, whole = alive(self._group), alive(self._whole)
        size = _HEAD + _ROOM
        begin = bytearray((len(message).to_bytes(_HEAD, "little") + message[:_ROOM]).ljust(size, b"\0"))
        received = bytearray(size * group.size())
        with launching(purpose, whole):
            work = all_gather_flat(group, _tensor_in(received), _tensor_in(begin))
        wait(work, purpose, whole)
        rows = [received[start : start + size] for start in range(0, len(received), size)]
        lengths = [int.from_bytes(row[:_HEAD], "little") for row in rows]
        rests = [bytearray(max(0, length - _ROOM)) for length in lengths]
        rests[group.rank()][:] = message[_ROOM:]
        with launching(purpose, whole):
            works = [
                dist.broadcast(_tensor_in(rest), group=group, group_src=rank, async_op=True)
                for rank, rest in enumerate(rests)
                if rest
            ]
        for work in works:
            wait(work, purpose, whole)
        return [
            bytes(row[_HEAD : _HEAD + length] + rest) for row, length, rest in zip(rows, lengths, rests, strict=True)
        ]


class HostMessenger:
    """Gathers messages through the inboxes of each host, and by a process group of one rank of each host.

    Args:
        hosts: The ranks of each host.
        mailbox: The mailbox of this host.
        leaders: The group of the hosts' first ranks; ``None`` on other ranks, and with one host.
        whole: The group of all ranks.
    """

    def __init__(
        self, hosts: list[list[int]], mailbox: Mailbox, leaders: dist.ProcessGroup | None, whole: dist.ProcessGroup
    ) -> None:
        self._hosts, self._mailbox, self._leaders = hosts, mailbox, leaders  # keeps the group of the leaders alive
        self._between = None if leaders is None else GroupMessenger(leaders, whole)

    def gather(self, message: bytes, purpose: str) -> list[bytes]:
        """See :meth:`GroupMessenger.gather`."""
        own = self._gather_here(message, purpose)
        if len(self._hosts) == 1:
            return own
        joined = b"" if self._between is None else _join(self._between.gather(_join(own), purpose))
        by_host = map(_split, _split(self._gather_here(joined, purpose)[0]))
        by_rank = dict(zip(itertools.chain(*self._hosts), itertools.chain(*by_host), strict=True))
        return [by_rank[rank] for rank in range(len(by_rank))]

    def _gather_here(self, message: bytes, purpose: str) -> list[bytes]:
        with ExitStack() as opened:
            post = _SHORT + message
            if len(post) > self._mailbox.room:
                file = opened.enter_context(os.fdopen(os.memfd_create("ddp_callbacks"), "wb"))
                file.write(message)
                file.flush()
                post = _LONG + path_of(os.getpid(), file.fileno()).encode()
            posts = self._mailbox.exchange(post, purpose)
            try:
                return [post[1:] if post[:1] == _SHORT else Path(post[1:].decode()).read_bytes() for post in posts]
            finally:  # also if this rank cannot read, or another has died, for which this waits in vain
                if any(post[:1] == _LONG for post in posts):
                    self._mailbox.exchange(b"", purpose)  # keep the file until all have read it


def _tensor_in(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _join(messages: Iterable[bytes]) -> bytes:
    """Join messages, each behind its length."""
    return b"".join(len(message).to_bytes(_HEAD, "little") + message for message in messages)


def _split(joined: bytes) -> list[bytes]:
    """Inverse of :func:`_join`."""
    messages, at = [], 0
    while at < len(joined):
        end = at + _HEAD + int.from_bytes(joined[at : at + _HEAD], "little")
        messages.append(joined[at + _HEAD : end])
        at = end
    return messages
