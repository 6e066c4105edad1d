"""Synchronize the gradients in each backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchbearer

from ddp_callbacks.comm.buckets import check_bucket_cap_mb
from ddp_callbacks.comm.collectives import all_reduce
from ddp_callbacks.comm.compression import Compress, check_compress
from ddp_callbacks.comm.hooks import CommHook, check_comm_hook
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.shares import WholeBatch
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.loss_watch import LossWatch
from ddp_callbacks.torchbearer._torchbearer import arguments_of, forward, has_own_closure
from ddp_callbacks.torchbearer.base import (
    SHARE,
    WEIGHS_LOSS,
    DistributedCallback,
    LocalStates,
    State,
    in_training_pass,
    share_of,
)
from ddp_callbacks.torchbearer.weights import LossWeight, Weight
from ddp_callbacks.verification import Verify, check_first_batch, check_verify


class AllReduceGradients(DistributedCallback):
    """Set each ``parameter.grad`` to the gradient of the global batch, before ``on_backward`` and the optimizer.

    See :class:`ddp_callbacks.GradientSynchronizer` for what happens in a backward.

    Args:
        weight, reduction: See :class:`ddp_callbacks.torchbearer.weights.LossWeight`.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`.
        verify: Compare the gradient of each run's first batch with that of a single process. ``"first_batch"``: a
            difference is an error; it needs :class:`ShardData` in front. ``"warn"``: a difference of more than 1 % is a
            warning, and what cannot be compared is left out.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: A setting is invalid. After a step: a custom closure (``with_closure``) filled gradients
            without a backward through the parameters, so they were never synchronized.
        MismatchError: At the first batch: names the parameter whose gradient differs most, and a remedy.
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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        check_bucket_cap_mb(bucket_cap_mb)
        check_compress(compress, comm_hook)
        check_verify(verify, "every_step")
        if comm_hook is not None:
            check_comm_hook(comm_hook)
        self._loss_weight = LossWeight(weight, reduction)
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "comm_hook": comm_hook,
            "comm_state": comm_state,
            "compress": compress,
        }
        self._synchronizer: GradientSynchronizer | None = None
        self._rounds_before = 0
        self._losses = LossWatch()
        self._verify = verify
        self._verifies_next = False

    def on_start(self, state: State) -> None:
        self._losses = LossWatch()
        self._verifies_next = self._verify is not None and self.world_size > 1
        self.on_end(state)  # an earlier run may have raised before its end

    def on_start_training(self, state: State) -> None:
        if self._synchronizer is None:
            self._synchronizer = GradientSynchronizer(
                state[torchbearer.MODEL], process_group=self.process_group, **self._options
            )

    def on_sample(self, state: State) -> None:
        synchronizer, share = in_training_pass(self._synchronizer), share_of(state)
        if self._verifies_next:
            self._verifies_next = False
            if self._verify is not None:
                _verify_first_batch(self._verify, state, self._loss_weight, self.process_group)
        self._rounds_before = synchronizer.rounds
        synchronizer.weigh(share.local, share.total)  # for a closure that calls no on_criterion

    def on_criterion(self, state: State) -> None:
        synchronizer = in_training_pass(self._synchronizer)
        if self.world_size == 1:
            return
        weight, total = self._loss_weight.of(state)
        where = f"epoch {state[torchbearer.EPOCH]}, batch {state[torchbearer.BATCH]}"
        self._losses.look(state[torchbearer.LOSS], weight, where)
        if WEIGHS_LOSS in state:
            self._weigh_loss(synchronizer, state, weight, total)
        else:
            synchronizer.weigh(weight, total)

    def on_backward(self, state: State) -> None:
        synchronizer = in_training_pass(self._synchronizer)
        if self.world_size > 1 and synchronizer.rounds == self._rounds_before:
            synchronizer.synchronize()  # this rank's loss reached no parameter

    def on_step_training(self, state: State) -> None:
        synchronizer = in_training_pass(self._synchronizer)
        if self.world_size == 1 or synchronizer.rounds > self._rounds_before:
            return
        for name, parameter in state[torchbearer.MODEL].named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise ConfigurationError(
                    f"the gradients of step {state[torchbearer.BATCH]} were not synchronized: {name} has a gradient, "
                    "but no backward accumulated into it. A custom closure (with_closure) must fill gradients by "
                    "loss.backward(), not by torch.autograd.grad or by assigning parameter.grad."
                )

    def on_end(self, state: State) -> None:
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None

    def local_state(self, state: State) -> dict[str, Any]:
        engine = None if self._synchronizer is None else self._synchronizer.state_dict()
        return {"engine": engine, "verifies_next": self._verifies_next}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        self._verifies_next = states.mine["verifies_next"]
        engines = [of_rank["engine"] for of_rank in states.of_ranks]
        if None not in engines:  # else no training had begun
            self.on_start_training(state)
            in_training_pass(self._synchronizer).load_state_dict(engines)

    def _weigh_loss(self, synchronizer: GradientSynchronizer, state: State, weight: float, total: float | None) -> None:
        """Weight the backward of this loss at its root; the ranks' gradients are then averaged. A collective."""
        if total is None:
            own = torch.tensor([weight], dtype=torch.float64)
            total = float(all_reduce(own, "the weight of the loss", self.process_group))
        synchronizer.weigh_loss(state[torchbearer.LOSS], weight, total)


def _verify_first_batch(verify: Verify, state: State, loss_weight: LossWeight, group: dist.ProcessGroup | None) -> None:
    """Compare the ranks' gradients of the first batch with that of the global batch. A collective.

    Each rank also computes model and criterion on the global batch, once or twice, without the Trial's other callbacks;
    see :func:`ddp_callbacks.verify_gradient`.
    """
    scratch = torchbearer.State()
    scratch.update(state)

    def load() -> tuple[Any, Any, Any]:
        first = _first_batch(state)
        scratch[SHARE] = first.share
        return first.whole, first.part, lambda: loss_weight.of(scratch)

    def loss_of(batch: Any) -> torch.Tensor:
        return _loss_of(scratch, batch)

    check_first_batch(verify, state[torchbearer.MODEL], loss_of, load, group)


def _first_batch(state: State) -> WholeBatch:
    iterator = state[torchbearer.ITERATOR]
    if has_own_closure(state[torchbearer.SELF]):
        raise ConfigurationError(
            'verify="first_batch" needs the closure of Torchbearer, to compute the loss of the whole batch. Verify the '
            "loss in a Trial without with_closure, or leave out verify."
        )
    if not isinstance(iterator, ShardedIterator):
        raise ConfigurationError(
            'verify="first_batch" needs a loader that is divided among the processes, to get its whole '
            f"batch; got {type(iterator).__name__}. Give the Trial a DataLoader without a DistributedSampler."
        )
    return iterator.first_batch()


def _loss_of(state: State, batch: Any) -> torch.Tensor:
    """Compute the loss as Torchbearer's closure does."""
    state[torchbearer.ITERATOR] = iter([batch])
    state[torchbearer.SAMPLER](state)
    forward(state)
    criterion = state[torchbearer.CRITERION]
    try:
        loss = criterion(state)
    except TypeError:
        loss = criterion(*arguments_of(state[torchbearer.Y_PRED]), *arguments_of(state[torchbearer.Y_TRUE]))
    state[torchbearer.LOSS] = loss
    return loss  # type: ignore[no-any-return]
