"""Skip a batch on all ranks if the loss is NaN or infinite on one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchbearer

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.data.skipping import FAULTS, BadBatches, check_skip_batch, fault_of
from ddp_callbacks.errors import ConfigurationError, SkippedBatchError
from ddp_callbacks.torchbearer.base import DistributedCallback, LocalStates, State, wrap_methods
from ddp_callbacks.torchbearer.weights import LossWeight, Weight

SkipBatch = Literal["non_finite"]


def check_skip(skip_batch: str | None, sync: object) -> None:
    """Raise :class:`ConfigurationError` unless it is ``None``, or ``"non_finite"`` with exact gradients."""
    if skip_batch in set(FAULTS) - {"non_finite"}:
        raise ConfigurationError(
            f'skip_batch must be None or "non_finite" in a Trial, whose criterion always returns a loss, got '
            f"{skip_batch!r}."
        )
    check_skip_batch(skip_batch, sync)


class SkipBatches(DistributedCallback):
    """Skip a training batch on all ranks if its loss is NaN or infinite on one rank.

    The closure ends after ``on_criterion``: there is no backward and no ``on_backward``, and gradients are ``None``, so
    the optimizer changes nothing. Metrics don't count the batch. All else goes on, such as ``on_step_training`` and a
    scheduler that it steps. Rank 0 reports the batch, and the ranks and hosts with such a loss. This also works with a
    single process. Callbacks after this one don't get the ``on_criterion`` of a skipped batch.

    It costs one small message in each step, and reading the loss from its GPU. A rank without samples, or whose part
    has weight 0, has no say.

    Args:
        weight, reduction: As in :class:`AllReduceGradients`.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: At the start: LBFGS, which computes the loss several times per step.
        SkippedBatchError: On every rank alike: all batches of an epoch were skipped.
    """

    def __init__(
        self,
        weight: Weight | None = None,
        reduction: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self._loss_weight = LossWeight(weight, reduction)
        self._bad: BadBatches | None = None
        self._skipped = 0  # batches of this pass

    def on_init(self, state: State) -> None:
        super().on_init(state)
        trial = state[torchbearer.SELF]
        wrap_methods(trial, ("run",), functools.partial(self._skipping, trial))

    def on_start_training(self, state: State) -> None:
        if isinstance(state[torchbearer.OPTIMIZER], torch.optim.LBFGS):
            raise ConfigurationError(
                'skip_batch="non_finite" does not work with LBFGS, which computes the loss several times per step and '
                "cannot continue without it. Leave out skip_batch, or use another optimizer."
            )
        if self._bad is None:
            exchange = ScalarExchange(self.process_group) if self.world_size > 1 else None
            self._bad = BadBatches(exchange, self.process_group)
        self._skipped = 0

    def on_criterion(self, state: State) -> None:
        assert self._bad is not None
        weight, _ = self._loss_weight.of(state)
        faults = self._bad.agree(fault_of(state[torchbearer.LOSS]), weight)
        if faults:
            self._bad.report(faults, f"epoch {state[torchbearer.EPOCH]}, batch {state[torchbearer.BATCH]}")
            raise _Skipped

    def local_state(self, state: State) -> dict[str, Any]:
        return {"skipped": self._skipped}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        self._skipped = states.mine["skipped"]

    def _skipping(self, trial: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Let ``run`` use a closure that ends where a batch is skipped."""

        def skipping(*args: Any, **kwargs: Any) -> Any:
            before = trial.closure
            trial.closure = self._ending(before)
            try:
                return run(*args, **kwargs)
            finally:
                trial.closure = before
                if self._bad is not None:
                    self._bad.close()
                    self._bad = None

        return skipping

    def _ending(self, closure: Callable[[State], None]) -> Callable[[State], None]:
        @functools.wraps(closure)
        def ending(state: State) -> None:
            try:
                closure(state)
            except _Skipped:
                state[torchbearer.OPTIMIZER].zero_grad()  # of losses before this one, in a closure that has several
                self._skipped += 1
                self._leave_out(state)

        return ending

    def _leave_out(self, state: State) -> None:
        """Let the metrics, which the Trial processes next, keep their values."""
        metrics = state[torchbearer.METRIC_LIST]
        before = vars(metrics).get("process")

        def keep(_: State) -> dict[str, Any]:
            if before is None:
                del metrics.process
            else:
                metrics.process = before
            if self._skipped == state[torchbearer.STEPS]:
                raise SkippedBatchError(_all_skipped(state))
            return dict(state[torchbearer.METRICS])

        metrics.process = keep


class _Skipped(Exception):
    """Ends a closure."""


def _all_skipped(state: State) -> str:
    return (
        f"all {state[torchbearer.STEPS]} batches of epoch {state[torchbearer.EPOCH]} were skipped: their losses "
        "were not finite. Perhaps the parameters are not finite: begin with a checkpoint from before, a smaller "
        "learning rate, or gradient clipping."
    )
