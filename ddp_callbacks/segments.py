"""Memory that other processes of the host can open, and that nobody has to remove.

[Note: memory without a name]
A segment is a memfd. It has no name, so nothing is left in /dev/shm however the processes end, and a container's small
/dev/shm is no limit. The other ranks open it as /proc/PID/fd/FD, which works within one PID namespace for one user;
where it does not work, the ranks agree on gloo. As with any memory that is shared, a child forked in the middle of
training sees the gradients themselves, not a copy, and keeps their memory until it ends.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what makes or writes memory that is kept: made in inference mode, it could not be written outside."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside


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
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
        return storage
    finally:
        os.close(fd)


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """The descriptor by which other processes open it."""
    fd: int = storage._share_fd_cpu_()[0]
    return fd


def open_control(pid: int, fd: int) -> int:
    """A descriptor of this process for another's segment. Raises OSError."""
    return os.open(path_of(pid, fd), os.O_RDWR)


def map_bytes(pid: int, fd: int) -> torch.Tensor:
    """Another process's segment, as bytes. Raises OSError or RuntimeError, where it has ended for example."""
    path = path_of(pid, fd)
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def path_of(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"


def host_identity() -> str:
    """Equal for two processes that can name each other by their process ids; empty where nothing tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
