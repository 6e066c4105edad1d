"""Write and read checkpoints in one process. At every moment of a write, a whole file exists."""

from __future__ import annotations

import errno
import glob
import io
import os
import pickle
import re
import shutil
import socket
import zlib
from pathlib import Path
from typing import Any

import torch

from ddp_callbacks.checkpoints.format import not_ours, require_ours
from ddp_callbacks.errors import CheckpointError, warn
from ddp_callbacks.files import write_atomically

_ZIP = b"PK\x03\x04"  # the first bytes of a file of torch.save
_SEAL = b"ddp_callbacks"  # before the checksum, in the comment of the zip file
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # the class that weights_only excludes, in torch's message
_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), " Make room, and the next write will do.")
_REMEDIES[errno.EFBIG] = " Raise the limit on file sizes (ulimit -f), or take another file system."

_known_damaged: set[tuple[int, ...]] = set()  # the identities of files that this process has found damaged


def previous_of(path: str) -> str:
    """Return the path of the file before the last: ``run.previous.pt`` for ``run.pt``."""
    return str(Path(path).with_name(f"{Path(path).stem}.previous{Path(path).suffix}"))


def remove_temporary_files(path: str) -> None:
    """Remove files that killed processes of any host have left. Call it only with the claim of ``path``."""
    for whole in (path, previous_of(path)):
        for leftover in glob.glob(f"{glob.escape(whole)}.*.tmp"):
            Path(leftover).unlink(missing_ok=True)


def write(content: io.BytesIO, path: str) -> None:
    """Write a file next to ``path``, flush it to the disk, make the file at ``path`` the previous one, and rename.

    If the process is killed between the two renames, only the previous file exists, which :func:`find` takes. If this
    process has found the file at ``path`` damaged, the new file replaces it, and the previous one stays.

    Raises:
        CheckpointError: The disk is full, or refuses. The old files remain.
    """

    def fill(temporary: str) -> None:
        with open(temporary, "wb") as file:
            file.writelines(_sealed(content.getbuffer()))
            file.flush()
            os.fsync(file.fileno())
        if _is_there(path):
            os.replace(path, previous_of(path))

    folder = Path(path).absolute().parent
    try:
        write_atomically(path, fill)
        _flush_folder(folder)
    except OSError as error:
        needed, free = (each / 1e6 for each in (content.getbuffer().nbytes, shutil.disk_usage(folder).free))
        space = f" It takes {needed:.1f} MB; {free:.1f} MB are free there." if error.errno == errno.ENOSPC else ""
        raise CheckpointError(
            f"{path} cannot be written on host {socket.gethostname()}: {os.strerror(error.errno or 0)}.{space} "
            f"{_still_there(path)}{_REMEDIES.get(error.errno or 0, '')}"
        ) from error


def _sealed(content: memoryview) -> tuple[memoryview, bytes]:
    """Return the content from ``torch.save``, and its end: a checksum of all of it, as the comment of the zip file."""
    body = content[:-2]  # the last two bytes are the length of the comment, 0
    seal = (len(_SEAL) + 4).to_bytes(2, "little") + _SEAL
    return body, seal + zlib.crc32(seal, zlib.crc32(body)).to_bytes(4, "little")


def _is_there(path: str) -> bool:
    """Whether the file exists, and this process has not found it damaged."""
    return os.path.exists(path) and _identity(path) not in _known_damaged


def _identity(path: str | int) -> tuple[int, ...]:
    """Return numbers that identify a file and its content: another job may have replaced the file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _flush_folder(path: Path) -> None:
    """Flush the renames to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems don't do it for folders
            raise
    finally:
        os.close(folder)


def _still_there(path: str) -> str:
    there = [name for name in (path, previous_of(path)) if _is_there(name)]
    if not there:
        return "No earlier checkpoint that can be read is there."
    return f"Still there, whole and unchanged: {' and '.join(there)}."


# --- reads ------------------------------------------------------------------------------------------------------------


Found = tuple[str, io.BytesIO, dict[str, Any]]
"""The path of a file, its bytes, and its content."""


def find(path: str, weights_only: bool) -> Found | None:
    """Return the newest readable file: that at ``path``, or the previous one with a warning; ``None`` if none exists.

    Raises:
        CheckpointError: Files exist, but none can be read; or one is not ours, or of a newer format.
    """
    reasons: list[str] = []
    for candidate in (path, previous_of(path)):
        try:
            with open(candidate, "rb") as file:
                identity, memory = _identity(file.fileno()), io.BytesIO(file.read())
        except FileNotFoundError:
            reasons.append(f"{candidate} is not there")
            continue
        except OSError as error:
            raise CheckpointError(f"{candidate} cannot be read on host {socket.gethostname()}: {error}") from error
        content = _load(memory, candidate, weights_only)
        if content is not None:
            if reasons:
                warn(f"{reasons[0]}, so the run resumes from the one before: {candidate}.")
            return candidate, memory, content
        reasons.append(f"{candidate} is damaged")
        _known_damaged.add(identity)
    if all(reason.endswith("is not there") for reason in reasons):
        return None
    raise CheckpointError(
        f"no checkpoint can be read: {'; '.join(reasons)}. Remove them to start afresh, or give another path."
    )


def _load(file: io.BytesIO, path: str, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of a file in memory; ``None`` if the file is damaged.

    Raises:
        CheckpointError: The file is not ours, of a newer format, or has objects that ``weights_only`` excludes.
    """
    data = file.getbuffer()
    start, seal, checksum = bytes(data[: len(_ZIP)]), data[-4 - len(_SEAL) : -4], int.from_bytes(data[-4:], "little")
    if seal == _SEAL:  # check this first: a damaged pickle could do anything
        return load_whole(file, path, weights_only) if zlib.crc32(data[:-4]) == checksum else None
    if start != _ZIP:
        if start.strip(b"\0") and _SEAL not in file.getvalue():
            raise not_ours(path)
        return None
    try:
        return load_whole(file, path, weights_only)
    except CheckpointError as error:
        if error.__cause__ is None or _GLOBAL.search(str(error.__cause__)):
            raise
        return None  # torch may raise anything for a damaged file


def load_whole(file: io.BytesIO, path: str, weights_only: bool) -> dict[str, Any]:
    """Return the content of a whole file in memory.

    Raises:
        CheckpointError: The file is not ours, of a newer format, or has objects that ``weights_only`` excludes.
    """
    file.seek(0)
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        raise CheckpointError(
            f"{path} holds objects that are neither tensors nor plain data{f' ({found[1]})' if found else ''}, and to "
            "read them may run code. If you trust the file, pass weights_only=False to Resume or CheckpointFile."
        ) from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    require_ours(content, path)
    return content
