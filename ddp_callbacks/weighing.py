"""The weights of a rank's backwards: each contribution to a gradient is weighted when it is made.

The ranks compute the sum, over all ranks and all backwards of a step, of ``weight / total`` times each contribution.
Each contribution is multiplied by ``weight · world_size / total`` before it is added to ``parameter.grad``, unless that
factor is 1, as in batches of equal parts. Gradients are divided by the number of ranks when they are sent. So whatever
``parameter.grad`` holds already keeps its right weight: contributions from ``no_sync`` have their own weights, and the
sum of an earlier backward, which is equal on all ranks, counts once. A contribution with weight 0 is replaced by zeros
instead of multiplied: the mean over no samples is NaN.

Alternatively, the loss is weighted at its root, which needs no multiplication of gradients. This is required if layers
exchange gradients in backward (:mod:`ddp_callbacks.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

# Autograd nodes that exchange gradients between ranks: synchronized BatchNorm, and a reentrant checkpoint, which hides
# its layers.
_MIXING = ("_NormalizeBackward", "CheckpointFunctionBackward")

Undo = Callable[[], None]
Gradients = tuple[torch.Tensor | None, ...]


class Weighing:
    """The weights of one rank's backwards. Local.

    Args:
        parameters: The parameters whose gradients are weighted.
        world_size: Number of ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], world_size: int) -> None:
        self._parameters, self._world_size = parameters, world_size
        self._factor = 1.0  # for each contribution
        self._hooked: list[tuple[Node, RemovableHandle]] = []

    def set(self, weight: float, total: float) -> None:
        """Set the weight of the following backwards, and the sum of the ranks' weights."""
        self._multiply(self._factor_of(float(weight), float(total)))

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
        if factor == 1:
            self.close()
        elif not self._hooked:
            nodes = map(accumulation_of, self._parameters)
            self._hooked = [(node, node.register_prehook(self._weigh)) for node in nodes]

    def _weigh(self, gradients: Gradients) -> Gradients:
        if not self._factor:
            return _zeros(gradients)
        return tuple(None if gradient is None else gradient * self._factor for gradient in gradients)


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
    with trainable(parameter), torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    while node.next_functions:  # a view of a subclass of torch.Tensor has several nodes
        node = node.next_functions[0][0]
    return node  # type: ignore[no-any-return]


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
