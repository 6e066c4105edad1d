"""What the ranks print: a file for each, and the chosen ones on the terminal, line by line."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

_PIECE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LONGEST = 1 << 16  # bytes of a line that are held back until its end
TAIL = 1 << 14  # bytes of a rank's standard error that are kept, to say why it failed


class Output:
    """Takes what comes from the nodes.

    A line of the terminal comes from one rank alone. A progress bar's line ends with a carriage return, and is shown as
    often as the rank has written it. Where one rank alone is shown, its unfinished lines are shown at once.

    Args:
        folder: Where the files go; made here.
        shown: The ranks for the terminal, ``None`` for all.
        prefix: Whether a line begins with ``[node:rank]``.
        stdout, stderr: The terminal.
    """

    def __init__(
        self, folder: Path, shown: frozenset[int] | None, prefix: bool, stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._shown = shown
        self._prefix = prefix
        self._sinks = {"o": stdout, "e": stderr}
        self._files: dict[Path, BinaryIO] = {}
        self._lines: dict[tuple[int, str], _Lines] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._unfinished = False  # whether the terminal's last line is

    def write(self, node: str, rank: int, stream: str, data: bytes) -> None:
        """What a rank wrote to stream ``o`` (standard output) or ``e`` (standard error)."""
        file = self._file(self.path_of(rank))
        file.write(data)
        file.flush()
        if stream == "e":
            self._remember(rank, data)
        if self.shows(rank):
            if (rank, stream) not in self._lines:
                prefix = f"[{node}:{rank}] ".encode() if self._prefix else b""
                self._lines[rank, stream] = _Lines(prefix, held=self._shown is None or len(self._shown) > 1)
            self._print(self._lines[rank, stream].add(data), stream)

    def write_agent(self, node: str, data: bytes, show: bool) -> None:
        """What torchrun's agent on a node wrote."""
        file = self._file(self.path_of_agent(node))
        file.write(data)
        file.flush()
        if show:
            self._print(data, "e")

    def note(self, text: str) -> None:
        """A line of the launcher's own."""
        self._print((b"\n" if self._unfinished else b"") + f"ddprun: {text}\n".encode(errors="replace"), "e")

    def quote(self, node: str, rank: int, lines: list[str]) -> None:
        """Lines of a rank that is not shown otherwise."""
        prefix = f"[{node}:{rank}] " if self._prefix else ""
        text = "".join(f"{prefix}{line}\n" for line in lines)
        self._print((b"\n" if self._unfinished else b"") + text.encode(errors="surrogateescape"), "e")

    def shows(self, rank: int) -> bool:
        return self._shown is None or rank in self._shown

    def path_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def path_of_agent(self, node: str) -> Path:
        return self._folder / f"agent-{node}.log"

    def last_errors(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to its standard error, the last of all last."""
        return b"".join(self._tails.get(rank, ())).decode(errors="surrogateescape").replace("\r", "\n").splitlines()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show what was held back; nothing comes any more."""
        for file in self._files.values():
            file.close()
        for (_, stream), lines in self._lines.items():
            self._print(lines.rest(), stream)
        if self._unfinished:
            self._print(b"\n", "e")

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("wb")
        return self._files[path]

    def _remember(self, rank: int, data: bytes) -> None:
        tail = self._tails.setdefault(rank, deque())
        tail.append(data)
        while sum(map(len, tail)) - len(tail[0]) > TAIL:
            tail.popleft()

    def _print(self, data: bytes, stream: str) -> None:
        if data:
            self._sinks[stream].write(data)
            self._sinks[stream].flush()
            self._unfinished = not data.endswith(b"\n")


class _Lines:
    """Puts a prefix before each line of one stream; ``held`` keeps back a line that has not ended."""

    def __init__(self, prefix: bytes, held: bool) -> None:
        self._prefix = prefix
        self._held = b"" if held else None
        self._at_start = True

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
            if self._at_start and piece != b"\r":  # with which a progress bar begins
                marked += self._prefix
            marked += piece
            self._at_start = piece.endswith((b"\r", b"\n"))
        return bytes(marked)
