"""Which of several failures came first, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_callbacks.launcher.tracebacks import Printed

_LONGEST = 4000  # characters of a reason


@dataclass(frozen=True)
class End:
    """What is known of the end of a rank, or of a whole node (rank ``None``).

    Attributes:
        node: Its name.
        rank: Number in the world.
        order: When the end became known; smaller is earlier.
        code: Exit code, 128 + the number of the signal if one ended it; ``None`` while it runs.
        reason: What is known without its standard error: the signal, or the end of the node.
        printed: The last exception that it has printed.
        is_ours: Whether it may have ended because ``ddprun``, or torchrun's agent, has ended it; then the signal says
            nothing, and is left out of ``reason``.
    """

    node: str
    rank: int | None
    order: float
    code: int | None = None
    reason: str | None = None
    printed: Printed | None = None
    is_ours: bool = False

    def __str__(self) -> str:
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"

    @property
    def teller(self) -> Printed | None:
        """What it says of another rank, if it has failed for that one only."""
        return self.printed if self.reason is None and self.printed and self.printed.peer else None

    @property
    def own_reason(self) -> str | None:
        """Why it failed by itself."""
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
    """What all else follows from: the node, the rank (``None`` for the node itself), the exit code of the job."""

    node: str
    rank: int | None
    code: int
    text: str

    def __str__(self) -> str:
        return self.text


def first_cause(ends: Sequence[End]) -> Cause | None:
    """The one that came first, however late it ended; ``None`` if nothing has failed.

    A rank that says that another one failed, or that was ended on purpose, is a consequence. Those who say so name the
    rank for which they have waited, in their own errors: it counts although it has left with code 0, or still runs.
    """
    votes = _votes(ends)
    failed = [end for end in ends if end.code or end.rank in votes]
    if not failed:
        return None
    first = min(failed, key=lambda end: (_weight(end, ends, votes), -votes[end.rank], end.rank is None, end.began))
    return _tell(first, ends, first.rank in votes)


def _votes(ends: Sequence[End]) -> Counter[int | None]:
    """How many ranks name each of those that do not name another one themselves."""
    tellers = {end.rank: end.teller for end in ends if end.teller is not None}
    named: Counter[int | None] = Counter()
    for rank, printed in tellers.items():
        if rank not in printed.blames:  # else it speaks of itself, too
            named.update(set(printed.blames) - tellers.keys())
    return named


def _weight(end: End, ends: Sequence[End], votes: Counter[int | None]) -> int:
    """How sure it is that this came first; 0 is sure."""
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
    """Whether a rank that ended by itself, although late, had printed its exception before all were to end."""
    ordered = min((other.order for other in ends if other.code and not other.is_ours), default=0.0)
    return end.own_reason is not None and 0 < (end.code or 0) < 128 and end.began < ordered


def _tell(first: End, ends: Sequence[End], is_named: bool) -> Cause:
    others = [end.code for end in ends if end.code and not end.is_ours]
    code = first.code if first.code and not first.is_ours else next(iter(others), first.code or 1)
    return Cause(first.node, first.rank, code, _text(first, ends, is_named))


def _text(first: End, ends: Sequence[End], is_named: bool) -> str:
    reason = _short(first.own_reason or (first.teller.reason if first.teller else "no exception was printed"))
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
