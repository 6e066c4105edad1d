"""Small messages between all ranks: plain data and tensors, without pickle.

Every function is a collective: all ranks of the group must call it, in the same order, and it blocks until all have.
With a single process it is the identity. If another rank failed, died or went silent, it raises PeerError; if another
rank is in another exchange, MismatchError.

A new one is built on :func:`all_gather_object`, and is listed in ``ddp_callbacks.comm`` and on its page. One that needs
something equal on all ranks gathers it and calls :func:`.differences.require_equal`. One that launches on a process
group itself calls ``enter(purpose)``, launches inside :func:`.failures.launching`, and ends in :func:`.failures.wait`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.checksums import memory_of
from ddp_callbacks.comm.codec import bytes_of, decode, encode, pack, tensor_of, unpack
from ddp_callbacks.comm.differences import describe, require_equal
from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.subgroups import cpu_group
from ddp_callbacks.comm.topology import all_gather_bytes
from ddp_callbacks.process_group import get_rank, get_world_size, resolve_group
from ddp_callbacks.process_group.failures import enter, launching, of_device, wait

_SMALL = 1 << 16  # bytes; a CPU tensor up to this size is sent as a message
_GATHERED_NBYTES = 1 << 24  # bytes of all ranks together in one round


def all_reduce(tensor: torch.Tensor, purpose: str, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum ``tensor`` over the ranks, in place, and return it. A collective.

    Args:
        tensor: Contiguous, of the same shape and dtype on every rank; must not require a gradient.
        purpose: For error messages: "the loss of an epoch". The same on every rank.
        group: The ranks' process group; ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank has a tensor of another shape or dtype, or is in another exchange.
    """
    if get_world_size(group) == 1:
        return tensor
    if parts := [part for part in _exchange(tensor, True, purpose, group) if part is not None]:
        return tensor.copy_(functools.reduce(torch.Tensor.add_, parts))
    enter(purpose)
    ProcessGroupWork(tensor.view(-1), resolve_group(group), purpose).wait()
    return tensor


def any_rank(flag: bool, purpose: str, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is true on any rank. A collective; every rank gets the same answer.

    Args:
        flag: This rank's flag.
        purpose: For error messages: "the loss of an epoch".
        group: The ranks' process group; ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    return any(all_gather_object(bool(flag), purpose, group))


def barrier(name: str, group: dist.ProcessGroup | None = None) -> None:
    """Block until every rank is here. A collective: all ranks must call it.

    Args:
        name: What is over then, for error messages: "the download". The same on every rank.
        group: The ranks' process group; ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    any_rank(False, f'the barrier "{name}"', group)


def broadcast(
    tensor: torch.Tensor, purpose: str, group: dist.ProcessGroup | None = None, source: int = 0
) -> torch.Tensor:
    """Overwrite ``tensor`` with the tensor of rank ``source``, in place, and return it. A collective.

    Args:
        tensor: Dense, with the same shape and dtype on every rank.
        purpose: For error messages: "the loss of an epoch".
        group: The ranks' process group; ``None`` is the default group.
        source: The rank in the group.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank has a tensor of another shape or dtype, or is in another exchange.
    """
    if get_world_size(group) == 1:
        return tensor
    found = _exchange(tensor, get_rank(group) == source, purpose, group)[source]
    return broadcast_alike(tensor, purpose, group, source) if found is None else tensor.copy_(found)


def broadcast_alike(
    tensor: torch.Tensor, purpose: str, group: dist.ProcessGroup | None = None, source: int = 0
) -> torch.Tensor:
    """Like :func:`broadcast`, for a tensor that is known to be alike on several ranks: no message compares them."""
    enter(purpose)
    resolved, memory = resolve_group(group), memory_of(tensor)  # as bytes: gloo does not know all dtypes
    messenger = cpu_group(resolved) if tensor.device.type == "cpu" else resolved
    with launching(purpose, messenger):
        work = dist.broadcast(memory, group=messenger, group_src=source, async_op=True)
    wait(of_device(work, tensor.device, messenger), purpose, resolved)
    if memory.data_ptr() != tensor.data_ptr():
        tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))
    return tensor


def all_gather_object(value: Any, purpose: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's ``value``, in rank order. A collective.

    Args:
        value: Tensors, NumPy arrays, numbers, strings and ``None``, in any lists, tuples and dicts. Floats keep every
            bit, including NaN and infinities. The ranks' values may differ in everything.
        purpose: For error messages: "the loss of an epoch".
        group: The ranks' process group; ``None`` is the default group.

    Returns:
        One value per rank. Tensors of GPUs are on this process's current GPU, as in torch, and all others on the CPU. A
        single process gets its own tensors back.

    Raises:
        TypeError: The value holds anything else. Nothing is sent.
        PeerError: Another rank failed, died or went silent.
    """
    header, tensors = pack(value)
    if get_world_size(group) == 1:
        return [unpack(header, tensors)]
    return [*map(decode, all_gather_bytes(encode(header, tensors), purpose, group))]


def broadcast_object(value: Any, purpose: str, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's ``value`` on every rank. A collective.

    Args:
        value: Tensors and plain data, as for :func:`all_gather_object`. Ignored on ranks other than 0.
        purpose: For error messages: "the loss of an epoch".
        group: The ranks' process group; ``None`` is the default group.

    Returns:
        Rank 0's value, with its tensors where :func:`all_gather_object` places them.

    Raises:
        TypeError: On rank 0: the value holds anything else. Nothing is sent.
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return unpack(*pack(value))
    message = encode(*pack(value)) if get_rank(group) == 0 else b""
    return decode(all_gather_bytes(message, purpose, group)[0])


def gather_bytes(tensor: torch.Tensor, purpose: str, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Gather every rank's bytes on rank 0, in rank order. A collective; no other rank gets any.

    Args:
        tensor: Flat uint8, on the CPU; of any size on each rank.
        purpose: For error messages: "the loss of an epoch".
        group: The ranks' process group; ``None`` is the default group.

    Returns:
        One tensor per rank on rank 0, an empty list on the others.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return [tensor]
    sizes = all_gather_object(tensor.numel(), purpose, group)
    gathered = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes if get_rank(group) == 0]
    step = max(1, _GATHERED_NBYTES // len(sizes))
    for start in range(0, max(sizes), step):
        parts = all_gather_bytes(bytes_of(tensor[start : start + step]), purpose, group)
        for whole, part in zip(gathered, parts, strict=False):
            whole[start : start + step] = tensor_of(part, torch.uint8)
    return gathered


def _exchange(
    tensor: torch.Tensor, sends: bool, purpose: str, group: dist.ProcessGroup | None
) -> list[torch.Tensor | None]:
    """Compare the ranks' tensors by shape, dtype and device, and return those that were sent: small ones of the CPU.

    Raises:
        MismatchError: They differ.
    """
    device = tensor.device.type
    is_message = device == "cpu" and tensor.nbytes <= _SMALL
    own = [f"{describe(tensor)} on {device}", tensor if sends and is_message else None]
    described, tensors = zip(*all_gather_object(own, purpose, group), strict=True)
    remedy = "Give every process a tensor of the same shape and dtype, or gather them by all_gather_object."
    require_equal([{"tensor": each} for each in described], purpose, remedy, group)
    return [*tensors]
