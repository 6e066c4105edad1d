"""What ``ddprun`` does with what the nodes tell it, in orders that are hard to bring about on real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_callbacks.launcher.connection import Event
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Here, NodePlan, make_plan
from ddp_callbacks.launcher.watch import Watch


class Node:
    """A connection that says nothing by itself."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan

    def explain_end(self) -> str:
        return "the connection was lost"


class Job:
    """A launch whose events are given; it has ended once they are over."""

    signal = None

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = list(nodes)
        self.events: list[Event] = []
        self.is_ending = False

    def next_event(self) -> Event | None:
        return self.events.pop(0) if self.events else None

    def end(self) -> None:
        self.is_ending = True


class Silent(Terminal):
    def __init__(self) -> None:
        self.said = ""

    def write(self, stream: str, data: bytes) -> None:
        self.said += data.decode()


NOTICED = {"noticed": [{"rank": 1, "pid": 7, "code": 3, "signal": None, "message": "ValueError: x"}]}


@pytest.mark.parametrize(("flags", "ends", "code"), [([], True, 3), (["--nnodes", "1:2"], False, 0)])
def test_a_node_that_is_lost_after_a_worker_of_it_failed_ends_the_job_or_is_done_without(
    tmp_path: Path, flags: list[str], ends: bool, code: int
) -> None:
    plan = make_plan(parse_options(["-H", "a,b", *flags, "x.py"], {}), Here("python", "/", lambda name: False))
    first, second = (Node(node) for node in plan.nodes)
    job, terminal = Job([first, second]), Silent()

    def came(node: Node, kind: str, message: Any = None) -> Event:
        return Event(node, kind, -1, json.dumps(message).encode())  # type: ignore[arg-type]

    job.events = [came(second, "m", NOTICED), came(second, "closed"), came(first, "x", {"code": 0})]
    with Output(tmp_path / "logs", None, True, terminal) as output:
        assert Watch(plan, job, output).run() == code  # type: ignore[arg-type]
    assert job.is_ending == ends
    assert ("goes on without it" in terminal.said) != ends
