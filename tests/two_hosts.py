"""Ranks that take themselves for ranks of several hosts, on one machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks.comm.topology import Topology, topology_of


def live_on_hosts(layout: Sequence[int], group: dist.ProcessGroup) -> Topology:
    """Let the ranks of ``group`` live on hosts with so many ranks each. A collective."""
    names = [host for host, count in enumerate(layout) for _ in range(count)]
    before = environment.host_identity
    environment.host_identity = lambda: f"host {names[group.rank()]}"
    try:
        return topology_of(group)
    finally:
        environment.host_identity = before
