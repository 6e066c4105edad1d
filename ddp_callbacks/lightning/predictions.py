"""Prediction: hooks and writers have this rank's part of each batch; what ``trainer.predict`` returns is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_callbacks.data.outputs import gather_outputs
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.lightning._lightning import (
    BATCH_INDICES,
    PREDICT_STEP,
    drawn_from,
    loader_of,
    predictions_of,
)
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.replacement import Replaced


class Predictions:
    """The prediction loop of a Trainer while it runs.

    A padding batch of a batch of which this rank has no sample is kept from prediction writers and from what the loop
    collects for them, which have each row once.

    Args:
        trainer: Lightning's.
        batches: Those of the run.

    Attributes:
        sizes: Of this rank's parts, by loader.
        examples: The first output, by loader.
    """

    def __init__(self, trainer: Any, batches: Batches) -> None:
        self._trainer = trainer
        self._loop = trainer.predict_loop
        self._batches = batches
        self.sizes: dict[int, list[int]] = {}  # of this rank's parts, by loader
        self._output: Any = None  # the last, which may be that of a padding batch
        self.examples: dict[int, Any] = {}  # the first output, by loader
        methods: dict[str, Callable[..., Any]] = {
            "run": self._run,
            "reset": self._reset,
            PREDICT_STEP: self._step,
            BATCH_INDICES: self._indices,
        }
        self._replaced = [Replaced(self._loop, name, function) for name, function in methods.items()]

    def close(self) -> None:
        """Give the loop its methods back."""
        for replaced in self._replaced:
            replaced.undo()

    def end_step(self, output: Any) -> None:
        """``predict_step`` has returned. A collective in the first batch of a loader, whose output shows what joins."""
        self._batches.settle()
        self._output = output
        if self._batches.is_padding:
            self._trainer.callbacks = [
                each for each in self._trainer.callbacks if not hasattr(each, "write_on_batch_end")
            ]
        if not self._loop.batch_progress.current.processed and self._loop.return_predictions and self._is_divided(0):
            gather_outputs([output], [self._batches.share.local])

    def _run(self, run: Callable[[], Any]) -> Any:
        predictions = run()
        if predictions is None:
            return None
        if self._loop.num_dataloaders == 1:
            return self._whole(0, predictions)
        return [self._whole(index, own) for index, own in enumerate(predictions)]

    def _reset(self, reset: Callable[[], None]) -> None:
        """Before the first batch; also behind runs that a search for a batch size has made inside of this one."""
        self.sizes.clear()
        self.examples.clear()
        self._output = None
        reset()

    def _step(self, step: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, source: Any) -> None:
        loop, callbacks = self._loop, self._trainer.callbacks
        if source is not None:
            self._batches.let_draw(self._loaders())  # predict_step(dataloader_iter)
        try:
            step(batch, batch_idx, dataloader_idx, source)
        finally:
            self._trainer.callbacks = callbacks
        index = dataloader_idx if source is None else drawn_from(loop)
        self.sizes.setdefault(index, []).append(self._batches.share.local)
        self.examples.setdefault(index, self._output)
        if self._batches.is_padding:
            batches = len(self.sizes[index]) - self.sizes[index].count(0)
            del predictions_of(loop)[index][batches:], loop.epoch_batch_indices[index][batches:]

    def _indices(self, indices: Callable[[Any], Any], loader: Any) -> Any:
        """Of this rank's part of each batch that was drawn."""
        drawn = loader.indices if isinstance(loader, ShardedLoader) else None
        return indices(loader) if drawn is None else drawn

    def _whole(self, index: int, predictions: list[Any]) -> list[Any]:
        if not self._is_divided(index):
            return predictions
        own, sizes = iter(predictions), self.sizes.get(index, [])
        return gather_outputs([next(own) if size else self.examples[index] for size in sizes], sizes)

    def _is_divided(self, index: int) -> bool:
        return isinstance(self._loaders()[index], ShardedLoader)

    def _loaders(self) -> list[Any]:
        return list(loader_of(self._loop).flattened)
