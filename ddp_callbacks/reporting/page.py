"""``report.html``: one file, without scripts or anything from a network, for light and dark, narrow and wide."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp_callbacks.reporting.summary import (
    SHOWN,
    advice,
    bandwidth_of,
    has_parts,
    in_bytes,
    in_digits,
    in_words,
    name_of,
    one_line,
    pace_of,
    parts_of,
    step_of,
)

_BARS = 64  # ranks to show
_TICKS = 12  # epochs to mark
_MEANING = (
    "Between steps: the optimizer (one process counts it as computing), checkpoints, callbacks, loggers. The exchange "
    "takes as long as the process waits that comes last; what others wait longer, they wait for slower ones. Waits in "
    "torch.distributed's own calls are not told apart."
)
_BOUND = (
    "At most so many times as fast as one: as if a process alone took as long for each sample, and none waited. ddprun "
    "predict measures it."
)
_MARKS = "Grey: an epoch begins. Green: a validation begins. Orange: see below."
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --text: #24292f; --faint: #667; --rule: #d8dce2; --line: #2f66b0;
  --p0: #4a90d9; --p1: #d9822b; --p2: #1fa29a; --p3: #c0504d; --p4: #9a6fc4; --p5: #6a9e3f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --text: #e3e6ea; --faint: #9aa4b0; --rule: #343b44;
  --line: #7ab0f0; --p0: #3d7fc4; --p1: #c87722; --p2: #1b8f88; --p3: #b5534f; --p4: #8a63b5; --p5: #5e8d38; } }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } .faint { color: var(--faint); font-size: .87rem; } .lead { font-size: 1.08rem; }
.rank { display: grid; grid-template-columns: 11rem 1fr; gap: .6rem; align-items: center; margin: .25rem 0; }
.bar { display: flex; height: 1.3rem; border-radius: 3px; overflow: hidden; background: var(--rule); }
.bar i { display: block; } .key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .5rem 0; }
.key span::before { content: ""; display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; background: var(--c); }
.wide { overflow-x: auto; } table { border-collapse: collapse; } td, th { text-align: right; padding: .15rem .6rem;
  border-bottom: 1px solid var(--rule); } td { white-space: nowrap; } th { overflow-wrap: normal; font-weight: normal;
  color: var(--faint);  vertical-align: bottom; } td:first-child, th:first-child { text-align: left;
  padding-left: 0; } .left td { text-align: left; vertical-align: top; } .left td + td { white-space: normal; }
svg { display: block; width: 100%; height: 11rem; border-bottom: 1px solid var(--faint); border-left: 1px solid
  var(--faint); } .axis { display: flex; justify-content: space-between; } ol, ul { padding-left: 1.3rem; }
@media (max-width: 30rem) { .rank { grid-template-columns: 1fr; gap: .1rem; margin: .5rem 0; } }
"""


def render(data: Mapping[str, Any]) -> str:
    """Return the page of a job, from :meth:`.collector.Collector.data`."""
    command = escape(" ".join(data["command"]))
    lead = escape(one_line(data) or "No rank has trained").replace(" %", "&nbsp;%")
    notes = [(in_words(when), text) for when, kind, text in data["events"] if kind == "note"]
    body = [
        f"<h1>{command}</h1><p class=faint>ddprun, {data['date']}, {in_words(data['seconds'])}</p>",
        f"<p class=lead>{lead}.</p>",
        *([f"<p class=faint>{_BOUND}</p>"] if len(data["ranks"]) > 1 else ()),
        *(_section("Where the time went", _bars(data)) if has_parts(data) else ()),
        *_section("What to try next", _list(advice(data))),
        *_section("Steps per second", _chart(data)),
        *(_section("What happened", _table(notes, "left")) if notes else ()),
        *_section("Numbers", _numbers(data)),
        *_section("Settings and versions", _table(_settings(data), "left")),
    ]
    text = "\n".join(body)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{command}: where the time went</title><style>{_STYLE}</style>\n<body>{text}</body></html>\n"
    )


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    yield from lines


def _list(texts: Sequence[str]) -> Iterator[str]:
    yield f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ol>"


def _table(rows: Sequence[Sequence[str]], kind: str, heads: Sequence[str] = ()) -> Iterator[str]:
    first = "".join(f"<th>{name}</th>" for name in heads)
    lines = [first, *("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)]
    yield f"<div class=wide><table class='{kind}'>{''.join(f'<tr>{line}</tr>' for line in lines if line)}</table></div>"


def _bars(data: Mapping[str, Any]) -> Iterator[str]:
    parts = parts_of(data)
    used = [name for name in SHOWN if any(own[name] for own in parts)]
    keys = (f"<span style='--c: var(--p{SHOWN.index(name)})'>{name}</span>" for name in used)
    yield f"<div class=key>{''.join(keys)}</div>"
    yield f"<p class=faint>{_MEANING}</p>"
    longest, pace = max((sum(own.values()) for own in parts), default=0.0) or 1.0, pace_of(data)
    for place, own in list(enumerate(parts))[:_BARS]:
        pieces = "".join(_piece(name, own[name], longest) for name in used)
        mark = " ◀ sets the pace" if place == pace else ""
        yield f"<div class=rank><span>{escape(name_of(data, place))}{mark}</span><div class=bar>{pieces}</div></div>"
    if len(parts) > _BARS:
        yield f"<p class=faint>and {len(parts) - _BARS} more</p>"


def _piece(name: str, seconds: float, longest: float) -> str:
    share = f"{seconds / longest:.1%}"
    style = f"width:{share};background:var(--p{SHOWN.index(name)})"
    return f"<i title='{name}: {in_words(seconds)}, {share}' style='{style}'></i>"


def _chart(data: Mapping[str, Any]) -> Iterator[str]:
    samples = data["ranks"][0]["samples"]
    rates = [
        (before, now, (steps - done) / (now - before))
        for (before, done), (now, steps) in pairwise(samples)
        if now > before and steps >= done
    ]
    if not rates:
        yield "<p class=faint>The job was too short to show its course.</p>"
        return
    begin, end, most = samples[0][0], samples[-1][0], max(rate for *_, rate in rates) or 1.0
    points = " ".join(
        f"{_across(when, begin, end)},{200 - 190 * rate / most:.1f}" for *both, rate in rates for when in both
    )
    yield f"<p class=faint>of {name_of(data, 0)}, at most {most:.3g}. {_MARKS}</p>"
    marks = "".join(_mark(_across(when, begin, end), kind) for when, kind, _ in _thinned(data["events"]))
    style = "fill='none' stroke='var(--line)' stroke-width='2' vector-effect='non-scaling-stroke'"
    course = f"{marks}<polyline points='{points}' {style}/>"
    yield f"<svg viewBox='0 0 1000 200' preserveAspectRatio='none' role='img'>{course}</svg>"
    yield f"<div class='axis faint'><span>{in_words(begin)}</span><span>{in_words(end)}</span></div>"


def _across(when: float, begin: float, end: float) -> str:
    return f"{min(max(1000 * (when - begin) / (end - begin), 0), 1000):.1f}"


def _mark(x: str, kind: str) -> str:
    colour = {"epoch": "var(--rule)", "validation": "var(--p5)"}.get(kind, "var(--p1)")
    return f"<line x1='{x}' x2='{x}' y1='0' y2='200' stroke='{colour}' vector-effect='non-scaling-stroke'/>"


def _thinned(events: Sequence[Any]) -> Iterator[Any]:
    """Yield the events, of epochs and validations only so many as can be told apart."""
    counts, seen = Counter(kind for _, kind, _ in events), Counter[str]()
    for event in events:
        kind = event[1]
        if kind == "note" or seen[kind] % -(-counts[kind] // _TICKS) == 0:
            yield event
        seen[kind] += 1


def _numbers(data: Mapping[str, Any]) -> Iterator[str]:
    shown = SHOWN if has_parts(data) else ()
    head = ("", "steps", "ms per step", *shown, "memory, MB", "GPU, MB")
    rows = []
    for place, (rank, own) in enumerate(zip(data["ranks"], parts_of(data), strict=True)):
        each = [f"{own[name]:.1f} s" for name in shown]
        memory = [f"{size:,}" for size in rank["memory"]] + ["-"] * (2 - len(rank["memory"]))
        rows.append((name_of(data, place), f"{rank['steps']:,}", f"{step_of(rank) * 1e3:.1f}", *each, *memory))
    yield from _table(rows[:_BARS], "", head)
    nbytes, rate = data["ranks"][0]["gradients"][0], bandwidth_of(data)
    at = f", exchanged in {in_digits(nbytes / rate * 1e3)} ms or less" if rate else ""
    what = "gradients in each step" if "sync" not in data["ranks"][0]["about"].get("settings", {}) else "parameters"
    yield f"<p>{in_bytes(nbytes)} of {what}{at}.</p>"


def _settings(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    about = data["ranks"][0]["about"]
    names = dict.fromkeys(rank["node"] for rank in data["ranks"])
    nodes = {name: [rank for rank in data["ranks"] if rank["node"] == name] for name in names}
    rows = [(name, str(value)) for name, value in about.get("settings", {}).items()]
    rows += list(about.get("versions", {}).items())
    for node, ranks in nodes.items():
        own = ranks[0]["about"]
        threads = f"{own.get('threads', '?')} thread{'s' * (own.get('threads') != 1)} each"
        rows.append((f"node {node}", f"{len(ranks)} rank{'s' * (len(ranks) > 1)}, {threads}, {own.get('device', '')}"))
    return rows


def write(data: Mapping[str, Any], folder: Path) -> str:
    """Write ``report.html`` and its data, ``report.json``, into ``folder``; return a line about it.

    It is empty if no rank has trained: nothing is written then. A full disk must not end the job.
    """
    line = one_line(data)
    if line:
        with suppress(OSError):
            (folder / "report.json").write_text(json.dumps(data))
            (folder / "report.html").write_text(render(data))
            line += f"; {folder}/report.html"
    return line
