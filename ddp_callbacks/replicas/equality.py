"""Compare tensors that must be equal on all ranks; name those that differ, and let the ranks have the majority's."""

from __future__ import annotations

import logging
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from ddp_callbacks.comm.agreement import optimizer_settings
from ddp_callbacks.comm.checksums import checksum_of_memory, memory_of
from ddp_callbacks.comm.codec import Json
from ddp_callbacks.comm.collectives import all_gather_object, broadcast
from ddp_callbacks.comm.differences import differences, listed
from ddp_callbacks.errors import ConfigurationError, MismatchError, say, warn
from ddp_callbacks.process_group import get_rank

OnDivergence = Literal["raise", "repair"]

_REMEDY = (
    "All ranks start with the same values and apply the same gradients, so something has changed them on some ranks "
    "alone: a hook or callback that asks for the rank, draws from a random state of its own, or reads a value of its "
    "rank's part of the data (a logged loss, or what a closure returns to LBFGS), a step that not all ranks took, an "
    "optimizer's setting that differs (a learning rate), a gradient that no backward has made (p.grad = ...), a buffer "
    "that each computes from its own part of the data, or faulty memory."
)
_NO_MAJORITY = (
    'on_divergence="repair" needs values that more than half of the ranks have, and there is no such majority.'
)


class Replica(NamedTuple):
    """What a rank tells the others of its tensors.

    Attributes:
        checksum: Of the bits of all of them.
        processor: What computes them.
        host: The name of its machine.
        note: What the caller sends along.
    """

    checksum: int
    processor: str
    host: str
    note: Json


def check_on_divergence(on_divergence: str) -> None:
    """Raise :class:`ConfigurationError` unless ``on_divergence`` is ``"raise"`` or ``"repair"``."""
    if on_divergence not in get_args(OnDivergence):
        raise ConfigurationError(f'on_divergence must be "raise" or "repair", got {on_divergence!r}.')


def checksum_of_all(named: Mapping[str, torch.Tensor]) -> int:
    """Return a checksum of the bits of dense tensors. Takes about one pass over their memory. Local."""
    return hash(tuple(checksum_of_memory(memory_of(tensor)) for tensor in named.values()))


def exchange_checksums(
    named: Mapping[str, torch.Tensor], note: Json = None, group: dist.ProcessGroup | None = None
) -> list[Replica]:
    """Return what each rank tells of its tensors. A collective; one small message.

    Args:
        named: Dense tensors by name, in the same order on every rank.
        note: JSON data to send along.
        group: ``None`` is the default group.
    """
    own = [checksum_of_all(named), _processor(named), socket.gethostname(), note]
    return [Replica(*each) for each in all_gather_object(own, "the comparison of the replicas", group)]


@torch.no_grad()
def repair_or_raise(
    named: Mapping[str, torch.Tensor],
    replicas: Sequence[Replica],
    when: str,
    on_divergence: OnDivergence,
    group: dist.ProcessGroup | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """If the ranks' checksums differ, raise, or overwrite the tensors that differ. A collective then.

    NaN equals NaN, and 0 equals -0. Tensors that some ranks lack are not compared. If the ranks run on different kinds
    of processors, which may round differently, a difference causes a warning, and all ranks get rank 0's values.

    Args:
        named: The tensors.
        replicas: What :func:`exchange_checksums` returned for them.
        when: The moment, for the message: "at the end of epoch 3".
        on_divergence: ``"repair"``: all ranks get the bits that more than half of them have, and rank 0 says so;
            without such a majority, all raise.
        group: ``None`` is the default group.
        optimizers: Those of the tensors: their options that differ are named first.

    Raises:
        MismatchError: On every rank alike; names the first tensors that differ, by how much, the ranks and hosts.
        PeerError: Another rank failed or died.
    """
    if len({each.checksum for each in replicas}) == 1:
        return
    differing = _differing(named, group)
    are_alike = len({each.processor for each in replicas}) == 1
    sources = {name: _majority(found) if are_alike else 0 for name, found in differing.items()}
    taken = [_take(named[name], source or 0, group) for name, source in sources.items()]
    distances = zip(*all_gather_object(taken, "distances of the replicas", group), strict=True)
    lines = [
        _line(name, found, max(map(float, distance)), replicas)
        for (name, found), distance in zip(differing.items(), distances, strict=True)
        if any(distance)
    ]
    if not lines:
        return
    settings = [optimizer_settings(each).items() for each in optimizers]
    named_settings = {
        name + f", optimizer {number}" * (number > 0): value for number, of in enumerate(settings) for name, value in of
    }
    options = differences(all_gather_object(named_settings, "the options of the optimizers", group))
    text = f"the ranks hold different models {when}:{listed([*options, *lines])}"
    if not are_alike:
        processors = ", ".join(each.processor for each in replicas)
        warn(f"{text}\nThey compute on {processors}; all continue with rank 0's.")
    elif on_divergence == "raise":
        raise MismatchError(f"{text}\n{_REMEDY}")
    elif None in sources.values():
        raise MismatchError(f"{text}\n{_NO_MAJORITY} {_REMEDY}")
    elif get_rank(group) == 0:
        say(f"{text}\nAll continue with the values of the majority.", logging.WARNING)


def _differing(named: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> dict[str, list[int]]:
    """Return each rank's checksum of each tensor that differs, by name. A collective."""
    own = {name: checksum_of_memory(memory_of(tensor)) for name, tensor in named.items()}
    by_rank = all_gather_object(own, "the checksums of the replicas", group)
    common = [name for name in by_rank[0] if all(name in found for found in by_rank)]
    by_name = {name: [found[name] for found in by_rank] for name in common}
    return {name: found for name, found in by_name.items() if len(set(found)) > 1}


def _majority(checksums: list[int]) -> int | None:
    """Return the first of the ranks that agree, if these are more than half of all."""
    usual, count = Counter(checksums).most_common(1)[0]
    return checksums.index(usual) if 2 * count > len(checksums) else None


def _take(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> float:
    """Overwrite ``tensor`` with that of rank ``source``; return the largest distance between the two."""
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    right = broadcast(own, "the tensors that differ", group, source)
    is_equal = (tensor == right) | ((tensor != tensor) & (right != right))
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    distance = (tensor.to(wide) - right.to(wide)).abs().nan_to_num(nan=torch.inf)
    farthest = float(torch.where(is_equal, 0.0, distance).max())
    if get_rank(group) != source:
        tensor.copy_(right)
    return farthest


def _line(name: str, checksums: list[int], distance: float, replicas: Sequence[Replica]) -> str:
    """Name the ranks that differ from most, and the largest distance from these."""
    usual = Counter(checksums).most_common(1)[0][0]
    others = [rank for rank, found in enumerate(checksums) if found != usual]
    ranks = ", ".join(f"rank {rank} ({replicas[rank].host})" for rank in others)
    most = ", ".join(str(rank) for rank, found in enumerate(checksums) if found == usual)
    return f"{name}: {ranks} differ{'s' * (len(others) == 1)} from rank {most}, by up to {distance:.3g}"


def _processor(named: Mapping[str, torch.Tensor]) -> str:
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
