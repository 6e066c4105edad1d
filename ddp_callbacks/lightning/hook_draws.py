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


def surround_hooks(
    trainer: Any, draws: WholeDraws, batches: Batches, rows: Callable[[], Rows | None], replacements: Replacements
) -> None:
    """Surround the hooks of a run's batches.

    Args:
        trainer: Its module and callbacks have the hooks.
        draws: Draws for the whole batch.
        batches: Knows the rows of the next batch.
        rows: Returns the rows of the current batch; ``None`` if they are unknown.
        replacements: Ends it.
    """

    def in_hook(stage: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = rows()
        with nullcontext() if found is None else draws.forward(found, stage):
            return hook(*args, **kwargs)

    def before_transfer(hook: Callable[..., Any], batch: Any, dataloader_idx: int = 0) -> Any:
        """Let the user's hook draw for the batch, whose share is noted later."""
        loaders = _parts.loaders_of_batch(_parts.active_loop(trainer), dataloader_idx)
        with draws.forward(batches.next_rows(loaders), "before transfer"):
            return hook(batch, dataloader_idx)

    def outside(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with draws.aside():
            return method(*args, **kwargs)

    for owner, name in _parts.own_batch_hooks(trainer.lightning_module, *trainer.callbacks):  # may compute the model
        replacements.replace(owner, name, functools.partial(in_hook, f"{type(owner).__name__}.{name}"))
    if "on_before_batch_transfer" in _parts.own_transfer_hooks(trainer):
        replacements.replace(trainer.lightning_module, "_on_before_batch_transfer", before_transfer)
    replacements.replace(trainer.fit_loop, "setup_data", outside)  # a step may ask for their number
