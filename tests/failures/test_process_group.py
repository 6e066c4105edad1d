"""Joining, meeting and leaving, with real processes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.machine import Slowness
from kit.ranks import HOST, HOSTNAME, Nursery, Rank, free_port, note, noting_errors

from ddp_callbacks import WorkerEnv, join_process_group, leave_process_group
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.process_group import guard, presence, rendezvous

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


def joins_and_leaves_at_once(times: int) -> None:
    for number in range(times):
        join_process_group(init_method=f"file://{Path.cwd()}/store-{number}")
        leave_process_group()
    note("joined")


def ends_while_a_thread_looks(init_method: str | None) -> None:
    """The thread that answers for this rank is in the store, which is slow, nearly all the time."""

    def rings(_: Any) -> bool:
        with contextlib.suppress(dist.DistError):
            presence.store().wait(["nobody writes this"], timedelta(seconds=0.5))
        return False

    guard.INTERVAL, presence.Alarm.rings = 1e-5, rings  # type: ignore[method-assign]
    join_process_group(init_method=init_method)
    time.sleep(0.2)
    note("up")


def uses_the_users_group(store: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    env = join_process_group(timeout=timedelta(seconds=60))
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
        join_process_group(timeout=timedelta(seconds=2 if os.environ["RANK"] == "0" else 120))


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


@pytest.mark.parametrize("way", ["environment", "arguments"])
def test_two_processes_join_and_the_store_listens_on_the_chosen_address_only(
    nursery: Nursery, tmp_path: Path, way: str
) -> None:
    """The store listens on the chosen address only."""
    port = free_port() if way == "arguments" else 0
    ranks = nursery.run_watched(joins_twice_and_leaves, 2, tmp_path, port, launched=not port, finalize=True)
    assert_ended_well(ranks)
    for number, rank in enumerate(ranks):
        assert rank.notes["env"][:3] == [number, 2, HOST]
        assert rank.notes["sum"] == 3.0
        assert rank.notes["again"] == [number, 2, True], "joining twice must change nothing"
        assert rank.notes["left"]
    assert ranks[0].notes["listening"] == [HOST]
    assert ranks[0].notes["elsewhere"] == "ConnectionRefusedError"
    assert ranks[0].notes["chosen"] == ""


def test_a_group_of_the_users_is_used_as_it_is(nursery: Nursery, tmp_path: Path) -> None:
    """The library uses your own process group."""
    ranks = nursery.run_watched(uses_the_users_group, 2, tmp_path, str(tmp_path / "store"))
    assert_ended_well(ranks)
    assert [rank.notes["same"] for rank in ranks] == [[True, 0, 2, 3.0], [True, 1, 2, 3.0]]


@pytest.mark.parametrize(("size", "times"), [(2, 10), pytest.param(3, 100, marks=pytest.mark.night)])
def test_processes_that_leave_at_once_do_not_break_the_connections_of_others(
    nursery: Nursery, tmp_path: Path, size: int, times: int
) -> None:
    """Processes that leave at once break no others' connections."""
    for rank in nursery.run(joins_and_leaves_at_once, size, tmp_path, times, deadline=60):
        assert rank.code == 0 and "joined" in rank.notes, rank.stderr


@pytest.mark.parametrize(("size", "turns"), [(2, 1), pytest.param(3, 10, marks=pytest.mark.night)])
@pytest.mark.parametrize("init_method", ["env://", "file://{folder}/store"])
def test_a_thread_that_looks_into_the_store_when_a_process_ends_neither_aborts_it_nor_makes_the_file_anew(
    nursery: Nursery, tmp_path: Path, init_method: str, size: int, turns: int
) -> None:
    for turn in range(turns):
        folder = tmp_path / f"{turn}"
        folder.mkdir()
        meeting = init_method.format(folder=folder)
        for rank in nursery.run(ends_while_a_thread_looks, size, folder, meeting, finalize=True, deadline=60):
            assert rank.code == 0 and "terminate called" not in rank.stderr and "up" in rank.notes, rank.stderr
        assert not (folder / "store").exists()


@pytest.mark.parametrize("last", [0, 1])
def test_processes_exit_quietly_although_one_ends_before_the_other(nursery: Nursery, tmp_path: Path, last: int) -> None:
    """Processes exit quietly, whichever ends first."""
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    gate = os.open(pipe, os.O_RDWR)
    ranks = nursery.run_watched(
        ends_after_the_other, 2, tmp_path, last, str(pipe), finalize=True, on_end=lambda _, __: os.write(gate, b"open")
    )
    os.close(gate)
    assert_ended_well(ranks)
    assert ranks[1 - last].ended < ranks[last].noted_at["last line"]
    assert [rank.notes["sum"] for rank in ranks] == [3.0, 3.0]


def test_a_rank_that_never_comes_is_named(nursery: Nursery, tmp_path: Path) -> None:
    """A timeout names absent ranks."""
    begin = time.monotonic()
    ranks = nursery.run_watched(waits_for_a_rank_that_never_comes, 3, tmp_path, started=2)
    assert time.monotonic() - begin < 15 * ranks[0].slowness
    for number, rank in enumerate(ranks):
        kind, text = rank.notes["error"]
        assert kind == "RendezvousError"
        assert "rank 2 of 3 did not join" in text, text
        assert f"rank {number} on host {HOSTNAME} waited" in text, text
        assert "Start every rank" in text
        assert rank.code == 1
    assert "within 2 s" in ranks[0].notes["error"][1]


@pytest.mark.wide
@pytest.mark.waits(11)
def test_rank_0_says_for_whom_it_waits(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 says for whom it waits."""
    caplog.set_level("INFO")
    port = free_port()
    with pytest.raises(RendezvousError, match="ranks 1-3 of 4 did not join"):
        join_process_group(0, 4, HOST, port, timeout=timedelta(seconds=11))
    said = capsys.readouterr().err + "".join(record.getMessage() for record in caplog.records)
    assert f"rank 0 is waiting at {HOST}:{port} for ranks 1-3 of 4" in said


def meet_alone(seconds: float, *place: Any, within: float = 15) -> str:
    """What is said where nobody answers; the port is free again afterwards."""
    with Slowness() as slowness, pytest.raises(RendezvousError) as caught:
        join_process_group(*place, timeout=timedelta(seconds=seconds))
    assert isinstance(caught.value, ValueError)
    assert slowness.took < within * slowness.factor
    assert not dist.is_initialized()
    text = str(caught.value)
    del caught  # its traceback holds the store
    gc.collect()
    return text


def test_the_rank_that_waits_alone_names_all_who_are_missing() -> None:
    port = free_port()
    assert f"ranks 1-2 of 3 did not join at {HOST}:{port} within 1 s" in meet_alone(1, 0, 3, HOST, port)
    assert listening_addresses(port) == [], "the store must go with the attempt"


@pytest.mark.slow
@pytest.mark.waits(8)
def test_a_store_that_nobody_answers_is_named_within_the_timeout() -> None:
    port = free_port()
    text = meet_alone(3, 1, 2, HOST, port)
    assert f"rank 1 on host {HOSTNAME} could not meet the other 1 at {HOST}:{port} within 3 s" in text
    assert "Check that rank 0 runs on that address" in text


def test_a_taken_port_is_named_at_once() -> None:
    """Rank 0 names its wrong address or taken port."""
    with socket.create_server((HOST, 0)) as owner:
        port = owner.getsockname()[1]
        text = meet_alone(30, 0, 2, HOST, port, within=5)
    assert f"{HOST}:{port}" in text and "Address already in use" in text and "that the port is free there" in text


def test_an_address_that_is_not_rank_0s_own_is_named_at_once() -> None:
    text = meet_alone(30, 0, 2, "192.0.2.1")  # reserved (RFC 5737): no machine has it
    assert "192.0.2.1:29500" in text and "192.0.2.1 is not an address of this machine" in text
    assert "DDP_CALLBACKS_BIND=0.0.0.0 for all interfaces" in text


def resolver(names: dict[str, str]) -> Callable[..., Any]:
    """Of host names: what ``names`` says, and no other; and what addresses are."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        is_address = host.replace(".", "").isdigit() or host == "localhost"
        if not is_address and host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(names.get(host, host), *args, **options)

    return getaddrinfo


@pytest.mark.slow
@pytest.mark.waits(4)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_name_that_never_resolves_is_named_within_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library retries a name that does not resolve."""
    monkeypatch.setattr(socket, "getaddrinfo", resolver({}))
    assert "no-such-host:29500 within 4 s" in meet_alone(4, rank, 2, "no-such-host")
    (said,) = caplog.messages
    assert said.startswith("the name no-such-host does not resolve yet (") and "retrying for 4 s" in said


ON_SEVERAL_HOSTS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1", "is a different machine on each of them"),
        ("localhost", "is a different machine on each of them"),
        ("node1", "resolves to this machine only"),
    ],
)
def test_an_address_that_other_hosts_cannot_reach_is_refused_at_once(
    address: str, says: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses an address that other hosts can't reach."""
    for name, value in {**ON_SEVERAL_HOSTS, "OMPI_COMM_WORLD_RANK": rank, "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getaddrinfo", resolver({"node1": "127.0.1.1"}))
    monkeypatch.setattr(rendezvous, "address_for_others", lambda others: None)  # a machine without a network
    with Slowness() as slowness, pytest.raises(ConfigurationError) as caught:
        join_process_group(timeout=timedelta(seconds=60))
    assert slowness.took < 5 * slowness.factor
    assert f"the 4 processes are on several hosts, but the address of rank 0, {address}, {says}" in str(caught.value)
    assert "Set MASTER_ADDR to an address of rank 0's host" in str(caught.value)


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
    assert all(rank.ended - max(rank.noted_at.values()) < 10 * rank.slowness for rank in ranks)


def meets_after_restarts(counts: list[str]) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[int(os.environ["RANK"])]
    join_process_group()
    note("sum", sum_over_ranks())


def test_ranks_whose_agents_have_counted_restarts_differently_meet(nursery: Nursery, tmp_path: Path) -> None:
    """Ranks meet again after restarts by `torchrun`."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for counts in (["0", "0"], ["0", "1"]):
        ranks = nursery.run(meets_after_restarts, 2, tmp_path, counts, environ=address)
        assert [rank.notes.get("sum") for rank in ranks] == [3.0, 3.0], ranks[0].stderr


# mpirun is Open MPI's of the system; mpiexec is MPICH's, which its package puts beside Python.
STARTERS = {
    "Open MPI": [
        shutil.which("mpirun.openmpi") or shutil.which("mpirun"),
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "3",
    ],
    "MPICH": [shutil.which("mpiexec", path=str(Path(sys.executable).parent)), "-n", "3"],
}
RANKS_PROGRAM = """
from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import all_gather_json
env = join_process_group()
ranks = all_gather_json([env.rank, env.local_rank], "the ranks")
if env.rank == 0:
    print("ranks", ranks)
"""


@pytest.mark.cold
@pytest.mark.mpi
@pytest.mark.parametrize("name", STARTERS)
def test_processes_that_mpi_starts_find_each_other(name: str) -> None:
    command, *options = STARTERS[name]
    if command is None:
        pytest.skip(f"{name} is not installed")
    environ = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [command, *options, sys.executable, "-c", RANKS_PROGRAM],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks [[0, 0], [1, 1], [2, 2]]\n"
