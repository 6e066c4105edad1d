"""How a job has ended: its last lines, its report and its exit code, from what is known of its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from signal import SIGTERM

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.first_failure import End, first_cause, last_words
from ddp_callbacks.launcher.launch import Launch
from ddp_callbacks.launcher.meant import misplaced
from ddp_callbacks.launcher.members import Members
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.streams import Output
from ddp_callbacks.reporting.collector import Collector
from ddp_callbacks.reporting.page import write
from ddp_callbacks.reporting.stacks import innermost, summary
from ddp_callbacks.reporting.trace import write as write_trace

_USAGE = 2  # exit code of a program that does not know its arguments, and of ddprun if nothing was started


class Outcome:
    """How a job has ended.

    Args:
        launch, output, report: What started the job, what prints, and what was measured.
        members: The ranks that take part.
        ends: What is known about all ranks that have started, by rank.
        lost: Lost nodes, and nodes with a problem.
        running: The names of the nodes that have not ended.
        was_failing: Whether a failure was about to end the job.
    """

    def __init__(
        self,
        launch: Launch,
        output: Output,
        report: Collector,
        members: Members,
        ends: Mapping[int, End],
        lost: Sequence[End],
        running: Sequence[str],
        was_failing: bool,
    ) -> None:
        self._launch, self._output, self._report, self._members = launch, output, report, members
        self._by_rank, self._lost, self._running, self._was_failing = ends, lost, running, was_failing
        self._ends = members.ends(ends)
        self._have_all_ended = members.have_all_ended(ends)

    def conclude(self) -> int:
        """Report where the time of the training went, and how the job ended."""
        if self._launch.job.trace:
            self._output.note(write_trace(self._report.traced(), self._output.folder))
        if line := self._write_report():
            self._output.note(line)
        code = self._conclude()
        self._write_report()  # with how it has ended
        return code

    def _conclude(self) -> int:
        if self._launch.has_enough:
            return 0
        if self._is_preempted():
            by = self._launch.stopped_by
            self._note(f"{f'stopped by {by}: ' if by else ''}preempted, checkpoint written")
            return EXIT_PREEMPTED
        if self._launch.stopped_by and not self._was_failing and not self._has_failed():
            return self._conclude_stop()
        if all(rank.code == 0 for rank in self._ends) and not self._lost:
            self._note("".join(rank.said.get("if_done", "") for rank in self._ends))
        return self._conclude_failure()

    def _write_report(self) -> str:
        return write(self._report.data(), self._output.folder)

    def _note(self, text: str) -> None:
        """Print it, and tell it in the report."""
        if text:
            self._report.note(text)
            self._output.note(text)

    def _note_stacks(self, ranks: Sequence[End]) -> None:
        lines = where(ranks)
        self._output.note_stacks(lines)
        for line in lines:
            self._report.note(line)

    def _is_preempted(self) -> bool:
        """Whether no node was lost, and all ranks were preempted; if the job was asked to stop, some may be done."""
        codes = {rank.code for rank in self._ends}
        may_be_done = {0} if self._launch.stopped_by else set[int]()
        return not self._lost and EXIT_PREEMPTED in codes and codes <= {EXIT_PREEMPTED} | may_be_done

    def _has_failed(self) -> bool:
        """Whether a rank that was asked to stop has failed, or a node was lost while others were preempted."""
        codes = {rank.code for rank in self._ends if rank.code is not None}
        if EXIT_PREEMPTED in codes and self._lost:
            return True
        may_write = EXIT_PREEMPTED in codes or self._launch.job.grace is not None
        return may_write and any(0 < code < 128 for code in codes - {EXIT_PREEMPTED})

    def _conclude_stop(self) -> int:
        ends = self._ends
        if ends and all(rank.code == 0 for rank in ends):
            self._note(f"stopped by {self._launch.stopped_by}, but all processes exited with code 0: done")
            return self._conclude_success()
        self._note(f"stopped by {self._launch.stopped_by}")
        killed = [rank for rank in ends if rank.ended_by == "SIGKILL"]
        if killed and not self._lost:
            late = [f"{rank.rank} on {rank.node}" for rank in killed]
            which, were = ("rank", "was") if len(late) == 1 else ("ranks", "were")
            grace = self._launch.job.grace
            late_by = f"after {GRACE:g} s, which --grace makes longer" if grace is None else f"after --grace {grace:g}"
            when = "at the second signal" if self._launch.is_forced else late_by
            self._note(f"{which} {', '.join(late)} {were} killed {when}")
        limit = self._launch.stopped_by == self._launch.limit
        if hung := [rank for rank in ends if rank.text("s") and (limit or rank in killed)]:
            self._note_stacks(hung)
        return 128 + (self._launch.signal or SIGTERM)

    def _conclude_success(self) -> int:
        if some := ", ".join(str(end) for end in self._ends if end.code == EXIT_PREEMPTED):
            self._note(f"{some} exited with code {EXIT_PREEMPTED}, others with 0, and nobody had asked")
            return 1
        if summary := self._members.summary():
            self._note(f"done, with {summary}")
        return 0

    def _conclude_failure(self) -> int:
        late = [End(name, None, math.inf, 1, "did not end in time") for name in self._running]
        cause = first_cause(
            [*self._lost, *causes(self._ends, self._launch.job.patience)], self._members.losses
        ) or first_cause(late)
        if cause is None and self._have_all_ended:
            return self._conclude_success()
        if cause is None:
            self._note("the job ended before its processes did")
            return 1
        rank = self._by_rank.get(-1 if cause.rank is None else cause.rank)
        if rank is not None and not self._output.shows(rank.rank or 0):
            self._output.quote(rank.node, rank.rank or 0, last_words(rank.lines))
        if rank is not None and rank.ended_by and rank.is_ours and rank.text("s") and not rank.printed:
            self._note_stacks([rank])  # it hung, as others say
        self._note(cause.text)
        if not self._launch.has_begun:
            return _USAGE
        if cause.code == _USAGE and (says := misplaced(self._launch.job.training_script_args)):
            self._output.note(says)
        self._output.note(self._output.describe_place(cause.rank))
        return cause.code


def causes(ends: Sequence[End], patience: float) -> list[End]:
    """Return the ranks' ends. A preempted rank is no cause; one that had to be ended after a preemption is.

    Args:
        patience: The seconds that the others had after the first preemption.
    """
    has_preempted = any(rank.code == EXIT_PREEMPTED for rank in ends)
    reason = f"did not end within {patience:g} s after another rank was preempted"
    late = [rank for rank in ends if has_preempted and rank.is_ours and rank.ended_by]
    return [replace(rank, reason=reason, is_ours=False) if rank in late else rank for rank in ends]


def where(ranks: Iterable[End]) -> list[str]:
    """Return where these ranks are, or were when they were ended."""
    return summary({str(rank): innermost(rank.text("s")) for rank in ranks})
