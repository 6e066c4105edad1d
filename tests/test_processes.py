"""``spawn``: a script or a notebook that starts its own processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nursery import free_port

from ddp_callbacks import spawn
from ddp_callbacks.comm.collectives import any_rank
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import spawn as spawn_module

LIMIT = 600.0  # seconds


@pytest.fixture(autouse=True)
def end_of_the_resource_tracker() -> Iterator[None]:
    """multiprocessing keeps a process of its own once it has spawned another."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def sum_of_ranks(folder: str) -> None:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    Path(folder, f"rank-{dist.get_rank()}").write_text(json.dumps([total.item(), *map(int, place)]))


def results(folder: Path) -> list[list[float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*"))]


@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1:{port}", "file://{folder}/store"])
def test_the_processes_meet_by_each_method(tmp_path: Path, init_method: str) -> None:
    spawn(sum_of_ranks, 2, (str(tmp_path),), init_method=init_method.format(port=free_port(), folder=tmp_path))
    assert results(tmp_path) == [[3.0, 0, 2, 0, 2], [3.0, 1, 2, 1, 2]]
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}


NODE = """
import sys
sys.path.insert(0, {tests!r})
from test_processes import sum_of_ranks
from ddp_callbacks import spawn
if __name__ == "__main__":
    spawn(sum_of_ranks, 1, ({folder!r},), nnodes=2, node_rank=int(sys.argv[1]), init_method={init_method!r})
"""


@pytest.mark.cold
def test_two_nodes_number_their_processes_through(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/store"
    script = tmp_path / "node.py"
    script.write_text(NODE.format(tests=str(Path(__file__).parent), folder=str(tmp_path), init_method=method))
    nodes = [subprocess.Popen([sys.executable, str(script), str(rank)]) for rank in (1, 0)]
    try:
        assert [node.wait(LIMIT) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert results(tmp_path) == [[3.0, 0, 2, 0, 1], [3.0, 1, 2, 0, 1]]


NOTEBOOK = """
import os
import torch.distributed as dist
from ddp_callbacks import spawn
def cell():
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
spawn(cell, 2)
"""


@pytest.mark.cold
def test_a_function_of_a_notebook_s_cell_runs() -> None:
    done = subprocess.run([sys.executable], input=NOTEBOOK, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def fail_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the data of rank 1 are gone")
    dist.barrier()


def test_nobody_takes_the_port_before_rank_0_listens_there() -> None:
    with spawn_module._address("env://", 1) as where:
        port = int(where.rpartition(":")[2])
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rank_0:
            rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank_0.bind(("127.0.0.1", port))
            rank_0.listen()


def test_the_exception_of_a_process_is_raised_here() -> None:
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: the data of rank 1 are gone") as caught:
        spawn(fail_on_rank_1, 2, ("raise",))
    assert caught.value.error_index == 1


def interrupt_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyboardInterrupt
    any_rank(False, "a barrier")


def test_an_interrupt_on_one_process_is_told_to_the_others() -> None:
    with pytest.raises(mp.ProcessRaisedException, match=r"PeerError: rank 1 \(.*\) failed with KeyboardInterrupt"):
        spawn(interrupt_rank_1, 2)


def test_a_killed_process_is_named() -> None:
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        spawn(fail_on_rank_1, 2, ("kill",))


def test_a_file_that_an_earlier_run_has_left_does_no_harm(tmp_path: Path) -> None:
    left = dist.PrefixStore("ddp_callbacks", dist.FileStore(str(tmp_path / "store"), 2))
    left.set("part", "old")
    part = dist.PrefixStore("old", left)
    for rank in range(2):
        part.set(f"present/{rank}", f"ticket-{rank}")
        part.set(f"host/{rank}", "{}")
    part.set("admitted", "ticket-0,ticket-1")
    part.set("failure", "{}")
    spawn(sum_of_ranks, 2, (str(tmp_path),), init_method=f"file://{tmp_path}/store")
    assert results(tmp_path) == [[3.0, 0, 2, 0, 2], [3.0, 1, 2, 1, 2]]


@pytest.mark.parametrize(
    ("numbers", "init_method", "says"),
    [
        ({"nprocs": 0}, "env://", "nprocs and nnodes must be at least 1, got nprocs=0"),
        ({"nprocs": 1, "nnodes": 2, "node_rank": 2}, "env://", r"node_rank must lie in \[0, nnodes\), got 2 of 2"),
        (
            {"nprocs": 1, "nnodes": 2},
            "env://",
            "2 nodes need an address to meet at: set MASTER_ADDR, or pass",
        ),
        ({"nprocs": 2}, "tcp://nowhere", "init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"),
        ({"nprocs": 2}, "file://relative", "init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(numbers: dict[str, int], init_method: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        spawn(sum_of_ranks, **numbers, init_method=init_method)
