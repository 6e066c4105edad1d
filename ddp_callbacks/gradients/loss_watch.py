"""Warn of the first loss that is not finite, as its gradients spoil those of all ranks, or that counts nothing."""

from __future__ import annotations

import cmath

import torch
import torch.distributed as dist

from ddp_callbacks.errors import NonFiniteLossWarning, warn
from ddp_callbacks.process_group.presence import describe, presence


class LossWatch:
    """Warns once per run and reason, on the first rank with such a loss. Needs at least two ranks.

    It looks at losses on a CPU only: reading one from a GPU would synchronize in each step.
    """

    def __init__(self) -> None:
        self._told = set[str]()

    def look(self, loss: torch.Tensor, weight: float, samples: int, where: str) -> None:
        """Check the loss of a step. Local, except for one request to the store if there is something to tell.

        Args:
            loss: This rank's loss, of one number; any other shape is ignored.
            weight: The weight of this loss. With weight 0, it is told if it is finite and not 0.
            samples: The number of samples that it is of.
            where: The step, for the message.

        Raises:
            NonFiniteLossWarning: If the program turns this warning into an error.
        """
        if not samples or loss.device.type != "cpu" or loss.numel() != 1:
            return
        value = loss.item()
        if weight and not cmath.isfinite(value) and self._is_first("no number"):
            warn(
                f"{describe(dist.get_rank())}: the loss of {where} is {value}, the first that is not finite. "
                "Its gradients spoil those of all ranks. Check this rank's part of that batch. (To stop the run there: "
                'warnings.simplefilter("error", ddp_callbacks.errors.NonFiniteLossWarning).)',
                NonFiniteLossWarning,
            )
        if not weight and value and cmath.isfinite(value) and self._is_first("no weight"):
            warn(
                f"{describe(dist.get_rank())}: weight= counts nothing in this rank's part of {where}, so its loss of "
                f"{value:.4g} is lost, unless that is a term which all parts have. If it is of what weight= does not "
                "count, such as negative examples, sum the loss and divide it by the number in the whole batch (an "
                'all_reduce of those in the parts), with reduction="sum".'
            )

    def _is_first(self, what: str) -> bool:
        """Whether this rank is the first to tell this in the run."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new and presence().store.add(f"{presence().run}/{what}", 1) == 1
