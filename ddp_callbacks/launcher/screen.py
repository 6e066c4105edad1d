"""Tables and colours on a terminal, using only the standard library.

A library for this would be installed for the user's program too, and Lightning changes its progress bar if one is.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from typing import Literal, TextIO

WIDTH = 160  # columns without a terminal
Color = Literal["green", "yellow", "bold red"]
Side = Literal["left", "right"]
_CODES = {"green": "32", "yellow": "33", "bold red": "1;31"}
_GAP = "   "  # between columns


@dataclass(frozen=True)
class Cell:
    """A text and its colour."""

    text: str
    color: Color | None = None


class Table:
    """Rows below a header.

    Args:
        columns: The name of each column, and whether it is right-aligned.
    """

    def __init__(self, *columns: tuple[str, Side]) -> None:
        self._sides = [side for _, side in columns]
        self._rows = [[Cell(name) for name, _ in columns]]

    def add_row(self, *cells: str | Cell) -> None:
        self._rows.append([cell if isinstance(cell, Cell) else Cell(cell) for cell in cells])

    def lines(self, width: int) -> list[list[Cell]]:
        """Each line as its pieces; cells that don't fit into ``width`` are wrapped."""
        widths = [max(len(row[index].text) for row in self._rows) for index in range(len(self._sides))]
        while 1 + sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > 8:
            widths[widths.index(max(widths))] -= 1
        head, *rows = [self._folded(row, widths) for row in self._rows]
        rule = Cell("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
        return [[], *head, [Cell(" "), rule], *(line for row in rows for line in row), []]

    def _folded(self, row: list[Cell], widths: list[int]) -> list[list[Cell]]:
        texts = [textwrap.wrap(cell.text, size) or [""] for cell, size in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, texts))):
            line = [Cell(" ")]
            for cell, own, size, side in zip(row, texts, widths, self._sides, strict=True):
                text = own[number] if number < len(own) else ""
                line += [Cell(text.rjust(size) if side == "right" else text.ljust(size), cell.color), Cell(_GAP)]
            lines.append(line)
        return lines


class Screen:
    """Prints in colours on a terminal, otherwise plain text.

    Args:
        file: The output file.
        width: In columns; ``None``: the terminal's, or :data:`WIDTH`.
    """

    def __init__(self, file: TextIO, width: int | None = None) -> None:
        self._file = file
        self.is_terminal = file.isatty() and os.environ.get("TERM") != "dumb"
        self._colors = self.is_terminal and not os.environ.get("NO_COLOR")
        self.width = width or (shutil.get_terminal_size().columns if self.is_terminal else WIDTH)

    def line(self, *pieces: str | Cell) -> None:
        cells = [piece if isinstance(piece, Cell) else Cell(piece) for piece in pieces]
        while cells and not cells[-1].text.strip():
            cells.pop()
        print("".join(map(self._colored, cells)).rstrip(), file=self._file)

    def table(self, table: Table) -> None:
        for line in table.lines(self.width):
            self.line(*line)

    def _colored(self, cell: Cell) -> str:
        return f"\x1b[{_CODES[cell.color]}m{cell.text}\x1b[0m" if self._colors and cell.color else cell.text
