"""Which ranks of a group share a host, and the memory through which they send messages and sum."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks.comm import memfd
from ddp_callbacks.comm.host_slots import HostSlots
from ddp_callbacks.comm.shared_memory import LocalRanks, SharedMemoryAllReduce
from ddp_callbacks.comm.subgroups import groups_so_far, make_subgroup

OPENING = "the hosts of the ranks"

Gather = Callable[[bytes, str], list[bytes]]
"""Gathers every rank's message for a purpose, in rank order."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group. Either the ranks of every host share memory or none do.

    Attributes:
        ranks: The ranks of the group, host by host; if they share no memory, each by itself.
        problem: Why they share no memory; empty if they do.
        slots, sums: Send messages and sum between the ranks of this host, if they share memory.
        leaders: If there are several hosts whose ranks share memory, the first rank of each; ``None`` on others.
    """

    ranks: list[list[int]]
    problem: str = ""
    slots: HostSlots | None = None
    sums: SharedMemoryAllReduce | None = None
    leaders: dist.ProcessGroup | None = None


def open_hosts(group: dist.ProcessGroup, gather: Gather) -> Hosts:
    """Find out which ranks share a host, and open its memory. A collective, which gathers twice."""
    with ExitStack() as created, ExitStack() as opened:
        fd, problem = _create(group.size(), created)
        mine = [environment.host_identity(), os.getpid(), fd, problem, groups_so_far(group)]
        names, pids, fds, problems, counts = zip(*_gather_json(gather, mine), strict=True)
        hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        problem = next(filter(None, problems), "")
        if not problem and len(hosts) == len(names):
            problem = "every rank is on a different host"
        if not problem:
            memory, problem = _open_memory(group, hosts, pids, fds, opened)
            # Nobody may post before every rank has made its semaphores.
            problem = next(filter(None, _gather_json(gather, problem)), "")
        if problem:
            return Hosts([[rank] for rank in range(len(names))], problem)
        if any(ranks[0] == group.rank() for ranks in hosts):  # the others map its segment
            opened.callback(created.pop_all().close)
        weakref.finalize(group, opened.pop_all().close).atexit = False
    leaders = make_subgroup([[ranks[0] for ranks in hosts]], group, counts) if len(hosts) > 1 else None
    return Hosts(hosts, "", *memory, leaders)


def _gather_json(gather: Gather, value: object) -> list[Any]:
    return [json.loads(found) for found in gather(json.dumps(value).encode(), OPENING)]


def _create(size: int, created: ExitStack) -> tuple[int, str]:
    """A segment for so many ranks: its descriptor, or -1 and why this process cannot or should not share memory.

    Args:
        created: Closes it.
    """
    if problem := memfd.refusal():
        return -1, problem
    try:
        fd = memfd.create(HostSlots.nbytes(size) + SharedMemoryAllReduce.control_nbytes(size))
    except OSError as error:
        return -1, f"shared memory cannot be created: {error}"
    created.callback(os.close, fd)
    return fd, ""


def _open_memory(
    group: dist.ProcessGroup, hosts: list[list[int]], pids: Sequence[int], fds: Sequence[int], opened: ExitStack
) -> tuple[tuple[HostSlots | None, SharedMemoryAllReduce | None], str]:
    """What the first rank of this host shares; or why it cannot be opened. Local.

    Args:
        pids, fds: The process and the segment of each rank.
        opened: Closes what is opened here.
    """
    ranks = next(ranks for ranks in hosts if group.rank() in ranks)
    first, fd = ranks[0], fds[ranks[0]]
    here = LocalRanks(ranks, [pids[rank] for rank in ranks], ranks.index(group.rank()), min(map(len, hosts)))
    try:
        if first != group.rank():
            fd = memfd.open_control(pids[first], fd)
            opened.callback(os.close, fd)
        return (HostSlots(group, ranks, fd), SharedMemoryAllReduce(group, here, fd, HostSlots.nbytes(len(ranks)))), ""
    except OSError as error:
        return (None, None), f"rank {group.rank()} cannot open what rank {first} shares: {error}"
