"""Watch a started job until it ends: pass on its output, restart or end it when a rank fails, and report why."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.connection import Connection, Event
from ddp_callbacks.launcher.failures import TAIL, End, first_cause, read_record
from ddp_callbacks.launcher.launch import CannotStart, Launch
from ddp_callbacks.launcher.output import Output
from ddp_callbacks.launcher.stacks import innermost, summary

_QUOTED = 20  # lines of the failed rank to show
_LOGGED = re.compile(r"\[[IWEF]\d{4} ")  # by torch's C++
_PAUSE = 0.25  # seconds from the first failure to the end of the others: one may be writing down an earlier one


class Watch:
    """Watches a started job until it ends."""

    def __init__(self, launch: Launch, output: Output, take_input: Callable[[], None]) -> None:
        self._job = launch.job
        self._launch = launch
        self._output = output
        self._take_input = take_input  # called when rank 0 has taken what was sent to it
        self._running = list(launch.nodes)
        self._ranks: dict[int, End] = {}  # those that have started
        self._world_size = _number_of_ranks(self._running)
        self._lost: list[End] = []  # nodes
        self._failures = 0  # after which all ranks were started again
        self._end_at: float | None = None  # when the job ends after a failure
        self._begin_at: float | None = None  # when the ranks that were asked to stop are started again, at the latest
        self._restart: asyncio.Task[None] | None = None  # while all ranks are ended and started again
        self._has_told_of_stop = False

    async def run(self) -> int:
        """Pass on the ranks' output until all nodes have ended; return the exit code of the job."""
        while self._running and not self._launch.is_overdue:
            event = await self._launch.next_event()
            if event is not None:
                await self._take(event)
            if self._restart is not None and self._restart.done():
                self._restart.result()
                self._restart = None
            self._restart_when_written()
            await self._tell_of_stop()
            await self._tell_of_stacks()
            if self._end_at is not None and time.monotonic() >= self._end_at and not self._launch.is_ending:
                self._launch.end()
        return await asyncio.to_thread(self._conclude)

    async def _note(self, text: str) -> None:
        """Print a line. In a thread, as all output: heartbeats are sent even while the terminal or a disk is stuck."""
        await asyncio.to_thread(self._output.note, text)

    async def _take(self, event: Event) -> None:
        name, rank = event.node.plan.name, self._ranks.get(event.rank)
        if rank is not None and event.kind in "esf":
            rank.wrote[event.kind] = (rank.wrote.get(event.kind, b"") + event.data)[-TAIL:]
        if event.kind in "oes":
            await asyncio.to_thread(self._output.write, name, event.rank, event.kind, event.data)
        elif event.kind == "m":
            await self._take_report(name, json.loads(event.data))
        elif event.kind == "i":
            self._take_input()
        elif event.kind in ("x", "closed") and event.node in self._running:
            self._running.remove(event.node)
            if event.kind == "closed":
                await self._lose(event.node, await event.node.explain_end())

    async def _take_report(self, name: str, report: dict[str, Any]) -> None:
        if "started" in report:
            await self._note_start(name, **report["started"])
        elif "ended" in report:
            self._note_end(name, report["ended"], report["now"] - time.monotonic())
        elif "asked" in report:
            self._launch.stop(signal.Signals[report["asked"]], f"{report['asked']} on {name}")
        else:
            self._fail(name, report["problem"])
            self._launch.end()

    # --- ranks --------------------------------------------------------------------------------------------------------

    async def _note_start(self, name: str, ranks: list[int], threads: str, interface: str) -> None:
        self._launch.has_begun = True
        self._forget(name)
        self._ranks |= {rank: End(name, rank) for rank in ranks}
        each = f"{threads} thread{'' if threads == '1' else 's'} each"
        where = f", interface {interface}" if interface else ""
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        await self._note(f"{name}: {which}, {each}{where}{self._which_start()}")

    def _which_start(self) -> str:
        if not self._launch.restarts:
            return ""
        # Those after a lost node are not counted.
        counted = f" of {self._job.max_restarts}" if self._failures == self._launch.restarts else ""
        return f", restart {self._launch.restarts}{counted}"

    def _note_end(self, name: str, report: dict[str, Any], ahead: float) -> None:
        """Note the end of a rank; ``ahead`` is how much the clock of its host is ahead of this machine's."""
        rank = self._ranks.get(report["rank"])
        if rank is None or rank.node != name or self._restart is not None:
            return  # its node was lost, or it was ended to be started again
        rank.code, rank.ended_by, rank.order = report["code"], report["signal"], time.monotonic()
        rank.printed = read_record(rank.text("f"), ahead)
        # If we had ended the job, that may be the reason.
        rank.is_ours = self._launch.is_ending and rank.ended_by in (None, "SIGTERM", "SIGKILL")
        # C++ aborts after an exception that ends the interpreter.
        if rank.ended_by and not rank.is_ours and not (rank.ended_by == "SIGABRT" and rank.printed):
            rank.reason = f"killed by {rank.ended_by}"
        if self._have_all_ended() and not self._can_restart():
            self._launch.end()
        elif rank.code and not self._launch.is_ending:
            self._take_failure(rank)
        elif not self._launch.is_ending:
            self._launch.nodes[0].tell("ended", rank=report["rank"])  # others may wait for it to join

    def _have_all_ended(self) -> bool:
        """Whether all ranks have ended; another node's may not even have started when the first ones end."""
        return len(self._ranks) == self._world_size and all(rank.code is not None for rank in self._ranks.values())

    def _take_failure(self, rank: End) -> None:
        """Handle the first ranks that fail, or that were preempted, before anything has ended the job."""
        if rank.code != EXIT_PREEMPTED and self._begin_at is None:
            if self._can_restart():
                self._begin_restart()
            elif self._end_at is None:
                self._end_at = time.monotonic() + _PAUSE
        elif not self._can_restart():
            self._launch.stop(signal.SIGTERM)
        elif self._begin_at is None:  # the others may write, too
            self._begin_at = time.monotonic() + self._job.force
            self._launch.ask()

    def _forget(self, name: str) -> None:
        """Forget the ranks of a node: new ones start there, or the job continues without it."""
        self._ranks = {number: rank for number, rank in self._ranks.items() if rank.node != name}

    # --- starting again -----------------------------------------------------------------------------------------------

    def _can_restart(self) -> bool:
        """Whether what has failed, or was preempted, is to be started again."""
        has_failed = any(rank.code for rank in self._ranks.values())
        return has_failed and self._failures < self._job.max_restarts and not self._launch.is_ending

    def _restart_when_written(self) -> None:
        """Start again once all ranks have written, if one was preempted."""
        if self._begin_at is None or self._launch.is_ending:
            return
        if self._have_all_ended() or time.monotonic() >= self._begin_at:
            self._begin_at = None
            self._begin_restart()

    def _begin_restart(self, counts: bool = True) -> None:
        self._failures += counts
        self._restart = asyncio.create_task(self._end_and_start_again())

    async def _end_and_start_again(self) -> None:
        """End the ranks of all nodes, then start them again."""
        problems = await self._launch.halt(self._running)
        nodes = list(self._running)
        if not all(node.is_open for node in nodes):
            return  # its end decides
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
        self._world_size = _number_of_ranks(nodes)
        self._launch.restarts += 1
        self._launch.start(nodes)

    # --- nodes --------------------------------------------------------------------------------------------------------

    async def _lose(self, node: Connection, reason: str) -> None:
        """Handle a lost connection: an elastic job continues without the node."""
        name = node.plan.name
        is_needed = node is self._launch.nodes[0] or len(self._running) < self._job.min_nodes
        if is_needed or self._launch.is_ending or self._job.min_nodes == len(self._job.nodes):
            if not any(rank.node == name and rank.code for rank in self._ranks.values()):
                self._fail(name, reason)
            self._launch.end()
            return
        self._forget(name)
        await self._note(f"{name}: {reason}; continuing without it")
        if self._restart is None or self._restart.done():
            self._begin_restart(counts=False)

    async def _tell_of_stop(self) -> None:
        grace = self._job.grace
        if grace is not None and self._launch.stopped_by and self._running and not self._has_told_of_stop:
            self._has_told_of_stop = True
            await self._note(f"{self._launch.stopped_by}: asking all processes to stop within {grace:g} s")

    async def _tell_of_stacks(self) -> None:
        if time.monotonic() >= self._launch.stacks_at:
            self._launch.stacks_at = math.inf
            running = [rank for rank in self._ranks if self._ranks[rank].code is None]
            await asyncio.to_thread(self._output.note_stacks, self._where(running))

    def _where(self, ranks: Iterable[int]) -> list[str]:
        """Where these ranks are, or were when they were ended."""
        found = {number: self._ranks[number] for number in sorted(ranks)}
        return summary({f"rank {number} on {rank.node}": innermost(rank.text("s")) for number, rank in found.items()})

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, name: str, reason: str) -> None:
        self._lost.append(End(name, None, time.monotonic(), 1, reason, is_ours=self._launch.is_ending))

    def _conclude(self) -> int:
        """Report how the job ended."""
        if self._is_preempted():
            by = self._launch.stopped_by
            self._output.note(f"{f'stopped by {by}: ' if by else ''}preempted, checkpoint written")
            return EXIT_PREEMPTED
        if self._launch.stopped_by and self._end_at is None and not self._has_failed():
            return self._conclude_stop()
        return self._conclude_failure()

    def _is_preempted(self) -> bool:
        """Whether each rank has ended as preempted, or well."""
        codes = {rank.code for rank in self._ranks.values()}
        return not self._lost and EXIT_PREEMPTED in codes and codes <= {0, EXIT_PREEMPTED}

    def _has_failed(self) -> bool:
        """Whether a rank that was asked to stop has failed, or a node was lost while others were preempted."""
        codes = {rank.code for rank in self._ranks.values() if rank.code is not None}
        if EXIT_PREEMPTED in codes and self._lost:
            return True
        may_write = EXIT_PREEMPTED in codes or self._job.grace is not None
        return may_write and any(0 < code < 128 for code in codes - {EXIT_PREEMPTED})

    def _conclude_stop(self) -> int:
        if self._ranks and all(rank.code == 0 for rank in self._ranks.values()):
            self._output.note(f"stopped by {self._launch.stopped_by}, but all processes exited with code 0: done")
            return 0
        self._output.note(f"stopped by {self._launch.stopped_by}")
        killed = [number for number, rank in sorted(self._ranks.items()) if rank.ended_by == "SIGKILL"]
        if self._job.grace is not None and killed and not self._lost:
            late = [f"{number} on {self._ranks[number].node}" for number in killed]
            which, were = ("rank", "was") if len(late) == 1 else ("ranks", "were")
            when = "at the second signal" if self._launch.is_forced else f"after --grace {self._job.grace:g}"
            self._output.note(f"{which} {', '.join(late)} {were} killed {when}")
        limit = self._launch.stopped_by == self._launch.limit
        if hung := [number for number, rank in self._ranks.items() if rank.text("s") and (limit or number in killed)]:
            self._output.note_stacks(self._where(hung))
        return 128 + (self._launch.signal or signal.SIGTERM)

    def _conclude_failure(self) -> int:
        late = [End(node.plan.name, None, math.inf, 1, "did not end in time") for node in self._running]
        cause = first_cause([*self._lost, *self._ends()]) or first_cause(late)
        if cause is None:
            return self._conclude_well()
        rank = self._ranks.get(-1 if cause.rank is None else cause.rank)
        if rank is not None and not self._output.shows(rank.rank or 0):
            self._output.quote(rank.node, rank.rank or 0, _lines(rank)[-_QUOTED:])
        if rank is not None and rank.ended_by and rank.is_ours and rank.text("s") and not rank.printed:
            self._output.note_stacks(self._where([cause.rank or 0]))  # it hung, as others say
        self._output.note(cause.text)
        self._output.note(self._output.describe_place(cause.rank))
        return cause.code

    def _conclude_well(self) -> int:
        if self._have_all_ended():
            return 0
        self._output.note("the job ended before its processes did")
        return 1

    def _ends(self) -> list[End]:
        """What is known of the ranks' ends. One that was preempted is no cause; one that did not follow it is."""
        has_preempted = any(rank.code == EXIT_PREEMPTED for rank in self._ranks.values())
        reason = f"did not end within {self._job.force:g} s after another rank was preempted"
        ends = []
        for rank in self._ranks.values():
            if rank.code == EXIT_PREEMPTED:
                ends.append(replace(rank, code=0))
            elif has_preempted and rank.is_ours and rank.ended_by == "SIGKILL":
                ends.append(replace(rank, reason=reason, is_ours=False))
            else:
                ends.append(replace(rank, said="" if rank.printed else _last_words(rank)))
        return ends


def _lines(rank: End) -> list[str]:
    """The last lines of its standard error."""
    return rank.text("e").replace("\r", "\n").splitlines()


def _last_words(rank: End) -> str:
    return next((line.strip() for line in reversed(_lines(rank)) if line.strip() and not _LOGGED.match(line)), "")


def _number_of_ranks(nodes: Sequence[Connection]) -> int:
    return sum(int(node.place["processes"]) for node in nodes)
