"""Which of a Trial's events draw the same random numbers on all ranks.

================================================  ====================================================================
``on_sample``, ``on_forward``, ``on_criterion``   different per rank: they handle its part of the batch, and may augment
the same of validation, ``on_step_validation``    likewise
``on_backward``, ``on_step_training``             the same, if a user's callback handles them
all others                                        the same: they may initialize or prune parameters
================================================  ====================================================================

An event that draws the same must run on all ranks and draw the same amount. If it doesn't (it runs only on rank 0), the
ranks are synchronized again before the next event in ``_MEETING``, at the end of a pass by the message that merges its
metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

from torchbearer.callbacks import CallbackList

from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.torchbearer.base import State
from ddp_callbacks.torchbearer.decisions import flat_callbacks, handles

Event: TypeAlias = Callable[[State], None]

_ALIKE = (
    "on_start",
    "on_start_epoch",
    "on_start_training",
    "on_end_training",
    "on_start_validation",
    "on_end_validation",
    "on_end_epoch",
    "on_checkpoint",
    "on_end",
)
_ALIKE_IN_BATCH = ("on_backward", "on_step_training")
_MEETING = ("on_start_epoch", "on_end_training", "on_end_validation", "on_end")


def draw_alike(callbacks: CallbackList, random_state: RunRandomState) -> None:
    """Make the events of this list draw as described above. Local; afterwards the events are collectives."""
    handled: set[str] = set()
    for name in _ALIKE:
        setattr(callbacks, name, _drawing_alike(getattr(callbacks, name), random_state, name in _MEETING))
    for name in _ALIKE_IN_BATCH:
        setattr(callbacks, name, _drawing_alike_in_batch(getattr(callbacks, name), random_state, handled))
    callbacks.on_start_training = _noting(callbacks, handled)


def _drawing_alike(event: Event, random_state: RunRandomState, meets: bool) -> Event:
    @functools.wraps(event)
    def drawing_alike(state: State) -> None:
        if meets and random_state.is_open and not random_state.is_fresh:
            random_state.synchronize()
        with random_state.alike():
            event(state)

    return drawing_alike


def _drawing_alike_in_batch(event: Event, random_state: RunRandomState, handled: set[str]) -> Event:
    @functools.wraps(event)
    def drawing_alike(state: State) -> None:
        with random_state.alike_in_batch() if event.__name__ in handled else nullcontext():
            event(state)

    return drawing_alike


def _noting(callbacks: CallbackList, handled: set[str]) -> Event:
    """At the start of each pass, note which batch events a user's callback handles."""
    event: Event = callbacks.on_start_training

    @functools.wraps(event)
    def noting(state: State) -> None:
        found = flat_callbacks(callbacks)
        handled.clear()
        handled.update(name for name in _ALIKE_IN_BATCH if any(handles(callback, (name,)) for callback in found))
        event(state)

    return noting
