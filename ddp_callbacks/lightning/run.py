"""One run of a Trainer on several processes: what the strategy does at the moments that Lightning gives it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import treespec_leaf

from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.broadcast import merge_buffers
from ddp_callbacks.collectives import all_gather_tensors, pack, unpack
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning.batches import Batches, Weight
from ddp_callbacks.lightning.hooks import HookDrawing
from ddp_callbacks.lightning.kinds import like, with_tensors
from ddp_callbacks.lightning.local_steps import LocalSteps
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.metrics import SyncedMetrics, remember
from ddp_callbacks.lightning.verification import verify_first_batch
from ddp_callbacks.replicas import require_equal_replicas
from ddp_callbacks.rows import RowExchange
from ddp_callbacks.sharding import BatchSize, ShardedIterator, ShardedLoader, join_batch


class Run:
    """One run (fit, validate, test or predict) on several processes: batches, logged values and metrics."""

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        batch_size: BatchSize,
        weight: Weight | None,
        results_class: Callable[..., JointResults],
        local: LocalSteps | None = None,
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._exchange = RowExchange()
        self._local = local
        self.batches = Batches(batch_size, weight, self._exchange, sums_weights=local is None)
        self._metrics = SyncedMetrics([model, *trainer.callbacks], self._is_stand_in)
        self.drawing = HookDrawing(trainer)
        self.drawing.random_state.synchronize()
        self._undo: Callable[[], None] | None = None  # what a stand-in has left behind
        self._held = [False, False]  # flags that the other ranks have not heard of yet
        self._trained = 0  # samples of this rank since the buffers were merged
        self._batch_norm: BatchNormSynchronizer | None = None
        epoch_loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results = results_class(loop._results.training, self.batches, self._metrics, self._exchange)
        # Lightning broadcasts from inside the handler of SIGTERM, and before each batch, and waits without a limit.
        epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer._signal_connector._sigterm_notifier_fn = self._note_sigterm
        self._wrapped = {
            "on_batch_end": self._before_batch_end,
            "epoch_end_reached": self._at_end_of_data,
            "on_epoch_end": self._before_epoch_end,
        }
        for name, before in self._wrapped.items():
            setattr(connector, name, _after(before, getattr(connector, name)))

    def close(self) -> None:
        """Give Lightning's objects and the module's layers back."""
        if self._batch_norm is not None:
            self._batch_norm.close()
        self.drawing.close()
        self._metrics.close()
        for name in self._wrapped:
            delattr(self._trainer._logger_connector, name)
        del self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
        del self._trainer._signal_connector._sigterm_notifier_fn

    def synchronize_batch_norm(self) -> None:
        """The module's BatchNorm layers normalize by the whole batch from now on. A collective."""
        self._batch_norm = BatchNormSynchronizer(self._model, counts=lambda: self.batches.has_samples)

    def begin_batch(self, batch: Any, dataloader_idx: int) -> Any:
        """Note what this rank has of a batch; the batch to compute."""
        results = self._trainer._results
        if results is not None and results.is_in_batch:
            return batch  # it is not the loop that asks
        training = self._trainer.training
        combined = self._trainer._active_loop._combined_loader
        loaders, spec = list(combined.flattened), combined._spec
        if combined._mode == "sequential":
            loaders, spec = loaders[dataloader_idx : dataloader_idx + 1], treespec_leaf()
        batch = self.batches.take(batch, loaders, spec, training)
        if training:
            self._trained += self.batches.share.local
        meets = self._meets() if training else all(isinstance(loader, ShardedLoader) for loader in combined.flattened)
        self._begin_batch(meets)
        return batch

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Around ``training_step``."""
        results = self._trainer._results
        if not results.is_in_batch:  # training_step(dataloader_iter)
            self.batches.let_draw(self._loaders())
            self._begin_batch(self._meets())
        yield
        self.batches.settle()
        if results.joins_steps:
            results.join_step()

    def verify(self, arguments: Sequence[Any]) -> None:
        """Compare the gradient of this batch with that of one process; metrics do not see it. A collective.

        Args:
            arguments: Of ``training_step``, behind the batch.
        """
        undo = remember(self._model, self._metrics)
        verify_first_batch(self._trainer, self._loaders(), self.batches, arguments)
        undo()

    def end_batch(self) -> None:
        """A stand-in leaves no trace in metrics and running statistics."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def end_prediction(self, output: Any) -> Any:
        """The rows of all ranks, where the batch was divided."""
        self.end_batch()
        if self.batches.share.total is None:
            return output
        tensors: list[torch.Tensor] = []
        try:
            header = None if self.batches.is_stand_in else pack(with_tensors(output), tensors)
        except TypeError as error:
            raise ConfigurationError(
                f"predict_step must return tensors, arrays, numbers, strings, or collections of these: {error}"
            ) from error
        gathered = all_gather_tensors([header, self.batches.share.local], tensors, "the predictions")
        counted = [(unpack(text, parts), size) for (text, size), parts in gathered if text is not None]
        return like(output, join_batch(*map(list, zip(*counted, strict=True))))

    def _begin_batch(self, joins_steps: bool) -> None:
        self.end_batch()  # of one that a hook has skipped
        if self._trainer._results is not None:
            self._trainer._results.begin_batch(joins_steps)
        if self.batches.is_stand_in:
            self._undo = remember(self._model, self._metrics)

    def joint_loss(self, closure: Callable[[], Any]) -> Any:
        """The loss of the whole batch."""
        loss = closure()
        if loss is None:
            return None
        rows = self._exchange.exchange([float(loss) * self.batches.scale], "the loss")
        return torch.as_tensor(sum(row[0] for row in rows) / len(rows)).to(loss)

    def merge_buffers(self) -> None:
        """Running statistics averaged over the ranks, other buffers rank 0's."""
        of_callbacks = (value for callback in self._trainer.callbacks for value in vars(callback).values())
        averages = [value for value in of_callbacks if isinstance(value, AveragedModel)]
        for model in (self._model, *averages):  # an average has averaged each rank's own statistics
            if next(model.buffers(), None) is not None:
                merge_buffers(model, self._trained)
        self._trained = 0

    def _before_batch_end(self) -> None:
        flags = self._trainer._results.end_batch(self._flags())
        if self._local is None or self._trainer._results.joins_steps:
            self._raise_flags(flags)
        else:
            self._hold(flags)
        self.end_batch()

    def _meets(self) -> bool:
        """Whether the ranks join what they log in this training batch; with local steps only where a window closes."""
        return self._local is None or self._local.is_last_step

    def _flags(self) -> list[bool]:
        """To stop, which a hook may have set on one rank alone, and SIGTERM."""
        own = (self._trainer.should_stop, self._trainer.received_sigterm)
        return [flag or held for flag, held in zip(own, self._held, strict=True)]

    def _hold(self, flags: list[bool]) -> None:
        """Act on them when the ranks meet: one that stopped by itself would leave the others waiting."""
        self._held = flags
        self._trainer.should_stop = self._trainer._signal_connector.received_sigterm = False

    def _raise_flags(self, flags: list[bool]) -> None:
        self._held = [False, False]
        self._trainer.should_stop, self._trainer._signal_connector.received_sigterm = flags

    def _note_sigterm(self, *_: Any) -> None:
        """The handler of the signal: all ranks hear of it at the end of the batch."""
        if not self._trainer.received_sigterm and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.SIGTERM)
        self._trainer._signal_connector.received_sigterm = True

    def _at_end_of_data(self) -> None:
        self._trainer._results.join_epoch()
        if self._trainer.training:
            self.merge_buffers()
            if self._local is not None:
                rows = self._exchange.exchange([*map(float, self._flags())], "the decision to stop")
                self._raise_flags([any(flags) for flags in zip(*rows, strict=True)])
            for loader in self._loaders():
                if isinstance(loader, ShardedLoader) and isinstance(loader.iterator, ShardedIterator):
                    loader.iterator.check_agreement()
            self.drawing.random_state.synchronize()

    def _before_epoch_end(self) -> None:
        self._trainer._results.join_epoch()
        self._trainer._results.end_pass()
        if self._trainer.training:
            self.drawing.random_state.synchronize()
            require_equal_replicas(self._model, f"at the end of epoch {self._trainer.current_epoch}")
        for loader in self._loaders():
            if isinstance(loader, ShardedLoader):
                loader.shares.clear()  # of batches that were fetched ahead, where a limit has ended the pass

    def _loaders(self) -> list[Any]:
        combined = self._trainer._active_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _is_stand_in(self) -> bool:
        results = self._trainer._results
        return results is not None and results.is_in_batch and self.batches.is_stand_in


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return both
