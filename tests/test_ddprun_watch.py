"""What ``ddprun`` does with what the nodes tell it, in orders that are hard to bring about on real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_callbacks.launcher.connection import Event
from ddp_callbacks.launcher.launch import Limits
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Here, NodePlan, Plan, make_plan
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
    stopped_by = ""
    limits = Limits()

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = list(nodes)
        self.events: list[Event] = []
        self.is_ending = False
        self.rounds: list[tuple[int | None, list[str]]] = []
        self.asked: list[int] = []

    @property
    def is_overdue(self) -> bool:
        return not self.events

    def next_event(self) -> Event | None:
        return self.events.pop(0)

    def start_again(self, after: int | None, nodes: list[Node]) -> None:
        self.rounds.append((after, [node.plan.name for node in nodes]))

    def ask(self, number: int) -> None:
        self.asked.append(number)

    def stop(self, number: int) -> None:
        self.asked.append(number)
        self.is_ending = True

    def end(self) -> None:
        self.is_ending = True


class Silent(Terminal):
    def __init__(self) -> None:
        self.said = ""

    def write(self, stream: str, data: bytes) -> None:
        self.said += data.decode()


AGENT = {"agent": {"processes": 1, "threads": "1", "interface": "lo"}}
PEER_ERROR = "PeerError: rank 1 (host b, pid 2) died or went silent while rank 0 was waiting for it"


def workers(*ranks: int) -> dict[str, Any]:
    return {"workers": {"ranks": ranks, "attempt": 0}}


def end(rank: int, code: int, signal: str | None = None, message: str | None = None) -> dict[str, Any]:
    return {"rank": rank, "pid": 7, "code": code, "signal": signal, "message": message}


def came(node: Node, kind: str, message: Any = None) -> Event:
    return Event(node, kind, -1, json.dumps(message).encode())  # type: ignore[arg-type]


def told(tmp_path: Path, nodes: list[Node], plan: Plan, *events: Event) -> tuple[int, Job, list[str]]:
    """The exit code, the job, and the lines of ddprun."""
    job, terminal = Job(nodes), Silent()
    job.events = list(events)
    with Output(tmp_path / "logs", None, True, terminal) as output:
        code = Watch(plan, job, output).run()  # type: ignore[arg-type]
    return code, job, terminal.said.splitlines()


def two_nodes(*flags: str) -> tuple[list[Node], Plan]:
    plan = make_plan(parse_options(["-H", "a,b", *flags, "x.py"], {}), Here("python", "/", lambda name: False))
    return [Node(node) for node in plan.nodes], plan


@pytest.mark.parametrize(("flags", "ends", "code"), [([], True, 3), (["--nnodes", "1:2"], False, 0)])
def test_a_node_that_is_lost_after_a_worker_of_it_failed_ends_the_job_or_is_done_without(
    tmp_path: Path, flags: list[str], ends: bool, code: int
) -> None:
    (first, second), plan = two_nodes(*flags)
    reports = (AGENT, workers(1), {"noticed": end(1, 3, message="ValueError: x")})
    events = [*(came(second, "m", report) for report in reports), came(second, "closed")]
    found, job, said = told(tmp_path, [first, second], plan, *events, came(first, "x", {"code": 0}))
    assert (found, job.is_ending) == (code, ends)
    assert any("continuing without it" in line for line in said) != ends
    assert job.rounds == ([] if ends else [(None, ["a"])])


@pytest.mark.parametrize(
    ("of_second", "code", "says"),
    [
        pytest.param(
            [{"agent_ended": -9}],
            1,
            f"ddprun: rank 1 on b failed first. rank 0 on a reports: {PEER_ERROR}",
            id="killed by ddprun, as a busy machine was too slow",
        ),
        pytest.param(
            [{"noticed": end(1, 139, "SIGSEGV")}, {"agent_ended": 143}],
            139,
            "ddprun: rank 1 on b failed with exit code 139: killed by SIGSEGV",
            id="noticed when it was ended",
        ),
        pytest.param(
            [{"noticed": end(1, 0)}, {"agent_ended": 143}],
            1,
            f"ddprun: rank 1 on b exited with code 0 first. rank 0 on a reports: {PEER_ERROR}",
            id="left",
        ),
        pytest.param(
            [{"noticed": end(1, 143, "SIGTERM")}, {"agent_ended": 143}],
            1,
            f"ddprun: rank 1 on b failed first. rank 0 on a reports: {PEER_ERROR}",
            id="ended by ddprun",
        ),
    ],
)
def test_what_ddprun_itself_has_ended_is_no_cause(
    tmp_path: Path, of_second: list[dict[str, Any]], code: int, says: str
) -> None:
    (first, second), plan = two_nodes()
    failed = end(0, 1, message=PEER_ERROR)
    events = [came(node, "m", report) for node, rank in ((first, 0), (second, 1)) for report in (AGENT, workers(rank))]
    events += [came(first, "m", report) for report in ({"noticed": failed}, {"failed": failed}, {"agent_ended": 1})]
    events += [*(came(second, "m", report) for report in of_second), came(second, "x", {"code": 137})]
    found, job, said = told(tmp_path, [first, second], plan, *events, came(first, "x", {"code": 1}))
    assert job.is_ending
    assert (found, said[-2]) == (code, says)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_node_that_is_lost_while_all_is_ended_is_the_cause_if_its_ranks_were_missed(
    tmp_path: Path, comes: str
) -> None:
    (first, second), plan = two_nodes()
    failed = end(0, 1, message=PEER_ERROR)
    events = [came(node, "m", report) for node, rank in ((first, 0), (second, 1)) for report in (AGENT, workers(rank))]
    lost = [came(second, "closed")]
    events += lost if comes == "before" else []
    events += [came(first, "m", report) for report in ({"noticed": failed}, {"failed": failed}, {"agent_ended": 1})]
    events += lost if comes == "after" else []
    _, _, said = told(tmp_path, [first, second], plan, *events, came(first, "x", {"code": 1}))
    assert said[-2] == "ddprun: b: the connection was lost"


# --- preemption -------------------------------------------------------------------------------------------------------


def two_ranks(first: Node, second: Node) -> list[Event]:
    return [came(node, "m", report) for node, rank in ((first, 0), (second, 1)) for report in (AGENT, workers(rank))]


def ends(node: Node, rank: int, code: int, signal: str | None = None) -> Event:
    return came(node, "m", {"noticed": end(rank, code, signal)})


@pytest.mark.parametrize(
    ("codes", "code", "says"),
    [
        ((75, 75), 75, "ddprun: preempted, checkpoint written"),
        ((75, 0), 75, "ddprun: preempted, checkpoint written"),
        ((75, 3), 3, "ddprun: rank 1 on b failed with exit code 3: no exception was printed"),
        (
            (75, None),
            137,
            "ddprun: rank 1 on b failed with exit code 137: did not end within 2.5 s after another rank was preempted",
        ),
    ],
)
def test_all_ranks_must_have_written(tmp_path: Path, codes: tuple[int, int | None], code: int, says: str) -> None:
    (first, second), plan = two_nodes()
    events = two_ranks(first, second)
    for rank, (node, of_rank) in enumerate(zip((first, second), codes, strict=True)):
        events += [] if of_rank is None else [ends(node, rank, of_rank)]
    events += [
        came(first, "m", {"failed": end(0, 75)}),
        came(first, "x", {"code": 1}),
        came(second, "x", {"code": 143}),
    ]
    found, job, said = told(tmp_path, [first, second], plan, *events)
    assert (found, says in said, job.is_ending) == (code, True, True)
    assert job.asked == [15, 15]  # when the first one ended, and when it did not start again


def test_a_round_begins_once_all_ranks_have_ended(tmp_path: Path) -> None:
    (first, second), plan = two_nodes("--max-restarts", "1")
    before = [*two_ranks(first, second), ends(first, 0, 75), came(first, "m", {"again": 0})]
    _, job, _ = told(tmp_path / "writes", [first, second], plan, *before)
    assert (job.rounds, job.asked, job.is_ending) == ([], [15], False)
    _, job, _ = told(tmp_path / "wrote", [first, second], plan, *before, ends(second, 1, 75))
    assert job.rounds == [(0, ["a", "b"])]
    failed = [*two_ranks(first, second), ends(first, 0, 1), came(first, "m", {"again": 0})]
    _, job, _ = told(tmp_path / "failed", [first, second], plan, *failed)
    assert job.rounds == [(0, ["a", "b"])]


def test_a_signal_that_several_processes_of_the_nodes_report_is_passed_on_once(tmp_path: Path) -> None:
    (first, second), plan = two_nodes()
    reports = [came(node, "m", {"asked": "SIGUSR1"}) for node in (second, second, first)]
    _, job, said = told(tmp_path, [first, second], plan, *two_ranks(first, second), *reports)
    assert job.asked == [10]
    assert [line for line in said if "asking" in line] == ["ddprun: b got SIGUSR1: asking all processes to stop"]
