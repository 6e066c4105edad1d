"""Exchange the statistics of a global batch, and the sums of backward, for batch normalization.

A variance computed from sums of squares loses digits if the mean is large. So the ranks gather their sizes, means and
variances, and :func:`total_statistics` joins them in float64; the cost grows with the number of ranks, as in torch's
``SyncBatchNorm``. That class waits for a GPU to leave out ranks without samples; here they send zeros and have
weight 0. The host reads the sizes only if its own part has fewer than two values per channel: all ranks together may
have one, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_callbacks.comm.topology import choose_all_reduce


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, converted to float32 if it has half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of all ranks, as a layer sees it.

    Attributes:
        statistics: Exchanges the sums of backward.
        name: The layer's name.
        counts: Whether this rank's part counts.
        is_empty: Whether no rank has a sample.
        size: Number of values per channel on all ranks: float64, shape ``[]``.
        distinct: The same, but copies count once: ranks whose statistics are equal to the bit, for example of a fixed
            input that a hook passes through the model.
        mean, var: Mean and biased variance: float64, shape ``[channels]``.
    """

    statistics: BatchStatistics
    name: str
    counts: bool
    is_empty: bool
    size: torch.Tensor
    distinct: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor


class BatchStatistics:
    """Exchanges the statistics of a model's layers, one layer at a time, in float64. The constructor is a collective.

    Args:
        group: The ranks' process group.
        device: The device of the layers.
        counts: Returns whether this rank's batch counts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, counts: Callable[[], bool]) -> None:
        self._rank, self._world_size, self._counts = group.rank(), group.size(), counts
        self._all_reduce = choose_all_reduce(group, [device])
        self._mixed = ""  # the last layer that has mixed gradients
        self._messages: dict[tuple[int, torch.device], torch.Tensor] = {}

    @torch.no_grad()
    def join(self, input: torch.Tensor, name: str) -> GlobalBatch:
        """Exchange the statistics of the input of the layer ``name``. A collective.

        Raises:
            ValueError: All ranks together have a single value per channel.
        """
        size = input.numel() // input.shape[1] if input.numel() and self._counts() else 0
        rows = self._gather(input, size, name)
        sizes = rows[:, -1]
        total = int(sizes.sum()) if size < 2 else size  # at least; the sum would wait for the GPU
        if total == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got 1 on all ranks together in {name}"
            )
        if total == 0:  # an empty batch changes nothing, as in torch
            mean, var = rows.new_zeros(input.shape[1]), rows.new_ones(input.shape[1])
            return GlobalBatch(self, name, False, True, sizes.sum(), sizes.sum(), mean, var)
        whole, mean, var = total_statistics(rows)
        distinct = torch.where((rows == rows[0]).all() & (sizes[0] > 1), sizes[0], whole)
        return GlobalBatch(self, name, size > 0, False, whole, distinct, mean, var)

    def sum_gradients(self, sum_dy: torch.Tensor, sum_dy_xhat: torch.Tensor, name: str) -> torch.Tensor:
        """Return both sums over all ranks: float64, ``[2, channels]``, valid until the next exchange. A collective."""
        message = self._message(2 * len(sum_dy), sum_dy.device)
        sums = message.view(2, -1)
        sums[0].copy_(sum_dy)
        sums[1].copy_(sum_dy_xhat)
        self._mixed = name
        self._all_reduce.launch(message, f"the gradients of {name}").wait()  # under NCCL the stream waits, not the host
        return sums

    def take_mixed(self) -> str:
        """Return the name of a layer that has mixed gradients since the last call; empty: none has. Local."""
        mixed, self._mixed = self._mixed, ""
        return mixed

    def _gather(self, input: torch.Tensor, size: int, name: str) -> torch.Tensor:
        """Return each rank's mean, variance and size: float64, ``[world_size, 2 * channels + 1]``; zeros for size 0.

        This is an all-reduce in which each rank fills its own row: some backends have no all-gather for GPUs.
        """
        channels = input.shape[1]
        message = self._message(self._world_size * (2 * channels + 1), input.device).zero_()
        rows = message.view(self._world_size, -1)
        if size:
            mean, var = torch.batch_norm_update_stats(at_least_float32(input), None, None, 0.0)
            own = rows[self._rank]
            own[:channels].copy_(mean)
            own[channels:-1].copy_(var)
            own[-1:].fill_(size)
        self._all_reduce.launch(message, f"the statistics of {name}").wait()
        return rows

    @torch.inference_mode(False)
    def _message(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return the flat memory of an exchange. The sums in it are valid until the next exchange of this size."""
        if (numel, device) not in self._messages:
            self._messages[numel, device] = self._all_reduce.allocate(numel, torch.float64, device)
        return self._messages[numel, device]


def total_statistics(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the size, mean and biased variance of all ranks together. Local.

    Args:
        rows: One row per rank: its means by channel, its biased variances by channel, and its number of values per
            channel; shape ``[world_size, 2 * channels + 1]``. At least one rank has values.
    """
    means, variances = rows[:, :-1].unflatten(1, (2, -1)).unbind(1)
    sizes = rows[:, -1:]
    size = sizes.sum()
    shares = sizes / size
    mean = (shares * means).sum(0)
    distances = means - mean
    var = (shares * torch.addcmul(variances, distances, distances)).sum(0)
    return size, mean, var
