"""A stand-in for ``ddp_callbacks/launcher/agent.py`` without torch: it is there in 0.1 s, not in 2 s.

It reports to the node's program, numbers the workers of all nodes, and ends as the real one does. It has no store for
its workers, and restarts nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.node import GRACE
from ddp_callbacks.network import route_to

_PR_SET_PDEATHSIG = 1
_LOOK = 0.02  # seconds between two looks at the workers
_ENDS = 1.0  # seconds that the workers have after a signal
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Ended(Exception):
    """By a signal."""


class Agent:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._control = socket.socket(fileno=job["control"])
        self._workers: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._told: set[int] = set()

    def run(self) -> int:
        if not self._is_read():
            return 128 + signal.SIGTERM
        for number in _ENDING:
            signal.signal(number, _raise_ended)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: self._report({"asked": signal.Signals(number).name}))
        try:
            self._start()
            while None in (codes := [worker.poll() for worker in self._workers.values()]) and not any(codes):
                time.sleep(_LOOK)
            self._tell("noticed")
            if not any(codes):
                return 0
            if EXIT_PREEMPTED in codes:
                self._await()
            self._end(signal.SIGTERM)
            self._told.clear()
            self._tell("failed")
            return 1
        except Ended as ended:
            (number,) = ended.args
            self._tell("noticed")
            self._report({"ending": signal.Signals(number).name})
            self._await()
            self._end(number)
            return 128 + number

    def _report(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def _is_read(self) -> bool:
        return not (select.select([self._control], [], [], 0)[0] and not self._control.recv(1, socket.MSG_PEEK))

    def _start(self) -> None:
        job, processes = self._job, int(self._job["torchrun"]["nproc_per_node"] or 1)
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
        interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", route_to(job["address"]).interface or "lo")
        self._report({"agent": {"processes": processes, "threads": threads, "interface": interface}})
        counts = _meet(job, processes)
        first = sum(counts[: job["node_rank"]])
        ranks = range(first, first + processes)
        common = {"WORLD_SIZE": sum(counts), "LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_RESTART_COUNT": 0}
        common |= {"MASTER_ADDR": job["address"], "MASTER_PORT": job["port"]}
        self._report({"workers": {"ranks": list(ranks), "attempt": 0}})
        command = [sys.executable, "-u", *(bytes.fromhex(word) for word in job["command"])]
        for local_rank, rank in enumerate(ranks):
            (from_out, out), (from_err, err) = os.pipe(), os.pipe()
            self._report({"rank": rank}, (from_out, from_err))
            own = {**common, "RANK": rank, "LOCAL_RANK": local_rank}
            environ = os.environ | {name: str(value) for name, value in own.items()}
            worker = subprocess.Popen(command, env=environ, stdout=out, stderr=err, start_new_session=True)
            self._workers[rank] = worker
            for descriptor in (from_out, out, from_err, err):
                os.close(descriptor)

    def _await(self) -> None:
        """Until those that were asked to stop have ended."""
        grace = self._job.get("grace")
        limit = time.monotonic() + (GRACE if grace is None else grace)
        while len(self._told) < len(self._workers) and time.monotonic() < limit and self._is_read():
            time.sleep(_LOOK)
            self._tell("noticed")

    def _tell(self, what: str) -> None:
        """Of each worker that has ended, or failed, once."""
        for rank, worker in self._workers.items():
            code = worker.poll()
            if rank not in self._told and code is not None and (code or what == "noticed"):
                self._told.add(rank)
                name, code = (signal.Signals(-code).name, 128 - code) if code < 0 else (None, code)
                end = {"rank": rank, "pid": worker.pid, "code": code, "signal": name, "message": None}
                self._report({what: end})

    def _end(self, number: int) -> None:
        limit = time.monotonic() + _ENDS
        for now in (number, signal.SIGKILL):
            for worker in self._workers.values():
                if worker.poll() is None:
                    os.killpg(worker.pid, now)
            while any(worker.poll() is None for worker in self._workers.values()) and time.monotonic() < limit:
                time.sleep(_LOOK)
        for worker in self._workers.values():
            worker.wait()


def _meet(job: dict[str, Any], processes: int) -> list[int]:
    """The number of processes of each node, once all are there: each tells the first, which tells each."""
    told, others = [(job["node_rank"], processes)], []
    if job["listener"] is None:
        with socket.create_connection((job["address"], job["port"])) as first, first.makefile("rw") as lines:
            print(json.dumps(told[0]), file=lines, flush=True)
            return list(json.loads(lines.readline()))
    with socket.socket(fileno=job["listener"]) as listener:
        while len(told) < int(str(job["torchrun"]["nnodes"]).rpartition(":")[2]):
            others.append(listener.accept()[0].makefile("rw"))
            if line := others[-1].readline():  # else it has only tried whether the port can be reached
                told.append(tuple(json.loads(line)))
    counts = [count for _, count in sorted(told)]
    for lines in others:
        with suppress(OSError):
            print(json.dumps(counts), file=lines, flush=True)
    return counts


def _raise_ended(number: int, _: object) -> NoReturn:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    job = json.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.exit(Agent(job).run())
