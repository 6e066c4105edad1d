"""``spawn``: a script or a notebook that starts its own processes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import spawning
import torch.multiprocessing as mp
from kit.commands import finish, run, start
from kit.ranks import free_port

from ddp_callbacks import spawn
from ddp_callbacks.errors import ConfigurationError

pytestmark = pytest.mark.shares_results()


@pytest.fixture(scope="module")
def found(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = run(["python", spawning.__file__, free_port()], tmp_path_factory.mktemp("spawn"))
    line = next(line for line in printed.splitlines() if line.startswith("found "))
    results: dict[str, Any] = json.loads(line.removeprefix("found "))
    return results


@pytest.mark.cold
@pytest.mark.parametrize("method", ["env", "tcp", "file"])
def test_the_processes_meet_by_each_method(found: dict[str, Any], method: str) -> None:
    """`spawn` works on several nodes and in notebooks."""
    assert found[method][:2] == [[3.0, 0, 2, 0, 2], [3.0, 1, 2, 1, 2]]
    assert (found[method][2] == []) == (method == "file"), "the file of an earlier run does no harm, and goes"


@pytest.mark.cold
def test_a_trainer_in_spawned_processes_trains_with_all_of_them(found: dict[str, Any]) -> None:
    """A Trainer inside of `spawn` trains on its processes."""
    (*first, steps), second = found["trainer"]
    assert (first, second, steps) == ([0, 2], [1, 2, 2], 2)


@pytest.mark.cold
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("raises", "ProcessRaisedException", "ValueError: the data of rank 1 are gone"),
        ("killed", "ProcessExitedException", "process 1 terminated with signal SIGKILL"),
        ("interrupted", "ProcessRaisedException", ") failed with KeyboardInterrupt"),
    ],
)
def test_what_ends_a_process_is_raised_where_it_was_started(
    found: dict[str, Any], how: str, kind: str, says: str
) -> None:
    """`spawn` raises exceptions and names killed processes."""
    assert found[how][0] == kind and says in found[how][1], found[how]


NOTEBOOK = """
import os
import torch.distributed as dist
from ddp_callbacks import spawn
def cell():
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
spawn(cell, 2)
"""


@pytest.mark.cold
def test_a_function_of_a_notebook_s_cell_runs(tmp_path: Path) -> None:
    (tmp_path / "cells").write_text(NOTEBOOK)
    with (tmp_path / "cells").open() as cells:
        printed = finish(start([sys.executable], tmp_path, cold=True, stdin=cells))
    assert sorted(printed.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


COMPUTED = """
import importlib
import torch
from ddp_callbacks import spawn
torch.set_num_threads(2)
(torch.ones(1 << 17, requires_grad=True) * 2).sum().backward()
importlib.import_module("ddp_callbacks.process_group.spawn")._TRIAL = 2.0
try:
    spawn(print, 2)
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.cold
def test_a_notebook_that_has_computed_with_threads_is_told_so_instead_of_waiting(tmp_path: Path) -> None:
    """`spawn` refuses to fork a notebook whose threads the processes would wait for."""
    (tmp_path / "cells").write_text(COMPUTED)
    with (tmp_path / "cells").open() as cells:
        printed = finish(start([sys.executable], tmp_path, cold=True, stdin=cells))
    assert "ConfigurationError this process has computed with 2 threads" in printed, printed
    assert "or set OMP_NUM_THREADS=1 before Python starts" in printed


class Reserved(Exception):
    """The port is as it must be."""


def test_nobody_takes_the_port_before_rank_0_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:

    def try_the_port(_: Any, args: tuple[Any, ...], **options: Any) -> None:
        address = next(value for value in args if str(value).startswith("tcp://"))
        port = int(address.rpartition(":")[2])
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rank_0:
            rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank_0.bind(("127.0.0.1", port))
            rank_0.listen()
        raise Reserved

    monkeypatch.setattr(mp, "start_processes", try_the_port)
    with pytest.raises(Reserved):
        spawn(print, 2)


def test_a_script_that_spawns_without_a_guard_is_told_to_add_one() -> None:
    with pytest.raises(ConfigurationError, match=r'under if __name__ == "__main__"\.$'):
        exec("spawn(print, 2)", {"__name__": "__mp_main__", "spawn": spawn})  # as while a child imports the script
