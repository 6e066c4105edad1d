"""Find which ranks of a group share a host, and choose how they send messages and sum."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.cluster import environment
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.hierarchical import Calls, HierarchicalAllReduce, start_thread
from ddp_callbacks.comm.mailbox import LocalRanks, Mailbox, make_inbox
from ddp_callbacks.comm.messages import GroupMessenger, HostMessenger
from ddp_callbacks.comm.protocol import AllReduce, alive
from ddp_callbacks.comm.segments import require_sharing
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.comm.subgroups import cpu_group, make_subgroup
from ddp_callbacks.errors import say
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, require_tags, tag_of

OPENING = "the hosts of the ranks"

_TAG = 4  # bytes before a message for the tag of its purpose
_MAILBOXES = 3  # per rank: one for messages, and one for each of the two posts of a sum
_say_once = cache(say)
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Hosts] = weakref.WeakKeyDictionary()


def all_gather_bytes(message: bytes, purpose: str, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gather every rank's message, in rank order. A collective; blocks until all ranks have called it.

    Args:
        message: This rank's message, of any length.
        purpose: For error messages: "the loss of an epoch". The same on every rank.
        group: The ranks' process group, of at least two ranks; ``None`` is the default group.

    Raises:
        MismatchError: Another rank is in another exchange.
        PeerError: Another rank failed, died or went silent.
    """
    group = cpu_group(resolve_group(group))
    messenger = hosts_of(group).messenger
    enter(purpose)
    try:
        gathered = messenger.gather(tag_of(purpose).to_bytes(_TAG, "little") + message, purpose)
    except BaseException:
        # The exchange may have broken off at different places: let the next run notice, and form a new group.
        enter(f"{purpose}, broken off on rank {dist.get_rank()}")
        raise
    require_tags([found[:_TAG] for found in gathered], purpose, group)
    return [found[_TAG:] for found in gathered]


def new_subgroup(ranks: Sequence[int], group: dist.ProcessGroup, backend: str = "") -> dist.ProcessGroup | None:
    """Make a process group of some of a group's ranks, see :func:`.subgroups.make_subgroup`. A collective."""
    hosts_of(group)  # before we count groups: it makes some
    return make_subgroup(
        ranks, group, partial(all_gather_bytes, purpose="further process groups", group=group), backend
    )


def choose_all_reduce(
    group: dist.ProcessGroup, devices: Sequence[torch.device], dtype: torch.dtype | None = None
) -> AllReduce:
    """Choose the fastest all-reduce for gradients on ``devices``. A collective: the ranks agree.

    Args:
        dtype: Half precision for all traffic between nodes (between all processes if they share no memory); ``None``
            keeps every sum exact.
    """
    if not devices or any(device.type != "cpu" for device in devices):
        return ProcessGroupAllReduce(group, dtype)
    return hosts_of(group).all_reduce(dtype)


def hosts_of(group: dist.ProcessGroup) -> Hosts:
    """Return the hosts of ``group``; the first call for a group is a collective."""
    group = cpu_group(group)
    if group not in _opened:
        enter(OPENING)
        _opened[group] = Hosts(group)
    return _opened[group]


class Hosts:
    """The hosts of a group. Either the ranks of every host share memory or none do. The constructor is a collective.

    Attributes:
        ranks: One list of ranks per host; if they share no memory, one per rank.
        problem: Why the ranks share no memory; empty if they do.
        messenger: Gathers bytes from all ranks.
        memory: The all-reduce between the ranks of this host; ``None`` if they share no memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.problem = weakref.ref(group), ""
        self.messenger: GroupMessenger | HostMessenger = GroupMessenger(group)
        self.memory: SharedMemoryAllReduce | None = None
        with ExitStack() as opened:
            try:
                self._share(group, opened)
            except _NotShared as problem:
                self.problem, self.ranks = str(problem), [[rank] for rank in range(group.size())]
                return
            weakref.finalize(group, opened.pop_all().close).atexit = False

    def _share(self, group: dist.ProcessGroup, opened: ExitStack) -> None:
        """Open the mailboxes and the shared memory of each host. A collective. Raises :class:`_NotShared`."""
        names, pids, inboxes = zip(*self._make_everywhere(partial(_make_inboxes, opened)), strict=True)
        self.ranks = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        if len(self.ranks) == len(names):
            raise _NotShared("every rank is on a different host")
        own = next(ranks for ranks in self.ranks if group.rank() in ranks)
        here = LocalRanks(own, [pids[rank] for rank in own], own.index(group.rank()), min(map(len, self.ranks)))
        mailboxes: list[Mailbox] = []
        of_each = zip(*(inboxes[rank] for rank in own), strict=True)
        self._make_everywhere(lambda: mailboxes.extend(Mailbox(group, here, each, opened) for each in of_each))
        messages, *sums = mailboxes
        leaders = None if self.is_one else self._make_leaders(group)
        self.memory = SharedMemoryAllReduce(group, here, *sums)
        self.messenger = HostMessenger(self.ranks, messages, leaders, group)

    def _make_leaders(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """Make a group of each host's first rank, to exchange the hosts' messages; ``None`` on others. A collective."""
        first = [ranks[0] for ranks in self.ranks]
        gather = partial(self.messenger.gather, purpose=OPENING)
        return make_subgroup(first if group.rank() in first else [], group, gather)

    def _make_everywhere(self, make: Callable[[], Any]) -> list[Any]:
        """Return each rank's ``make()``. A collective; raises :class:`_NotShared` on all ranks if one fails."""
        made, problem = None, ""
        try:
            made = make()
        except OSError as error:
            problem = f"rank {alive(self._group).rank()} shares no memory: {error}"
        message = json.dumps([made, problem]).encode()
        everyone = [json.loads(found) for found in self.messenger.gather(message, OPENING)]
        for _, problem in everyone:
            if problem:
                raise _NotShared(problem)
        return [made for made, _ in everyone]

    @property
    def is_one(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.ranks) == 1

    def all_reduce(self, dtype: torch.dtype | None = None) -> AllReduce:
        """Return the fastest all-reduce; it rounds to ``dtype`` between hosts. A collective; rank 0 logs the choice."""
        group = alive(self._group)
        if group.rank() == 0:
            _say_once(f"summing CPU tensors using {self._describe()}")
        if self.memory is None:
            return ProcessGroupAllReduce(group, dtype)
        return self.memory if self.is_one else HierarchicalAllReduce(self.memory, *self.between, dtype)

    @cached_property
    def between(self) -> tuple[dist.ProcessGroup | None, Calls]:
        """The group of the leaders of this rank's shard, and the queue of the thread. A collective on first use."""
        group = alive(self._group)
        shards = zip(*self.ranks, strict=False)  # one shard for each rank of the smallest host
        own = next((ranks for ranks in shards if group.rank() in ranks), ())
        return new_subgroup(own, group), start_thread(group)

    def _describe(self) -> str:
        if self.problem:
            return f"gloo: {self.problem}"
        if self.is_one:
            return "shared memory"
        sizes = [str(len(ranks)) for ranks in self.ranks]
        ranks = f"x {sizes[0]}" if len(set(sizes)) == 1 else f"with {' + '.join(sizes)}"
        return f"shared memory within each host and gloo between hosts ({len(sizes)} hosts {ranks} ranks)"


class _NotShared(Exception):
    """Why the ranks of each host share no memory."""


def _make_inboxes(opened: ExitStack) -> list[Any]:
    """Return this process's host, id and new inboxes. Raises OSError if it cannot or should not share memory."""
    require_sharing()
    return [environment.host_identity(), os.getpid(), [make_inbox(opened) for _ in range(_MAILBOXES)]]
