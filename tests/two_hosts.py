"""Ranks that take themselves for ranks of several hosts, on one machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ddp_callbacks import segments
from ddp_callbacks.all_reduce import Levels, levels_of


def live_on_hosts(layout: Sequence[int], group: dist.ProcessGroup) -> Levels:
    """Let the ranks of ``group`` live on hosts with so many ranks each. A collective."""
    names = [host for host, count in enumerate(layout) for _ in range(count)]
    before = segments.host_identity
    segments.host_identity = lambda: f"host {names[group.rank()]}"
    try:
        return levels_of(group)
    finally:
        segments.host_identity = before
