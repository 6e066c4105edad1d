"""Stay equal: the ranks' copies of a model are compared, cheaply, and what differs is named."""

from __future__ import annotations

import platform
import socket
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.agreement import SHOWN, require_agreement
from ddp_callbacks.checksums import checksum_of, checksum_of_memory, is_dense, memory_of
from ddp_callbacks.collectives import all_gather_json, broadcast
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group import get_rank, get_world_size

_SMALL = 1 << 16  # bytes
_REMEDY = (
    "All ranks start with the same values and apply the same gradients, so something has changed them on some ranks "
    "alone: a hook or callback that asks for the rank or draws from a random state of its own, a step that not all "
    "ranks took, a buffer that each computes from its own part of the data (register it with persistent=False), or "
    "faulty memory."
)


@torch.no_grad()
def require_equal_replicas(module: torch.nn.Module, when: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise unless the parameters and persistent buffers of ``module`` are equal on all ranks. A collective.

    Compared are checksums of the bits, which cost about one pass over the memory and one small message. Only where
    these differ are values compared: NaN equals NaN, and 0 equals -0. Where the ranks' processors are of different
    kinds, which may round differently, a difference is a warning, and all go on with rank 0's. What is not a dense
    tensor is left out. Call it where the ranks are meant to be equal: with local steps at the end of a window.

    Args:
        module: The same model on every rank.
        when: For the message: "at the end of epoch 3".
        group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank alike, naming the first tensors that differ, by how much, the ranks and hosts.
        PeerError: Another rank failed or died.
    """
    if get_world_size(group) == 1:
        return
    named = dict(_compared(module))
    memories = list(map(memory_of, named.values()))
    whole = [*map(checksum_of_memory, _joined(memories)), sum(memory.numel() for memory in memories)]
    own = [whole, _processor(named), socket.gethostname()]
    gathered = all_gather_json(own, "the comparison of the replicas", group)
    if all(found == whole for found, _, _ in gathered):
        return
    _, processors, hosts = zip(*gathered, strict=True)
    by_rank = all_gather_json(list(map(checksum_of_memory, memories)), "the checksums of the replicas", group)
    differing = [name for name, found in zip(named, zip(*by_rank, strict=True), strict=True) if len(set(found)) > 1]
    distances = all_gather_json([_take(named[name], group) for name in differing], "distances of the replicas", group)
    lines = [
        _line(name, [found[list(named).index(name)] for found in by_rank], max(map(float, distance)), hosts)
        for name, distance in zip(differing, zip(*distances, strict=True), strict=True)
        if any(distance)
    ]
    if not lines:
        return
    more = f"\n  ... and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    text = f"the ranks hold different models {when}:\n  " + "\n  ".join(lines[:SHOWN]) + more + "\n"
    if len(set(processors)) == 1:
        raise MismatchError(text + _REMEDY)
    warnings.warn(f"{text}They compute on {', '.join(processors)}; all go on with rank 0's.", stacklevel=2)


def require_same_checkpoint(loaded: str | None, source: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise unless all ranks go on from the same. A collective.

    Args:
        loaded: What :func:`describe_checkpoint` says of it; ``None``: this rank has loaded nothing.
        source: Where it comes from, for the message; the same state may come from several places.
        group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank, naming what each goes on from.
        PeerError: Another rank failed or died.
    """
    gathered = all_gather_json([loaded, source], "what the ranks resume from", group)
    if all(found == loaded for found, _ in gathered):
        return
    mine = "nothing" if loaded is None else f"{source} ({loaded})"
    remedy = "Give every process the same checkpoint, by the same path or by equal copies of the file."
    require_agreement({"resumes from": mine}, "what they resume from", remedy, group)


def describe_checkpoint(state: Any, **counters: int) -> str:
    """``epoch 3, checksum 1f2e3d4c``: equal for equal states.

    Args:
        state: Nested dicts, lists and tuples. Tensors and plain data count; of other objects their class.
        counters: What to mention by name.
    """
    named = [f"{name} {value}" for name, value in counters.items()]
    return ", ".join([*named, f"checksum {checksum_of(state):08x}"])


def _compared(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        if is_dense(parameter):
            yield f"parameter {name}", parameter
    caches = {
        id(buffer)
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if name in layer._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if id(buffer) not in caches and is_dense(buffer):
            yield f"buffer {name}", buffer


def _joined(memories: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Small ones of a device as one, since each operation on one costs microseconds."""
    small: dict[torch.device, list[torch.Tensor]] = {}
    for memory in memories:
        if memory.numel() > _SMALL:
            yield memory
        else:
            small.setdefault(memory.device, []).append(memory)
    yield from map(torch.cat, small.values())


def _take(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Overwrite ``tensor`` with rank 0's; how far it was from it at most."""
    of_rank_0 = broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), "the replica of rank 0", group)
    is_equal = (tensor == of_rank_0) | ((tensor != tensor) & (of_rank_0 != of_rank_0))
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    distance = (tensor.to(wide) - of_rank_0.to(wide)).abs().nan_to_num(nan=torch.inf)
    farthest = float(torch.where(is_equal, 0.0, distance).max())
    if get_rank(group) != 0:
        tensor.copy_(of_rank_0)
    return farthest


def _line(name: str, checksums: list[int], distance: float, hosts: Sequence[str]) -> str:
    """Which ranks differ from most others, and how far ranks are from rank 0 at most."""
    usual = Counter(checksums).most_common(1)[0][0]
    others = [rank for rank, found in enumerate(checksums) if found != usual]
    ranks = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in others)
    most = ", ".join(str(rank) for rank, found in enumerate(checksums) if found == usual)
    return f"{name}: {ranks} differ{'s' * (len(others) == 1)} from rank {most}, by up to {distance:.3g}"


def _processor(named: dict[str, torch.Tensor]) -> str:
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
