"""Further process groups: of some of a group's ranks, and for CPU tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_callbacks._torch import count_of_own_groups, devices_of, timeout_of
from ddp_callbacks.process_group.rendezvous import choose_interface

_cpu_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, or a gloo group of the same ranks if ``group`` is for GPUs only (``init_process_group("nccl")``).

    Control numbers must not wait for a GPU, and a wait for a GPU cannot end early when another rank has failed. A
    collective on first use, if the gloo group must be made.
    """
    if torch.device("cpu") in devices_of(group):
        return group
    if group not in _cpu_groups:
        choose_interface(os.environ.get("MASTER_ADDR"))
        _cpu_groups[group] = _make(range(group.size()), group, "gloo")
    return _cpu_groups[group]


def make_subgroup(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    gather: Callable[[bytes], list[bytes]],
    backend: str = "",
) -> dist.ProcessGroup | None:
    """Make a process group, with the timeout of ``group``, of each of some disjoint parts of its ranks.

    Args:
        ranks: The part with this rank; empty if it is in none. torch orders the new group by the global ranks.
        gather: Gathers a message of each rank, in rank order.
        backend: For example that of ``group``, if every rank is in a part; its backend for CPUs if empty.
    """
    # torch names a new group after the number of groups that its ranks are in, and would wait for ranks that take
    # another name. Groups of one rank make up for those that only other ranks are in.
    counts = list(map(int, gather(b"%d" % count_of_own_groups())))
    for _ in range(max(counts) - counts[group.rank()]):
        _make([group.rank()], group)
    return _make(ranks, group, backend) if ranks else None


def _make(ranks: Sequence[int], group: dist.ProcessGroup, backend: str = "") -> dist.ProcessGroup:
    if not backend:  # NCCL may need all ranks of the default group for a part of them, too
        parts = dist.get_backend_config(group).split(",")
        backend = next((part for part in parts if part.startswith("cpu:")), "gloo")
    own = [dist.get_global_rank(group, rank) for rank in ranks]
    made = dist.new_group(own, timeout=timeout_of(group), backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
