"""Send fewer bytes between nodes: gradients in half precision, or as low-rank matrices.

Only traffic over the network is compressed. Sums within a node that shares memory stay exact, so a run on a single node
is exact.
"""

from __future__ import annotations

import importlib.util
import weakref
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp_callbacks.comm.ddp_hook import future_of
from ddp_callbacks.comm.hierarchical import HierarchicalAllReduce
from ddp_callbacks.comm.hooks import CommHook, FutureWork, GradBucket
from ddp_callbacks.comm.protocol import Work
from ddp_callbacks.comm.topology import topology_of
from ddp_callbacks.errors import ConfigurationError


@dataclass(frozen=True)
class PowerSGD:
    """Send each gradient matrix as a product of two thin matrices (Vogels et al., 2019, arXiv:1905.13727).

    This is torch's ``powerSGD_hook``, between nodes. The error of a step is added to the next gradient (error
    feedback).

    Args:
        rank: Columns of the thin matrices. An n x m gradient is sent as rank * (n + m) numbers if that is less than
            half of n * m; vectors are sent uncompressed.
        start: Number of exact steps at the beginning; at least 2.

    It needs numpy.

    Raises:
        ConfigurationError: ``rank`` or ``start`` is too small. At the start of a run: there is no numpy, or gradients
            are on CPUs and torch sees a GPU.
    """

    rank: int = 4
    start: int = 10

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"rank of PowerSGD must be at least 1, got {self.rank}.")
        if self.start < 2:
            raise ConfigurationError(f"start of PowerSGD must be at least 2, got {self.start}.")


Compress: TypeAlias = Literal["bf16", "fp16"] | PowerSGD | None

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def check_compress(compress: Compress, comm_hook: CommHook | None) -> None:
    """Raise :class:`ConfigurationError` unless ``compress`` is valid and does not conflict with a ``comm_hook``."""
    if compress is not None and compress not in _DTYPES and not isinstance(compress, PowerSGD):
        raise ConfigurationError(f'compress must be "bf16", "fp16", PowerSGD(...) or None, got {compress!r}.')
    if compress is not None and comm_hook is not None:
        raise ConfigurationError(
            f"compress={compress!r} and comm_hook both define how gradients are sent. Use one of them."
        )


def dtype_of(compress: Compress) -> torch.dtype | None:
    """The dtype that replaces wider ones on the network; ``None`` if ``compress`` sets none."""
    return _DTYPES[compress] if isinstance(compress, str) else None


def hook_of(compress: Compress, group: dist.ProcessGroup, devices: list[torch.device]) -> tuple[CommHook | None, Any]:
    """The comm hook that implements ``compress``, with its state. A collective.

    ``(None, None)`` if the all-reduce itself compresses, or nothing does.
    """
    on_cpu = all(device.type == "cpu" for device in devices)
    if compress is None or not devices:
        return None, None
    if isinstance(compress, PowerSGD) and not (on_cpu and topology_of(group).on_one_node):
        _require_numpy()
    if not on_cpu:
        return (_HOOKS[compress], group) if isinstance(compress, str) else (powerSGD_hook, _state(compress, group))
    if isinstance(compress, str) or topology_of(group).on_one_node:
        return None, None
    _require_no_gpu()
    return PowerSGDBetweenNodes(group, compress), None


def _require_numpy() -> None:
    if importlib.util.find_spec("numpy") is None:
        raise ConfigurationError("compress=PowerSGD(...) needs numpy, which torch's hook imports: pip install numpy.")


def _require_no_gpu() -> None:
    if torch.cuda.is_available():
        raise ConfigurationError(
            "compress=PowerSGD(...) for gradients on CPUs cannot run where torch sees a GPU: torch's hook would wait "
            "for it. Hide it (CUDA_VISIBLE_DEVICES= in the environment of every process), or train on GPUs."
        )


class PowerSGDBetweenNodes:
    """A comm hook: the leader of each node sends the sum of the node's ranks."""

    def __init__(self, group: dist.ProcessGroup, settings: PowerSGD) -> None:
        self._intra_node, self._groups, self._threads = topology_of(group).open()
        self.state = None if self._groups is None else _state(settings, self._groups.group)
        self._group = weakref.ref(group)
        self._size = group.size()
        self.allocate = self._intra_node.allocate

    def __call__(self, _: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        inter_node = None if self.state is None else _PowerSGDAllReduce(self.state, bucket, self._size)
        # A single leader: matrices must stay whole, and the hook's state counts steps by seeing every bucket.
        sums = HierarchicalAllReduce(self._intra_node, inter_node, self._threads, exact=False, leaders=1)
        group = self._group()
        assert group is not None
        return future_of(sums.launch(bucket.buffer()), bucket.buffer(), group)


class _PowerSGDAllReduce:
    """Implements :class:`.hierarchical.InterNode`."""

    def __init__(self, state: PowerSGDState, bucket: GradBucket, ranks: int) -> None:
        self._state, self._bucket, self._ranks = state, bucket, ranks

    def start(self, shard: torch.Tensor, doing: str) -> list[Work]:
        if not shard.numel():
            return []  # not the leader
        group = self._state.process_group
        shard.mul_(group.size() / self._ranks)  # the hook divides by the number of nodes
        bucket = self._bucket
        whole: Any = GradBucket(bucket.index(), shard, bucket.parameters(), is_last=bucket.is_last())
        return [FutureWork(powerSGD_hook(self._state, whole), shard, group)]


_POWERSGD = ("iter", "error_dict", "p_memory_dict", "q_memory_dict", "next_stats_report")  # what changes in a run


def state_of_hook(hook: CommHook | None, state: Any) -> dict[str, Any]:
    """What a comm hook keeps from step to step on this rank, for a checkpoint: that of torch's PowerSGD. Local.

    Empty for hooks that keep nothing, and for others, whose state this library does not know.
    """
    kept = _powersgd_of(hook, state)
    if kept is None:
        return {}
    found = {name: getattr(kept, name) for name in _POWERSGD}
    rng = kept.rng.get_state(legacy=False)
    return found | {"rng": {**rng, "state": {**rng["state"], "key": rng["state"]["key"].tolist()}}}


def load_state_of_hook(hook: CommHook | None, state: Any, saved: dict[str, Any]) -> None:
    """Inverse of :func:`state_of_hook`. Local."""
    kept = _powersgd_of(hook, state)
    if kept is None or not saved:
        return
    for name in _POWERSGD:
        setattr(kept, name, saved[name])
    kept.rng.set_state(saved["rng"])


def _powersgd_of(hook: CommHook | None, state: Any) -> PowerSGDState | None:
    kept = hook.state if isinstance(hook, PowerSGDBetweenNodes) else state
    return kept if isinstance(kept, PowerSGDState) else None


def _state(settings: PowerSGD, group: dist.ProcessGroup) -> PowerSGDState:
    return PowerSGDState(group, matrix_approximation_rank=settings.rank, start_powerSGD_iter=settings.start)
