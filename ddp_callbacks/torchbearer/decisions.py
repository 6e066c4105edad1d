"""Make all ranks stop together."""

from __future__ import annotations

import torch.distributed as dist
import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import CallbackList, EarlyStopping, TerminateOnNaN

from ddp_callbacks.comm.collectives import any_rank
from ddp_callbacks.torchbearer.base import DistributedCallback, State

_MAY_STOP = ("on_forward", "on_criterion", "on_backward", "on_step_training")
_MAY_STOP_VALIDATION = ("on_forward_validation", "on_criterion_validation", "on_step_validation")


class AgreeToStop(DistributedCallback):
    """If any rank sets ``state[STOP_TRAINING]``, stop all ranks at the same step.

    Ranks that read merged epoch metrics decide the same anyway. This covers decisions that differ, such as
    ``TerminateOnNaN`` on one rank's running loss. The ranks always agree at the end of each epoch. After each step,
    which costs a small all-reduce, they agree only if a callback may stop there: ``TerminateOnNaN``,
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
