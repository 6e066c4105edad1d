"""Atomic file writes, clean-up after killed processes, and files of rows that go on."""

from __future__ import annotations

import glob
import os
import re
import socket
import string
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
    remove_leftovers(path.replace("{", "{{").replace("}", "}}"))
    temporary = f"{path}.{socket.gethostname()}-{os.getpid()}.tmp"
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def count_lines(path: str) -> int:
    """Of a file of text; 0 if there is none."""
    return len(_lines_of(path))


def keep_lines(path: str, count: int) -> list[str]:
    """Let a file of rows go on behind its first lines, where it was when a run was cut. Returns these lines."""
    lines = _lines_of(path)
    if len(lines) > count:
        write_atomically(path, lambda temporary: Path(temporary).write_text("".join(lines[:count]), newline=""))
    return lines[:count]


def _lines_of(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, newline="") as file:
        return file.readlines()


def remove_leftovers(path_format: str) -> None:
    """Remove temporary files of :func:`write_atomically` whose process, on this host, has ended.

    Args:
        path_format: The path; a ``str.format`` field in it matches anything.
    """
    ending = re.compile(rf"\.{re.escape(socket.gethostname())}-(\d+)\.tmp$")
    for path in glob.glob(f"{_pattern(path_format)}.*.tmp"):
        found = ending.search(path)
        if found is not None and not _lives(int(found[1])):
            try:
                os.remove(path)
            except FileNotFoundError:
                pass  # another process has removed it


def _pattern(path_format: str) -> str:
    parts = string.Formatter().parse(path_format)
    return "".join(glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in parts)


def _lives(pid: int) -> bool:
    """Whether another process with this id is alive. This process has no write in progress."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True
