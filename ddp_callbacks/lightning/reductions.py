"""Exact reductions for users: Lightning's own round the mean of integers down."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import all_gather_object, all_reduce
from ddp_callbacks.errors import ConfigurationError


def reduce(tensor: torch.Tensor, reduce_op: Any, group: Any = None) -> torch.Tensor:
    """Return a new tensor, reduced over the ranks. A collective.

    Args:
        tensor: Has the same shape on all ranks. The mean of integers is a floating-point number.
        reduce_op: As in Lightning: ``"mean"``, ``"sum"``, ``"max"``, ... or a ``ReduceOp``; ``None`` sums.

    Raises:
        ConfigurationError: ``reduce_op`` is another operation.
    """
    operation = _operation(reduce_op)
    exact = tensor.is_floating_point() or tensor.is_complex()
    wide = tensor.detach() if exact and tensor.element_size() > 2 else tensor.detach().double()
    wide = wide.to(torch.int64) if not exact and operation != "mean" else wide
    result = tensor.dtype if exact else (torch.get_default_dtype() if operation == "mean" else torch.int64)
    if operation in ("mean", "sum"):
        total = all_reduce(wide.clone(memory_format=torch.contiguous_format).view(-1), "a reduction", group)
        total = total / dist.get_world_size(group) if operation == "mean" else total
        return total.view(tensor.shape).to(result)
    parts = torch.stack(all_gather_object(wide, "a reduction", group))
    if operation == "product":
        return parts.prod(0).to(tensor.device, result)
    return (parts.amin(0) if operation == "min" else parts.amax(0)).to(tensor.device, result)


def _operation(reduce_op: Any) -> str:
    if reduce_op is None:
        return "sum"
    for name in ("AVG", "SUM", "MIN", "MAX", "PRODUCT"):
        if reduce_op == getattr(dist.ReduceOp, name) or str(reduce_op).upper() == name:
            return "mean" if name == "AVG" else name.lower()
    if str(reduce_op).lower() == "mean":
        return "mean"
    raise ConfigurationError(f"reduce_op must be one of mean, sum, min, max and product, got {reduce_op!r}.")
