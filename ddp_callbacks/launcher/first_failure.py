"""Find out which of several failures came first, and describe it, from the records that failing ranks write."""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from ddp_callbacks.errors import EXIT_PREEMPTED

TAIL = 1 << 14  # bytes to keep of each kind of a rank's output
_LONGEST, _LINE = 4000, 1000  # maximum length of a reason, and of a last line
_SHORT = 160  # characters of a reason, before the line that has all of it
_QUOTED = 20  # lines of a failed rank to show
_TRACEBACK = 45  # lines of a failed rank in which its last traceback may begin; the hook shortens longer ones
_OURS = re.compile(r"(ddp_callbacks\.errors\.)?(Peer|Mismatch|Checkpoint|Rendezvous|Configuration)Error\b")
_BROKEN = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|DistStoreError|gloo/transport/"
)
_LOGGED = re.compile(r"\[[IWEF]\d{4} ")  # the start of a line logged by torch's C++
# torch re-raises the exception of a DataLoader's worker with its traceback as the text, where more lines, or notes, may
# follow the line that begins with its name. If the text is long, the hook leaves out its middle.
_CAUGHT = re.compile(r".*Caught (\w+) (in .*)\.\n(?:.*\n)*((?:\S+\.)?\1\b.*|\.{3}.*)")
_REMEDIES = {
    "unexpected pos|iostream error": "torch could not write a file: is its disk full?",
    "bdb.BdbQuit$|EOFError: EOF when reading a line$": "Rank 0 alone reads standard input, and over ssh only what you "
    "type: let the script ask for input, or breakpoint(), if os.environ['RANK'] == '0'",
}


@dataclass(frozen=True)
class Record:
    """An exception that has ended a rank.

    Attributes:
        exceptions: Name and message of the chain's first and last exception; only of a PeerError, if it has one.
        began: When it reached the hook, on this machine's monotonic clock; infinite if unknown.
        blames: The other ranks that a PeerError names; ``None`` if the chain has no PeerError.
        is_over: Whether the rank's program is over, so that only its threads or child processes may keep it running.
    """

    exceptions: tuple[str, ...]
    began: float
    blames: tuple[int, ...] | None = None
    is_over: bool = False

    @property
    def is_broken_connection(self) -> bool:
        """Whether the exception only means that another process is gone."""
        return any(_BROKEN.search(text.partition("\n")[0]) for text in self.exceptions)

    @property
    def reason(self) -> str:
        """The exception in a few words; this library's exceptions in full, since they name ranks and remedies."""
        if _OURS.match(self.exceptions[-1]):
            return self.exceptions[-1].partition("\nThis is rank ")[0]  # before the traceback of another rank
        first, last = _words(self.exceptions[0]), _words(self.exceptions[-1])
        text = last if len(self.exceptions) == 1 else f"{last} (after {first})"
        remedies = [remedy for words, remedy in _REMEDIES.items() if re.search(words, text)]
        return ". ".join((text, *remedies))


def _words(text: str) -> str:
    """Return the first line; if torch re-raised a DataLoader worker's exception, the first line of its own text."""
    caught = _CAUGHT.match(text)
    return f"{caught[3]}, {caught[2]}" if caught else text.partition("\n")[0]


def read_record(text: str, ahead: float) -> Record | None:
    """Return the record in the last line of ``text``, ours or that of torch's ``@record``; ``None`` if there is none.

    Args:
        text: The JSON that the rank has written.
        ahead: Seconds by which the clock of the rank's host is ahead of this machine's.
    """
    found = _last_json(text)
    if "exceptions" in found:
        blames = None if found["blames"] is None else tuple(found["blames"])
        return Record(tuple(found["exceptions"]), found["time"] - ahead, blames, found.get("is_over", False))
    if "message" not in found:
        return None
    message = found["message"]
    return Record((str(message["message"] if isinstance(message, dict) else message),), math.inf)


def _last_json(text: str) -> dict[str, Any]:
    """Return the JSON in the last line; empty if there is none, or only a part."""
    try:
        found: dict[str, Any] = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return found


@dataclass
class End:
    """What we know about a rank, or a whole node (rank ``None``), and its end.

    Attributes:
        node: The node's name.
        rank: Global rank.
        order: When the end became known; smaller is earlier.
        code: Exit code; 128 + the signal's number after a signal; ``None`` while it runs.
        reason: The reason known without the exception: the signal, or the end of the node.
        printed: The exception that ended the rank.
        is_ours: Whether ``ddprun`` may have ended it; then ``reason`` omits the signal, which means nothing.
        ended_by: The name of the signal that ended it.
        wrote: The last bytes of its standard error, ``e``, of its threads' stacks, ``s``, and of its record, ``f``.
        over_since: When it was heard that its program is over; infinite until then.
        said: The last line of its record. ``ready``: it is ready to join; ``stores``: where processes meet, see
            environment.NEWS; ``kept_by``: the names of the threads that keep it running, if no exception ended the
            program; ``if_done``: what to say if the job is done, with exit code 0.
        is_preempted: Whether it has written its checkpoint, and only ends.
    """

    node: str
    rank: int | None
    order: float = math.inf
    code: int | None = None
    reason: str | None = None
    printed: Record | None = None
    is_ours: bool = False
    ended_by: str | None = None
    wrote: dict[str, bytes] = field(default_factory=dict)
    over_since: float = math.inf
    said: dict[str, Any] = field(default_factory=dict)
    is_preempted: bool = False

    def hear(self, stream: str, data: bytes) -> None:
        """Take what the rank has written to a stream other than its standard output."""
        self.wrote[stream] = (self.wrote.get(stream, b"") + data)[-TAIL:]
        if stream != "f":
            return
        record, self.said = read_record(self.text("f"), 0.0), _last_json(self.text("f"))
        self.is_preempted = self.is_preempted or "preempted" in self.said
        if self.said.get("kept_by") or (record and record.is_over):
            self.over_since = min(self.over_since, time.monotonic())
            self.printed = replace(record, began=self.over_since) if record else None

    def is_kept(self, now: float, patience: float) -> bool:
        """Whether it runs too long after its program: a fifth of ``patience``, unless it has said what keeps it."""
        return now - self.over_since >= (0.0 if self.said.get("kept_by") else patience / 5)

    def describe_wait(self, patience: float) -> str:
        """Say why a rank whose program is over still runs, and how long ddprun waits for its end."""
        if names := self.said.get("kept_by"):
            which = f"its thread{'s' if names[1:] else ''} {', '.join(names)}"
            return f"{self} is over, but still runs: {which} must end, too. Join them, or make them daemon threads"
        ends = "Its process has not ended yet, as Python, threads, child processes or exit handlers take time; "
        ends += f"ddprun waits up to {patience:g} s for it"
        why = textwrap.shorten((self.told or "").partition("\n")[0].rstrip(".:"), _SHORT, placeholder=" ...")
        return f"{self} has failed: {why}{'' if why.endswith('.') else '.'} {ends}"

    def fail(self) -> None:
        """Count a rank whose program is over as ended, with Python's exit code for an exception."""
        self.code, self.order = 1, time.monotonic()

    def take(self, code: int, signal: str | None, now: float, is_ending: bool, stopped: float) -> None:
        """Take how a rank has ended, at ``now`` on its host's monotonic clock.

        Args:
            is_ending: Whether ``ddprun`` had ended the job, which may be the reason.
            stopped: The seconds after which it was killed because it was stopped; else 0.
        """
        self.code, self.ended_by, self.order = code, signal, time.monotonic()
        self.printed = read_record(self.text("f"), now - self.order)
        self.is_ours = is_ending and signal in (None, "SIGINT", "SIGTERM", "SIGKILL")
        if self.is_ours and signal and self.is_preempted:  # Python's end has taken longer than --grace
            self.code = EXIT_PREEMPTED
        # C++ aborts after an exception that ends the interpreter.
        if signal and not self.is_ours and not (signal == "SIGABRT" and self.printed):
            by = f"ddprun, as it was stopped (by SIGSTOP, say) for {stopped:g} s" if stopped else signal
            self.reason = f"killed by {by}"

    def text(self, kind: str) -> str:
        """Return the last output of a kind: a key of ``wrote``."""
        return self.wrote.get(kind, b"").decode(errors="surrogateescape")

    @property
    def lines(self) -> list[str]:
        """The last lines of its standard error."""
        return self.text("e").replace("\r", "\n").splitlines()

    def __str__(self) -> str:
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, neither with code 0 nor preempted."""
        return self.code not in (None, 0, EXIT_PREEMPTED)

    @property
    def told(self) -> str | None:
        """Why it failed, even if only because another rank did; ``None`` if unknown."""
        return self.reason or (self.printed.reason if self.printed else None)

    @property
    def blames(self) -> tuple[int, ...] | None:
        """The ranks that it names as the reason, if it failed only because of others; else ``None``."""
        return self.printed.blames if self.printed and self.reason is None else None

    @property
    def own_reason(self) -> str | None:
        """Why it failed, unless another rank is the reason."""
        return self.told if self.blames is None else None

    @property
    def follows(self) -> bool:
        """Whether it only failed because of others, whom it may not name."""
        is_broken = self.reason is None and self.printed is not None and self.printed.is_broken_connection
        return self.blames is not None or is_broken

    @property
    def began(self) -> float:
        if self.reason is None and self.printed is not None:
            return min(self.order, self.printed.began)
        return self.order


def last_words(lines: list[str]) -> list[str]:
    """Return a rank's last lines: its last traceback, if that is there from its beginning."""
    last = lines[-_TRACEBACK:]
    begins = [number for number, line in enumerate(last) if "Traceback (most recent call last):" in line]
    return last[begins[-1] :] if begins else lines[-_QUOTED:]


class Cause(NamedTuple):
    """The root cause: the rank (``None`` for a whole node), the exit code of the job, and the message."""

    rank: int | None
    code: int
    text: str


def first_cause(ends: Sequence[End], losses: Sequence[Sequence[End]] = ()) -> Cause | None:
    """Return the failure that came first, however late its rank ended; ``None`` if nothing has failed.

    A rank is a consequence if it blames another one, or was ended on purpose. Errors that blame other ranks name the
    rank they waited for: that rank counts even if it has left with code 0, or still runs.

    Args:
        losses: Ends that the job has survived, in order. One is the cause only if a later failure follows from it.
    """
    if (first := _first(ends)) is None:
        return None
    votes = _votes(ends)
    blamed = [lost for lost in losses if any(end.rank in votes for end in lost)]
    if lost := blamed or (losses[-1:] if first.follows else []):
        return first_cause([*ends, *chain.from_iterable(lost)])
    others = [end.code for end in [first, *ends] if end.code and end.has_failed and not end.is_ours]
    code = next(iter(others), first.code if first.code and first.has_failed else 1)
    return Cause(first.rank, code, _text(first, ends, first.rank in votes))


def _first(ends: Sequence[End]) -> End | None:
    votes = _votes(ends)
    failed = [end for end in ends if end.has_failed or end.rank in votes]
    first = min(
        failed, key=lambda end: (_weight(end, ends, votes), -votes[end.rank], end.rank is None, end.began), default=None
    )
    if first is not None and first.printed and _are_alike(first, ends):  # rank 0's traceback is on the terminal
        return replace(min(ends, key=lambda end: end.rank or 0), code=first.code)  # it may have been ended meanwhile
    return first


def _are_alike(first: End, ends: Sequence[End]) -> bool:
    """Whether all ranks have failed for the same reason."""
    return len(ends) > 1 and all(
        end.has_failed and end.told == first.told and (end.printed or end.code == first.code) for end in ends
    )


def _votes(ends: Sequence[End]) -> Counter[int | None]:
    """Count how many ranks blame each rank that does not blame another one itself."""
    tellers = {end.rank: end.blames for end in ends if end.blames is not None}
    return Counter(rank for blamed in tellers.values() for rank in set(blamed) - tellers.keys())


def _weight(end: End, ends: Sequence[End], votes: Counter[int | None]) -> int:
    """Return how doubtful it is that this end came first; 0 is certain."""
    if end.rank is None:
        is_missed = any(other.node == end.node and other.rank in votes for other in ends)
        return 5 if end.is_ours and not is_missed else 0
    if end.rank in votes:
        return 0 if end.own_reason is not None else 1
    if end.is_ours:
        return 2 if _had_failed_before(end, ends) else 5
    if end.follows:  # a rank that exits breaks connections, perhaps long before its own end
        return 5 if end.blames is not None else 4
    return 3 if end.own_reason is None else 0


def _had_failed_before(end: End, ends: Sequence[End]) -> bool:
    """Whether a rank, although it ended late, had an exception of its own before the first failure became known."""
    ordered = min((other.order for other in ends if other.has_failed and not other.is_ours), default=0.0)
    return end.own_reason is not None and 0 < (end.code or 0) < 128 and end.began < ordered


def _text(first: End, ends: Sequence[End], is_named: bool) -> str:
    said = next((line.strip() for line in reversed(first.lines) if line.strip() and not _LOGGED.match(line)), "")
    silent = f"no exception ended it; its last output: {said[:_LINE]}" if said else "no exception was printed"
    reason = _short(first.told or silent)
    if first.rank is None:
        return f"{first}: {reason}"
    if first.has_failed and not (is_named and first.is_ours):
        all_have = (
            ", like every rank," if _are_alike(first, ends) or "MismatchError" in reason.partition(":")[0] else ""
        )
        gone = [f"{end} exited with code {end.code}" for end in ends if end.code in (0, EXIT_PREEMPTED)]
        before = f". Before, {', '.join(gone)}" if gone and first.follows else ""
        return f"{first}{all_have} failed with exit code {first.code}: {reason}{before}"
    how = f"exited with code {first.code}" if first.code in (0, EXIT_PREEMPTED) else "failed"
    if first.printed is not None:
        return f"{first} {how}: {_short(first.printed.reason)}"
    says = min((end for end in ends if first.rank in (end.blames or ())), key=lambda end: end.began)
    return f"{first} {how} first. {says} reports: {_short(says.told or '')}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
