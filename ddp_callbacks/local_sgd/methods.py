"""Settings of the methods that synchronize every few steps; :mod:`.averager` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ddp_callbacks.errors import ConfigurationError


class _Method:
    """Base of both methods: torch's SGD on the averaged pseudo-gradient, with Nesterov momentum if any.

    As this base is not a dataclass, jsonargparse respects the class that a YAML file names. Of two dataclasses without
    another base it would take the first whose fields fit.
    """

    every: int
    outer_lr = 1.0
    outer_momentum = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigurationError(f"every must be a positive number of steps, got {self.every!r}.")
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < float("inf"):
            raise ConfigurationError(f"outer_lr must be positive, got {self.outer_lr!r}; the paper's is 0.7.")
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"outer_momentum must be at least 0 and below 1, got {self.outer_momentum!r}; the paper's is 0.9."
            )


@dataclass(frozen=True)
class LocalSGD(_Method):
    """Average the parameters over the ranks every few steps, instead of the gradients in each step.

    Args:
        every: Number of optimizer steps in a window.

    Raises:
        ConfigurationError: ``every`` is not a positive integer.
    """

    every: int


@dataclass(frozen=True)
class DiLoCo(_Method):
    """Update the parameters every few steps: SGD with Nesterov momentum on the averaged pseudo-gradient.

    The defaults are the paper's (https://arxiv.org/abs/2311.08105, section 3). It reports good results with AdamW as
    the inner optimizer and windows of up to 500 steps.

    Args:
        every: Number of optimizer steps in a window.
        outer_lr: Learning rate of the outer optimizer; 1 without momentum is :class:`LocalSGD`.
        outer_momentum: Nesterov momentum of the outer optimizer; 0 for none.

    Raises:
        ConfigurationError: ``every`` is not a positive integer, ``outer_lr`` is not positive, or ``outer_momentum`` is
            not in [0, 1).
    """

    every: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9


Sync = Literal["every_step"] | LocalSGD | DiLoCo


def check_sync(sync: Any, reduction: str | None = None, *, comm_hook: Any = None, sync_batchnorm: bool = False) -> None:
    """Raise :class:`ConfigurationError` unless ``sync`` is a :data:`Sync` and compatible with the other settings."""
    if sync != "every_step" and not isinstance(sync, LocalSGD | DiLoCo):
        raise ConfigurationError(f'sync must be "every_step", LocalSGD(...) or DiLoCo(...), got {sync!r}.')
    if sync == "every_step":
        return
    if reduction == "sum":
        raise ConfigurationError(
            f"sync={sync!r} takes local steps, which would be shorter on more processes if the loss is a sum. Take the "
            'mean (reduction="mean").'
        )
    if comm_hook is not None or sync_batchnorm:
        batch_norm = "sync_batchnorm=True exchanges statistics in every step"
        conflict = batch_norm if comm_hook is None else "a comm_hook sums gradients"
        raise ConfigurationError(f"{conflict}, but sync={sync!r} sends none. Use one of them.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
