"""The kernels of torch's ``SyncBatchNorm``, which only builds for GPUs have, in plain torch: what each one returns.

From torch's ``aten/src/ATen/native/cuda/Normalization.cu`` and ``.cuh``. Like those, they refuse operands of the wrong
dtype. Statistics have the accumulation type: float64 for float64, else float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _require(x: Tensor, weight: Tensor | None, *statistics: Tensor) -> None:
    assert x.numel() and x.dim() > 1
    assert {each.dtype for each in statistics} == {_accumulated(x.dtype)}
    assert all(each.shape == (x.shape[1],) and each.is_contiguous() for each in statistics)
    assert weight is None or weight.dtype in (x.dtype, _accumulated(x.dtype))


def _of_channels(vector: Tensor | None, x: Tensor, default: float) -> Any:
    return default if vector is None else vector.to(_accumulated(x.dtype)).view(-1, *[1] * (x.dim() - 2))


def _values(x: Tensor) -> Tensor:
    return x.to(_accumulated(x.dtype))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def update_stats(x: Tensor, running_mean: None, running_var: None, momentum: float) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel."""
    assert x.numel() and running_mean is None and running_var is None
    var, mean = torch.var_mean(_values(x), _all_but_channels(x), correction=0)
    return mean, var


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """``eps`` is not used: it is in ``invstd``."""
    _require(x, weight, mean, invstd)
    normalized = (_values(x) - _of_channels(mean, x, 0)) * _of_channels(invstd, x, 1)
    scaled: Tensor = normalized * _of_channels(weight, x, 1) + _of_channels(bias, x, 0)
    return torch.empty_like(x).copy_(scaled)


def backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """The sums of ``dy`` and ``dy · (x - mean)``, and the gradients of weight and bias; ``None`` if not asked for."""
    _require(x, weight, mean, invstd)
    assert dy.dtype == x.dtype and dy.shape == x.shape
    assert weight is not None or not (weight_g or bias_g)
    sum_dy = _values(dy).sum(_all_but_channels(x))
    sum_dy_xmu = (_values(dy) * (_values(x) - _of_channels(mean, x, 0))).sum(_all_but_channels(x))
    dweight = (sum_dy_xmu * invstd).to(weight.dtype) if weight_g and weight is not None else None
    dbias = sum_dy.to(weight.dtype) if bias_g and weight is not None else None
    return sum_dy if input_g else None, sum_dy_xmu if input_g else None, dweight, dbias


def backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of ``x``; ``count``: the numbers of values per channel that the sums are over, by rank."""
    _require(x, weight, mean, invstd, sum_dy, sum_dy_xmu)
    assert dy.dtype == x.dtype and dy.shape == x.shape
    assert weight is None or weight.dtype == mean.dtype
    assert count.dtype == torch.int32 and count.dim() == 1 and count.is_contiguous()
    total = count.to(mean.dtype).sum()
    slope = _of_channels(invstd * invstd * sum_dy_xmu / total, x, 0)
    centered = _values(dy) - _of_channels(sum_dy / total, x, 0) - (_values(x) - _of_channels(mean, x, 0)) * slope
    scaled: Tensor = centered * _of_channels(invstd, x, 1) * _of_channels(weight, x, 1)
    return torch.empty_like(x).copy_(scaled)


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.batch_norm_update_stats: update_stats,
    torch.batch_norm_elemt: elemt,
    torch.batch_norm_backward_reduce: backward_reduce,
    torch.batch_norm_backward_elemt: backward_elemt,
}
