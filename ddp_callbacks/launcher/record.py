"""The exception that ended a rank, from the record that the rank has written of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

_PEER_ERROR = re.compile(r"(ddp_callbacks\.errors\.)?PeerError\b")
_OURS = re.compile(r"(ddp_callbacks\.errors\.)?(PeerError|MismatchError|RendezvousError|ConfigurationError)\b")
_MISMATCH = re.compile(r"(ddp_callbacks\.errors\.)?MismatchError\b")
_BROKEN = re.compile(r"Connection (closed|reset) by peer|Broken pipe|DistBackendError|DistNetworkError|DistStoreError")
_CAUGHT = re.compile(r".*Caught \w+ (in .*)\.$")  # torch has raised the exception of a DataLoader's worker again
_NAMED = re.compile(r"rank (\d+)(?: \([^)]*\))?")
_HINTS = {
    "unexpected pos": "torch could not write a file: is its disk full?",
    "iostream error": "torch could not write a file: is its disk full?",
}


@dataclass(frozen=True)
class Record:
    """An exception that has ended a rank.

    Attributes:
        exceptions: The names and messages of its chain: the first one, and the last.
        began: When it was raised, on this machine's monotonic clock; infinite if unknown.
    """

    exceptions: tuple[str, ...]
    began: float

    @property
    def peer(self) -> str | None:
        """The text of the PeerError in it, if there is one: it only speaks of another rank."""
        text = next((text for text in self.exceptions if _PEER_ERROR.match(text)), None)
        if text is None:
            return None
        head, quotes, _ = text.partition("\nTraceback (most recent call last)")  # of the other rank
        return head.rpartition("\n")[0] if quotes else head.rstrip()

    @property
    def is_mutual(self) -> bool:
        """Whether every rank has raised it."""
        return bool(_MISMATCH.match(self.exceptions[-1]))

    @property
    def is_broken_connection(self) -> bool:
        """Whether it only means that another process is gone."""
        return any(_BROKEN.search(text.partition("\n")[0]) for text in self.exceptions)

    @property
    def reason(self) -> str:
        """The exception in a few words; this library's exceptions in full, since they name ranks and remedies."""
        if self.peer is not None:
            return self.peer
        if _OURS.match(self.exceptions[-1]):
            return self.exceptions[-1]
        first, last = _words(self.exceptions[0]), _words(self.exceptions[-1])
        text = last if len(self.exceptions) == 1 else f"{last} (after {first})"
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


def _words(text: str) -> str:
    """The first line; of the exception of a DataLoader's worker, its own."""
    line, _, rest = text.partition("\n")
    caught = _CAUGHT.match(line)
    return f"{rest.strip().rpartition(chr(10))[2]}, {caught[1]}" if caught and rest.strip() else line


def read_record(text: str, ahead: float) -> Record | None:
    """The last record in ``text``; ``None`` if there is none. torch's ``@record`` may have written another one before.

    Args:
        text: What the rank has written, JSON.
        ahead: Seconds by which the clock of the rank's host is ahead of this machine's.
    """
    found: dict[str, Any] = {}
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            found, end = decoder.raw_decode(text)
        except ValueError:
            break  # the rest has not been written
        text = text[end:].strip()
    if not found:
        return None
    message = found["message"]
    lines = found.get("exceptions") or [message["message"] if isinstance(message, dict) else str(message)]
    return Record(tuple(lines), found.get("time", math.inf) - ahead)
