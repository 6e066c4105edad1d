"""The option of strategies and callbacks: whose random numbers the steps and the samples draw."""

from __future__ import annotations

from typing import Literal, get_args

from ddp_callbacks.errors import ConfigurationError

Randomness = Literal["global", "by_sample", "by_process"]


def check_randomness(randomness: str) -> None:
    """Raise :class:`ConfigurationError` unless ``randomness`` is a :data:`Randomness`."""
    if randomness not in get_args(Randomness):
        raise ConfigurationError(
            'randomness must be "global" (steps draw for the global batch), "by_sample" (and samples draw under seeds '
            'of their own on one process, too) or "by_process" (each process draws its own numbers in steps), got '
            f"{randomness!r}."
        )
