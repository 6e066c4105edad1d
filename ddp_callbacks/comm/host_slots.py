"""All-gather of bytes between the processes of one host, through memory that they share.

Each rank has two slots, which it uses in turn::

    write this rank's slot      post      wait until every rank has posted      read all slots

Two are enough: a rank posts for the next message once it has read the last one. So whoever is about to write its slot
again has seen that all ranks have read what it wrote there before.
"""

from __future__ import annotations

import itertools
import mmap
import weakref

import torch.distributed as dist

from ddp_callbacks._torch import timeout_of
from ddp_callbacks.comm.protocol import alive
from ddp_callbacks.comm.semaphores import SemaphoreChannel
from ddp_callbacks.process_group.failures import wait

_HEAD = 8  # bytes for the length of the whole message
_ROOM = (1 << 18) - _HEAD  # bytes of a message in a slot; a longer one takes several rounds


class HostSlots:
    """The slots of one host's ranks.

    Args:
        group: The group of these ranks.
        ranks: The ranks of this host in it, this one included.
        fd: Descriptor of a segment that all of them have opened, of size :meth:`nbytes`.

    Raises:
        OSError: This system has no semaphores between processes.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], fd: int) -> None:
        self._group = weakref.ref(group)
        self._size, self._here = len(ranks), ranks.index(group.rank())
        self._channel = SemaphoreChannel(fd, 0, ranks, self._here, timeout_of(group))
        self._slots = memoryview(mmap.mmap(fd, self.nbytes(self._size)))[SemaphoreChannel.nbytes(self._size) :]

    @staticmethod
    def nbytes(size: int) -> int:
        """The size of the segment for so many ranks."""
        return SemaphoreChannel.nbytes(size) + 2 * size * (_HEAD + _ROOM)

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """Every rank's message, of any length. Blocks until all ranks of the host have called it."""
        gathered = [bytearray() for _ in range(self._size)]
        for start in itertools.count(0, _ROOM):
            number = self._post(len(message), message[start : start + _ROOM])
            self._await(number, doing)
            lengths = [self._read(index, number, whole) for index, whole in enumerate(gathered)]
            if max(lengths) <= start + _ROOM:
                break
        return [bytes(whole) for whole in gathered]

    def _post(self, length: int, part: bytes) -> int:
        at = self._slot(self._here, self._channel.posted + 1)
        self._slots[at : at + _HEAD] = length.to_bytes(_HEAD, "little")
        self._slots[at + _HEAD : at + _HEAD + len(part)] = part
        return self._channel.post()

    def _await(self, number: int, doing: str) -> None:
        while (missing := self._channel.missing(number)) is not None:
            wait(missing, doing, alive(self._group))

    def _read(self, index: int, number: int, whole: bytearray) -> int:
        """Append the next part of a rank's message; return the length of the message."""
        at = self._slot(index, number)
        length = int.from_bytes(self._slots[at : at + _HEAD], "little")
        rest = min(_ROOM, length - len(whole))
        whole += self._slots[at + _HEAD : at + _HEAD + rest]
        return length

    def _slot(self, index: int, number: int) -> int:
        return (2 * index + number % 2) * (_HEAD + _ROOM)
