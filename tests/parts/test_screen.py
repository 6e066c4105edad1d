"""What ``ddprun`` shows on a terminal: tables and a bar."""

from __future__ import annotations

import io
import re
from importlib import metadata

import pytest

from ddp_callbacks.launcher.screen import Bar, Cell, Screen, Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Screen(out, width).table(table)
    return out.getvalue().splitlines()


def test_a_table_is_as_wide_as_its_cells_and_folds_where_the_terminal_is_narrow() -> None:
    """Tables and bars fit your terminal."""
    table = Table(("host", "left"), ("step, ms", "right"))
    table.add_row("node1", "1.5")
    table.add_row("a name of many words", Cell("12.25", "green"))
    assert shown(table, 80) == [
        "",
        " host                   step, ms",
        " ───────────────────────────────",
        " node1                       1.5",
        " a name of many words      12.25",
        "",
    ]
    assert shown(table, 26)[3:] == [" node1                 1.5", " a name of many      12.25", " words", ""]


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for out in (Terminal(), io.StringIO()):
        with Bar(Screen(out, 80), "reaching") as bar:
            bar.update("measuring", 0.5)
            bar.above("a line\n")
        if out.isatty():
            begin, half, line, *_ = out.getvalue().split("\r\x1b[K")[1:]
            assert begin.startswith("reaching") and "  0% 0:0" in begin
            assert half.startswith(f"measuring {'━' * 20}{' ' * 20}  50% 0:0") and line == "a line\n"
        else:
            assert out.getvalue() == "a line\n"


def test_nothing_is_installed_that_changes_lightning_s_bar() -> None:
    """Nothing changes Lightning's bar."""
    needed = [line for line in metadata.requires("ddp_callbacks") or [] if "extra" not in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["torch"]  # type: ignore[index]
