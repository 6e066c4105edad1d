"""Make more process groups: of some of a group's ranks, and for CPU tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_callbacks._torch import count_of_own_groups, devices_of, set_timeout, timeout_of
from ddp_callbacks.process_group.diagnosis import diagnose
from ddp_callbacks.process_group.rendezvous import choose_interface
from ddp_callbacks.process_group.survivors import time_to_connect

_cpu_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return ``group``, or a gloo group of the same ranks if it is for GPUs only (``init_process_group("nccl")``).

    Control messages must not wait for a GPU, and a wait for a GPU cannot end early when another rank has failed. A
    collective on first use, if the gloo group must be made.
    """
    if torch.device("cpu") in devices_of(group):
        return group
    if group not in _cpu_groups:
        choose_interface(os.environ.get("MASTER_ADDR"))
        _cpu_groups[group] = _make(range(group.size()), group, "gloo")
    return _cpu_groups[group]


def make_subgroup(
    ranks: Sequence[int], group: dist.ProcessGroup, gather: Callable[[bytes], list[bytes]], backend: str = ""
) -> dist.ProcessGroup | None:
    """Make a process group of each of some disjoint parts of a group's ranks; return the one with this rank.

    A collective of ``group``. The new groups have its timeout.

    Args:
        ranks: The part with this rank; empty if it is in none. torch orders the new group by the global ranks.
        gather: Gathers a message of each rank, in rank order.
        backend: The new groups' backend; empty for the CPU backend of ``group``. Another one, such as that of
            ``group``, needs every rank in a part.
    """
    # torch numbers a new group by how many groups a rank is in already, and ranks with different numbers would wait for
    # each other. Groups of one rank make up for the groups that only other ranks are in.
    counts = list(map(int, gather(b"%d" % count_of_own_groups())))
    for _ in range(max(counts) - counts[group.rank()]):
        _make([group.rank()], group)
    return _make(ranks, group, backend, time_to_connect(timeout_of(group))) if ranks else None


def _make(
    ranks: Sequence[int], group: dist.ProcessGroup, backend: str = "", connecting: timedelta | None = None
) -> dist.ProcessGroup:
    if not backend:  # NCCL may need all ranks of the default group for a part of them, too
        parts = dist.get_backend_config(group).split(",")
        backend = next((part for part in parts if part.startswith("cpu:")), "gloo")
    own = [dist.get_global_rank(group, rank) for rank in ranks]
    timeout = timeout_of(group)
    try:
        made = dist.new_group(own, timeout=connecting or timeout, backend=backend, use_local_synchronization=True)
    except RuntimeError as error:
        raise diagnose(group, "the connections of a further process group", error) from error
    assert isinstance(made, dist.ProcessGroup)
    if connecting is not None:
        set_timeout(timeout, made)
    return made
