"""``trace.json``: what all ranks do in some steps, on one clock, for Perfetto and chrome://tracing.

[Note: one clock]
All processes of a machine share its clock. Those of two machines began to count at different moments. A sum ends on all
ranks at the same moment, but for a message's way, so the ends of the last sum of each step tell the difference.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

FILE = "trace.json"
SKIPPED = 3  # steps before the traced ones: they compile, allocate, and compare the first batch
_SUM = "bucket "
_AT_ONCE = 64  # spans in one message, which a pipe takes whole


class Span(NamedTuple):
    """What a rank did from ``begin`` to ``end``, in microseconds of its machine's clock."""

    step: int
    name: str
    begin: int
    end: int


class Tracer:
    """Collects the spans of a rank's steps, from the fourth one on.

    Args:
        steps: How many to trace; 0 for none.
    """

    def __init__(self, steps: int) -> None:
        self._last, self._is_on = SKIPPED + steps, steps > 0
        self._spans: list[tuple[str, int, int]] = []
        self._begins: dict[int, float] = {}  # of the sums of buckets

    def add(self, name: str, begin: float, end: float) -> None:
        """Add a span, in seconds of this machine's clock."""
        if self._is_on:
            self._spans.append((name, round(begin * 1e6), round(end * 1e6)))

    def begin_sum(self, bucket: int, now: float) -> None:
        """Note that the sum of a bucket begins."""
        self._begins[bucket] = now

    def end_sum(self, bucket: int, now: float) -> None:
        """Note that this rank has waited for the sum of a bucket."""
        if bucket in self._begins:
            self.add(f"{_SUM}{bucket}", self._begins.pop(bucket), now)

    def end_step(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the messages about the step that ends now."""
        taken, self._spans, self._is_on = self._spans, [], self._is_on and step < self._last
        if SKIPPED < step <= self._last:
            for first in range(0, len(taken), _AT_ONCE):
                yield {"step": step, "spans": taken[first : first + _AT_ONCE]}


Traced = Mapping[int, tuple[str, list[Span]]]
"""For each rank, its node and its spans."""


def write(traced: Traced, folder: Path) -> str:
    """Write the trace into ``folder``, if there is one; return a line about it. A full disk must not end the job."""
    steps = len({span.step for _, spans in traced.values() for span in spans})
    if not steps:
        return f"no trace: it begins with step {SKIPPED + 1}, and no process took so many steps"
    with suppress(OSError):
        (folder / FILE).write_text(json.dumps({"traceEvents": list(_events(traced)), "displayTimeUnit": "ms"}))
    return f"the trace of {steps} step{'s' * (steps > 1)}, for ui.perfetto.dev: {folder / FILE}"


def _events(traced: Traced) -> Iterator[dict[str, Any]]:
    """Yield the events of the `Trace Event Format`_: a process for each rank, and the sums apart from what it does.

    .. _Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    shifts = _shifts(traced)
    origin = min(span.begin + shifts[node] for node, spans in traced.values() for span in spans)
    for rank, (node, spans) in traced.items():
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {node}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        shift = shifts[node] - origin
        for step, name, begin, end in spans:
            common = {"name": name, "pid": rank, "tid": 0, "args": {"step": step}}
            if name.startswith(_SUM):  # sums overlap
                same = common | {"cat": "sum", "id": f"{rank}, {step}, {name}"}
                yield same | {"ph": "b", "ts": begin + shift}
                yield same | {"ph": "e", "ts": end + shift}
            else:
                yield common | {"cat": "step", "ph": "X", "ts": begin + shift, "dur": end - begin}


def _shifts(traced: Traced) -> dict[str, int]:
    """Return what to add to the clock of each node, see [Note: one clock]; without sums, all begin at once."""
    known: dict[str, tuple[int, dict[int, int]]] = {}  # of each node's first rank with spans
    for node, spans in traced.values():
        if spans and node not in known:
            ends = {span.step: span.end for span in spans if span.name.startswith(_SUM)}  # the last one stays
            known[node] = spans[0].begin, ends
    (first, ends), *_ = known.values()
    shifts = {}
    for node, (begin, own) in known.items():
        both = ends.keys() & own.keys()
        shifts[node] = round(statistics.median(ends[step] - own[step] for step in both)) if both else first - begin
    return shifts
