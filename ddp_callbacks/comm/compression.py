"""Send fewer bytes between nodes: gradients in half precision, or as low-rank matrices.

A run whose ranks all share memory is exact, whatever ``compress`` says. Half precision rounds what goes over the
network alone; PowerSGD rounds each rank's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp_callbacks.comm.hooks import CommHook
from ddp_callbacks.comm.hosts import hosts_of
from ddp_callbacks.comm.subgroups import cpu_group
from ddp_callbacks.errors import ConfigurationError


@dataclass(frozen=True)
class PowerSGD:
    """Send each gradient matrix as a product of two thin matrices (Vogels et al., 2019, arXiv:1905.13727).

    This is torch's ``powerSGD_hook`` on every rank. The error of a step is added to the next gradient (error feedback).

    Args:
        rank: Columns of the thin matrices. An n x m gradient is sent as rank * (n + m) numbers if that is less than
            half of n * m; vectors are sent uncompressed.
        start: Number of exact steps at the beginning; at least 2.

    It needs numpy.

    Raises:
        ConfigurationError: ``rank`` or ``start`` is too small. At the start of a run: gradients are on CPUs and torch
            sees a GPU.
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


def check_compress(compress: Compress, comm_hook: CommHook | None) -> None:
    """Raise :class:`ConfigurationError` unless ``compress`` is valid and does not conflict with a ``comm_hook``."""
    if compress is not None and compress not in _DTYPES and not isinstance(compress, PowerSGD):
        raise ConfigurationError(f'compress must be "bf16", "fp16", PowerSGD(...) or None, got {compress!r}.')
    if compress is not None and comm_hook is not None:
        raise ConfigurationError(
            f"compress={compress!r} and comm_hook both define how gradients are sent. Use one of them."
        )


def dtype_of(compress: Compress) -> torch.dtype | None:
    """Return the dtype that replaces wider ones on the network; ``None`` if ``compress`` sets none."""
    return _DTYPES[compress] if isinstance(compress, str) else None


def hook_of(compress: Compress, group: dist.ProcessGroup, devices: list[torch.device]) -> tuple[CommHook | None, Any]:
    """Return the communication hook that implements ``compress``, and its state. A collective.

    Returns ``(None, None)`` if the all-reduce itself compresses, or if nothing is compressed.
    """
    if not isinstance(compress, PowerSGD) or not devices:
        return None, None
    if all(device.type == "cpu" for device in devices):
        if hosts_of(group).is_one:
            return None, None
        if torch.cuda.is_available():
            raise ConfigurationError(
                "compress=PowerSGD(...) for gradients on CPUs cannot run where torch sees a GPU: torch's hook would "
                "wait for it. Hide it (CUDA_VISIBLE_DEVICES= in the environment of every process), or train on GPUs."
            )
        group = cpu_group(group)
    state = PowerSGDState(group, matrix_approximation_rank=compress.rank, start_powerSGD_iter=compress.start)
    return powerSGD_hook, state


_POWERSGD = ("iter", "error_dict", "p_memory_dict", "q_memory_dict", "next_stats_report")  # they change in a run


def state_of_hook(state: Any) -> dict[str, Any]:
    """Return the state of torch's PowerSGD hook on this rank, for a checkpoint. Local.

    Empty for other hooks: they keep no state, or one that this library does not know.
    """
    if not isinstance(state, PowerSGDState):
        return {}
    found = {name: getattr(state, name) for name in _POWERSGD}
    rng = state.rng.get_state(legacy=False)
    return found | {"rng": {**rng, "state": {**rng["state"], "key": rng["state"]["key"].tolist()}}}


def load_state_of_hook(state: Any, saved: dict[str, Any]) -> None:
    """Restore the state that :func:`state_of_hook` has returned. Local."""
    if not isinstance(state, PowerSGDState) or not saved:
        return
    for name in _POWERSGD:
        setattr(state, name, saved[name])
    state.rng.set_state(saved["rng"])
