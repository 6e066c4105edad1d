"""What a rank's backwards count: each contribution to a gradient is weighed when it is made.

The ranks want the sum, over themselves and over the backwards of a step, of ``weight / total`` times the contribution
of each. Weight 0 replaces a contribution by zeros and never multiplies it: the mean over nothing is not a number.

[Note: the unit]
What a backward leaves in ``parameter.grad`` is sent multiplied with one number, the unit. After ``zero_grad`` it is
``weight / total``, and nothing else is multiplied. What may be in ``parameter.grad`` before:

- What backwards in ``no_sync`` have left, each under its own weight. From there on the unit is ``1 / world_size``, and
  each contribution is multiplied with ``weight · world_size / total`` as it is made, unless that is 1.
- What an earlier backward has left that was synchronized: the ranks' sum, equal on all, which has to count once. Where
  the ranks' weights add up to the total (a mean), so do the units, to 1. Where they do not (a sum), it is divided by
  ``unit · world_size`` before a contribution is added to it. Which of the two it is, the last synchronization has
  shown to all ranks alike.

The loss itself can be weighed instead, at its root, which costs nothing in either case; the unit is then
``1 / world_size``. So it has to be where layers exchange gradients in backward (:mod:`ddp_callbacks.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ddp_callbacks.errors import ConfigurationError

_ROUNDING = 1e-5  # relative, of a sum of weights that has travelled in float32
# Nodes in which ranks exchange gradients: synchronized BatchNorm, and a reentrant checkpoint, which hides its layers.
_MIXING = ("_NormalizeBackward", "CheckpointFunctionBackward")

Undo = Callable[[], None]
Hook = Callable[[torch.Tensor], Any]


class Weighing:
    """The weights of one rank's backwards into some parameters. Local: nothing here communicates.

    Args:
        parameters: Those that contributions are made to.
        used: One flag for each, which the caller sets from its first contribution until the next synchronization.
        world_size: Number of ranks.

    Attributes:
        weight: Of this rank in the following backwards.
        total: The sum of the ranks' weights; ``None`` where it is not known here.
        kept: What gradients that are synchronized already have to be multiplied with before the unit.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], used: list[bool], world_size: int) -> None:
        self._parameters, self._used, self._world_size = parameters, used, world_size
        self.weight = 1.0
        self.total: float | None = float(world_size)
        self.kept = 1.0
        self._factor = 1.0  # of each contribution
        self._drops = False  # whether contributions are replaced by zeros
        self._accumulates = False  # since the last synchronization
        self._are_means = False  # nobody knows before the first synchronization
        self._have_been_sums = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._arrange()

    def set(self, weight: float, total: float | None) -> None:
        """Weigh the following backwards."""
        weight, total = float(weight), None if total is None else float(total)
        if self._accumulates and None in (total, self.total) and (weight, total) != (self.weight, self.total):
            self._require_nothing_accumulated(weight, total)
        self.weight, self.total = weight, total
        self._drops = not weight
        self._arrange()

    def set_for(self, loss: torch.Tensor, weight: float, total: float) -> Undo:
        """Weigh the backward of ``loss`` at its root; returns what ends that."""
        self.set(1.0, self._world_size)
        factor = float(weight) * self._world_size / float(total) if total else 0.0
        handles: list[torch.utils.hooks.RemovableHandle] = []
        if not factor:
            handles = silence(loss)
            self._drops = not handles  # else other ranks' losses reach the parameters through the layers
            self._arrange()
        elif factor != 1 and loss.requires_grad:
            handles = [loss.register_hook(lambda gradient: gradient * factor)]

        def undo() -> None:
            for handle in handles:
                handle.remove()
            self.set(1.0, self._world_size)

        return undo

    def accumulate(self) -> None:
        """From now on contributions wait for others."""
        self._accumulates = True
        self._arrange()

    @property
    def unit(self) -> float:
        """What gradients are multiplied with when they are sent, where the total is known."""
        if self._accumulates or not self.total or not (self.weight or self._are_means):
            return 1 / self._world_size
        return self.weight / self.total

    def become_sums(self, weights: float) -> bool:
        """Whether ``weights``, those of all ranks together, are the first that do not add up to the total."""
        return self._are_means and bool(self.total) and not self._is_total(weights)

    def end(self, weights: float) -> None:
        """A synchronization is complete.

        Args:
            weights: The sum over the ranks.
        """
        if self.total:
            self._have_been_sums = self._have_been_sums or not self._is_total(weights)
            self._are_means = not self._have_been_sums
        self._accumulates = False
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
        """Hook the parameters where something has to be done to contributions; mostly nothing has."""
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
    """torch refuses hooks on a frozen parameter, but keeps them when the parameter is frozen afterwards."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = register(hook)
    parameter.requires_grad_(trainable)
    return handle


def _hook(parameter: torch.nn.Parameter, hook: Hook) -> torch.utils.hooks.RemovableHandle:
    return hook_even_if_frozen(parameter, parameter.register_hook, hook)


def _weight_and_total(weight: float, total: float | None) -> str:
    return f"weigh({weight:g})" if total is None else f"weigh({weight:g}, {total:g})"


# --- what a cross entropy divides by -------------------------------------------------------------------------------

TARGETS = ("labels", "label", "targets", "target", "y")
"""Where a batch that is a mapping has its targets, if nobody says so."""


class CrossEntropyWeight:
    """A weight function of a batch: what a mean cross entropy of its class indices divides by.

    That is the number of targets that are not ignored, or with class weights the sum of theirs. For
    ``CallbackStrategy(weight=...)``, and for :meth:`ddp_callbacks.GradientSynchronizer.weigh` in a loop of your own.

    Args:
        criterion: ``nn.CrossEntropyLoss`` or ``nn.NLLLoss`` with the arguments of the loss; ``None``: the default ones.
        target: A function of a batch that returns the targets as the criterion gets them. ``None``: the second entry of
            a tuple or list; of a mapping the entry ``labels``, ``label``, ``targets``, ``target`` or ``y``.

    Raises:
        ConfigurationError: Another criterion; or, called with a batch, it has no such entry, or no class indices there.
    """

    def __init__(self, criterion: Any = None, target: Callable[[Any], Any] | None = None) -> None:
        if criterion is not None and not _is_cross_entropy(criterion):
            raise ConfigurationError(f"criterion must be nn.CrossEntropyLoss or nn.NLLLoss, got {criterion!r}.")
        self._criterion = F.cross_entropy if criterion is None else criterion
        self._target = target or _target_of

    @classmethod
    def of(cls, module: torch.nn.Module) -> CrossEntropyWeight:
        """For the one criterion of these kinds that ``module`` has."""
        found = {name: layer for name, layer in module.named_modules() if _is_cross_entropy(layer)}
        if len(found) == 1:
            return cls(*found.values())
        raise ConfigurationError(
            f'weight="cross_entropy" needs one nn.CrossEntropyLoss or nn.NLLLoss among the modules of '
            f"{type(module).__name__}, which has {', '.join(found) or 'none'}. Give "
            "weight=ddp_callbacks.CrossEntropyWeight(criterion, target=...)."
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        target = self._target(batch)
        weight = cross_entropy_weight(self._criterion, target)
        if weight is None:
            what = f"{target.dtype}" if isinstance(target, torch.Tensor) else type(target).__name__
            raise ConfigurationError(
                f"the targets of a batch must be a tensor of class indices, got {what}. Give "
                "CrossEntropyWeight(criterion, target=function of the batch)."
            )
        return weight


def cross_entropy_weight(criterion: Any, target: Any) -> torch.Tensor | None:
    """What a mean cross entropy, or negative log likelihood, of class indices divides by. Local.

    Args:
        criterion: ``nn.CrossEntropyLoss``, ``nn.NLLLoss``, or their functions, which then have the default arguments.
        target: Class indices, of any shape.

    Returns:
        The number of targets that are not ignored, or the sum of their class weights. Shape ``[]``. ``None`` for
        another criterion, and for targets that are class probabilities.
    """
    is_function = criterion is F.cross_entropy or criterion is F.nll_loss
    if not is_function and not _is_cross_entropy(criterion):
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    counts = target != getattr(criterion, "ignore_index", -100)
    weight = getattr(criterion, "weight", None)
    return counts.sum() if weight is None else weight.to(target.device)[target[counts]].sum()


def _is_cross_entropy(criterion: Any) -> bool:
    return isinstance(criterion, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)


def _target_of(batch: Any) -> Any:
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return batch[1]
    keys = [key for key in TARGETS if key in batch] if isinstance(batch, Mapping) else []
    if len(keys) == 1:
        return batch[keys[0]]
    has = f"a mapping of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ConfigurationError(
        f"a batch must be a tuple whose second entry is the targets, or a mapping with one of {', '.join(TARGETS)}, "
        f"got {has}. Give CrossEntropyWeight(criterion, target=function of the batch)."
    )


def silence(loss: torch.Tensor) -> list[torch.utils.hooks.RemovableHandle]:
    """Let the backward of ``loss`` send zeros to synchronized layers, though it may be no number.

    The layers' own exchange goes on, and with it what other ranks' losses send through this rank's samples. Local.

    Returns:
        Handles that undo it. None where the graph of ``loss`` has no such layer; then nothing is changed.
    """
    nodes = _reachable([] if loss.grad_fn is None else [loss.grad_fn])
    layers = {node for node in nodes if node.name() in _MIXING}
    behind = set(_reachable([after for node in layers for after, _ in node.next_functions if after is not None]))
    spared = behind | layers
    before = [node for node in nodes if node not in spared] if layers else []
    return [node.register_hook(_zeros) for node in before]


def _reachable(nodes: list[Any]) -> list[Any]:
    """These nodes of a graph, and all that backward comes to from them."""
    found, waiting = dict.fromkeys(nodes), list(nodes)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return list(found)


def _zeros(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
