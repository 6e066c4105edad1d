"""See a started job through to its end: pass on what it prints, end all when one fails, and say why."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from ddp_callbacks.launcher.connection import Connection, Event
from ddp_callbacks.launcher.failures import Failure, exception_in, first_cause
from ddp_callbacks.launcher.launch import Launch
from ddp_callbacks.launcher.output import AGENT, Output
from ddp_callbacks.launcher.plan import Plan

_QUOTED = 20  # lines of the failing rank that are shown


class Watch:
    """Sees a started job through to its end."""

    def __init__(self, plan: Plan, launch: Launch, output: Output) -> None:
        self._plan = plan
        self._launch = launch
        self._output = output
        self._running = launch.nodes
        self._failures: list[Failure] = []
        self._reports: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}  # of failed ranks, and when they came
        self._agents: dict[str, dict[str, Any]] = {}
        self._last_words: dict[int, float] = {}  # when a rank last wrote to its standard error
        self._redirected = plan.torchrun["redirects"] != "0" or plan.torchrun["tee"] != "0"

    def run(self) -> int:
        """Pass on what the ranks print until all nodes have ended; the exit code of the job."""
        while self._running and (event := self._launch.next_event()):
            self._take(event)
        for node in self._running:
            self._fail(node.plan.name, 1, "did not end in time")
        return self._conclude()

    def _take(self, event: Event) -> None:
        name = event.node.plan.name
        if event.kind in "oe":
            self._take_output(name, event)
        elif event.kind == "m":
            self._take_report(event.node, json.loads(event.data))
        elif event.kind == "x":
            self._take_end(event.node, json.loads(event.data)["code"])
        elif event.node in self._running:  # closed, without an end before
            self._running.remove(event.node)
            self._lose(event.node, event.node.explain_end(), 1)

    def _take_output(self, name: str, event: Event) -> None:
        if event.rank == AGENT:
            self._output.write_agent(name, event.kind, event.data, show=self._redirected)
            return
        if event.kind == "e":
            self._last_words[event.rank] = time.monotonic()
        self._output.write(name, event.rank, event.kind, event.data)

    def _take_report(self, node: Connection, report: dict[str, Any]) -> None:
        name = node.plan.name
        if "agent" in report:
            self._agents[name] = report["agent"]
        elif "workers" in report:
            self._forget(name)
            self._say_what_runs(name, **report["workers"])
        elif "noticed" in report:  # torchrun may start the workers again
            self._remember(name, report["noticed"])
        elif "failures" in report:
            self._remember(name, report["failures"])
            self._launch.end()
        elif "error" in report:
            self._fail(name, 1, report["error"])
            self._launch.end()
        elif report["agent_ended"] != 0 and not self._can_do_without(node):
            self._launch.end()

    def _remember(self, name: str, failures: list[dict[str, Any]]) -> None:
        for failure in failures:
            self._reports.setdefault((name, failure["rank"]), (failure, time.monotonic()))

    def _forget(self, name: str) -> None:
        """The workers of a node are gone: new ones start there, or the job goes on without it."""
        self._output.forget_errors(name)
        self._reports = {key: report for key, report in self._reports.items() if key[0] != name}

    def _say_what_runs(self, name: str, ranks: list[int], attempt: int) -> None:
        agent = self._agents[name]
        threads = f"{agent['threads']} thread{'' if agent['threads'] == '1' else 's'} each"
        where = f", {agent['interface']}" if agent["interface"] else ""
        again = f", restart {attempt} of {self._plan.torchrun['max_restarts']}" if attempt else ""
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        self._output.note(f"{name}: {which}, {threads}{where}{again}")

    def _take_end(self, node: Connection, code: int) -> None:
        self._running.remove(node)
        if code != 0:
            self._lose(node, f"torchrun's agent ended with exit code {code}", code)

    def _lose(self, node: Connection, reason: str, code: int) -> None:
        """A node has ended, and not as it should."""
        name = node.plan.name
        if self._can_do_without(node):
            self._forget(name)
            self._output.note(f"{name}: {reason}; goes on without it")
            return
        reported = {failed for failed, _ in self._reports} | {failure.node for failure in self._failures}
        if name not in reported:  # else it has said more itself
            self._fail(name, code, reason)
        self._launch.end()

    def _can_do_without(self, node: Connection) -> bool:
        """An elastic job goes on while enough nodes are there; the first one has the store."""
        others = [other for other in self._running if other is not node]
        elastic = self._plan.rendezvous == "elastic" and node.plan.rank != 0
        return elastic and not self._launch.is_ending and len(others) >= self._plan.min_nodes

    def _fail(self, name: str, code: int, reason: str) -> None:
        self._failures.append(Failure(name, None, code, reason, time.monotonic()))

    def _failure(self, name: str, report: dict[str, Any], came: float) -> Failure:
        """Made at the end, when all that the rank has written is here."""
        words = exception_in(self._output.last_errors(name, report["rank"]))
        ended = report["signal"] and f"ended by {report['signal']}"
        if report["signal"] == "SIGABRT":
            ended = None  # what C++ does with an exception, after Python has told it
        reason = ended or report["message"] or words or report["signal"] or "no exception was printed"
        order = came if ended else self._last_words.get(report["rank"], came)
        return Failure(name, report["rank"], report["code"], reason, min(order, came))

    def _conclude(self) -> int:
        """Say how it ended."""
        if self._launch.signal is not None:
            self._output.note(f"ended by {signal.Signals(self._launch.signal).name}")
            return 128 + self._launch.signal
        failures = self._failures + [self._failure(name, *report) for (name, _), report in self._reports.items()]
        if not failures:
            return 0
        cause = first_cause(failures)
        rank = AGENT if cause.rank is None else cause.rank
        if not (self._redirected if rank == AGENT else self._output.shows(rank)):
            self._output.quote(cause.node, rank, self._output.last_errors(cause.node, rank)[-_QUOTED:])
        self._output.note(str(cause))
        self._output.note(self._where_it_is(cause))
        return cause.code

    def _where_it_is(self, cause: Failure) -> str:
        """The whole output of what failed."""
        if self._redirected:
            return f"its output is on {cause.node}, where --log-dir says"
        path = self._output.path_of_agent(cause.node) if cause.rank is None else self._output.path_of(cause.rank)
        return f"its whole output is in {path}" if path.exists() else f"it has printed nothing; all is in {path.parent}"
