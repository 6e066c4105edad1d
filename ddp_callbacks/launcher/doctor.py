"""``ddprun doctor``: checks all nodes at once, tests the connections between them, and suggests remedies."""

from __future__ import annotations

import json
import os
import queue
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from ddp_callbacks.launcher.connection import Connection, Event, NodeProblem, addresses_of, connections
from ddp_callbacks.launcher.diagnosis import Facts, Finding, judge, judge_clock
from ddp_callbacks.launcher.plan import Job, NodePlan
from ddp_callbacks.launcher.ranks import ask_for_facts, find_interface, start_ranks
from ddp_callbacks.launcher.remote import as_hex
from ddp_callbacks.launcher.screen import Cell, Color, Screen, Table

LIMIT = 20.0  # seconds in total
_PATIENCE = 3.5  # seconds without a heartbeat
_ANSWER_TIMEOUT = 10.0  # seconds; a node that takes longer is not asked again
_FACTS_TIMEOUT = 8.0  # seconds
_REACH_TIMEOUT = 2.0  # seconds per connection


class Doctor:
    """Checks the nodes; use it in a ``with`` block, which disconnects from them at its end."""

    def __init__(self, plans: Sequence[NodePlan], script: str | None) -> None:
        self._script = script
        self._end = time.monotonic() + LIMIT
        self._events: queue.Queue[Event] = queue.Queue()
        self._nodes = connections(plans, self._events, _PATIENCE, _ANSWER_TIMEOUT)
        self._findings: list[Finding] = []
        self._facts: dict[str, Facts] = {}
        self._held: dict[Connection, tuple[str, int]] = {}  # the address and port on which a node listens

    def __enter__(self) -> Doctor:
        return self

    def __exit__(self, *_: object) -> None:
        self._on_each(lambda node: node.close(1.0), self._nodes)

    def examine(self) -> list[Finding]:
        """All findings, node by node; blocks for little more than :data:`LIMIT` seconds."""
        self._on_each(self._reach, self._nodes)
        there = [node for node in self._nodes if node.hello]
        self._on_each(self._look, there)
        known = [node.plan.name for node in there if node.plan.name in self._facts]
        self._findings += judge({name: self._facts[name] for name in known})
        whole = [node for node in there if node.place]
        self._on_each(lambda node: self._listen(node, whole), whole)
        self._on_each(self._try_ports, list(self._held))
        if len(self._nodes) > 1:
            self._all_reduce()
            plain = "traffic between the nodes is not encrypted; use a network that you trust"
            self._findings.append(Finding("", "encryption", "amber", "none", plain))
        nodes = [node.plan.name for node in self._nodes]
        return sorted(self._findings, key=lambda finding: [*nodes, finding.node].index(finding.node))

    def _on_each(self, do: Callable[[Connection], None], nodes: Sequence[Connection]) -> None:
        if nodes:
            with ThreadPoolExecutor(len(nodes)) as pool:
                list(pool.map(do, nodes))

    def _find(self, node: Connection, check: str, text: str) -> None:
        self._findings.append(Finding(node.plan.name, check, "green", text))

    def _fail(self, node: Connection, check: str, problem: str, text: str = "failed") -> None:
        self._findings.append(Finding(node.plan.name, check, "red", text, problem))

    def _reach(self, node: Connection) -> None:
        begin = time.monotonic()
        try:
            node.greet()
        except NodeProblem as problem:
            self._fail(node, "reached", str(problem))
        else:
            by = "ssh" if node.plan.rsh is None else os.path.basename(node.plan.rsh[0])
            how = "here" if node.plan.host is None else f"by {by}, {time.monotonic() - begin:.1f} s"
            self._find(node, "reached", how)

    def _look(self, node: Connection) -> None:
        plan = node.plan
        try:
            node.ask("enter", cwd=as_hex(plan.cwd), environ={})
            self._find(node, "folder", plan.cwd)
        except NodeProblem as problem:
            self._fail(node, "folder", f"{problem}. {_copy(plan)}", "missing")
        else:
            self._look_for_script(node)
        try:
            before = time.time()
            node.place = ask_for_facts(node, "all", _FACTS_TIMEOUT)
            after = time.time()
        except NodeProblem as problem:
            self._fail(node, "python", f"{plan.python} does not work: {problem}. Choose another with --python")
            return
        ahead = node.place["time"] - (before + after) / 2
        self._findings.append(judge_clock(plan.name, ahead, (after - before) / 2))
        self._facts[plan.name] = Facts(plan.shell, plan.python, node.place)

    def _look_for_script(self, node: Connection) -> None:
        if self._script is None:
            return
        try:
            node.ask("find", path=as_hex(self._script))
            self._find(node, "script", self._script)
        except NodeProblem as problem:
            remedy = "Check its name" if node.plan.host is None else _copy(node.plan)
            self._fail(node, "script", f"{problem}. {remedy}", "missing")

    def _listen(self, node: Connection, there: list[Connection]) -> None:
        try:
            address = addresses_of(node, [other for other in there if other is not node])[0]
            self._held[node] = (address, node.ask("listen", address=address, port=0)["port"])
            known = self._facts.get(node.plan.name)
            interface = known.values["interfaces"].get(address) if known else None
            self._find(node, "address", f"{address} ({interface})" if interface else address)
        except NodeProblem as problem:
            self._fail(node, "address", f"{problem}. Check: {node.plan.shell}ip address")

    def _try_ports(self, node: Connection) -> None:
        """Connect from this node to all others. Called on all nodes, this tests both directions between any two."""
        others = {other: held for other, held in self._held.items() if other is not node}
        if not others:
            return
        try:
            node.reach(list(others.values()), _REACH_TIMEOUT)
            self._find(node, "ports", "reaches the others")
        except NodeProblem as problem:
            own = self._held[node][0]
            remedy = f"Open the firewall of that node, for example: ufw allow from {own}"
            self._fail(node, "ports", f"{problem}. {remedy}", "blocked")

    def _all_reduce(self) -> None:
        """Run an all-reduce with one process per node."""
        if any(finding.level == "red" for finding in self._findings):
            self._findings.append(Finding("", "all-reduce", "red", "skipped", "skipped: fix the problems above first"))
            return
        job = Job(tuple(node.plan for node in self._nodes), ("-P", "-m", "ddp_callbacks.launcher.probe"))
        where = self._held[self._nodes[0]]
        try:
            for node in self._nodes:
                find_interface(node, where[0])
            start_ranks(job, self._nodes, where)
            self._findings.append(self._result_of_all_reduce())
        except NodeProblem as problem:
            self._findings.append(Finding("", "all-reduce", "red", "failed", str(problem)))

    def _result_of_all_reduce(self) -> Finding:
        said: dict[str, bytes] = {"o": b"", "e": b""}
        running = len(self._nodes)
        while running:
            try:
                event = self._events.get(timeout=max(0.0, self._end - time.monotonic()))
            except queue.Empty:
                raise NodeProblem(f"did not end within {LIMIT:g} s, the limit for all checks") from None
            ended = json.loads(event.data).get("ended") if event.kind == "m" else None
            if event.kind in said:
                said[event.kind] += event.data
            elif event.kind == "closed" or (ended and ended["code"]):
                last = said["e"].decode(errors="replace").strip().rpartition("\n")[2]
                raise NodeProblem(f"failed on {event.node.plan.name}: {last}")
            running -= bool(ended)
        if not said["o"]:
            raise NodeProblem("ended without a result")
        result = json.loads(said["o"])
        text = f"{result['latency'] * 1e3:.2f} ms for one number, {result['bandwidth'] / 1e6:.0f} MB/s per node"
        return Finding("", "all-reduce", "green", text)


def _copy(plan: NodePlan) -> str:
    """How to copy the working directory to the node."""
    if plan.host is None:
        return f"Choose another with --chdir, or: mkdir -p {shlex.quote(plan.cwd)}"
    if plan.rsh is not None:
        return f"Copy it there, or choose another with --chdir. Check: {plan.shell}ls -l"
    here = shlex.quote(f"{os.getcwd()}/")
    return (
        f"Copy it: rsync -a --mkpath {here} {shlex.quote(f'{plan.host}:{plan.cwd}/')}. Or choose another with --chdir"
    )


# --- the output -------------------------------------------------------------------------------------------------------

_COLORS: dict[str, Color] = {"green": "green", "amber": "yellow", "red": "bold red"}
_MARKS = {"green": "", "amber": "! ", "red": "FAIL "}


def show(nodes: Sequence[str], findings: Sequence[Finding], screen: Screen) -> None:
    """Print one table with a column for each node; below it, findings about all of them, and remedies."""
    table = Table(("", "left"), *((node, "left") for node in nodes))
    cells = {(finding.check, finding.node): finding for finding in findings if finding.node}
    for check in dict.fromkeys(finding.check for finding in findings if finding.node):
        table.add_row(check, *(_cell(cells.get((check, node))) for node in nodes))
    screen.table(table)
    for finding in findings:
        if not finding.node and finding.level == "green":
            screen.line(f"{finding.check}: ", _cell(finding))
    for level in ("red", "amber"):
        for finding in findings:
            if finding.level == level:
                where = f"{finding.node}, {finding.check}" if finding.node else finding.check
                screen.line(Cell(f"{_MARKS[level]}{where}: {finding.remedy}", _COLORS[level]))
    works = all(finding.level != "red" for finding in findings)
    screen.line(Cell("A run would work." if works else "A run would not work.", _COLORS["green" if works else "red"]))


def _cell(finding: Finding | None) -> Cell:
    if finding is None:
        return Cell("")
    return Cell(f"{_MARKS[finding.level]}{finding.text}", _COLORS[finding.level])


def show_json(findings: Sequence[Finding], works: bool) -> None:
    """``{"works": BOOL, "findings": [{"node", "check", "level", "text", "remedy"}, ...]}``."""
    report: dict[str, Any] = {"works": works, "findings": [asdict(finding) for finding in findings]}
    json.dump(report, sys.stdout, indent=2)
    print()
