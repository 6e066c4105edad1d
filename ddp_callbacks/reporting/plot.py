"""Draw a prediction as SVG, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ddp_callbacks.reporting.cost import EXACT
from ddp_callbacks.reporting.prediction import pays_until

_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 52, 700, 330
_LEAST = 0.5  # times as fast, where the upright axis begins
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .faint { fill: #667; } .paper { fill: #fff; }
path { fill: none; stroke-width: 2; } .rule { stroke: #d8dce2; stroke-width: 1; } .ideal { stroke: #99a;
  stroke-dasharray: 4 4; } .c0 { stroke: #2f66b0; } .c1 { stroke: #1fa29a; } .c2 { stroke: #d9822b; }
.c3 { stroke: #9a6fc4; } .dot { fill: #2f66b0; stroke: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #e3e6ea; } .faint { fill: #9aa4b0; } .paper { fill: #14181d; }
  .rule { stroke: #343b44; } .c0 { stroke: #7ab0f0; } .dot { fill: #7ab0f0; stroke: #14181d; } }
"""


def draw(found: Mapping[str, Any], title: str) -> str:
    """Return the picture: times as fast as one machine by machines, what was measured, and where it stops paying."""
    rows, last = found["predicted"], pays_until(found)
    exact, *others = rows[0]["ways"]
    curves = {"batch divided": (exact, "divided"), "batch grows": (exact, "grown")}
    curves |= {f"{name}, batch divided": (name, "divided") for name in others}
    shapes = [*_axes([row["machines"] for row in rows]), _curve([(n, n) for n in (1, rows[-1]["machines"])], "ideal")]
    for index, (name, (way, kind)) in enumerate(curves.items()):
        shapes.append(_curve([(row["machines"], row["ways"][way][kind]) for row in rows], f"c{index}"))
        shapes.append(f"<path class='c{index}' d='M70 {_TOP + 16 + 20 * index} h24'/>")
        shapes.append(_text(100, _TOP + 20 + 20 * index, name))
    if last["machines"] > 1:
        x, y = _at(last["machines"], last["ways"][EXACT.name]["divided"])
        shapes.append(f"<path class='ideal' d='M{x} {y} V{_BOTTOM}'/>")
        shapes.append(_text(x + 6, _BOTTOM - 8, "pays until here"))
    for run in found["measured"]:
        if run["processes"] == run["machines"] * found["step"]["processes"]:
            x, y = _at(run["machines"], run["times"])
            shapes.append(f"<circle class='dot' cx='{x}' cy='{y}' r='5'/>")
    body = "\n".join(shapes)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 720 384' role='img'>\n<title>{escape(title)}</title>"
    return f"{head}\n<style>{_STYLE}</style>\n<rect class='paper' width='720' height='384' rx='8'/>\n{body}\n</svg>\n"


def _axes(machines: Sequence[int]) -> Iterator[str]:
    yield _text(_LEFT, 24, "times as fast as one machine (dashed: the number of machines)")
    yield _text(_LEFT, 42, f"Dots: measured. Lines: predicted; at the bottom {_LEAST} or less.", "class='faint'")
    for number in machines:
        if number & (number - 1) == 0:
            x, y = _at(number, number)
            yield f"<path class='rule' d='M{_LEFT} {y} H{_RIGHT}'/>"
            yield _text(x, _BOTTOM + 20, f"{number:,}", "text-anchor='middle' class='faint'")
            yield _text(_LEFT - 8, y + 4, f"{number:,}", "text-anchor='end' class='faint'")
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "machines", "text-anchor='middle'")


def _at(machines: float, times: float) -> tuple[float, float]:
    """Return the place of a point; both axes are logarithmic, to 1,024, and the upright one begins at a half."""
    across, up = math.log2(machines) / 10, math.log2(times / _LEAST) / 11
    return round(_LEFT + (_RIGHT - _LEFT) * across, 1), round(_BOTTOM - (_BOTTOM - _TOP) * up, 1)


def _curve(points: Sequence[tuple[float, float]], kind: str) -> str:
    places = [_at(machines, max(times, _LEAST)) for machines, times in points]
    return f"<path class='{kind}' d='M{' L'.join(f'{x} {y}' for x, y in places)}'/>"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' {more}>{escape(text)}</text>"
