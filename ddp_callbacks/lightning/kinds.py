"""Kinds of values that Lightning passes around, and that do not travel as they are: NumPy arrays, named tuples."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map


def with_tensors(value: Any) -> Any:
    """``value`` with its arrays as tensors."""
    return tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, numpy.ndarray) else leaf, value)


def like(model: Any, value: Any) -> Any:
    """``value`` with arrays and named tuples where ``model`` has them."""
    if isinstance(model, numpy.ndarray):
        return value.numpy() if isinstance(value, torch.Tensor) else value
    if isinstance(model, dict):
        return {key: like(model.get(key), item) for key, item in value.items()}
    if isinstance(model, list | tuple):
        models = list(model) + [model[-1]] * (len(value) - len(model)) if len(model) else [None] * len(value)
        items = [like(*pair) for pair in zip(models, value, strict=False)]
        if hasattr(model, "_fields"):
            return type(model)(*items)
        return items if isinstance(model, list) else tuple(items)
    return value
