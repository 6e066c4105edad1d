"""Train with local steps, and average the parameters every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchbearer

from ddp_callbacks.comm.buckets import check_bucket_cap_mb
from ddp_callbacks.comm.compression import Compress, check_compress
from ddp_callbacks.local_sgd import DiLoCo, LocalSGD, ParameterAverager, set_gradients_aside
from ddp_callbacks.torchbearer.base import (
    DistributedCallback,
    LocalStates,
    LossWeight,
    State,
    Weight,
    in_training_pass,
    share_of,
)


class AverageParameters(DistributedCallback):
    """Let each rank take local steps, and average the parameters every few steps; replaces AllReduceGradients.

    See :class:`ddp_callbacks.ParameterAverager`. The last window of a training pass may be shorter: it closes at the
    end of the pass, so evaluations and checkpoints have the averaged model, equal on all ranks. Callbacks after this
    one see it in ``on_end_training``. During a pass, the ranks' models differ. DiLoCo's outer momentum is in the
    optimizer's state, so a Trial's ``state_dict`` contains it.

    With a mean loss, each rank gets the gradient of its part of the batch. A sum is multiplied by the number of ranks,
    so that local steps are as long as those of a single process. If a rank has no sample of a batch, that batch's
    backward leaves its gradients unchanged, usually ``None``, and optimizers skip the step.

    Args:
        sync: :class:`ddp_callbacks.LocalSGD` or :class:`ddp_callbacks.DiLoCo`.
        weight, reduction: See :class:`ddp_callbacks.torchbearer.base.LossWeight`.
        bucket_cap_mb, compress: See :class:`ddp_callbacks.ParameterAverager`.
        process_group: ``None`` is the default group.
    """

    def __init__(
        self,
        sync: LocalSGD | DiLoCo,
        weight: Weight | None = None,
        reduction: str | None = None,
        bucket_cap_mb: float = 25.0,
        compress: Compress = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        check_bucket_cap_mb(bucket_cap_mb)
        check_compress(compress, None)
        self._sync = sync
        self._loss_weight = LossWeight(weight, reduction)
        self._bucket_cap_mb, self._compress = bucket_cap_mb, compress
        self.averager: ParameterAverager | None = None
        self._weight = 1.0  # of the current step
        self._put_back: Callable[[], None] | None = None

    def on_start(self, state: State) -> None:
        self.averager = None  # an earlier run may have raised before its end

    def on_start_training(self, state: State) -> None:
        if self.averager is not None:
            self.averager.outer_step()  # the window is empty; callbacks may have replaced the parameters
            return
        self.averager = ParameterAverager(
            state[torchbearer.MODEL],
            self._sync,
            state[torchbearer.OPTIMIZER],
            bucket_cap_mb=self._bucket_cap_mb,
            compress=self._compress,
            process_group=self.process_group,
        )

    def on_sample(self, state: State) -> None:
        self._weight = float(share_of(state).local)

    def on_criterion(self, state: State) -> None:
        if self.world_size == 1:
            return
        self._weight, _ = self._loss_weight.of(state)
        if not self._weight:
            self._put_back = set_gradients_aside(state[torchbearer.MODEL])
        if self._loss_weight.reduction(state) == "sum":
            self._weight = 1.0
            _multiply_gradient(state[torchbearer.LOSS], self.world_size)

    def on_backward(self, state: State) -> None:
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def on_step_training(self, state: State) -> None:
        in_training_pass(self.averager).step(self._weight)

    def on_end_training(self, state: State) -> None:
        in_training_pass(self.averager).outer_step()

    def on_end(self, state: State) -> None:
        self.averager = None

    def local_state(self, state: State) -> dict[str, Any]:
        """Also between two windows: each rank's optimizer is its own."""
        if self.averager is not None:
            return {"window": self.averager.state_dict(), "optimizer": None}
        return {"window": None, "optimizer": state[torchbearer.OPTIMIZER].state_dict()}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """On another number of ranks, the window is closed: the Trial's own state is that of a closed one."""
        window = states.mine["window"]
        if not states.is_same_world:
            if self.averager is not None:
                self.averager.outer_step()  # of no step: the next window begins here
        elif self.averager is not None and window is not None:
            self.averager.load_state_dict(window)
        elif optimizer := states.mine["optimizer"] or window.get("optimizer"):
            state[torchbearer.OPTIMIZER].load_state_dict(optimizer)


def _multiply_gradient(loss: torch.Tensor, factor: float) -> None:
    """Scale the gradient in backward; the value of the loss stays unchanged, for metrics."""
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * factor)
