"""One run of a Trainer on several processes: what the strategy does when Lightning calls it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ddp_callbacks.batch_norm.layers import BatchNormSynchronizer
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.held import Held
from ddp_callbacks.data.collected import Collected
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.data.shares import note_part
from ddp_callbacks.data.skipped import SkippedParts
from ddp_callbacks.errors import SkippedBatchError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.first_batch import PURPOSE
from ddp_callbacks.gradients.loss_watch import LossWatch
from ddp_callbacks.gradients.verification import Comparisons, Verify
from ddp_callbacks.lightning import _logged, _parts
from ddp_callbacks.lightning.batch_comparison import compare_what_is_logged, verify_first_batch
from ddp_callbacks.lightning.batch_ends import BATCH_END, LOSS, readers
from ddp_callbacks.lightning.batches import Batches, joint_loss, require_alike_steps, weighed_backward
from ddp_callbacks.lightning.decisions import Decisions
from ddp_callbacks.lightning.hook_draws import surround_hooks
from ddp_callbacks.lightning.local_steps import LocalSteps
from ddp_callbacks.lightning.padding import skip_batch, take_rows
from ddp_callbacks.lightning.predictions import Predictions
from ddp_callbacks.lightning.skipping import no_loss, without_loss
from ddp_callbacks.lightning.synced_metrics import SyncedMetrics, remember_lists, remember_padding
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.randomness import Rows, WholeDraws
from ddp_callbacks.randomness.draws import OTHER_ROWS
from ddp_callbacks.replacement import Replacements
from ddp_callbacks.replicas.checks import ReplicaChecks
from ddp_callbacks.replicas.parameters import checksum_of_replica, merge_buffers, require_equal_replicas

_SKIPS, _READS = "the decision to skip a step", "the decision to log a step"
SKIPPED = object()
"""What Lightning gets instead of ``None`` if ``training_step`` has returned ``None`` on every rank."""


class Run:
    """One run (fit, validate, test or predict) on several processes: batches, logged values and metrics.

    It lasts until ``replacements`` are undone.
    """

    def __init__(
        self,
        trainer: Any,
        held: Held,
        batches: Batches,
        local: LocalSteps | None,
        synchronizer: GradientSynchronizer | None,
        verify: Verify | None,
        replacements: Replacements,
    ) -> None:
        self._trainer, self._held, self._model = trainer, held, held.model
        self._local, self._synchronizer = local, synchronizer
        self._comparisons = Comparisons(verify)
        self._compared: set[str] = set()  # steps, with the number of the loader, that no batch needs to be compared for
        self._losses = LossWatch()
        self._skipped, self._has_gradient = SkippedParts(), False  # whether the current batch had a backward
        self.batches = batches
        self._checks: ReplicaChecks | None = None
        if synchronizer is not None:
            self._checks = ReplicaChecks(held, synchronizer.times, trainer.strategy.on_divergence)
        self._exit = replacements
        self.metrics = SyncedMetrics([held.model, *trainer.callbacks], self.is_padding, self._fraction, replacements)
        self._draws = WholeDraws(held.model, by_rank=trainer.strategy.randomness == "by_process")
        self.random_state = RunRandomState()
        self.random_state.draws = self._draws
        self.random_state.synchronize()
        self._undo = contextlib.ExitStack()  # ends a padding batch
        self._exit.callback(self.end_batch)
        self._syncs_batch_norm = False
        self.decisions = Decisions(trainer, self._exit)
        self._trained = 0  # samples of this rank since the buffers were merged
        self._loader = 0  # the number of that of the current batch, if an evaluation has several
        self._of_training, self._of_evaluation = Collected(), Collected()
        self.metrics.exchanging = lambda: self._collected.apart()
        results = trainer.strategy.results_class
        epoch_loop, connector = trainer.fit_loop.epoch_loop, _parts.connector(trainer, "logger")
        for loop in _logged.loops_with_results(trainer):
            _logged.replace_results(loop, lambda training: results(training, trainer, batches, self.metrics))
        self._exit.before(connector, "on_batch_end", self._before_batch_end)
        self._exit.before(connector, "epoch_end_reached", self._at_end_of_data)
        self._exit.before(connector, "on_epoch_end", self._before_epoch_end)
        for callback in trainer.callbacks:
            for name in _parts.MONITORED:
                if hasattr(callback, name):
                    self._exit.before(callback, name, self._before_monitor)
        surround_hooks(trainer, self._draws, self.batches, lambda: self._rows, self._exit)
        # Rank 0 may have drawn alone in the sanity check, and in hooks.
        self._exit.before(trainer.fit_loop, "on_run_start", self.random_state.synchronize)
        self._exit.before(trainer.fit_loop, "on_run_start", functools.partial(require_alike_steps, trainer))
        for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._exit.before(loop, "on_run_start", self._before_evaluation)
        self._exit.before(epoch_loop, "run", lambda: self._of_training.begin(self._collectors))
        for loop in (trainer.fit_loop, epoch_loop):  # a hook before the first batch may have decided to stop
            self._exit.before(loop, "run", self.decisions.pass_moment)
        kind = epoch_loop.automatic_optimization.output_result_cls
        self._exit.replace(kind, "from_training_step_output", _without_skipped)
        if trainer.predicting:
            self._exit.before(trainer.predict_loop, "on_run_start", self._before_prediction)
            self._exit.before(trainer.predict_loop, _parts.PREDICT_EPOCH_END, self._of_evaluation.end)
            Predictions(trainer, self._exit, self._draws)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state between two batches. Local."""
        stops, compared = "stop" in self.decisions.wishes, sorted(self._compared)
        draws = self._draws.state_dict()
        return {"trained": self._trained, "wants_to_stop": stops, "compared": compared, "draws": draws}

    def load_state_dict(self, state: dict[str, Any], is_own: bool) -> None:
        """Inverse of :meth:`state_dict`. Local.

        Args:
            is_own: Whether ``state`` is this rank's. If not, the buffers were merged already.
        """
        self._trained = state["trained"] if is_own else 0
        self._compared = {*state.get("compared", ())}
        self._draws.load_state_dict(state.get("draws", {}))
        if is_own and state["wants_to_stop"]:
            self.decisions.wishes.add("stop")

    def synchronize_batch_norm(self) -> None:
        """Let the module's BatchNorm layers normalize by the whole batch during the run. A collective."""
        layers = BatchNormSynchronizer(self._model, counts=lambda: not self.batches.is_padding)
        self._exit.callback(layers.close)
        self._syncs_batch_norm = True

    def begin_batch(self, batch: Any, dataloader_idx: int) -> bool:
        """Note this rank's share of a batch, if a loop has drawn it. A collective in training.

        Returns:
            Whether :meth:`begin_padding` must follow, when the batch is on its device.
        """
        if not _parts.is_asked_by_loop(self._trainer):
            return False
        training, self._loader = self._trainer.training, dataloader_idx
        self.batches.take(batch, self._loaders_of_batch, training)
        self._collected.note(self.batches.share.local)
        if training:
            self._trained += self.batches.share.local
            joins_steps = self._local is None or self._local.is_last_step
        else:
            joins_steps = all(isinstance(loader, ShardedLoader) for loader in self._loaders())
        self.end_batch()  # the batch before, if a hook has skipped it
        results = _logged.results_of(self._trainer)
        if results is not None:
            results.begin_batch(joins_steps)
        return self.batches.is_padding

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surround the step of a batch: inside, draw what one process draws for the whole batch."""
        undo = contextlib.ExitStack()
        if self._joins_batches and self.batches.is_padding:
            undo.callback(remember_lists(self._model))
        with undo, self._draws.forward(self._rows):
            try:
                yield
            except Exception as error:
                note_part(error, self.batches.share)
                raise

    def transferring(self) -> AbstractContextManager[None]:
        """Surround the transfer of a batch, with the user's hooks; like :meth:`computing` if a loop has drawn it."""
        is_drawn = _parts.is_asked_by_loop(self._trainer)
        return self._draws.forward(self._rows, "transfer") if is_drawn else nullcontext()

    @property
    def _rows(self) -> Rows | None:
        return None if self._local is not None else self.batches.rows

    def begin_padding(self, batch: Any) -> Any:
        """Begin a padding batch, and return what the step computes instead."""
        # In these steps the ranks may meet, so that this one has to compute them.
        meets = self._trainer.training or self._syncs_batch_norm or self.metrics.meet_in_forward
        self._draws.has_skipped |= not meets
        step = "test_step" if self._trainer.testing else "validation_step"
        is_first = _logged.results_of(self._trainer).is_first or self._is_to_compare(step)
        if not (meets or is_first or self.metrics.count_batches):
            self._undo.callback(skip_batch(self._trainer))
            return batch
        forget, forget_lists = remember_padding(self._model, self.metrics), remember_lists(self._model)
        self._undo.callback(forget)
        if not self._joins_batches:
            self._undo.callback(forget_lists)
        if not meets:
            batch, end = take_rows(self._trainer, batch, forget, forget_lists)
            self._undo.callback(end)
        return batch

    @property
    def _joins_batches(self) -> bool:
        """Whether hooks after the step have gradients and losses of whole batches, also without a sample."""
        return bool(self._trainer.training) and self._local is None

    def with_loss(self, step: Callable[[], Any]) -> Any:
        """Run ``step`` and return its output, or a loss of no gradient for ``None`` in a part that counts nothing."""
        output = step()
        has_none = output is None and self._is_automatic and self.batches.counts_nothing
        return no_loss(self._trainer) if has_none else output

    def training_step(self, step: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """Run ``training_step`` and return its output; :data:`SKIPPED` if it is ``None`` on every rank. A collective.

        In steps of local SGD in which the ranks do not meet, it is local.

        Args:
            arguments: The arguments of ``training_step`` after the batch.

        Raises:
            SkippedBatchError: ``training_step`` has returned ``None`` on some ranks only, in parts that count; or on
                this rank, in a step in which the ranks do not meet. Only with automatic optimization.
        """
        is_compared = self._compare_gradient(arguments)
        if self.batches.counts_samples:
            self._comparisons.look(self.batches.share)
        if (follower := self._synchronizer or self._local) is not None:
            follower.follow()
        if self._checks is not None:
            self._checks.times.mark("between steps")  # and hooks that come before
        self._has_gradient = False
        with self.computing():
            output = step()
        if is_compared and self._comparisons.called and self.batches.sums:
            self._note_sums(output)
        self._weigh_for_callbacks()
        if not self._is_automatic:
            if self._has_gradient:
                self._skipped.note_gradient(self.batches.share.local)
            else:
                self._skipped.note_skipped(self.batches.share)
            return output
        meets = _logged.results_of(self._trainer).joins_steps
        skipped_by = self._exchange_skips(output is None) if meets else None
        if output is not None:
            self._skipped.note_gradient(self.batches.share.local)
            return output
        if skipped_by is None or not all(skipped_by):
            raise SkippedBatchError(without_loss(self._trainer, skipped_by))
        self._skipped.note_skipped(self.batches.share)
        return SKIPPED

    def _compare_gradient(self, arguments: Sequence[Any]) -> bool:
        """Compare the gradient of this batch with that of one process, if it is due, and return whether it was."""
        trainer, batch = self._trainer, self._trainer.fit_loop.total_batch_idx
        if not self._comparisons.is_due(batch):
            if self._is_automatic and not batch:
                self.compare("training_step", arguments)
            return False
        has_loss = verify_first_batch(self._comparisons, trainer, self._loaders(), self.batches, self._draws, arguments)
        self._skipped.whole_has_one = has_loss
        return True

    def _note_sums(self, output: Any) -> None:
        """Let a loss that is a sum be logged as one, as no comparison can tell how it is joined. A collective."""
        loss, results = _parts.loss_in(output), _logged.results_of(self._trainer)
        names = all_gather_object([] if loss is None else results.names_of(float(loss.detach())), PURPOSE)
        common = set(names[0]).intersection(*names[1:])
        self._trainer.strategy.operations.update({f"training_step.{name}": "sum" for name in common})

    def compare(self, step: str, arguments: Sequence[Any]) -> None:
        """Compare what a step logs for a batch with one process, if it is due. A collective then.

        Args:
            arguments: Those of the step after the batch.
        """
        if self._is_to_compare(step):
            trainer, loaders = self._trainer, self._loaders_of_batch
            if compare_what_is_logged(trainer, loaders, self.batches, self._draws, step, arguments):
                self._compared.add(f"{step} {self._loader}")

    def _is_to_compare(self, step: str) -> bool:
        """Whether to compare what ``step`` logs for this batch; equal on all ranks, also on new ones."""
        if step not in self._trainer.strategy.compares or f"{step} {self._loader}" in self._compared:
            return False
        iterators = [getattr(loader, "iterator", None) for loader in self._loaders_of_batch]
        used = [0 if iterator is None else iterator.current.used for iterator in iterators]
        is_due = all(number and not number & (number - 1) for number in used)  # powers of two
        return is_due and bool(_logged.results_of(self._trainer).joins_steps)

    def _exchange_skips(self, skips: bool) -> list[bool]:
        """Tell all ranks whether this one skips the step. If it does, return each rank's answer. A collective.

        If a backward comes next, the answers travel with the gradients.
        """
        if (carrier := self._carrier()) is None:
            answers = all_gather_object(skips, _SKIPS)
            if all(answers) and self._synchronizer is not None:
                self._synchronizer.synchronize()  # gradients that were accumulated before
            return answers
        return carrier.skip() if skips else []  # the others synchronize in their backward, if they skip nothing

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Weigh the backward of ``loss`` inside by this rank's share of the batch. A collective if it synchronizes."""
        where = f"step {self._trainer.global_step}"
        self._has_gradient = True
        self._losses.look(loss, self.batches.weight, self.batches.share.local, where)
        context: AbstractContextManager[None] = nullcontext()
        if self._local is not None:
            context = self._local.backward(self.batches)
        elif self._synchronizer is not None:
            context = weighed_backward(self._synchronizer, loss, *self.batches.weight_and_total)
        with context, self._draws.backward():
            yield
        self._weigh_for_callbacks()

    def _weigh_for_callbacks(self) -> None:
        """Weigh the backwards of callbacks that train: their losses are means over the samples."""
        if self._synchronizer is not None and self._trainer.strategy.trains_in_callbacks:
            self._synchronizer.weigh(self.batches.share.local, self.batches.share.total)

    def optimizer_step(self, optimizer: Any, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Call ``step(closure)``. LBFGS gets a closure that returns the loss of the whole batch."""
        inner = _parts.torch_optimizer(optimizer)
        if self._local is None and isinstance(inner, torch.optim.LBFGS):
            closure = self._joined(closure)
        if self._is_automatic:
            return step(closure)
        with contextlib.ExitStack() as aside:  # amid a step by hand, an optimizer may draw noise for all parameters
            aside.enter_context(self._draws.aside())
            return step(functools.partial(self._in_step, aside, closure))

    def _in_step(self, aside: contextlib.ExitStack, closure: Callable[[], Any]) -> Any:
        """Let a closure compute the batch, in the midst of an optimizer's step."""
        aside.close()
        try:
            return closure()
        finally:
            aside.enter_context(self._draws.aside())

    def end_batch(self) -> None:
        """End a padding batch: remove its traces in metrics and running statistics, and give hooks back."""
        self._undo.close()

    def _joined(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that returns the loss of the whole batch."""
        return functools.partial(joint_loss, closure, lambda: self.batches.weight_and_total)

    def begin_training(self) -> None:
        """Begin training: stop if a rank wants to. A collective.

        Hooks that read losses or logged values, such as those of Lightning's learning rate finder, get those of whole
        batches from now on, unless only some ranks have them.
        """
        self.decisions.pass_moment()
        of_loss, of_logged = readers(self._collectors, self._is_automatic and self._local is None)
        for owner in of_loss:
            self._exit.replace(owner, BATCH_END, self._with_joint_loss)
        for owner in of_logged:
            self._exit.before(owner, BATCH_END, self._before_monitor)

    def _with_joint_loss(self, hook: Callable[..., None], *args: Any) -> None:
        *before, outputs, batch, batch_idx = args
        if outputs and LOSS in outputs:
            outputs = outputs | {LOSS: self._joined(lambda: outputs[LOSS])()}
        hook(*before, outputs, batch, batch_idx)

    def end(self) -> None:
        """End a run that nothing has cut: all ranks draw the same random numbers again, as before it. A collective."""
        if self._trainer.predicting:
            self._collected.warn(all_gather_object(self._collected.checksums(), "what is collected"), get_rank())
        self.random_state.synchronize("the end of the run")

    def merge_buffers(self) -> None:
        """Average running statistics over the ranks, and copy other buffers from rank 0. A collective."""
        of_callbacks = (value for callback in self._trainer.callbacks for value in vars(callback).values())
        averages = [value for value in of_callbacks if isinstance(value, AveragedModel)]
        for model in (self._held, *averages):  # an AveragedModel has averaged this rank's own statistics
            merge_buffers(model, self._trained)
        self._trained = 0

    def _before_batch_end(self) -> None:
        results = _logged.results_of(self._trainer)
        results.end_batch()
        self.end_batch()
        if self._trainer.training and self._checks is not None:
            optimizers = self._trainer.strategy.optimizers
            self._checks.after_step(optimizers, self._trainer.current_epoch, self._trainer.fit_loop.batch_idx)
        if self._trainer.training or results.joins_steps:  # otherwise some ranks may have more batches
            self.decisions.pass_moment()
        if results.joins_steps and (self._is_read(results) or results.is_full):
            results.join()

    def _is_read(self, results: Any) -> bool:
        """Whether anything on any rank reads logged values of this step. A collective in evaluations."""
        if self._trainer.training:
            return bool(_logged.logs_step(self._trainer) or _logged.follows_step(self._trainer))
        return any(all_gather_object(results.logs_step and bool(self._trainer.loggers), _READS))

    def _before_monitor(self) -> None:
        """Join logged values before ModelCheckpoint, EarlyStopping or a user's hook reads them. A collective."""
        results, trainer = _logged.results_of(self._trainer), self._trainer
        self._collected.checksums()
        meets = results.joins_steps or not results.is_in_batch
        if trainer.training and trainer.state.status != "interrupted" and meets:
            results.join()

    @property
    def _is_automatic(self) -> bool:
        return bool(self._trainer.lightning_module.automatic_optimization)

    def _carrier(self) -> GradientSynchronizer | None:
        """Return the gradient engine, if a backward comes next on every rank that has a loss."""
        synchronizer = self._synchronizer
        if synchronizer is None or not synchronizer.is_enabled:
            return None
        return synchronizer if self._is_automatic and not _parts.skips_backward(self._trainer) else None

    def _before_evaluation(self) -> None:
        """Join what was logged after the last step. A collective then."""
        require_alike_steps(self._trainer)
        results = _logged.results_of_training(self._trainer)
        if self._trainer.state.fn == "fit" and not self._trainer.sanity_checking:
            results.join()
            _logged.refresh_metrics(self._trainer, results)
        self._of_evaluation.begin(self._collectors)

    def _at_end_of_data(self) -> None:
        results = _logged.results_of(self._trainer)
        results.end_batch()  # if a hook has skipped the last one
        self.end_batch()
        self.random_state.take(results.join(ends=True, carried=self.random_state.report()))
        if self._trainer.training:
            _logged.refresh_metrics(self._trainer, results)
            self.merge_buffers()
        self._collected.end()
        results.counts = self._collected.counts

    def _before_prediction(self) -> None:
        self._collected.begin(self._collectors, least=1)  # nothing is compared

    def _before_epoch_end(self) -> None:
        results, random_state = _logged.results_of(self._trainer), self.random_state
        collected = self._collected.checksums()
        checksum = checksum_of_replica(self._held) if self._trainer.training else None
        own = [checksum, random_state.checksums(), collected, self.decisions.ask()]
        checksums, of_random, of_ranks, asked = zip(*results.join(ends=True, carried=own), strict=True)
        random_state.follow(of_random)
        self.decisions.pass_moment(is_asked=any(asked))
        if any(checksum != checksums[0] for checksum in checksums):
            when, strategy = f"at the end of epoch {self._trainer.current_epoch}", self._trainer.strategy
            optimizers = strategy.optimizers
            require_equal_replicas(self._held, when, on_divergence=strategy.on_divergence, optimizers=optimizers)
        if not results.logs_of_parts:
            self._collected.warn(of_ranks, get_rank())
        results.end_pass()
        self._draws.note_apart(OTHER_ROWS if self.batches.have_other_rows else "")
        if self._trainer.training or self._trainer.state.fn != "fit":
            self._draws.warn()

    @property
    def _collected(self) -> Collected:
        return self._of_training if self._trainer.training else self._of_evaluation

    @property
    def _collectors(self) -> list[Any]:
        return [self._trainer.lightning_module, *self._trainer.callbacks]

    def _loaders(self) -> list[Any]:
        return _parts.loaders_of(_parts.active_loop(self._trainer))

    @property
    def _loaders_of_batch(self) -> list[Any]:
        return _parts.loaders_of_batch(_parts.active_loop(self._trainer), self._loader)

    def is_padding(self) -> bool:
        """Whether this rank has no sample of the batch that is being computed."""
        return self._is_in_batch and self.batches.is_padding

    def _fraction(self) -> float | None:
        return self.batches.share.fraction if self._is_in_batch else None

    @property
    def _is_in_batch(self) -> bool:
        results = _logged.results_of(self._trainer)
        return results is not None and bool(results.is_in_batch)


def _without_skipped(make: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert a step's output as Lightning does, with ``None`` in place of :data:`SKIPPED`, as on one process."""
    return make(None if output is SKIPPED else output, *args, **kwargs)
