"""Tables on a terminal, using only the standard library.

A library for this would be installed for the user's program too, and Lightning changes its progress bar if one is.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import Literal, TextIO

WIDTH = 160  # columns without a terminal
Side = Literal["left", "right"]
_GAP = "   "  # between columns


class Table:
    """Rows below a header.

    Args:
        columns: The name of each column, and whether it is right-aligned.
    """

    def __init__(self, *columns: tuple[str, Side]) -> None:
        self._sides = [side for _, side in columns]
        self._rows = [[name for name, _ in columns]]

    def add_row(self, *cells: str) -> None:
        self._rows.append(list(cells))

    def lines(self, width: int) -> list[str]:
        """Cells that don't fit into ``width`` are wrapped."""
        widths = [max(len(row[index]) for row in self._rows) for index in range(len(self._sides))]
        while 1 + sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > 8:
            widths[widths.index(max(widths))] -= 1
        head, *rows = [self._folded(row, widths) for row in self._rows]
        rule = f" {'─' * (sum(widths) + len(_GAP) * (len(widths) - 1))}"
        return ["", *head, rule, *(line for row in rows for line in row), ""]

    def _folded(self, row: list[str], widths: list[int]) -> list[str]:
        texts = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, texts))):
            pieces = []
            for own, size, side in zip(texts, widths, self._sides, strict=True):
                text = own[number] if number < len(own) else ""
                pieces.append(text.rjust(size) if side == "right" else text.ljust(size))
            lines.append(f" {_GAP.join(pieces)}".rstrip())
        return lines


class Screen:
    """Prints lines and tables.

    Args:
        file: The output file.
        width: In columns; ``None``: the terminal's, or :data:`WIDTH`.
    """

    def __init__(self, file: TextIO, width: int | None = None) -> None:
        self._file = file
        is_terminal = file.isatty() and os.environ.get("TERM") != "dumb"
        self.width = width or (shutil.get_terminal_size().columns if is_terminal else WIDTH)

    def line(self, text: str) -> None:
        print(text, file=self._file)

    def table(self, table: Table) -> None:
        for line in table.lines(self.width):
            self.line(line)
