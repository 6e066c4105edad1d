"""Normalize by the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torchbearer

from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.torchbearer.base import SHARE, WEIGHS_LOSS, DistributedCallback, State, wrap_methods
from ddp_callbacks.torchbearer.predictions import aggregator_of


class SynchronizeBatchNorm(DistributedCallback):
    """Make the model's BatchNorm layers use global batch statistics while the Trial runs.

    See :class:`ddp_callbacks.BatchNormSynchronizer`. The layers are restored when ``run``, ``evaluate`` or ``predict``
    returns or raises. This callback sets ``state[WEIGHS_LOSS]``, so that :class:`AllReduceGradients` weights the loss
    before backward instead of the gradients after it; gradients through these layers are then exact. A custom closure
    (``with_closure``) must therefore call ``on_criterion`` before the backward of each loss.

    With a ``comm_hook``, all ranks must use the same parameters in each backward: the engine waits for one bucket's
    hook before it calls the next, and a bucket that some rank does not fill is sent at the end of that rank's backward,
    after these layers.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: At the start: a layer overrides ``forward`` or has no parameters yet.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._synchronizer: BatchNormSynchronizer | None = None

    def on_init(self, state: State) -> None:
        super().on_init(state)
        if self.world_size > 1:
            wrap_methods(state[torchbearer.SELF], ("run", "evaluate", "predict"), self._giving_back)

    def on_start(self, state: State) -> None:
        if self.world_size == 1 or aggregator_of(state) is not None:  # in predict() a rank has whole batches
            return
        state[WEIGHS_LOSS] = True
        self._synchronizer = BatchNormSynchronizer(
            state[torchbearer.MODEL],
            counts=lambda: SHARE not in state or state[SHARE].local > 0,
            process_group=self.process_group,
        )

    def _giving_back(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def giving_back(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                if self._synchronizer is not None:
                    self._synchronizer.close()
                    self._synchronizer = None

        return giving_back
