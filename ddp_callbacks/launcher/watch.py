"""See a started job through to its end: pass on what it prints, end all when one fails, and say why."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from ddp_callbacks.launcher.connection import Connection, Event
from ddp_callbacks.launcher.failures import Failure, exception_in, first_cause
from ddp_callbacks.launcher.launch import Launch
from ddp_callbacks.launcher.output import Output
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
        self._agents: dict[str, dict[str, Any]] = {}
        self._last_words: dict[int, float] = {}  # when a rank last wrote to its standard error

    def run(self) -> int:
        """Pass on what the ranks print until all nodes have ended; the exit code of the job."""
        while self._running and (event := self._launch.next_event()):
            self._take(event)
        for node in self._running:
            self._failures.append(self._lost(node, "did not end in time"))
        return self._conclude()

    def _take(self, event: Event) -> None:
        name = event.node.plan.name
        if event.kind in "oe":
            self._take_output(name, event)
        elif event.kind == "m":
            self._take_report(name, json.loads(event.data))
        elif event.kind == "x":
            self._take_end(event.node, json.loads(event.data)["code"])
        elif event.node in self._running:  # closed, without an end before
            self._running.remove(event.node)
            self._lose(event.node)

    def _take_output(self, name: str, event: Event) -> None:
        if event.rank < 0:
            redirected = self._plan.torchrun["redirects"] != "0" or self._plan.torchrun["tee"] != "0"
            self._output.write_agent(name, event.data, show=redirected)
            return
        if event.kind == "e":
            self._last_words[event.rank] = time.monotonic()
        self._output.write(name, event.rank, event.kind, event.data)

    def _take_report(self, name: str, report: dict[str, Any]) -> None:
        if "agent" in report:
            self._agents[name] = report["agent"]
        elif "workers" in report:
            self._say_what_runs(name, **report["workers"])
        elif "failures" in report:
            self._failures += [self._failure(name, **failure) for failure in report["failures"]]
            self._launch.end()
        elif "error" in report:
            self._failures.append(Failure(name, None, 1, report["error"], time.monotonic()))
            self._launch.end()
        elif report["agent_ended"] != 0:
            self._launch.end()

    def _say_what_runs(self, name: str, ranks: list[int], attempt: int) -> None:
        agent = self._agents[name]
        threads = f"{agent['threads']} thread{'' if agent['threads'] == '1' else 's'} each"
        where = f", {agent['interface']}" if agent["interface"] else ""
        again = f", restart {attempt} of {self._plan.torchrun['max_restarts']}" if attempt else ""
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        self._output.note(f"{name}: {which}, {threads}{where}{again}")

    def _failure(self, name: str, rank: int, pid: int, code: int, signal: str | None, message: str | None) -> Failure:
        words = exception_in(self._output.last_errors(rank))
        reason = message or words or (f"ended by {signal}" if signal else "no exception was printed")
        order = self._last_words.get(rank, time.monotonic()) if words else time.monotonic()
        return Failure(name, rank, code, reason, order)

    def _take_end(self, node: Connection, code: int) -> None:
        self._running.remove(node)
        if code == 0:
            return
        if all(failure.node != node.plan.name for failure in self._failures):
            reason = f"torchrun's agent ended with exit code {code}"
            self._failures.append(Failure(node.plan.name, None, code, reason, time.monotonic()))
        self._launch.end()

    def _lose(self, node: Connection) -> None:
        if self._launch.signal is not None:
            return
        elastic = self._plan.rendezvous == "elastic" and node.plan.rank != 0
        if elastic and len(self._running) >= self._plan.min_nodes:
            self._output.note(f"{node.plan.name}: {node.explain_end()}; goes on without it")
            return
        self._failures.append(self._lost(node, node.explain_end()))
        self._launch.end()

    def _lost(self, node: Connection, reason: str) -> Failure:
        return Failure(node.plan.name, None, 1, reason, time.monotonic())

    def _conclude(self) -> int:
        """Say how it ended."""
        if self._launch.signal is not None:
            self._output.note(f"ended by {signal.Signals(self._launch.signal).name}")
            return 128 + self._launch.signal
        if not self._failures:
            return 0
        cause = first_cause(self._failures)
        if cause.rank is not None and not self._output.shows(cause.rank):
            self._output.quote(cause.node, cause.rank, self._output.last_errors(cause.rank)[-_QUOTED:])
        self._output.note(str(cause))
        path = self._output.path_of_agent(cause.node) if cause.rank is None else self._output.path_of(cause.rank)
        self._output.note(f"its whole output is in {path}")
        return cause.code
