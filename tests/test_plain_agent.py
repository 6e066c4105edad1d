"""``plain_agent.py`` reports, starts its workers and ends as the agent of ``ddprun``, for which other tests take it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_callbacks.launcher.launch import AGENT
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.remote import as_hex

LIMIT = 600.0  # seconds until a test gives up
PLAIN = ("-P", str(Path(__file__).with_name("plain_agent.py")))
HOST = "127.0.0.1"
PROCESSES = (1, 2)  # of each node

SHOW_VARIABLES = """
import json, os
print("up", json.dumps(dict(os.environ), sort_keys=True))
"""
STAY = """
import os, time
print("up", flush=True)
rank = os.environ["RANK"]
open("up-" + rank, "w").close()
if rank == "1" and {raises}:
    while not os.path.exists("up-2"):  # which the agent ends next
        time.sleep(0.01)
    raise ValueError("the data of rank 1 are gone")
time.sleep(1000)
"""


class Node:
    """The agent of one node, started as the node's program starts it; what it reports, and what its workers print."""

    def __init__(self, agent: tuple[str, ...], job: dict[str, Any], listener: socket.socket | None) -> None:
        self.reports: list[dict[str, Any]] = []
        self.said: dict[str, bytes] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends = [theirs] if listener is None else [theirs, listener]
        job = {**job, "control": theirs.fileno(), "listener": None if listener is None else listener.fileno()}
        self.process = subprocess.Popen(
            [sys.executable, *agent],
            cwd=Path(job["folder"]).parent,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in ends],
            start_new_session=True,
        )
        for end in ends:
            end.close()
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps(job).encode())
        self._readers = [threading.Thread(target=self._read_reports, daemon=True)]
        self._readers[0].start()

    def _read_reports(self) -> None:
        with self._control:
            while (received := socket.recv_fds(self._control, 1 << 18, 2))[0]:
                report = json.loads(received[0])
                self.reports.append(report | {"descriptors": len(received[1])})
                for name, descriptor in zip(("out", "err"), received[1], strict=False):
                    reader = threading.Thread(
                        target=self._read_stream, args=(f"{name} {report['rank']}", descriptor), daemon=True
                    )
                    reader.start()
                    self._readers.append(reader)

    def _read_stream(self, key: str, descriptor: int) -> None:
        self.said[key] = b""
        with open(descriptor, "rb", buffering=0) as stream:
            while data := stream.read(1 << 16):
                self.said[key] += data

    def wait(self) -> int:
        """Its exit code, once it has ended and all is read."""
        code = self.process.wait(LIMIT)
        self._readers[0].join(LIMIT)  # which starts the others
        for reader in self._readers:
            reader.join(LIMIT)
        return code


def outcome(agent: tuple[str, ...], folder: Path, script: str, do: Callable[[list[Node]], None]) -> list[Any]:
    """Of each of two nodes, after ``do``: the reports, what the workers have printed, and the exit code."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    options = parse_options(["--nnodes", "2", "script.py"], {})
    nodes = []
    try:
        for rank, processes in enumerate(PROCESSES):
            job = {
                "torchrun": {**options.torchrun, "nproc_per_node": str(processes), "nnodes": "2:2", "node_rank": rank},
                "command": [as_hex("script.py")],
                "rendezvous": "static",
                "node_rank": rank,
                "address": HOST,
                "port": port,
                "folder": str(folder / f"node-{rank}"),
            }
            nodes.append(Node(agent, job, listener if rank == 0 else None))
        await_all(nodes)
        do(nodes)
        codes = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            node.process.terminate()
            node.process.wait(LIMIT)
    found = []
    for node, code in zip(nodes, codes, strict=True):
        said = {key: text.decode().replace(str(folder), "FOLDER") for key, text in node.said.items()}
        found.append((told(node.reports), {k: text.replace(str(port), "PORT") for k, text in said.items()}, code))
    return found


def await_all(nodes: list[Node]) -> None:
    """Until all workers have printed a line."""
    end = time.monotonic() + LIMIT
    while sum(has_printed(node) for node in nodes) < sum(PROCESSES):
        assert time.monotonic() < end, [(node.reports, node.said) for node in nodes]
        time.sleep(0.01)


def has_printed(node: Node) -> int:
    """How many workers have printed a line; an error is none."""
    return sum(key.startswith("out") and text.endswith(b"\n") for key, text in list(node.said.items()))


def told(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without process ids."""
    for report in reports:
        for kind in ("noticed", "failed"):
            if kind in report:
                report[kind]["pid"] = 0
    return reports


def end_the_first(nodes: list[Node]) -> None:
    """Once the second has ended: as ddprun does when a worker has failed."""
    nodes[1].wait()
    nodes[0].process.terminate()


def end_both(nodes: list[Node]) -> None:
    for node in nodes:
        node.process.terminate()


@pytest.mark.cold
@pytest.mark.parametrize(
    ("script", "do", "codes", "last"),
    [
        pytest.param(SHOW_VARIABLES, lambda _: None, [0, 0], "noticed", id="succeeds"),
        pytest.param(STAY.format(raises=True), end_the_first, [143, 1], "failed", id="rank 1 raises"),
        pytest.param(STAY.format(raises=False), end_both, [143, 143], "ending", id="SIGTERM"),
    ],
)
def test_the_stand_in_does_what_the_agent_does(
    tmp_path: Path, script: str, do: Callable[[list[Node]], None], codes: list[int], last: str
) -> None:
    real = outcome(AGENT, tmp_path / "real", script, do)
    assert outcome(PLAIN, tmp_path / "plain", script, do) == real
    assert [code for _, _, code in real] == codes
    assert last in real[1][0][-1]
    assert [report["rank"] for node in real for report in node[0] if "rank" in report] == [0, 1, 2]


@pytest.mark.cold
def test_an_agent_whose_parent_has_ended_before_it_has_started_ends() -> None:
    """Also where another process than the first has inherited it, as in a container."""
    for agent in (AGENT, PLAIN):
        node, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        node.close()
        with theirs:
            done = subprocess.run(
                [sys.executable, *agent],
                input=json.dumps({"control": theirs.fileno()}),
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


def test_the_stand_in_and_ddprun_with_it_do_without_torch() -> None:
    program = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    for name in ("plain_agent.py", "ddprun_with_plain_agent.py"):
        path = Path(__file__).with_name(name)
        done = subprocess.run([sys.executable, "-P", "-c", program, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
