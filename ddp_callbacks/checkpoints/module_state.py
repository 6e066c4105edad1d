"""Save and load what a rank's module has beside its parameters: buffers, modes, what is frozen, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.checkpoints.format import LocalStates
from ddp_callbacks.checkpoints.resume import load_buffers


def save_module(module: torch.nn.Module, has_gradients: bool) -> dict[str, Any]:
    """Return the module's state on this rank, between two batches. Local.

    Args:
        has_gradients: Whether the next step may use the gradients, and nothing else saves them.
    """
    gradients = ((name, parameter.grad) for name, parameter in module.named_parameters() if has_gradients)
    return {
        "buffers": {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "modes": [part.training for part in module.modules()],
        "gradients": {name: gradient.detach().clone() for name, gradient in gradients if gradient is not None},
    }


def load_module(module: torch.nn.Module, states: LocalStates, weights: Sequence[float]) -> None:
    """Inverse of :func:`save_module`. Local.

    Args:
        weights: The weight of each rank of ``states`` in the average of running statistics.
    """
    own = states.mine
    load_buffers(module, states.of("buffers"), weights)
    for part, training in zip(module.modules(), own["modes"], strict=False):
        part.training = training
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in own["frozen"])
        saved = own["gradients"].get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device)
