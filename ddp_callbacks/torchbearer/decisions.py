"""At the end of an epoch all ranks have the same model, and they stop together."""

from __future__ import annotations

import torch.distributed as dist
import torchbearer
from torchbearer import CALLBACK_LIST, MODEL, Callback
from torchbearer.callbacks import CallbackList, EarlyStopping, TerminateOnNaN

from ddp_callbacks.comm.collectives import any_rank
from ddp_callbacks.replicas import require_equal_replicas
from ddp_callbacks.torchbearer.base import DistributedCallback, State

_IS_AGREED = torchbearer.state_key("ddp_callbacks_stop_is_agreed")
"""State key, set if all ranks know whether one of them stops at the end of this epoch."""

_MAY_STOP = ("on_forward", "on_criterion", "on_backward", "on_step_training")
_MAY_STOP_VALIDATION = ("on_forward_validation", "on_criterion_validation", "on_step_validation")


class CompareReplicas(DistributedCallback):
    """At the end of each epoch of ``run``: raise unless parameters and buffers are equal on all ranks.

    See :func:`ddp_callbacks.replicas.require_equal_replicas`. It costs about one pass over the model's memory. The same
    message tells all ranks if one of them has set ``state[STOP_TRAINING]``.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank; names the tensors that differ, the ranks and hosts.
    """

    def on_checkpoint(self, state: State) -> None:
        when = f"at the end of epoch {state[torchbearer.EPOCH]}"
        # A user's callback, perhaps on one rank alone, may still change its mind in this event.
        may_change = any(handles(callback, ("on_checkpoint",)) for callback in flat_callbacks(state[CALLBACK_LIST]))
        mine = [bool(state[torchbearer.STOP_TRAINING]), may_change]
        stops, changes = zip(*require_equal_replicas(state[MODEL], when, self.process_group, mine), strict=True)
        state[torchbearer.STOP_TRAINING], state[_IS_AGREED] = any(stops), not any(changes)


class AgreeToStop(DistributedCallback):
    """If any rank sets ``state[STOP_TRAINING]``, stop all ranks at the same step.

    Ranks that read merged epoch metrics decide the same anyway. This covers decisions that differ, such as
    ``TerminateOnNaN`` on one rank's running loss. The ranks always agree at the end of each epoch, by the message of
    :class:`CompareReplicas` unless a user's callback on some rank handles ``on_checkpoint``. After each step, which
    costs a small message, they agree only if a callback may stop there: ``TerminateOnNaN``,
    ``EarlyStopping(step_on_batch=True)``, or a user's callback with an event after the forward pass. This must be the
    last callback; it moves itself there.

    Args:
        process_group: ``None`` is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._after_step = False
        self._after_validation_step = False

    def on_init(self, state: State) -> None:
        super().on_init(state)
        callbacks = state[torchbearer.CALLBACK_LIST]
        # A new list: Torchbearer is iterating over the old one.
        callbacks.callback_list = [other for other in callbacks.callback_list if other is not self] + [self]

    def on_start(self, state: State) -> None:
        callbacks = flat_callbacks(state[torchbearer.CALLBACK_LIST])
        self._after_step = any(_may_stop(callback, _MAY_STOP) for callback in callbacks)
        self._after_validation_step = any(_may_stop(callback, _MAY_STOP_VALIDATION) for callback in callbacks)

    def on_step_training(self, state: State) -> None:
        if self._after_step:
            self._agree(state)

    def on_step_validation(self, state: State) -> None:
        if self._after_validation_step:
            self._agree(state)

    def on_checkpoint(self, state: State) -> None:
        if not state.get(_IS_AGREED):
            self._agree(state)

    def _agree(self, state: State) -> None:
        stop = bool(state[torchbearer.STOP_TRAINING])
        state[torchbearer.STOP_TRAINING] = any_rank(stop, "the decision to stop", self.process_group)


def flat_callbacks(callbacks: CallbackList) -> list[Callback]:
    """All callbacks of a list, including those in nested lists."""
    return [
        inner for item in callbacks for inner in (flat_callbacks(item) if isinstance(item, CallbackList) else [item])
    ]


def _may_stop(callback: Callback, events: tuple[str, ...]) -> bool:
    if isinstance(callback, EarlyStopping):
        return bool(callback.step_on_batch)
    if isinstance(callback, TerminateOnNaN):
        return True
    return handles(callback, events)


def handles(callback: Callback, events: tuple[str, ...]) -> bool:
    """Whether a user's callback, not Torchbearer's, has one of these events."""
    kind = type(callback)
    if kind.__module__.startswith(("torchbearer.", "ddp_callbacks.")) and not _is_decorated(callback):
        return False
    return any(
        event in vars(callback) or getattr(kind, event, None) is not getattr(Callback, event) for event in events
    )


def _is_decorated(callback: Callback) -> bool:
    """Whether ``@torchbearer.callbacks.on_...`` made it from a user's function."""
    return type(callback).__module__ == "torchbearer.callbacks.decorators"
