"""Ranks that may fail: runs functions as scripts on N processes and reports how each ended."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import warm_python
from machine import Slowness

HOST = "127.0.0.1"
HOSTNAME = socket.gethostname()
DEADLINE = 300.0  # seconds, beside other work; ranks that take longer are killed, and their exit code says so


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
    slowness: float = 1.0  # of the machine, if that was watched


class Nursery:
    """Runs bodies as scripts on N ranks and reports how each ended; they may fail, die or be killed.

    The ranks are forked from one process that has imported what takes long: a start costs 0.1 s, not 7 s. Beyond
    that they are what a launcher starts: its variables, a ``__main__`` that runs to its end or raises. A body is a
    function at the top of a module in ``tests/``; its working directory is ``folder``.

    Attributes:
        wrappers: A folder with ``python``, ``torchrun`` and ``ddprun`` that start from there, too, see
            :mod:`warm_python`.
    """

    def __init__(self) -> None:
        self.wrappers = Path(tempfile.mkdtemp(prefix="warm-"))
        warm_python.make_wrappers(self.wrappers)
        with warm_python.listen(self.wrappers) as listener:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(self.wrappers), str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                text=True,
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
        return [collect(folder, rank, pid, *ends[rank]) for rank, pid in enumerate(pids)]

    def run_watched(self, *args: Any, **options: Any) -> list[Rank]:
        """:meth:`run`, for what is tested on how soon it comes: ``slowness`` says how busy the machine was."""
        with Slowness() as slowness:
            ranks = self.run(*args, **options)
        return [replace(rank, slowness=slowness.factor) for rank in ranks]

    def close(self) -> None:
        """End the server, and whatever it still has running."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        wait_all([self._server], 10)
        self._server.stdout.close()
        shutil.rmtree(self.wrappers)

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
    "ddp_callbacks.torchbearer",
    "lightning.pytorch",
    "ddp_callbacks.lightning",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "sklearn.datasets",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def collect(folder: Path, rank: int, pid: int, code: int, ended: float) -> Rank:
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


def _serve(wrappers: Path, listener: socket.socket) -> Callable[[], None] | None:
    """In the server: fork the ranks of each request and report them. Returns in a child, with what it is to run."""
    fresh, ending = warm_python.Fresh(wrappers), warm_python.Ending()
    with warm_python.one_thread():
        for module in PRELOADED:
            importlib.import_module(module)
    commands = os.fork()
    if commands == 0:
        program = _serve_commands(listener, fresh)
        return None if program is None else (lambda: ending.run(program))
    listener.close()
    importlib.import_module("pytest")
    rank = _serve_ranks()
    if rank is None:
        os.kill(commands, signal.SIGTERM)
        os.waitpid(commands, 0)
    return rank


def _serve_commands(listener: socket.socket, fresh: warm_python.Fresh) -> Callable[[], None] | None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the pipes are for the ranks
        os.dup2(null, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end with it, and the server with them
    return warm_python.Server(listener, fresh).serve()


def _serve_ranks() -> Callable[[], None] | None:
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
    faulthandler.dump_traceback_later(0.9 * request["deadline"])  # where a rank hangs that will be killed
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
    warm_python.vanish(code)


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
    run_child = _serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    if run_child is None:
        os._exit(0)  # to take apart what was imported takes a second
    run_child()
