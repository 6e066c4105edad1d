"""Let one job at a time write a path: it locks a file next to the path, which names the process.

The kernel frees the lock whenever and however the process ends. It belongs to the open file: a POSIX lock would be gone
as soon as other code of the process has read the file, as a copy of the folder does. So a forked child, such as a
loader worker that outlives the process, closes the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import socket
import struct
import time
import weakref
from datetime import datetime

from ddp_callbacks.errors import CheckpointError, say

PATIENCE = 5.0
"""Seconds to wait for another process to release the path: a predecessor of this process may still be ending."""

_PAUSE = 0.1
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock, on all 64-bit Linux
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Claim:
    """This process's right to write ``path``, until :meth:`release`. Blocks for :data:`PATIENCE` at most.

    Raises:
        CheckpointError: Another process has the right. Names its host and process id, and since when.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = f"{path}.lock"
        self._file = _lock(self._path, path)
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))
        _write_owner(self._file)

    def release(self) -> None:
        """Let others write. Safe to call twice."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # before unlocking: others check that it still exists
                os.remove(self._path)
        self.close()

    def close(self) -> None:
        """Close the file, which frees the lock if no other process has it open. Safe to call twice."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _close_in_child(claim: weakref.ref[Claim]) -> None:
    if (inherited := claim()) is not None:
        inherited.close()


def _lock(lock: str, path: str) -> int:
    end = time.monotonic() + PATIENCE
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            if _is_still(file, lock):
                return file
        except OSError as error:
            if error.errno in _NO_LOCKS:
                say(f"the file system of {path} has no locks, so two jobs that write it are not noticed")
                return file
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end:
                owner = os.pread(file, 4096, 0).decode(errors="replace")
                os.close(file)
                raise _taken(path, owner) from None
            time.sleep(_PAUSE)
        os.close(file)


def _is_still(file: int, lock: str) -> bool:
    """Whether the locked file is still the one at the path: its last owner may have removed it in between."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(lock))
    except FileNotFoundError:
        return False


def _write_owner(file: int) -> None:
    job = next((f", {name} {os.environ[name]}" for name in _JOB if name in os.environ), "")
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    owner = f"the process {os.getpid()} on host {socket.gethostname()}{job}, which has had it since {since}"
    os.ftruncate(file, 0)
    os.pwrite(file, owner.encode(), 0)


def _taken(path: str, owner: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is being written by another job: {owner or 'a process that has not said its name'}. Two jobs must not "
        "resume from one file. End the other one, or give this one another path. If its host has died and its lock "
        f"stays, remove {path}.lock."
    )
