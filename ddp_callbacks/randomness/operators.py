"""What torch's operators draw, read from their tags and schemas.

==============  ========================================================================================================
kind            how the whole batch is drawn
==============  ========================================================================================================
``filled``      each element takes the same draws, whatever the arguments are: draw for the whole shape
``permuted``    a permutation of the batch names rows of other ranks: draw by rank
``seeds``       of code that torch.compile has made, which draws from them by element of a part: draw by rank
``other``       the number of draws depends on values of other ranks' rows, or is unknown: draw by rank
``nothing``     tagged, but this call draws nothing
==============  ========================================================================================================
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ddp_callbacks._torch import OpOverload

Kind = Literal["filled", "permuted", "seeds", "other", "nothing"]

_FILLED = {
    *("rand", "randn", "randint", "normal", "bernoulli", "uniform", "exponential", "random", "geometric", "cauchy"),
    *("log_normal", "rand_like", "randn_like", "randint_like", "multinomial", "native_dropout", "_fused_dropout"),
    "normal_functional",
}
_LEAST = torch.iinfo(torch.int64).min
_NO_DRAW = {"_fused_sdp_choice", "_cudnn_init_dropout_state", "_nested_tensor_softmax_with_shape"}


def draws(operator: OpOverload) -> bool:
    """Whether torch marks the operator as drawing random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def kind_of(operator: OpOverload, arguments: Mapping[str, Any]) -> Kind:
    """Return how to draw this call of a drawing operator for the whole batch; see the table above."""
    name = base_name(operator)
    arguments = {**_defaults(operator), **arguments}
    probability = arguments.get("dropout_p", arguments.get("dropout"))
    is_training = arguments.get("train", arguments.get("training"))
    if name in _NO_DRAW or "backward" in name or probability == 0 or is_training is False:
        return "nothing"
    if name == "randperm":
        return "permuted"
    if operator is torch.ops.aten.randint.low_out and arguments["low"] == _LEAST:  # torch._inductor.ir.RandomSeeds
        return "seeds"
    return "filled" if name in _FILLED else "other"


@functools.cache
def base_name(operator: OpOverload) -> str:
    """Return the operator's name without its overload and the underscore of in-place operators."""
    return str(operator._schema.name).partition("::")[2].removesuffix("_")


@functools.cache
def _defaults(operator: OpOverload) -> dict[str, Any]:
    return {each.name: each.default_value for each in operator._schema.arguments if each.has_default_value()}


@functools.cache
def argument_names(operator: OpOverload) -> Sequence[str]:
    """Return the names of the operator's arguments, in their order."""
    return [argument.name for argument in operator._schema.arguments]


@functools.cache
def written(operator: OpOverload) -> str | None:
    """Return the name of the argument that the operator draws into; ``None`` if it returns a new tensor."""
    names = [each.name for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write]
    return names[0] if len(names) == 1 else None


@functools.cache
def may_draw(function: Any) -> bool:
    """Whether a function of torch's Python interface, or one that it names, has the name of a drawing operator."""
    names = [getattr(function, "__name__", "").partition(".")[0]]
    if isinstance(function, types.FunctionType):
        names += function.__code__.co_names
    return any(map(_is_drawing_name, names))


@functools.cache
def _is_drawing_name(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
    return packet is not None and any(draws(getattr(packet, overload)) for overload in packet.overloads())
