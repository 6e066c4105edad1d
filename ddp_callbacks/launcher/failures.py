"""Find out which of several failures came first, and describe it, from the records that the ranks write of theirs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TAIL = 1 << 14  # bytes to keep of each kind that a rank writes
_LONGEST = 4000  # maximum length of a reason
_PEER_ERROR = re.compile(r"(ddp_callbacks\.errors\.)?PeerError\b")
_OURS = re.compile(r"(ddp_callbacks\.errors\.)?(PeerError|MismatchError|RendezvousError|ConfigurationError)\b")
_MISMATCH = re.compile(r"(ddp_callbacks\.errors\.)?MismatchError\b")
_BROKEN = re.compile(r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|DistStoreError")
_CAUGHT = re.compile(r".*Caught \w+ (in .*)\.$")  # torch has raised the exception of a DataLoader's worker again
_NAMED = re.compile(r"rank (\d+)(?: \([^)]*\))?")
_HINTS = {
    "unexpected pos": "torch could not write a file: is its disk full?",
    "iostream error": "torch could not write a file: is its disk full?",
}


@dataclass(frozen=True)
class Record:
    """An exception that has ended a rank.

    Attributes:
        exceptions: The names and messages of its chain: the first one, and the last.
        began: When it was raised, on this machine's monotonic clock; infinite if unknown.
    """

    exceptions: tuple[str, ...]
    began: float

    @property
    def peer(self) -> str | None:
        """The text of the PeerError in it, if there is one: it only speaks of another rank."""
        text = next((text for text in self.exceptions if _PEER_ERROR.match(text)), None)
        if text is None:
            return None
        head, quotes, _ = text.partition("\nTraceback (most recent call last)")  # of the other rank
        return head.rpartition("\n")[0] if quotes else head.rstrip()

    @property
    def is_mutual(self) -> bool:
        """Whether every rank has raised it."""
        return bool(_MISMATCH.match(self.exceptions[-1]))

    @property
    def is_broken_connection(self) -> bool:
        """Whether it only means that another process is gone."""
        return any(_BROKEN.search(text.partition("\n")[0]) for text in self.exceptions)

    @property
    def reason(self) -> str:
        """The exception in a few words; this library's exceptions in full, since they name ranks and remedies."""
        if self.peer is not None:
            return self.peer
        if _OURS.match(self.exceptions[-1]):
            return self.exceptions[-1]
        first, last = _words(self.exceptions[0]), _words(self.exceptions[-1])
        text = last if len(self.exceptions) == 1 else f"{last} (after {first})"
        hint = next((hint for words, hint in _HINTS.items() if words in text), None)
        return text if hint is None else f"{text}. {hint}"

    @property
    def blames(self) -> tuple[int, ...]:
        """The ranks that a PeerError begins with, or else the first rank that it names."""
        message = (self.peer or "").partition(": ")[2]
        found: list[int] = []
        while match := _NAMED.match(message):
            found.append(int(match[1]))
            message = message[match.end() :].removeprefix(", ").removeprefix(" and ")
        other = _NAMED.search(message)
        return tuple(found) if found or other is None else (int(other[1]),)


def _words(text: str) -> str:
    """The first line; of the exception of a DataLoader's worker, its own."""
    line, _, rest = text.partition("\n")
    caught = _CAUGHT.match(line)
    return f"{rest.strip().rpartition(chr(10))[2]}, {caught[1]}" if caught and rest.strip() else line


def read_record(text: str, ahead: float) -> Record | None:
    """The record in the last line of ``text``; ``None`` if there is none. torch's ``@record`` writes another.

    Args:
        text: What the rank has written, JSON.
        ahead: Seconds by which the clock of the rank's host is ahead of this machine's.
    """
    try:
        found: dict[str, Any] = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        return None  # there is none, or it was not written whole
    if "exceptions" in found:
        return Record(tuple(found["exceptions"]), found["time"] - ahead)
    message = found["message"]
    return Record((str(message["message"] if isinstance(message, dict) else message),), math.inf)


@dataclass
class End:
    """What we know about a rank, or a whole node (rank ``None``), and its end.

    Attributes:
        node: Its name.
        rank: Global rank.
        order: When the end became known; smaller is earlier.
        code: Exit code; 128 + the signal's number after a signal; ``None`` while it runs.
        reason: The reason known without the exception: the signal, or the end of the node.
        printed: The exception that ended it.
        is_ours: Whether ``ddprun`` may have ended it; then ``reason`` omits the signal, which means nothing.
        said: The last line of its standard error, if it was no exception that ended it.
        ended_by: The name of the signal that ended it.
        wrote: The last bytes of its standard error, ``e``, of its threads' stacks, ``s``, and of its record, ``f``.
    """

    node: str
    rank: int | None
    order: float = math.inf
    code: int | None = None
    reason: str | None = None
    printed: Record | None = None
    is_ours: bool = False
    said: str = ""
    ended_by: str | None = None
    wrote: dict[str, bytes] = field(default_factory=dict)

    def text(self, kind: str) -> str:
        """What it wrote of a kind."""
        return self.wrote.get(kind, b"").decode(errors="surrogateescape")

    def __str__(self) -> str:
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"

    @property
    def teller(self) -> Record | None:
        """Its message about another rank, if it failed only because of that one."""
        return self.printed if self.reason is None and self.printed and self.printed.peer else None

    @property
    def own_reason(self) -> str | None:
        """Why it failed, unless another rank is the reason."""
        if self.reason is not None:
            return self.reason
        return self.printed.reason if self.printed and not self.printed.peer else None

    @property
    def began(self) -> float:
        if self.reason is None and self.printed is not None:
            return min(self.order, self.printed.began)
        return self.order


class Cause(NamedTuple):
    """The root cause: the node, the rank (``None`` for the node itself), and the exit code of the job."""

    node: str
    rank: int | None
    code: int
    text: str


def first_cause(ends: Sequence[End]) -> Cause | None:
    """The failure that came first, however late it ended; ``None`` if nothing has failed.

    A rank is a consequence if it blames another one, or was ended on purpose. Errors that blame other ranks name the
    rank they waited for: that rank counts even if it has left with code 0, or still runs.
    """
    votes = _votes(ends)
    failed = [end for end in ends if end.code or end.rank in votes]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_weight(end, ends, votes), -votes[end.rank], end.rank is None, end.began))
    return _tell(first, ends, first.rank in votes)


def _votes(ends: Sequence[End]) -> Counter[int | None]:
    """Count how many ranks blame each rank that does not blame another one itself."""
    tellers = {end.rank: end.teller for end in ends if end.teller is not None}
    named: Counter[int | None] = Counter()
    for rank, printed in tellers.items():
        if rank not in printed.blames:  # otherwise it also blames itself
            named.update(set(printed.blames) - tellers.keys())
    return named


def _weight(end: End, ends: Sequence[End], votes: Counter[int | None]) -> int:
    """How certain it is that this came first; 0 is certain."""
    if end.rank is None:
        is_missed = any(other.node == end.node and other.rank in votes for other in ends)
        return 4 if end.is_ours and not is_missed else 0
    if end.rank in votes:
        return 0 if end.own_reason is not None else 1
    if end.is_ours:
        return 2 if _had_failed_before(end, ends) else 4
    if end.teller is not None:
        return 4
    if end.own_reason is None or (end.reason is None and end.printed and end.printed.is_broken_connection):
        return 3
    return 0


def _had_failed_before(end: End, ends: Sequence[End]) -> bool:
    """Whether a rank that ended by itself, although late, had printed its exception before we ended all ranks."""
    ordered = min((other.order for other in ends if other.code and not other.is_ours), default=0.0)
    return end.own_reason is not None and 0 < (end.code or 0) < 128 and end.began < ordered


def _tell(first: End, ends: Sequence[End], is_named: bool) -> Cause:
    others = [end.code for end in ends if end.code and not end.is_ours]
    code = first.code if first.code and not first.is_ours else next(iter(others), first.code or 1)
    return Cause(first.node, first.rank, code, _text(first, ends, is_named))


def _text(first: End, ends: Sequence[End], is_named: bool) -> str:
    silent = f"last output: {first.said}" if first.said else "no exception was printed"
    reason = _short(first.own_reason or (first.teller.reason if first.teller else silent))
    if first.rank is None:
        return f"{first}: {reason}"
    if first.code and not (is_named and first.is_ours):
        all_have = ", like every rank," if first.printed is not None and first.printed.is_mutual else ""
        return f"{first}{all_have} failed with exit code {first.code}: {reason}"
    how = "exited with code 0" if first.code == 0 else "failed"
    if first.printed is not None:
        return f"{first} {how}: {_short(first.printed.reason)}"
    says = min((end for end in ends if end.teller and first.rank in end.teller.blames), key=lambda end: end.began)
    assert says.teller is not None
    return f"{first} {how} first. {says} reports: {_short(says.teller.reason)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
