"""Warn of losses, in loops of Fabric, whose parts do not add up to that of the whole batch.

A Trainer's step is computed again for the whole batch; a loop cannot be. But the graph of a loss has the divisors of
mean cross entropies, and the models have their BatchNorm layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_callbacks._torch import divisor_of
from ddp_callbacks.batch_norm.layers import unsynchronized
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group import get_rank

_NEAR = 256  # nodes of a graph in which its cross entropies are looked for
_ROUNDING = 1e-4  # of half precision sums of class weights
_DIVISOR = (
    "the cross entropy of backward {number} is a mean over what it counts (ignore_index, class weights): {own:g} for "
    "{samples} samples here, {other:g} for {others} on rank {rank}. Losses count by samples, so the gradient is not "
    "that of one process. Give CallbackFabricStrategy(weight=...) a function of a batch that returns this number, such "
    "as ddp_callbacks.CrossEntropyWeight(criterion)."
)
_NORMALIZES = (
    "layer {name} normalizes by each process's part of the batch (BatchNorm), not as one process: "
    "BatchNormSynchronizer(model, counts=lambda: fabric.strategy.share.local > 0) makes them equal."
)


class LossChecks:
    """Looks at the backwards 1, 2, 4, 8 and so on, until it has found something of each kind."""

    def __init__(self) -> None:
        self._number, self._compares = 0, True

    def look(self, loss: torch.Tensor, samples: int, models: Callable[[], torch.nn.Module]) -> None:
        """Check the loss of a backward of all ranks, for a part of a batch. A collective.

        Args:
            samples: The number of this rank's samples.
            models: Returns all models.
        """
        self._number += 1
        if self._number == 1 and get_rank() == 0:
            _warn_of_batch_norm(models())
        if self._compares and not self._number & (self._number - 1):
            self._compare_divisors(loss, samples)

    def _compare_divisors(self, loss: torch.Tensor, samples: int) -> None:
        gathered = all_gather_object([samples, divisors_of(loss)], "the divisors of the losses")
        (own, mine), *others = gathered
        for rank, (count, divisors) in enumerate(others, 1):
            for one, other in zip(mine, divisors, strict=False):
                if self._compares and own and count and abs(one * count - other * own) > _ROUNDING * one * count:
                    self._compares = False
                    if get_rank() == 0:
                        what = {"number": self._number, "own": one, "other": other, "rank": rank}
                        warn(_DIVISOR.format(samples=own, others=count, **what))


def _warn_of_batch_norm(model: torch.nn.Module) -> None:
    for name, layer in unsynchronized(model).items():
        if layer.training and (layer.num_batches_tracked is None or layer.num_batches_tracked):  # not an unused one
            warn(_NORMALIZES.format(name=name))
            return


def divisors_of(loss: torch.Tensor) -> list[float]:
    """Return the divisors of the mean cross entropies that a loss is made of, those nearest to it first. Local."""
    found, seen, waiting = list[float](), set[Any](), [loss.grad_fn]
    while waiting and len(seen) < _NEAR:
        node: Any = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if (divisor := divisor_of(node)) is not None:
            found.append(divisor)
    return found
