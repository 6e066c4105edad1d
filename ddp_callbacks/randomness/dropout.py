"""Dropout as torch computes it on the CPU, without a dispatch mode around each of its operators."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_callbacks._torch import is_transformed


def is_simple(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether :func:`dropout` computes this call of ``torch.nn.functional.dropout``."""
    if type(input) is not torch.Tensor or input.device.type != "cpu" or is_transformed(input):
        return False
    return training and 0 < p < 1 and not inplace


def dropout(
    draw: Callable[[torch.Tensor, float], object], input: torch.Tensor, p: float = 0.5, *_: bool, **__: bool
) -> torch.Tensor:
    """Compute ``torch.nn.functional.dropout`` with a mask that ``draw`` fills.

    Args:
        draw: Sets the elements of a tensor to 1 with a probability, else to 0.
    """
    with torch.no_grad():
        mask = torch.empty_like(input)
        draw(mask, 1 - p)
        mask.div_(1 - p)
    return input * mask
