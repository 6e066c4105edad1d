"""Batches that a program leaves out because their parts are small: one process asks about whole batches."""

from __future__ import annotations

from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group import get_rank

_SKIPPED = (
    "rank 0 has computed no gradient for its part of a batch ({local} of {total} samples), but for every larger one. "
    "If this program leaves out small batches, it looks at parts, where one process looks at whole batches. Leave them "
    "out in the loader instead (drop_last=True)."
)


class SkippedParts:
    """Warns on rank 0, once, of a part that is skipped and smaller than all that had a gradient. Local."""

    def __init__(self) -> None:
        self._least: int | None = None  # that had a gradient
        self._has_told = False

    def note_gradient(self, samples: int) -> None:
        """Note that a part of so many samples had a gradient, or that it would have had one."""
        self._least = samples if self._least is None else min(self._least, samples)

    def note_skipped(self, share: Share) -> None:
        """Note that a batch had no gradient on any rank."""
        is_small = self._least is not None and 0 < share.local < min(self._least, share.total or 0)
        if is_small and not self._has_told and get_rank() == 0:
            self._has_told = True
            warn(_SKIPPED.format(local=share.local, total=share.total))
