"""What a rank's module has for itself in the middle of a run: buffers, gradients, modes; with local steps, all of it.

Parameters and optimizers are alike on all ranks, except with local steps, and are in Lightning's part of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.lightning._lightning import is_accumulating, torch_optimizer

_AVERAGED = ("running_mean", "running_var")


def save_module(trainer: Any) -> dict[str, Any]:
    """Of this rank, between two batches. Local."""
    module = trainer.lightning_module
    return {
        "buffers": {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
        "modes": [part.training for part in module.modules()],
        "gradients": _gradients(trainer),
    }


@torch.no_grad()
def load_module(trainer: Any, ranks: Sequence[dict[str, Any]], mine: int | None, weights: Sequence[int]) -> None:
    """Inverse of :func:`save_module`. Local.

    Args:
        ranks: Of all ranks that wrote the file.
        mine: Which of them is this rank's; ``None`` if there were another number of ranks.
        weights: By which running statistics are averaged, for each of ``ranks``.
    """
    module, own = trainer.lightning_module, ranks[mine or 0]
    for name, buffer in module.named_buffers():
        if name in own["buffers"]:
            saved = own["buffers"][name]
            if mine is None and name.rpartition(".")[2] in _AVERAGED:
                saved = _average([each["buffers"][name] for each in ranks], weights)
            buffer.copy_(saved)
    for part, training in zip(module.modules(), own["modes"], strict=False):
        part.training = training
    for name, parameter in module.named_parameters():
        saved = own["gradients"].get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device)


def save_local(trainer: Any) -> dict[str, Any]:
    """Parameters and optimizers, where those of the ranks differ. Local."""
    return {
        "parameters": [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()],
        "optimizers": [_copy(torch_optimizer(optimizer).state_dict()) for optimizer in trainer.optimizers],
    }


@torch.no_grad()
def load_local(trainer: Any, own: dict[str, Any]) -> None:
    """Inverse of :func:`save_local`. Local."""
    for parameter, saved in zip(trainer.lightning_module.parameters(), own["parameters"], strict=True):
        parameter.copy_(saved)
    for optimizer, state in zip(trainer.optimizers, own["optimizers"], strict=True):
        torch_optimizer(optimizer).load_state_dict(state)


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Those that the next step of an optimizer may see, and that the gradient engine does not keep."""
    module = trainer.lightning_module
    if module.automatic_optimization and not (trainer.strategy.takes_local_steps and is_accumulating(trainer)):
        return {}
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}


def _average(values: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    if not sum(weights):
        return values[0]
    weighted = [value * weight for value, weight in zip(values, weights, strict=True)]
    return torch.stack(weighted).sum(0) / sum(weights)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value
