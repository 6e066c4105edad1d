"""Find what reads losses or logged values at the end of a training batch, so that it gets those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_callbacks.data.own_code import functions_of, may_read
from ddp_callbacks.lightning import _parts

BATCH_END, LOSS = "on_train_batch_end", "loss"
_LOGGED = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def reads_loss(owner: Any) -> bool:
    """Whether the hook of a module or callback reads the loss of the batch."""
    return _parts.compares_losses(owner) or _may_read(owner, LOSS)


def methods_that_read_logged(*owners: Any) -> Iterator[tuple[Any, str]]:
    """Yield objects and the names of their methods that read logged values: monitors, and hooks of users."""
    for owner in owners:
        yield from ((owner, name) for name in _parts.MONITORED if hasattr(owner, name))
        if _may_read(owner, *_LOGGED):
            yield owner, BATCH_END


def _may_read(owner: Any, *words: str) -> bool:
    is_there = any(each.__name__ == BATCH_END for each in functions_of(owner))
    return is_there and may_read(owner, BATCH_END, *words)
