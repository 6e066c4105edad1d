"""Run functions of the tests' modules ("bodies") on N ranks, which may fail, die or be killed.

:meth:`Nursery.run` returns how each rank ended, :func:`run_distributed` the result of each. Ranks are forked from
:mod:`kit.warm`; a start costs 0.1 s. Ranks of a *kind* are fresh interpreters, as a forked one could not use CUDA:

- ``one``: one process;
- ``gloo``: two on one GPU, whose tensors gloo sums;
- ``nccl``: the same by NCCL, which refuses two ranks on a GPU unless each believes that it is on a host of its own.
  This library refuses them, too: ``device_failures.join_on`` turns that off;
- ``cpu``: processes that need no GPU, although nothing keeps them from one.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.cluster import environment
from ddp_callbacks.comm.topology import Hosts, hosts_of
from kit.costs import count
from kit.machine import Slowness
from kit.paths import python_path
from kit.warm import Process, Server

HOST = "127.0.0.1"
HOSTNAME = socket.gethostname()
_given = set[int]()  # ports
DEADLINE = 300.0  # seconds, beside other work; ranks that take longer are killed, and their exit code says so
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
NCCL_ON_ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}
STREAMS = ("stdout", "stderr")
_RANK = ["-u", "-P", "-c", "from kit.ranks import be_a_rank; be_a_rank()"]


# --- in the tests -----------------------------------------------------------------------------------------------------


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
    slowness: float = 1.0  # slowness of the machine, if it was watched


class Nursery:
    """Runs bodies as scripts on N ranks and reports how each ended.

    Args:
        kind: The kind of fresh interpreters; by default, the ranks are forked.
    """

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def run(
        self,
        body: Callable[..., None],
        world_size: int,
        folder: Path,
        *args: Any,
        on_end: Callable[[int, list[int]], None] | None = None,
        deadline: float = DEADLINE,
        **options: Any,
    ) -> list[Rank]:
        """Run ``body(*args)`` on all ranks, with the ``options`` of :meth:`start`; return when all have ended.

        Args:
            on_end: Called with each rank that has ended, and all process ids, while others may still run.
        """
        begun = self.start(body, world_size, folder, *args, deadline=deadline, **options)
        running, found = {process.ends: rank for rank, process in enumerate(begun)}, dict[int, Rank]()
        end = time.monotonic() + deadline
        try:
            while running:
                ready, _, _ = select.select(list(running), [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    kill(begun[rank] for rank in running.values())
                    end = time.monotonic() + DEADLINE
                for rank in map(running.pop, ready):
                    process = begun[rank]
                    found[rank] = collect(folder, rank, process.pid, process.wait(), time.monotonic())
                    if on_end is not None:
                        on_end(rank, [process.pid for process in begun])
        finally:
            kill(begun[rank] for rank in running.values())
        return [found[rank] for rank in range(len(begun))]

    def run_watched(self, *args: Any, **options: Any) -> list[Rank]:
        """Call :meth:`run` for a test of durations: each rank's ``slowness`` says how busy the machine was."""
        with Slowness() as slowness:
            ranks = self.run(*args, **options)
        return [replace(rank, slowness=slowness.factor) for rank in ranks]

    def start(
        self,
        body: Callable[..., None],
        world_size: int,
        folder: Path,
        *args: Any,
        started: int | None = None,
        environ: dict[str, str] | None = None,
        launched: bool = True,
        finalize: bool = False,
        deadline: float = DEADLINE,
    ) -> list[Process]:
        """Start ``body(*args)`` as a script on each rank; its working directory is ``folder``.

        Args:
            body: A function at the top of a module of the tests.
            started: How many of the ranks to start; ``None`` for all.
            environ: Variables in addition to torchrun's.
            launched: Whether to set torchrun's variables. Otherwise there is only ``INDEX``, the number of the rank.
            finalize: Whether the interpreter finalizes at its end. That costs 1 to 4 s per rank, so usually a forked
                rank is gone once its exit handlers have run, as on the fastest machine there is.
            deadline: Seconds until the caller kills a rank that hangs; it prints where after nine tenths of them.
        """
        variables = {n: value for n, value in os.environ.items() if not n.startswith(("PYTEST", "NCCL_"))}
        variables |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **_of_kind(self.kind, world_size)}
        if launched:
            variables |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        variables |= environ or {}
        begun: list[Process] = []
        for rank in range(world_size if started is None else started):
            own = variables | dict.fromkeys(("RANK", "LOCAL_RANK") if launched else ("INDEX",), str(rank))
            own |= {"NCCL_HOSTID": f"made-up-host-{rank}"} if self.kind == "nccl" else {}
            with ExitStack() as stack:
                call = stack.enter_context(tempfile.TemporaryFile())
                call.write(pickle.dumps((body.__module__, body.__name__, args, deadline)))
                call.seek(0)
                outputs = [stack.enter_context((folder / f"{name}-{rank}").open("wb")) for name in STREAMS]
                streams = [file.fileno() for file in (call, *outputs)]
                if self.kind:
                    begun.append(_start_fresh(folder, own, streams))
                else:
                    begun.append(Server.running.fork(_RANK, folder, own, streams, finalize))
        count("ranks", len(begun))
        return begun


def _start_fresh(folder: Path, environ: dict[str, str], streams: list[int]) -> Process:
    files = dict(zip(("stdin", *STREAMS), streams, strict=True))
    process = subprocess.Popen([sys.executable, *_RANK], cwd=folder, env=environ, **files)  # type: ignore[call-overload]
    return Process(process.pid, process.wait)


def _of_kind(kind: str, world_size: int) -> dict[str, str]:
    """Return the variables for fresh ranks of a kind, which may share one GPU."""
    if not kind:
        return {}
    variables = {"LOCAL_WORLD_SIZE": str(world_size), "TORCHINDUCTOR_COMPILE_THREADS": "1", "TQDM_DISABLE": "1"}
    if kind != "cpu":  # all on one GPU, even if there are several
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return variables | (NCCL_ON_ONE_GPU if kind == "nccl" else {})


def kill(processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def collect(folder: Path, rank: int, pid: int, code: int, ended: float) -> Rank:
    """Read the output and notes of an ended rank from its folder."""
    path = folder / f"notes-{rank}"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    stdout, stderr = ((folder / f"{stream}-{rank}").read_text() for stream in STREAMS)
    notes, noted_at = {name: value for name, value, _ in lines}, {name: at for name, _, at in lines}
    return Rank(pid, code, ended, stdout, stderr, notes, noted_at)


def run_distributed(body: Callable[..., Any], world_size: int, *args: Any, deadline: float = 2 * DEADLINE) -> list[Any]:
    """Call ``body(*args)`` on ranks that have joined a gloo group; return the results. Warnings are errors there, too.

    Raises:
        AssertionError: With every rank's output, if one raised, died or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, call = Path(name), (body.__module__, body.__name__, args)
        ranks = Nursery().run(_join_and_return, world_size, folder, *call, deadline=deadline)
        texts = "\n".join(f"--- rank {index}\n{rank.stdout}{rank.stderr}" for index, rank in enumerate(ranks))
        codes = [rank.code for rank in ranks]
        assert codes == [0] * world_size, f"exit codes {codes}\n{texts}"
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns when it unpickles sparse tensors
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def free_port() -> int:
    """Return a free port below the kernel's range for connections, which could take it before it is used.

    No other call returns it: each worker of pytest-xdist has ports of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    while True:
        port = 10_000 + 5_000 * worker + secrets.randbelow(5_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port


# --- on a rank --------------------------------------------------------------------------------------------------------


def be_a_rank() -> None:
    module, name, args, deadline = pickle.load(open(0, "rb", closefd=False))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.dump_traceback_later(0.9 * deadline)  # show where a rank hangs, before it is killed
    getattr(importlib.import_module(module), name)(*args)


def note(name: str, value: Any = None) -> None:
    """In a body: leave a value for the test, with the time."""
    path = Path(f"notes-{os.environ.get('RANK', os.environ.get('INDEX'))}")
    with path.open("a") as file:
        file.write(json.dumps([name, value, time.monotonic()]) + "\n")


@contextmanager
def noting_errors() -> Iterator[None]:
    """In a body: note an exception (type, message) and raise it again."""
    try:
        yield
    except BaseException as error:
        note("error", [type(error).__name__, str(error)])
        raise


def live_on_hosts(layout: Sequence[int], group: dist.ProcessGroup) -> Hosts:
    """Return the hosts of ``group`` as if each had the number of ranks in ``layout``. A collective."""
    names = [host for host, ranks in enumerate(layout) for _ in range(ranks)]
    before = environment.host_identity
    environment.host_identity = lambda: f"host {names[group.rank()]}"
    try:
        return hosts_of(group)
    finally:
        environment.host_identity = before


BY_PART = r"(.* normalizes by each process's part of the batch \(BatchNorm\)|each process collects in )"


def _join_and_return(module: str, name: str, args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", BY_PART)  # in tests of something else
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{Path.cwd()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    try:
        result = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives that will never end
    Path(f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
