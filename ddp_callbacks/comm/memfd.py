"""Anonymous shared memory (memfd): other processes map it through /proc, and the kernel frees it with its last user.

[Note: memory without a name]
A memfd segment has no name, so nothing stays in /dev/shm however the processes end, and a container's small /dev/shm is
no limit. Other ranks open it as /proc/PID/fd/FD, which works within one PID namespace for the same user; if it fails,
the ranks agree on gloo. As with all shared memory, a child forked during training sees the gradients themselves, not a
copy, and keeps the memory until it ends.
"""

from __future__ import annotations

import os

import torch

from ddp_callbacks import environment
from ddp_callbacks._torch import shared_storage

SWITCH = "DDP_CALLBACKS_SHARED_MEMORY"
"""Environment variable: 0 on any rank turns shared memory off, on all."""


def refusal() -> str:
    """Why this process cannot or should not share memory; empty if it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return "" if environment.host_identity() else "this system does not say which host it is (/proc)"


def create(nbytes: int) -> int:
    """Create a segment; return its descriptor. Raises OSError if there is no room for it."""
    fd = os.memfd_create("ddp_callbacks")
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def create_storage(nbytes: int) -> torch.UntypedStorage:
    """Create a segment as torch does for tensors that it sends to other processes. Raises OSError or RuntimeError."""
    fd = create(nbytes)
    try:
        return shared_storage(fd, nbytes)
    finally:
        os.close(fd)


def open_control(pid: int, fd: int) -> int:
    """Open another process's segment; return a descriptor. Raises OSError."""
    return os.open(path_of(pid, fd), os.O_RDWR)


def map_bytes(pid: int, fd: int) -> torch.Tensor:
    """Map another process's segment as bytes. Raises OSError or RuntimeError, for example if the process has ended."""
    path = path_of(pid, fd)
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def path_of(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
