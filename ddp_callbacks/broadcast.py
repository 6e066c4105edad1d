"""Start equal: parameters, buffers and optimizer state from rank 0; and buffers merged before an evaluation.

All functions are collectives and block; in a world of one they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ddp_callbacks.batch_norm import SynchronizedLayer
from ddp_callbacks.collectives import (
    all_gather_json,
    all_reduce,
    broadcast,
    broadcast_tensors,
    message_device,
    pack,
    unpack,
)
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.failures import describe_rank
from ddp_callbacks.process_group import get_rank, get_world_size, resolve_group

MESSAGE_NBYTES = 1 << 18
"""Tensors of at least so many bytes travel alone: their copies would cost more time and memory than a message.

Smaller ones travel together until they have as many. Between hosts one message of all would be slower, since a host
passes a message on when it has the whole (four hosts, 100 Mbit/s, 16 tensors of 64 KiB: 226 ms, in four messages 175).
"""


def broadcast_parameters(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every parameter and buffer of ``module`` with rank 0's, in place. A collective.

    Names, shapes and dtypes must be equal on all ranks; :func:`ddp_callbacks.agreement.require_agreement` can tell.

    Args:
        module: The same model on every rank.
        group: ``None`` is the default group; rank 0 is that of the group.

    Raises:
        ConfigurationError: Two ranks have their model on the same GPU, which NCCL cannot do.
        PeerError: Another rank failed or died.
    """
    _require_own_gpus(module, group)
    _broadcast_all([*module.parameters(), *module.buffers()], "the model's parameters", group)


@torch.no_grad()
def merge_buffers(module: torch.nn.Module, samples: float, group: dist.ProcessGroup | None = None) -> None:
    """Make the buffers equal: running statistics averaged with ``samples`` as this rank's weight, others rank 0's.

    Running statistics are ``running_mean`` and ``running_var`` of the normalization layers that track them. The
    ranks' batches are parts of the same batches, so that the plain weighted mean of the (unbiased) variances is the
    estimate for the whole. Where no rank has seen a sample, nothing changes. A collective.

    Args:
        module: The same model on every rank; its buffers are overwritten.
        samples: How many samples this rank's statistics come from, since the buffers were last equal.
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed or died.
    """
    if get_world_size(group) == 1:
        return
    statistics = list(running_statistics(module))
    tracked = {id(buffer) for buffer in statistics}
    _weighted_mean(statistics, samples, group)
    _broadcast_all([buffer for buffer in module.buffers() if id(buffer) not in tracked], "the model's buffers", group)


def running_statistics(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    """The running means and variances of the normalization layers of ``module`` that differ between the ranks.

    Not those of layers that normalize by the whole batch (:mod:`ddp_callbacks.batch_norm`), which are equal.
    """
    for layer in module.modules():
        if isinstance(layer, SynchronizedLayer):
            continue
        for name in ("running_mean", "running_var"):
            if isinstance(buffer := layer._buffers.get(name), torch.Tensor):
                yield buffer


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Load rank 0's state and hyperparameters of ``optimizer`` on every other rank. A collective.

    Large tensors travel alone and without a copy.

    Args:
        optimizer: One over the same parameters on every rank.
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed or died.
        ValueError: From ``load_state_dict``, if the groups hold different numbers of parameters.
        TypeError: If the state holds something that is neither a tensor nor plain data.
    """
    if get_world_size(group) == 1:
        return
    doing, device = "the optimizer's state", message_device(group)
    tensors: list[torch.Tensor] = []
    header = pack(optimizer.state_dict(), tensors) if get_rank(group) == 0 else None
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    (header, specs), _ = broadcast_tensors([header, specs], [], doing, group)
    if get_rank(group) == 0:
        tensors = [tensor.detach().to(device) for tensor in tensors]
    else:
        tensors = [torch.empty(shape, dtype=getattr(torch, name), device=device) for name, shape in specs]
    _broadcast_all(tensors, doing, group)
    if get_rank(group) != 0:
        optimizer.load_state_dict(unpack(header, tensors))


def _require_own_gpus(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """NCCL's own words for it name a bus, and no remedy."""
    if get_world_size(group) == 1 or "cuda:nccl" not in dist.get_backend_config(group).split(","):
        return
    seen = all_gather_json(_gpus_of(module), "the GPUs of the ranks", group)
    for gpu in sorted(set().union(*seen)):
        sharing = [describe_rank(resolve_group(group), rank) for rank, gpus in enumerate(seen) if gpu in gpus]
        if len(sharing) > 1:
            raise ConfigurationError(
                f"every rank needs a GPU of its own, but the models of {' and '.join(sharing)} are on the same one, "
                f"{gpu}. Start at most as many processes on a host as it has GPUs, move the model to the device "
                '"cuda" without a number, or train on CPUs.'
            )


def _gpus_of(module: torch.nn.Module) -> list[str]:
    """What tells the GPUs that hold the model from all others in the world."""
    gpus = {tensor.device for tensor in [*module.parameters(), *module.buffers()] if tensor.device.type == "cuda"}
    return sorted(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus)


def _broadcast_all(tensors: list[torch.Tensor], doing: str, group: dist.ProcessGroup | None) -> None:
    """Small tensors in common messages, large ones without a copy."""
    if get_world_size(group) == 1:
        return
    for some in _messages(tensors):
        if len(some) == 1 and _is_as_in_memory(some[0]):
            broadcast(some[0], doing, group)
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in some])
            broadcast(flat, doing, group)
            _copy_back(flat, some)


def _is_as_in_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _messages(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors of one dtype and device together, until they have :data:`MESSAGE_NBYTES`."""
    waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in map(torch.Tensor.detach, tensors):
        if tensor.nbytes >= MESSAGE_NBYTES:
            yield [tensor]
            continue
        some = waiting.setdefault((tensor.dtype, tensor.device), [])
        some.append(tensor)
        if sum(other.nbytes for other in some) >= MESSAGE_NBYTES:
            yield waiting.pop((tensor.dtype, tensor.device))
    yield from waiting.values()


def _weighted_mean(tensors: list[torch.Tensor], weight: float, group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    one = torch.ones(1, dtype=torch.float64, device=tensors[0].device)
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors] + [one])
    flat = flat * weight if weight else torch.zeros_like(flat)  # NaN of a rank that counts nowhere stays there
    all_reduce(flat, "the running statistics", group)
    if flat[-1] > 0:
        _copy_back(flat[:-1] / flat[-1], tensors)


def _copy_back(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
