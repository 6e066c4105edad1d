"""What ``ddprun`` does about what the nodes report, without nodes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from test_report import said

from ddp_callbacks.auto import _Alone
from ddp_callbacks.errors import warn
from ddp_callbacks.launcher.connection import Event
from ddp_callbacks.launcher.first_failure import End
from ddp_callbacks.launcher.members import Members
from ddp_callbacks.launcher.node import reports as node_reports
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.reporting.collector import Collector

Report = tuple[int, str, dict[str, Any]]  # of a host, by its number


class Launch:
    """Gives the watch these reports, and notes what it is told to do."""

    limit, stopped_by, signal, has_enough, is_forced = "", "", None, False, False

    def __init__(self, flags: str, reports: list[Report]) -> None:
        self.job = parse_options([*flags.split(), "t.py"], {})
        self.nodes: Any = [
            SimpleNamespace(plan=plan, place={"processes": plan.processes}, is_open=True, **self.does)
            for plan in self.job.nodes
        ]
        self.is_ending, self.restarts, self.has_begun = False, 0, False
        self.calls, self.reports, self.halted = list[str](), reports, asyncio.Event()

    @property
    def does(self) -> dict[str, Any]:
        """What each node does."""
        return {"tell": self.tell, "explain_end": AsyncMock(return_value="the connection was lost")}

    @property
    def is_overdue(self) -> bool:
        return not self.reports

    async def next_event(self) -> Event | None:
        rank, do, values = self.reports[0]
        self.reports = self.reports[1:]
        if do:
            return Event(self.nodes[rank], vars(node_reports)[do](**values))
        self.halted.set()
        await asyncio.sleep(0.01)
        return None

    def tell(self, call: Any, rank: int, *_: Any) -> None:
        self.calls.append(f"{call.__name__} {rank}")

    def tell_ranks(self, **news: Any) -> None:
        self.calls += [f"{kind}: {json.dumps(values)}" for kind, values in news.items()]

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


def started(host: int, *ranks: int, restarts: int = 0) -> Report:
    values = {"ranks": ranks or [host], "restarts": restarts, "threads": "1", "interface": "lo", "bound": ""}
    return host, "Started", values


def ended(rank: int, code: int, host: int | None = None, by: str | None = None) -> Report:
    values = {"rank": rank, "code": code, "signal": by, "now": time.monotonic()}
    return rank if host is None else host, "Ended", values


def exited(rank: int) -> str:
    return f'ended: {{"{rank}": 0}}'


HALTED: Report = 0, "", {}  # both hosts
BOTH = [started(0), started(1)]
BOTH_AGAIN, BOTH_TWICE = ([started(0, restarts=number), started(1, restarts=number)] for number in (1, 2))
# The restarts that are left, what the hosts report, each by the number of its only rank, and what is done about it.
REPORTS: dict[str, tuple[int, list[Report], list[str]]] = {
    "all are done": (0, [*BOTH, ended(0, 0), ended(1, 0)], [exited(0), "end"]),
    "one is done before the other has begun": (0, [started(0), ended(0, 0), started(1)], [exited(0)]),
    "both have failed": (0, [*BOTH, ended(0, 3), ended(1, 1)], ["end"]),
    "one is asked": (0, [*BOTH, (1, "Asked", {"signal": "SIGUSR1"}), ended(1, 75)], ["stop: SIGUSR1 on h2"]),
    "one was preempted": (0, [*BOTH, ended(1, 75)], ["ask"]),
    "the first is preempted, and all may start again": (1, [*BOTH, ended(1, 75)], ["ask"]),
    "one has failed, and all start again": (
        1,
        [*BOTH, ended(1, 3), ended(0, 143), HALTED, BOTH_AGAIN[0], ended(0, 0), BOTH_AGAIN[1]],
        ["halt 2", "meet 2", "start 2", exited(0)],
    ),
    "one has failed before the other host's report, which comes after the restart": (
        2,
        [started(1), ended(1, 3), HALTED, started(0), ended(0, 143), *BOTH_AGAIN, ended(0, 0)],
        ["halt 2", "meet 2", "start 2", exited(0)],
    ),
    "it has failed once too often": (
        2,
        [*BOTH, ended(1, 3), HALTED, *BOTH_AGAIN, ended(1, 3), HALTED, *BOTH_TWICE, ended(1, 3), ended(0, 1)],
        [*(2 * ["halt 2", "meet 2", "start 2"]), "end"],
    ),
    "a program cannot be started": (1, [started(0), (1, "Problem", {"text": "cannot start x"})], ["end"]),
}


@pytest.mark.parametrize("case", REPORTS)
def test_what_the_nodes_report_decides_what_is_done(case: str) -> None:
    """A job ends, or starts again, when all hosts say so."""
    restarts, reports, calls = REPORTS[case]
    launch: Any = Launch(f"-H h1:1,h2:1 --max-restarts {restarts}", reports)
    asyncio.run(Watch(launch, MagicMock()).run())
    assert launch.calls == calls


@pytest.mark.parametrize(
    ("argv", "code", "is_new", "is_told"),
    [([], 0, "", True), (["--help"], 0, "", False), (["--lr", "bad"], 2, "", False), ([], 0, "1", False)],
)
def test_a_script_that_ends_with_an_error_or_its_help_or_too_soon_to_join_again_is_not_told_that_it_trains_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], code: int, is_new: str, is_told: bool
) -> None:
    record = tmp_path / "record"
    record.touch()
    monkeypatch.setenv("DDP_CALLBACKS_NEWS", "there")
    monkeypatch.setenv("DDP_CALLBACKS_SUCCESSOR", is_new)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(record))
    monkeypatch.setattr("sys.argv", ["train.py", *argv])
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    _Alone(2).say_at_the_end()
    wrote = 0, "Wrote", {"rank": 0, "stream": "f", "data": record.read_text()}
    launch: Any = Launch(
        "-H h1:1,h2:1", [*BOTH, wrote, ended(0, code), ended(1, code), (0, "Done", {}), (1, "Done", {})]
    )
    output = MagicMock()
    assert asyncio.run(Watch(launch, output).run()) == code
    assert ("they have joined no process group" in str(output.note.call_args_list)) == is_told


def test_a_warning_of_a_rank_that_is_not_shown_is_shown_once_unless_one_that_is_has_it_too() -> None:
    def warns(rank: int, data: str) -> Report:
        return rank, "Wrote", {"rank": rank, "stream": "r", "data": data}

    all_have, one_has = '{"warning": "t.py:1: all"}\n', '{"warning": "t.py:2: one"}\n'
    wrote = [warns(1, all_have + one_has[:20]), warns(0, all_have), warns(1, one_has[20:] + one_has)]
    launch: Any = Launch("-H h1:1,h2:1", [*BOTH, *wrote, ended(0, 0), ended(1, 0)])
    output = MagicMock(shows=lambda rank: rank == 0)
    asyncio.run(Watch(launch, output).run())
    assert [call.args for call in output.quote.call_args_list] == [("h2", 1, ["t.py:2: one"])]
    output.write.assert_not_called()


@pytest.mark.parametrize("action", ["always", "ignore"])
def test_a_rank_tells_ddprun_of_a_warning_that_the_program_does_not_suppress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    (tmp_path / "pipe").touch()
    monkeypatch.setattr("ddp_callbacks.errors._report", str(tmp_path / "pipe"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        warn("look", RuntimeWarning)
    told = [{"warning": f"{each.filename}:{each.lineno}: RuntimeWarning: look"} for each in caught]
    assert len(told) == (action == "always")
    assert [json.loads(line) for line in (tmp_path / "pipe").read_text().splitlines()] == told


# --- continuing without what was lost; rank 0 runs on h1, ranks 1 and 2 on h2 -----------------------------------------


def done(rank: int, code: int = 0) -> Report:
    return ended(rank, code, min(rank, 1))


def killed(rank: int) -> Report:
    return ended(rank, 137, min(rank, 1), "SIGKILL")


def raised(rank: int, exception: str, blames: list[int] | None = None) -> list[Report]:
    record = json.dumps({"exceptions": [exception], "time": time.monotonic(), "blames": blames})
    return [(min(rank, 1), "Wrote", {"rank": rank, "stream": "f", "data": record}), done(rank, 1)]


def ready(rank: int) -> Report:
    return min(rank, 1), "Wrote", {"rank": rank, "stream": "f", "data": '{"ready": true}\n'}


def meets(rank: int) -> Report:
    return min(rank, 1), "Wrote", {"rank": rank, "stream": "f", "data": '{"stores": {"1": ["h2", 7]}}\n'}


def members(generation: int, *ranks: int, again: int = 0) -> str:
    replaced = {"1": again} if again else {}
    return f"members: {json.dumps({'generation': generation, 'ranks': ranks, 'replaced': replaced})}"


ALL = [started(0), started(1, 1, 2)]
CLOSED: tuple[Report, Report] = (0, "Closed", {}), (1, "Closed", {})
LOST = "h2: the connection was lost"
ONE, TWO = "rank 1 on h2 was killed by SIGKILL; continuing with", "rank 2 on h2 was killed by SIGKILL; continuing with"
FAILED = "failed with exit code 137: killed by SIGKILL"
PEER = "ddp_callbacks.errors.PeerError: rank 1 (host h2, pid 7) died or went silent"
BROKEN = "RuntimeError: Connection closed by peer"
ASKED: Report = 1, "Asked", {"signal": "SIGTERM"}
# What the hosts report, what is done about it, the exit code, and what is told.
LOSSES: dict[str, tuple[list[Report], list[str], int, list[str]]] = {
    "a rank is killed": (
        [*ALL, killed(1), done(0), done(2)],
        [members(1, 0, 2), "replace 1", exited(0), "end"],
        0,
        [f"{ONE} 2 processes", "done, with 1 of 3 processes lost on the way"],
    ),
    "two at the same moment": (
        [*ALL, killed(2), killed(1), done(0)],
        [members(1, 0, 1), "replace 2", members(2, 0), "replace 1", "end"],
        0,
        [f"{TWO} 2 processes", f"{ONE} 1 process", "done, with 2 of 3 processes lost on the way"],
    ),
    "the last one, while the others are done": (
        [*ALL, done(0), done(2), killed(1)],
        [exited(0), exited(2), members(1, 0, 2), "end"],
        0,
        [f"{ONE} 2 processes", "done, with 1 of 3 processes lost on the way"],
    ),
    "a host with all its ranks": (
        [*ALL, CLOSED[1], done(0)],
        [members(1, 0), "end"],
        0,
        [f"{LOST}; continuing with 1 process", "done, with 2 of 3 processes lost on the way"],
    ),
    "a host that has not started any": (
        [started(0), CLOSED[1], done(0)],
        [members(1, 0), "end"],
        0,
        [f"{LOST}; continuing with 1 process", "done, with 2 of 3 processes lost on the way"],
    ),
    "a host, after one of its ranks": (
        [*ALL, killed(1), CLOSED[1], done(0)],
        [members(1, 0, 2), "replace 1", members(2, 0), "end"],
        0,
        [f"{ONE} 2 processes", f"{LOST}; continuing with 1 process", "done, with 2 of 3 processes lost on the way"],
    ),
    "a host whose ranks were done": (
        [*ALL, done(1), done(2), CLOSED[1], done(0)],
        [exited(1), exited(2), members(0, 0, 1, 2), "end"],
        0,
        [f"{LOST}; continuing with 3 processes"],
    ),
    "a rank, and the others are preempted": (
        [*ALL, killed(1), done(0, 75), done(2, 75)],
        [members(1, 0, 2), "replace 1", "ask", "end"],
        75,
        [f"{ONE} 2 processes", "preempted, checkpoint written"],
    ),
    "none, and some are preempted by themselves": (
        [*ALL, done(0), done(1, 75), done(2)],
        [exited(0), "ask", "end"],
        1,
        ["rank 1 on h2 exited with code 75, others with 0, and nobody had asked"],
    ),
    "none, and some are preempted when all are asked": (
        [*ALL, ASKED, done(0), done(1, 75), done(2)],
        ["stop: SIGTERM on h2", "end"],
        75,
        ["stopped by SIGTERM on h2: preempted, checkpoint written"],
    ),
    "all, one by one": (
        [*ALL, killed(0), killed(1), killed(2)],
        [members(1, 1, 2), "replace 0", members(2, 2), "replace 1", "end"],
        137,
        [
            "rank 0 on h1 was killed by SIGKILL; continuing with 2 processes",
            f"{ONE} 1 process",
            f"rank 2 on h2 {FAILED}",
        ],
    ),
    "the first host": (
        [*ALL, CLOSED[0], meets(1), done(1), done(2)],
        [members(1, 1, 2), 'stores: {"1": ["h2", 7]}', exited(1), "end"],
        0,
        ["h1: the connection was lost; continuing with 2 processes"],
    ),
    "a rank, after a failure": ([*ALL, done(2, 3), killed(1), done(0)], ["end"], 137, [f"rank 1 on h2 {FAILED}"]),
    "a rank that had raised": ([*ALL, *raised(1, "KeyError: 3"), done(0), done(2)], [exited(0), "end"], 1, []),
    "a rank, while all are asked to stop": ([*ALL, ASKED, killed(1)], ["stop: SIGTERM on h2"], 143, []),
    "who is named by another that fails": (
        [*ALL, killed(1), *raised(0, PEER, [1]), *raised(2, PEER, [1])],
        [members(1, 0, 2), "replace 1", "end"],
        137,
        [f"{ONE} 2 processes", f"rank 1 on h2 {FAILED}"],
    ),
    "who breaks a connection": (
        [*ALL, killed(2), killed(1), *raised(0, BROKEN)],
        [members(1, 0, 1), "replace 2", members(2, 0), "replace 1", "end"],
        137,
        [f"{TWO} 2 processes", f"{ONE} 1 process", f"rank 1 on h2 {FAILED}"],
    ),
    "whom a later failure has nothing to do with": (
        [*ALL, killed(1), done(0), *raised(2, "KeyError: 3")],
        [members(1, 0, 2), "replace 1", exited(0), "end"],
        1,
        [f"{ONE} 2 processes", "rank 2 on h2 failed with exit code 1: KeyError: 3"],
    ),
}

BACK = "rank 1 on h2: a new process joins; continuing with 3 processes"
REPLACED = "done, with 1 of 3 processes lost on the way, 1 of them replaced"
# The same for a new process of rank 1, after a kill.
SUCCESSORS: dict[str, tuple[list[Report], list[str], int, list[str]]] = {
    "it joins": (
        [ready(1), done(0), done(2), done(1)],
        [members(2, 0, 1, 2, again=1), exited(0), exited(2), "end"],
        0,
        [BACK, REPLACED],
    ),
    "it is killed before, and not replaced": (
        [killed(1), done(0), done(2)],
        [exited(0), "end"],
        0,
        ["rank 1 on h2: the new process ended with exit code 137 before it joined: killed by SIGKILL"],
    ),
    "it raises an exception before": (
        [*raised(1, "KeyError: 3"), done(0), done(2)],
        [exited(0), "end"],
        0,
        ["rank 1 on h2: the new process ended with exit code 1 before it joined: KeyError: 3"],
    ),
    "it is ready once the job is ending": ([ASKED, ready(1), killed(1)], ["stop: SIGTERM on h2"], 143, []),
    "it is killed again and again": (
        [ready(1), killed(1), ready(1), killed(1), ready(1), killed(1), done(0), done(2)],
        [
            *(members(2, 0, 1, 2, again=1), members(3, 0, 2), "replace 1"),
            *(members(4, 0, 1, 2, again=2), members(5, 0, 2), "replace 1"),
            *(members(6, 0, 1, 2, again=3), members(7, 0, 2), exited(0), "end"),
        ],
        0,
        [BACK, "done, with 1 of 3 processes lost on the way"],
    ),
    "it raises an exception after it has joined": (
        [ready(1), *raised(0, PEER, [1]), *raised(1, "KeyError: 3"), *raised(2, PEER, [1])],
        [members(2, 0, 1, 2, again=1), "end"],
        1,
        [BACK, "rank 1 on h2 failed with exit code 1: KeyError: 3"],
    ),
}
for name, (reports, calls, code, says) in SUCCESSORS.items():
    first = [*ALL, killed(1)], [members(1, 0, 2), "replace 1"]
    LOSSES[f"a successor: {name}"] = [*first[0], *reports], [*first[1], *calls], code, [f"{ONE} 2 processes", *says]


@pytest.mark.parametrize(("seconds", "again"), [(9.0, False), (11.0, True)])
def test_a_rank_that_had_joined_for_ten_seconds_may_be_replaced_again(
    monkeypatch: pytest.MonkeyPatch, seconds: float, again: bool
) -> None:
    now = [1000.0]
    monkeypatch.setattr("ddp_callbacks.launcher.members.time", SimpleNamespace(monotonic=lambda: now[0]))
    node: Any = SimpleNamespace(plan=SimpleNamespace(name="h1"), place={"processes": 2})
    known = Members([node])
    for _ in range(3):
        assert known.replace(End("h1", 1))
        known.join(1)
    now[0] += seconds
    assert known.replace(End("h1", 1)) == again


@pytest.mark.parametrize("case", LOSSES)
def test_what_was_lost_decides_whether_the_job_goes_on(case: str) -> None:
    reports, calls, code, says = LOSSES[case]
    reports = [*reports, *((host, "Done", {}) for host in (0, 1) if CLOSED[host] not in reports)]
    launch, output = Launch("-H h1:1,h2:2 --keep-going", reports), MagicMock()
    assert asyncio.run(Watch(launch, output).run()) == code  # type: ignore[arg-type]
    told = [call.args[0] for call in output.note.call_args_list]
    assert (launch.calls, [text for text in says if text not in told]) == (calls, []), told


def wrote(rank: int, stream: str, text: str) -> Report:
    return min(rank, 1), "Wrote", {"rank": rank, "stream": stream, "data": text}


STACK = 'Thread 0x1 (most recent call first):\n  File "/t.py", line 7 in wait\n'


def test_the_report_tells_what_has_ended_a_job_where_ranks_hung_and_which_were_lost(tmp_path: Path) -> None:
    trains = [wrote(rank, "r", said(7, 9).decode()) for rank in range(3)]
    reports = [*ALL, *trains, killed(1), wrote(2, "s", STACK), ASKED, killed(2), killed(0)]
    report, output = Collector([]), MagicMock(folder=tmp_path)
    launch = Launch("-H h1:1,h2:2 --keep-going", [*reports, (0, "Done", {}), (1, "Done", {})])
    asyncio.run(Watch(launch, output, report).run())  # type: ignore[arg-type]
    data = json.loads((tmp_path / "report.json").read_text())
    assert [rank["is_lost"] for rank in data["ranks"]] == [False, True, False]
    assert [text for _, kind, text in data["events"] if kind == "note"][-3:] == [
        "stopped by SIGTERM on h2",
        "ranks 0 on h1, 2 on h2 were killed after 2.5 s, which --grace makes longer",
        "rank 2 on h2: /t.py:7 in wait",
    ]
    assert "<td>stopped by SIGTERM on h2</td>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("flags", "then"), [("", ""), (" --max-restarts 1", "; all start again")])
def test_a_rank_that_exits_after_its_connections_broke_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, flags: str, then: str
) -> None:
    monkeypatch.setattr("ddp_callbacks.launcher.watch._PAUSE", 0.0)
    launch, output = Launch(f"-H h1:1,h2:1{flags}", [*BOTH, *raised(0, BROKEN), ended(1, 3), HALTED]), MagicMock()
    asyncio.run(Watch(launch, output).run())  # type: ignore[arg-type]
    told = f"rank 1 on h2 failed with exit code 3: no exception was printed{then}"
    assert told in [call.args[0] for call in output.note.call_args_list]


def test_a_job_goes_on_with_as_few_hosts_as_the_user_allows() -> None:
    for least, calls in (("1:2", [members(1, 0)]), ("2:2", ["end"])):
        launch = Launch(f"-H h1:1,h2:2 --nnodes {least} --keep-going", [*ALL, CLOSED[1]])
        asyncio.run(Watch(launch, MagicMock()).run())  # type: ignore[arg-type]
        assert launch.calls == calls
