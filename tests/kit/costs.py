"""What the running test has started so far. Examples make hosts, too, so this needs no pytest."""

from __future__ import annotations

from collections import Counter

costs = Counter[str]()


def count(kind: str, number: int = 1) -> None:
    """Note that the running test starts something: ``ranks``, ``warm`` or ``cold`` interpreters, ``hosts``."""
    costs[kind] += number
    if kind == "ranks":
        costs["ranks at once"] = max(costs["ranks at once"], number)
