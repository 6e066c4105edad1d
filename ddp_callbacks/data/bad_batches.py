"""Skip a bad batch on all ranks, so that it does not end the run: a batch for which one rank has no usable loss.

Each rank sends the fault of its loss, and its weight, in one small message before backward. A part with weight 0 does
not count, unless all parts have weight 0: a rank without samples cannot spoil the batch of the others.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.errors import ConfigurationError, say
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.process_group.presence import describe

SkipBatch = Literal["no_loss", "non_finite", "any"]

_PURPOSE = "whether to skip the batch"
_TOLD = 10  # the first batches are reported one by one; then the 20th, 50th, 100th and so on


class Fault(enum.IntEnum):
    """A fault of a rank's loss, as the ranks send it."""

    NOTHING = 0
    NO_LOSS = 1
    NAN = 2
    INFINITE = 3


_TEXTS = {
    Fault.NO_LOSS: "training_step returned None",
    Fault.NAN: "the loss is NaN",
    Fault.INFINITE: "the loss is infinite",
}
_NON_FINITE = frozenset({Fault.NAN, Fault.INFINITE})
FAULTS: Mapping[str, frozenset[Fault]] = {
    "no_loss": frozenset({Fault.NO_LOSS}),
    "non_finite": _NON_FINITE,
    "any": _NON_FINITE | {Fault.NO_LOSS},
}
"""For each setting of ``skip_batch``, the faults that let the ranks skip a batch."""


def check_skip_batch(skip_batch: str | None, sync: object) -> None:
    """Raise :class:`ConfigurationError` unless ``skip_batch`` is ``None``, or in ``FAULTS`` with exact gradients."""
    if skip_batch is None:
        return
    if skip_batch not in FAULTS:
        raise ConfigurationError(
            'skip_batch must be None, "no_loss" (training_step returned None), "non_finite" (the loss is NaN or '
            f'infinite) or "any" (either), got {skip_batch!r}.'
        )
    if sync != "every_step":
        raise ConfigurationError(
            f'skip_batch="{skip_batch}" lets all processes decide in each step, but with sync={sync!r} they do not '
            'meet in each step. Leave out skip_batch, or use sync="every_step".'
        )


def check_optimizer(skip_batch: str, optimizer: object) -> None:
    """Raise :class:`ConfigurationError` if an optimizer computes the loss repeatedly, as LBFGS does."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f'skip_batch="{skip_batch}" does not work with LBFGS, which computes the loss several times per step and '
            "cannot continue without it. Leave out skip_batch, or use another optimizer."
        )


def fault_of(loss: torch.Tensor) -> Fault:
    """Return whether a loss is NaN or infinite. Waits for the loss's GPU."""
    if bool(torch.isfinite(loss).all()):
        return Fault.NOTHING
    return Fault.NAN if bool(torch.isnan(loss).any()) else Fault.INFINITE


class BadBatches:
    """Lets the ranks decide alike which batches to skip, and reports them on rank 0."""

    def __init__(self) -> None:
        self._skipped = 0
        self._by_rank: Counter[int] = Counter()

    def agree(self, fault: Fault, weight: float) -> dict[int, Fault]:
        """Return the faults of the batch by rank; empty if the batch is fine. A collective.

        Args:
            fault: The fault of this rank's loss.
            weight: The weight of this rank's part of the batch.
        """
        rows = all_gather_object([float(fault), float(weight)], _PURPOSE)
        nothing_counts = not any(weight for _, weight in rows)
        return {
            rank: Fault(int(fault)) for rank, (fault, weight) in enumerate(rows) if fault and (weight or nothing_counts)
        }

    def report(self, faults: Mapping[int, Fault], where: str) -> None:
        """Count a skipped batch. Rank 0 reports the first ones, then some of them. Every rank calls it.

        Args:
            faults: The faults by rank; not empty.
            where: The batch: "epoch 0, batch 17".
        """
        self._skipped += 1
        self._by_rank.update(faults.keys())
        if self._skipped > _TOLD and not _is_round(self._skipped):
            return
        many = f" ({self._skipped} so far; not each is reported from now on)" if self._skipped >= _TOLD else ""
        reasons = "; ".join(f"{describe(rank)}: {_TEXTS[fault]}" for rank, fault in sorted(faults.items()))
        self._say(f"{where} is skipped{many}. {reasons}")

    def close(self) -> None:
        """End the run: rank 0 reports the number of skipped batches if it has not reported each. Local."""
        if self._skipped > _TOLD:
            ranks = ", ".join(f"rank {rank} for {count}" for rank, count in sorted(self._by_rank.items()))
            self._say(f"{self._skipped} batches were skipped in this run, because of {ranks}")
        self._skipped = 0

    def _say(self, text: str) -> None:
        if get_rank() == 0:
            say(text, logging.WARNING)


def _is_round(number: int) -> bool:
    """Whether ``number`` is 1, 2 or 5 times a power of ten."""
    return str(number).rstrip("0") in ("1", "2", "5")
