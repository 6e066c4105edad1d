"""Draw the figures that show how things are arranged: ``python docs/_static/drawings.py``.

two_nodes.svg       the processes and connections of a job on two nodes
layers.svg          the modules of the package, by what they import
batch.svg           how a batch is divided
hierarchical.svg    the hierarchical all-reduce beside a ring
badges.svg          what the package runs with
report_even.svg, report_late.svg  where the time of two jobs went, from reports.json
predicted.svg       what ddprun predict says, from the benchmark of the cost
"""

from __future__ import annotations

import ast
import graphlib
import json
import re
import tomllib
from functools import partial
from html import escape
from pathlib import Path

from ddp_callbacks import slice_bounds
from ddp_callbacks.reporting import plot, summary
from ddp_callbacks.versions import SUPPORTED

HERE = Path(__file__).parent
WIDTH = 760
TEXT, FAINT, LINE, PAPER = "#2b3038", "#666d78", "#9aa0a8", "#ffffff"
GREY, BLUE, DARK, ORANGE, GREEN, TEAL, PURPLE = (
    *("#8a8f98", "#4a90d9", "#2f66b0", "#d9822b", "#4d9e4d", "#1fa29a", "#9a6fc4"),
)
RANKS = (BLUE, ORANGE, GREEN, PURPLE)


class Drawing:
    """An SVG of :data:`WIDTH` on paper of its own, so that it can be read on any page."""

    def __init__(self, height: float, title: str) -> None:
        self._height, self._title = height, title
        self._shapes: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = 13, colour: str = TEXT, more: str = "") -> None:
        self._shapes.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{colour}' {more}>{escape(text)}</text>"
        )

    def middle(self, x: float, y: float, text: str, size: int = 13, colour: str = TEXT, more: str = "") -> None:
        self.text(x, y, text, size, colour, f"text-anchor='middle' {more}")

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, lines: str = "", fill: float = 0.14
    ) -> None:
        """With lines of text in its middle, the first one bold where there are more."""
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5' fill='{colour}' "
            f"fill-opacity='{fill}' stroke='{colour}' stroke-width='1.2'/>"
        )
        rows = lines.split("\n") if lines else []
        for index, row in enumerate(rows):
            top = y + height / 2 + 4.5 + 17 * (index - (len(rows) - 1) / 2)
            bold = "font-weight='600'" if index == 0 and len(rows) > 1 else ""
            self.middle(x + width / 2, top, row, 13 if index == 0 else 12, TEXT, bold)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        self._shapes.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='8' fill='none' "
            f"stroke='{LINE}' stroke-dasharray='5 4'/>"
        )
        self.text(x + 12, y + 21, title, more="font-weight='600'")

    def arrow(self, path: str, colour: str = FAINT, ends: str = "end", more: str = "") -> None:
        """Along an SVG path, with a head at its ``end``, or at ``both`` ends."""
        heads = f"marker-end='url(#{colour[1:]})'" + (f" marker-start='url(#{colour[1:]})'" if ends == "both" else "")
        self._shapes.append(f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.6' {heads} {more}/>")

    def shape(self, shape: str) -> None:
        self._shapes.append(shape)

    def line(self, path: str, colour: str = LINE, more: str = "") -> None:
        self._shapes.append(f"<path d='{path}' fill='none' stroke='{colour}' {more}/>")

    def svg(self) -> str:
        body = "\n".join(self._shapes)
        heads = "".join(_head(colour) for colour in (FAINT, TEAL, *RANKS) if f"url(#{colour[1:]})" in body)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {self._height:g}' role='img' "
            f"font-family='system-ui, sans-serif'>\n<title>{escape(self._title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='{WIDTH}' height='{self._height:g}' rx='8' fill='{PAPER}'/>\n{body}\n</svg>\n"
        )


def _head(colour: str) -> str:
    return (
        f"<marker id='{colour[1:]}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' "
        f"markerUnits='userSpaceOnUse' orient='auto-start-reverse'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{colour}'/></marker>"
    )


# --- the drawings -----------------------------------------------------------------------------------------------------


def two_nodes() -> str:
    drawing = Drawing(504, "The processes and connections of a job on two nodes with two ranks each")
    drawing.box(230, 14, 300, 46, GREY, "your terminal\nddprun -H node1:2,node2:2 train.py")
    for node, left in enumerate((16, 452)):
        centre = left + 146
        drawing.frame(left, 112, 292, 378, f"node{node + 1}")
        drawing.box(centre - 90, 144, 180, 46, GREY, "node program\nstarts and ends the ranks")
        if node == 0:
            drawing.arrow(f"M{centre} 191 V223")
            drawing.box(centre - 60, 225, 120, 46, DARK, "store\nranks meet here")
        for local in range(2):
            rank, x = 2 * node + local, left + 18 + 146 * local
            drawing.arrow(f"M{centre + (-70, 70)[local]} 191 L{x + 55} 314")
            drawing.box(x, 316, 110, 46, RANKS[rank], f"rank {rank}\ntrain.py")
            drawing.arrow(f"M{x + 55} 364 V425", TEAL, "both")
        drawing.box(left + 18, 427, 256, 46, TEAL, "shared memory\nsums inside the node")
    drawing.arrow("M330 61 C320 92 162 78 162 142", ends="both")
    drawing.arrow("M430 61 C440 92 598 78 598 142", ends="both")
    for x in (150, 610):
        drawing.middle(x, 86, "ssh", 12, FAINT)
    drawing.middle(380, 82, "commands out,", 12, FAINT)
    drawing.middle(380, 98, "output and failures back", 12, FAINT)
    drawing.arrow("M507 325 C460 270 420 248 224 248", more="stroke-dasharray='4 3'")
    drawing.middle(380, 240, "TCP, from all ranks", 12, FAINT)
    for one, other in ((144, 470), (290, 616)):  # equal local ranks
        drawing.arrow(f"M{one} 352 C{one + 70} 408 {other - 70} 408 {other} 352", ORANGE, "both")
    for row, text in enumerate(("gradients", "between nodes", "by gloo")):
        drawing.middle(380, 328 + 16 * row, text, 12, FAINT)
    return drawing.svg()


PACKAGE = HERE.parents[1] / "ddp_callbacks"
LAUNCHER, ADAPTERS = ("auto", "launcher", "reporting"), ("lightning", "pytorch_lightning", "torchbearer", "_api")


def imports() -> dict[str, set[str]]:
    """What each module or folder of the package imports of the others, as its code says."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not name.startswith("__"):
            body = ast.parse(path.read_text()).body
            body += [node for each in body if isinstance(each, ast.If) for node in each.orelse]  # not for type checkers
            modules = [node.module for node in body if isinstance(node, ast.ImportFrom)]
            others = {str(module).split(".")[1] for module in modules if str(module).startswith("ddp_callbacks.")}
            found.setdefault(name, set()).update(others - {name})
    return found


def levels() -> list[list[str]]:
    """The modules and folders in levels: each imports only from lower ones, and stands as low as it can."""
    order, height = imports(), dict[str, int]()
    for name in graphlib.TopologicalSorter(order).static_order():
        height[name] = max((height[other] + 1 for other in order[name]), default=0)
    return [sorted(name for name in height if height[name] == level) for level in range(max(height.values()) + 1)]


def layers() -> str:
    """From the top to the bottom: what is used by whom."""
    rows = levels()
    drawing = Drawing(96 + 40 * len(rows), "The modules of the package in levels, by what they import")
    drawing.box(70, 14, 674, 28, GREY, "your script: a Trainer, a Trial, or your own loop", 0.05)
    for number, names in enumerate(rows):
        y = 52 + 40 * (len(rows) - 1 - number)
        drawing.text(20, y + 20, str(number), colour=FAINT)
        _row(drawing, 70, y, 674, names)
    text = "A module imports only from lower levels. Purple: the adapters. Blue: what ddprun runs."
    drawing.text(70, 76 + 40 * len(rows), text, 12, FAINT)
    return drawing.svg()


def _row(drawing: Drawing, x: float, y: float, width: float, names: list[str]) -> None:
    """Boxes side by side, each as wide as its name needs."""
    free = width - 10 * (len(names) - 1)
    lengths = [len(name) + 3 for name in names]
    for name, length in zip(names, lengths, strict=True):
        colour = PURPLE if name in ADAPTERS else DARK if name in LAUNCHER else TEAL
        drawing.box(x, y, free * length / sum(lengths), 30, colour, name)
        x += free * length / sum(lengths) + 10


def batch() -> str:
    """By the rule of the library itself."""
    cases = ((32, 2), (5, 2), (5, 4), (3, 4))
    drawing = Drawing(44 + 92 * len(cases), "How a batch is divided among the processes, and the weight of each")
    for index, (size, world_size) in enumerate(cases):
        _divided(drawing, 14 + 92 * index, size, world_size)
    rule = "gradient of the batch = sum over the ranks of weight \u00d7 gradient of the rank\u2019s mean loss"
    drawing.text(20, 24 + 92 * len(cases), rule, 13)
    return drawing.svg()


def _divided(drawing: Drawing, y: float, size: int, world_size: int) -> None:
    drawing.text(20, y + 20, f"{size} samples", more="font-weight='600'")
    drawing.text(20, y + 38, f"{world_size} processes", 12, FAINT)
    gap, step = 14, 18
    part = (600 - gap * (world_size - 1)) / world_size
    for rank in range(world_size):
        start, end = slice_bounds(size, rank, world_size)
        x, count = 140 + rank * (part + gap), end - start
        look = f"fill='{RANKS[rank]}'" if count else f"fill='none' stroke='{LINE}' stroke-dasharray='3 2'"
        for sample in range(max(count, 1)):
            drawing.shape(f"<rect x='{x + sample * step:g}' y='{y + 8:g}' width='15' height='15' rx='2' {look}/>")
        drawing.text(x, y + 44, f"rank {rank}: {count or 'none'}", 12)
        drawing.text(x, y + 61, f"weight {count}/{size}" if count else "padding, weight 0", 12, FAINT)


def hierarchical() -> str:
    drawing = Drawing(520, "A ring of all ranks beside the hierarchical all-reduce, and the bytes that each sends")
    _ring(drawing, 16)
    drawing.line("M368 16 V352")
    _two_levels(drawing, 388)
    drawing.line("M16 366 H744")
    _traffic(drawing, 390)
    return drawing.svg()


def _ring(drawing: Drawing, left: float) -> None:
    """Ranks 0 and 1 on the first node, 3 and 2 on the second: around."""
    drawing.text(left, 32, "A ring of all ranks", more="font-weight='600'")
    _nodes(drawing, left, ((0, 1), (3, 2)))
    for x, way in ((left + 66, "M{x} 143 V197"), (left + 270, "M{x} 197 V143")):
        drawing.arrow(way.format(x=f"{x:g}"))
    drawing.arrow(f"M{left + 222:g} 120 H{left + 116:g}", ORANGE)
    drawing.arrow(f"M{left + 114:g} 222 H{left + 220:g}", ORANGE)
    for y in (110, 240):
        drawing.middle(left + 168, y, "1.5 S", 13, more="font-weight='600'")
    for row, text in enumerate(
        ("Each rank sends 2\u00b7(4\u22121)/4 \u00b7 S = 1.5 S to the next,", "so 1.5 S leave each node.")
    ):
        drawing.text(left, 296 + 18 * row, text, 12, FAINT)


def _two_levels(drawing: Drawing, left: float) -> None:
    drawing.text(left, 32, "Hierarchical all-reduce", more="font-weight='600'")
    _nodes(drawing, left, ((0, 1), (2, 3)))
    for x in (left + 66, left + 270):
        drawing.arrow(f"M{x:g} 143 V197", TEAL, "both")
    for y in (120, 222):
        drawing.arrow(f"M{left + 116:g} {y} H{left + 220:g}", ORANGE, "both")
        drawing.middle(left + 168, y + (-10 if y == 120 else 18), "0.5 S", 13, more="font-weight='600'")
    steps = (
        "1. reduce-scatter in the memory of each node: a half each",
        "2. all-reduce of each half between the nodes",
        "3. all-gather in the memory of each node",
        "Two halves, so 1 S leaves each node.",
    )
    for row, text in enumerate(steps):
        drawing.text(left, 296 + 18 * row, text, 12, FAINT)


def _nodes(drawing: Drawing, left: float, ranks: tuple[tuple[int, int], tuple[int, int]]) -> None:
    for node, own in enumerate(ranks):
        x = left + 204 * node
        drawing.frame(x, 48, 132, 218, f"node{node + 1}")
        for row, rank in enumerate(own):
            drawing.box(x + 18, 98 + 102 * row, 96, 44, RANKS[rank], f"rank {rank}")


def _traffic(drawing: Drawing, y: float) -> None:
    """Bars: what leaves each node, for S bytes of gradients."""
    drawing.text(16, y + 2, "Bytes that leave each node, for S bytes of gradients", more="font-weight='600'")
    for index, (nodes, per_node) in enumerate(((2, 2), (2, 8))):
        ranks, top = nodes * per_node, y + 18 + 54 * index
        drawing.text(16, top + 24, f"{nodes} nodes, {per_node} ranks each", 12)
        ways = (("ring", 2 * (ranks - 1) / ranks, GREY), ("hierarchical", 2 * (nodes - 1) / nodes, ORANGE))
        for row, (name, times, colour) in enumerate(ways):
            height = top + 21 * row
            drawing.shape(f"<rect x='180' y='{height:g}' width='{200 * times:g}' height='17' fill='{colour}'/>")
            drawing.text(188 + 200 * times, height + 13, f"{name}: {times:.4g} S", 12)


def badges() -> str:
    """By the package's own metadata."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    python = re.findall(r":: (3\.\d+)", " ".join(project["classifiers"]))
    lowest, beyond = re.findall(r"[\d.]+", SUPPORTED["torch"])
    highest = f"2.{int(beyond.removeprefix('2.')) - 1}"
    cells = (
        ("Python", f"{python[0]} to {python[-1]}"),
        ("torch", f"{lowest} to {highest}"),
        ("Lightning", re.findall(r"[\d.]+", SUPPORTED["lightning"])[0]),
        ("Torchbearer", SUPPORTED["torchbearer"].removeprefix("==")),
        ("license", project["license"]),
        ("status", re.findall(r"Status :: \d - (\w+)", " ".join(project["classifiers"]))[0].lower()),
    )
    drawing, x = Drawing(20, ", ".join(f"{name} {value}" for name, value in cells)), 0.0
    for name, value in cells:
        left, right = (7.0 * len(word) + 12 for word in (name, value))
        drawing.shape(f"<rect x='{x:g}' width='{left:g}' height='20' fill='#555c66'/>")
        drawing.shape(f"<rect x='{x + left:g}' width='{right:g}' height='20' fill='{DARK}'/>")
        drawing.middle(x + left / 2, 14, name, 11, PAPER)
        drawing.middle(x + left + right / 2, 14, value, 11, PAPER)
        x += left + right + 6
    return drawing.svg()


PARTS = dict(zip(summary.SHOWN, (BLUE, ORANGE, TEAL, "#c0504d", PURPLE, "#6a9e3f"), strict=True))


def report(name: str) -> str:
    """The bars of a report, and its line."""
    data = json.loads((HERE / "reports.json").read_text())[name]
    parts, pace = summary.parts_of(data), summary.pace_of(data)
    drawing, x = Drawing(62 + 32 * len(parts), summary.one_line(data)), 20.0
    for part, colour in PARTS.items():
        drawing.shape(f"<rect x='{x:g}' y='18' width='11' height='11' fill='{colour}'/>")
        drawing.text(x + 16, 28, part, 12)
        x += 34 + 5.9 * len(part)
    longest = max(sum(own.values()) for own in parts)
    for place, own in enumerate(parts):
        x, y = 170.0, 46 + 32 * place
        drawing.text(20, y + 15, summary.name_of(data, place) + (" \u25c0 sets the pace" if place == pace else ""), 12)
        for part, colour in PARTS.items():
            width = 570 * own[part] / longest
            drawing.shape(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='22' fill='{colour}'/>")
            x += width
    return drawing.svg()


def predicted() -> str:
    found = json.loads((PACKAGE.parent / "examples" / "benchmarks" / "cost" / "cost.json").read_text())
    return plot.draw(next(iter(found.values())), "Times as fast as one machine by the number of machines")


DRAWINGS = {"badges": badges, "two_nodes": two_nodes, "layers": layers, "batch": batch, "hierarchical": hierarchical}
DRAWINGS |= {f"report_{name}": partial(report, name) for name in ("even", "late")} | {"predicted": predicted}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
