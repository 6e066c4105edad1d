"""Memory that other processes of the host can open, and that nobody has to remove.

[Note: memory without a name]
A segment is a memfd. It has no name, so nothing is left in /dev/shm however the processes end, and a container's small
/dev/shm is no limit. The other ranks open it as /proc/PID/fd/FD, which works within one PID namespace for one user;
where it does not work, the ranks agree on gloo. As with any memory that is shared, a child forked in the middle of
training sees the gradients themselves, not a copy, and keeps their memory until it ends.
"""

from __future__ import annotations

import os

import torch

from ddp_callbacks._torch import shared_storage


def can_create() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")


def create(nbytes: int) -> int:
    """The descriptor of a new segment. Raises OSError where there is no room for it."""
    fd = os.memfd_create("ddp_callbacks")
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def create_storage(nbytes: int) -> torch.UntypedStorage:
    """A segment as torch makes it for tensors that it sends to other processes. Raises OSError or RuntimeError."""
    fd = create(nbytes)
    try:
        return shared_storage(fd, nbytes)
    finally:
        os.close(fd)


def open_control(pid: int, fd: int) -> int:
    """A descriptor of this process for another's segment. Raises OSError."""
    return os.open(path_of(pid, fd), os.O_RDWR)


def map_bytes(pid: int, fd: int) -> torch.Tensor:
    """Another process's segment, as bytes. Raises OSError or RuntimeError, where it has ended for example."""
    path = path_of(pid, fd)
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def path_of(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
