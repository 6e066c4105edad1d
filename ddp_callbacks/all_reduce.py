"""The choice of the way to sum: through the memory of a host, in two levels, or by the process group alone."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_callbacks import segments
from ddp_callbacks.collectives import all_gather_json
from ddp_callbacks.notices import say
from ddp_callbacks.shared_memory import SharedMemory, open_shared_memory, refusal
from ddp_callbacks.summation import AllReduce, GroupAllReduce, allocate
from ddp_callbacks.two_level import HostMemory, OwnMemory, Threads, TwoLevelAllReduce
from ddp_callbacks.wire import SLICE_NBYTES, Column, Wire, open_column

_say_once = functools.cache(say)
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Levels] = weakref.WeakKeyDictionary()


def choose_all_reduce(
    group: dist.ProcessGroup, devices: Sequence[torch.device], dtype: torch.dtype | None = None
) -> AllReduce:
    """The fastest way to sum gradients on ``devices``. A collective: the ranks agree.

    Args:
        dtype: What is sent over the network between hosts is rounded to this half precision (between all processes,
            where they share no memory); ``None`` keeps every sum exact. For CPUs.
    """
    if not devices or any(device.type != "cpu" for device in devices):
        return GroupAllReduce(group, allocate)
    return levels_of(group).all_reduce(dtype)


def levels_of(group: dist.ProcessGroup) -> Levels:
    """The levels of ``group``, looked up at the first call: a collective, then."""
    if group not in _opened:
        _opened[group] = Levels(group)
    return _opened[group]


class Levels:
    """How the ranks of a group reach each other: through the memory of their host, and over the wire between hosts.

    Making it is a collective. Either the ranks of every host share memory or none do, and rank 0 logs which.

    Attributes:
        hosts: The ranks, host by host; each rank is a host of its own where memory is not shared.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        known = all_gather_json([segments.host_identity(), os.getpid(), refusal()], "the hosts of the ranks", group)
        names, pids, refusals = zip(*known, strict=True)
        self.hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        self._memory: SharedMemory | None = None
        problem: str = next(filter(None, refusals), "")
        if not problem and len(self.hosts) == len(pids):
            problem = "every rank is on a host of its own"
        if not problem:
            self._memory, problem = open_shared_memory(group, self.hosts, list(pids))
        if self._memory is None:
            self.hosts = [[rank] for rank in range(len(pids))]
        self._column: Column | None = None
        self._threads: Threads | None = None
        if group.rank() == 0:
            _say_once(f"gradients on the CPU are summed by {self._describe(problem)}")

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.hosts) == 1

    def all_reduce(self, dtype: torch.dtype | None = None) -> AllReduce:
        """The fastest sum; rounded to ``dtype`` on the wire. A collective."""
        group = self._group()
        assert group is not None
        if self.on_one_host and self._memory is not None:
            return self._memory
        if self._memory is None and dtype is None:
            return GroupAllReduce(group, allocate)
        memory, column, threads = self.open()
        wire = None if column is None else Wire(column, dtype)
        piece_nbytes = SLICE_NBYTES * min(map(len, self.hosts))
        return TwoLevelAllReduce(memory, wire, threads, exact=dtype is None, piece_nbytes=piece_nbytes)

    def open(self) -> tuple[HostMemory, Column | None, Threads]:
        """What sums in two levels are made of. A collective, the first time."""
        group = self._group()
        assert group is not None
        if self._threads is None:
            self._column, self._threads = open_column(group, self.hosts), Threads(group)
        return self._memory or OwnMemory(), self._column, self._threads

    def _describe(self, problem: str) -> str:
        if problem:
            return f"gloo: {problem}"
        if len(self.hosts) == 1:
            return "shared memory"
        sizes = ", ".join(str(len(ranks)) for ranks in self.hosts)
        return f"shared memory on each of {len(self.hosts)} hosts (with {sizes} ranks), and gloo between them"
