"""Ranks that may fail: runs functions as scripts on N processes and reports how each ended."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
HOSTNAME = socket.gethostname()
DEADLINE = 60.0  # seconds; ranks that take longer are killed, and their exit code says so


@dataclass
class Rank:
    """One process of a body: its exit code, when it ended (``time.monotonic``), what it printed and noted."""

    pid: int
    code: int
    ended: float
    stdout: str
    stderr: str
    notes: dict[str, Any]
    noted_at: dict[str, float]


class Nursery:
    """Runs bodies as scripts on N ranks and reports how each ended; they may fail, die or be killed.

    The ranks are forked from one process that has imported what takes long: a start costs 0.1 s, not 7 s. Beyond
    that they are what a launcher starts: its variables, a ``__main__`` that runs to its end or raises. A body is a
    function at the top of a module in ``tests/``; its working directory is ``folder``.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        body: Callable[..., None],
        world_size: int,
        folder: Path,
        *args: Any,
        started: int | None = None,
        environ: dict[str, str] | None = None,
        finalize: bool = False,
        on_end: Callable[[int, list[int]], None] | None = None,
        deadline: float = DEADLINE,
    ) -> list[Rank]:
        """Run ``body(*args)`` (JSON) on the first ``started`` ranks, all if ``None``; returns when the last has ended.

        Args:
            environ: Variables to set in place of torchrun's.
            finalize: Let the interpreter take itself apart at its end. That costs 1 to 4 s a rank, so usually a rank
                is gone once its exit handlers have run, as on the fastest machine there is.
            on_end: Called with a rank that has ended and all process ids, while others may still run.
        """
        address = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        request = {
            "module": Path(sys.modules[body.__module__].__file__ or "").stem,
            "body": body.__name__,
            "args": args,
            "ranks": world_size if started is None else started,
            "folder": str(folder),
            "environ": address if environ is None else environ,
            "has_rank": environ is None,
            "finalize": finalize,
            "deadline": deadline,
        }
        self._write(request)
        pids: list[int] = self._read()
        ends: dict[int, tuple[int, float]] = {}
        while len(ends) < len(pids):
            rank, code, ended = self._read()
            ends[rank] = (code, ended)
            if on_end is not None:
                on_end(rank, pids)
        return [_collect(folder, rank, pid, *ends[rank]) for rank, pid in enumerate(pids)]

    def close(self) -> None:
        """End the server, and whatever it still has running."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        wait_all([self._server], 10)
        self._server.stdout.close()

    def _write(self, request: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()  # bounded: the server keeps the deadline
        assert line, "the server of the ranks has died"
        return json.loads(line)


def wait_all(processes: list[subprocess.Popen[Any]], deadline: float) -> list[int]:
    """The exit codes; processes that outlive ``deadline`` (seconds) are killed."""
    end = time.monotonic() + deadline
    try:
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in processes]


def note(name: str, value: Any = None) -> None:
    """In a body: leave something for the test, with the time."""
    path = Path(f"notes-{os.environ.get('RANK', os.environ.get('INDEX'))}")
    with path.open("a") as file:
        file.write(json.dumps([name, value, time.monotonic()]) + "\n")


@contextlib.contextmanager
def noting_errors() -> Iterator[None]:
    """In a body: note an exception (type, message) and let it go on."""
    try:
        yield
    except BaseException as error:
        note("error", [type(error).__name__, str(error)])
        raise


# Imported by the first optimizer (dynamo), by ROC AUC (scikit-learn) and by the modules of the bodies.
PRELOADED = (
    "torch._dynamo",
    "sklearn.metrics",
    "pytest",
    "ddp_callbacks.torchbearer",
    "lightning.pytorch",
    "ddp_callbacks.lightning",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _collect(folder: Path, rank: int, pid: int, code: int, ended: float) -> Rank:
    path = folder / f"notes-{rank}"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Rank(
        pid,
        code,
        ended,
        (folder / f"stdout-{rank}").read_text(),
        (folder / f"stderr-{rank}").read_text(),
        {name: value for name, value, _ in lines},
        {name: at for name, _, at in lines},
    )


def _serve() -> Callable[[], None] | None:
    """In the server: fork the ranks of each request and report them. Returns in a rank, with what it is to run."""
    for module in PRELOADED:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pids = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                return _become_rank(request, rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        _report_ends(pids, request["deadline"])
    return None


def _become_rank(request: dict[str, Any], rank: int) -> Callable[[], None]:
    folder = Path(request["folder"])
    os.chdir(folder)
    for stream, path in ((0, os.devnull), (1, f"stdout-{rank}"), (2, f"stderr-{rank}")):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    # Where the tests run in the background of a shell, SIGINT is ignored, and Python does not raise for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environ"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} if request["has_rank"] else {"INDEX": str(rank)}

    def body() -> None:
        getattr(importlib.import_module(request["module"]), request["body"])(*request["args"])

    return body if request["finalize"] else (lambda: _run_and_vanish(body))


def _run_and_vanish(body: Callable[[], None]) -> None:
    """What the interpreter does with a script, up to its exit handlers."""
    code = 0
    try:
        body()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # Lightning has asked MPI whether it started the job; what that left in /dev/shm goes
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_ends(pids: list[int], deadline: float) -> None:
    """Print each end as it comes; kill what is left at the deadline, or when the tests have gone."""
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    poll = select.poll()
    for descriptor in running:
        poll.register(descriptor, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLHUP)
    end = time.monotonic() + deadline
    while running:
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}
        if not ready or sys.stdin.fileno() in ready:
            for descriptor in running:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            poll.unregister(sys.stdin.fileno())
            end = time.monotonic() + 10
        for descriptor in ready & set(running):
            rank = running.pop(descriptor)
            poll.unregister(descriptor)
            os.close(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            print(json.dumps([rank, code, time.monotonic()]), flush=True)


if __name__ == "__main__":
    run_rank = _serve()
    if run_rank is not None:
        run_rank()
