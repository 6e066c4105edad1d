"""Warn of the first loss that is not finite: its gradients spoil those of all ranks."""

from __future__ import annotations

import cmath

import torch
import torch.distributed as dist

from ddp_callbacks.errors import NonFiniteLossWarning, warn
from ddp_callbacks.process_group.presence import describe, presence


class LossWatch:
    """Warns once per run, on the first rank whose loss is NaN or infinite. Needs at least two ranks.

    It looks at losses on a CPU only: reading one from a GPU would synchronize in each step.
    """

    def __init__(self) -> None:
        self._is_over = False

    def look(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Check the loss of a step. Local, except for one request to the store if the loss is not finite.

        Args:
            loss: This rank's loss, of one number; any other shape is ignored.
            weight: The weight of this loss; a loss with weight 0 is ignored.
            where: The step, for the message.

        Raises:
            NonFiniteLossWarning: If the program turns this warning into an error.
        """
        is_read = not self._is_over and weight and loss.device.type == "cpu" and loss.numel() == 1
        if not is_read or cmath.isfinite(loss.item()):
            return
        self._is_over = True
        if presence().store.add(f"{presence().run}/no number", 1) == 1:
            warn(
                f"{describe(dist.get_rank())}: the loss of {where} is {loss.item()}, the first that is not finite. "
                "Its gradients spoil those of all ranks. Check this rank's part of that batch. (To stop the run there: "
                'warnings.simplefilter("error", ddp_callbacks.errors.NonFiniteLossWarning).)',
                NonFiniteLossWarning,
            )
