"""The methods of the strategy that Lightning calls during a run, and a rank's state between two batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.checkpoints.resume import ResumeOptions
from ddp_callbacks.comm.held import optimizers_in
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.lightning.local_steps import LocalSteps
from ddp_callbacks.lightning.resume_fit import Fit, keep_logs
from ddp_callbacks.lightning.run import Run
from ddp_callbacks.lightning.skipping import Skipping
from ddp_callbacks.reporting.recorder import end_validation

_SEARCHES = ("BatchSizeFinder", "LearningRateFinder")  # callbacks of either package, and of the Tuner

_Lightnings: Any = object  # stands for either package's class, which follows in the MRO


class StepsMixin(_Lightnings):  # type: ignore[misc]
    """Mixin of the strategy, which makes the objects of a run.

    Attributes:
        resume: The fit, if the Trainer has the callback ``Resume``, or recovers.
        recovery: Lets the Trainer continue without processes that died, if the launcher does.
        compares: The steps of which the first call of a fit logs what is to be compared with one process.
        operations: How the values of parts become that of a batch, by step and name (``"validation_step.loss"``), as
            far as comparisons have told.
    """

    resume: Fit | None = None
    recovery: Recovery | None = None
    compares: frozenset[str]
    operations: dict[str, str]
    _trainer: Any = None
    _is_first_call = True  # of the Trainer
    _synchronizer: GradientSynchronizer | None = None  # of a fit
    _local: LocalSteps | None = None  # instead of it, if the gradients are not synchronized
    _run: Run | None = None  # on several processes
    _skipping: Skipping | None = None
    _of_callbacks: list[Any] | None = None  # optimizers that are attributes of callbacks; None before a fit has its own

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Like Lightning's, but note this rank's share of the batch before. A collective in training."""
        pads = self._run is not None and self._run.begin_batch(batch, dataloader_idx)
        with nullcontext() if self._run is None else self._run.transferring():
            batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._run.begin_padding(batch) if self._run is not None and pads else batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's; then the ranks exchange whether they skip the step. A collective."""
        step = functools.partial(super().training_step, *args, **kwargs)
        if self._skipping is not None:
            step = functools.partial(self._skipping.training_step, step)
        elif self._run is not None:
            step = functools.partial(self._run.with_loss, step)
        output = step() if self._run is None else self._run.training_step(step, args[1:])
        if self._local is not None:
            self._local.end_training_step(None if self._run is None else self._run.batches)
        return output

    def _evaluation_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            return getattr(super(), name)(*args, **kwargs)
        self._run.compare(name, args[1:])
        with self._run.computing():
            return getattr(super(), name)(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`test_step`."""
        return self._evaluation_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's; the ranks draw the random numbers of one process. What the first one logs is compared."""
        return self._evaluation_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like :meth:`test_step`."""
        return self._evaluation_step("predict_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Lightning's, but weigh the loss by this rank's share of the batch. Its value does not change."""
        with nullcontext() if self._run is None else self._run.backward(closure_loss):
            loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank inside; the next backward outside synchronizes them."""
        return nullcontext() if self._synchronizer is None else self._synchronizer.no_sync()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Like Lightning's, but LBFGS, which decides by the loss, gets that of the whole batch."""
        step = functools.partial(super().optimizer_step, optimizer, model=model, **kwargs)
        output = step(closure) if self._run is None else self._run.optimizer_step(optimizer, step, closure)
        if self._local is not None:
            self._local.note_step()
        return output

    # In Lightning's own strategy, the following hooks do nothing.

    def on_train_start(self) -> None:
        """Begin training from the current parameters. No rank trains if one wants to stop before the first epoch."""
        self._of_callbacks = optimizers_in(self._trainer.callbacks)
        if self._run is not None:
            self._run.begin_training()
        if self._local is not None:
            self._local.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """With local steps, train from the parameters that hooks may have replaced at the start of the epoch."""
        if batch_idx == 0:
            self._make_one()

    def on_validation_start(self) -> None:
        """Merge the running statistics of the training so far; with local steps, average the parameters."""
        if self._run is not None:
            self._run.merge_buffers()
        self._make_one()

    def on_validation_end(self) -> None:
        """Stop on all ranks if one wants to; with local steps, train from the parameters that hooks have restored."""
        end_validation()
        if self._trainer.state.fn == "validate":
            StepsMixin.on_train_end(self)
        if self._run is not None:
            self._run.decisions.pass_moment()
        self._make_one()

    def on_train_end(self) -> None:
        """End a run that nothing has cut. A collective."""
        if self._run is not None:
            self._run.end()

    on_test_end = on_predict_end = on_train_end

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Like Lightning's; it is no part of the validation before it."""
        end_validation()
        with nullcontext() if self._run is None else self._run.metrics.as_torchmetrics():
            super().save_checkpoint(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. With local steps, average the parameters before; then a collective."""
        if self._local is not None and (self.world_size == 1 or not self._is_alone()):
            self._local.outer_step()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def _make_one(self) -> None:
        """Average the parameters, with local steps. A collective then."""
        if self._local is not None:
            self._local.outer_step()

    @property
    def is_padding(self) -> bool:
        """Whether this process has no sample of the current training batch, and computes a padding batch. Local."""
        return self._run is not None and self._run.is_padding()

    # --- stopping and going on ----------------------------------------------------------------------------------------

    def begin_resuming(self, trainer: Any) -> None:
        """Let the callback ``Resume``, if any, read its file: for a fit, or for the logs of a call in front of it.

        A collective then; call it after joining.

        Raises:
            ConfigurationError: There are several ``Resume``, or a search for a batch size or a learning rate.
        """
        found = [callback for callback in trainer.callbacks if isinstance(callback, ResumeOptions)]
        if len(found) > 1:
            raise ConfigurationError(f"a Trainer takes one callback Resume, got {len(found)}. Remove the others.")
        is_first, self._is_first_call = self._is_first_call, False
        recovers = self.recovery is not None and dist.is_initialized()
        if not (found or recovers) or trainer.fast_dev_run:
            return
        if trainer.state.fn != "fit":
            if found and is_first:
                keep_logs(trainer, found[0])
            return
        for callback in trainer.callbacks:
            if type(callback).__name__ in _SEARCHES:
                raise ConfigurationError(
                    f"Resume cannot tell the trials of {type(callback).__name__} from the fit, nor can ddprun "
                    "--keep-going. Search in a Trainer without Resume, in a job without that option, and give what it "
                    "finds to this one."
                )
        self.resume = Fit(trainer, self.recovery if recovers else None, found[0] if found else None)
        self.resume.begin()

    @property
    def takes_local_steps(self) -> bool:
        """Whether the parameters of the ranks may differ between two batches."""
        return self._local is not None

    @property
    def trains_in_callbacks(self) -> bool:
        """Whether callbacks have optimizers."""
        return bool(self._of_callbacks)

    @property
    def random_state(self) -> RunRandomState:
        """The random state of the run; with a single process, that of the process."""
        return RunRandomState() if self._run is None else self._run.random_state

    def own_state(self) -> dict[str, Any]:
        """Return this rank's state between two batches. Local."""
        run = {"trained": 1, "wants_to_stop": False} if self._run is None else self._run.state_dict()
        return run | {
            "operations": self.operations,
            "outside": [parameter.detach().clone() for parameter in self._trained_outside()],
            "of_callbacks": [copy.deepcopy(optimizer.state_dict()) for optimizer in self._of_callbacks or ()],
            "engine": None if self._synchronizer is None else self._synchronizer.state_dict(),
            "local_steps": None if self._local is None else self._local.state_dict(),
        }

    def load_own_state(self, states: Sequence[dict[str, Any]], are_as_many: bool) -> None:
        """Inverse of :meth:`own_state`. Local.

        Args:
            states: The states of all ranks that took them. If there were as many as now, each must be this rank's own.
            are_as_many: Whether there were as many ranks as now.
        """
        own = states[0]
        self.operations.update(own.get("operations", {}))
        for parameter, value in zip(self._trained_outside(), own["outside"], strict=True):
            parameter.detach().copy_(value)
        for optimizer, state in zip(self._of_callbacks or (), own["of_callbacks"], strict=True):
            optimizer.load_state_dict(state)
        if self._run is not None:
            self._run.load_state_dict(own, are_as_many)
        if self._synchronizer is not None and own["engine"] is not None:
            self._synchronizer.load_state_dict([state["engine"] for state in states])
        if are_as_many and self._local is not None and own["local_steps"] is not None:
            self._local.load_state_dict(own["local_steps"])

    def _trained_outside(self) -> list[torch.nn.Parameter]:
        """Return the parameters that an optimizer trains, but neither the module nor its checkpoint has."""
        known = set(map(id, self.lightning_module.parameters()))
        return [parameter for parameter in self._trained_now() if id(parameter) not in known]

    def end_resuming(self) -> None:
        """End the fit that ``Resume`` saves, whether or not it has failed."""
        fit, self.resume = self.resume, None
        if fit is not None:
            fit.end()
