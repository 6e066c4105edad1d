"""What a command asks of a running job, through files in the folder of its logs: ``ddprun stacks``, ``ddprun join``."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ddp_callbacks.environment import host_identity
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.node.processes import handled_by

HOSTS = "join"  # a file with the nodes that are to join
JOINED, STACKS = "join.txt", "stacks.txt"  # the answers
_JOB = "job.txt"  # a file with the name of the job's machine, and which process there runs the job


def new_folder(parent: Path) -> Path:
    """Create the folder of this job's logs, which only this user may read; no other job has it."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
    (folder / _JOB).write_text(f"{socket.gethostname()}\n{_identity(os.getpid())}\n")
    return folder


def _identity(pid: int) -> str:
    """Return what tells a process from each other one, of any machine or time; empty if it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return f"{host_identity()} {pid} {file.read().rpartition(')')[2].split()[19]}"  # when it started
    return ""


def _pid(process: str) -> int:
    return int(process.split()[-2])


def _is_running(process: str) -> bool:
    """Whether this very process still runs, and takes requests."""
    pid = _pid(process)
    return _identity(pid) == process and signal.SIGQUIT in (handled_by(pid) or ())


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
    try:
        host, process = (folder / _JOB).read_text().splitlines()
    except (OSError, ValueError):
        raise ConfigurationError(f"cannot read {folder / _JOB}, which says where the job runs.") from None
    if not process.startswith(f"{host_identity()} "):
        raise ConfigurationError(f"the job of {folder} runs on {host}, or has ended: type this command there.")
    for name, text in request.items():
        _request(folder / name, text)
    try:
        return _ask(process, folder / answer, seconds)
    finally:
        for name in request:
            (folder / name).unlink(missing_ok=True)


def _ask(process: str, answer: Path, seconds: float) -> str:
    answer.unlink(missing_ok=True)
    end = time.monotonic() + seconds
    if _is_running(process):
        os.kill(_pid(process), signal.SIGQUIT)
    while not answer.exists():
        if not _is_running(process):
            raise ConfigurationError(f"the job of {answer.parent} has ended.")
        if time.monotonic() > end:
            raise ConfigurationError(f"the job of {answer.parent} does not answer.")
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
            f"there is no {job or 'job in ddprun-logs'}. Name the folder of its logs: DIR/TIME-NAME."
        )
    return found[-1].resolve()
