"""Watch a started job until it ends: pass on its output, restart or end it when a rank fails, and report why."""

from __future__ import annotations

import asyncio
import math
import os
import time
from signal import Signals

from ddp_callbacks.cluster.environment import SUCCESSOR
from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.connection import Connection
from ddp_callbacks.launcher.first_failure import End, first_cause
from ddp_callbacks.launcher.join import plans_to_add
from ddp_callbacks.launcher.launch import CannotStart, Launch, close
from ddp_callbacks.launcher.members import Members
from ddp_callbacks.launcher.node import reports
from ddp_callbacks.launcher.node.program import Node
from ddp_callbacks.launcher.outcome import Outcome, causes, where
from ddp_callbacks.launcher.streams import Output
from ddp_callbacks.launcher.warned import Warned
from ddp_callbacks.reporting.collector import Collector
from ddp_callbacks.reporting.requests import JOINED, write_answer

_SOON = 3.0  # seconds after which a rank whose program is over is told to be kept alive
_PAUSE = 0.25  # seconds before a failure ends the other ranks: one may be recording an earlier failure
_CAUSE = 2.0  # the same if it only follows from another rank's end, which may take longer than its connections


class Watch:
    """Watches a started job until it ends."""

    def __init__(self, launch: Launch, output: Output, report: Collector | None = None) -> None:
        self._job = launch.job
        self._launch = launch
        self._output, self._report = output, report or Collector([])
        self._running = list(launch.nodes)
        self._ranks: dict[int, End] = {}  # the ranks that have started
        self._members = Members(self._running)
        self._lost: list[End] = []  # lost nodes, and nodes with a problem
        self._end_at: float | None = None  # when the job ends after a failure
        self._begin_at: float | None = None  # latest time of a restart, while preempted ranks write checkpoints
        self._restart: asyncio.Task[None] | None = None  # ends all ranks and starts them again
        self._joining: asyncio.Task[None] | None = None  # adds nodes
        self._told_kept = False  # whether a rank is told to be kept alive
        self._warned = Warned(output)
        self._report.warned = self._warned.hear

    async def run(self) -> int:
        """Pass on the ranks' output until all nodes have ended; return the exit code of the job."""
        while self._running and not self._launch.is_overdue:
            if (event := await self._launch.next_event()) is not None:
                await self._take(*event)
            self._restart, self._joining = _unfinished(self._restart), _unfinished(self._joining)
            self._restart_when_written()
            await self._show_warnings(time.monotonic())
            await self._end_those_kept_alive()
            if self._end_at is not None and time.monotonic() >= self._end_at and not self._launch.is_ending:
                self._launch.end()
        await self._show_warnings(math.inf)
        return await asyncio.to_thread(self._outcome().conclude)

    def _outcome(self) -> Outcome:
        names, was_failing = [node.plan.name for node in self._running], self._end_at is not None
        known = self._members, self._ranks, self._lost, names
        return Outcome(self._launch, self._output, self._report, *known, was_failing)

    async def _note(self, text: str) -> None:
        """Print a line. In a thread, as all output: heartbeats are sent even while the terminal or a disk is stuck."""
        self._report.note(text)
        await asyncio.to_thread(self._output.note, text)

    async def _show_warnings(self, now: float) -> None:
        """Show what only ranks that are not shown have warned of, once it is time."""
        for name, rank, text in self._warned.due(now):
            await asyncio.to_thread(self._output.quote, name, rank, text.splitlines())

    # --- reports of the nodes -----------------------------------------------------------------------------------------

    async def _take(self, node: Connection, report: reports.Report) -> None:
        match report:
            case reports.Wrote():
                await self._take_output(node, *report)
            case reports.Started():
                await self._take_start(node, report)
            case reports.Ended():
                await self._take_end(node, *report)
            case reports.Asked(name):
                self._launch.stop(Signals[name], f"{name} on {node.plan.name}")
            case reports.Problem(text):
                await self._take_problem(node, text)
            case reports.Done() | reports.Closed() if node in self._running:
                self._running.remove(node)
                if isinstance(report, reports.Closed):
                    await self._lose_node(node, await node.explain_end())
            case _:
                await self._take_request(report)

    async def _take_request(self, report: reports.Report) -> None:
        match report:
            case reports.Request(hosts):
                self._add_or_ask(hosts)
            case reports.Stacks():
                running = [end for end in self._members.ends(self._ranks) if end.code is None]
                await asyncio.to_thread(self._output.note_stacks, where(running))
            case reports.Says(text):
                await self._note(text)

    async def _take_output(self, node: Connection, rank: int, stream: str, data: str) -> None:
        written = os.fsencode(data)
        self._report.hear(node.plan.name, rank, stream, written)
        successor = self._members.successors.get(rank)
        if (end := successor or self._ranks.get(rank)) is not None and stream not in "or":
            end.hear(stream, written)
        if successor is not None and not self._is_over and successor.said.get("ready") is True:
            self._ranks[rank] = self._members.join(rank)
            await self._continue(f"{successor}: a new process joins")
        if stream not in "fr":
            await asyncio.to_thread(self._output.write, node.plan.name, rank, stream, written)
        elif stream == "f" and end is not None and (stores := end.said.get("stores")):
            self._launch.tell_ranks(stores=stores)

    def _add_or_ask(self, hosts: str) -> None:
        self._joining = _unfinished(self._joining)
        if hosts and self._joining is None:
            self._joining = asyncio.create_task(self._add(hosts))
        else:
            self._launch.ask_for_stacks()

    async def _take_problem(self, node: Connection, text: str) -> None:
        if self._members.on(node.plan.name):
            self._fail(node.plan.name, text)
            self._launch.end()
            return
        await self._note(f"{node.plan.name}: {text}")  # the others continue without its new processes
        self._members.forget_successors(node.plan.name)
        self._release(node)

    # --- ranks --------------------------------------------------------------------------------------------------------

    async def _take_start(self, node: Connection, started: reports.Started) -> None:
        ranks, restarts, threads, interface, bound = started
        name, self._launch.has_begun = node.plan.name, True
        is_current = restarts == self._launch.restarts  # else a rank of another node has failed meanwhile
        if is_current and not self._members.successors.keys() & ranks:
            self._forget(name)
            self._ranks |= {rank: End(name, rank) for rank in ranks}
        each = f"{threads} thread{'' if threads == '1' else 's'} each"
        where = f"{f', interface {interface}' if interface else ''}{f', {bound}' if bound else ''}"
        again = f", restart {restarts} of {self._job.max_restarts}" if restarts else ""
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        await self._note(f"{name}: {which}, {each}{where}{again}")

    async def _take_end(
        self, node: Connection, rank: int, code: int, signal: str | None, now: float, stopped: float
    ) -> None:
        """Note the end of a rank, see :class:`.node.reports.Ended`."""
        successor = self._members.successors.pop(rank, None)
        end = successor or self._ranks.get(rank)
        if end is None or end.node != node.plan.name or end.code is not None or self._restart is not None:
            return  # its node was lost, it counts as ended, or a restart has ended it
        end.take(code, signal, now, self._launch.is_ending, stopped)
        if successor is not None:
            await self._note_end_of_successor(successor)
            self._release(node)
        elif end.reason and not end.printed and self._can_lose([end]):
            await self._lose([end], f"{end} was {end.reason}")
            self._replace(node, end)
            self._release(node)
        else:
            self._follow(end)

    def _follow(self, end: End) -> None:
        """Do what follows from the end of a rank that takes part."""
        if self._members.have_all_ended(self._ranks) and not self._can_restart():
            self._launch.end()
        elif end.code and not self._launch.is_ending:
            self._take_failure(end)
        elif not self._launch.is_ending:  # others may wait for it to join
            self._launch.tell_ranks(ended={str(end.rank): end.code})

    async def _end_those_kept_alive(self) -> None:
        """Count ranks that their own threads or processes keep alive after an exception as failed, once it is time."""
        if self._is_over or self._restart is not None:
            return
        patience, now = self._job.patience, time.monotonic()
        heard = [end for end in self._ranks.values() if end.code is None and end.is_kept(now - _SOON, patience)]
        kept = [end for end in heard if end.rank in self._members.ranks]
        if kept and not self._told_kept:
            self._told_kept = True
            first = min(kept, key=lambda end: (end.follows, end.over_since))
            await self._note(first.describe_wait(patience))
        late = [end for end in kept if end.printed and now - end.over_since >= _SOON + patience]
        for end in late:
            end.fail()
        if late:
            self._follow(late[0])

    def _take_failure(self, end: End) -> None:
        """Handle a rank that failed or was preempted, before anything has ended the job."""
        is_first = self._begin_at is None and self._end_at is None
        known = [
            other for other in self._members.ends(self._ranks) if other.code and not (other is end or other.follows)
        ]
        if is_first and end.code == EXIT_PREEMPTED:
            self._launch.ask()
            self._decide_within(self._job.patience)
        elif is_first and end.follows:
            self._decide_within(_CAUSE)
        elif is_first or not (end.follows or known):
            self._decide_within(0.0 if self._can_restart() else _PAUSE)

    def _decide_within(self, seconds: float) -> None:
        """Give the other ranks this time to end, too, before all are ended or start again."""
        until = time.monotonic() + seconds
        if self._can_restart():
            self._begin_at = until
        else:
            self._end_at = until

    def _forget(self, name: str) -> None:
        """Forget the ranks of a node: new ones start there, or the job continues without it."""
        self._ranks = {number: rank for number, rank in self._ranks.items() if rank.node != name}

    # --- continuing without lost ranks --------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._launch.is_ending or self._end_at is not None

    def _can_lose(self, ends: list[End]) -> bool:
        """Whether the job continues if these ranks are lost now."""
        is_enough = self._members.nodes_without(ends) >= self._job.least_nodes
        return self._job.keep_going and not self._is_over and is_enough

    async def _lose(self, ends: list[End], what: str) -> None:
        """Continue without these ranks; ``what`` has happened."""
        self._members.lose(ends)
        for end in ends:
            self._report.lose(-1 if end.rank is None else end.rank)
        await self._continue(what)
        if self._members.have_all_ended(self._ranks):
            self._launch.end()

    def _replace(self, node: Connection, lost: End) -> None:
        """Start a new process for a lost rank, if any other still runs, and it was not replaced too often."""
        if not self._is_over and self._members.replace(lost):
            node.tell(Node.replace, lost.rank or 0, {SUCCESSOR: "1"})

    def _release(self, node: Connection) -> None:
        """End the program of a node on which no process runs any more, so that the node may join again."""
        if node is not self._launch.nodes[0] and self._members.has_none(node.plan.name):
            node.tell(Node.end, 0)

    async def _note_end_of_successor(self, end: End) -> None:
        """Tell that a process has ended before it has joined, which is no failure of the job."""
        if not self._is_over:
            why = f": {end.told}" if end.told else ""
            await self._note(f"{end}: the new process ended with exit code {end.code} before it joined{why}")

    async def _add(self, hosts: str) -> None:
        """Let new processes on more nodes join, and answer the one who has asked for it."""
        try:
            said = f"0\n{await self._start_more(hosts)}: new processes start; they join once they are ready"
        except Exception as problem:  # whatever it is, the job continues without them
            said = f"2\n{problem}"
        await asyncio.to_thread(write_answer, self._output.folder / JOINED, said)

    async def _start_more(self, hosts: str) -> str:
        """Start new processes on more nodes; return the names of the nodes.

        Raises:
            CannotStart, ConfigurationError: They cannot join.
        """
        self._refuse_to_add()
        plans = await asyncio.to_thread(plans_to_add, self._job, hosts, len(self._running))
        nodes = await self._launch.add(plans)
        try:
            self._refuse_to_add()  # it may have ended meanwhile
        except CannotStart:
            await close(nodes)
            raise
        for node in nodes:
            self._members.add(node.plan.name, int(node.place["processes"]))
        self._running += [node for node in nodes if node.is_open]  # the end of any other one was heard before
        self._launch.tell_ranks(members=self._members.listed())  # new processes wait until they are among these
        self._launch.start_more(nodes)
        return ", ".join(node.plan.name for node in nodes)

    def _refuse_to_add(self) -> None:
        if not self._job.keep_going:
            raise CannotStart("no node can join the job: it was started without --keep-going.")
        if self._members.began_alone:
            raise CannotStart("no node can join the job: it was started with one process, which makes no group.")
        if self._is_over:
            raise CannotStart("no node can join the job: it ends.")

    async def _continue(self, what: str) -> None:
        """Continue with those that take part now, and let them know; ``what`` has happened."""
        self._launch.tell_ranks(members=self._members.listed())
        await asyncio.to_thread(self._output.follow, self._members.ranks)
        count = len(self._members.ranks)
        await self._note(f"{what}; continuing with {count} process{'' if count == 1 else 'es'}")

    # --- starting again -----------------------------------------------------------------------------------------------

    def _can_restart(self) -> bool:
        """Whether a rank has failed or was preempted, and a restart is left and allowed."""
        return any(rank.code for rank in self._ranks.values()) and self._is_restart_left()

    def _is_restart_left(self) -> bool:
        return self._launch.restarts < self._job.max_restarts and not self._launch.is_ending

    def _restart_when_written(self) -> None:
        """After a preemption, restart once all ranks have written and ended, or their time is over."""
        if self._begin_at is None or self._launch.is_ending:
            return
        if self._members.have_all_ended(self._ranks) or time.monotonic() >= self._begin_at:
            self._begin_at = None
            self._begin_restart()

    def _begin_restart(self) -> None:
        self._launch.restarts += 1
        self._restart = asyncio.create_task(self._end_and_start_again())

    async def _end_and_start_again(self) -> None:
        """End the ranks of all nodes, then start them again."""
        if cause := first_cause(causes(self._members.ends(self._ranks), self._job.patience)):
            await self._note(f"{cause.text}; all start again")
        problems = await self._launch.halt(self._running)
        nodes = list(self._running)
        if not all(node.is_open for node in nodes):
            return  # the handler of the lost connection decides
        for node in (node for node in problems if node in nodes):
            self._fail(node.plan.name, "its processes did not end after SIGKILL")
        if self._launch.is_ending or self._lost:
            self._launch.end()
            return
        try:
            await self._launch.meet(nodes)
        except CannotStart as problem:
            self._fail(nodes[0].plan.name, str(problem).rstrip("."))
            self._launch.end()
            return
        self._ranks.clear()
        self._told_kept = False
        self._members = Members(nodes)
        self._launch.start(nodes)

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def _lose_node(self, node: Connection, reason: str) -> None:
        """Handle a lost connection: an elastic job, or one that keeps going, continues without the node."""
        name = node.plan.name
        self._members.forget_successors(name)
        ends = [end for rank in self._members.on(name) if (end := self._ranks.get(rank) or End(name, rank)).code != 0]
        if self._can_lose(ends):
            await self._lose([self._end_of(name, reason), *ends], f"{name}: {reason}")
            return
        is_needed = node is self._launch.nodes[0] or len(self._running) < self._job.min_nodes
        if is_needed or self._launch.is_ending or (self._restart is None and not self._is_restart_left()):
            if not any(rank.node == name and rank.code for rank in self._members.ends(self._ranks)):
                self._fail(name, reason)
            self._launch.end()
            return
        self._forget(name)
        await self._note(f"{name}: {reason}; continuing without it")
        if self._restart is None or self._restart.done():
            self._begin_restart()

    def _fail(self, name: str, reason: str) -> None:
        self._lost.append(self._end_of(name, reason))

    def _end_of(self, name: str, reason: str) -> End:
        return End(name, None, time.monotonic(), 1, reason, is_ours=self._launch.is_ending)


def _unfinished(task: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
    """Return a task that still runs; raise what it has raised."""
    if task is None or not task.done():
        return task
    task.result()
    return None
