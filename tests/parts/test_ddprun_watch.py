"""What ``ddprun`` does about what the nodes report, without nodes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ddp_callbacks.launcher.connection import Event
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.watch import Watch

Report = tuple[int, str, dict[str, Any]]  # of a host, by the number of its only rank


class Launch:
    """Gives the watch these reports, and notes what it is told to do."""

    limit, stopped_by, signal = "", "", None

    def __init__(self, max_restarts: int, reports: list[Report]) -> None:
        self.job = parse_options(["-H", "h1:1,h2:1", "--max-restarts", str(max_restarts), "t.py"], {})
        self.nodes: Any = [
            SimpleNamespace(plan=plan, place={"processes": 1}, tell=self.tell, is_open=True) for plan in self.job.nodes
        ]
        self.is_ending, self.restarts, self.has_begun = False, 0, False
        self.calls, self.reports, self.halted = list[str](), reports, asyncio.Event()

    @property
    def is_overdue(self) -> bool:
        return not self.reports

    async def next_event(self) -> Event | None:
        rank, do, values = self.reports[0]
        self.reports = self.reports[1:]
        if do:
            return Event(self.nodes[rank], do, values)
        self.halted.set()
        await asyncio.sleep(0.01)
        return None

    def tell(self, do: str, key: str, value: str) -> None:
        self.calls.append(f"{do} {key.rpartition('/')[2]}: {value}")

    async def halt(self, nodes: Any) -> dict[Any, Any]:
        self.calls.append(f"halt {len(nodes)}")
        await self.halted.wait()
        return {}

    async def meet(self, nodes: Any) -> None:
        self.calls.append(f"meet {len(nodes)}")

    def start(self, nodes: Any) -> None:
        self.calls.append(f"start {len(nodes)}")

    def ask(self) -> None:
        self.calls.append("ask")

    def stop(self, number: int, reason: str = "") -> None:
        self.is_ending, self.stopped_by = True, reason
        self.calls.append(f"stop: {reason}")

    def end(self) -> None:
        self.is_ending = True
        self.calls.append("end")


def started(rank: int) -> Report:
    return rank, "started", {"ranks": [rank], "threads": "1", "interface": "lo"}


def ended(rank: int, code: int) -> Report:
    return rank, "ended", {"rank": rank, "code": code, "signal": None, "now": time.monotonic()}


HALTED: Report = 0, "", {}  # both hosts
BOTH = [started(0), started(1)]
# The restarts that are left, what the hosts report, each by the number of its only rank, and what is done about it.
REPORTS: dict[str, tuple[int, list[Report], list[str]]] = {
    "all are done": (0, [*BOTH, ended(0, 0), ended(1, 0)], ["set ended: 0", "end"]),
    "one is done before the other has begun": (0, [started(0), ended(0, 0), started(1)], ["set ended: 0"]),
    "both have failed": (0, [*BOTH, ended(0, 3), ended(1, 1)], ["end"]),
    "one is asked": (0, [*BOTH, (1, "asked", {"signal": "SIGUSR1"}), ended(1, 75)], ["stop: SIGUSR1 on h2"]),
    "one was preempted": (0, [*BOTH, ended(1, 75)], ["stop: "]),
    "the first is preempted, and all may start again": (1, [*BOTH, ended(1, 75)], ["ask"]),
    "one has failed, and all start again": (
        1,
        [*BOTH, ended(1, 3), ended(0, 143), HALTED, started(0), ended(0, 0), started(1)],
        ["halt 2", "meet 2", "start 2", "set ended: 0"],
    ),
    "it has failed once too often": (
        1,
        [*BOTH, ended(1, 3), HALTED, *BOTH, ended(1, 3), ended(0, 1)],
        ["halt 2", "meet 2", "start 2", "end"],
    ),
    "a program cannot be started": (1, [started(0), (1, "problem", {"text": "cannot start x"})], ["end"]),
}


@pytest.mark.parametrize("case", REPORTS)
def test_what_the_nodes_report_decides_what_is_done(case: str) -> None:
    """A job ends, or starts again, when all hosts say so."""
    restarts, reports, calls = REPORTS[case]
    launch: Any = Launch(restarts, reports)
    asyncio.run(Watch(launch, MagicMock()).run())
    assert launch.calls == calls
