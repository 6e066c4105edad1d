"""Find hooks that read losses or logged values at the end of a training batch, so that they get the whole batch's."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.data.own_code import functions_of, may_read
from ddp_callbacks.lightning import _parts

BATCH_END, LOSS = "on_train_batch_end", "loss"
_LOGGED = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def reads_loss(owner: Any) -> bool:
    """Whether the hook of a module or callback reads the loss of the batch."""
    return _parts.compares_losses(owner) or _may_read(owner, LOSS)


def reads_logged(owner: Any) -> bool:
    """Whether the user's hook of a module or callback reads logged values."""
    return _may_read(owner, *_LOGGED)


def _may_read(owner: Any, *words: str) -> bool:
    is_there = any(each.__name__ == BATCH_END for each in functions_of(owner))
    return is_there and may_read(owner, BATCH_END, *words)
