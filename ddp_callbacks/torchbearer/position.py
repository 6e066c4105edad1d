"""Where a run was cut, and how a new run gets there: Torchbearer's loop has no entry but its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchbearer

from ddp_callbacks.torchbearer._torchbearer import replace_training_pass
from ddp_callbacks.torchbearer.base import State

TRAINING, VALIDATION, BETWEEN = "training", "validation", "between epochs"

Event = Callable[[State], None]


@dataclass(frozen=True)
class Position:
    """Where a run was cut.

    Attributes:
        phase: ``"training"``: within this pass; ``"validation"``: in front of it; ``"between epochs"``: after
            ``on_checkpoint``.
        batches: The number of batches of the training pass under way that are done.
        is_last: Whether no epoch follows: a callback has stopped the run.
    """

    phase: str
    batches: int = 0
    is_last: bool = False

    @property
    def is_within_pass(self) -> bool:
        """Whether metrics, loader and random states are those of a pass under way."""
        return self.batches > 0


def enter_pass(state: State, batches: int, put_back: Event) -> None:
    """Let the pass that is about to begin take only the batches that are left. Call it after the event of its start.

    The loop evaluates its range once, right after that event, and calls the sampler first in each step. So it gets a
    smaller number of steps, and the sampler restores the true one and shifts ``state[BATCH]``.

    Args:
        batches: The number that is done.
        put_back: Called once, before the first sample.
    """
    steps, sampler = state[torchbearer.STEPS], state[torchbearer.SAMPLER]
    if steps != -1:
        state[torchbearer.STEPS] = steps - batches
    waiting = [put_back]

    def shifted(of: State) -> None:
        of[torchbearer.BATCH] += batches
        if waiting:
            of[torchbearer.STEPS] = steps
            waiting.pop()(of)
        sampler(of)

    state[torchbearer.SAMPLER] = shifted


def skip_training(trial: Any, put_back: Event) -> None:
    """Let the next training pass, which is done, do nothing but put everything back; no event is called."""

    def skipped(state: State) -> State:
        state.update(trial.state)
        put_back(state)  # before the validation makes its iterator
        return state

    replace_training_pass(trial, skipped)
