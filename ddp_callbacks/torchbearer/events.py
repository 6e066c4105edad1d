"""In which of a Trial's events all ranks draw the same random numbers.

================================================  ====================================================================
``on_sample``, ``on_forward``, ``on_criterion``   each rank its own: they handle its part of the batch, and may augment
the same of validation, ``on_step_validation``    likewise
``on_backward``, ``on_step_training``             alike, where a callback of the user's own acts in them
all others                                        alike: they may initialize or prune parameters
================================================  ====================================================================

What draws alike must be called on all ranks, and draw equally much. Where it does not (it asks for rank 0), the ranks
are together again at the next of the events before which they meet.
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
_MEETING = ("on_start_epoch", "on_end_training", "on_end_epoch", "on_end")


def draw_alike(callbacks: CallbackList, random_state: RunRandomState) -> None:
    """Let the events of this list draw as the module says. Local; the events are collectives from then on."""
    handled: set[str] = set()
    for name in _ALIKE:
        setattr(callbacks, name, _drawing_alike(getattr(callbacks, name), random_state, name in _MEETING))
    for name in _ALIKE_IN_BATCH:
        setattr(callbacks, name, _drawing_alike_in_batch(getattr(callbacks, name), random_state, handled))
    callbacks.on_start_training = _noting(callbacks, handled)


def _drawing_alike(event: Event, random_state: RunRandomState, meets: bool) -> Event:
    @functools.wraps(event)
    def drawing_alike(state: State) -> None:
        if meets and random_state.is_open:
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
    """At the start of each pass: in which events of a batch a callback of the user's own acts."""
    event: Event = callbacks.on_start_training

    @functools.wraps(event)
    def noting(state: State) -> None:
        found = flat_callbacks(callbacks)
        handled.clear()
        handled.update(name for name in _ALIKE_IN_BATCH if any(handles(callback, (name,)) for callback in found))
        event(state)

    return noting
