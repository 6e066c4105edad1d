"""Further process groups, of some of a group's ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ddp_callbacks._torch import count_of_groups, count_of_own_groups, timeout_of
from ddp_callbacks.errors import ConfigurationError


def groups_so_far(group: dist.ProcessGroup) -> int:
    """torch names a new group after this number, and would wait for the ranks that take another name."""
    return count_of_groups() if group is dist.group.WORLD else count_of_own_groups()


def make_subgroup(
    parts: Sequence[Sequence[int]], group: dist.ProcessGroup, counts: Sequence[int]
) -> dist.ProcessGroup | None:
    """Make process groups with the backends and timeout of ``group``; return this rank's, or ``None`` if it is in none.

    Args:
        parts: Disjoint lists of ranks of ``group``. torch orders each new group by the global ranks.
        counts: :func:`groups_so_far` of each rank.

    Raises:
        ConfigurationError: ``group`` is the default group, and its ranks have made different numbers of groups.
    """
    whole = group is dist.group.WORLD
    if whole and len(set(counts)) > 1:
        raise ConfigurationError(
            f"the ranks of the process group have made different numbers of groups: {list(counts)}. Let all of them "
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
    return next((own_group for own_group in groups[len(alone) :] if isinstance(own_group, dist.ProcessGroup)), None)
