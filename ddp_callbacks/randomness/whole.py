"""Draw for the whole batch, and keep the rows of this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_callbacks._torch import OpOverload
from ddp_callbacks.randomness import bernoulli
from ddp_callbacks.randomness.operators import base_name, written
from ddp_callbacks.randomness.rows import BatchDim, Rows, is_dense, order_of

_BERNOULLI = torch.ops.aten.bernoulli_.float


def drawn_shape(operator: OpOverload, arguments: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the shape for which the operator draws; ``None`` if it has none."""
    if "size" in arguments:
        return list(arguments["size"])
    if base_name(operator) == "multinomial":  # of one distribution, or of each row's, as many as the program says
        return [*arguments["self"].shape[:-1], arguments["num_samples"]]
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    if base_name(operator) == "normal" and len(tensors) > 1:  # of means and standard deviations
        return list(torch.broadcast_shapes(*(each.shape for each in tensors[:2])))
    return list(tensors[0].shape) if tensors else None


def sampled_shape(operator: OpOverload, arguments: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the part of :func:`drawn_shape` that may hold the batch: not the dimension of a distribution's entries."""
    shape = drawn_shape(operator, arguments)
    return shape[:-1] if shape and base_name(operator) == "_sample_dirichlet" else shape


def is_of_one(operator: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether the operator draws indices from a single distribution, as many as the program says."""
    return base_name(operator) == "multinomial" and arguments["self"].dim() == 1


def draw_whole(operator: OpOverload, arguments: Mapping[str, Any], at: BatchDim, rows: Rows) -> Any:
    """Call the operator for all samples of the batch, and return this rank's rows of what it returns.

    Args:
        arguments: The operator's arguments by name.
        at: The dimension of the batch in the shape for which it draws.
    """
    if at.blocks > 1:
        return _draw_blocks(operator, arguments, at, rows)
    if operator is _BERNOULLI and bernoulli.is_drawn_from_bits(arguments["self"], at):
        bernoulli.fill(arguments["self"], arguments.get("p", 0.5), at, rows, arguments.get("generator"))
        return arguments["self"]
    shape = drawn_shape(operator, arguments)
    assert shape is not None
    target = written(operator)
    is_overwritten = target == "self" or base_name(operator).endswith("_like")
    counts = base_name(operator) == "multinomial" and at.dim == len(shape) - 1
    whole: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "size":
            whole[name] = at.whole(shape, rows)
        elif name == "num_samples" and counts:
            whole[name] = at.whole(shape, rows)[-1]
        elif isinstance(value, torch.Tensor) and not counts:
            is_empty = name == target or (name == "self" and is_overwritten)
            whole[name] = _whole_of(value, shape, at, rows, is_empty)
        else:
            whole[name] = value
    drawn = _call(operator, whole)
    if target is not None:
        return arguments[target].copy_(at.rows_of(drawn, rows))
    if isinstance(drawn, tuple):
        return tuple(at.rows_of(each, rows).clone() for each in drawn)
    return at.rows_of(drawn, rows).clone()


def _call(operator: OpOverload, arguments: Mapping[str, Any]) -> Any:
    """Call an operator; ``multinomial`` takes two dimensions at most."""
    if base_name(operator) != "multinomial" or arguments["self"].dim() < 3:
        return operator(**arguments)
    rows = arguments["self"].flatten(0, -2)
    return operator(**{**arguments, "self": rows}).unflatten(0, arguments["self"].shape[:-1])


def _draw_blocks(operator: OpOverload, arguments: Mapping[str, Any], at: BatchDim, rows: Rows) -> Any:
    """Draw with a dimension for the blocks before that of the batch, and return the result without it."""
    shape = drawn_shape(operator, arguments)
    assert shape is not None
    size, split = shape[at.dim], [at.blocks, shape[at.dim] // at.blocks]
    parted: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "size":
            parted[name] = [*shape[: at.dim], *split, *shape[at.dim + 1 :]]
        elif isinstance(value, torch.Tensor):
            dim = at.dim - (len(shape) - value.dim())
            parted[name] = value.unflatten(dim, split) if dim >= 0 and value.shape[dim] == size else value
        else:
            parted[name] = value
    drawn = draw_whole(operator, parted, BatchDim(at.dim + 1, at.per_sample), rows)
    if (target := written(operator)) is not None:
        return arguments[target]
    found = [each.flatten(at.dim, at.dim + 1) for each in (drawn if isinstance(drawn, tuple) else (drawn,))]
    return tuple(found) if isinstance(drawn, tuple) else found[0]


def _whole_of(part: torch.Tensor, shape: Sequence[int], at: BatchDim, rows: Rows, is_empty: bool) -> torch.Tensor:
    """Return a tensor for the whole batch with this part in its rows; rows of other ranks repeat the part's first.

    A tensor without the batch, which is broadcast, is returned as it is.
    """
    dim = at.dim - (len(shape) - part.dim())
    if dim < 0 or part.shape[dim] != shape[at.dim]:
        return part
    order = order_of(part, at)
    at = BatchDim(dim, at.per_sample)
    whole = _empty_like(part, dim, at.whole(part.shape, rows), order)
    if not is_empty:
        whole.copy_(part.narrow(dim, 0, 1).expand_as(whole))
        at.rows_of(whole, rows).copy_(part)
    return whole


def _empty_like(part: torch.Tensor, dim: int, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return a tensor of another size in ``dim``, with the part's memory layout: operators fill in its order.

    A part with gaps between its elements gets gaps, because operators draw another way for those.
    """
    options: Any = {"dtype": part.dtype, "device": part.device}
    if is_dense(part, order, dim):
        return torch.empty_permuted(list(shape), list(order), **options)
    return torch.empty_permuted([*shape, 2], [*order, part.dim()], **options)[..., 0]
