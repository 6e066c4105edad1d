"""The all-gather of bytes by which the ranks exchange everything small.

Between the ranks of a host it goes through shared memory (:mod:`.host_slots`), between hosts through the process group:
the ranks of each host gather what they have, one rank of each host exchanges it with those of the other hosts, and its
host gathers that in turn.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks._torch import all_gather_flat, count_of_groups, count_of_own_groups, timeout_of
from ddp_callbacks.comm.cpu_group import cpu_group
from ddp_callbacks.comm.host_slots import HostSlots, create_segment, open_slots
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, launching, require_tags, tag_of, wait

_OPENING = "the hosts of the ranks"
_HEAD = 8  # bytes for the length of a message
_ROOM = 2048  # bytes of a message that all ranks of a process group send at once; what is longer follows
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
    messenger = open_messenger(group)
    enter(doing)
    try:
        gathered = messenger.gather(tag_of(doing).to_bytes(_TAG, "little") + message, doing)
    except BaseException:
        # The ranks may have been cut at different places: let the next run notice, and form a new group.
        enter(f"{doing}, broken off on rank {dist.get_rank()}")
        raise
    require_tags([int.from_bytes(found[:_TAG], "little") for found in gathered], doing, group)
    return [found[_TAG:] for found in gathered]


class _Messenger(Protocol):
    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """Every rank's message, of any length, in rank order. Blocks until all have called it."""


class GroupMessenger:
    """By the collectives of a process group for CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """See :class:`_Messenger`. What does not fit into the first round is broadcast by each rank that has more."""
        group = self._group()
        assert group is not None
        size = _HEAD + _ROOM
        begin = bytearray((len(message).to_bytes(_HEAD, "little") + message[:_ROOM]).ljust(size, b"\0"))
        received = bytearray(size * group.size())
        with launching(doing, group):
            work = all_gather_flat(group, _tensor_in(received), _tensor_in(begin))
        wait(work, doing, group)
        rows = [received[start : start + size] for start in range(0, len(received), size)]
        lengths = [int.from_bytes(row[:_HEAD], "little") for row in rows]
        rests = [bytearray(max(0, length - _ROOM)) for length in lengths]
        rests[group.rank()][:] = message[_ROOM:]
        with launching(doing, group):
            works = [_broadcast(rest, rank, group) for rank, rest in enumerate(rests) if rest]
        for work in works:
            wait(work, doing, group)
        return [
            bytes(row[_HEAD : _HEAD + length] + rest) for row, length, rest in zip(rows, lengths, rests, strict=True)
        ]


class HostMessenger:
    """Through the memory of each host, and by a process group of one rank of each host.

    Args:
        slots: Of this host.
        leaders: The first ranks of the hosts; ``None`` on the other ranks, and if there is one host.
        hosts: The ranks, host by host.
    """

    def __init__(self, slots: HostSlots, leaders: dist.ProcessGroup | None, hosts: list[list[int]]) -> None:
        self._slots, self._leaders = slots, leaders
        self._between = None if leaders is None else GroupMessenger(leaders)
        self._hosts = hosts

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """See :class:`_Messenger`."""
        own = self._slots.gather(message, doing)
        if len(self._hosts) == 1:
            return own
        joined = b"" if self._between is None else _join(self._between.gather(_join(own), doing))
        by_host = map(_split, _split(self._slots.gather(joined, doing)[0]))
        by_rank = dict(zip(itertools.chain(*self._hosts), itertools.chain(*by_host), strict=True))
        return [by_rank[rank] for rank in range(len(by_rank))]


_messengers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Messenger] = weakref.WeakKeyDictionary()


def open_messenger(group: dist.ProcessGroup) -> _Messenger:
    """What carries the messages of a group. The first call for a group is a collective."""
    group = cpu_group(group)
    if group not in _messengers:
        _messengers[group] = _open(group)
    return _messengers[group]


def _open(group: dist.ProcessGroup) -> _Messenger:
    """Find out which ranks share a host, and open its slots; without shared memory on one rank no rank uses it."""
    enter(_OPENING)
    by_group = GroupMessenger(group)
    with ExitStack() as opened:
        fd, problem = create_segment(group.size(), opened)
        mine = [environment.host_identity(), os.getpid(), fd, problem, groups_so_far(group)]
        names, pids, fds, problems, counts = zip(*_gather_json(by_group, mine), strict=True)
        hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        if any(problems) or len(hosts) == len(names):
            return by_group
        slots, problem = open_slots(group, next(ranks for ranks in hosts if group.rank() in ranks), pids, fds, opened)
        # Nobody may post before every rank has made its semaphores.
        if any(_gather_json(by_group, problem)) or slots is None:
            return by_group
        weakref.finalize(group, opened.pop_all().close).atexit = False
    leaders = make_subgroup([[ranks[0] for ranks in hosts]], group, counts) if len(hosts) > 1 else None
    return HostMessenger(slots, leaders, hosts)


def _gather_json(messenger: _Messenger, value: object) -> list[Any]:
    return [json.loads(found) for found in messenger.gather(json.dumps(value).encode(), _OPENING)]


def groups_so_far(group: dist.ProcessGroup) -> int:
    """torch names a new group after this number, and would wait for the ranks that take another name."""
    return count_of_groups() if group is dist.group.WORLD else count_of_own_groups()


def make_subgroup(
    parts: Sequence[Sequence[int]], group: dist.ProcessGroup, counts: Sequence[int]
) -> dist.ProcessGroup | None:
    """Make process groups with the backends and timeout of ``group``; return this rank's, or ``None`` if it is in none.

    Args:
        parts: Disjoint lists of ranks of ``group``. torch orders each new group by the global ranks.
        counts: :func:`groups_so_far` of each rank.

    Raises:
        ConfigurationError: ``group`` is the default group, and its ranks have made different numbers of groups.
    """
    whole = group is dist.group.WORLD
    if whole and len(set(counts)) > 1:
        raise ConfigurationError(
            f"the ranks of the process group have made different numbers of groups: {list(counts)}. Let all of them "
            "call new_group for the same groups in the same order."
        )
    rank = dist.get_rank()
    ranks = [[dist.get_global_rank(group, member) for member in part] for part in parts]
    own = ranks if whole else [part for part in ranks if rank in part]
    # The ranks of a smaller group may be in different numbers of others; groups of one rank make up for it.
    alone = [] if whole else [[rank]] * (max(counts) - counts[group.rank()])
    groups = [
        dist.new_group(
            part,
            timeout=timeout_of(group),
            backend=dist.get_backend_config(group),
            use_local_synchronization=not whole,
        )
        for part in [*alone, *own]
    ]
    return next((own_group for own_group in groups[len(alone) :] if isinstance(own_group, dist.ProcessGroup)), None)


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
