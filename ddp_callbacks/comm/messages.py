"""The all-gather of bytes by which the ranks exchange everything small.

Between the ranks of a host it goes through shared memory (:mod:`.host_slots`), between hosts through the process group:
the ranks of each host gather what they have, one rank of each host exchanges it with those of the other hosts, and its
host gathers that in turn.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat
from ddp_callbacks.comm.cpu_group import cpu_group
from ddp_callbacks.comm.host_slots import HostSlots
from ddp_callbacks.comm.hosts import OPENING, Hosts, open_hosts
from ddp_callbacks.comm.protocol import alive
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, launching, require_tags, tag_of, wait

_HEAD = 8  # bytes for the length of a message
_ROOM = 8192  # bytes of a message that all ranks of a process group send at once; what is longer follows
_TAG = 4  # bytes for the tag of the purpose


def all_gather_bytes(message: bytes, doing: str, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gather every rank's message, in rank order. A collective; blocks until all ranks have called it.

    Args:
        message: Of any length on each rank.
        doing: The purpose, for error messages: "the loss of an epoch". The same on every rank.
        group: ``None`` is the default group; it has at least two ranks.

    Raises:
        MismatchError: Another rank is in another exchange.
        PeerError: Another rank failed, died or went silent.
    """
    group = cpu_group(resolve_group(group))
    _, messenger = _open(group)
    enter(doing)
    try:
        gathered = messenger.gather(tag_of(doing).to_bytes(_TAG, "little") + message, doing)
    except BaseException:
        # The ranks may have been cut at different places: let the next run notice, and form a new group.
        enter(f"{doing}, broken off on rank {dist.get_rank()}")
        raise
    require_tags([int.from_bytes(found[:_TAG], "little") for found in gathered], doing, group)
    return [found[_TAG:] for found in gathered]


class GroupMessenger:
    """By the collectives of a process group for CPU tensors.

    Args:
        whole: The group whose ranks all wait for this exchange, if it is one between some of them.
    """

    def __init__(self, group: dist.ProcessGroup, whole: dist.ProcessGroup | None = None) -> None:
        self._group, self._whole = weakref.ref(group), weakref.ref(whole or group)

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """Every rank's message, of any length, in rank order. Blocks until all have called it.

        What does not fit into the first round is broadcast by each rank that has more.
        """
        group, whole = alive(self._group), alive(self._whole)
        size = _HEAD + _ROOM
        begin = bytearray((len(message).to_bytes(_HEAD, "little") + message[:_ROOM]).ljust(size, b"\0"))
        received = bytearray(size * group.size())
        with launching(doing, whole):
            work = all_gather_flat(group, _tensor_in(received), _tensor_in(begin))
        wait(work, doing, whole)
        rows = [received[start : start + size] for start in range(0, len(received), size)]
        lengths = [int.from_bytes(row[:_HEAD], "little") for row in rows]
        rests = [bytearray(max(0, length - _ROOM)) for length in lengths]
        rests[group.rank()][:] = message[_ROOM:]
        with launching(doing, whole):
            works = [_broadcast(rest, rank, group) for rank, rest in enumerate(rests) if rest]
        for work in works:
            wait(work, doing, whole)
        return [
            bytes(row[_HEAD : _HEAD + length] + rest) for row, length, rest in zip(rows, lengths, rests, strict=True)
        ]


class HostMessenger:
    """Through the memory of each host of ``group``, and by a process group of one rank of each host."""

    def __init__(self, group: dist.ProcessGroup, hosts: Hosts, slots: HostSlots) -> None:
        self._hosts, self._slots = hosts.ranks, slots
        self._leaders = hosts.leaders  # keeps it alive
        self._between = None if hosts.leaders is None else GroupMessenger(hosts.leaders, group)

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """As :meth:`GroupMessenger.gather`."""
        own = self._slots.gather(message, doing)
        if len(self._hosts) == 1:
            return own
        joined = b"" if self._between is None else _join(self._between.gather(_join(own), doing))
        by_host = map(_split, _split(self._slots.gather(joined, doing)[0]))
        by_rank = dict(zip(itertools.chain(*self._hosts), itertools.chain(*by_host), strict=True))
        return [by_rank[rank] for rank in range(len(by_rank))]


_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Hosts, GroupMessenger | HostMessenger]]
_opened = weakref.WeakKeyDictionary()


def hosts_of(group: dist.ProcessGroup) -> Hosts:
    """Which ranks of ``group`` share a host, and its memory. The first call for a group is a collective."""
    return _open(cpu_group(group))[0]


def _open(group: dist.ProcessGroup) -> tuple[Hosts, GroupMessenger | HostMessenger]:
    if group not in _opened:
        enter(OPENING)
        by_group = GroupMessenger(group)
        hosts = open_hosts(group, by_group.gather)
        _opened[group] = hosts, by_group if hosts.slots is None else HostMessenger(group, hosts, hosts.slots)
    return _opened[group]


def _tensor_in(memory: bytearray) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _broadcast(memory: bytearray, rank: int, group: dist.ProcessGroup) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = rank, 0
    return group.broadcast([_tensor_in(memory)], options)


def _join(messages: Iterable[bytes]) -> bytes:
    """The messages one after another, each behind its length."""
    return b"".join(len(message).to_bytes(_HEAD, "little") + message for message in messages)


def _split(joined: bytes) -> list[bytes]:
    """Inverse of :func:`_join`."""
    messages, at = [], 0
    while at < len(joined):
        end = at + _HEAD + int.from_bytes(joined[at : at + _HEAD], "little")
        messages.append(joined[at + _HEAD : end])
        at = end
    return messages
