"""All-reduce by the collectives of the process group: gloo or NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat
from ddp_callbacks.comm.protocol import Allocator, as_real
from ddp_callbacks.process_group.failures import enter, of_device, require_tags, tag_of, wait

GATHERED_NBYTES = 768 * 1024
"""Up to this size over all ranks, a sum on the CPU is faster as a gather and a local sum.

A gather takes half the rounds of gloo's ring all-reduce but moves more bytes. On one machine it took 0.4 to 0.7 of the
time up to 160 KB per rank, with two ranks and with three, and they were equal at about 480 KB.
"""

_TAG = 8  # bytes before a small sum, for what it is for; the widest real number has as many


class ProcessGroupAllReduce:
    """By the collectives of the process group (gloo, NCCL)."""

    exact = True
    unattended = True

    def __init__(self, group: dist.ProcessGroup, allocate: Allocator) -> None:
        self._group = group
        self.allocate = allocate

    def launch(self, tensor: torch.Tensor, doing: str = "") -> ProcessGroupWork:
        return ProcessGroupWork(tensor, self._group, doing)


class ProcessGroupWork:
    """A sum over the ranks that is under way.

    Args:
        tensor: Flat, contiguous; holds the sum once :meth:`wait` returns, and must not be touched before.
        group: The group that sums; all ranks must start the same reductions in the same order.
        doing: What this is for, the same on every rank: a small sum carries it, so that sums of different things that
            meet are an error. Empty if it is a part of something that does so.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, doing: str = "") -> None:
        self._tensor = tensor = as_real(tensor)
        self._group = group
        self._doing = doing
        self._gathered: torch.Tensor | None = None
        if doing:
            enter(doing)
        if tensor.device.type == "cpu" and group.size() > 1 and tensor.nbytes * group.size() <= GATHERED_NBYTES:
            message = _tagged(tensor, tag_of(doing))
            self._gathered = message.new_empty(group.size(), message.numel())
            work = all_gather_flat(group, self._gathered.view(-1), message)
        else:
            work = group.allreduce([tensor])
        self._work = of_device(work, tensor.device)

    def wait(self, doing: str) -> None:
        """Block until the sum is there.

        Raises:
            PeerError: Another rank failed, died or went silent.
            MismatchError: Another rank sums something else.
        """
        wait(self._work, doing, self._group)
        if self._gathered is not None:
            require_tags(self._gathered[:, :_TAG].view(torch.int64)[:, 0].tolist(), self._doing, self._group)
            rows = self._gathered[:, _TAG : _TAG + self._tensor.nbytes].view(self._tensor.dtype)
            first, second, *others = rows.unbind()
            torch.add(first, second, out=self._tensor)
            for other in others:
                self._tensor.add_(other)


def _tagged(tensor: torch.Tensor, tag: int) -> torch.Tensor:
    """The bytes of ``tensor`` behind a number, as a message whose copies lie one after the other in memory."""
    message = torch.empty(_TAG + -(-tensor.nbytes // _TAG) * _TAG, dtype=torch.uint8)
    message[:_TAG].view(torch.int64).fill_(tag)
    message[_TAG : _TAG + tensor.nbytes].view(tensor.dtype).copy_(tensor)
    return message
