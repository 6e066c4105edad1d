"""Select the GPU of this process when torch starts CUDA.

Selecting a GPU starts CUDA, which takes several hundred megabytes of the GPU's memory. A run on CPUs must not do so.
"""

from __future__ import annotations

import os
import socket
from functools import partial

import torch

from ddp_callbacks._torch import when_cuda_starts
from ddp_callbacks.cluster.environment import processes_on_host
from ddp_callbacks.errors import ConfigurationError


def select_gpu(local_rank: int, device: torch.device | None) -> None:
    """Make this process's GPU the current one.

    A launcher may show each process a single GPU (Slurm's ``--gpus-per-task=1``), so that every process sees number 0.

    Args:
        local_rank: Rank of this process on its node.
        device: A GPU with its number is selected at once. For ``cuda`` or ``None``, the GPU of the local rank is
            selected when CUDA starts, unless the user has selected another one.

    Raises:
        ConfigurationError: ``device`` is ``cuda``, and the process sees several GPUs but none for its local rank.
    """
    if device is not None and device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    elif (device is None or device.type == "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank < count > 1:
            when_cuda_starts(partial(_select, local_rank))
        elif count > 1 and device is not None:
            raise ConfigurationError(too_few_gpus(local_rank, count))


def too_few_gpus(local_rank: int, count: int) -> str:
    """Return the message for a process without a GPU of its own among the ``count`` GPUs that it sees."""
    told, host = processes_on_host(os.environ), socket.gethostname()
    processes = f"at least {local_rank + 1}" if told is None else f"{told}"
    return (
        f"every process needs a separate GPU, but the {processes} processes of host {host} have {count} "
        f"GPU{'s' * (count != 1)} to choose from (this one has local rank {local_rank}). Start at most as many "
        "processes on a host as it has GPUs, or show each process one GPU of its own (srun --gpus-per-task=1, or "
        "CUDA_VISIBLE_DEVICES)."
    )


def _select(number: int) -> None:
    if torch.cuda.current_device() == 0 and number < torch.cuda.device_count():  # CUDA_VISIBLE_DEVICES may have changed
        torch.cuda.set_device(number)
