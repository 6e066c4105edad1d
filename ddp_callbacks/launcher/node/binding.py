"""Choose the cores of each rank of a node."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import glob
from itertools import pairwise

KINDS = ("none", "core", "numa")
_MOST = 8  # ranks whose cores are shown


def cores_of_ranks(kind: str, ranks: int, visible: str | None = None, root: str = "/") -> tuple[list[set[int]], str]:
    """Return the cores of each rank: all, an equal part of them, or those of a NUMA node; and why, with GPUs.

    Memory comes from the NUMA node of the core that writes it first. If there are more ranks than cores, ranks share
    cores. If there are more ranks than NUMA nodes, each gets an equal part of all cores, in the order of the nodes.
    With a GPU for each rank it is the GPU's NUMA node, whose ranks share its cores equally.

    Args:
        kind: One of :data:`KINDS`.
        ranks: Their number; ``LOCAL_RANK`` chooses the GPU.
        visible: The variable CUDA_VISIBLE_DEVICES.
    """
    allowed = os.sched_getaffinity(0)
    if kind == "none":
        return [allowed] * ranks, ""
    nodes = {number: cores & allowed for number, cores in _numa_nodes(root).items() if cores & allowed} or {0: allowed}
    gpus, says = _nodes_of_gpus(visible, root)[:ranks] if kind == "numa" else [], ""
    if len(gpus) == ranks and nodes.keys() >= set(gpus):
        parts = {number: iter(_parts([nodes[number]], gpus.count(number))) for number in set(gpus)}
        return [next(parts[number]) for number in gpus], f"on the NUMA nodes {', '.join(map(str, gpus))} of their GPUs"
    if len(gpus) == ranks:
        says = "on NUMA nodes in turn: /sys doesn't tell those of the GPUs"
    if kind == "numa" and ranks <= len(nodes):
        return [list(nodes.values())[rank * len(nodes) // ranks] for rank in range(ranks)], says
    return _parts(list(nodes.values()), ranks), says


def describe_cores(cores: list[set[int]], why: str) -> str:
    """Say which cores the ranks have, whether they share any, and ``why`` these."""
    shown = [_listed(each) for each in cores]
    cut = [*shown[:_MOST], "...", shown[-1]] if len(shown) > _MOST + 1 else shown
    shares = ["which ranks share"] if sum(map(len, cores)) > len(set().union(*cores)) else []
    return ", ".join([f"on cores {' | '.join(cut)}", *shares, *filter(None, [why])])


def _listed(cores: set[int]) -> str:
    """Return core numbers as a text such as ``0-3,8``."""
    begins = [core for core in sorted(cores) if core - 1 not in cores]
    ends = [core for core in sorted(cores) if core + 1 not in cores]
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in zip(begins, ends, strict=True))


def _parts(nodes: list[set[int]], count: int) -> list[set[int]]:
    """Divide the cores of these NUMA nodes into equal parts of neighbours; parts share cores if there are too few."""
    ordered = [thread for cores in nodes for thread in sorted(cores, key=lambda thread: (_core(thread), thread))]
    begins = [number * len(ordered) // count for number in range(count + 1)]
    return [set(ordered[begin : max(end, begin + 1)]) for begin, end in pairwise(begins)]


def _nodes_of_gpus(visible: str | None, root: str) -> list[int]:
    """Return the NUMA node of each of NVIDIA's GPUs, in CUDA's order of equal ones; -1 if unknown."""
    found = sorted(map(os.path.basename, glob(f"{root}/proc/driver/nvidia/gpus/*")))  # by their addresses on the bus
    if visible is None:
        return [_node_of(address, root) for address in found]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    numbers = [int(name) if name.isdigit() else len(found) for name in names]
    return [_node_of(found[number], root) if number < len(found) else -1 for number in numbers] if found else []


def _node_of(address: str, root: str) -> int:
    with suppress(OSError), open(f"{root}/sys/bus/pci/devices/{address.lower()}/numa_node") as file:
        return int(file.read())
    return -1


def _core(thread: int) -> int:
    """Return the first hardware thread of the same core; ``thread`` itself if unknown."""
    with suppress(OSError):
        return min(_cores_in(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"))
    return thread


def _numa_nodes(root: str) -> dict[int, set[int]]:
    """Return the cores of each NUMA node, by its number."""
    paths = glob(f"{root}/sys/devices/system/node/node[0-9]*/cpulist")
    found = {int(path.split("/")[-2].removeprefix("node")): _cores_in(path) for path in paths}
    return dict(sorted(found.items()))


def _cores_in(path: str) -> set[int]:
    """Read the core numbers from a file with a list such as ``0-3,8``."""
    with open(path) as file:
        ranges = [part.partition("-") for part in file.read().strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
