"""What ``ddprun`` does about what the nodes report, without nodes."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_callbacks.launcher.connection import Event
from ddp_callbacks.launcher.launch import Limits
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.watch import Watch


class Launch:
    """Notes what it is told to do."""

    def __init__(self, job: Job) -> None:
        places = {"h1": {"processes": 1}, "h2": {"processes": 1}}
        self.job, self.limits, self.calls = job, Limits(), list[str]()
        self.nodes: Any = [
            SimpleNamespace(plan=SimpleNamespace(name=name), place=place, tell=self.tell)
            for name, place in places.items()
        ]
        self.is_ending, self.restarts, self.stopped_by, self.has_begun = False, 0, "", False

    def tell(self, do: str, rank: int) -> None:
        self.calls.append(f"{do}: {rank}")

    def halt(self, nodes: Any) -> None:
        self.calls.append(f"halt {len(nodes)}")

    def start_again(self, nodes: Any, port: int) -> None:
        self.restarts += 1
        self.calls.append(f"start {len(nodes)} at {port}")

    def ask(self, number: int) -> None:
        self.calls.append("ask")

    def stop(self, number: int, reason: str = "") -> None:
        self.is_ending, self.stopped_by = True, reason
        self.calls.append(f"stop: {reason}")

    def end(self) -> None:
        self.is_ending = True
        self.calls.append("end")


def started(rank: int) -> tuple[int, dict[str, Any]]:
    return rank, {"started": {"ranks": [rank], "threads": "1", "interface": "lo"}}


def ended(rank: int, code: int) -> tuple[int, dict[str, Any]]:
    report = {"rank": rank, "code": code, "signal": None, "record": ""}
    return rank, {"ended": report, "now": time.monotonic()}


def halted(rank: int) -> tuple[int, dict[str, Any]]:
    return rank, {"halted": 0 if rank else 4000}


BOTH = [started(0), started(1)]
# The restarts that are left, what the hosts report, each by the number of its only rank, and what is done about it.
REPORTS: dict[str, tuple[int, list[tuple[int, dict[str, Any]]], list[str]]] = {
    "all are done": (0, [*BOTH, ended(0, 0), ended(1, 0)], ["ended: 0", "end"]),
    "one is done before the other has begun": (0, [started(0), ended(0, 0), started(1)], ["ended: 0"]),
    "both have failed": (0, [*BOTH, ended(0, 3), ended(1, 1)], ["end"]),
    "one is asked": (0, [*BOTH, (1, {"asked": "SIGUSR1"}), ended(1, 75)], ["stop: SIGUSR1 on h2"]),
    "one was preempted": (0, [*BOTH, ended(1, 75)], ["stop: "]),
    "the first is preempted, and all may start again": (1, [*BOTH, ended(1, 75)], ["ask"]),
    "one has failed, and all start again": (
        1,
        [*BOTH, ended(1, 3), halted(1), ended(0, 143), halted(0), started(0), ended(0, 0), started(1)],
        ["halt 2", "start 2 at 4000", "ended: 0"],
    ),
    "it has failed once too often": (
        1,
        [*BOTH, ended(1, 3), halted(1), halted(0), *BOTH, ended(1, 3), ended(0, 1)],
        ["halt 2", "start 2 at 4000", "end"],
    ),
    "a program cannot be started": (1, [started(0), (1, {"problem": "cannot start x"})], ["end"]),
}


@pytest.mark.parametrize("case", REPORTS)
def test_what_the_nodes_report_decides_what_is_done(case: str) -> None:
    """A job ends, or starts again, when all hosts say so."""
    restarts, reports, calls = REPORTS[case]
    launch: Any = Launch(Job((), ("t.py",), min_nodes=2, max_restarts=restarts))
    output: Any = SimpleNamespace(note=lambda text: None, forget_errors=lambda name: None)
    watch = Watch(launch, output, lambda: None)
    for rank, report in reports:
        watch._take(Event(launch.nodes[rank], "m", -1, json.dumps(report).encode()))
    assert launch.calls == calls
