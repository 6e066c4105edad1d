"""Write files atomically, clean up after killed processes, and cut files of rows back for a resumed run."""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: str, write: Callable[[str], object]) -> None:
    """Call ``write`` with a temporary path next to ``path``, flush the file to disk, and rename it to ``path``.

    If the process is killed at any moment, ``path`` is the old file or the new one. Leftover temporary files for the
    same path are removed first. Call it in one process only, for example on rank 0.

    Args:
        path: The file to write.
        write: Creates a file at the path that it gets: ``lambda temporary: torch.save(state, temporary)``.

    Raises:
        OSError: The file cannot be written. ``path`` is unchanged, and the temporary file is removed.
    """
    remove_leftovers(glob.escape(path))
    temporary = f"{path}.{socket.gethostname()}-{os.getpid()}.tmp"
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def count_lines(path: str) -> int:
    """Return the number of lines in a text file; 0 if there is no file."""
    return len(_lines_of(path))


def keep_lines(path: str, count: int) -> list[str]:
    """Cut a file of rows back to its first lines, so that a resumed run can continue it. Return these lines."""
    lines = _lines_of(path)
    if len(lines) > count:
        write_atomically(path, lambda temporary: Path(temporary).write_text("".join(lines[:count]), newline=""))
    return lines[:count]


def _lines_of(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, newline="") as file:
        return file.readlines()


def remove_leftovers(pattern: str) -> None:
    """Remove temporary files of :func:`write_atomically` whose process, on this host, has ended.

    Args:
        pattern: A :mod:`glob` pattern of the paths that were to be written.
    """
    for path in glob.glob(f"{pattern}.{glob.escape(socket.gethostname())}-*.tmp"):
        pid = path.rpartition("-")[2].removesuffix(".tmp")
        if pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}"):  # this process has no write in progress
            Path(path).unlink(missing_ok=True)  # another process may have removed it
