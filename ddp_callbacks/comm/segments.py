"""Segments of shared memory, which a rank opens to the other ranks of its host.

[Note: memory without a name]
A memfd segment has no name, so nothing stays in /dev/shm however the processes end, and a container's small /dev/shm is
no limit. Other ranks open it as /proc/PID/fd/FD, which works within one PID namespace for the same user; if it fails,
the ranks agree on gloo. As with all shared memory, a child forked during training sees the gradients themselves, not a
copy, and keeps the memory until it ends.
"""

from __future__ import annotations

import os

import torch

from ddp_callbacks._torch import shared_storage
from ddp_callbacks.cluster import environment
from ddp_callbacks.errors import ConfigurationError

SWITCH = "DDP_CALLBACKS_SHARED_MEMORY"
"""Environment variable: 0 on any rank turns shared memory off, on all."""

Segment = tuple[int, int]
"""How a rank names a segment to the others: inode and descriptor.

It may reuse the descriptor of an earlier segment, which the others still have mapped, but not the inode.
"""


def require_sharing() -> None:
    """Raise OSError if this process cannot or should not share memory."""
    if os.environ.get(SWITCH) == "0":
        raise OSError(f"{SWITCH}=0 is set")
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    if not environment.host_identity():
        raise OSError("this system does not say which host it is (/proc)")


def path_of(pid: int, fd: int) -> str:
    """Return the path by which other processes of the host open the descriptor ``fd`` of process ``pid``."""
    return f"/proc/{pid}/fd/{fd}"


@torch.inference_mode(False)
def allocate(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Segment]:
    """Allocate a flat CPU tensor in a segment of its own, which is freed with it; return both. Local."""
    nbytes = max(numel, 1) * dtype.itemsize  # an empty tensor has no address
    try:
        with os.fdopen(os.memfd_create("ddp_callbacks"), "wb") as file:
            file.truncate(nbytes)
            # Use torch's own shared storage: torch can then send the tensor to other processes without moving it.
            storage, kept = shared_storage(file.fileno(), nbytes)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"no shared memory of {nbytes} bytes for gradients: {error}. Raise that limit (ulimit -n), or set "
            f"{SWITCH}=0 to sum through gloo."
        ) from error
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage)[:numel], (os.fstat(kept).st_ino, kept)


def map_bytes(pid: int, fd: int) -> torch.Tensor:
    """Map another process's segment as bytes. Raises OSError or RuntimeError, for example if the process has ended."""
    path = path_of(pid, fd)
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
