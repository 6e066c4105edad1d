"""Further process groups: of some of a group's ranks, and for CPU tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_callbacks._torch import count_of_groups, count_of_own_groups, devices_of, timeout_of
from ddp_callbacks.errors import ConfigurationError
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
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, timeout=timeout_of(group), backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _cpu_groups[group] = made
    return _cpu_groups[group]


def make_subgroup(
    parts: Sequence[Sequence[int]], group: dist.ProcessGroup, gather: Callable[[bytes], list[bytes]]
) -> dist.ProcessGroup | None:
    """Make process groups with the backends and timeout of ``group``; return this rank's, or ``None`` if it is in none.

    Args:
        parts: Disjoint lists of ranks of ``group``. torch orders each new group by the global ranks.
        gather: Gathers a message of each rank, in rank order.

    Raises:
        ConfigurationError: ``group`` is the default group, and its ranks have made different numbers of groups.
    """
    whole = group is dist.group.WORLD
    # torch names a new group after this number, and would wait for the ranks that take another name.
    counts = list(map(int, gather(b"%d" % (count_of_groups() if whole else count_of_own_groups()))))
    if whole and len(set(counts)) > 1:
        raise ConfigurationError(
            f"the ranks of the process group have made different numbers of groups: {counts}. Let all of them "
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
    return next((made for made in groups[len(alone) :] if isinstance(made, dist.ProcessGroup)), None)
