"""The weights of a rank's backwards: each contribution to a gradient is weighted when it is made.

The ranks compute the sum, over all ranks and all backwards of a step, of ``weight / total`` times each contribution.
Each contribution is multiplied by ``weight · world_size / total`` before it is added to ``parameter.grad``, unless that
factor is 1, as in batches of equal parts. Gradients are divided by the number of ranks when they are sent. So whatever
``parameter.grad`` holds already keeps its right weight: contributions from ``no_sync`` have their own weights, and the
sum of an earlier backward, which is equal on all ranks, counts once. A contribution with weight 0 is replaced by zeros
instead of multiplied: the mean over no samples is NaN.

A rank that does not know the total multiplies by ``weight / total`` when gradients are sent, with the total of the
previous backward. A factor for the sum corrects that.

Alternatively, the loss is weighted at its root, which needs no multiplication of gradients. This is required if layers
exchange gradients in backward (:mod:`ddp_callbacks.batch_norm.layers`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ddp_callbacks.errors import ConfigurationError

_STATE = ("weight", "total", "accumulates", "is_set", "_supposed")  # attributes in a checkpoint
# Autograd nodes that exchange gradients between ranks: synchronized BatchNorm, and a reentrant checkpoint, which hides
# its layers.
_MIXING = ("_NormalizeBackward", "CheckpointFunctionBackward")

Undo = Callable[[], None]
Gradients = tuple[torch.Tensor | None, ...]


class Weighing:
    """The weights of one rank's backwards. Local, except for :meth:`agree`.

    Args:
        parameters: The parameters whose gradients are weighted.
        used: One flag per parameter; the caller sets it from the first contribution until the next synchronization.
        world_size: Number of ranks.

    Attributes:
        weight: This rank's weight in the following backwards.
        total: The sum of the ranks' weights; ``None`` if unknown here.
        accumulates: Whether contributions may wait for the next synchronization; the caller sets it.
        is_set: Whether any weight was given.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], used: list[bool], world_size: int) -> None:
        self._parameters, self._used, self._world_size = parameters, used, world_size
        self.weight = 1.0
        self.total: float | None = float(world_size)
        self.accumulates = self.is_set = False
        self._supposed = 0.0  # if the total is unknown: that of the last synchronization
        self._factor = 1.0  # for each contribution
        self._hooked: list[tuple[Node, RemovableHandle]] = []

    def set(self, weight: float, total: float | None) -> None:
        """Set the weight of the following backwards."""
        weight, total = float(weight), None if total is None else float(total)
        if weight < 0 or (total is not None and total < 0):
            raise ConfigurationError(f"weights must not be negative, got {_weight_and_total(weight, total)}.")
        if self.accumulates and None in (total, self.total) and (weight, total) != (self.weight, self.total):
            self._require_nothing_accumulated(weight, total)
        self.weight, self.total, self.is_set = weight, total, True
        self._multiply(float(weight > 0) if total is None else self._factor_of(weight, total))

    def set_for(self, loss: torch.Tensor, weight: float, total: float) -> Undo:
        """Weight the backward of ``loss`` at its root; call the result to undo it."""
        self.set(1.0, self._world_size)
        factor = self._factor_of(float(weight), float(total))
        handles: list[RemovableHandle] = []
        if not factor:
            handles = silence(loss)
            if not handles:  # otherwise other ranks' losses reach the parameters through the layers
                self._multiply(0.0)
        elif factor != 1 and loss.requires_grad:
            handles = [loss.register_hook(lambda gradient: gradient * factor)]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self.set(1.0, self._world_size)

        return undo

    def agree(self, sum_over_ranks: Callable[[float], float]) -> None:
        """Get an unknown total from all ranks, unless the last total can stand in for it. A collective then.

        Gradients are divided by it before they are summed, so that half precision does not overflow.
        """
        if self.total is None and not self._supposed:
            self._supposed = sum_over_ranks(self.weight)

    @property
    def is_at_root(self) -> bool:
        """Whether gradients keep the weights that the losses have: those of equal parts need none."""
        return self._factor == 1 and math.isclose(self.unit, 1 / self._world_size)

    @property
    def unit(self) -> float:
        """The factor for gradients when they are sent."""
        if self.total is None:
            return self.weight / self._supposed if self._supposed else 0.0
        return 1 / self._world_size

    def correct(self, weights: float) -> float:
        """Return the factor for the sum, in case the total was not the supposed one; 0 if all ranks have weight 0.

        Args:
            weights: The sum of the ranks' weights.
        """
        if self.total is not None:
            return 1.0
        supposed, self._supposed = self._supposed, weights
        return supposed / weights if weights else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.accumulates, self._supposed = False, state["_supposed"]
        self.set(state["weight"], state["total"])
        self.accumulates, self.is_set = state["accumulates"], state.get("is_set", True)

    def close(self) -> None:
        """Remove every hook."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked = []

    def _factor_of(self, weight: float, total: float) -> float:
        return weight * self._world_size / total if total else 0.0

    def _multiply(self, factor: float) -> None:
        """Multiply the following contributions by ``factor``; a factor of 1, the usual one, needs no hooks."""
        self._factor = factor
        nodes = [] if factor == 1 else [*map(accumulation_of, self._parameters)]
        if nodes != [node for node, _ in self._hooked]:  # torch replaces that of a tensor that moves or gets a dtype
            self.close()
            self._hooked = [(node, node.register_prehook(self._weigh)) for node in nodes]

    def _weigh(self, gradients: Gradients) -> Gradients:
        return _multiply([self._factor] * len(gradients), gradients, ()) if self._factor else _zeros(gradients)

    def _require_nothing_accumulated(self, weight: float, total: float | None) -> None:
        waiting = zip(self._parameters, self._used, strict=True)
        if any(used and parameter.grad is not None for parameter, used in waiting):
            raise ConfigurationError(
                "a weight without a total must not change while gradients that were accumulated in no_sync wait: it "
                f"was {_weight_and_total(self.weight, self.total)}, got {_weight_and_total(weight, total)}. Give the "
                "total in each weigh(weight, total), the sum of the ranks' weights; or weigh_loss(loss, weight, total)."
            )


@contextmanager
def trainable(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Allow hooks on a frozen parameter inside: torch refuses to register them, but keeps registered ones."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def accumulation_of(parameter: torch.nn.Parameter) -> Node:
    """Return the autograd node that adds to the parameter's gradient. Its hooks live as long as you refer to it."""
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        with trainable(parameter), torch.enable_grad():
            return accumulation_of(parameter)
    node: Any = parameter.view_as(parameter).grad_fn
    while node.next_functions:  # a view of a subclass of torch.Tensor has several nodes
        node = node.next_functions[0][0]
    return node  # type: ignore[no-any-return]


def _weight_and_total(weight: float, total: float | None) -> str:
    return f"weigh({weight:g})" if total is None else f"weigh({weight:g}, {total:g})"


def silence(loss: torch.Tensor) -> list[RemovableHandle]:
    """Make the backward of ``loss``, which may be NaN, send zeros to synchronized layers. Local.

    These layers still exchange gradients, so that other ranks' losses flow through this rank's samples.

    Returns:
        Handles that undo it. Empty if the graph of ``loss`` has no such layer; then nothing is changed.
    """
    nodes = _reachable([] if loss.grad_fn is None else [loss.grad_fn])
    layers = {node for node in nodes if node.name() in _MIXING}
    behind = set(_reachable([after for node in layers for after, _ in node.next_functions if after is not None]))
    spared = behind | layers
    before = [node for node in nodes if node not in spared] if layers else []
    return [node.register_hook(lambda gradients, _: _zeros(gradients)) for node in before]


def weigh_terms_of_parameters(loss: torch.Tensor, criterion: Node | None, factor: float) -> None:
    """Multiply the gradients of terms that were added to a criterion's value, and use parameters alone. Local.

    What uses anything that the model computed for the criterion keeps its gradients.

    Args:
        loss: The sum of the criterion's value and the terms.
        criterion: ``grad_fn`` of the criterion's value.
        factor: For the gradients.
    """
    if loss.grad_fn in (None, criterion):
        return
    computed = set(_reachable([] if criterion is None else [criterion]))
    inner = {node for node in computed if node.next_functions}
    for node in _reachable([loss.grad_fn]):
        factors = [factor if _is_parameter(after) else 1.0 for after, _ in node.next_functions]
        if node not in computed and factor in factors and inner.isdisjoint(_reachable([node])):
            node.register_hook(functools.partial(_multiply, factors))


def _is_parameter(node: Node | None) -> bool:
    return node is not None and not node.next_functions  # the accumulation of its gradient


def _multiply(factors: Sequence[float], gradients: Gradients, _: Gradients) -> Gradients:
    return tuple(
        None if gradient is None else gradient * factor for gradient, factor in zip(gradients, factors, strict=True)
    )


def _reachable(nodes: list[Any]) -> list[Any]:
    """Return these nodes of a graph, and all nodes that backward reaches from them."""
    found, waiting = dict.fromkeys(nodes), list(nodes)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return list(found)


def _zeros(gradients: Gradients) -> Gradients:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
