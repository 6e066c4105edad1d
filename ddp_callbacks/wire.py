"""Sums between hosts: what goes over the network, exactly or in half precision.

Each carrier sums its slice with the carriers of the same slice on the other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_callbacks.collectives import GATHERED_BYTES, Reduction, divide_group
from ddp_callbacks.failures import wait
from ddp_callbacks.summation import Pending

HALF = (torch.float16, torch.bfloat16)
SLICE_NBYTES = 4 << 20
"""Of a slice that is worth a sum of its own; less leaves gloo's ring short of work."""

PART_BYTES = 1 << 18  # bytes that each host sends to each other at a time, in a sum in half precision


@dataclass(frozen=True)
class Column:
    """The ranks that carry the same slice, one on each host. Two groups of them, for what two threads start.

    Attributes:
        group: For sums, and for the first round of those in two rounds.
        second: For the second round, started when the first is done: at another moment on each host.
    """

    group: dist.ProcessGroup
    second: dist.ProcessGroup


class Wire:
    """Sums a slice over the hosts, in the order of the hosts where that can be chosen, with the same bits on all.

    Half precision is summed in float32. Bytes that each host sends for S bytes of gradients (as they are sent), with
    H hosts: 2 (H - 1) / H * S, the least there is (Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002).

    Args:
        column: The ranks that sum.
        dtype: What wider numbers are rounded to, to nearest, before they are sent; ``None`` sends them as they are.
    """

    def __init__(self, column: Column, dtype: torch.dtype | None = None) -> None:
        self._column = column
        self._dtype = dtype

    def start(self, part: torch.Tensor) -> Sequence[Pending]:
        """Start to sum ``part`` (flat, contiguous) in place; wait for each that is returned. Does not block."""
        dtype = self._dtype or part.dtype
        if not part.numel():
            return []
        if dtype not in HALF:
            return [Reduction(part, self._column.group)]
        hosts = self._column.group.size()
        if part.numel() * dtype.itemsize * hosts <= GATHERED_BYTES:
            return [_GatheredSum(part, dtype, self._column)]
        return [_ScatteredSum(piece, dtype, self._column) for piece in part.split(PART_BYTES // dtype.itemsize * hosts)]


class _GatheredSum:
    """Of few bytes, in one round: every host gets what all have sent, and sums it."""

    def __init__(self, part: torch.Tensor, dtype: torch.dtype, column: Column) -> None:
        self._part, self._group = part, column.group
        self._sent = part.to(dtype)
        self._received = self._sent.new_empty(column.group.size(), part.numel())
        self._work = column.group._allgather_base(self._received.view(-1), self._sent)

    def wait(self, doing: str) -> None:
        wait(self._work, doing, self._group)
        self._part.copy_(_sum_rows(self._received))


class _ScatteredSum:
    """In two rounds: each host sums a part of what all have sent, and sends that to all."""

    def __init__(self, part: torch.Tensor, dtype: torch.dtype, column: Column) -> None:
        self._part, self._column = part, column
        hosts = column.group.size()
        self._sent = torch.zeros(-(-part.numel() // hosts) * hosts, dtype=dtype)
        self._sent[: part.numel()] = part
        self._received = torch.empty_like(self._sent)
        self._work = column.group.alltoall_base(self._received, self._sent, [], [])

    def wait(self, doing: str) -> None:
        column = self._column
        wait(self._work, doing, column.group)
        own = _sum_rows(self._received.view(column.group.size(), -1)).to(self._sent.dtype)
        wait(column.second._allgather_base(self._sent, own), doing, column.second)
        self._part.copy_(self._sent[: self._part.numel()])


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        total += row
    return total


def open_column(group: dist.ProcessGroup, hosts: list[list[int]]) -> Column | None:
    """The carriers of this rank's slice, ``None`` if it carries none. A collective.

    Args:
        hosts: The ranks of ``group``, host by host.
    """
    columns = list(zip(*hosts, strict=False))  # as many as the smallest host has ranks
    first, second = divide_group(columns, group), divide_group(columns, group)
    return None if first is None or second is None else Column(first, second)
