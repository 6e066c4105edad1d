"""What a rank without a sample does in a batch of an evaluation, so that nothing which the user collects has it twice.

It skips the step and the hooks of the batch. If it has had no sample so far, its first step and hooks get a batch
without rows instead: hooks at the end may concatenate what they find. In training, every rank takes part in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_callbacks.data.nested import without_rows
from ddp_callbacks.replacement import Replacements

_STEPS = ("validation_step", "test_step")
_HOOKS = tuple(f"on_{stage}_batch_{end}" for stage in ("validation", "test") for end in ("start", "end"))


def skip_batch(trainer: Any) -> Callable[[], None]:
    """Let the step and the hooks of an evaluation's batch do nothing, until the result is called."""
    skipped, module = Replacements(), trainer.lightning_module
    for owner in (module, *trainer.callbacks):
        for name in (*_STEPS, *_HOOKS) if owner is module else _HOOKS:
            skipped.replace(owner, name, lambda *_, **__: None)
    return skipped.close


def take_rows(trainer: Any, padding: Any, *undo: Callable[[], None]) -> tuple[Any, Callable[[], None]]:
    """Return a batch without rows, and what ends it. After each ``undo``, a step that fails gets ``padding``."""

    def call(step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(batch, *args, **kwargs)
        except Exception:  # many layers refuse a batch without rows
            for forget in undo:
                forget()
            return step(padding, *args, **kwargs)

    replaced = Replacements()
    for name in _STEPS:
        replaced.replace(trainer.lightning_module, name, call)
    return without_rows(padding), replaced.close
