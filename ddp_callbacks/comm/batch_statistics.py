"""What the ranks exchange for batch normalization: the statistics of a batch in forward, two sums in backward.

On CPUs both are sums (:class:`SummedStatistics`). On GPUs the host must not wait, so it cannot decide by the numbers:
the ranks gather their means and variances, which need no second look (:class:`GpuStatistics`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_callbacks._torch import outside_inference_mode
from ddp_callbacks.comm.process_group import ProcessGroupAllReduce
from ddp_callbacks.comm.protocol import allocate
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group.failures import describe_rank

_HEADER = 2  # numbers before a message's sums: its tag, and the number of values per channel


class Message:
    """Memory of one exchange: the header, and two sums per channel."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.header, self.sums = memory, memory[:_HEADER], memory[_HEADER:].view(2, -1)
        self.first, self.second = self.sums.unbind()


class SummedStatistics:
    """All-reduces messages, one at a time, and checks that all ranks exchange the same layer.

    The constructor is a collective.

    Args:
        group: The ranks.
        device: Where messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._world_size = group, device, group.size()
        self._all_reduce = choose_all_reduce(group, [device])
        self._messages: dict[int, Message] = {}

    @outside_inference_mode
    def message(self, channels: int) -> Message:
        """The message for this number of channels; its sums are valid until the next call."""
        if channels not in self._messages:
            memory = self._all_reduce.allocate(_HEADER + 2 * channels, torch.float64, self._device)
            self._messages[channels] = Message(memory)
        return self._messages[channels]

    def sum(self, message: Message, tag: int, size: int, what: str, name: str) -> int:
        """All-reduce ``message`` in place; return the sum of ``size``. A collective that blocks the host.

        Args:
            message: From :meth:`message`.
            tag: Tells the exchange from others; the same on every rank.
            size: This rank's number of values per channel.
            what: What is exchanged, for messages.
            name: The layer's name.

        Raises:
            MismatchError: The ranks' tags differ.
            PeerError: Another rank failed, died or went silent.
        """
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


class GpuStatistics:
    """Exchanges statistics between GPUs; under NCCL the host does not wait. The constructor is local.

    Nothing checks here that all ranks exchange the same layer: only the host could raise.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        self._all_reduce = ProcessGroupAllReduce(group, allocate)

    def gather(self, size: int, mean: torch.Tensor, var: torch.Tensor, name: str) -> torch.Tensor:
        """Gather the statistics of all ranks. A collective.

        This is an all-reduce of rows that are zero but for the rank's own: unlike an all-gather, every backend has it
        for GPUs.

        Args:
            size: This rank's number of values per channel; with 0, the others are ignored, even NaN.
            mean, var: Of these values; shape ``[channels]``.
            name: The layer's name.

        Returns:
            Shape ``[world_size, 2 * channels + 1]``, float64: of each rank, mean, variance and size.

        Raises:
            PeerError: Another rank failed, died or went silent. Under NCCL, no failure is noticed here.
        """
        channels = len(mean)
        memory = self._all_reduce.allocate(self._world_size * (2 * channels + 1), torch.float64, mean.device).zero_()
        rows = memory.view(self._world_size, -1)
        if size:
            own = rows[self._rank]
            own[:channels].copy_(mean)
            own[channels:-1].copy_(var)
            own[-1:].fill_(size)
        self._sum(memory, f"the statistics of {name}")
        return rows

    def sum(self, sums: torch.Tensor, name: str) -> torch.Tensor:
        """Sum flat ``sums`` over the ranks, in place, and return it. A collective; errors as in :meth:`gather`."""
        self._sum(sums, f"the gradients of {name}")
        return sums

    def _sum(self, tensor: torch.Tensor, doing: str) -> None:
        self._all_reduce.launch(tensor, doing).wait(doing)


def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The size, mean and biased variance of the whole batch, from the rows of :meth:`GpuStatistics.gather`. Local.

    Returns:
        float64, of shapes ``[]``, ``[channels]`` and ``[channels]``. NaN if all ranks have size 0.
    """
    means, variances = rows[:, :-1].unflatten(1, (2, -1)).unbind(1)
    sizes = rows[:, -1:]
    size = sizes.sum()
    shares = sizes / size
    mean = (shares * means).sum(0)
    distances = means - mean
    var = (shares * torch.addcmul(variances, distances, distances)).sum(0)
    return size, mean, var
