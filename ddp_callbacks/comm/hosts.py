"""Which ranks of a group share a host, and so how they send messages and sum."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.hierarchical import Between, HierarchicalAllReduce
from ddp_callbacks.comm.mailbox import LocalRanks, Mailbox, make_inbox
from ddp_callbacks.comm.messages import GroupMessenger, HostMessenger, Messenger
from ddp_callbacks.comm.protocol import AllReduce, alive, allocate
from ddp_callbacks.comm.segments import refusal
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.comm.subgroups import cpu_group, make_subgroup
from ddp_callbacks.errors import say
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, require_tags, tag_of

OPENING = "the hosts of the ranks"

_TAG = 4  # bytes for the tag of the purpose of a message
_MAILBOXES = 3  # of a rank: for messages, and for the two moments of a sum
_say_once = cache(say)
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Hosts] = weakref.WeakKeyDictionary()


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
    messenger = hosts_of(group).messenger
    enter(doing)
    try:
        gathered = messenger.gather(tag_of(doing).to_bytes(_TAG, "little") + message, doing)
    except BaseException:
        # The ranks may have been cut at different places: let the next run notice, and form a new group.
        enter(f"{doing}, broken off on rank {dist.get_rank()}")
        raise
    require_tags([found[:_TAG] for found in gathered], doing, group)
    return [found[_TAG:] for found in gathered]


def new_subgroup(parts: Sequence[Sequence[int]], group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """As :func:`.subgroups.make_subgroup`. A collective."""
    hosts_of(group)  # this makes groups, too
    return make_subgroup(parts, group, partial(all_gather_bytes, doing="further process groups", group=group))


def choose_all_reduce(
    group: dist.ProcessGroup, devices: Sequence[torch.device], dtype: torch.dtype | None = None
) -> AllReduce:
    """Choose the fastest all-reduce for gradients on ``devices``. A collective: the ranks agree.

    Args:
        dtype: Half precision for all traffic between nodes (between all processes if they share no memory); ``None``
            keeps every sum exact. For CPUs.
    """
    if not devices or any(device.type != "cpu" for device in devices):
        return ProcessGroupAllReduce(group, allocate)
    return hosts_of(group).all_reduce(dtype)


def hosts_of(group: dist.ProcessGroup) -> Hosts:
    """The hosts of ``group``; the first call for a group is a collective."""
    group = cpu_group(group)
    if group not in _opened:
        enter(OPENING)
        _opened[group] = Hosts(group)
    return _opened[group]


class Hosts:
    """The hosts of a group. Either the ranks of every host share memory or none do. The constructor is a collective.

    Attributes:
        ranks: The ranks of the group, host by host; if they share no memory, each by itself.
        problem: Why they share no memory; empty if they do.
        messenger: Gathers bytes from all ranks.
        memory: Sums between the ranks of this host, if they share memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.messenger: Messenger = GroupMessenger(group)
        self.memory: SharedMemoryAllReduce | None = None
        with ExitStack() as opened:
            inboxes, problem = _make_inboxes(opened)
            everyone = self._gather([environment.host_identity(), os.getpid(), inboxes, problem])
            names, pids, descriptors, problems = zip(*everyone, strict=True)
            self.ranks = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
            self.problem = next(filter(None, problems), "")
            if not self.problem and len(self.ranks) == len(names):
                self.problem = "every rank is on a different host"
            if not self.problem:
                here = _local_ranks(self.ranks, group.rank(), pids)
                mailboxes, problem = _open_mailboxes(group, here, descriptors, opened)
                self.problem = next(filter(None, self._gather(problem)), "")
            if self.problem:
                self.ranks = [[rank] for rank in range(len(names))]
                return
            weakref.finalize(group, opened.pop_all().close).atexit = False
        messages, *sums = mailboxes
        self.memory = SharedMemoryAllReduce(group, here, *sums)
        first = [ranks[0] for ranks in self.ranks]
        leaders = None if self.is_one else make_subgroup([first], group, partial(self.messenger.gather, doing=OPENING))
        self.messenger = HostMessenger(self.ranks, messages, leaders, group)

    @property
    def is_one(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.ranks) == 1

    def all_reduce(self, dtype: torch.dtype | None = None) -> AllReduce:
        """The fastest all-reduce; rounded to ``dtype`` between hosts. A collective; rank 0 logs how the ranks sum."""
        group = alive(self._group)
        if group.rank() == 0:
            _say_once(f"summing CPU tensors using {self._describe()}")
        if self.memory is None:
            return ProcessGroupAllReduce(group, allocate, dtype)
        return self.memory if self.is_one else HierarchicalAllReduce(self.memory, self.between, dtype)

    @cached_property
    def between(self) -> Between:
        """What sums between hosts. A collective on first use."""
        group, shards = alive(self._group), list(zip(*self.ranks, strict=False))  # as many as the smallest host has
        return Between(group, new_subgroup(shards, group))

    def _gather(self, value: object) -> list[Any]:
        return [json.loads(found) for found in self.messenger.gather(json.dumps(value).encode(), OPENING)]

    def _describe(self) -> str:
        if self.problem:
            return f"gloo: {self.problem}"
        if self.is_one:
            return "shared memory"
        sizes = [str(len(ranks)) for ranks in self.ranks]
        ranks = f"x {sizes[0]}" if len(set(sizes)) == 1 else f"with {' + '.join(sizes)}"
        return f"shared memory within each host and gloo between hosts ({len(sizes)} hosts {ranks} ranks)"


def _make_inboxes(opened: ExitStack) -> tuple[list[int], str]:
    """The inboxes of this rank; or why this process cannot or should not share memory."""
    if problem := refusal():
        return [], problem
    try:
        return [make_inbox(opened) for _ in range(_MAILBOXES)], ""
    except OSError as error:
        return [], f"pipes cannot be made: {error}"


def _local_ranks(hosts: list[list[int]], rank: int, pids: Sequence[int]) -> LocalRanks:
    ranks = next(ranks for ranks in hosts if rank in ranks)
    return LocalRanks(ranks, [pids[other] for other in ranks], ranks.index(rank), min(map(len, hosts)))


def _open_mailboxes(
    group: dist.ProcessGroup, here: LocalRanks, inboxes: Sequence[Sequence[int]], opened: ExitStack
) -> tuple[list[Mailbox], str]:
    """The mailboxes of this host; or why the other ranks' inboxes cannot be opened. Local."""
    of_each_mailbox = zip(*(inboxes[rank] for rank in here.ranks), strict=True)
    try:
        return [Mailbox(group, here, its_inboxes, opened) for its_inboxes in of_each_mailbox], ""
    except OSError as error:
        return [], f"rank {group.rank()} cannot open what other ranks of its host share: {error}"
