"""Where processes of several hosts meet when the first host's name or address is not what it seems; real hosts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from jobs import LIMIT, on_hosts
from kit.hosts import Host, HostBed

pytestmark = [*on_hosts("meeting"), pytest.mark.cold]

# Says where the processes met, and what they sum.
PROGRAM = """
from datetime import timedelta
import torch
import torch.distributed as dist
from ddp_callbacks import join_process_group

env = join_process_group(timeout=timedelta(minutes=2))
total = torch.tensor([env.rank + 1.0])
dist.all_reduce(total)
dist.barrier()
print("met at", env.host, "sum", total.item())
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[HostBed]:
    """Debian hosts: the name of each means 127.0.1.1 to itself."""
    with HostBed(2, own_name="127.0.1.1") as made:
        yield made


def start(host: Host, program: str = PROGRAM, **variables: str) -> subprocess.Popen[bytes]:
    environ = host.environ(OMP_NUM_THREADS="1", **variables)
    return host.start(sys.executable, "-c", program, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ends(ranks: list[subprocess.Popen[bytes]]) -> list[tuple[str, str]]:
    """What each has printed, and said on standard error."""
    try:
        said = [tuple(stream.decode() for stream in rank.communicate(timeout=LIMIT)) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(out, error) for out, error in said]


def of_srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "42",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "h[1-2]",
        "SLURM_JOB_NODELIST": "h[1-2]",  # without scontrol nobody can read it
    }


def test_a_host_whose_own_name_is_127_0_1_1_is_reached_by_the_others(bed: HostBed) -> None:
    """Others reach a host whose own name means 127.0.1.1."""
    first, second = bed.hosts
    said = ends([start(host, **of_srun(rank)) for rank, host in enumerate((first, first, second))])
    assert [out for out, _ in said] == [
        "met at 10.83.0.1 sum 6.0\n",
        "met at 10.83.0.1 sum 6.0\n",
        "met at h1 sum 6.0\n",
    ]
    assert "h1 resolves to this machine only; the processes meet at 10.83.0.1" in said[0][1]

    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29533"}
    said = ends([start(host, RANK=str(rank), **by_hand) for rank, host in enumerate((first, second))])
    assert [out for out, _ in said] == ["met at 10.83.0.1 sum 3.0\n", "met at h1 sum 3.0\n"]


def test_a_name_that_does_not_resolve_yet_is_waited_for(bed: HostBed) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "trainer-0.trainer", "MASTER_PORT": "29534"}
    hosts = bed.hosts[:2]
    ranks = [start(host, RANK=str(rank), **place) for rank, host in enumerate(hosts)]
    for rank in ranks:
        assert rank.stderr is not None
        line = rank.stderr.readline().decode()
        assert line.startswith("ddp_callbacks: the name trainer-0.trainer does not resolve yet ("), line
    for host in hosts:
        with (host.folder / "hosts").open("a") as names:
            names.write("10.83.0.1 trainer-0.trainer\n")
    assert [out for out, _ in ends(ranks)] == ["met at trainer-0.trainer sum 3.0\n"] * 2


EXCHANGE = """
import time
from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.collectives import all_gather_object
join_process_group()
print("up", flush=True)
end = time.monotonic() + 8
while not any(all_gather_object(time.monotonic() > end, "whether it is over")):
    time.sleep(0.1)
leave_process_group()
print("over", flush=True)
"""


@pytest.mark.waits(4)
def test_a_machine_that_is_cut_off_is_mentioned_and_given_up_under_any_launcher(bed: HostBed) -> None:
    """A machine lost for ten seconds is given up."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": bed.hosts[0].address, "MASTER_PORT": "29537"}
    place |= {"DDP_CALLBACKS_HEARTBEAT_WARNING": "2.5", "DDP_CALLBACKS_HEARTBEAT_TIMEOUT": "4"}
    ranks = [start(host, EXCHANGE, RANK=str(rank), **place) for rank, host in enumerate(bed.hosts[:2])]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
        bed.set_link(bed.hosts[1], up=False)
        begin = time.monotonic()
        for rank in ranks:
            rank.wait(LIMIT)
        took = time.monotonic() - begin
        said = [rank.communicate(timeout=LIMIT)[1].decode() for rank in ranks]
    finally:
        bed.set_link(bed.hosts[1], up=True)
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert took < 20
    for number, text in enumerate(said):
        assert f"the machine of rank {1 - number} has not answered for" in text
        assert f"rank {1 - number} (host " in text and "died or went silent" in text
