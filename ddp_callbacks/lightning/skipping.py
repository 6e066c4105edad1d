"""``skip_batch``: skip a batch if ``training_step`` returns no loss on one rank, or one that is not finite.

Lightning's loops then continue as on one process whose ``training_step`` has returned ``None``: schedulers, counters
and hooks run, and the optimizer finds no gradient of this batch.

Values that the step has logged before it found the loss to be bad stay, as on one process. A rank that returns ``None``
early has done less than the others. One process would have returned there, too, so all ranks undo what that rank has
not logged, updated or normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.bad_batches import FAULTS, BadBatches, Fault, SkipBatch, check_optimizer, fault_of
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import _logged, _parts
from ddp_callbacks.lightning.synced_metrics import SyncedMetrics, remember_traces
from ddp_callbacks.process_group.presence import describe
from ddp_callbacks.replacement import Replacements

if TYPE_CHECKING:
    from ddp_callbacks.lightning.run import Run


class Skipping:
    """Decides in each step of a fit whether to skip the batch; all ranks decide alike. Reports until the fit ends.

    Args:
        run: The run on several processes; ``None`` with a single process.
    """

    def __init__(self, trainer: Any, skip_batch: SkipBatch, run: Run | None, replacements: Replacements) -> None:
        self._trainer = trainer
        self._faults = FAULTS[skip_batch]
        self._setting = skip_batch
        self._run = run
        self._bad = BadBatches()
        replacements.callback(self._bad.close)

    def check(self, optimizers: Sequence[Any]) -> None:
        """Raise :class:`ConfigurationError` with manual optimization, or LBFGS, which computes the loss repeatedly."""
        module = self._trainer.lightning_module
        if not module.automatic_optimization:
            raise ConfigurationError(
                f'skip_batch="{self._setting}" needs automatic optimization: {type(module).__name__} optimizes '
                "manually, where training_step may return None, and takes steps itself. Leave out skip_batch, and look "
                "at the loss before manual_backward."
            )
        for optimizer in optimizers:
            check_optimizer(self._setting, _parts.torch_optimizer(optimizer))

    def training_step(self, step: Callable[[], Any]) -> Any:
        """Run ``step`` and return its output; ``None`` to skip the batch. A collective on several processes."""
        allows_none = Fault.NO_LOSS in self._faults
        traces = _Traces(self._trainer, self._run.metrics) if self._run is not None and allows_none else None
        output = step()
        faults = self._bad.agree(self._fault(output), 1.0 if self._run is None else self._run.batches.weight)
        if traces is not None and Fault.NO_LOSS in faults.values():
            traces.keep_common(faults.get(dist.get_rank()) == Fault.NO_LOSS)
        if faults:
            self._bad.report(faults, where(self._trainer))
            return None
        return no_loss(self._trainer) if output is None and allows_none else output

    def _fault(self, output: Any) -> Fault:
        """Return the fault of this rank's loss, if it is one for which batches are skipped."""
        loss = _parts.loss_in(output)
        found = Fault.NOTHING
        if output is None:
            found = Fault.NO_LOSS
        elif isinstance(loss, torch.Tensor):
            found = fault_of(loss)
        return found if found in self._faults else Fault.NOTHING


class _Traces:
    """The traces that a step leaves from now on: logged values, states of torchmetrics, running statistics."""

    def __init__(self, trainer: Any, metrics: SyncedMetrics) -> None:
        self._logged = _logged.results_of(trainer).remember()
        self._changes = dict(enumerate(remember_traces(trainer.lightning_module, metrics)))

    def keep_common(self, returned_none: bool) -> None:
        """Undo the traces that are missing on some rank whose step returned ``None``. A collective."""
        changed = {index: forget for index, (has_changed, forget) in self._changes.items() if has_changed()}
        undo = self._logged() | changed
        names = all_gather_object([*undo] if returned_none else None, "what a skipped step has logged")
        common = set[Any].intersection(*(set(own) for own in names if own is not None))
        for name, forget in undo.items():
            if name not in common:
                forget()


def no_loss(trainer: Any) -> torch.Tensor:
    """Return the loss of a part that counts nothing and has none: its backward contributes no gradient."""
    return torch.zeros((), device=trainer.strategy.root_device, requires_grad=True)


def where(trainer: Any) -> str:
    """Name the current batch, for messages."""
    return f"epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx}"


def without_loss(trainer: Any, skipped_by: Sequence[bool] | None) -> str:
    """Return the error text for a rank that has no loss while others have one.

    Args:
        skipped_by: For each rank, whether it has no loss; ``None`` with local steps, which do not exchange that.
    """
    begin = f"{describe(dist.get_rank())}: training_step returned None in {where(trainer)}"
    if skipped_by is None:
        return (
            f"{begin}, but with local steps (sync=...) the processes do not meet in each step to skip it together. "
            "Return a loss of zero that depends on the parameters, or leave out sync."
        )
    others = [str(rank) for rank, has_none in enumerate(skipped_by) if not has_none]
    have = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)} {'have' if len(others) > 1 else 'has'}"
    return (
        f"{begin}, where {have} a loss. All processes must skip a batch, or none. If only a part has nothing to learn "
        "from, say by weight= what counts: 0 in such a part. To skip the whole batch "
        'whenever one process returns None, use CallbackStrategy(skip_batch="no_loss").'
    )
