"""The moments of a run at which ranks may vote; see :mod:`.votes`."""

from __future__ import annotations

from collections.abc import Callable

VOTE = "vote"


class Moments:
    """The moments that this rank has behind it. Others are told if it has let one pass at which they vote.

    Args:
        decline: Called once with the name of a vote in which this rank takes no part; by any thread.
    """

    def __init__(self, decline: Callable[[str], None]) -> None:
        self._decline = decline
        self._asked: dict[str, int] = {}
        self.begin(0)

    def begin(self, run: int) -> None:
        """Begin a run."""
        self._run, self._passed, self._own = run, 0, ""
        self._asked.clear()

    def let_pass(self) -> None:
        """Let a moment pass."""
        self._passed += 1
        self._answer()

    def vote(self) -> str:
        """The name of the vote at the next moment, in which this rank takes part."""
        self._passed += 1
        self._own = f"{VOTE}/{self._run}/{self._passed}"
        return self._own

    def respond(self, name: str) -> None:
        """Another rank votes, or this one."""
        if name != self._own:
            self._asked[name] = int(name.rpartition("/")[2])
            self._answer()

    def _answer(self) -> None:
        for name, moment in list(self._asked.items()):
            if self._passed >= moment and self._asked.pop(name, 0):  # once, by the thread that comes first
                self._decline(name)
