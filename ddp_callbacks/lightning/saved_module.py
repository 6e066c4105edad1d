"""What a rank's module has for itself in the middle of a run: buffers, modes, which parameters are frozen, and
gradients that no engine keeps.

Parameters and optimizers are alike on all ranks, and in Lightning's part of the file; with local steps they are the
averager's, except optimizers beyond the first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.checkpoints.resume import load_buffers
from ddp_callbacks.lightning import _parts


def save_module(trainer: Any) -> dict[str, Any]:
    """Of this rank, between two batches. Local."""
    module = trainer.lightning_module
    return {
        "buffers": {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "modes": [part.training for part in module.modules()],
        "gradients": _gradients(trainer),
    }


def load_module(trainer: Any, states: LocalStates, weights: Sequence[int]) -> None:
    """Inverse of :func:`save_module`. Local.

    Args:
        weights: By which running statistics are averaged, for each rank of ``states``.
    """
    module, own = trainer.lightning_module, states.mine
    load_buffers(module, states.of("buffers"), weights)
    for part, training in zip(module.modules(), own["modes"], strict=False):
        part.training = training
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in own["frozen"])
        saved = own["gradients"].get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device)


def save_optimizers(trainer: Any) -> list[dict[str, Any]]:
    """With local steps, those that the ranks have for themselves and the averager does not keep. Local."""
    if not trainer.strategy.takes_local_steps:
        return []
    return [copy.deepcopy(_parts.torch_optimizer(optimizer).state_dict()) for optimizer in trainer.optimizers[1:]]


def load_optimizers(trainer: Any, states: Sequence[dict[str, Any]]) -> None:
    """Inverse of :func:`save_optimizers`. Local."""
    for optimizer, state in zip(trainer.optimizers[1:], states, strict=False):
        _parts.torch_optimizer(optimizer).load_state_dict(state)


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Those that the next step of an optimizer may see, and that the gradient engine does not keep."""
    module = trainer.lightning_module
    if module.automatic_optimization and not (trainer.strategy.takes_local_steps and _parts.is_accumulating(trainer)):
        return {}
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}
