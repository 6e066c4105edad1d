"""Which rank's loss was the first that is no number: a moment later all ranks' are."""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed as dist

from ddp_callbacks.errors import NonFiniteLossWarning
from ddp_callbacks.presence import describe, presence, store


class LossWatch:
    """Warns once in a run, on the first rank whose loss is NaN or infinite; in a world of more than one.

    On a CPU alone: to look at a number on a GPU, the host would have to wait for it in each step.
    """

    def __init__(self) -> None:
        self._is_over = False

    def look(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Look at the loss of a step. Asks the store if it is no number, once; local else.

        Args:
            loss: Of this rank; one number.
            weight: What it counts; nothing is said of one that does not.
            where: Which step it is, for the message.

        Raises:
            NonFiniteLossWarning: If the program has made it an error.
        """
        if self._is_over or not weight or loss.device.type != "cpu" or loss.numel() != 1:
            return
        value = complex(loss.detach().item())
        if math.isfinite(value.real) and math.isfinite(value.imag):
            return
        self._is_over = True
        if store().add(f"{presence().run}/no number", 1) == 1:
            warnings.warn(
                f"{describe(dist.get_rank())}: the loss of {where} is {loss.item()}, the first that is no number. Its "
                "gradients make those of all ranks so. Look at this rank's part of that batch. (To end the run there: "
                'warnings.simplefilter("error", ddp_callbacks.errors.NonFiniteLossWarning).)',
                NonFiniteLossWarning,
                stacklevel=2,
            )
