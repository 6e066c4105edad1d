"""Small messages between all ranks: JSON headers and raw tensors, without pickle.

Every function is a collective: all ranks of the group must call it, in the same order, and it blocks until all have.
With a single process it is the identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_callbacks._torch import count_of_groups, count_of_own_groups, timeout_of
from ddp_callbacks.comm.codec import Json, decode, encode
from ddp_callbacks.comm.cpu_group import cpu_group
from ddp_callbacks.comm.process_group import ProcessGroupWork
from ddp_callbacks.comm.protocol import as_real
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_world_size, resolve_group
from ddp_callbacks.process_group.failures import Pending, enter, of_device, require_sent, require_tags, tag_of, wait

_GATHERED_NBYTES = 1 << 26  # on rank 0, in one message


def all_reduce(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum ``tensor`` over the ranks, in place, and return it. A collective.

    Args:
        tensor: Flat and contiguous, of the same size and dtype on every rank; must not require a gradient.
        doing: The purpose, for error messages: "the loss of an epoch". The same on every rank.
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank is in another exchange. All functions here raise it.
    """
    if get_world_size(group) > 1:
        enter(doing)
        ProcessGroupWork(tensor, resolve_group(group), doing).wait(doing)
    return tensor


def any_rank(flag: bool, doing: str, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is true on any rank. A collective; every rank gets the same answer.

    Args:
        flag: This rank's flag.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return flag
    return any(_all_gather_numbers(int(flag), doing, resolve_group(group)))


def broadcast(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with rank 0's, in place, and return it. A collective.

    Args:
        tensor: Contiguous, with the same shape and dtype on every rank.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) > 1:
        enter(doing)
        _broadcast(tensor, doing, resolve_group(group))
    return tensor


def start_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start overwriting ``tensor`` with rank 0's. Does not block; leave ``tensor`` alone until the work is done."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    messenger = _messenger(tensor, group)
    return of_device(messenger.broadcast([as_real(tensor)], options), tensor.device, messenger)


def all_gather_json(value: Json, doing: str, group: dist.ProcessGroup | None = None) -> list[Json]:
    """Gather every rank's ``value``, in rank order. A collective.

    Args:
        value: Anything that ``json.dumps`` accepts, including NaN and infinities. Floats keep every bit; tuples become
            lists.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    return [header for header, _ in all_gather_tensors(value, [], doing, group)]


def all_gather_tensors(
    header: Json, tensors: Sequence[torch.Tensor], doing: str, group: dist.ProcessGroup | None = None
) -> list[tuple[Json, list[torch.Tensor]]]:
    """Gather every rank's ``header`` and ``tensors``, in rank order. A collective.

    Args:
        header: Anything that ``json.dumps`` accepts.
        tensors: Their number, shapes and dtypes may differ between ranks.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Returns:
        One ``(header, tensors)`` per rank. The tensors are on the device of this rank's ``tensors``, or on the CPU if
        it passed none.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return [(json.loads(json.dumps(header)), list(tensors))]
    resolved = resolve_group(group)
    home = tensors[0].device if tensors else torch.device("cpu")
    message = encode(header, tensors)
    sizes = _all_gather_numbers(message.numel(), doing, resolved)
    padded = message.new_zeros(max(sizes))
    padded[: message.numel()] = message
    received = _all_gather(padded, doing, resolved)
    return [decode(part[:size], home) for part, size in zip(received, sizes, strict=True)]


def broadcast_tensors(
    header: Json, tensors: Sequence[torch.Tensor], doing: str, group: dist.ProcessGroup | None = None
) -> tuple[Json, list[torch.Tensor]]:
    """Send rank 0's ``header`` and ``tensors`` to every rank. A collective.

    Args:
        header: Anything that ``json.dumps`` accepts. Ignored on ranks other than 0.
        tensors: Of any number, shapes and dtypes. Ignored on ranks other than 0.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Returns:
        Rank 0's header and tensors. The tensors are on the CPU; a single process gets those that it passed.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return header, list(tensors)
    enter(doing)
    resolved = resolve_group(group)
    root = resolved.rank() == 0
    message = encode([doing, header], tensors) if root else torch.empty(0, dtype=torch.uint8)
    size = int(_broadcast(torch.tensor([message.numel()]), doing, resolved))
    message = message if root else torch.empty(size, dtype=torch.uint8)
    (sent, header), tensors = decode(_broadcast(message, doing, resolved), torch.device("cpu"))
    require_sent(sent, doing, resolved)
    return header, tensors


def gather_bytes(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Gather every rank's bytes on rank 0, in rank order. A collective; no other rank gets any.

    Args:
        tensor: Flat uint8, on the CPU; of any size on each rank.
        doing: The purpose, for error messages: "the loss of an epoch".
        group: ``None`` is the default group.

    Returns:
        One tensor per rank on rank 0, an empty list on the others.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return [tensor]
    resolved = resolve_group(group)
    sizes = _all_gather_numbers(tensor.numel(), doing, resolved)
    gathered = [torch.empty(size, dtype=torch.uint8) for size in sizes if resolved.rank() == 0]
    step = max(1, _GATHERED_NBYTES // len(sizes))
    for start in range(0, max(sizes), step):
        padded = torch.zeros(min(step, max(sizes) - start), dtype=torch.uint8)
        part = tensor[start : start + step]
        padded[: part.numel()] = part
        for whole, piece in zip(gathered, _gather(padded, doing, resolved), strict=True):
            room = whole[start : start + step]
            room.copy_(piece[: room.numel()])
    return gathered


def new_subgroup(parts: Sequence[Sequence[int]], group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Make process groups with the backends and timeout of ``group``; return this rank's, or ``None`` if it is in none.

    Args:
        parts: Disjoint lists of ranks of ``group``. torch orders each new group by the global ranks.

    Raises:
        ConfigurationError: ``group`` is the default group, and its ranks have made different numbers of groups.
    """
    whole = group is dist.group.WORLD
    # torch names a new group after this number, and would wait for the ranks that take another name.
    made = count_of_groups() if whole else count_of_own_groups()
    counts = all_gather_json(made, "further process groups", group)
    if whole and len(set(counts)) > 1:
        raise ConfigurationError(
            f"the ranks of the process group have made different numbers of groups: {counts}. Let all of them call "
            "new_group for the same groups in the same order."
        )
    rank = dist.get_rank()
    ranks = [[dist.get_global_rank(group, member) for member in part] for part in parts]
    own = ranks if whole else [part for part in ranks if rank in part]
    # The ranks of a smaller group may be in different numbers of others; groups of one rank make up for it.
    alone = [] if whole else [[rank]] * (max(counts) - made)
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


def _all_gather(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    received = [torch.empty_like(tensor) for _ in range(group.size())]
    messenger = _messenger(tensor, group)
    wait(of_device(messenger.allgather([received], [tensor]), tensor.device, messenger), doing, group)
    return received


def _gather(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor on rank 0, nothing on the others."""
    received = [torch.empty_like(tensor) for _ in range(group.size() if group.rank() == 0 else 0)]
    options = dist.GatherOptions()
    options.rootRank = 0
    messenger = _messenger(tensor, group)
    wait(messenger.gather([received] if received else [], [tensor], options), doing, group)
    return received


def _all_gather_numbers(number: int, doing: str, group: dist.ProcessGroup) -> list[int]:
    """Gather every rank's number, and check that all ranks mean the same exchange."""
    enter(doing)
    message = torch.tensor([number, tag_of(doing)])
    numbers, tags = zip(*(row.tolist() for row in _all_gather(message, doing, group)), strict=True)
    require_tags(tags, doing, group)
    return list(numbers)


def _broadcast(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup) -> torch.Tensor:
    wait(start_broadcast(tensor, group), doing, group)
    return tensor


def _messenger(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group whose collectives take ``tensor``."""
    return cpu_group(group) if tensor.device.type == "cpu" else group
