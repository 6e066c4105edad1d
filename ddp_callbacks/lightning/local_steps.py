"""Local steps in a Trainer: count the steps of Lightning's optimizers, and close windows at the right moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.local_sgd import ParameterAverager, set_gradients_aside
from ddp_callbacks.replacement import Replacements


class LocalSteps:
    """The windows of one fit; see :class:`ddp_callbacks.ParameterAverager`.

    A step is a batch in which an optimizer stepped, also with accumulated gradients, or with several optimizers in
    manual optimization. The window closes after the batch that fills it, and early before a validation, before a
    checkpoint and at the end of an epoch.

    Args:
        sync, options: How and when the parameters are averaged.
    """

    def __init__(
        self, trainer: Any, module: torch.nn.Module, sync: Any, options: EngineOptions, replacements: Replacements
    ) -> None:
        self._trainer, self._module, self._sync, self._options = trainer, module, sync, options
        self._averager: ParameterAverager | None = None
        self._weight = 0.0  # sum since the last step
        self._has_stepped = False  # in this batch
        # Close before any hook at the end of an epoch; Lightning does not tell the strategy of that moment.
        replacements.before(_parts.connector(trainer, "logger"), "epoch_end_reached", self._close_in_training)

    def begin(self) -> None:
        """Begin to train from the current parameters. A collective."""
        optimizer = next(iter(self._trainer.strategy.optimizers), None)
        size, compress = self._options.bucket_cap_mb, self._options.compress
        self._averager = ParameterAverager(self._module, self._sync, optimizer, bucket_cap_mb=size, compress=compress)

    def follow(self) -> None:
        """Average parameters that were added or replaced, too. A collective then."""
        if self._averager is not None:
            self._averager.follow()

    @property
    def is_last_step(self) -> bool:
        """Whether the next step closes the window; the same on all ranks."""
        return self._averager is None or self._averager.is_last_step

    def outer_step(self) -> None:
        """Average the parameters, if training has begun. A collective."""
        if self._averager is not None:
            self._averager.outer_step()

    @contextmanager
    def backward(self, batches: Batches) -> Iterator[None]:
        """Discard the gradients of a backward inside, if the batch has weight 0, as a padding batch has."""
        with ExitStack() as stack:
            if not batches.weight:
                stack.callback(set_gradients_aside(self._module))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current window. Local."""
        averager = None if self._averager is None else self._averager.state_dict()
        return {"averager": averager, "weight": self._weight, "has_stepped": self._has_stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, on the same rank of the same number of ranks. Local."""
        self._weight, self._has_stepped = state["weight"], state["has_stepped"]
        if self._averager is not None and state["averager"] is not None:
            self._averager.load_state_dict(state["averager"])

    def note_step(self) -> None:
        """Note that an optimizer has stepped."""
        self._has_stepped = True
        if self._trainer.lightning_module.automatic_optimization:
            self._count()

    def end_training_step(self, batches: Batches | None) -> None:
        """Count the weight of a batch after ``training_step``. Automatic optimization then runs backward and step."""
        self._weight += 1.0 if batches is None else batches.weight
        if self._has_stepped:
            self._count()

    def _count(self) -> None:
        assert self._averager is not None
        weight, self._weight, self._has_stepped = self._weight, 0.0, False
        self._averager.step(weight)

    def _close_in_training(self) -> None:
        if self._trainer.training:
            self.outer_step()
