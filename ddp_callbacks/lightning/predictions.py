"""Prediction: each rank computes whole batches in turn; ``trainer.predict`` returns the outputs of all, in order.

Hooks and writers of batches get those of their rank, with the batch numbers of a single process; at the end of the
epoch they get all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from ddp_callbacks.data.outputs import gather_outputs
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.packages import require
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.randomness import WholeDraws
from ddp_callbacks.randomness.draws import PREDICTED
from ddp_callbacks.replacement import Replacements


class Predictions:
    """Divides the batches of a Trainer's prediction loop among the ranks, until the replacements are undone.

    Args:
        trainer: The Trainer.
        replacements: What the run replaces.
        draws: Draws in the batches.
    """

    def __init__(self, trainer: Any, replacements: Replacements, draws: WholeDraws) -> None:
        require(trainer.strategy.package, _parts.PRIVATE_OF_PREDICTIONS)
        self._trainer, self._loop, self._draws = trainer, trainer.predict_loop, draws
        replacements.replace(self._loop, "run", self._run)
        replacements.before(self._loop, _parts.PREDICT_EPOCH_END, self._gather)
        replacements.replace(self._loop, "reset", self._reset)
        replacements.replace(self._loop, _parts.PREDICT_STEP, self._step)
        replacements.replace(self._loop, _parts.BATCH_INDICES, self._indices)

    def _run(self, run: Callable[[], Any]) -> Any:
        predictions = run()
        self._draws.note_apart(PREDICTED)
        self._draws.warn()
        return predictions

    def _gather(self) -> None:
        """Let all ranks have all outputs, and their indices, if anything asks for them. A collective then."""
        loop, intervals = self._loop, [getattr(each, "interval", None) for each in self._trainer.callbacks]
        if not (loop.return_predictions or any(getattr(each, "on_epoch", False) for each in intervals)):
            return
        outputs = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
        for index, held in enumerate(zip(outputs, loop.epoch_batch_indices, strict=True)):
            for own in held if self._is_divided(index) else ():
                own[:] = gather_outputs(own)

    def _reset(self, reset: Callable[[], None]) -> None:
        """Set the loaders' limits before the first batch."""
        for loader, limit in zip(_parts.loaders_of(self._loop), self._loop.max_batches, strict=True):
            if isinstance(loader, ShardedLoader):
                loader.limit = None if limit == math.inf else limit
        reset()

    def _step(self, step: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, source: Any) -> None:
        if self._is_divided(dataloader_idx):
            batch_idx = batch_idx * get_world_size() + get_rank()
        step(batch, batch_idx, dataloader_idx, source)

    def _indices(self, indices: Callable[[Any], Any], loader: Any) -> Any:
        """Return the indices of the samples in each batch drawn, by the batch's number."""
        drawn = loader.indices if isinstance(loader, ShardedLoader) else None
        return indices(loader) if drawn is None else dict(zip(itertools.count(get_rank(), get_world_size()), drawn))

    def _is_divided(self, index: int) -> bool:
        return isinstance(_parts.loaders_of(self._loop)[index], ShardedLoader)
