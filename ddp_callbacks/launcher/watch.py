"""Watch a started job until it ends: pass on its output, end all nodes when one fails, and report why."""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.connection import Connection, Event
from ddp_callbacks.launcher.failures import Cause, End, first_cause
from ddp_callbacks.launcher.launch import SAME, Launch
from ddp_callbacks.launcher.output import AGENT, Output
from ddp_callbacks.launcher.plan import Plan
from ddp_callbacks.launcher.tracebacks import Reader, printed_in

_QUOTED = 20  # lines of the failed rank to show


@dataclass
class _Rank:
    """What we know about the workers with one rank."""

    node: str
    read: Reader = field(default_factory=Reader)
    report: dict[str, Any] | None = None  # about its end
    came: float = math.inf
    is_ours: bool = False  # see :class:`End`

    @property
    def is_preempted(self) -> bool:
        return self.report is not None and self.report["code"] == EXIT_PREEMPTED


class Watch:
    """Watches a started job until it ends."""

    def __init__(self, plan: Plan, launch: Launch, output: Output) -> None:
        self._plan = plan
        self._launch = launch
        self._output = output
        self._running = launch.nodes
        self._lost: list[End] = []  # nodes
        self._ranks: dict[int, _Rank] = {}
        self._agents: dict[str, dict[str, Any]] = {}
        self._again: int | None = None  # the round after which the workers start again, once all have written
        self._again_at = math.inf
        self._has_told_of_stop = False
        self._passed_on = -math.inf  # when a signal of a node was passed on
        self._redirected = plan.torchrun["redirects"] != "0" or plan.torchrun["tee"] != "0"

    def run(self) -> int:
        """Pass on the ranks' output until all nodes have ended; return the exit code of the job."""
        while self._running and not self._launch.is_overdue:
            event = self._launch.next_event()
            if event is not None:
                self._take(event)
            self._start_again_when_ready()
            self._tell_of_stop()
        return self._conclude()

    def _take(self, event: Event) -> None:
        name = event.node.plan.name
        if event.kind in "oe":
            self._take_output(name, event)
        elif event.kind == "m":
            self._take_report(event.node, json.loads(event.data))
        elif event.kind == "x":
            self._take_end(event.node, json.loads(event.data)["code"])
        elif event.node in self._running:  # closed without an earlier end
            self._running.remove(event.node)
            self._lose(event.node, event.node.explain_end())

    def _take_output(self, name: str, event: Event) -> None:
        if event.rank == AGENT:
            self._output.write_agent(name, event.kind, event.data, show=self._redirected)
            return
        rank = self._ranks.get(event.rank)
        if event.kind == "e" and rank is not None and rank.node == name:
            rank.read.feed(event.data, time.monotonic())
        self._output.write(name, event.rank, event.kind, event.data)

    def _take_report(self, node: Connection, report: dict[str, Any]) -> None:
        name = node.plan.name
        if "agent" in report:
            self._agents[name] = report["agent"]
        elif "workers" in report:
            self._forget(name)
            self._launch.has_begun = True
            self._ranks |= {rank: _Rank(name) for rank in report["workers"]["ranks"]}
            self._say_what_runs(name, **report["workers"])
        elif "noticed" in report:  # before torchrun has ended the others; it may restart the workers
            self._note_end(report["noticed"])
            self._pass_on_preemption(report["noticed"]["rank"])
        elif "failed" in report:
            self._note_end(report["failed"], is_ours=True)
            self._end_with(report["failed"]["code"])
        elif "again" in report:
            self._plan_to_start_again(report["again"])
        elif "asked" in report:
            self._pass_on(name, report["asked"])
        elif "ending" in report:
            self._launch.stop(signal.Signals[report["ending"]])
        elif "error" in report:
            self._fail(name, 1, report["error"])
            self._launch.end()
        elif report["agent_ended"] != 0:
            self._take_end_of_agent(node, report["agent_ended"])

    def _note_end(self, report: dict[str, Any], is_ours: bool = False) -> None:
        """Note the end of a rank; the first report counts. If we had ended the job, that may be the reason."""
        rank = self._ranks[report["rank"]]
        if rank.report is None:
            ordered = self._launch.is_ending and report["signal"] in (None, "SIGTERM")
            rank.report, rank.came, rank.is_ours = report, time.monotonic(), is_ours or ordered

    # --- requests to stop ---------------------------------------------------------------------------------------------

    def _pass_on(self, name: str, number: str) -> None:
        """Handle a signal that a scheduler has sent to a node: all ranks get it, and may be started again."""
        if not self._launch.is_ending and time.monotonic() >= self._passed_on + SAME:
            self._passed_on = time.monotonic()
            self._output.note(f"{name} got {number}: asking all processes to stop")
            self._launch.ask(signal.Signals[number])

    def _pass_on_preemption(self, number: int) -> None:
        """Handle the end of a rank; the first one that was preempted takes the others along."""
        preempted = [rank for rank in self._ranks.values() if rank.is_preempted]
        if self._ranks[number] in preempted and len(preempted) == 1 and not self._launch.is_ending:
            self._launch.ask(signal.SIGTERM)

    def _end_with(self, code: int) -> None:
        """End the other nodes: at once after a failure; after a preemption they may still write."""
        if code == EXIT_PREEMPTED:
            self._launch.stop(signal.SIGTERM)
        else:
            self._launch.end()

    def _plan_to_start_again(self, after: int) -> None:
        """Restart the workers of all nodes, as a node asks; after a preemption once all others have written, too."""
        if any(rank.is_preempted for rank in self._ranks.values()):
            self._again, self._again_at = after, time.monotonic() + self._launch.limits.force
        else:
            self._launch.start_again(after, self._running)

    def _start_again_when_ready(self) -> None:
        has_ended = all(rank.report is not None for rank in self._ranks.values())
        if self._again is not None and (has_ended or time.monotonic() >= self._again_at):
            after, self._again = self._again, None
            if not self._launch.is_ending:
                self._launch.start_again(after, self._running)

    def _tell_of_stop(self) -> None:
        grace = self._launch.limits.grace
        if grace is not None and self._launch.stopped_by and self._running and not self._has_told_of_stop:
            self._has_told_of_stop = True
            self._output.note(f"{self._launch.stopped_by}: asking all processes to stop within {grace:g} s")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _take_end_of_agent(self, node: Connection, code: int) -> None:
        """Handle the end of an agent; processes that it left behind may still run."""
        if not self._can_do_without(node):
            code = code if code >= 0 else 128 - code
            self._fail_at_once(node.plan.name, code, f"torchrun's agent ended with exit code {code}")

    def _has_said_more(self, name: str) -> bool:
        """Whether a rank of the node is known to have failed."""
        failed = [rank for rank in self._ranks.values() if rank.report is not None and rank.report["code"]]
        return name in {rank.node for rank in failed} | {end.node for end in self._lost}

    def _forget(self, name: str) -> None:
        """Forget the workers of a node: new ones start there, or the job continues without it."""
        self._output.forget_errors(name)
        self._ranks = {number: rank for number, rank in self._ranks.items() if rank.node != name}

    def _say_what_runs(self, name: str, ranks: list[int], attempt: int) -> None:
        agent = self._agents[name]
        threads = f"{agent['threads']} thread{'' if agent['threads'] == '1' else 's'} each"
        where = f", interface {agent['interface']}" if agent["interface"] else ""
        allowed = self._plan.torchrun["max_restarts"]  # restarts after a lost node do not count
        again = f", restart {attempt}{f' of {allowed}' if attempt <= allowed else ''}" if attempt else ""
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        self._output.note(f"{name}: {which}, {threads}{where}{again}")

    def _take_end(self, node: Connection, code: int) -> None:
        self._running.remove(node)
        if code == 0:
            return
        reason = f"torchrun's agent ended with exit code {code}"
        if self._can_do_without(node):
            self._go_on_without(node, reason)
        else:
            self._fail_at_once(node.plan.name, code, reason)

    def _lose(self, node: Connection, reason: str) -> None:
        """Handle a lost connection without an earlier report."""
        if self._can_do_without(node):
            self._go_on_without(node, reason)
            return
        if not self._has_said_more(node.plan.name):
            self._fail(node.plan.name, 1, reason)
        self._launch.end()

    def _go_on_without(self, node: Connection, reason: str) -> None:
        self._forget(node.plan.name)
        self._output.note(f"{node.plan.name}: {reason}; continuing without it")
        self._launch.start_again(None, self._running)

    def _fail_at_once(self, name: str, code: int, reason: str) -> None:
        """Handle the end of an agent; it is no cause if we have already ended the job."""
        if not self._launch.is_ending and not self._has_said_more(name):
            self._fail(name, code, reason)
        self._launch.end()

    def _can_do_without(self, node: Connection) -> bool:
        """Whether an elastic job continues without this node: enough are left, and it is not the first (its store)."""
        others = [other for other in self._running if other is not node]
        elastic = self._plan.rendezvous == "elastic" and node.plan.rank != 0
        return elastic and not self._launch.is_ending and len(others) >= self._plan.min_nodes

    def _fail(self, name: str, code: int, reason: str) -> None:
        self._lost.append(End(name, None, time.monotonic(), code, reason, is_ours=self._launch.is_ending))

    def _end_of(self, number: int, rank: _Rank) -> End:
        """Describe the end of a rank; called at the end, when all its output is here."""
        rank.read.feed(b"\n", time.monotonic())
        if rank.report is None:
            return End(rank.node, number, rank.came, printed=rank.read.last)
        ended_by, message = rank.report["signal"], rank.report["message"]
        printed = rank.read.last or (printed_in(message) if message else None)
        reason = None if ended_by is None or rank.is_ours else f"killed by {ended_by}"
        if ended_by == "SIGABRT" and printed is not None:
            reason = None  # C++ aborts after an exception that Python has already printed
        return End(rank.node, number, rank.came, rank.report["code"], reason, printed, rank.is_ours)

    def _conclude(self) -> int:
        """Report how the job ended."""
        if self._is_preempted():
            by = self._launch.stopped_by
            self._output.note(f"{f'stopped by {by}: ' if by else ''}preempted, checkpoint written")
            return EXIT_PREEMPTED
        if self._launch.stopped_by and not self._has_failed():
            return self._conclude_stop()
        return self._conclude_failure()

    def _is_preempted(self) -> bool:
        """Whether each rank has ended as preempted, or well."""
        codes = {None if rank.report is None else rank.report["code"] for rank in self._ranks.values()}
        return not self._lost and EXIT_PREEMPTED in codes and codes <= {0, EXIT_PREEMPTED}

    def _has_failed(self) -> bool:
        """Whether a rank that was asked to stop has failed, or a node was lost while others were preempted."""
        codes = {rank.report["code"] for rank in self._ranks.values() if rank.report is not None}
        if EXIT_PREEMPTED in codes and self._lost:
            return True
        may_write = EXIT_PREEMPTED in codes or self._launch.limits.grace is not None
        return may_write and any(0 < code < 128 for code in codes - {EXIT_PREEMPTED})

    def _conclude_stop(self) -> int:
        if self._ranks and all(rank.report is not None and not rank.report["code"] for rank in self._ranks.values()):
            self._output.note(f"stopped by {self._launch.stopped_by}, but all processes exited with code 0: done")
            return 0
        self._output.note(f"stopped by {self._launch.stopped_by}")
        late = [f"{number} on {rank.node}" for number, rank in sorted(self._ranks.items()) if rank.report is None]
        if self._launch.limits.grace is not None and late and not self._lost:
            which, were = ("rank", "was") if len(late) == 1 else ("ranks", "were")
            when = "at the second signal" if self._launch.is_forced else f"after --grace {self._launch.limits.grace:g}"
            self._output.note(f"{which} {', '.join(late)} {were} killed {when}")
        return 128 + (self._launch.signal or signal.SIGTERM)

    def _conclude_failure(self) -> int:
        late = [End(node.plan.name, None, math.inf, 1, "did not end in time") for node in self._running]
        ends = [self._end_of(number, rank) for number, rank in self._ranks.items()]
        ranks = [replace(end, code=0) if end.code == EXIT_PREEMPTED else end for end in ends]  # these are no cause
        cause = first_cause([*self._lost, *ranks]) or first_cause(late) or first_cause(self._unwritten(ranks))
        if cause is None:
            return 0
        rank = AGENT if cause.rank is None else cause.rank
        if not (self._redirected if rank == AGENT else self._output.shows(rank)):
            self._output.quote(cause.node, rank, self._output.last_errors(cause.node, rank)[-_QUOTED:])
        self._output.note(str(cause))
        self._output.note(self._where_it_is(cause))
        return cause.code

    def _unwritten(self, ends: list[End]) -> list[End]:
        """The ranks that did not follow one that was preempted, and were ended by force."""
        reason = f"did not end within {self._launch.limits.force:g} s after another rank was preempted"
        missing = [end for end in ends if end.code is None]
        is_preempted = any(rank.is_preempted for rank in self._ranks.values())
        return [replace(end, code=128 + signal.SIGKILL, reason=reason) for end in missing] if is_preempted else []

    def _where_it_is(self, cause: Cause) -> str:
        """Where to find the full output of the failed rank or node."""
        if self._redirected:
            return f"its output is on {cause.node}, in the folder of --log-dir"
        path = self._output.path_of_agent(cause.node) if cause.rank is None else self._output.path_of(cause.rank)
        return (
            f"its full output is in {path}" if path.exists() else f"it printed nothing; all output is in {path.parent}"
        )
