"""Parse the exceptions that a rank prints, from its standard error as it arrives. Memory use is bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADER = "Traceback (most recent call last):"
_WRAPPED = f"Original {_HEADER}"  # of a DataLoader's worker, in the message of the exception that torch raises
_RANK = re.compile(r"\[rank\d+\]: ")  # torch's prefix of each line of a traceback
# The last line of a traceback: the exception's qualified name, alone or with its message.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s.*)?$")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PEER_ERROR = re.compile(r"(ddp_callbacks\.errors\.)?PeerError\b")
_OURS = re.compile(r"(ddp_callbacks\.errors\.)?(PeerError|MismatchError|RendezvousError|ConfigurationError)\b")
_MISMATCH = re.compile(r"(ddp_callbacks\.errors\.)?MismatchError\b")
_BROKEN = re.compile(r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|DistStoreError")
_CAUGHT = re.compile(r".*Caught \w+ (in .*)\.$")
_NAMED = re.compile(r"rank (\d+)(?: \([^)]*\))?")
_LONGEST = 2000  # maximum length of a kept line
_LINES = 40  # maximum number of lines of a message
_HINTS = {
    "unexpected pos": "torch could not write a file: is its disk full?",
    "iostream error": "torch could not write a file: is its disk full?",
}


@dataclass
class Printed:
    """The exceptions of a printed traceback: its chain, the first one first.

    Attributes:
        began: When its first line arrived.
        exceptions: The lines of each: its name and message.
        inner: For each, the last line of the traceback quoted in its message, if torch has re-raised it.
    """

    began: float
    exceptions: list[list[str]] = field(default_factory=list)
    inner: dict[int, str] = field(default_factory=dict)

    @property
    def peer(self) -> str | None:
        """The text of the PeerError in it, if there is one: it only speaks of another rank."""
        return next(("\n".join(lines).rstrip() for lines in self.exceptions if _PEER_ERROR.match(lines[0])), None)

    @property
    def is_mutual(self) -> bool:
        """Whether every rank has raised it."""
        return bool(_MISMATCH.match(self.exceptions[-1][0]))

    @property
    def is_broken_connection(self) -> bool:
        """Whether it only means that another process is gone."""
        return any(_BROKEN.search(lines[0]) for lines in self.exceptions)

    @property
    def reason(self) -> str:
        """The exception in a few words; this library's exceptions in full, since they name ranks and remedies."""
        if self.peer is not None:
            return self.peer
        last = len(self.exceptions) - 1
        if _OURS.match(self.exceptions[last][0]):
            return "\n".join(self.exceptions[last]).rstrip()
        text = self._words(last)
        if last > 0:
            text += f" (after {self._words(0)})"
        hint = next((hint for words, hint in _HINTS.items() if words in text), None)
        return text if hint is None else f"{text}. {hint}"

    @property
    def blames(self) -> tuple[int, ...]:
        """The ranks that a PeerError begins with, or else the first rank that it names."""
        message = (self.peer or "").partition(": ")[2]
        found: list[int] = []
        while match := _NAMED.match(message):
            found.append(int(match[1]))
            message = message[match.end() :].removeprefix(", ").removeprefix(" and ")
        other = _NAMED.search(message)
        return tuple(found) if found or other is None else (int(other[1]),)

    def _words(self, index: int) -> str:
        line = self.exceptions[index][0]
        caught = _CAUGHT.match(line)
        return f"{self.inner[index]}, {caught[1]}" if caught and index in self.inner else line


class Reader:
    """Finds the last traceback in the standard error of one process.

    Attributes:
        last: The last traceback with a complete exception; ``None`` if there is none yet.
    """

    def __init__(self) -> None:
        self.last: Printed | None = None
        self._rest = b""
        self._printed = Printed(0.0)
        self._state = "elsewhere"  # or in a "stack", a "message", a "wrapped" stack, a "quoted" traceback
        self._has_prefix = False  # whether the traceback's lines have torch's prefix
        self._is_chained = False  # whether the next traceback belongs to the same exception

    def feed(self, data: bytes, now: float) -> None:
        """Process data that arrived at time ``now``."""
        data = self._rest + data
        if self._state == "elsewhere" and b"Traceback" not in data:
            data = data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :]
        *lines, rest = re.split(rb"[\r\n]", data)
        for line in lines:
            self._take(line[:_LONGEST].decode(errors="surrogateescape"), now)
        self._rest = rest[: 2 * _LONGEST]

    def _take(self, line: str, now: float) -> None:
        if line.endswith(_HEADER) and not line.endswith(_WRAPPED):
            self._begin(line.removesuffix(_HEADER), now)  # perhaps after a progress bar's unfinished line
            return
        prefix = _RANK.match(line)
        if self._state == "elsewhere" or not line:
            return
        if self._has_prefix and prefix is None:
            self._state = "elsewhere"
            return
        self._take_of_traceback(line if prefix is None else line[prefix.end() :])

    def _begin(self, before: str, now: float) -> None:
        has_prefix = bool(_RANK.search(before))
        if self._is_quoted(has_prefix):
            if self._state == "message" and len(self._printed.exceptions[-1]) > 1:
                self._printed.exceptions[-1].pop()  # the line that announces it
            self._state = "quoted"
            return
        if not self._is_chained:
            self._printed, self._has_prefix = Printed(now), has_prefix
        self._state, self._is_chained = "stack", False

    def _is_quoted(self, has_prefix: bool) -> bool:
        """Whether a new traceback is part of the current exception's message.

        torch's prefix shows where the printed text ends. Without the prefix, only a PeerError is known to quote a
        traceback.
        """
        if self._state == "quoted":
            return has_prefix == self._has_prefix
        if self._state != "message" or self._is_chained or has_prefix != self._has_prefix:
            return False
        return has_prefix or self._printed.peer is not None

    def _take_of_traceback(self, line: str) -> None:
        if self._state == "message":
            self._take_of_message(line)
        elif self._state != "quoted" and _EXCEPTION.match(line):
            index = len(self._printed.exceptions) - 1
            if self._state == "wrapped":
                self._printed.inner[index] = line
            else:
                self._printed.exceptions.append([line])
                self.last = self._printed
            self._state = "message"

    def _take_of_message(self, line: str) -> None:
        message = self._printed.exceptions[-1]
        self._is_chained = line in _CHAINED
        if line == _WRAPPED:
            self._state = "wrapped"
        elif len(message) < _LINES and not self._is_chained:
            message.append(line)


def printed_in(message: str) -> Printed | None:
    """Parse an exception whose name and message come from another source."""
    reader = Reader()
    reader.feed(f"{_HEADER}\n{message}\n".encode(errors="surrogateescape"), float("inf"))
    return reader.last
