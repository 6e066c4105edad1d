"""What a rank has entered in its run: by that, rank 0 sees who is behind, and who is elsewhere."""

from __future__ import annotations

import json
import zlib

_RECENT = 32  # recent kinds of exchanges that a rank tells
_KINDS = 1024  # kinds of exchanges that a rank counts


class Exchanges:
    """Counts exchanges by their purpose. Costs a microsecond each; sends nothing.

    Attributes:
        last: The purpose of the latest.
        entered: How many there were, in all runs.
    """

    def __init__(self) -> None:
        self.last, self.entered = "nothing yet", 0
        self._turns: dict[str, int] = {}

    def enter(self, doing: str) -> None:
        """Count one."""
        turns = self._turns
        turns[doing] = turns.pop(doing, 0) + 1  # the latest is the last
        if len(turns) > _KINDS:
            del turns[next(iter(turns))]
        self.last = doing
        self.entered += 1

    def turn(self, doing: str) -> int:
        """How often this one was entered in this run: for gradients, the number of the step."""
        return self._turns.get(doing, 0)

    def recent(self) -> dict[str, int]:
        """The counts of the latest kinds."""
        return dict(list(self._turns.items())[-_RECENT:])

    def checksum(self) -> int:
        """A number that is equal on all ranks if they have entered the same."""
        return zlib.crc32(json.dumps(sorted(self._turns.items())).encode())

    def forget(self) -> None:
        """Begin a run."""
        self._turns.clear()
