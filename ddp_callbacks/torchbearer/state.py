"""What the callbacks read in a Trial's state, and put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
import torchbearer

from ddp_callbacks.comm.held import Held, optimizers_in, trained_by
from ddp_callbacks.data.shares import Share, common_size
from ddp_callbacks.errors import ConfigurationError

State: TypeAlias = Any  # torchbearer.State, a dict whose keys are torchbearer.StateKey

Event: TypeAlias = Callable[[State], None]

DATA_KEYS = (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA, torchbearer.TEST_DATA)

ROWS = (torchbearer.X, torchbearer.Y_TRUE, torchbearer.Y_PRED)
"""State keys of what has a row for each sample of the batch."""

SHARE = torchbearer.state_key("ddp_callbacks_share")
"""State key of this rank's :class:`ddp_callbacks.Share` of the current batch."""

WEIGHS_LOSS = torchbearer.state_key("ddp_callbacks_weighs_loss")
"""State key, set if the loss must be weighted before backward because layers (SyncBatchNorm) communicate in it."""

STEP_TIMES = torchbearer.state_key("ddp_callbacks_step_times")
"""State key of the engine's :class:`ddp_callbacks.replicas.step_times.StepTimes`, if the ranks sum gradients."""

RUN_RANDOM_STATE = torchbearer.state_key("ddp_callbacks_run_random_state")
"""State key of the run's :class:`ddp_callbacks.data.random_state.RunRandomState`, if the ranks draw apart."""


def share_of(state: State) -> Share:
    """Return this rank's share of the current batch; without sharding, the whole batch."""
    share: Share | None = state.get(SHARE)
    return share or Share(common_size(state[torchbearer.X]) or 1, None)


def held_by(state: State) -> Held:
    """Return what the Trial trains: the modules in its state, and what else its optimizers and callbacks' have."""
    own = optimizers_in(state[torchbearer.CALLBACK_LIST])

    def trained() -> list[torch.nn.Parameter]:
        return trained_by([*own, *(value for value in state.values() if isinstance(value, torch.optim.Optimizer))])

    others = {str(key): value for key, value in state.items() if value is not state[torchbearer.MODEL]}
    return Held(state[torchbearer.MODEL], others, trained)


Made = TypeVar("Made")


def in_training_pass(made: Made | None) -> Made:
    """Return ``made``, an object that a callback has made for the current training pass.

    Raises:
        ConfigurationError: It is ``None``: an evaluation within the pass has removed it.
    """
    if made is None:
        raise ConfigurationError(
            "the Trial was evaluated, or has predicted, in the middle of a training pass, which DDPCallback cannot "
            "continue. Call evaluate() and predict() between passes: in on_end_epoch for example."
        )
    return made
