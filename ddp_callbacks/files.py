"""Files that are there whole or not at all, and what killed processes have left of them."""

from __future__ import annotations

import glob
import os
import re
import socket
import string
from collections.abc import Callable


def write_atomically(path: str, write: Callable[[str], object]) -> None:
    """Call ``write`` with a temporary path beside ``path``, flush it to the disk, and rename it to ``path``.

    A kill at any moment leaves the old file or the new one. What earlier kills have left of temporary files for the
    same path goes first. For one process alone: rank 0, say.

    Args:
        write: Makes a file at the path that it gets: ``lambda temporary: torch.save(state, temporary)``.

    Raises:
        OSError: The file cannot be written; ``path`` is then what it was, and the temporary file has gone.
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


def remove_leftovers(path_format: str) -> None:
    """Remove the temporary files of :func:`write_atomically` whose process, of this host, no longer lives.

    Args:
        path_format: The path; a field of ``str.format`` in it stands for anything.
    """
    ending = re.compile(rf"\.{re.escape(socket.gethostname())}-(\d+)\.tmp$")
    for path in glob.glob(f"{_pattern(path_format)}.*.tmp"):
        found = ending.search(path)
        if found is not None and not _lives(int(found[1])):
            try:
                os.remove(path)
            except FileNotFoundError:
                pass  # somebody else has removed it


def _pattern(path_format: str) -> str:
    parts = string.Formatter().parse(path_format)
    return "".join(glob.escape(text) + ("" if field is None else "*") for text, field, _, _ in parts)


def _lives(pid: int) -> bool:
    """Whether this is another process that lives; this one is writing nothing else."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True
