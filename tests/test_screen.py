"""What ddprun shows on a terminal: tables and a bar, and what its ranks know of the terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
import tomllib
from pathlib import Path

import pytest

from ddp_callbacks.launcher.screen import Bar, Cell, Screen, Table

ROOT = Path(__file__).parent.parent
LIMIT = 600.0  # seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Screen(out, width).table(table)
    return out.getvalue().splitlines()


def test_a_table_is_as_wide_as_its_cells_and_folds_where_the_terminal_is_narrow() -> None:
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


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for out, expected in ((Terminal(), "\x1b[1;31mFAIL\x1b[0m, says n1\n"), (io.StringIO(), "FAIL, says n1\n")):
        Screen(out).line(Cell("FAIL", "bold red"), ", says n1")
        assert out.getvalue() == expected


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
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed.startswith("torch>=")
    for path in (ROOT / "ddp_callbacks").rglob("*.py"):
        assert "import rich" not in path.read_text() and "from rich" not in path.read_text(), path


@pytest.mark.cold
@pytest.mark.parametrize("given", [{}, {"TTY_COMPATIBLE": "0"}])
def test_the_ranks_know_of_the_terminal_behind_their_pipe(given: dict[str, str], tmp_path: Path) -> None:
    """By what rich reads, without which Lightning's RichProgressBar shows nothing until the end."""
    names = ("TTY_COMPATIBLE", "COLUMNS")
    (tmp_path / "script.py").write_text(f"import os\nprint(*(os.environ.get(name) for name in {names}))")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= {"PWD": str(tmp_path), "TERM": "xterm"} | given
    command = [sys.executable, "-m", "ddp_callbacks.launcher", "script.py"]
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    subprocess.run(command, cwd=tmp_path, env=environ, stdout=inside, stderr=subprocess.PIPE, timeout=LIMIT, check=True)
    text = os.read(outside, 4096).decode()
    for descriptor in (outside, inside):
        os.close(descriptor)
    assert text.splitlines()[0] == f"[localhost:0] {given.get('TTY_COMPATIBLE', '1')} {100 - len('[localhost:0] ')}"
