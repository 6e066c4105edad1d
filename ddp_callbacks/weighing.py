"""The weights of a rank's backwards: each contribution to a gradient is weighted when it is made.

The ranks compute the sum, over all ranks and all backwards of a step, of ``weight / total`` times each contribution. A
contribution with weight 0 is replaced by zeros, not multiplied: the mean over no samples is NaN.

[Note: the unit]
The engine multiplies ``parameter.grad`` by a single number, the unit, when it sends it. After ``zero_grad`` the unit is
``weight / total``, and nothing else is multiplied. ``parameter.grad`` can hold earlier values before a backward:

- Contributions from ``no_sync``, each with its own weight. From then on the unit is ``1 / world_size``, and each
  contribution is multiplied by ``weight · world_size / total`` when it is made, unless that is 1.
- The result of an earlier, synchronized backward: the ranks' sum, equal on all ranks, which must count once. If the
  ranks' weights add up to the total (a mean), their units add up to 1, and nothing needs to be done. If they do not (a
  sum), the value is divided by ``unit · world_size`` before a contribution is added to it. The last synchronization has
  shown all ranks which of the two applies.

Alternatively, the loss is weighted at its root, which needs no multiplication of gradients; the unit is then
``1 / world_size``. This is required if layers exchange gradients in backward (:mod:`ddp_callbacks.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddp_callbacks.errors import ConfigurationError

_STATE = ("weight", "total", "_accumulates", "_are_means", "_have_been_sums", "_supposed")  # of a checkpoint
_ROUNDING = 1e-5  # relative, of a sum of weights in float32
# Autograd nodes that exchange gradients between ranks: synchronized BatchNorm, and a reentrant checkpoint, which hides
# its layers.
_MIXING = ("_NormalizeBackward", "CheckpointFunctionBackward")

Undo = Callable[[], None]
Hook = Callable[[torch.Tensor], Any]


class Weighing:
    """The weights of one rank's backwards. Local, except for :meth:`agree`.

    Args:
        parameters: The parameters whose gradients are weighted.
        used: One flag per parameter; the caller sets it from the first contribution until the next synchronization.
        world_size: Number of ranks.

    Attributes:
        weight: This rank's weight in the following backwards.
        total: The sum of the ranks' weights; ``None`` if unknown here.
        kept: The factor for gradients that are already synchronized, before the unit.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], used: list[bool], world_size: int) -> None:
        self._parameters, self._used, self._world_size = parameters, used, world_size
        self.weight = 1.0
        self.total: float | None = float(world_size)
        self._supposed = 0.0  # the total, where it is unknown: that of the last synchronization
        self.kept = 1.0
        self._factor = 1.0  # for each contribution
        self._drops = False  # whether to replace contributions by zeros
        self._accumulates = False  # since the last synchronization
        self._are_means = False  # unknown before the first synchronization
        self._have_been_sums = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._arrange()

    def set(self, weight: float, total: float | None) -> None:
        """Set the weight of the following backwards."""
        weight, total = float(weight), None if total is None else float(total)
        if self._accumulates and None in (total, self.total) and (weight, total) != (self.weight, self.total):
            self._require_nothing_accumulated(weight, total)
        self.weight, self.total = weight, total
        self._drops = not weight
        self._arrange()

    def set_for(self, loss: torch.Tensor, weight: float, total: float) -> Undo:
        """Weight the backward of ``loss`` at its root; call the result to undo it."""
        self.set(1.0, self._world_size)
        factor = float(weight) * self._world_size / float(total) if total else 0.0
        handles: list[torch.utils.hooks.RemovableHandle] = []
        if not factor:
            handles = silence(loss)
            self._drops = not handles  # otherwise other ranks' losses reach the parameters through the layers
            self._arrange()
        elif factor != 1 and loss.requires_grad:
            handles = [loss.register_hook(lambda gradient: gradient * factor)]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self.set(1.0, self._world_size)

        return undo

    def accumulate(self) -> None:
        """Start accumulating contributions without synchronization."""
        self._accumulates = True
        self._arrange()

    def agree(self, sum_over_ranks: Callable[[float], float]) -> None:
        """Get a total that is unknown from all ranks, unless the last one stands for it. A collective then.

        Gradients are divided by it before they are summed, so that half precision does not overflow.
        """
        if self.total is None and not self._supposed:
            self._supposed = sum_over_ranks(self.weight)

    @property
    def unit(self) -> float:
        """The factor for gradients when they are sent."""
        if self.total is None:
            return self.weight / self._supposed if self._supposed else 0.0
        if self._accumulates or not self.total or not (self.weight or self._are_means):
            return 1 / self._world_size
        return self.weight / self.total

    def become_sums(self, weights: float) -> bool:
        """Whether ``weights``, the sum over all ranks, is the first that differs from the total."""
        return self._are_means and bool(self.total) and not self._is_total(weights)

    def correct(self, weights: float) -> float:
        """The factor for what was summed, as the total may not be the supposed one; 0 if no rank's weight counts."""
        if self.total is not None:
            return 1.0
        supposed, self._supposed = self._supposed, weights
        return supposed / weights if weights else 0.0

    def end(self, weights: float) -> None:
        """Finish a synchronization.

        Args:
            weights: The sum of the ranks' weights.
        """
        if self.total:
            self._have_been_sums = self._have_been_sums or not self._is_total(weights)
            self._are_means = not self._have_been_sums
        self._accumulates = False
        self._arrange()

    @property
    def accumulates(self) -> bool:
        """Whether contributions have been accumulated since the last synchronization."""
        return self._accumulates

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        for name in _STATE:
            setattr(self, name, state[name])
        self._drops = not self.weight
        self._arrange()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _is_total(self, weights: float) -> bool:
        assert self.total is not None
        return abs(weights - self.total) <= _ROUNDING * self.total

    def _arrange(self) -> None:
        """Hook the parameters if contributions must be changed; usually they need not."""
        self._factor = self.kept = 1.0
        if self.total and self._accumulates:
            self._factor = self.weight * self._world_size / self.total
        elif self.total and not self._are_means:
            self.kept = 1 / (self._world_size * self.unit)
        needed = self._drops or self._factor != 1 or self.kept != 1
        if needed and not self._handles:
            self._handles = [
                _hook(parameter, self._weigh_hook(slot)) for slot, parameter in enumerate(self._parameters)
            ]
        elif not needed and self._handles:
            self.close()

    def _weigh_hook(self, slot: int) -> Hook:
        parameter = self._parameters[slot]

        def hook(contribution: torch.Tensor) -> torch.Tensor | None:
            if self.kept != 1 and not self._used[slot] and parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.mul_(self.kept)
            if self._drops:
                return torch.zeros_like(contribution)
            return None if self._factor == 1 else contribution * self._factor

        return hook

    def _require_nothing_accumulated(self, weight: float, total: float | None) -> None:
        waiting = zip(self._parameters, self._used, strict=True)
        if any(used and parameter.grad is not None for parameter, used in waiting):
            raise ConfigurationError(
                "a weight without a total must not change while gradients that were accumulated in no_sync wait: it "
                f"was {_weight_and_total(self.weight, self.total)}, got {_weight_and_total(weight, total)}. Give the "
                "total in each weigh(weight, total), the sum of the ranks' weights; or weigh_loss(loss, weight, total)."
            )


def hook_even_if_frozen(
    parameter: torch.nn.Parameter, register: Callable[[Hook], torch.utils.hooks.RemovableHandle], hook: Hook
) -> torch.utils.hooks.RemovableHandle:
    """Register a hook even on a frozen parameter. torch refuses that, but keeps hooks of parameters frozen later."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = register(hook)
    parameter.requires_grad_(trainable)
    return handle


def _hook(parameter: torch.nn.Parameter, hook: Hook) -> torch.utils.hooks.RemovableHandle:
    return hook_even_if_frozen(parameter, parameter.register_hook, hook)


def _weight_and_total(weight: float, total: float | None) -> str:
    return f"weigh({weight:g})" if total is None else f"weigh({weight:g}, {total:g})"


def silence(loss: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
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
    return [node.register_hook(_zeros) for node in before]


def _reachable(nodes: list[Any]) -> list[Any]:
    """These nodes of a graph, and all nodes that backward reaches from them."""
    found, waiting = dict.fromkeys(nodes), list(nodes)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return list(found)


def _zeros(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
