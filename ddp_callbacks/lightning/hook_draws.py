"""Let the user's hooks of batches draw the random numbers of the whole batch, as a step does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.randomness import Rows, WholeDraws
from ddp_callbacks.replacement import Replacements


class HookDraws:
    """Surrounds the hooks of a run's batches.

    Args:
        trainer: Its module and callbacks have the hooks.
        draws: Draws for the whole batch.
        batches: Knows the rows of the next batch.
        rows: Returns the rows of the current batch; ``None`` if they are unknown.
        replacements: Ends it.
    """

    def __init__(
        self,
        trainer: Any,
        draws: WholeDraws,
        batches: Batches,
        rows: Callable[[], Rows | None],
        replacements: Replacements,
    ) -> None:
        self._trainer, self._draws, self._batches, self._rows = trainer, draws, batches, rows
        for owner, name in _parts.own_batch_hooks(trainer.lightning_module, *trainer.callbacks):
            in_hook = functools.partial(self._in_batch_hook, f"{type(owner).__name__}.{name}")
            replacements.replace(owner, name, in_hook)  # it may compute the model
        if "on_before_batch_transfer" in _parts.own_transfer_hooks(trainer):
            replacements.replace(trainer.lightning_module, "_on_before_batch_transfer", self._before_transfer)
        replacements.replace(
            trainer.fit_loop, "setup_data", self._outside_of_batches
        )  # a step may ask for their number

    def _before_transfer(self, hook: Callable[..., Any], batch: Any, dataloader_idx: int = 0) -> Any:
        """Let the user's hook draw for the batch, whose share is noted later."""
        loaders = _parts.loaders_of_batch(_parts.active_loop(self._trainer), dataloader_idx)
        with self._draws.forward(self._batches.next_rows(loaders), "before transfer"):
            return hook(batch, dataloader_idx)

    def _in_batch_hook(self, stage: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows = self._rows()
        with nullcontext() if rows is None else self._draws.forward(rows, stage):
            return hook(*args, **kwargs)

    def _outside_of_batches(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._draws.aside():
            return method(*args, **kwargs)
