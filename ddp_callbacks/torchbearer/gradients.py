"""Synchronize the gradients in each backward, or the parameters every few local steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torchbearer
from torch.autograd.graph import Node

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce
from ddp_callbacks.data.bad_batches import BadBatches, check_optimizer, check_skip_batch, fault_of
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.own_code import may_read
from ddp_callbacks.errors import ConfigurationError, SkippedBatchError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.gradients.comm_hooks import CommHook
from ddp_callbacks.gradients.compression import Compress
from ddp_callbacks.gradients.first_batch import Computation, FirstBatch
from ddp_callbacks.gradients.loss_watch import LossWatch
from ddp_callbacks.gradients.verification import Comparisons, Verify, check_verify
from ddp_callbacks.gradients.weighing import weigh_terms_of_parameters
from ddp_callbacks.local_sgd import DiLoCo, LocalSGD, ParameterAverager, check_sync, set_gradients_aside
from ddp_callbacks.replacement import Replaced, Replacements
from ddp_callbacks.torchbearer._torchbearer import has_own_closure, loss_of
from ddp_callbacks.torchbearer.base import Call, DistributedCallback, handles
from ddp_callbacks.torchbearer.loss_weight import LossWeight, Weight, fraction_of
from ddp_callbacks.torchbearer.state import (
    RUN_RANDOM_STATE,
    SHARE,
    STEP_TIMES,
    WEIGHS_LOSS,
    Event,
    State,
    held_by,
    in_training_pass,
    share_of,
)

SkipBatch = Literal["non_finite"]
_STEP, _WHETHER = "on_step_training", "whether callbacks read the loss"


def check_skip(skip_batch: str | None, sync: object) -> None:
    """Raise :class:`ConfigurationError` unless ``skip_batch`` is ``None``, or ``"non_finite"`` with exact gradients."""
    if skip_batch not in (None, "non_finite"):  # a criterion always returns a loss
        raise ConfigurationError(f'skip_batch must be None or "non_finite" in a Trial, got {skip_batch!r}.')
    check_skip_batch(skip_batch, sync)


class WeighsLoss(DistributedCallback):
    """Base class of callbacks that weigh the loss, after ``on_criterion`` of all callbacks, which may add to it."""

    calls = ("run",)

    def on_init(self, state: State) -> None:
        super().on_init(state)
        Replaced(state[torchbearer.CALLBACK_LIST], "on_criterion", self._weighing)

    def _weighing(self, event: Event, state: State) -> None:
        criterion = getattr(state.get(torchbearer.LOSS), "grad_fn", None)
        event(state)
        self.weigh(state, criterion)

    def weigh(self, state: State, criterion: Node | None) -> None:
        """Weigh the loss for the backward that follows.

        Args:
            state: The Trial's state.
            criterion: ``grad_fn`` of the criterion's value.
        """


class AllReduceGradients(WeighsLoss):
    """Set each ``parameter.grad`` to the gradient of the global batch, before ``on_backward`` and the optimizer.

    See :class:`ddp_callbacks.GradientSynchronizer` for what happens in a backward. If a callback of yours reads
    ``state[torchbearer.LOSS]`` in ``on_step_training``, it gets the loss of the global batch, at the cost of a small
    message in each step.

    Args:
        weight, reduction: See :class:`ddp_callbacks.torchbearer.loss_weight.LossWeight`.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`.
        verify: Compare the gradient of a Trial's first batch with that of a single process, on copies of its model and
            criterion. ``"first_batch"``: a difference is an error; it needs :class:`ShardData` in front. ``"warn"``: a
            difference of more than 1 % is a warning, and what cannot be compared is left out. Batches 1, 2, 4,
            8 and so on are compared, too, for 0.5 s in all, then for 0.5 % of the time.
        skip_batch: ``"non_finite"``: skip a training batch on all ranks, a single one included, if its loss is NaN or
            infinite on one; ranks without samples, or with weight 0, have no say. The closure ends after
            ``on_criterion``: there is no backward and no ``on_backward``, gradients are ``None``, so the optimizer
            changes nothing, and metrics don't count the batch. All else continues, such as ``on_step_training``. Rank 0
            reports the batch, and the ranks and hosts with such a loss. It costs one small message in each step, and
            reading the loss from its GPU.

    Raises:
        ConfigurationError: A setting is invalid. At the start: ``skip_batch`` with LBFGS, which computes the loss
            several times per step. After a step: a custom closure (``with_closure``) filled gradients without a
            backward through the parameters, so they were never synchronized.
        MismatchError: At the first batch: names the parameter whose gradient differs most, and a remedy.
        SkippedBatchError: On every rank alike: all batches of an epoch were skipped.
    """

    def __init__(
        self,
        weight: Weight | None = None,
        reduction: str | None = None,
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: Any = None,
        compress: Compress = None,
        verify: Verify | None = None,
        skip_batch: SkipBatch | None = None,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = vars(EngineOptions(bucket_cap_mb, comm_hook, comm_state, compress))
        check_verify(verify, "every_step")
        check_skip(skip_batch, "every_step")
        self._loss_weight = LossWeight(weight, reduction)
        self._synchronizer: GradientSynchronizer | None = None
        self._rounds_before = 0
        self._verify = verify
        self._skip_batch = skip_batch
        self._bad: BadBatches | None = None
        self._skipped = 0  # skipped batches of this pass
        self._replacements = Replacements()  # during a run
        self._joins_loss = False

    def calling(self, call: Call) -> AbstractContextManager[object]:
        """Use a closure that ends when a batch is skipped; at the end, also after an exception, remove all hooks."""
        self._replacements.callback(self._close)
        if self.world_size > 1:
            self._replacements.replace(call.trial, "closure", self._joining)
        if self._skip_batch is not None:
            self._bad = BadBatches()
            self._replacements.callback(self._bad.close)
            self._replacements.replace(call.trial, "closure", self._ending)
        return self._replacements

    def on_init(self, state: State) -> None:
        super().on_init(state)
        Replaced(state[torchbearer.CALLBACK_LIST], _STEP, self._after_step)

    def _after_step(self, event: Event, state: State) -> None:
        """Give a user's callbacks that read the loss that of the global batch. A collective then."""
        if self._joins_loss and torchbearer.LOSS in state:
            state[torchbearer.LOSS] = self._loss_weight.joined(state)
        event(state)

    def on_start(self, state: State) -> None:
        callbacks = [each for each in state[torchbearer.CALLBACK_LIST] if handles(each, (_STEP,))]
        reads = any(may_read(each, _STEP, "LOSS") for each in callbacks)
        self._joins_loss = self.world_size > 1 and all(all_gather_object(reads, _WHETHER))
        self._losses, self._comparisons = LossWatch(), Comparisons(self._verify)
        if self._skip_batch is not None:
            check_optimizer(self._skip_batch, state[torchbearer.OPTIMIZER])

    def on_start_training(self, state: State) -> None:
        if self._synchronizer is None:
            self._synchronizer = GradientSynchronizer(held_by(state), **self._options, compare_replicas=False)
            state[STEP_TIMES] = self._synchronizer.times
        self._skipped = 0

    def on_sample(self, state: State) -> None:
        synchronizer = in_training_pass(self._synchronizer)
        steps = max(0, state[torchbearer.STEPS] or 0)  # -1: the epoch does not end
        if self._comparisons.is_due(state[torchbearer.EPOCH] * steps + state[torchbearer.BATCH]):
            self._verify_batch(state)
        self._rounds_before = synchronizer.rounds
        synchronizer.weigh(*self._loss_weight.of_samples(state))  # for a closure that calls no on_criterion

    def weigh(self, state: State, criterion: Node | None) -> None:
        """Weigh the loss, or end the closure of a batch that is skipped."""
        synchronizer = in_training_pass(self._synchronizer)
        if self.world_size == 1 and self._bad is None:
            return
        needs = {"skip_batch": self._bad is not None, "sync_batchnorm": WEIGHS_LOSS in state}
        loss = _loss_in(state, [name for name, is_set in needs.items() if is_set])
        weight, total = self._loss_weight.of(state)
        where = f"epoch {state[torchbearer.EPOCH]}, batch {state[torchbearer.BATCH]}"
        if self._bad is not None and (faults := self._bad.agree(fault_of(loss), weight)):
            self._bad.report(faults, where)
            raise _Skipped
        if loss is None:  # the closure has losses of its own
            synchronizer.weigh(weight, total)
            return
        if self.world_size > 1:
            self._losses.look(loss, weight, share_of(state).local, where)
        if self._loss_weight.reduction(state) != "sum":
            self._comparisons.look(share_of(state))
        else:
            weigh_terms_of_parameters(loss, criterion, fraction_of(share_of(state), self.world_size))
        if WEIGHS_LOSS not in state:
            synchronizer.weigh(weight, total)
            return
        if total is None:
            own = torch.tensor([weight], dtype=torch.float64)
            total = float(all_reduce(own, "the weight of the loss"))
        synchronizer.weigh_loss(loss, weight, total)

    def on_backward(self, state: State) -> None:
        synchronizer = in_training_pass(self._synchronizer)
        if synchronizer.rounds == self._rounds_before:
            synchronizer.synchronize()  # this rank's loss reached no parameter

    def on_step_training(self, state: State) -> None:
        if self._skipped and self._skipped == state[torchbearer.STEPS]:
            raise SkippedBatchError(
                f"all {self._skipped} batches of epoch {state[torchbearer.EPOCH]} were skipped: their losses were not "
                "finite. Perhaps the parameters are not finite: begin with a checkpoint from before, a smaller "
                "learning rate, or gradient clipping."
            )
        synchronizer = in_training_pass(self._synchronizer)
        if self.world_size == 1 or synchronizer.rounds > self._rounds_before:
            return
        for name, parameter in held_by(state).named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise ConfigurationError(
                    f"the gradients of step {state[torchbearer.BATCH]} were not synchronized: {name} has a gradient, "
                    "but no backward accumulated into it. A custom closure (with_closure) must fill gradients by "
                    "loss.backward(), not by torch.autograd.grad or by assigning parameter.grad."
                )

    def on_end(self, state: State) -> None:
        self._close()  # after an evaluation within the run, too

    def _close(self) -> None:
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None

    def local_state(self, state: State) -> dict[str, Any]:
        engine = None if self._synchronizer is None else self._synchronizer.state_dict()
        return {"engine": engine, "skipped": self._skipped}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        engines = states.of("engine").of_ranks
        if None not in engines:  # otherwise no training had begun
            self.on_start_training(state)
            in_training_pass(self._synchronizer).load_state_dict(engines)
        self._skipped = states.mine["skipped"]

    def _ending(self, closure: Callable[[State], Any], state: State) -> None:
        """Call the closure, which ends when a batch is skipped."""
        try:
            closure(state)
        except _Skipped:
            state[torchbearer.OPTIMIZER].zero_grad()  # drop gradients of earlier losses, if the closure has several
            self._skipped += 1
            # The metrics keep their values when the Trial processes them next.
            metrics = state[torchbearer.METRIC_LIST]
            self._replacements.replace_once(metrics, "process", lambda _, of: dict(of[torchbearer.METRICS]))

    def _joining(self, closure: Callable[[State], Any], state: State) -> Any:
        """Let LBFGS, which decides by the loss that a closure returns, have the global batch's. A collective then."""
        loss = closure(state)
        if loss is None or not isinstance(state[torchbearer.OPTIMIZER], torch.optim.LBFGS):
            return loss
        return self._loss_weight.joined({**state, torchbearer.LOSS: torch.as_tensor(loss)})

    def _verify_batch(self, state: State) -> None:
        """Compare the ranks' gradients of a batch with that of the global batch. A collective.

        Each rank computes copies of model and criterion, without the Trial's other callbacks, on its part and on the
        global batch; see :func:`ddp_callbacks.verify_gradient`.
        """
        scratch = torchbearer.State()
        scratch.update(state)

        def load() -> FirstBatch:
            iterator, has_closure = state[torchbearer.ITERATOR], has_own_closure(state[torchbearer.SELF])
            if has_closure or not isinstance(iterator, ShardedIterator):
                raise ConfigurationError(
                    'verify="first_batch" computes the loss of the whole batch: it needs the closure of Torchbearer, '
                    "and a loader that is divided among the processes, got "
                    f"{'a closure of your own' if has_closure else type(iterator).__name__}. Verify the loss in a "
                    "Trial without with_closure and DistributedSampler, or leave out verify."
                )
            callbacks = state[torchbearer.CALLBACK_LIST]
            if self._verify == "warn" and any(handles(each, ("on_sample",)) for each in callbacks):
                raise ConfigurationError("a callback may change the samples (on_sample), and a comparison calls none.")
            first = iterator.whole_batch()
            scratch[SHARE] = first.share
            return FirstBatch(first.whole, first.part, lambda: self._loss_weight.of(scratch), first.share.rows)

        def compute(copies: Sequence[Any], batch: Any) -> torch.Tensor:
            scratch[torchbearer.MODEL], scratch[torchbearer.CRITERION] = copies
            return loss_of(scratch, batch)

        trial = state[torchbearer.SELF]
        parts = [state[torchbearer.MODEL], state[torchbearer.CRITERION]]
        draws = state[RUN_RANDOM_STATE].draws if RUN_RANDOM_STATE in state else None
        computation = Computation(parts, compute, {id(trial): trial}, draws=draws)
        with nullcontext() if draws is None else draws.aside():
            self._comparisons.compare(computation, load)


class AverageParameters(WeighsLoss):
    """Let each rank take local steps, and average the parameters every few steps; replaces AllReduceGradients.

    See :class:`ddp_callbacks.ParameterAverager`. The last window closes at the end of the training pass, so callbacks
    after this one see the averaged model in ``on_end_training``, and so do evaluations and checkpoints. DiLoCo's outer
    momentum is in the optimizer's state, so a Trial's ``state_dict`` contains it.

    Each rank gets the gradient of its part of the batch, of a loss that is a mean. If a rank has no sample of a batch,
    that batch's backward leaves its gradients unchanged, usually ``None``, and optimizers skip the step.
    """

    def __init__(self, sync: LocalSGD | DiLoCo, loss_weight: LossWeight, options: EngineOptions) -> None:
        super().__init__()
        size, compress = options.bucket_cap_mb, options.compress
        self._make = functools.partial(ParameterAverager, bucket_cap_mb=size, compress=compress)
        self._sync, self._loss_weight = sync, loss_weight
        self.averager: ParameterAverager | None = None
        self._weight = 1.0  # this rank's weight in the current step
        self._put_back: Callable[[], None] | None = None

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Forget a pass that has raised."""
        try:
            yield
        finally:
            self.averager = None

    def on_start_training(self, state: State) -> None:
        if self.averager is None:
            check_sync(self._sync, self._loss_weight.reduction(state))
            self.averager = self._make(held_by(state), self._sync, state[torchbearer.OPTIMIZER])
        else:
            self.averager.outer_step()  # the window is empty; callbacks may have replaced the parameters

    def on_sample(self, state: State) -> None:
        self._weight = float(share_of(state).local)
        in_training_pass(self.averager).follow()

    def weigh(self, state: State, criterion: Node | None) -> None:
        """Note the weight of the step. A rank without one keeps its gradients."""
        if self.world_size == 1:
            return
        self._weight, _ = self._loss_weight.of(state)
        if not self._weight:
            self._put_back = set_gradients_aside(held_by(state))

    def on_backward(self, state: State) -> None:
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def on_step_training(self, state: State) -> None:
        in_training_pass(self.averager).step(self._weight)

    def on_end_training(self, state: State) -> None:
        in_training_pass(self.averager).outer_step()

    def on_end(self, state: State) -> None:
        self.averager = None  # after an evaluation within the run, too

    def local_state(self, state: State) -> dict[str, Any]:
        """Return the averager's state. Without one, return the optimizer's, which is different on each rank."""
        if self.averager is not None:
            return {"window": self.averager.state_dict(), "optimizer": None}
        return {"window": None, "optimizer": state[torchbearer.OPTIMIZER].state_dict()}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """On another number of ranks, begin a new window: the Trial's own state is that of a closed one."""
        window = states.mine["window"]
        if not states.is_same_world:
            if self.averager is not None:
                self.averager.outer_step()  # of an empty window: the next one begins here
        elif self.averager is not None and window is not None:
            self.averager.load_state_dict(window)
        elif optimizer := states.mine["optimizer"] or window.get("optimizer"):
            state[torchbearer.OPTIMIZER].load_state_dict(optimizer)


def _loss_in(state: State, needed_by: Sequence[str]) -> Any:
    """Return the loss; ``None`` if a closure of the user's has set none.

    Raises:
        ConfigurationError: There is none, and options need it.
    """
    if needed_by and torchbearer.LOSS not in state:
        raise ConfigurationError(
            f"{' and '.join(needed_by)} of DDPCallback need the loss, and this closure (with_closure) has set no "
            "state[torchbearer.LOSS]. Set it to each loss before on_criterion and backward, or leave out the option."
        )
    return state.get(torchbearer.LOSS)


class _Skipped(Exception):
    """Ends the closure of a skipped batch."""
