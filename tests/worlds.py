"""Processes that share the one GPU of a machine. They are fresh interpreters: a forked child could not use CUDA.

A world joins once and then runs one body after another; after a failure, the next body gets new processes. The kinds:

- ``one``: one process, without a process group;
- ``gloo``: two processes, whose CUDA tensors are summed by gloo;
- ``nccl``: two processes, whose CUDA tensors are summed by NCCL. NCCL refuses two ranks on a GPU unless each believes
  that it is on a host of its own; then it uses sockets. This library refuses them, too: ``join_on`` turns that off;
- ``cpu``: two processes on CPUs, with which this module is tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nursery import DEADLINE, HOST, Rank, collect, free_port

SIZES = {"one": 1, "gloo": 2, "nccl": 2, "cpu": 2}
START = 180.0  # seconds until all processes have joined
BODY = 120.0  # seconds for a body
GRACE = 15.0  # seconds for the others after the first has failed
_WORKER = Path(__file__).with_name("world_worker.py")
_TESTS = _WORKER.parent
_START = "the start"
_OUTPUT = 20_000  # characters of each process that an error shows


class WorldFailed(AssertionError):
    """A body has raised, died or taken too long on a rank; the text has every rank's output."""


def environment(kind: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables of a process: torchrun's, and what two ranks on one GPU need."""
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    variables = {name: str(number) for name, number in names.items()}
    variables |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
    if kind != "cpu":  # all on one GPU, also where there are several
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if kind == "nccl":
        variables |= {
            "NCCL_HOSTID": f"made-up-host-{rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_DEBUG": "WARN",
        }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NCCL_"))}
    return kept | variables


def python_path() -> str:
    """With which an interpreter finds the tests and the package, also where that is not installed."""
    return os.pathsep.join(filter(None, [str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]))


class World:
    """Processes that run one body after another. Close it at the end."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.size = kind, SIZES[kind]
        self._folder, self._count, self._starts = folder, 0, 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, body: Callable[..., Any], *args: Any, deadline: float = BODY) -> list[Any]:
        """Call ``body(*args)`` on every rank; what each returned, by rank.

        ``body`` is a function at the top of a module in ``tests/``; arguments and results are pickled.

        Raises:
            WorldFailed: With every rank's output.
        """
        if not self._processes:
            self._start()
        folder = self._folder / f"{self.kind}-{self._count}"
        self._count += 1
        folder.mkdir()
        module = Path(sys.modules[body.__module__].__file__ or "").stem
        (folder / "call").write_bytes(pickle.dumps((module, body.__name__, args)))
        marks = [path.stat().st_size for path in self._outputs()]
        line = json.dumps({"folder": str(folder), "deadline": deadline}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died, which is found out below
                process.stdin.write(line.encode())
        self._expect("done", deadline + GRACE, body.__name__, marks)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(self.size)]

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the processes: they leave when their input ends, or are killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + GRACE
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        self._kill()

    def _start(self) -> None:
        self._starts += 1
        port = free_port()
        for rank in range(self.size):
            with self._output(rank).open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, str(_WORKER), self.kind],
                    env=environment(self.kind, rank, self.size, port),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    bufsize=0,
                )
            self._processes.append(process)
        self._expect("ready", START, _START, [0] * self.size)

    def _expect(self, word: str, seconds: float, what: str, marks: list[int]) -> None:
        """Wait until all have answered with ``word``; otherwise end them and raise."""
        answers: dict[int, str] = {}
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.size and (ready := selector.select(max(0.0, end - time.monotonic()))):
                for key, _ in ready:
                    rank = key.data
                    answers[rank] = self._read(rank)
                    selector.unregister(key.fileobj)
                    if answers[rank] != word:
                        end = min(end, time.monotonic() + GRACE)
        found = [answers.get(rank, f"no answer in {seconds:.0f} s") for rank in range(self.size)]
        if found != [word] * self.size:
            self._kill()
            texts = [self._text(rank, mark) for rank, mark in enumerate(marks)]
            shown = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))
            raise WorldFailed(f"{what} on {self.kind}: {found}\n{shown}")

    def _read(self, rank: int) -> str:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        return line.decode().strip() or f"ended with {process.wait()}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes = []

    def _output(self, rank: int) -> Path:
        return self._folder / f"{self.kind}-start-{self._starts}-output-{rank}"

    def _outputs(self) -> list[Path]:
        return [self._output(rank) for rank in range(self.size)]

    def _text(self, rank: int, mark: int) -> str:
        return self._output(rank).read_bytes()[mark:].decode(errors="replace")[-_OUTPUT:]


def why_not(world: World, probe: Callable[..., Any], device: str = "cuda") -> str:
    """Why two ranks on this GPU cannot exchange anything, in NCCL's words; empty if they can.

    Raises:
        WorldFailed: They could not join, and that was not NCCL.
    """
    try:
        world.run(probe, device, deadline=60.0)
    except WorldFailed as error:
        lines = [line.strip() for line in str(error).splitlines() if "NCCL" in line or "Duplicate GPU" in line]
        reasons = [line for line in lines if "WARN" in line or "rror" in line or "Duplicate" in line]
        if not reasons and str(error).startswith(_START):
            raise
        return " | ".join(dict.fromkeys(reasons))[-600:] or str(error)[-600:]
    return ""


class Fresh:
    """Ranks that may fail, as of :class:`nursery.Nursery`, but in fresh interpreters.

    Args:
        kind: Of the world whose variables they get.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run_watched(
        self,
        body: Callable[..., None],
        world_size: int,
        folder: Path,
        *args: Any,
        environ: dict[str, str] | None = None,
        on_end: Callable[[int, list[int]], None] | None = None,
        deadline: float = DEADLINE,
    ) -> list[Rank]:
        """As :meth:`nursery.Nursery.run_watched`; ``environ`` adds to the variables. The machine counts as quiet."""
        module, port = Path(sys.modules[body.__module__].__file__ or "").stem, free_port()
        processes = []
        for rank in range(world_size):
            with (folder / f"stdout-{rank}").open("wb") as out, (folder / f"stderr-{rank}").open("wb") as error:
                command = [sys.executable, str(_WORKER), module, body.__name__, json.dumps(args)]
                variables = environment(self.kind, rank, world_size, port) | (environ or {})
                processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=error
                    )
                )
        ends = _await_ends(processes, on_end, time.monotonic() + deadline)
        return [collect(folder, rank, process.pid, *ends[rank]) for rank, process in enumerate(processes)]


def _await_ends(
    processes: list[subprocess.Popen[bytes]], on_end: Callable[[int, list[int]], None] | None, end: float
) -> dict[int, tuple[int, float]]:
    """The exit code and end of each; those that still run at ``end`` are killed."""
    ends: dict[int, tuple[int, float]] = {}
    pids = [process.pid for process in processes]
    while len(ends) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ends and process.poll() is not None:
                ends[rank] = (process.returncode, time.monotonic())
                if on_end is not None:
                    on_end(rank, pids)
        if time.monotonic() > end:
            for process in processes:
                process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    return ends
