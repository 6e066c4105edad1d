"""Normalize by the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torchbearer

from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.torchbearer.base import SHARE, WEIGHS_LOSS, DistributedCallback, State, wrap_methods


class SynchronizeBatchNorm(DistributedCallback):
    """Let the model's BatchNorm layers use the statistics of the whole batch while the Trial runs.

    See :class:`ddp_callbacks.BatchNormSynchronizer`. The layers are the user's own again when ``run``,
    ``evaluate`` or ``predict`` returns or raises. :class:`AllReduceGradients` sees ``state[WEIGHS_LOSS]`` and weighs
    the loss before backward, in place of the gradients after it, which makes the gradients exact through these layers.
    A custom closure (``with_closure``) has to call ``on_criterion`` before the backward of each loss for that.

    With a ``comm_hook`` all ranks must use the same parameters in each backward: the engine waits for one bucket's hook
    before it calls the next, and a bucket that some rank does not fill comes at the end of its backward, after these
    layers.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: At the start, where a layer has a forward of its own or no parameters yet.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._synchronizer: BatchNormSynchronizer | None = None

    def on_init(self, state: State) -> None:
        super().on_init(state)
        if self.world_size > 1:
            wrap_methods(state[torchbearer.SELF], ("run", "evaluate", "predict"), self._giving_back)

    def on_start(self, state: State) -> None:
        if self.world_size == 1:
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
