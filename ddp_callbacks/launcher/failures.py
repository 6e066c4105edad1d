"""Find out which of several failures came first, and describe it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_callbacks.launcher.record import Record

_LONGEST = 4000  # maximum length of a reason


@dataclass(frozen=True)
class End:
    """What we know about the end of a rank, or of a whole node (rank ``None``).

    Attributes:
        node: Its name.
        rank: Global rank.
        order: When the end became known; smaller is earlier.
        code: Exit code; 128 + the signal's number after a signal; ``None`` while it runs.
        reason: The reason known without the exception: the signal, or the end of the node.
        printed: The exception that ended it.
        is_ours: Whether ``ddprun`` may have ended it; then ``reason`` omits the signal, which means nothing.
        said: The last line of its standard error, if it was no exception that ended it.
    """

    node: str
    rank: int | None
    order: float
    code: int | None = None
    reason: str | None = None
    printed: Record | None = None
    is_ours: bool = False
    said: str = ""

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


@dataclass(frozen=True)
class Cause:
    """The root cause: the node, the rank (``None`` for the node itself), and the exit code of the job."""

    node: str
    rank: int | None
    code: int
    text: str

    def __str__(self) -> str:
        return self.text


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
