"""What a command asks of a running job, through files in the folder of its logs: ``stacks``, ``status``, ``join``.

No process id is trusted: the process of that number may be another's, or on another machine. A lock tells on its own
machine whether a job runs; disks may hide it from others.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ddp_callbacks.errors import ConfigurationError

JOINED, STACKS, STATUS = "join.txt", "stacks.txt", "status.json"  # the answers
RUNS, _REQUEST = "runs", "request"  # the first is locked while the job runs, the second while a command waits
_LOOK, _TURN = 0.25, 0.05  # seconds between two looks for a request, and for an answer


def new_folder(log_dir: str) -> Path:
    """Create the folder of this job's logs, which only this user may read.

    Its name ends with nanoseconds: in containers, jobs of the same second often have the same process id, too.

    Raises:
        ConfigurationError: It cannot be written there.
    """
    parent = Path(log_dir).absolute()
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
    try:
        folder.mkdir(parents=True, mode=0o700)
        hold(folder)
    except OSError as error:
        remedy = "Choose another place with --log-dir."
        raise ConfigurationError(f"cannot write in {parent}: {error.strerror}. {remedy}") from None
    return folder


def hold(folder: Path) -> None:
    """Mark the folder as that of a job that runs, until its ``RUNS`` is removed or this process ends, however."""
    descriptor = os.open(folder / RUNS, os.O_RDWR | os.O_CREAT | os.O_TRUNC)  # stays open
    with suppress(OSError):  # this disk has no locks, or no room
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, socket.gethostname().encode())


def _runs(folder: Path) -> bool:
    """Whether the job may run: a killed ddprun leaves the file, but no lock."""
    try:
        with (folder / RUNS).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file.read() != socket.gethostname()
    except FileNotFoundError:
        return False
    except OSError:  # it is locked, or this disk has no locks
        return True


async def take_requests(folder: Path, take: Callable[[str], None]) -> None:
    """Call ``take`` with the ``wanted`` of each request, see :func:`ask`. Goes on until cancelled."""
    last = ""
    while True:
        await asyncio.sleep(_LOOK)
        found = await asyncio.to_thread(_read, folder / _REQUEST)
        if found != last and found:
            take(found.partition("\n")[2])
        last = found


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def ask(job: str | None, answer: str, seconds: float, wanted: str = "") -> str:
    """Ask a job for something, and return what it answers in the file ``answer``.

    Args:
        job: The folder of its logs; ``None``: the newest one in ddprun-logs that still runs.
        wanted: The nodes that are to join, as in ``-H``, or :data:`STATUS`; if empty, it is asked for the stacks.

    Raises:
        ConfigurationError: There is no such job, it does not answer within ``seconds``, or another command waits for an
            answer.
    """
    folder = folder_of(job)
    try:
        file = (folder / _REQUEST).open("a")
    except OSError as error:
        raise ConfigurationError(f"cannot write in {folder}: {error.strerror}.") from None
    with file:
        _lock(file, time.monotonic() + seconds)
        (folder / answer).unlink(missing_ok=True)
        file.truncate(0)
        file.write(f"{time.time_ns()}\n{wanted}")  # no two are alike
        file.flush()
        try:
            return _await_answer(folder, folder / answer, seconds)
        finally:
            (folder / _REQUEST).unlink(missing_ok=True)


def _lock(file: TextIO, end: float) -> None:
    """Wait for the turn of this command. A killed one holds no lock, whatever it has left."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigurationError(f"another ddprun waits for the answer of the job ({file.name}).") from None
            time.sleep(_TURN)


def _await_answer(folder: Path, answer: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not answer.exists():
        if not _runs(folder):
            raise ConfigurationError(f"the job of {folder} has ended.")
        if time.monotonic() > end:
            raise ConfigurationError(
                f"the job of {folder} does not answer within {seconds:g} s. Was its ddprun killed? To ask another job, "
                "name the folder of its logs: DIR/TIME."
            )
        time.sleep(_TURN)
    return answer.read_text()


def write_answer(path: Path, text: str) -> None:
    """Write an answer, which appears whole. A full disk must not end the training."""
    written = path.with_name(f".{path.name}")
    with suppress(OSError):
        written.write_text(text)
        written.rename(path)


def folder_of(job: str | None) -> Path:
    """Return the folder of a job's logs; of several jobs, that of the newest one that still runs.

    Raises:
        ConfigurationError: There is none.
    """
    parent = Path(job or ".")
    if job is not None and ((parent / RUNS).is_file() or any(parent.glob("rank-*.log"))):
        return parent.resolve()
    for each in [parent / "ddprun-logs"] if job is None else [parent, parent / "ddprun-logs"]:
        if found := sorted(filter(Path.is_dir, each.glob("*-*-*")), key=lambda one: (_runs(one), one)):
            return found[-1].resolve()
    says = "Name the folder of its logs, DIR/TIME, or only DIR, as in --log-dir DIR."
    raise ConfigurationError(f"there is no job in {job or 'ddprun-logs'}. {says}")
