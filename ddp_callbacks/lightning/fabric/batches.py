"""Find the batches that a loss is computed from, and its weight.

The user's own loop does not tell us. So we note each batch drawn from a loader, mark a model's output with the batches
in hand, and weigh a loss by the batches of the outputs that it depends on. A validation between forward and backward,
or between drawing and forward, changes nothing.

The batches in hand are those drawn last, in passes that still run: from several loaders at once if nothing was computed
between the draws. A batch drawn while gradients are off is never in hand. If the inputs of a model are tensors of the
batches themselves, its output is marked with these batches alone: a loop may have skipped the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_callbacks.comm.collectives import all_gather_object, any_rank
from ddp_callbacks.data.nested import arrays_in
from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_world_size

_KEY = "ddp_callbacks: batches"  # in the metadata of autograd's nodes
_ROUNDING = 1e-12  # relative error of a quotient of two weights


@dataclass(eq=False)
class Draw:
    """A batch that was drawn from a loader.

    Attributes:
        share: This rank's share of the batch.
        weight: The weight of the loss of this rank's part.
        total: The sum of the ranks' weights; ``None`` until they have exchanged it.
        arrays: Weak references to the tensors and arrays of this rank's part.
        number: The number of the draw; the order is the same on all ranks.
    """

    share: Share
    weight: float
    total: float | None
    arrays: list[weakref.ref[Any]]
    number: int = field(default_factory=itertools.count().__next__)


class BatchesInHand:
    """The batches of the running passes over the loaders; a pass is any object. Local."""

    def __init__(self) -> None:
        self._passes: dict[object, list[Draw]] = {}  # in the order of their last draws
        self._fresh: set[object] = set()  # passes drawn from since something was computed
        self._computed: set[object] = set()  # passes whose batches were computed last
        self._has_marked = False

    def take(self, running: object, draw: Draw) -> None:
        """Note a batch drawn in a pass."""
        before = self._passes.pop(running, [])
        self._passes[running] = [*before, draw] if running in self._fresh else [draw]
        self._fresh.add(running)

    def leave(self, running: object) -> None:
        """Note that a pass has ended."""
        self._passes.pop(running, None)
        self._fresh.discard(running)

    def compute(self) -> tuple[Draw, ...]:
        """Return the batches in hand, and note that something is computed from them."""
        if self._fresh:
            self._computed, self._fresh = self._fresh, set()
        in_hand = [running for running in self._passes if running in self._computed] or list(self._passes)[-1:]
        return tuple(draw for running in in_hand for draw in self._passes[running])

    def mark(self, inputs: Any, output: Any) -> None:
        """Mark a model's ``output`` for ``inputs`` with the batches that it is computed from."""
        in_hand = self.compute()
        draws = _sources(inputs, in_hand) or in_hand
        for tensor in arrays_in(output):
            node = getattr(tensor, "grad_fn", None)
            if node is not None:
                node.metadata[_KEY] = draws
                self._has_marked = True

    def of(self, loss: torch.Tensor) -> list[Draw]:
        """Return the batches of the marked outputs that ``loss`` depends on; without any, the batches in hand."""
        marked = _marked(loss) if self._has_marked else []
        return marked or list(self.compute())


def _sources(inputs: Any, draws: Sequence[Draw]) -> list[Draw]:
    """Return the batches that a model's inputs come from; an empty list if any input comes from elsewhere."""
    found = [[draw for draw in draws if any(own() is array for own in draw.arrays)] for array in arrays_in(inputs)]
    return [draw for draw in draws if any(draw in own for own in found)] if all(found) else []


def _marked(loss: torch.Tensor) -> list[Draw]:
    waiting: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, found = set(waiting), dict[Draw, None]()
    while waiting:
        node = waiting.pop()
        draws = node.metadata.get(_KEY)
        if draws is not None:
            found.update(dict.fromkeys(draws))
            continue
        ahead = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= ahead
        waiting += ahead
    return sorted(found, key=lambda draw: draw.number)


def weight_and_total(draws: Iterable[Draw]) -> tuple[float, float]:
    """Return the weight of this rank's loss of these batches, and the total; without a batch, all ranks count equally.

    A collective, if a total is unknown or there are several batches: all ranks must have the same number of them.

    Raises:
        ConfigurationError: On all ranks: several batches are divided in different proportions.
    """
    batches = list(draws)
    for draw in batches:
        if draw.total is None:
            draw.total = sum(all_gather_object(draw.weight, "the weight of the batch"))
    if not batches:
        return 1.0, float(get_world_size())
    if len(batches) > 1:
        _require_equal_proportions(batches)
    return batches[0].weight, batches[0].total or 0.0


def _require_equal_proportions(batches: list[Draw]) -> None:
    parts = [draw.weight / draw.total if draw.total else 0.0 for draw in batches]
    differ = max(parts) - min(parts) > _ROUNDING
    if not any_rank(differ, "the shares of several batches"):
        return
    mine = ", ".join(f"{draw.weight:g} of {draw.total:g}" for draw in batches)
    raise ConfigurationError(
        f"the loss of this backward is of {len(batches)} batches, which the processes have divided in different "
        f"proportions (here {mine}), so that no one number weighs it; batches that you skipped may be among them. Draw "
        "a batch, compute it and call fabric.backward, and only then draw the next; or choose batch sizes that are "
        "multiples of the number of processes, with drop_last=True."
    )
