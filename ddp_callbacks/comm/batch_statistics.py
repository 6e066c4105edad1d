"""The statistics of a global batch, for batch normalization: how the ranks exchange them, and the sums of backward.

[Note: shift]
A variance computed from sums of squares loses digits if the mean is large. So we take values relative to the mean of
the layer's last batch, which is equal on all ranks. If the new mean is more than :data:`_FAR` standard deviations away,
which all ranks see alike, they sum again, relative to the new mean. (Chan, Golub and LeVeque, "Algorithms for computing
the sample variance", 1983, call this shifted data.)

[Note: GPUs]
On a GPU the host must not wait for the device, so it cannot look at the mean to decide whether to sum again. Instead,
the ranks gather their sizes, means and variances, which needs no shift; its cost grows with the square of the number of
ranks, as in torch's ``SyncBatchNorm``. That class waits for the device to leave out ranks without samples; here they
send zeros and have weight 0. The host looks at the sizes only where its own part has fewer than two values per channel:
all ranks together may have one, or none. Nothing checks that all ranks exchange the same layer, as the host would have
to look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_callbacks._torch import outside_inference_mode
from ddp_callbacks.comm.process_group import ProcessGroupAllReduce
from ddp_callbacks.comm.protocol import allocate
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group.failures import describe_rank

_FAR = 10.0  # standard deviations; the variance is then exact to 100 ulp of float64
_HEADER = 2  # numbers before a message's sums: its tag, and the number of values per channel


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, converted if it has half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _too_few(name: str) -> ValueError:
    return ValueError(f"Expected more than 1 value per channel when training, got 1 on all ranks together in {name}")


# --- on any device: sums ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SummedBatch:
    """The global batch, as a layer sees it.

    Attributes:
        layer: Exchanges the sums of backward.
        eps: The layer's ``eps``.
        counts: Whether this rank's part counts.
        size: Number of values per channel on all ranks.
        mean, var: Shape ``[channels]``, float64; the biased variance.
    """

    layer: SummedLayer
    eps: float
    counts: bool
    size: int
    mean: torch.Tensor
    var: torch.Tensor

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a sample."""
        return self.size == 0


class SummedLayer:
    """The exchanges of one layer.

    Args:
        index: The layer's number; the same on every rank.
        name: For messages.
        channel: Shared by all layers.

    Attributes:
        shift: The mean of the last batch, around which the next one is summed; ``None`` before the first.
    """

    def __init__(self, index: int, name: str, channel: SumChannel) -> None:
        self._index, self._name, self._channel = index, name, channel
        self.shift: torch.Tensor | None = None

    def join(self, input: torch.Tensor, size: int, eps: float) -> SummedBatch:
        """Exchange the statistics of ``size`` values per channel; 0: ``input`` doesn't count. A collective."""
        shift = self.shift
        if shift is None or len(shift) != input.shape[1]:
            shift = torch.zeros(input.shape[1], dtype=torch.float64, device=input.device)
        own = shift, shift
        if size:
            mean, var = torch.batch_norm_update_stats(at_least_float32(input), None, None, 0.0)
            own = mean.double(), var.double()
        batch, farthest = self._sum_statistics(size, *own, shift, eps)
        if farthest > _FAR**2 * eps:
            batch, farthest = self._sum_statistics(size, *own, batch.mean, eps)
        self.shift = batch.mean if math.isfinite(farthest) else None
        return batch

    def sum_gradients(self, sum_dy: torch.Tensor, sum_dy_xhat: torch.Tensor) -> torch.Tensor:
        """Sum both over all ranks: float64, shape ``[2, channels]``, valid until the next exchange. A collective."""
        message = self._channel.message(len(sum_dy))
        message.first.copy_(sum_dy)
        message.second.copy_(sum_dy_xhat)
        self._channel.sum(message, 2 * self._index + 2, 0, "gradients", self._name)
        return message.sums

    def _sum_statistics(
        self, size: int, mean: torch.Tensor, var: torch.Tensor, shift: torch.Tensor, eps: float
    ) -> tuple[SummedBatch, float]:
        """The batch, and the largest ``distance² - _FAR² · var``, where distance is from its mean to ``shift``."""
        message, distance = self._channel.message(len(shift)), mean - shift
        message.first.copy_(distance).mul_(size)
        message.second.copy_(torch.addcmul(var, distance, distance)).mul_(size)
        total = self._channel.sum(message, 2 * self._index + 1, size, "statistics", self._name)
        if total == 1:
            raise _too_few(self._name)
        if total == 0:  # an empty batch changes nothing, as in torch
            return SummedBatch(self, eps, False, 0, shift, torch.ones_like(shift)), 0.0
        first, second = (message.sums / total).to(shift.device).unbind()
        square = first.square()
        var = (second - square).clamp_(min=0)
        farthest = torch.sub(square, var, alpha=_FAR**2).max()
        return SummedBatch(self, eps, size > 0, total, shift + first, var), float(farthest)


class _Message:
    """Memory of one exchange: the header, and two sums per channel."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.header, self.sums = memory, memory[:_HEADER], memory[_HEADER:].view(2, -1)
        self.first, self.second = self.sums.unbind()


class SumChannel:
    """All-reduces messages, one at a time, and checks that all ranks exchange the same layer.

    The constructor is a collective.

    Args:
        group: The ranks.
        device: Where the messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._world_size = group, device, group.size()
        self._all_reduce = choose_all_reduce(group, [device])
        self._messages: dict[int, _Message] = {}

    @outside_inference_mode
    def message(self, channels: int) -> _Message:
        """The message for this number of channels; its sums are valid until the next call."""
        if channels not in self._messages:
            memory = self._all_reduce.allocate(_HEADER + 2 * channels, torch.float64, self._device)
            self._messages[channels] = _Message(memory)
        return self._messages[channels]

    def sum(self, message: _Message, tag: int, size: int, what: str, name: str) -> int:
        """All-reduce ``message`` in place; return the sum of ``size``. A collective; the host waits."""
        message.header.copy_(torch.tensor((tag, size), dtype=torch.float64))
        doing = f"the {what} of {name}"
        self._all_reduce.launch(message.memory, doing).wait(doing)
        tags, total = message.header.tolist()
        if tags != tag * self._world_size:
            raise MismatchError(
                f"{describe_rank(self._group, self._group.rank())} exchanges the {what} of {name}, and some rank those "
                "of a different layer: every rank must run the same BatchNorm layers in the same order, forward and "
                "backward. Leave out sync_batchnorm if control flow differs between the ranks."
            )
        return int(total)


# --- on GPUs: gathered statistics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatheredBatch:
    """The global batch, as a layer on a GPU sees it.

    Attributes:
        layer: Exchanges the sums of backward.
        eps: The layer's ``eps``.
        counts: Whether this rank's part counts.
        is_empty: Whether no rank has a sample.
        size: Number of values per channel on all ranks: float64, shape ``[]``.
        mean, var: Shape ``[channels]``, float64; the biased variance.
        sizes: ``size`` by rank: int32, shape ``[world_size]``.
    """

    layer: GatheredLayer
    eps: float
    counts: bool
    is_empty: bool
    size: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor
    sizes: torch.Tensor


class GatheredLayer:
    """The exchanges of one layer on a GPU; under NCCL the host does not wait. The constructor is local.

    Args:
        group: The ranks.
        name: For messages.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank, self._world_size, self._name = group.rank(), group.size(), name
        self._all_reduce = ProcessGroupAllReduce(group, allocate)

    def join(self, input: torch.Tensor, size: int, eps: float) -> GatheredBatch:
        """Exchange the statistics of ``size`` values per channel; 0: ``input`` doesn't count. A collective."""
        rows = self._gather(input, size)
        sizes = rows[:, -1].to(torch.int32)
        total = int(sizes.sum()) if size < 2 else size  # or more
        if total == 1:
            raise _too_few(self._name)
        if total == 0:  # an empty batch changes nothing, as in torch
            mean, var = rows.new_zeros(input.shape[1]), rows.new_ones(input.shape[1])
            return GatheredBatch(self, eps, False, True, rows[:, -1].sum(), mean, var, sizes)
        return GatheredBatch(self, eps, size > 0, False, *combine(rows), sizes)

    def sum_gradients(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum flat ``sums`` over all ranks, in place, and return it. A collective."""
        self._sum(sums, f"the gradients of {self._name}")
        return sums

    def _gather(self, input: torch.Tensor, size: int) -> torch.Tensor:
        """Mean, variance and size of each rank: float64, shape ``[world_size, 2 * channels + 1]``.

        An all-reduce of rows that are zero but for the rank's own: unlike an all-gather, every backend has it for GPUs.
        """
        channels = input.shape[1]
        memory = self._all_reduce.allocate(self._world_size * (2 * channels + 1), torch.float64, input.device).zero_()
        rows = memory.view(self._world_size, -1)
        if size:
            mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
            own = rows[self._rank]
            own[:channels].copy_(mean)
            own[channels:-1].copy_(var)
            own[-1:].fill_(size)
        self._sum(memory, f"the statistics of {self._name}")
        return rows

    def _sum(self, tensor: torch.Tensor, doing: str) -> None:
        self._all_reduce.launch(tensor, doing).wait(doing)


def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The size, mean and biased variance of all ranks together. Local.

    Args:
        rows: Of each rank, the mean and biased variance of its values, by channel, and their number: shape
            ``[world_size, 2 * channels + 1]``. At least one number is not 0.
    """
    means, variances = rows[:, :-1].unflatten(1, (2, -1)).unbind(1)
    sizes = rows[:, -1:]
    size = sizes.sum()
    shares = sizes / size
    mean = (shares * means).sum(0)
    distances = means - mean
    var = (shares * torch.addcmul(variances, distances, distances)).sum(0)
    return size, mean, var
