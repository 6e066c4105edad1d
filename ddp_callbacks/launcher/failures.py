"""Which of several failures was the first cause, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The last line of a traceback: the exception's qualified name, alone or with its message.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s.*)?")
_RANK = re.compile(r"\[rank\d+\]: ")  # which torch puts before each line of a traceback
_CONSEQUENCE = re.compile(r"(ddp_callbacks\.errors\.)?PeerError\b")


@dataclass(frozen=True)
class Failure:
    """The end of a rank, or of a whole node (rank ``None``).

    Attributes:
        node: Its name.
        rank: Number in the world.
        code: Exit code, 128 + the number of the signal if one ended it.
        reason: The exception, the signal, or what is known.
        order: When it became known; smaller is earlier.
    """

    node: str
    rank: int | None
    code: int
    reason: str
    order: float

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.node}: {self.reason}"
        return f"rank {self.rank} on {self.node} failed with exit code {self.code}: {self.reason}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The one that the others follow from.

    A rank that says itself that another one failed is a consequence, and so is one that was ended by SIGTERM; among the
    rest the first counts.
    """
    return min(failures, key=lambda failure: (_is_consequence(failure), failure.rank is None, failure.order))


def _is_consequence(failure: Failure) -> bool:
    return failure.code == 143 or bool(_CONSEQUENCE.match(failure.reason))


def exception_in(lines: Sequence[str]) -> str | None:
    """The exception with which the last traceback in these lines ends, with its message; ``None`` if there is none."""
    plain = [_RANK.sub("", line, count=1) for line in lines]
    starts = [i for i, line in enumerate(plain) if line.startswith("Traceback (most recent call last)")]
    after = plain[starts[-1] + 1 :] if starts else []
    return next((line for line in after if _EXCEPTION.match(line)), None)
