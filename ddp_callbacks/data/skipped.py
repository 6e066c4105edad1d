"""Batches that a program leaves out because their parts are small: one process asks about whole batches."""

from __future__ import annotations

from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group import get_rank

_SKIPPED = (
    "rank 0 has computed no gradient for its part of a batch ({local} of {total} samples), {but}. If this program "
    "leaves out small batches, it looks at parts, where one process looks at whole batches. Do not ask for the size of "
    "a part: let the loader leave out what is too small (drop_last=True)."
)
_SMALLER = "but for every larger one"
_WHOLE = "while the whole batch has one"
_NONE = "nor for any other part from this loader"
_LOOPS = 2  # without any gradient: one may look at the data


class SkippedParts:
    """Warns on rank 0, once, of parts of a loader's batches that are skipped, as it seems because of their size. Local.

    Attributes:
        whole_has_one: Whether a whole batch has a gradient for certain.
    """

    def __init__(self) -> None:
        self.whole_has_one = False
        self._least: int | None = None  # that had a gradient
        self._most = 0  # that was skipped
        self._loops = 0
        self._has_told = False

    def note_gradient(self, samples: int) -> None:
        """Note that a part of so many samples had a gradient."""
        self._least = samples if self._least is None else min(self._least, samples)

    def note_skipped(self, share: Share) -> None:
        """Note that a batch had no gradient on any rank."""
        self._most = max(self._most, share.local)
        if self._least is not None and self._most < self._least:
            self._warn(share, _SMALLER)
        elif self._least is None and self.whole_has_one:
            self._warn(share, _WHOLE)

    def note_loop(self, share: Share) -> None:
        """Note a loop in which no model has computed anything, and one of its batches."""
        self._loops += 1
        if self._least is None and self._loops == _LOOPS:
            self._warn(share, _NONE)

    def _warn(self, share: Share, but: str) -> None:
        if not self._has_told and 0 < share.local < (share.total or 0) and get_rank() == 0:
            self._has_told = True
            warn(_SKIPPED.format(local=share.local, total=share.total, but=but))
