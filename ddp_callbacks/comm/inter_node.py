"""All-reduce between nodes: what goes over the network, exactly or in half precision.

Each node leader sums its shard with the leaders of the same shard on the other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat
from ddp_callbacks.comm.collectives import new_subgroup
from ddp_callbacks.comm.process_group import GATHERED_NBYTES, ProcessGroupWork
from ddp_callbacks.comm.protocol import Work
from ddp_callbacks.process_group.failures import wait

HALF = (torch.float16, torch.bfloat16)
CHUNK_NBYTES = 4 << 20
"""The size of a shard that is worth a sum by itself; with less, gloo's ring runs short of work."""

EXCHANGE_NBYTES = 1 << 18  # what each node sends to each other at a time, in a sum in half precision


@dataclass(frozen=True)
class InterNodeGroups:
    """The leaders of the same shard, one on each node. Two process groups, because two threads start collectives.

    Attributes:
        group: For sums, and for the reduce-scatter of sums in half precision.
        second: For their all-gather, which starts when the reduce-scatter is done: at another moment on each node.
    """

    group: dist.ProcessGroup
    second: dist.ProcessGroup


class InterNodeAllReduce:
    """Sum a shard over the nodes. The result has the same bits on every node.

    Half precision is summed in float32, in node order. For S bytes of gradients (as they are sent) and H nodes, each
    node sends 2 (H - 1) / H * S bytes, the fewest possible (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002).

    Args:
        groups: The leaders that sum.
        dtype: Wider numbers are rounded to this type, to nearest, before they are sent; ``None`` rounds nothing.
    """

    def __init__(self, groups: InterNodeGroups, dtype: torch.dtype | None = None) -> None:
        self._groups = groups
        self._dtype = dtype

    def start(self, shard: torch.Tensor, doing: str = "") -> Sequence[Work]:
        """Start to sum ``shard`` (flat, contiguous) in place; wait for each handle. Does not block."""
        dtype = self._dtype or shard.dtype
        if not shard.numel():
            return []
        if dtype not in HALF:
            return [ProcessGroupWork(shard, self._groups.group, doing)]
        nodes = self._groups.group.size()
        if shard.numel() * dtype.itemsize * nodes <= GATHERED_NBYTES:
            return [_AllGatherWork(shard, dtype, self._groups)]
        chunks = shard.split(EXCHANGE_NBYTES // dtype.itemsize * nodes)
        return [_ReduceScatterWork(chunk, dtype, self._groups) for chunk in chunks]


class _AllGatherWork:
    """For few bytes, in one round, so rounded once: each node gathers what all have sent, and sums it."""

    def __init__(self, shard: torch.Tensor, dtype: torch.dtype, groups: InterNodeGroups) -> None:
        self._shard, self._group = shard, groups.group
        self._sent = shard.to(dtype)
        self._received = self._sent.new_empty(groups.group.size(), shard.numel())
        self._work = all_gather_flat(groups.group, self._received.view(-1), self._sent)

    def wait(self, doing: str) -> None:
        wait(self._work, doing, self._group)
        self._shard.copy_(_sum_in_float32(self._received))


class _ReduceScatterWork:
    """In two rounds: a reduce-scatter (each node sums its part of what all have sent), then an all-gather."""

    def __init__(self, chunk: torch.Tensor, dtype: torch.dtype, groups: InterNodeGroups) -> None:
        self._chunk, self._groups = chunk, groups
        nodes = groups.group.size()
        self._sent = torch.zeros(-(-chunk.numel() // nodes) * nodes, dtype=dtype)
        self._sent[: chunk.numel()] = chunk
        self._received = torch.empty_like(self._sent)
        self._work = groups.group.alltoall_base(self._received, self._sent, [], [])

    def wait(self, doing: str) -> None:
        groups = self._groups
        wait(self._work, doing, groups.group)
        own = _sum_in_float32(self._received.view(groups.group.size(), -1)).to(self._sent.dtype)
        wait(all_gather_flat(groups.second, self._sent, own), doing, groups.second)
        self._chunk.copy_(self._sent[: self._chunk.numel()])


def _sum_in_float32(parts: torch.Tensor) -> torch.Tensor:
    """The sum of ``parts``, one in each row, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total


def open_inter_node_groups(group: dist.ProcessGroup, nodes: list[list[int]]) -> InterNodeGroups | None:
    """The groups of this rank's shard; ``None`` if it leads none. A collective.

    Args:
        nodes: The ranks of ``group``, node by node.
    """
    leaders = list(zip(*nodes, strict=False))  # as many shards as the smallest node has ranks
    first, second = new_subgroup(leaders, group), new_subgroup(leaders, group)
    return None if first is None or second is None else InterNodeGroups(first, second)
