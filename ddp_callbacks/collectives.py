"""Small messages between all ranks: JSON headers and raw tensors, no pickle on the wire.

Every function is a collective: all ranks of the group must call it, in the same order, and each blocks until all have.
In a world of one it is the identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.failures import enter, of_device, require_sent, require_tags, tag_of, wait
from ddp_callbacks.process_group import get_world_size, resolve_group

GATHERED_BYTES = 768 * 1024
"""Up to this size over all ranks, a sum on the CPU is faster as a gather and a local sum.

A gather takes half the rounds of gloo's ring all-reduce but moves more bytes. On one machine it took 0.4 to 0.7 of the
time up to 160 KB per rank, with two ranks and with three, and they were equal at about 480 KB.
"""

_TAG = 8  # bytes before a small sum, for what it is for; the widest real number has as many

Json = Any  # what json.dumps takes; numbers keep every bit, NaN and infinities included


class Reduction:
    """A sum over the ranks that is under way.

    Args:
        tensor: Flat, contiguous; holds the sum once :meth:`wait` returns, and must not be touched before.
        group: The group that sums; all ranks must start the same reductions in the same order.
        doing: What this is for, the same on every rank: a small sum carries it, so that sums of different things that
            meet are an error. Empty if it is a part of something that does so.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, doing: str = "") -> None:
        self._tensor = tensor = as_real(tensor)
        self._group = group
        self._doing = doing
        self._gathered: torch.Tensor | None = None
        if doing:
            enter(doing)
        if tensor.device.type == "cpu" and group.size() > 1 and tensor.nbytes * group.size() <= GATHERED_BYTES:
            message = _tagged(tensor, tag_of(doing))
            self._gathered = message.new_empty(group.size(), message.numel())
            work = group._allgather_base(self._gathered.view(-1), message)
        else:
            work = group.allreduce([tensor])
        self._work = of_device(work, tensor.device)

    def wait(self, doing: str) -> None:
        """Block until the sum is there.

        Raises:
            PeerError, MismatchError: As :func:`ddp_callbacks.failures.wait`; or another rank sums something else.
        """
        wait(self._work, doing, self._group)
        if self._gathered is not None:
            require_tags(self._gathered[:, :_TAG].view(torch.int64)[:, 0].tolist(), self._doing, self._group)
            rows = self._gathered[:, _TAG : _TAG + self._tensor.nbytes].view(self._tensor.dtype)
            first, second, *others = rows.unbind()
            torch.add(first, second, out=self._tensor)
            for other in others:
                self._tensor.add_(other)


def all_reduce(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum ``tensor`` over the ranks, in place, and return it. A collective.

    Args:
        tensor: Flat and contiguous, of the same size and dtype on every rank; no need of gradients.
        doing: What this is for, as an error is to name it: "the loss of an epoch". The same on every rank.
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank is in another exchange. So with every function here.
    """
    if get_world_size(group) > 1:
        Reduction(tensor, resolve_group(group), doing).wait(doing)
    return tensor


def any_rank(flag: bool, doing: str, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is true on any rank. A collective; every rank gets the same answer.

    Args:
        flag: This rank's.
        doing: What this is for, as an error is to name it: "the loss of an epoch".
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
        tensor: Contiguous, of any shape, which is the same on every rank, as is the dtype.
        doing: What this is for, as an error is to name it: "the loss of an epoch".
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) > 1:
        enter(doing)
        _broadcast(tensor, doing, resolve_group(group))
    return tensor


def start_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to overwrite ``tensor`` with rank 0's; it must not be touched before that is done. Does not block."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([as_real(tensor)], options)


def all_gather_json(value: Json, doing: str, group: dist.ProcessGroup | None = None) -> list[Json]:
    """Every rank's ``value``, by rank. A collective.

    Args:
        value: What ``json.dumps`` takes; NaN and infinities, too, and floats keep every bit. Tuples become lists.
        doing: What this is for, as an error is to name it: "the loss of an epoch".
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    return [header for header, _ in all_gather_tensors(value, [], doing, group)]


def all_gather_tensors(
    header: Json, tensors: Sequence[torch.Tensor], doing: str, group: dist.ProcessGroup | None = None
) -> list[tuple[Json, list[torch.Tensor]]]:
    """Every rank's ``header`` and ``tensors``, by rank. A collective.

    Args:
        header: What ``json.dumps`` takes.
        tensors: Number, shapes and dtypes may differ between ranks.
        doing: What this is for, as an error is to name it: "the loss of an epoch".
        group: ``None`` is the default group.

    Returns:
        The tensors lie on the CPU if ``tensors`` do or there are none, else on this rank's device.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return [(json.loads(json.dumps(header)), list(tensors))]
    resolved = resolve_group(group)
    home = tensors[0].device if tensors else torch.device("cpu")
    message = encode(header, tensors).to(message_device(group))
    sizes = _all_gather_numbers(message.numel(), doing, resolved)
    padded = message.new_zeros(max(sizes))
    padded[: message.numel()] = message
    received = _all_gather(padded, doing, resolved)
    return [decode(part[:size].cpu(), home) for part, size in zip(received, sizes, strict=True)]


def broadcast_tensors(
    header: Json, tensors: Sequence[torch.Tensor], doing: str, group: dist.ProcessGroup | None = None
) -> tuple[Json, list[torch.Tensor]]:
    """Rank 0's ``header`` and ``tensors``, on every rank. A collective.

    Args:
        header: What ``json.dumps`` takes. What other ranks than 0 pass is not read.
        tensors: Of any number, shapes and dtypes. What other ranks than 0 pass is not read.
        doing: What this is for, as an error is to name it: "the loss of an epoch".
        group: ``None`` is the default group.

    Returns:
        The tensors lie on the CPU; in a world of one they are those passed.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return header, list(tensors)
    enter(doing)
    resolved, device = resolve_group(group), message_device(group)
    root = resolved.rank() == 0
    message = encode([doing, header], tensors).to(device) if root else torch.empty(0, dtype=torch.uint8)
    size = int(_broadcast(torch.tensor([message.numel()], device=device), doing, resolved))
    message = message if root else torch.empty(size, dtype=torch.uint8, device=device)
    (sent, header), tensors = decode(_broadcast(message, doing, resolved).cpu(), torch.device("cpu"))
    require_sent(sent, doing, resolved)
    return header, tensors


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device on which small messages travel: the CPU unless the group cannot."""
    devices = resolve_group(group)._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else torch.device("cuda", torch.cuda.current_device())


def divide_group(parts: Sequence[Sequence[int]], group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Further process groups with the backends and the limit of ``group``; the one of this rank, if it is in any.

    Args:
        parts: Disjoint; the ranks of each by their numbers in ``group``, in the order that they get.

    Raises:
        ConfigurationError: ``group`` is the default group, and its ranks have made different numbers of groups.
    """
    whole = group is dist.group.WORLD
    world = dist.distributed_c10d._world
    # torch names a new group after this number, and would wait for the ranks that take another name.
    made = world.group_count if whole else len(world.pg_names)
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
            timeout=group._get_backend(message_device(group)).options._timeout,
            backend=dist.get_backend_config(group),
            use_local_synchronization=not whole,
            sort_ranks=False,
        )
        for part in [*alone, *own]
    ]
    return next((own_group for own_group in groups[len(alone) :] if isinstance(own_group, dist.ProcessGroup)), None)


def encode(header: Json, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat uint8 tensor on the CPU: an 8-byte length, the JSON header, the tensors' raw bytes."""
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([header, specs]).encode()
    parts = [torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)]
    parts += [
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        for tensor in tensors
        if tensor.numel()
    ]
    return torch.cat(parts)


def decode(message: torch.Tensor, device: torch.device) -> tuple[Json, list[torch.Tensor]]:
    """The inverse of :func:`encode`; the tensors are placed on ``device``."""
    size = int.from_bytes(bytes(message[:8].tolist()), "little")
    text = bytearray(size)
    torch.frombuffer(text, dtype=torch.uint8).copy_(message[8 : 8 + size])
    header, specs = json.loads(text)
    offset, tensors = 8 + size, []
    for name, shape in specs:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        count = tensor.numel() * tensor.element_size()
        if count:
            tensor.view(-1).view(torch.uint8).copy_(message[offset : offset + count])
        offset += count
        tensors.append(tensor.to(device))
    return header, tensors


def pack(value: Any, tensors: list[torch.Tensor]) -> Json:
    """Nested plain data as JSON; tensors are appended to ``tensors`` and replaced by their number.

    Raises:
        TypeError: For anything but tensors, numbers, strings, ``None``, lists, tuples and dicts.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(f"only tensors and plain data travel between processes, got a {type(value).__name__}: {value!r}")


def unpack(value: Json, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    ((kind, item),) = value.items()
    if kind == "tensor":
        return tensors[item]
    if kind == "dict":
        return {unpack(key, tensors): unpack(entry, tensors) for key, entry in item}
    if kind in ("list", "tuple"):
        entries = [unpack(entry, tensors) for entry in item]
        return entries if kind == "list" else tuple(entries)
    return item


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as real numbers: gloo knows no complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _all_gather(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    received = [torch.empty_like(tensor) for _ in range(group.size())]
    wait(of_device(group.allgather([received], [tensor]), tensor.device), doing, group)
    return received


def _all_gather_numbers(number: int, doing: str, group: dist.ProcessGroup) -> list[int]:
    """Every rank's, with what it is for."""
    enter(doing)
    message = torch.tensor([number, tag_of(doing)], device=message_device(group))
    numbers, tags = zip(*(row.tolist() for row in _all_gather(message, doing, group)), strict=True)
    require_tags(tags, doing, group)
    return list(numbers)


def _broadcast(tensor: torch.Tensor, doing: str, group: dist.ProcessGroup) -> torch.Tensor:
    wait(of_device(start_broadcast(tensor, group), tensor.device), doing, group)
    return tensor


def _tagged(tensor: torch.Tensor, tag: int) -> torch.Tensor:
    """The bytes of ``tensor`` behind a number, as a message whose copies lie one after the other in memory."""
    message = torch.empty(_TAG + -(-tensor.nbytes // _TAG) * _TAG, dtype=torch.uint8)
    message[:_TAG].view(torch.int64).fill_(tag)
    message[_TAG : _TAG + tensor.nbytes].view(tensor.dtype).copy_(tensor)
    return message
