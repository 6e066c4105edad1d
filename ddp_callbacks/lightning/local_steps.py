"""Local steps in a Trainer: where Lightning's optimizers step, and the moments at which a window closes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.replacement import Replacements
from ddp_callbacks.local_sgd import ParameterAverager, set_gradients_aside

MakeAverager = Callable[..., ParameterAverager]


class LocalSteps:
    """The windows of one fit; see :class:`ddp_callbacks.ParameterAverager`.

    A step is a batch in which an optimizer stepped: with gradients that are accumulated over batches, or by hand with
    several optimizers, the window closes behind the batch that fills it. Windows close early for a validation, a
    checkpoint and the end of an epoch.

    Args:
        make: :class:`ddp_callbacks.ParameterAverager` with its settings; takes the module and the optimizer.
    """

    def __init__(self, trainer: Any, module: torch.nn.Module, make: MakeAverager, replacements: Replacements) -> None:
        self._trainer = trainer
        self._module = module
        self._make = make
        self._averager: ParameterAverager | None = None
        self._weight = 0.0  # since the last step
        self._has_stepped = False  # in this batch
        # Before any hook at the end of an epoch; the strategy is not told of that moment.
        replacements.before(_parts.connector(trainer, "logger"), "epoch_end_reached", self._close_in_training)

    def begin(self) -> None:
        """The parameters are those to train from. A collective."""
        optimizers = self._trainer.strategy.optimizers
        self._averager = self._make(self._module, optimizer=optimizers[0] if optimizers else None)

    @property
    def is_last_step(self) -> bool:
        """Whether the next step closes the window; the same on all ranks."""
        return self._averager is None or self._averager.is_last_step

    def outer_step(self) -> None:
        """Make the parameters one again, if training has begun. A collective."""
        if self._averager is not None:
            self._averager.outer_step()

    @contextmanager
    def backward(self, batches: Batches) -> Iterator[None]:
        """Around a backward: one of a padding batch leaves no gradients."""
        if batches.weight:
            yield
            return
        put_back = set_gradients_aside(self._module)
        try:
            yield
        finally:
            put_back()

    def state_dict(self) -> dict[str, Any]:
        """Of the window under way. Local."""
        averager = None if self._averager is None else self._averager.state_dict()
        return {"averager": averager, "weight": self._weight, "has_stepped": self._has_stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, on the same rank of as many. Local."""
        self._weight, self._has_stepped = state["weight"], state["has_stepped"]
        if self._averager is not None and state["averager"] is not None:
            self._averager.load_state_dict(state["averager"])

    def note_step(self) -> None:
        """An optimizer has stepped."""
        self._has_stepped = True
        if self._trainer.lightning_module.automatic_optimization:
            self._count()

    def end_training_step(self, batches: Batches | None) -> None:
        """``training_step`` has returned; with automatic optimization its backward and step come behind it."""
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
