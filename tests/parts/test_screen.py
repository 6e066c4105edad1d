"""What ``ddprun`` shows on a terminal: tables."""

from __future__ import annotations

import io
import re
from importlib import metadata

from screen import Screen, Table


def shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Screen(out, width).table(table)
    return out.getvalue().splitlines()


def test_a_table_is_as_wide_as_its_cells_and_folds_where_the_terminal_is_narrow() -> None:
    """Tables fit your terminal."""
    table = Table(("host", "left"), ("step, ms", "right"))
    table.add_row("node1", "1.5")
    table.add_row("a name of many words", "12.25")
    assert shown(table, 80) == [
        "",
        " host                   step, ms",
        " ───────────────────────────────",
        " node1                       1.5",
        " a name of many words      12.25",
        "",
    ]
    assert shown(table, 26)[3:] == [" node1                 1.5", " a name of many      12.25", " words", ""]


def test_nothing_is_installed_that_changes_lightning_s_bar() -> None:
    """Nothing changes Lightning's bar."""
    needed = [line for line in metadata.requires("ddp_callbacks") or [] if "extra" not in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["torch"]  # type: ignore[index]
