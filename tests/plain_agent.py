"""A stand-in for ``ddp_callbacks/launcher/agent.py`` without torchrun: it is there in 0.1 s, not in 2 s.

It speaks to the node's program as the real one does, numbers the workers of all nodes, starts its own with the same
variables, and ends in the same way; ``test_plain_agent.py`` holds it against the real one. It restarts nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.node import GRACE

_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_LOOK = 0.02  # seconds between two looks at the workers
_ENDS = 1.0  # seconds that the workers have after a signal


class Ended(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    job = json.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    control = socket.socket(fileno=job["control"])
    if select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK):
        return 128 + signal.SIGTERM
    workers: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _raise_ended)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _report(control, {"asked": signal.Signals(number).name}))
    ranks: list[int] = []
    try:
        ranks += _start(job, control, workers)
        return _watch(ranks, control, workers, job)
    except Ended as ended:
        told: set[int] = set()
        _tell(ranks, control, workers, told)
        _report(control, {"ending": signal.Signals(ended.number).name})
        _await(ranks, control, workers, told, job)
        _end(workers, ended.number)
        return 128 + ended.number


def _raise_ended(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


def _report(control: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def _start(job: dict[str, Any], control: socket.socket, workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """The ranks of this node's workers; those that were started are in ``workers``."""
    processes = int(job["torchrun"]["nproc_per_node"] or 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_to(job["address"]))
    if interface != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    told = {"processes": processes, "threads": os.environ["OMP_NUM_THREADS"], "interface": interface}
    _report(control, {"agent": told})
    of_each_node = _meet(job, processes)
    first = sum(of_each_node[: job["node_rank"]])
    ranks = list(range(first, first + processes))
    pipes = [(os.pipe(), os.pipe()) for _ in ranks]
    _report(control, {"workers": {"ranks": ranks, "attempt": 0}})
    for rank, (out, err) in zip(ranks, pipes, strict=True):
        _report(control, {"rank": rank}, (out[0], err[0]))
    command = [sys.executable, "-u", *(bytes.fromhex(word) for word in job["command"])]
    for local_rank, (out, err) in enumerate(pipes):
        environ = {**os.environ, **_variables(job, of_each_node, local_rank)}
        workers.append(subprocess.Popen(command, env=environ, stdout=out[1], stderr=err[1], start_new_session=True))
    for descriptor in (end for pair in pipes for pipe in pair for end in pipe):
        os.close(descriptor)
    return ranks


def _interface_to(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
            except OSError:
                pass  # an interface without an address
    return "lo"


def _meet(job: dict[str, Any], processes: int) -> list[int]:
    """The number of processes of each node, once all are there: each tells the first, which tells each."""
    if job["listener"] is None:
        with socket.create_connection((job["address"], job["port"])) as first, first.makefile("rw") as lines:
            print(json.dumps([job["node_rank"], processes]), file=lines, flush=True)
            return list(json.loads(lines.readline()))
    found, others = {job["node_rank"]: processes}, []
    with socket.socket(fileno=job["listener"]) as listener:
        while len(found) < int(str(job["torchrun"]["nnodes"]).rpartition(":")[2]):
            others.append(listener.accept()[0].makefile("rw"))
            if told := others[-1].readline():  # else it has only tried whether the port can be reached
                found.update([json.loads(told)])
    of_each_node = [found[node] for node in sorted(found)]
    for lines in others:
        with suppress(OSError):
            print(json.dumps(of_each_node), file=lines, flush=True)
    return of_each_node


def _variables(job: dict[str, Any], of_each_node: list[int], local_rank: int) -> dict[str, str]:
    node, world_size = job["node_rank"], sum(of_each_node)
    rank = sum(of_each_node[:node]) + local_rank
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": of_each_node[node],
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(of_each_node),
        "ROLE_NAME": job["torchrun"]["role"],
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": job["address"],
        "MASTER_PORT": job["port"],
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": job["torchrun"]["max_restarts"],
        "TORCHELASTIC_RUN_ID": job["torchrun"]["rdzv_id"],
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job["torchrun"]["signals_to_handle"],
        "TORCHELASTIC_ERROR_FILE": os.path.join(job["folder"], f"error-0-{local_rank}.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _watch(ranks: list[int], control: socket.socket, workers: list[subprocess.Popen[bytes]], job: Any) -> int:
    """Until all have ended well, or one has not."""
    told: set[int] = set()
    while not any(worker.poll() for worker in workers):
        if all(worker.poll() == 0 for worker in workers):
            _tell(ranks, control, workers, told)
            return 0
        time.sleep(_LOOK)
    _tell(ranks, control, workers, told)
    if EXIT_PREEMPTED in (worker.poll() for worker in workers):
        _await(ranks, control, workers, told, job)
    _end(workers, signal.SIGTERM)
    for end in _ends(ranks, workers):
        if end["code"]:
            _report(control, {"failed": end})
    return 1


def _await(
    ranks: list[int], control: socket.socket, workers: list[subprocess.Popen[bytes]], told: set[int], job: Any
) -> None:
    """Until those that were asked to stop have ended."""
    grace = job.get("grace")
    limit = time.monotonic() + (GRACE if grace is None else grace)
    while len(told) < len(workers) and time.monotonic() < limit and _is_read(control):
        time.sleep(_LOOK)
        _tell(ranks, control, workers, told)


def _is_read(control: socket.socket) -> bool:
    return not (select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK))


def _tell(ranks: list[int], control: socket.socket, workers: list[subprocess.Popen[bytes]], told: set[int]) -> None:
    for end in _ends(ranks, workers):
        if end["rank"] not in told:
            told.add(end["rank"])
            _report(control, {"noticed": end})


def _ends(ranks: list[int], workers: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    """Of the workers that have ended."""
    ends = []
    for rank, worker in zip(ranks, workers, strict=True):
        if (code := worker.poll()) is not None:
            name = signal.Signals(-code).name if code < 0 else None
            code = code if code >= 0 else 128 - code
            ends.append({"rank": rank, "pid": worker.pid, "code": code, "signal": name, "message": None})
    return ends


def _end(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    limit = time.monotonic() + _ENDS
    for now in (number, signal.SIGKILL):
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, now)
        while any(worker.poll() is None for worker in workers) and time.monotonic() < limit:
            time.sleep(_LOOK)
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
