"""What of the ranks' output reaches the terminal and the files, and which failure is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_callbacks.launcher.output import TAIL, Output, Terminal


class Recorded(Terminal):
    """A terminal that takes all."""

    def __init__(self) -> None:
        self.said = {"o": b"", "e": b""}

    def write(self, stream: str, data: bytes) -> None:
        self.said[stream] += data


class Shown:
    def __init__(self, folder: Path, shown: frozenset[int] | None = frozenset({0}), prefix: bool = True) -> None:
        self.terminal = Recorded()
        self.output = Output(folder / "logs", shown, prefix, self.terminal)

    @property
    def out(self) -> bytes:
        return self.terminal.said["o"]

    @property
    def err(self) -> bytes:
        return self.terminal.said["e"]


def test_a_progress_bar_of_rank_0_moves(tmp_path: Path) -> None:
    terminal = Shown(tmp_path)
    shown = []
    for piece in (b"\r 0%|  |", b"\r50%|# |", b"\r100%|##|", b"\n"):
        terminal.output.write("a", 0, "e", piece)
        shown.append(terminal.err)
    assert shown == [
        b"\r[a:0]  0%|  |",
        b"\r[a:0]  0%|  |\r[a:0] 50%|# |",
        b"\r[a:0]  0%|  |\r[a:0] 50%|# |\r[a:0] 100%|##|",
        b"\r[a:0]  0%|  |\r[a:0] 50%|# |\r[a:0] 100%|##|\n",
    ]
    terminal.output.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_lines_of_several_ranks_are_never_mixed(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]]
) -> None:
    """Lines of ranks never mix; bars move."""
    texts = [b"".join(b"%d-%d-line\n" % (rank, i) for i in range(20)) for rank in range(3)]
    terminal = Shown(tmp_path_factory.mktemp("t"), shown=None)
    at = [0, 0, 0]
    for rank, length in pieces:
        terminal.output.write("a", rank, "o", texts[rank][at[rank] : at[rank] + length])
        at[rank] += length
    terminal.output.close()
    lines = terminal.out.splitlines(keepends=True)
    for rank in range(3):
        said = texts[rank][: at[rank]]
        said += b"" if said.endswith(b"\n") or not said else b"\n"
        prefix = b"[a:%d] " % rank
        assert b"".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix)) == said


def test_a_note_begins_a_line_of_its_own(tmp_path: Path) -> None:
    terminal = Shown(tmp_path)
    terminal.output.write("a", 0, "e", b"50%")
    terminal.output.note("the end")
    assert terminal.err == b"[a:0] 50%\nddprun: the end\n"
    terminal.output.close()


def test_the_last_errors_are_kept_and_no_more(tmp_path: Path) -> None:
    terminal = Shown(tmp_path)
    for i in range(10000):
        terminal.output.write("b", 3, "e", b"line %d\n" % i)
    last = terminal.output.last_errors("b", 3)
    assert last[-1] == "line 9999" and TAIL <= sum(len(line) + 1 for line in last) < TAIL + 1000
    terminal.output.close()


def test_a_terminal_that_takes_nothing_can_be_left() -> None:
    read, write = os.pipe()
    gives_up = threading.Event()
    terminal = Terminal(write, write, gives_up.is_set)
    thread = threading.Thread(target=terminal.write, args=("o", b"x" * (1 << 20)))
    thread.start()
    try:
        thread.join(0.5)
        assert thread.is_alive()
        gives_up.set()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        os.close(read)
        os.close(write)


def test_a_full_disk_is_noted_and_ends_nothing(tmp_path: Path) -> None:
    """A full disk stops nothing; blocked terminals delay nothing."""
    terminal = Shown(tmp_path)
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    for line in (b"one\n", b"two\n"):
        terminal.output.write("a", 0, "o", line)
    terminal.output.close()
    assert terminal.out == b"[a:0] one\n[a:0] two\n"
    assert terminal.err.endswith(b"rank-0.log is not complete: No space left on device\n")


def test_a_rank_that_moves_to_another_node_has_that_node_s_name(tmp_path: Path) -> None:
    terminal = Shown(tmp_path, shown=None)
    for node in ("a", "b"):
        terminal.output.write(node, 0, "o", b"line\n")
    terminal.output.close()
    assert terminal.out == b"[a:0] line\n[b:0] line\n"


def test_what_the_attempt_before_said_is_forgotten(tmp_path: Path) -> None:
    terminal = Shown(tmp_path)
    terminal.output.write("a", 1, "e", b"ValueError: of the first attempt\n")
    terminal.output.forget_errors("a")
    assert terminal.output.last_errors("a", 1) == []
    terminal.output.close()
