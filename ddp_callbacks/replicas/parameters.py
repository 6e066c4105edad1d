"""Make and keep replicas equal: broadcast rank 0's state, merge buffers before an evaluation, compare replicas.

All functions but :func:`describe_checkpoint` are collectives and block. With a single process they change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.cluster.environment import KEEP_GOING
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.comm.codec import Json, pack, unpack
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, broadcast_alike, broadcast_object
from ddp_callbacks.comm.differences import describe
from ddp_callbacks.comm.held import persistent_buffers
from ddp_callbacks.errors import ConfigurationError, warn
from ddp_callbacks.process_group import get_rank, get_world_size, resolve_group
from ddp_callbacks.process_group.failures import describe_rank
from ddp_callbacks.replicas.equality import OnDivergence, checksum_of_all, exchange_checksums, repair_or_raise

Trace = tuple[Callable[[], bool], Callable[[], None]]
"""Whether something has changed, and what undoes the change."""

MESSAGE_NBYTES = 1 << 18
"""Tensors of at least this size are sent alone: packing them would cost more time and memory than a message."""
_PACKED = 64  # number of smaller tensors per message
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BUFFERS = "the model's buffers"
_FOLLOWS = (
    "Compute such a buffer from the data of all ranks (all_reduce, all_gather_object). With persistent=False "
    "each rank keeps its own, and what depends on it differs from one process's numbers."
)
_CACHE = (
    "Unless it is about this rank's samples alone, what depends on it differs from one process's numbers: compute it "
    "from the data of all ranks (all_reduce, all_gather_object)."
)


def broadcast_parameters(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every parameter and buffer of ``module`` with rank 0's, in place. A collective.

    Names, shapes and dtypes must be equal on all ranks;
    :func:`ddp_callbacks.comm.require_agreement` can check it. A non-persistent buffer that has another shape
    or dtype on some ranks, such as a cache, stays what it is on each.

    Args:
        module: The same model on every rank.
        group: ``None`` is the default group. Rank 0 is rank 0 of the group.

    Raises:
        ConfigurationError: Two ranks have their model on the same GPU, which NCCL does not support.
        PeerError: Another rank failed or died.
    """
    _require_own_gpus(module, group)
    buffers = persistent_buffers(module)
    caches = {name: buffer for name, buffer in module.named_buffers() if name not in buffers}
    by_rank = all_gather_object({name: describe(cache) for name, cache in caches.items()}, "the caches", group)
    alike = [cache for name, cache in caches.items() if len({found.get(name) for found in by_rank}) == 1]
    broadcast_all([*module.parameters(), *buffers.values(), *alike], "the model's parameters", group)


@torch.no_grad()
def merge_buffers(module: torch.nn.Module, samples: float, group: dist.ProcessGroup | None = None) -> None:
    """Average running statistics, weighted by ``samples``; copy other persistent buffers from rank 0. A collective.

    Running statistics are ``running_mean`` and ``running_var`` of the normalization layers that track them. The ranks'
    batches are parts of the same batches, so the weighted mean of the (unbiased) variances estimates the variance of
    the whole. If no rank has seen a sample, the running statistics stay unchanged. If another buffer differs between
    the ranks, as it follows each one's data, rank 0 warns with its name, also if it is not persistent, which stays each
    rank's own.

    Args:
        module: The same model on every rank; its buffers are overwritten.
        samples: The number of samples in this rank's statistics since the buffers were last equal.
        group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank alike: such a buffer has different shapes.
        PeerError: Another rank failed or died.
    """
    if get_world_size(group) == 1:
        return
    statistics = list(running_statistics(module))
    tracked = {id(buffer) for buffer in statistics}
    _weighted_mean(statistics, samples, group)
    others = {f"buffer {name}": each for name, each in module.named_buffers() if id(each) not in tracked}
    persistent = {f"buffer {name}" for name in persistent_buffers(module)}
    _copy_buffers(others, persistent, group)


def _copy_buffers(buffers: dict[str, torch.Tensor], persistent: set[str], group: dist.ProcessGroup | None) -> None:
    """Overwrite persistent buffers with rank 0's, if they differ; name all that follow each rank's data."""
    if not buffers:
        return
    own = {name: [describe(each), checksum_of(each)] for name, each in buffers.items()}
    by_rank = all_gather_object(own, _BUFFERS, group)
    if all(found == by_rank[0] for found in by_rank):
        return
    shapes = {name: shape for name, (shape, _) in own.items() if name in persistent}
    require_agreement(shapes, _BUFFERS, _FOLLOWS, group)
    differing = [name for name in own if _differs(name, by_rank)]
    copied = [name for name in differing if name in persistent]
    names = [name for name in copied if not name.endswith("num_batches_tracked")]  # a rank may have had no samples
    if get_rank(group) == 0:
        _warn(names, f"all got rank 0's values. {_FOLLOWS}")
        _warn([name for name in differing if name not in persistent], f"each keeps its own. {_CACHE}")
    broadcast_all([buffers[name] for name in copied], _BUFFERS, group)


def _differs(name: str, by_rank: list[dict[str, Any]]) -> bool:
    """Whether a buffer has one shape on all ranks, but other values. (The shape of a cache may follow the batch's.)"""
    shapes, contents = ({found[name][part] if name in found else None for found in by_rank} for part in (0, 1))
    return len(shapes) == 1 and len(contents) > 1


def _warn(names: list[str], what_follows: str) -> None:
    if names:
        warn(f"{', '.join(names)} differed between the ranks, each of which has other data; {what_follows}")


def running_statistics(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    """Yield the running means and variances that differ between the ranks."""
    return (buffer for own in _statistics_by_layer(module) for name, buffer in own.items() if name in _STATISTICS[:2])


def remember_statistics(module: torch.nn.Module) -> list[Trace]:
    """Return, for each layer with running statistics of this rank, whether they have changed, and what undoes that."""
    return [*map(_remember, _statistics_by_layer(module))]


def _remember(statistics: dict[str, torch.Tensor]) -> Trace:
    copies = {name: buffer.clone() for name, buffer in statistics.items()}

    @torch.no_grad()
    def forget() -> None:
        for name, copy in copies.items():
            statistics[name].copy_(copy)

    return lambda: not all(torch.equal(statistics[name], copy) for name, copy in copies.items()), forget


def _statistics_by_layer(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the running statistics of each layer that has some, with the number of its batches, by name.

    This leaves out synchronized layers (:mod:`ddp_callbacks.batch_norm.layers`), whose statistics are equal.
    """
    for layer in module.modules():
        own = {name: buffer for name, buffer in layer.named_buffers(recurse=False) if name in _STATISTICS}
        if own and not getattr(layer, "is_synchronized", False):
            yield own


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Load rank 0's state and hyperparameters of ``optimizer`` on every other rank. A collective.

    Large tensors are sent alone and without a copy.

    Args:
        optimizer: An optimizer of the same parameters on every rank.
        group: ``None`` is the default group.

    Raises:
        PeerError: Another rank failed or died.
        ValueError: From ``load_state_dict``: the parameter groups differ in size.
        TypeError: The state holds something that is neither a tensor nor plain data.
    """
    if get_world_size(group) == 1:
        return
    purpose, device = "the optimizer's state", torch.device("cpu")
    header, tensors = pack(optimizer.state_dict() if get_rank(group) == 0 else None)
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header, specs = broadcast_object([header, specs], purpose, group)
    if get_rank(group) == 0:
        tensors = [tensor.detach().to(device) for tensor in tensors]
    else:
        tensors = [torch.empty(shape, dtype=getattr(torch, name), device=device) for name, shape in specs]
    broadcast_all(tensors, purpose, group)
    if get_rank(group) != 0:
        optimizer.load_state_dict(unpack(header, tensors))


def _require_own_gpus(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise if ranks share a GPU (NCCL's own error message names a bus and no remedy). A collective under NCCL."""
    if get_world_size(group) == 1 or "cuda:nccl" not in dist.get_backend_config(group).split(","):
        return
    seen = all_gather_object(_gpus_of(module), "the GPUs of the ranks", group)
    if any(seen) and os.environ.get(KEEP_GOING):
        raise ConfigurationError(
            "ddprun --keep-going cannot continue a model that NCCL synchronizes: torch ends every process whose "
            'communicator has lost one. Choose backend="gloo" (process_group_backend= of the strategy), or leave out '
            "--keep-going."
        )
    for gpu in sorted(set().union(*seen)):
        sharing = [describe_rank(resolve_group(group), rank) for rank, gpus in enumerate(seen) if gpu in gpus]
        if len(sharing) > 1:
            raise ConfigurationError(
                f"every rank needs a separate GPU, but the models of {' and '.join(sharing)} are on the same one, "
                f"{gpu}. Start at most as many processes on a host as it has GPUs, move the model to the device "
                '"cuda" without a number after the process has joined, or train on CPUs.'
            )


def _gpus_of(module: torch.nn.Module) -> list[str]:
    """Return the unique ids of the GPUs that hold the model."""
    gpus = {tensor.device for tensor in [*module.parameters(), *module.buffers()] if tensor.device.type == "cuda"}
    return sorted(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus)


def broadcast_all(tensors: list[torch.Tensor], purpose: str, group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors, alike on all ranks, in place: small ones packed into messages, large ones without a copy."""
    if get_world_size(group) == 1:
        return
    small = [tensor.detach() for tensor in tensors if tensor.nbytes < MESSAGE_NBYTES]
    for start in range(0, len(small), _PACKED):
        some = small[start : start + _PACKED]
        for tensor, found in zip(some, broadcast_object(some, purpose, group), strict=True):
            tensor.copy_(found)
    for tensor in tensors:
        if tensor.nbytes >= MESSAGE_NBYTES:
            broadcast_alike(tensor.detach(), purpose, group)


def _weighted_mean(tensors: list[torch.Tensor], weight: float, group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    one = torch.ones(1, dtype=torch.float64, device=tensors[0].device)
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors] + [one])
    flat = flat * weight if weight else torch.zeros_like(flat)  # drops the NaN of a rank with weight 0
    all_reduce(flat, "the running statistics", group)
    *parts, total = flat.split([*(tensor.numel() for tensor in tensors), 1])
    if total > 0:
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_((part / total).view(tensor.shape))


def checksum_of_replica(module: torch.nn.Module) -> int:
    """Return a checksum of the bits of the tensors that :func:`require_equal_replicas` compares. Local."""
    return checksum_of_all(_compared(module))


def require_equal_replicas(
    module: torch.nn.Module,
    when: str,
    group: dist.ProcessGroup | None = None,
    note: Json = None,
    on_divergence: OnDivergence = "raise",
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[Json]:
    """Raise unless the parameters and persistent buffers of ``module`` are equal on all ranks. A collective.

    The ranks compare checksums of the bits, which costs about one pass over the memory and one small message. If these
    differ, they compare values: NaN equals NaN, and 0 equals -0. If the ranks run on different kinds of processors,
    which may round differently, a difference causes a warning, and all ranks continue with rank 0's values. Only dense
    tensors are compared. Call it when the ranks should be equal; with local steps, at the end of a window.

    Args:
        module: The same model on every rank.
        when: The moment, for the message: "at the end of epoch 3".
        group: ``None`` is the default group.
        note: JSON data to send along.
        on_divergence: ``"repair"``: all ranks get the bits that more than half of them have, and rank 0 says so;
            without such a majority, all raise.
        optimizers: Those of the module: their options that differ are named first.

    Returns:
        Every rank's note.

    Raises:
        MismatchError: On every rank alike; names the first tensors that differ, by how much, the ranks and hosts.
        PeerError: Another rank failed or died.
    """
    if get_world_size(group) == 1:
        return [note]
    named = _compared(module)
    found = exchange_checksums(named, note, group)
    repair_or_raise(named, found, when, on_divergence, group, optimizers)
    return [each.note for each in found]


def require_same_checkpoint(loaded: str | None, source: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise unless all ranks resume from the same checkpoint. A collective.

    Args:
        loaded: The checkpoint's description from :func:`describe_checkpoint`; ``None`` if this rank has loaded none.
        source: The checkpoint's path or origin, for the message. Equal states may have different sources.
        group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank; names what each rank resumes from.
        PeerError: Another rank failed or died.
    """
    gathered = all_gather_object([loaded, source], "what the ranks resume from", group)
    if all(found == loaded for found, _ in gathered):
        return
    mine = "nothing" if loaded is None else f"{source} ({loaded})"
    remedy = "Give every process the same checkpoint, by the same path or by equal copies of the file."
    require_agreement({"resumes from": mine}, "what they resume from", remedy, group)


def describe_checkpoint(state: Any, **counters: int) -> str:
    """Describe a state as ``epoch 3, checksum 1f2e3d4c``; equal states have equal descriptions. Local.

    Args:
        state: Nested dicts, lists and tuples of tensors and plain data. Other objects count by their repr, without
            addresses.
        counters: Numbers to include, by name.
    """
    named = [f"{name} {value}" for name, value in counters.items()]
    return ", ".join([*named, f"checksum {checksum_of(state):08x}"])


def _compared(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {f"parameter {name}": each for name, each in module.named_parameters()}
    tensors |= {f"buffer {name}": buffer for name, buffer in persistent_buffers(module).items()}
    return {name: tensor for name, tensor in tensors.items() if is_dense(tensor)}
