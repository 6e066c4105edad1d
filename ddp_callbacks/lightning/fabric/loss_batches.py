"""Choose the batches that a loss is of: their division among the ranks weighs it.

The user's own loop does not tell us. A loss is of the batches drawn since the last backward; if none were, of those of
the last one. A loop that draws ahead, or skips a batch, has several to choose from. If these are divided alike, it does
not matter which it was. Otherwise the models decide, whose inputs may be a batch's own tensors, or views of them. Where
they do not, all ranks raise the same error.

All ranks must choose alike, although a model may run on some of them only. So draws, ends of passes and backwards alone
change what can be chosen; the ranks exchange what the models were given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.nested import arrays_in
from ddp_callbacks.data.shares import Share
from ddp_callbacks.data.skipped import SkippedParts
from ddp_callbacks.errors import ConfigurationError

_ROUNDING = 1e-12  # relative error of a quotient of two weights
_MOST_AHEAD = 8  # batches kept of a loader whose batches train no model


@dataclass(eq=False)
class Draw:
    """A batch that was drawn from a loader.

    Attributes:
        share: This rank's share of the batch.
        weight: The weight of the loss of this rank's part.
        total: The sum of the ranks' weights; ``None`` until they have exchanged it.
        storages: The memory of the tensors of this rank's part.
        is_trained: Whether there was a backward of it.
    """

    share: Share
    weight: float
    total: float | None
    storages: set[StorageWeakRef]
    is_trained: bool = False


@dataclass(eq=False)
class Pass:
    """A pass over a loader.

    Attributes:
        skipped: Finds batches that the loop leaves out.
        draws: The batches that a later loss may be of.
        is_computed: Whether a model has computed anything since it began, or there is none.
        is_over: Whether no batch follows.
        is_cut: Whether the loop has left it, so that its last batch may be one that it does not want.
    """

    skipped: SkippedParts
    draws: list[Draw] = field(default_factory=list)
    is_computed: bool = False
    is_over: bool = False
    is_cut: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether there was a backward of all batches."""
        return all(draw.is_trained for draw in self.draws)

    def forget(self, end: int | None) -> None:
        """Forget the batches before this one, or all."""
        for draw in self.draws[:end]:
            if not draw.is_trained and not self.is_cut:
                self.skipped.note_skipped(draw.share)
        del self.draws[:end]


class Batches:
    """The batches that the next loss may be of. Local, except for :meth:`choose`."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._computed: set[Draw] = set()  # that forwards since the last backward may have been of

    def take(self, running: Pass, draw: Draw) -> None:
        """Note a batch drawn in a pass."""
        self._passes = [known for known in self._passes if not (known.is_over and known.is_trained)]
        if not running.draws:
            self._passes.append(running)
        elif len(running.draws) == 1 and running.is_trained:  # otherwise the loop draws ahead, or skips
            running.draws.clear()
        running.draws.append(draw)

    def leave(self, running: Pass) -> None:
        """Note that a pass has ended."""
        running.is_over = True
        self._passes = [known for known in self._passes if known is not running or not running.is_trained]

    def compute(self, inputs: Any) -> None:
        """Note a forward of a model with gradients."""
        for running in self._passes:
            running.is_computed = True
        given = storages_of(inputs)
        sources = [draw for draw in self._all() if draw.storages & given]
        is_known = sources and not given.difference(*(draw.storages for draw in sources))
        self._computed.update(sources if is_known else self._expected())

    def choose(self) -> list[Draw]:
        """Return the batches that the loss is of, with totals; empty if it is of no loader. Begin a backward of them.

        A collective, unless there is at most one batch to choose from, of a known total.

        Raises:
            ConfigurationError: On all ranks: several batches remain, and are divided in different proportions.
        """
        draws = self._all()
        if len(draws) > 1 or any(draw.total is None for draw in draws):
            draws = self._agree(draws)
        self._begin_backward(draws)
        return draws

    def _all(self) -> list[Draw]:
        return [draw for running in self._passes for draw in running.draws]

    def _expected(self) -> list[Draw]:
        """Return the batches of the passes drawn from since the last backward; without any, all."""
        return [draw for running in self._passes if not running.is_trained for draw in running.draws] or self._all()

    def _agree(self, draws: list[Draw]) -> list[Draw]:
        """Return the batches that the loss can be of on all ranks. A collective."""
        computed = self._computed or self._expected()
        mine = [draw.weight for draw in draws], [draw in computed for draw in draws]
        weights, flags = zip(*all_gather_object(mine, "the batches of the loss"), strict=True)
        divisions = {}
        for draw, of_ranks in zip(draws, zip(*weights, strict=True), strict=True):
            draw.total = total = sum(of_ranks) if draw.total is None else draw.total
            divisions[draw] = [weight / total if total else 0.0 for weight in of_ranks]
        chosen = [draw for draw, of_ranks in zip(draws, zip(*flags, strict=True), strict=True) if all(of_ranks)]
        _require_alike({draw: divisions[draw] for draw in chosen or draws})
        return chosen or draws

    def _begin_backward(self, chosen: list[Draw]) -> None:
        """Forget the batches that a loop has left behind. Several chosen ones stay two: the loop may draw ahead."""
        self._computed.clear()
        for draw in chosen:
            draw.is_trained = True
        for running in self._passes:
            running.is_computed = True
            last = [index for index, draw in enumerate(running.draws) if draw in chosen][-2:]
            for index in last:
                running.skipped.note_gradient(running.draws[index].share.local)
            if last:
                running.forget(last[0])
            else:
                running.forget(None if running.is_over else -_MOST_AHEAD)
        self._passes = [running for running in self._passes if running.draws]


def storages_of(value: Any) -> set[StorageWeakRef]:
    """Return the memory of the dense tensors in a nested value."""
    tensors = [array for array in arrays_in(value) if getattr(array, "layout", None) is torch.strided]
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


def _require_alike(divisions: dict[Draw, list[float]]) -> None:
    if all(max(parts) - min(parts) <= _ROUNDING for parts in zip(*divisions.values(), strict=True)):
        return
    mine = ", ".join(f"{draw.weight:g} of {draw.total:g}" for draw in divisions)
    raise ConfigurationError(
        f"the loss of this backward may be of {len(divisions)} batches, which the processes have divided in different "
        f"proportions (here {mine}), so that no one number weighs it. Draw a batch, compute it and call "
        "fabric.backward, and only then draw the next; or give the model the batch's own tensors, and change them "
        "inside of it; or choose batch sizes that are multiples of the number of processes, with drop_last=True. Draw "
        "batches that are only evaluated inside torch.no_grad()."
    )
