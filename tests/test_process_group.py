"""Joining, meeting and leaving, with real processes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
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
from machine import Slowness
from nursery import DEADLINE, HOST, HOSTNAME, Nursery, Rank, free_port, note, noting_errors, wait_all

from ddp_callbacks import WorkerEnv, join_process_group, leave_process_group, network
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.process_group import guard, presence, rendezvous

JOINS = 30
TURNS = 4

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


def joins_and_leaves_at_once() -> None:
    for number in range(JOINS):
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
    port = free_port() if way == "arguments" else 0
    ranks = nursery.run_watched(joins_twice_and_leaves, 2, tmp_path, port, environ={} if port else None, finalize=True)
    assert_ended_well(ranks)
    for number, rank in enumerate(ranks):
        assert rank.notes["env"][:3] == [number, 2, HOST]
        assert rank.notes["sum"] == 3.0
        assert rank.notes["again"] == [number, 2, True], "joining twice must change nothing"
        assert rank.notes["left"]
    assert ranks[0].notes["listening"] == [HOST]
    assert ranks[0].notes["elsewhere"] == "ConnectionRefusedError"
    assert ranks[0].notes["chosen"] == ""


@pytest.mark.cold
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
    ranks = nursery.run_watched(uses_the_users_group, 2, tmp_path, str(tmp_path / "store"))
    assert_ended_well(ranks)
    assert [rank.notes["same"] for rank in ranks] == [[True, 0, 2, 3.0], [True, 1, 2, 3.0]]


def test_processes_that_leave_at_once_do_not_break_the_connections_of_others(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(joins_and_leaves_at_once, 3, tmp_path, deadline=60):
        assert rank.code == 0 and "joined" in rank.notes, rank.stderr


@pytest.mark.parametrize("init_method", ["env://", "file://{folder}/store"])
def test_a_thread_that_looks_into_the_store_when_a_process_ends_neither_aborts_it_nor_makes_the_file_anew(
    nursery: Nursery, tmp_path: Path, init_method: str
) -> None:
    for turn in range(TURNS):
        folder = tmp_path / f"{turn}"
        folder.mkdir()
        for rank in nursery.run(
            ends_while_a_thread_looks, 3, folder, init_method.format(folder=folder), finalize=True, deadline=60
        ):
            assert rank.code == 0 and "terminate called" not in rank.stderr and "up" in rank.notes, rank.stderr
        assert not (folder / "store").exists()


@pytest.mark.parametrize("last", [0, 1])
def test_processes_exit_quietly_although_one_ends_before_the_other(nursery: Nursery, tmp_path: Path, last: int) -> None:
    """Rank 0 hosts the store: it may go while rank 1 is still there."""
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


def test_rank_0_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    port = free_port()
    with pytest.raises(RendezvousError, match="ranks 1-3 of 4 did not join"):
        join_process_group(0, 4, HOST, port, timeout=timedelta(seconds=1))
    said = capsys.readouterr().err + "".join(record.getMessage() for record in caplog.records)
    assert f"rank 0 is waiting at {HOST}:{port} for ranks 1-3 of 4" in said
    assert rendezvous._ranks({7, 1, 4, 5, 6}) == "ranks 1, 4-7" and rendezvous._ranks({2}) == "rank 2"


def test_the_rank_that_waits_alone_names_all_who_are_missing() -> None:
    port = free_port()
    with pytest.raises(RendezvousError) as caught:
        join_process_group(0, 3, HOST, port, timeout=timedelta(seconds=1))
    assert f"ranks 1-2 of 3 did not join at {HOST}:{port} within 1 s" in str(caught.value)
    assert not dist.is_initialized()
    del caught  # its traceback holds the store
    gc.collect()
    assert listening_addresses(port) == [], "the store must go with the attempt"


def test_a_store_that_nobody_answers_is_named_within_the_timeout() -> None:
    port = free_port()
    with Slowness() as slowness, pytest.raises(ValueError) as caught:
        join_process_group(1, 2, HOST, port, timeout=timedelta(seconds=3))
    assert slowness.took < 15 * slowness.factor
    assert isinstance(caught.value, RendezvousError)
    assert f"rank 1 on host {HOSTNAME} could not meet the other 1 at {HOST}:{port} within 3 s" in str(caught.value)
    assert "Check that rank 0 runs on that address" in str(caught.value)


def test_a_taken_port_is_named_at_once() -> None:
    with socket.socket() as owner:
        owner.bind((HOST, 0))
        owner.listen()
        port = owner.getsockname()[1]
        with Slowness() as slowness, pytest.raises(RendezvousError) as caught:
            join_process_group(0, 2, HOST, port, timeout=timedelta(seconds=30))
        assert slowness.took < 5 * slowness.factor
    assert f"{HOST}:{port}" in str(caught.value) and "Address already in use" in str(caught.value)
    assert "that the port is free there" in str(caught.value)


def test_an_address_that_is_not_rank_0s_own_is_named_at_once() -> None:
    """192.0.2.0/24 is reserved (RFC 5737): no machine has it."""
    with Slowness() as slowness, pytest.raises(RendezvousError) as caught:
        join_process_group(0, 2, "192.0.2.1", timeout=timedelta(seconds=30))
    assert slowness.took < 15 * slowness.factor
    assert "192.0.2.1:29500" in str(caught.value)
    assert "192.0.2.1 is not an address of this machine" in str(caught.value)
    assert "DDP_CALLBACKS_BIND=0.0.0.0 for all interfaces" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_never_resolves_is_named_within_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """.invalid is reserved (RFC 6761)."""
    monkeypatch.setattr(network, "_PATIENCE", 0.1)
    with Slowness() as slowness, pytest.raises(RendezvousError, match=r"no-such-host.invalid:29500 within 2 s"):
        join_process_group(rank, 2, "no-such-host.invalid", timeout=timedelta(seconds=2))
    assert slowness.took < 15 * slowness.factor
    (said,) = caplog.messages
    assert said.startswith("the name no-such-host.invalid does not resolve yet (") and "retrying for 2 s" in said


def names_of_this_machine(meaning: str) -> Callable[..., Any]:
    """A resolver that takes ``node1`` for ``meaning``, and knows what addresses are."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        return real(meaning if host == "node1" else host, *args, **options)

    return getaddrinfo


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
    for name, value in {**ON_SEVERAL_HOSTS, "OMPI_COMM_WORLD_RANK": rank, "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getaddrinfo", names_of_this_machine("127.0.1.1"))
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


MEET = """
from ddp_callbacks import join_process_group
import torch, torch.distributed as dist
join_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print(total.item())
"""


@pytest.mark.cold
def test_ranks_whose_agents_have_counted_restarts_differently_meet() -> None:
    """torchrun counts on each node alone; its store outlives its workers, and holds what they wrote before."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for counts in (("0", "0"), ("0", "1")):
        environs = [
            {**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": count}
            for rank, count in enumerate(counts)
        ]
        ranks = [
            subprocess.Popen([sys.executable, "-c", MEET], env=environ, stdout=subprocess.PIPE, text=True)
            for environ in environs
        ]
        try:
            assert [rank.communicate(timeout=600)[0] for rank in ranks] == ["2.0\n", "2.0\n"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
