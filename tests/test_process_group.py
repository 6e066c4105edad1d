"""Joining, meeting and leaving, with real processes; and the :class:`Nursery` in which other tests start theirs."""

from __future__ import annotations

import atexit
import contextlib
import gc
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import wait_all

from ddp_callbacks import WorkerEnv, join_process_group, leave_process_group
from ddp_callbacks.errors import RendezvousError

HOST = "127.0.0.1"
DEADLINE = 60.0  # seconds; ranks that take longer are killed, and their exit code says so
HOSTNAME = socket.gethostname()


# --- ranks that may fail --------------------------------------------------------------------------------------------


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

    The ranks are forked from one process that has imported torch and the bodies: a start costs 0.1 s, not 3 s. Beyond
    that they are what a launcher starts: its variables, a ``__main__`` that runs to its end or raises. A body is a
    function at the top of a module in ``tests/``; its working directory is ``folder``.
    """

    def __init__(self, *modules: str) -> None:
        """``modules``: that of the bodies, and others to import before a rank starts."""
        self._server = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


# The first optimizer of a process imports it, for 2 s.
DYNAMO = "torch._dynamo"


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


def _serve(*modules: str) -> Callable[[], None] | None:
    """In the server: fork the ranks of each request and report them. Returns in a rank, with what it is to run."""
    bodies, *_ = [importlib.import_module(module) for module in modules]
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pids = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                return _become_rank(bodies, request, rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        _report_ends(pids, request["deadline"])
    return None


def _become_rank(bodies: Any, request: dict[str, Any], rank: int) -> Callable[[], None]:
    folder = Path(request["folder"])
    os.chdir(folder)
    for stream, path in ((0, os.devnull), (1, f"stdout-{rank}"), (2, f"stderr-{rank}")):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    # Where the tests run in the background of a shell, SIGINT is ignored, and Python does not raise for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environ"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} if request["has_rank"] else {"INDEX": str(rank)}
    body, args = getattr(bodies, request["body"]), request["args"]
    return (lambda: body(*args)) if request["finalize"] else (lambda: _run_and_vanish(body, args))


def _run_and_vanish(body: Callable[..., None], args: list[Any]) -> None:
    """What the interpreter does with a script, up to its exit handlers."""
    code = 0
    try:
        body(*args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
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


# --- bodies ---------------------------------------------------------------------------------------------------------


def sum_over_ranks() -> float:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def joins_twice_and_leaves(port: int) -> None:
    """By explicit arguments where there is a port, else by the environment."""
    rank = int(os.environ.pop("INDEX")) if port else int(os.environ["RANK"])
    arguments: dict[str, Any] = {"rank": rank, "world_size": 2, "host": HOST, "port": port} if port else {}
    env = join_process_group(**arguments)
    os.environ["RANK"] = str(rank)  # where note() looks
    note("env", [env.rank, env.world_size, env.host, env.port])
    note("sum", sum_over_ranks())
    group = dist.group.WORLD
    again = join_process_group(**arguments)
    note("again", [again.rank, again.world_size, dist.group.WORLD is group])
    if rank == 0:
        note("listening", listening_addresses(env.port or 0))
        note("elsewhere", connection_error("127.0.0.2", env.port or 0))
        note("chosen", connection_error(HOST, env.port or 0))
    dist.barrier()
    leave_process_group()
    leave_process_group()
    note("left", not dist.is_initialized())


def uses_the_users_group(store: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    env = join_process_group(timeout=timedelta(seconds=5))
    note("same", [dist.group.WORLD is group, env.rank, env.world_size, sum_over_ranks()])
    dist.barrier()
    dist.destroy_process_group()


def ends_after_the_other(last: int, pipe: str) -> None:
    """``last`` ends only when the test, which has seen the other end, writes to the pipe."""
    join_process_group()
    note("sum", sum_over_ranks())
    dist.barrier()
    if dist.get_rank() == last:
        gate = os.open(pipe, os.O_RDONLY)
        os.read(gate, 1)
        os.close(gate)
    atexit.register(note, "exits")  # handlers run last in, first out: this one before the library's
    note("last line")


def waits_for_a_rank_that_never_comes() -> None:
    """Rank 0, which hosts the store, gives up first."""
    with noting_errors():
        join_process_group(timeout=timedelta(seconds=2 if os.environ["RANK"] == "0" else 20))


def listening_addresses(port: int) -> list[str]:
    """The local addresses on which this machine listens at ``port``, from the kernel's own tables (Linux)."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(a)[::-1]) if len(a) == 8 else f"IPv6 {a}" for a in found]


def connection_error(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return type(error).__name__
    return ""


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(Path(__file__).stem)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["environment", "arguments"])
def test_two_processes_join_and_the_store_listens_on_the_chosen_address_only(
    nursery: Nursery, tmp_path: Path, way: str
) -> None:
    port = free_port() if way == "arguments" else 0
    ranks = nursery.run(joins_twice_and_leaves, 2, tmp_path, port, environ={} if port else None, finalize=True)
    assert_ended_well(ranks)
    for number, rank in enumerate(ranks):
        assert rank.notes["env"][:3] == [number, 2, HOST]
        assert rank.notes["sum"] == 3.0
        assert rank.notes["again"] == [number, 2, True], "joining twice must change nothing"
        assert rank.notes["left"]
    assert ranks[0].notes["listening"] == [HOST]
    assert ranks[0].notes["elsewhere"] == "ConnectionRefusedError"
    assert ranks[0].notes["chosen"] == ""


def test_torchrun_starts_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from ddp_callbacks import join_process_group\n"
        "env = join_process_group()\n"
        "value = torch.tensor([env.rank + 1.0])\n"
        "dist.all_reduce(value)\n"
        "open(f'rank-{env.rank}', 'w').write(f'{env.world_size} {env.local_rank} {value.item()}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [*command, "--master-addr", HOST, "--master-port", str(free_port()), str(script)],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        codes = wait_all([launcher], DEADLINE)
    printed = (tmp_path / "output").read_text()
    assert codes == [0], printed
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2 0 3.0", "2 1 3.0"]
    assert "Traceback" not in printed and "arning" not in printed, printed


def test_a_group_of_the_users_is_used_as_it_is(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(uses_the_users_group, 2, tmp_path, str(tmp_path / "store"))
    assert_ended_well(ranks)
    assert [rank.notes["same"] for rank in ranks] == [[True, 0, 2, 3.0], [True, 1, 2, 3.0]]


@pytest.mark.parametrize("last", [0, 1])
def test_processes_exit_quietly_although_one_ends_before_the_other(nursery: Nursery, tmp_path: Path, last: int) -> None:
    """Rank 0 hosts the store: it may go while rank 1 is still there."""
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    gate = os.open(pipe, os.O_RDWR)
    ranks = nursery.run(
        ends_after_the_other, 2, tmp_path, last, str(pipe), finalize=True, on_end=lambda _, __: os.write(gate, b"open")
    )
    os.close(gate)
    assert_ended_well(ranks)
    assert ranks[1 - last].ended < ranks[last].noted_at["last line"]
    assert [rank.notes["sum"] for rank in ranks] == [3.0, 3.0]


def test_a_rank_that_never_comes_is_named(nursery: Nursery, tmp_path: Path) -> None:
    begin = time.monotonic()
    ranks = nursery.run(waits_for_a_rank_that_never_comes, 3, tmp_path, started=2)
    assert time.monotonic() - begin < 15
    for number, rank in enumerate(ranks):
        kind, text = rank.notes["error"]
        assert kind == "RendezvousError"
        assert "rank 2 of a world of 3 did not come" in text, text
        assert f"rank {number} on host {HOSTNAME} waited" in text, text
        assert "Start every rank" in text
        assert rank.code == 1
    assert "within 2 s" in ranks[0].notes["error"][1]


def test_the_rank_that_waits_alone_names_all_who_are_missing() -> None:
    port = free_port()
    with pytest.raises(RendezvousError) as caught:
        join_process_group(0, 3, HOST, port, timeout=timedelta(seconds=1))
    assert f"rank 1, 2 of a world of 3 did not come to {HOST}:{port} within 1 s" in str(caught.value)
    assert not dist.is_initialized()
    del caught  # its traceback holds the store
    gc.collect()
    assert listening_addresses(port) == [], "the store must go with the attempt"


def test_a_store_that_nobody_answers_is_named_within_the_timeout() -> None:
    port, begin = free_port(), time.monotonic()
    with pytest.raises(ValueError) as caught:
        join_process_group(1, 2, HOST, port, timeout=timedelta(seconds=3))
    assert time.monotonic() - begin < 15
    assert isinstance(caught.value, RendezvousError)
    assert f"rank 1 on host {HOSTNAME} could not meet the other 1 at {HOST}:{port} within 3 s" in str(caught.value)
    assert "Check that rank 0 runs on that address" in str(caught.value)


def test_a_taken_port_is_named_at_once() -> None:
    with socket.socket() as owner:
        owner.bind((HOST, 0))
        owner.listen()
        port, begin = owner.getsockname()[1], time.monotonic()
        with pytest.raises(RendezvousError) as caught:
            join_process_group(0, 2, HOST, port, timeout=timedelta(seconds=30))
        assert time.monotonic() - begin < 5
    assert f"{HOST}:{port}" in str(caught.value) and "Address already in use" in str(caught.value)
    assert "that the port is free there" in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_rank_0s_own_is_named_at_once(host: str) -> None:
    """192.0.2.0/24 and .invalid are reserved (RFC 5737, RFC 6761): no machine has them."""
    begin = time.monotonic()
    with pytest.raises(RendezvousError, match=f"{host}:29500"):
        join_process_group(0, 2, host, timeout=timedelta(seconds=30))
    assert time.monotonic() - begin < 15


def test_a_world_of_one_starts_nothing() -> None:
    before = Path("/proc/self/net/tcp").read_text().count(" 0A ")
    assert join_process_group(0, 1) == WorkerEnv()
    assert not dist.is_initialized()
    assert Path("/proc/self/net/tcp").read_text().count(" 0A ") == before
    leave_process_group()


def assert_ended_well(ranks: list[Rank]) -> None:
    """Exit code 0, soon after the last line, and nothing on stderr."""
    assert [rank.code for rank in ranks] == [0] * len(ranks), [rank.stderr for rank in ranks]
    assert [rank.stderr for rank in ranks] == [""] * len(ranks)
    assert all(rank.ended - max(rank.noted_at.values()) < 10 for rank in ranks)


if __name__ == "__main__":
    run_rank = _serve(*sys.argv[1:])
    if run_rank is not None:
        run_rank()
