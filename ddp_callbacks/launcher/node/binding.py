"""Choose the cores of each rank of a node."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import glob

KINDS = ("none", "core", "numa")
_NUMA = "/sys/devices/system/node"


def cores_of_ranks(kind: str, ranks: int, root: str = _NUMA) -> list[set[int]]:
    """Return the cores of each rank: all, an equal part of them, or those of a NUMA node.

    Memory comes from the NUMA node of the core that writes it first. If there are more ranks than cores, ranks share
    cores. If there are more ranks than NUMA nodes, each gets an equal part of all cores, in the order of the nodes.
    """
    allowed = os.sched_getaffinity(0)
    if kind == "none":
        return [allowed] * ranks
    domains = [domain for cores in _numa_nodes(root) if (domain := cores & allowed)] or [allowed]
    ordered = [thread for domain in domains for thread in sorted(domain, key=lambda thread: (_core(thread), thread))]
    if kind == "numa" and ranks <= len(domains):
        return [domains[rank * len(domains) // ranks] for rank in range(ranks)]
    count = len(ordered)
    return [
        set(ordered[rank * count // ranks : max((rank + 1) * count // ranks, rank * count // ranks + 1)])
        for rank in range(ranks)
    ]


def _core(thread: int) -> int:
    """Return the first hardware thread of the same core; ``thread`` itself if unknown."""
    with suppress(OSError):
        return min(_cores_in(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"))
    return thread


def _numa_nodes(root: str) -> list[set[int]]:
    return [_cores_in(path) for path in sorted(glob(f"{root}/node[0-9]*/cpulist"), key=lambda path: (len(path), path))]


def _cores_in(path: str) -> set[int]:
    """Read the core numbers from a file with a list such as ``0-3,8``."""
    with open(path) as file:
        ranges = [part.partition("-") for part in file.read().strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
