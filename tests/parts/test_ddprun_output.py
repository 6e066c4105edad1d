"""What of the ranks' output reaches the terminal and the files, and which failure is told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.streams import Output, Terminal, terminal_size
from ddp_callbacks.reporting.requests import new_folder


class Shown(Terminal):
    """An output with a terminal that takes all."""

    def __init__(self, folder: Path, shown: frozenset[int] | None = frozenset({0})) -> None:
        self.said = {"o": b"", "e": b""}
        (folder / "logs").mkdir()
        self.output = Output(folder / "logs", shown, True, self)

    def write(self, stream: str, data: bytes) -> None:
        self.said[stream] += data

    def tell(self, node: str, rank: int, stream: str, *pieces: bytes) -> None:
        for piece in pieces:
            self.output.write(node, rank, stream, piece)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.output.close()


def test_a_progress_bar_of_rank_0_moves(tmp_path: Path) -> None:
    bar = [b"\r[a:0]  0%|  |", b"\r[a:0] 50%|# |", b"\r[a:0] 100%|##|", b"\n"]
    with Shown(tmp_path) as terminal:
        for number, piece in enumerate((b"\r 0%|  |", b"\r50%|# |", b"\r100%|##|", b"\n")):
            terminal.tell("a", 0, "e", piece)
            assert terminal.said["e"] == b"".join(bar[: number + 1])


# Which ranks the user wants to see, who takes part one after the other, and who is shown then.
FOLLOWED: list[tuple[set[int] | None, list[set[int]], set[int]]] = [
    ({0}, [{0, 2}], {0}),
    ({0}, [{1, 2}], {1}),
    ({0}, [{1, 2}, {2}], {2}),
    ({0}, [{1, 2}, {0, 1, 2}], {0, 1}),  # rank 1 prints until rank 0 has joined
    ({0, 2}, [{1, 2}], {2}),
    ({2}, [{1, 2}], {2}),
    (None, [{1, 2}], {0, 1, 2}),
]


@pytest.mark.parametrize(("shown", "members", "expected"), FOLLOWED)
def test_the_lowest_rank_is_shown_when_those_that_were_chosen_are_lost(
    tmp_path: Path, shown: set[int] | None, members: list[set[int]], expected: set[int]
) -> None:
    with Shown(tmp_path, None if shown is None else frozenset(shown)) as terminal:
        for rank in range(3):
            terminal.tell("a", rank, "o", b"50 %")
        for those in members:
            terminal.output.follow(those)
        before = len(terminal.said["o"])
        for rank in range(3):
            terminal.tell("a", rank, "o", b"100 %\n")
    lines = [f"[a:{rank}] 100 %\n" for rank in sorted(expected)]
    assert terminal.said["o"][before:].decode() == "".join(lines)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_lines_of_several_ranks_are_never_mixed(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]]
) -> None:
    """Lines of ranks never mix; bars move."""
    texts = [b"".join(b"%d-%d-line\n" % (rank, i) for i in range(20)) for rank in range(3)]
    at = [0, 0, 0]
    with Shown(tmp_path_factory.mktemp("t"), shown=None) as terminal:
        for rank, length in pieces:
            terminal.tell("a", rank, "o", texts[rank][at[rank] : at[rank] + length])
            at[rank] += length
    lines = terminal.said["o"].splitlines(keepends=True)
    for rank in range(3):
        said = texts[rank][: at[rank]]
        said += b"" if said.endswith(b"\n") or not said else b"\n"
        prefix = b"[a:%d] " % rank
        assert b"".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix)) == said


def test_a_note_begins_a_line_of_its_own(tmp_path: Path) -> None:
    with Shown(tmp_path) as terminal:
        terminal.tell("a", 0, "e", b"50%")
        terminal.output.note("the end")
    assert terminal.said["e"] == b"[a:0] 50%\nddprun: the end\n"


def test_a_full_disk_is_noted_and_ends_nothing(tmp_path: Path) -> None:
    """A full disk stops nothing; blocked terminals delay nothing."""
    with Shown(tmp_path) as terminal:
        (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
        terminal.tell("a", 0, "o", b"one\n", b"two\n")
    assert terminal.said["o"] == b"[a:0] one\n[a:0] two\n"
    assert terminal.said["e"].endswith(b"rank-0.log is not complete: No space left on device\n")
    assert terminal.output.problem.endswith("rank-0.log is not complete: No space left on device")


def test_a_line_after_an_answer_that_was_typed_has_its_prefix(tmp_path: Path) -> None:
    with Shown(tmp_path) as terminal:
        terminal.tell("a", 0, "o", b"name? ")
        terminal.output.begin_lines()
        terminal.tell("a", 0, "o", b"got Bob\n")
    assert terminal.said["o"] == b"[a:0] name? [a:0] got Bob\n"


@pytest.mark.parametrize(("columns", "left"), [(0, 66), (20, 6), (10, 1)])
def test_a_rank_s_terminal_leaves_room_for_the_prefix(columns: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True, fileno=lambda: 1))
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((columns, 0)))
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_size(parse_options(["-H", "localhost", "t.py"], {})) == (24, left)


def test_a_rank_that_moves_to_another_node_has_that_node_s_name(tmp_path: Path) -> None:
    with Shown(tmp_path, shown=None) as terminal:
        for node in ("a", "b"):
            terminal.tell(node, 0, "o", b"line\n")
    assert terminal.said["o"] == b"[a:0] line\n[b:0] line\n"


def test_jobs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in containers, where each ddprun is process 1.
    monkeypatch.setattr(time, "strftime", lambda _: "20261127-010101")
    folders = [new_folder(tmp_path / "logs") for _ in range(6)]
    assert len(set(folders)) == 6 and {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
