"""Values that hooks log at the end of an epoch, with another value on each process."""

from __future__ import annotations

import warnings

from ddp_callbacks.process_group import get_rank


class DifferingValues:
    """Warns on rank 0, once for each name, where processes log different values at the end of an epoch."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def look(self, name: str, lowest: float, highest: float, is_expected: bool) -> None:
        """Look at the values of the ranks under a name; with ``is_expected`` the user knows that they differ. Local."""
        if get_rank() != 0 or is_expected or name in self._known:
            return
        if highest - lowest > 1e-6 * max(abs(lowest), abs(highest)):
            self._known.add(name)
            warnings.warn(
                f"{name!r} is logged at the end of an epoch, with another value on each process (from {lowest:.6g} to "
                f"{highest:.6g}). It becomes their mean, weighted by samples, which may not be the value of one "
                "process. Log it in the step or use a torchmetrics metric; if the mean is what you want, pass "
                "sync_dist=True.",
                RuntimeWarning,
                stacklevel=2,
            )
