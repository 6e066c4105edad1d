"""What a command asks of a running job, through files in the folder of its logs: ``ddprun stacks``, ``ddprun join``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.node.processes import handled_by

HOSTS = "join"  # a file with the nodes that are to join
JOINED, STACKS = "join.txt", "stacks.txt"  # the answers


def ask(job: str | None, answer: str, seconds: float, **request: str) -> str:
    """Send SIGQUIT to a job of this machine, and return what it answers in the file ``answer``.

    Args:
        job: The folder of its logs; ``None``: the newest one in ddprun-logs.
        request: The contents of files that say what is asked, by name; none asks for the stacks.

    Raises:
        ConfigurationError: There is no such job here, it does not answer within ``seconds``, or another command waits
            for such an answer.
    """
    folder = _folder(job)
    number = folder.name.rpartition("-")[2]
    pid = int(number) if number.isdecimal() else 0
    if signal.SIGQUIT not in (handled_by(pid) or ()):
        raise ConfigurationError(f"the job of {folder} does not run on this machine.")
    for name, text in request.items():
        _request(folder / name, text)
    try:
        return _ask(pid, folder / answer, seconds)
    finally:
        for name in request:
            (folder / name).unlink(missing_ok=True)


def _ask(pid: int, answer: Path, seconds: float) -> str:
    answer.unlink(missing_ok=True)
    os.kill(pid, signal.SIGQUIT)
    end = time.monotonic() + seconds
    while not answer.exists():
        if time.monotonic() > end:
            raise ConfigurationError(f"the job of {answer.parent} does not answer.")
        if handled_by(pid) is None:
            raise ConfigurationError(f"the job of {answer.parent} has ended.")
        time.sleep(0.05)
    return answer.read_text()


def read_request(path: Path) -> str:
    """Return the contents of a request; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def write_answer(path: Path, text: str) -> None:
    """Write an answer, which appears whole. A full disk must not end the training."""
    written = path.with_name(f".{path.name}")
    with suppress(OSError):
        written.write_text(text)
        written.rename(path)


def _request(path: Path, text: str) -> None:
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(f"another ddprun waits for the answer of the job of {path.parent}.") from None


def _folder(job: str | None) -> Path:
    found = sorted(Path("ddprun-logs").glob("*-*-*")) if job is None else [Path(job)]
    if not found or not found[-1].is_dir():
        raise ConfigurationError(
            f"there is no {job or 'job in ddprun-logs'}. Name the folder of its logs: DIR/TIME-PID."
        )
    return found[-1].resolve()
