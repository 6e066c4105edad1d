"""The streams of ``ddprun``: the ranks' output in files and on the terminal, line by line, and rank 0's input."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import sys
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ddp_callbacks.launcher.job import Job
from ddp_callbacks.reporting.requests import RUNS, STACKS, write_answer

_PIECE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LOOK = 0.25  # seconds between two checks whether to give up
_LONGEST = 1 << 16  # bytes of an unfinished line to hold back
_MOST = 1 << 16  # bytes to read at once


class Terminal:
    """Standard output (stream ``o``) and standard error (``e``) of this process. Writes only as much as they accept.

    Args:
        out, err: Their descriptors.
        give_up: Called while they accept nothing; once it returns true, the rest is dropped.

    Attributes:
        problem: Why some of it could not be written; empty if all was, or the terminal was closed.
    """

    def __init__(self, out: int, err: int, give_up: Callable[[], bool]) -> None:
        self._descriptors = {"o": out, "e": err}
        self._give_up = give_up
        self.problem = ""

    def write(self, stream: str, data: bytes) -> None:
        """Write to a stream. Raises BrokenPipeError if its reader is gone."""
        descriptor = self._descriptors[stream]
        while data:
            if select.select([], [descriptor], [], _LOOK)[1]:
                try:
                    data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # this much never blocks
                except BrokenPipeError:
                    raise
                except OSError as error:  # its disk is full, or the terminal was closed: SIGHUP ends the job
                    if error.errno != errno.EIO:
                        self.problem = f"what is printed here is not complete: {error.strerror}"
                    return  # the ranks' files must still be complete
            elif self._give_up():
                return


class Output:
    """Writes the output of the ranks to files and the terminal.

    A line on the terminal comes from one rank only. A progress bar's line ends with a carriage return, and is shown as
    often as the rank has written it. If only one rank is shown, its unfinished lines are shown at once.

    Args:
        folder: Folder of the files.
        shown: The ranks for the terminal, ``None`` for all.
        prefix: Whether a line begins with ``[node:rank]``.
        terminal: Receives the lines.

    Attributes:
        problem: Why a file is not complete; empty if all are.
    """

    def __init__(self, folder: Path, shown: frozenset[int] | None, prefix: bool, terminal: Terminal) -> None:
        self.folder, self.problem = folder, ""
        self._chosen, self._shown = shown or frozenset(), shown
        self._prefix = prefix
        self._terminal = terminal
        self._files: dict[Path, BinaryIO | None] = {}  # None once it cannot be written
        self._lines: dict[tuple[str, int, str], _Lines] = {}
        self._unfinished = False  # whether the terminal's last line is unfinished

    def write(self, node: str, rank: int, stream: str, data: bytes) -> None:
        """Write data of a rank's stream: ``o`` (standard output), ``e`` (standard error) or ``s`` (its stacks)."""
        self._keep(self.folder / f"rank-{rank}.log", data)
        if stream != "s" and self.shows(rank):
            self._show(f"[{node}:{rank}] ", (node, rank, stream), data)

    def note(self, text: str) -> None:
        """Print a line from the launcher."""
        self._begin_line()
        self._print(f"ddprun: {text}\n".encode(errors="replace"), "e")

    def quote(self, node: str, rank: int, lines: list[str]) -> None:
        """Print lines of a rank whose output is not shown."""
        prefix = f"[{node}:{rank}] " if self._prefix else ""
        self._begin_line()
        self._print("".join(f"{prefix}{line}\n" for line in lines).encode(errors="surrogateescape"), "e")

    def note_stacks(self, lines: list[str]) -> None:
        """Print where the ranks are, and write it to the file that ``ddprun stacks`` reads."""
        where = f"the stacks of all threads are in {self.folder}/rank-*.log"
        for line in (*lines, where):
            self.note(line)
        write_answer(self.folder / STACKS, "\n".join((*lines, where, "")))

    def follow(self, members: Set[int]) -> None:
        """Show the ranks for the terminal that are among ``members``; if none is, the lowest member from now on."""
        self._finish_lines()
        if self._shown is not None:
            self._shown = (self._shown | self._chosen) & members or frozenset({min(members)})

    def begin_lines(self) -> None:
        """Note that the user has ended the terminal's line."""
        self._unfinished = False
        for lines in self._lines.values():
            lines.is_at_start = True

    def shows(self, rank: int) -> bool:
        return self._shown is None or rank in self._shown

    def describe_place(self, rank: int | None) -> str:
        """Say where to find the full output of a rank; ``None`` for all ranks."""
        path = self.folder / f"rank-{rank}.log"
        if path.exists():
            return f"its full output is in {path}"
        return f"{'' if rank is None else f'rank {rank} printed nothing; '}all output is in {self.folder}"

    def close(self) -> None:
        """Close the files and print the held-back output. Call it last."""
        for file in self._files.values():
            if file is not None:
                file.close()
        self._finish_lines()
        self._begin_line()
        (self.folder / RUNS).unlink(missing_ok=True)

    def _finish_lines(self) -> None:
        for (_, _, stream), lines in self._lines.items():
            self._print(lines.rest(), stream)
        self._lines.clear()

    def _begin_line(self) -> None:
        if self._unfinished:
            self._print(b"\n", "e")

    def _keep(self, path: Path, data: bytes) -> None:
        """Write to a file. A full disk must not end the training."""
        try:
            if path not in self._files:
                self._files[path] = path.open("wb", buffering=0)
            if (file := self._files[path]) is not None:
                file.write(data)
        except OSError as error:
            if file := self._files.get(path):
                file.close()
            self._files[path], self.problem = None, f"{path} is not complete: {error.strerror}"
            self.note(self.problem)

    def _show(self, prefix: str, key: tuple[str, int, str], data: bytes) -> None:
        if key not in self._lines:
            held = self._shown is None or len(self._shown) > 1
            self._lines[key] = _Lines(prefix.encode() if self._prefix else b"", held)
        self._print(self._lines[key].add(data), key[2])

    def _print(self, data: bytes, stream: str) -> None:
        if data:
            self._terminal.write(stream, data)
            self._unfinished = not data.endswith(b"\n")


class _Lines:
    """Puts a prefix before each line of one stream; ``held`` is the unfinished line."""

    def __init__(self, prefix: bytes, held: bool) -> None:
        self._prefix = prefix
        self._held = b"" if held else None
        self.is_at_start = True

    def add(self, data: bytes) -> bytes:
        if self._held is not None:
            data = self._held + data
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if not cut and len(data) > _LONGEST:
                cut = len(data)
            self._held, data = data[cut:], data[:cut]
        return self._marked(data)

    def rest(self) -> bytes:
        held, self._held = self._held or b"", b""
        return self._marked(held + b"\n") if held else b""

    def _marked(self, data: bytes) -> bytes:
        marked = bytearray()
        for piece in _PIECE.findall(data):
            if self.is_at_start and piece != b"\r":  # a progress bar begins with a carriage return
                marked += self._prefix
            marked += piece
            self.is_at_start = piece.endswith((b"\r", b"\n"))
        return bytes(marked)


def terminal_size(job: Job) -> tuple[int, int] | None:
    """Return the lines and columns that the terminal has for a rank's output; ``None`` without a terminal."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    size = os.get_terminal_size(sys.stdout.fileno())
    prefix = 0 if job.no_prefix else max(len(f"[{node.name}:0] ") for node in job.nodes)
    return size.lines or 24, max((size.columns or 80) - prefix, 1)  # an unknown size is 0


async def next_input() -> bytes:
    """Return what is typed, empty at its end or without a terminal. Wait while this process is in its background."""
    with suppress(OSError):  # the terminal was closed
        while sys.stdin is not None and os.isatty(0):  # without sys.stdin, descriptor 0 may be another file
            if not (await asyncio.to_thread(select.select, [0], [], [], _LOOK))[0]:
                continue
            if os.tcgetpgrp(0) == os.getpgrp():
                return os.read(0, _MOST)
            await asyncio.sleep(_LOOK)
    return b""
