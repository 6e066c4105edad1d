"""Find hooks that read losses or logged values at the end of a training batch, so that they get the whole batch's."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.own_code import functions_of, may_read
from ddp_callbacks.lightning import _parts

BATCH_END, LOSS = "on_train_batch_end", "loss"
_LOGGED = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def readers(owners: list[Any], joins_losses: bool) -> tuple[list[Any], list[Any]]:
    """Return the objects whose hooks read the loss, and those that read logged values. A collective.

    Both are empty if only some ranks have such hooks.

    Args:
        owners: The module and the callbacks.
        joins_losses: Whether the ranks' losses make up that of the batch. If not, only Lightning's own callbacks that
            decide by losses get a joint one.
    """
    of_loss = [each for each in owners if _parts.compares_losses(each) or (joins_losses and _reads(each, LOSS))]
    of_logged = [each for each in owners if _reads(each, *_LOGGED)]
    own = [[type(each).__name__ for each in found] for found in (of_loss, of_logged)]
    of_ranks = all_gather_object(own, "which hooks read losses")
    return (of_loss, of_logged) if all(other == own for other in of_ranks) else ([], [])


def _reads(owner: Any, *words: str) -> bool:
    is_there = any(each.__name__ == BATCH_END for each in functions_of(owner))
    return is_there and may_read(owner, BATCH_END, *words)
