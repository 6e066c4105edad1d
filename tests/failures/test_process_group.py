"""Joining, meeting and leaving, with real processes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
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
from misfortunes import my_rank

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.cluster import network
from ddp_callbacks.cluster.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.process_group import presence, rendezvous
from ddp_callbacks.process_group.failures import announce_join

OURS = "ddp_callbacks"


# --- bodies ---------------------------------------------------------------------------------------------------------


def train_by_hand(how: str, port: int) -> None:
    """Nothing but the group says which rank this is."""
    import fabric_loops
    import trainers

    rank = my_rank()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    made = trainers.trainer(OURS) if how == "after the Trainer" else None
    if how == "torch":
        dist.init_process_group("gloo", f"tcp://{HOST}:{port}", rank=rank, world_size=2)
    else:
        join_process_group(rank, 2, HOST, port)
    module = trainers.Net()
    made = made or trainers.trainer(OURS, devices=3, num_nodes=2)  # as under a launcher, these say nothing
    trainers.pl.seed_everything(7, verbose=False)  # as trainer() has, perhaps before the module was made
    made.fit(module, trainers.loader(shuffle=True), trainers.loader(13, 5, 9))
    fabric, values = fabric_loops.fabric(OURS), fabric_loops.fit(OURS)
    os.environ["RANK"] = str(rank)  # for the notes
    note("trainer", [made.global_rank, made.world_size, made.is_global_zero, flat(list(module.state_dict().values()))])
    note("fabric", [fabric.global_rank, fabric.world_size, flat(values)])


def train_alone() -> dict[str, list[float]]:
    import fabric_loops
    import trainers

    module = trainers.Net()
    with trainers.quiet():
        made = trainers.trainer("auto", devices=1)
        made.fit(module, trainers.loader(shuffle=True), trainers.loader(13, 5, 9))
        return {"trainer": flat(list(module.state_dict().values())), "fabric": flat(fabric_loops.fit("auto"))}


def flat(values: Any) -> list[float]:
    if isinstance(values, torch.Tensor):
        return list(values.flatten().tolist())
    if isinstance(values, float | int):
        return [float(values)]
    return [number for value in values for number in flat(value)]


def contradict() -> None:
    """The group says one thing, and something else another."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from trainers import Net, trainer

    class OfTheUser(LightningEnvironment):
        def global_rank(self) -> int:
            return 3

        def world_size(self) -> int:
            return 4

    rank = my_rank()
    join_process_group()
    found = {"arguments": lambda: join_process_group(1 - rank, 2), "size": lambda: join_process_group(world_size=3)}
    found["environment"] = lambda: trainer(OURS, plugins=[OfTheUser()]).fit(Net())
    for name, call in found.items():
        note(name, message_of(call))
    os.environ.update(RANK="2", WORLD_SIZE="4")
    text = message_of(lambda: trainer(OURS).fit(Net()))
    os.environ.update(RANK="0", WORLD_SIZE="1")  # a launcher's process that has started both itself
    found_rank = join_process_group().rank
    os.environ["RANK"] = str(rank)  # for the notes
    note("variables", text)
    note("one of a launcher", found_rank)


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


def sum_over_ranks() -> float:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def joins_twice_and_leaves() -> None:
    env = join_process_group()
    note("env", [env.rank, env.world_size, env.host])
    note("sum", sum_over_ranks())
    group = dist.group.WORLD
    note("again", [join_process_group().rank == env.rank, dist.group.WORLD is group])
    note("listening", listening_addresses(env.port or 0))
    dist.barrier()
    leave_process_group()
    leave_process_group()
    note("left", not dist.is_initialized())


def joins_and_leaves_at_once(times: int) -> None:
    for number in range(times):
        join_process_group(init_method=f"file://{Path.cwd()}/store-{number}")
        leave_process_group()
    note("joined")


def ends_while_a_thread_looks(init_method: str) -> None:
    """The thread that looks for the address of rank 0 is in the store, which is slow, nearly all the time."""

    def look(store: dist.Store) -> None:
        with contextlib.suppress(dist.DistError):
            store.wait(["nobody writes this"], timedelta(seconds=0.5))

    presence.Presence.find_server = lambda here: look(here.store)
    dist.init_process_group("gloo", init_method, rank=my_rank(), world_size=2)
    atexit.register(leave_process_group)
    announce_join()
    time.sleep(0.2)
    note("up")


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


def waits_for_a_rank_that_never_comes(how: str) -> None:
    """Rank 0, which hosts the store, gives up first, or rank 1 dies meanwhile."""
    if how == "rank 1 dies" and my_rank() == 1:
        presence.Presence.hear = lambda here, message: os.kill(os.getpid(), signal.SIGKILL)
    with noting_errors():
        is_short = how == "rank 0 gives up" and my_rank() == 0
        join_process_group(timeout=timedelta(seconds=2 if is_short else 120))


def listening_addresses(port: int) -> list[str]:
    """The local addresses on which this machine listens at ``port``, from the kernel's own tables (Linux)."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(a)[::-1]) if len(a) == 8 else f"IPv6 {a}" for a in found]


# --- tests ----------------------------------------------------------------------------------------------------------


def test_two_processes_join_and_the_store_listens_on_the_chosen_address_only(nursery: Nursery, tmp_path: Path) -> None:
    """The store listens on the chosen address only."""
    ranks = nursery.run_watched(joins_twice_and_leaves, 2, tmp_path, finalize=True)
    assert_ended_well(ranks)
    for number, rank in enumerate(ranks):
        assert rank.notes["env"] == [number, 2, HOST]
        assert rank.notes["sum"] == 3.0
        assert rank.notes["again"] == [True, True], "joining twice must change nothing"
        assert rank.notes["listening"] == [HOST]
        assert rank.notes["left"]


@pytest.mark.parametrize(("size", "times"), [(2, 10), pytest.param(3, 100, marks=pytest.mark.night)])
def test_processes_that_leave_at_once_do_not_break_the_connections_of_others(
    nursery: Nursery, tmp_path: Path, size: int, times: int
) -> None:
    """Processes that leave at once break no others' connections."""
    for rank in nursery.run(joins_and_leaves_at_once, size, tmp_path, times, deadline=60):
        assert rank.code == 0 and "joined" in rank.notes, rank.stderr


@pytest.mark.parametrize("init_method", ["env://", "file://{folder}/store"])
def test_a_thread_that_looks_into_the_store_when_a_process_ends_neither_aborts_it_nor_makes_the_file_anew(
    nursery: Nursery, tmp_path: Path, init_method: str
) -> None:
    meeting = init_method.format(folder=tmp_path)
    for rank in nursery.run(ends_while_a_thread_looks, 2, tmp_path, meeting, finalize=True, deadline=60):
        assert rank.code == 0 and "terminate called" not in rank.stderr and "up" in rank.notes, rank.stderr
    assert not (tmp_path / "store").exists()


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


# How two of three wait for the last: who tells of it, and what rank 0 says of the reason.
NEVER_COMES = {"rank 0 gives up": (2, " within 2 s"), "rank 1 dies": (1, ": rank 1 gave up or died")}


@pytest.mark.parametrize("how", NEVER_COMES)
def test_a_rank_that_never_comes_is_named(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """A timeout names absent ranks."""
    begin, (tell, why) = time.monotonic(), NEVER_COMES[how]
    ranks = nursery.run_watched(waits_for_a_rank_that_never_comes, 3, tmp_path, how, started=2)
    assert time.monotonic() - begin < 15 * ranks[0].slowness
    for number, rank in enumerate(ranks[:tell]):
        kind, text = rank.notes["error"]
        assert kind == "RendezvousError"
        assert "rank 2 of 3 did not join" in text, text
        assert f"rank {number} on host {HOSTNAME} waited" in text, text
        assert "Start every rank" in text
        assert rank.code == 1
    assert why in ranks[0].notes["error"][1]


def resolver(names: dict[str, str]) -> Callable[..., Any]:
    """Of host names: what ``names`` says, and no other; and what addresses are."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        is_address = host.replace(".", "").isdigit() or host == "localhost"
        if not is_address and host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(names.get(host, host), *args, **options)

    return getaddrinfo


# What is missing: who waits at which address, for how many seconds, and what the error says.
MISSING = {
    "the others": (0, HOST, 2, "ranks 1, 2 of 3 did not join at {place} within 2 s"),
    "rank 0, whose store answers": (1, HOST, 2, "rank 0 of 3 did not join at {place} within 2 s"),
    "rank 0": (1, HOST, 2, "could not meet the other 2 at {place} within 2 s. Check that rank 0 runs on that address"),
    "a port": (0, HOST, 30, "Address already in use"),
    "an address": (0, "192.0.2.1", 30, "192.0.2.1 is not an address of this machine; set MASTER_ADDR"),  # reserved
    "a name": (0, "no-such-host", 2, "{place} within 2 s"),
    "a name, on rank 1": (1, "no-such-host", 2, "{place} within 2 s"),
}
SAID = {
    "the others": "rank 0 is waiting at {place} for ranks 1, 2 of 3",
    "rank 0, whose store answers": "rank 1 is waiting at {place} for rank 0 of 3",
    "a name": "the name no-such-host does not resolve yet (",
    "a name, on rank 1": "the name no-such-host does not resolve yet (",
}


def slow(name: str) -> Any:
    seconds = MISSING[name][2]
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.waits(seconds)] if seconds < 30 else [])


@pytest.mark.parametrize("missing", [slow(name) for name in MISSING])
def test_what_is_missing_where_nobody_answers_is_named_in_time(
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 names a wrong address, a taken port and absent ranks; it retries names."""
    rank, host, timeout, says = MISSING[missing]
    monkeypatch.setattr(socket, "getaddrinfo", resolver({}))
    monkeypatch.setattr(rendezvous, "_PATIENCE", 1.0)  # after which it is printed for whom a rank waits
    monkeypatch.setattr(network, "_PATIENCE", 1.0)  # for which name
    caplog.set_level("INFO")
    with socket.create_server((HOST, 0)) if missing == "a port" else contextlib.nullcontext() as owner:
        port = owner.getsockname()[1] if owner else free_port()
        store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False) if "store" in missing else None
        with Slowness() as slowness, pytest.raises(RendezvousError) as caught:
            join_process_group(rank, 3, host, port, timeout=timedelta(seconds=timeout))
    assert slowness.took < (5 if missing == "a port" else 15) * slowness.factor
    assert isinstance(caught.value, ValueError) and not dist.is_initialized()
    text, place = str(caught.value), f"{host}:{port}"
    assert says.format(place=place) in text, text
    printed = capfd.readouterr().err + "".join(caplog.messages)
    assert SAID.get(missing, "").format(place=place) in printed
    assert "frame #" not in printed, "a stack of C++ hides the error"
    del caught, store  # the traceback holds one, too
    gc.collect()
    assert listening_addresses(port) == [], "the store must go with the attempt"


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
    monkeypatch.setattr(socket, "getaddrinfo", resolver({"node1": "127.0.1.1"}))
    monkeypatch.setattr(rendezvous, "address_for_others", lambda others: None)  # a machine without a network
    with Slowness() as slowness, pytest.raises(ConfigurationError) as caught:
        join_process_group(timeout=timedelta(seconds=60))
    assert slowness.took < 5 * slowness.factor
    assert f"the 4 processes are on several hosts, but the address of rank 0, {address}, {says}" in str(caught.value)
    assert "Set MASTER_ADDR to an address of rank 0's host" in str(caught.value)


def test_a_world_of_one_starts_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert join_process_group(0, 1) == WorkerEnv()
    assert not dist.is_initialized()
    assert len(os.listdir("/proc/self/fd")) == before
    leave_process_group()


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return train_alone()


@pytest.mark.parametrize("how", ["ours", "torch", "after the Trainer"])
def test_processes_that_joined_by_hand_train_as_one_process(
    nursery: Nursery, tmp_path: Path, alone: dict[str, list[float]], how: str
) -> None:
    """A Trainer or Fabric trains with any process group."""
    ranks = nursery.run(train_by_hand, 2, tmp_path, how, free_port(), deadline=90)
    for number, rank in enumerate(ranks):
        assert "fabric" in rank.notes, rank.stderr
        assert rank.notes["trainer"][:3] == [number, 2, number == 0]
        assert rank.notes["fabric"][:2] == [number, 2]
        for name, right in alone.items():
            assert rank.notes[name][-1] == pytest.approx(right, rel=1e-10, abs=1e-14), name


def test_what_contradicts_the_group_is_an_error_that_names_both(nursery: Nursery, tmp_path: Path) -> None:
    """A rank or world size that contradicts the process group is an error."""
    for number, rank in enumerate(nursery.run(contradict, 2, tmp_path, deadline=60)):
        assert rank.notes.get("one of a launcher") == number, rank.stderr
        group = f"this process is rank {number} of 2 in the process group that it has joined, but"
        for name, says in {
            "arguments": f"the arguments state rank {1 - number} of 2",
            "size": f"the arguments state rank {number} of 3",
            "environment": "global_rank() and world_size() of OfTheUser state rank 3 of 4",
            "variables": "the launcher's variables state rank 2 of 4",
        }.items():
            assert rank.notes[name].startswith(f"{group} {says}"), rank.notes[name]


def test_a_group_of_one_is_a_single_process(nursery: Nursery, tmp_path: Path, alone: dict[str, list[float]]) -> None:
    assert nursery.run(trains_in_a_group_of_one, 1, tmp_path)[0].notes["trainer"] == alone["trainer"]


def trains_in_a_group_of_one() -> None:
    from trainers import Net, loader, trainer

    dist.init_process_group("gloo", f"file://{Path.cwd()}/store", rank=0, world_size=1)
    module = Net()
    trainer(OURS, devices=1).fit(module, loader(shuffle=True), loader(13, 5, 9))
    note("trainer", flat(list(module.state_dict().values())))


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
    """Ranks meet again after `torchrun` restarts."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for counts in (["0", "0"], ["0", "1"]):
        ranks = nursery.run(meets_after_restarts, 2, tmp_path, counts, environ=address)
        assert [rank.notes.get("sum") for rank in ranks] == [3.0, 3.0], ranks[0].stderr
