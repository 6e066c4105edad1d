"""The hooks at the end of an epoch: each sees what those before it have logged, as the value of the whole epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_callbacks.comm.collectives import all_gather_json
from ddp_callbacks.lightning.hooks import hooks_at_epoch_end
from ddp_callbacks.process_group import get_rank


class EpochEndHooks:
    """Joins what was logged before each hook at the end of an epoch but the first. The constructor is a collective.

    The ranks meet before the hooks that all of them have. Where these come in another order they meet before none.

    Args:
        join: The collective that joins what was logged.
    """

    def __init__(self, trainer: Any, join: Callable[[], None]) -> None:
        self._join = join
        by_rank = all_gather_json(hooks_at_epoch_end(trainer), "the hooks at the end of an epoch")
        common = [[name for name in names if _is_common(name, by_rank)] for names in by_rank]
        self._agreed = set(common[0]) if all(names == common[0] for names in common) else set()
        self._is_first = True

    def begin(self) -> None:
        """The data has ended, and all that was logged is joined."""
        self._is_first = True

    def before(self, action_name: str) -> None:
        """Something of this name in the profiler begins. A collective if it is such a hook."""
        if action_name in self._agreed:
            is_first, self._is_first = self._is_first, False
            if not is_first:
                self._join()


def _is_common(name: str, by_rank: list[list[str]]) -> bool:
    return len({names.count(name) for names in by_rank}) == 1


class DifferingValues:
    """Warns, once for each name, where processes log different values at the end of an epoch.

    Attributes:
        expected: Names of which the user knows: those with ``sync_dist=True``.
    """

    def __init__(self) -> None:
        self.expected: set[str] = set()

    def look(self, name: str, rows: torch.Tensor) -> None:
        """Look at the rows of every rank under one name, as :class:`.history.History` makes them. Local."""
        values = rows[(rows[:, 0] < 0) & (rows[:, 2] > 0), 6]
        if get_rank() != 0 or name in self.expected or not len(values):
            return
        lowest, highest = values.min(), values.max()
        if highest - lowest > 1e-6 * values.abs().max():
            self.expected.add(name)
            warnings.warn(_text(name, [float(lowest), float(highest)]), RuntimeWarning, stacklevel=2)


def _text(name: str, ends: Sequence[float]) -> str:
    return (
        f"{name!r} is logged at the end of an epoch, with another value on each process (from {ends[0]:.6g} to "
        f"{ends[1]:.6g}). It becomes their mean, weighted by samples, which may not be the value of one process. Log "
        "it in the step or use a torchmetrics metric; if the mean is what you want, pass sync_dist=True."
    )
