"""Find out which ranks share a node, and choose the fastest all-reduce."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import new_subgroup
from ddp_callbacks.comm.cpu_group import cpu_group
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.hierarchical import HierarchicalAllReduce, SummingThreads
from ddp_callbacks.comm.messages import hosts_of
from ddp_callbacks.comm.protocol import AllReduce, alive, allocate
from ddp_callbacks.errors import say

_say_once = functools.cache(say)
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Topology] = weakref.WeakKeyDictionary()


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
    return topology_of(group).all_reduce(dtype)


def topology_of(group: dist.ProcessGroup) -> Topology:
    """The topology of ``group``; the first call is a collective."""
    group = cpu_group(group)
    if group not in _opened:
        _opened[group] = Topology(group)
    return _opened[group]


class Topology:
    """Which ranks of a group share a node and its memory; nodes are connected by the network.

    The constructor is a collective; rank 0 logs how the ranks will sum.

    Attributes:
        nodes: The ranks, node by node; without shared memory, each rank is a separate node.
        memory: Sums within this rank's node; ``None`` without shared memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        hosts = hosts_of(group)
        self.nodes, self.memory = hosts.ranks, hosts.sums
        self._leaders: dist.ProcessGroup | None = None
        self._threads: SummingThreads | None = None
        if group.rank() == 0:
            _say_once(f"summing CPU tensors using {self._describe(hosts.problem)}")

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.nodes) == 1

    def all_reduce(self, dtype: torch.dtype | None = None) -> AllReduce:
        """The fastest all-reduce; rounded to ``dtype`` between nodes. A collective."""
        if self.memory is None:
            return ProcessGroupAllReduce(alive(self._group), allocate, dtype)
        if self.on_one_node:
            return self.memory
        leaders, threads = self.open()
        return HierarchicalAllReduce(self.memory, leaders, threads, dtype)

    def open(self) -> tuple[dist.ProcessGroup | None, SummingThreads]:
        """What sums between nodes: the leaders of this rank's shard, if it has one. A collective on first use."""
        if self._threads is None:
            group = alive(self._group)
            shards = list(zip(*self.nodes, strict=False))  # as many as the smallest node has ranks
            self._leaders, self._threads = new_subgroup(shards, group), SummingThreads(group)
        return self._leaders, self._threads

    def _describe(self, problem: str) -> str:
        if problem:
            return f"gloo: {problem}"
        if len(self.nodes) == 1:
            return "shared memory"
        sizes = [str(len(ranks)) for ranks in self.nodes]
        ranks = f"x {sizes[0]}" if len(set(sizes)) == 1 else f"with {' + '.join(sizes)}"
        return f"shared memory within each host and gloo between hosts ({len(sizes)} hosts {ranks} ranks)"
