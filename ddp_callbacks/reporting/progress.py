"""Where a rank is in its training, from what it draws of loaders and from the steps of its optimizers."""

from __future__ import annotations

import weakref
from typing import Any


class Progress:
    """Counts the steps of a rank, its epochs and its validations.

    Attributes:
        steps, validations, held_out: How many there were; batches of validations.
        epoch: The number of the last one that has begun, from 0, as programs and their bars count.
        validates: Whether the last batch was one of a validation.
        has_batch: Whether it has drawn a batch since the last step; ``None``: no loader of ours draws.
        is_first: Whether the last batch was the first one of a pass.
        loads_all: Whether each process loads all batches of a pass.
        samples: Of all ranks, in the largest batch; 0 if unknown.
    """

    def __init__(self) -> None:
        self.steps = self.validations = self.held_out = self.samples = 0
        self.epoch = -1
        self.validates = self.loads_all = self.is_first = False
        self.has_batch: bool | None = None
        self._is_at_end = False  # of a pass
        self._passes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps_at_pass = self._steps_at_validation = -1  # when the last of each began

    def begin_loading(self, batches: Any, training: bool) -> None:
        """Note that the rank asks the iterator ``batches`` for its next batch."""
        self.validates, self.loads_all = not training, self.loads_all or getattr(batches, "loads_all", False)
        self.is_first = batches not in self._passes
        if not self.is_first:
            return
        self._passes.add(batches)
        if not training:
            self.validations += self.steps > self._steps_at_validation  # all loaders of a validation count once
            self._steps_at_validation = self.steps
        elif self.epoch < 0 or (self.steps > self._steps_at_pass and not getattr(batches, "is_continued", False)):
            self._steps_at_pass, self.epoch = self.steps, self.epoch + 1

    def end_loading(self, has_batch: bool, samples: int = 0) -> None:
        """Note that it has the batch, or that there is none."""
        if self.validates:
            self.validates = has_batch
            self.held_out += has_batch
        else:
            self.has_batch, self._is_at_end = has_batch or self.has_batch, not has_batch
            self.samples = max(self.samples, samples)

    def step(self) -> bool:
        """Note that an optimizer has stepped. Return whether it counts: of several with one batch, the first does."""
        counts = self.has_batch is not False or self._is_at_end  # a batch that was drawn ahead
        self.steps += counts
        self.has_batch, self._is_at_end = self.has_batch and False, False
        return counts
