"""All-reduce by the collectives of the process group: gloo or NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat
from ddp_callbacks.comm.protocol import allocate, as_real
from ddp_callbacks.comm.subgroups import cpu_group
from ddp_callbacks.process_group.failures import enter, launching, of_device, require_tags, tag_of, wait

GATHERED_NBYTES = 768 * 1024
"""Up to this size over all ranks, an all-gather and a local sum are faster on the CPU than an all-reduce.

An all-gather needs half the rounds of gloo's ring all-reduce. On one machine with two and three ranks, it took 0.4 to
0.7 of the time up to 160 KB per rank; at about 480 KB they were equal.
"""

EXTRA_NBYTES = 16 * 1024
"""What each round of an all-gather may send more than one of the ring: a link of 1 Gbit/s sends it in 0.13 ms."""

_TAG = 8  # bytes of the tag before a small sum; as wide as the widest real dtype, so numbers stay aligned


class ProcessGroupAllReduce:
    """All-reduce by the process group's collectives (gloo, NCCL).

    Args:
        dtype: As in :class:`ProcessGroupWork`.
    """

    allocate = staticmethod(allocate)

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
        self._group, self._dtype, self.exact = group, dtype, dtype is None

    def launch(self, tensor: torch.Tensor, purpose: str) -> ProcessGroupWork:
        """Start to sum ``tensor`` over the ranks, in place. Does not block."""
        enter(purpose)
        return ProcessGroupWork(tensor, self._group, purpose, self._dtype)


class ProcessGroupWork:
    """The work handle of an all-reduce.

    Args:
        tensor: Flat, contiguous; holds the sum once :meth:`wait` returns. Don't touch it before.
        group: The ranks' process group. All its ranks must start the same reductions in the same order.
        purpose: For error messages, the same on every rank. A small sum carries it as a tag, so that mixing up
            different sums is an error.
        dtype: A dtype of half precision: wider numbers are rounded to it and sent. Large tensors, and all on GPUs, are
            summed in it, too. ``None`` rounds nothing.
    """

    def __init__(
        self, tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str, dtype: torch.dtype | None = None
    ) -> None:
        self._result = tensor = as_real(tensor)
        if dtype is not None and dtype.itemsize < tensor.itemsize:
            tensor = tensor.to(dtype)
        self._tensor = tensor
        self._group = group = group if tensor.device.type != "cpu" else cpu_group(group)
        self._purpose = purpose
        self._gathered: torch.Tensor | None = None
        if tensor.device.type == "cpu" and is_gathered(tensor.nbytes, group.size()):
            message = _tagged(tensor, tag_of(purpose))
            self._gathered = message.new_empty(group.size(), message.numel())
            work = all_gather_flat(group, self._gathered.view(-1), message)
        else:
            with launching(purpose, group):
                work = group.allreduce([tensor])
        self._work = of_device(work, tensor.device, group)

    def wait(self, whole: dist.ProcessGroup | None = None) -> None:
        """Block until the sum is complete; for NCCL, let the current stream wait for it instead.

        Args:
            whole: The larger group whose ranks all wait for this sum, if ``group`` has only some of them.

        Raises:
            PeerError: Another rank failed, died or went silent.
            MismatchError: Another rank sums something else.
        """
        wait(self._work, self._purpose, whole or self._group)
        if self._gathered is not None:
            require_tags(self._gathered[:, :_TAG].view(torch.int64)[:, 0].tolist(), self._purpose, self._group)
            rows = self._gathered[:, _TAG : _TAG + self._tensor.nbytes].view(self._tensor.dtype)
            first, second, *others = rows.unbind()
            torch.add(first.to(self._result.dtype), second, out=self._result)
            for other in others:
                self._result.add_(other)
        elif self._tensor is not self._result:
            self._result.copy_(self._tensor)


def is_gathered(nbytes: int, ranks: int) -> bool:
    """Whether a sum of so many bytes on each of ``ranks`` is an all-gather and a local sum."""
    return ranks > 1 and nbytes * ranks <= GATHERED_NBYTES and nbytes * (ranks - 2) <= EXTRA_NBYTES * ranks


def _tagged(tensor: torch.Tensor, tag: int) -> torch.Tensor:
    """Return a message of the tag and the bytes of ``tensor``, padded so that gathered messages stay aligned."""
    message = torch.empty(_TAG + -(-tensor.nbytes // _TAG) * _TAG, dtype=torch.uint8, device="cpu")
    message[:_TAG].view(torch.int64).fill_(tag)
    message[_TAG : _TAG + tensor.nbytes].view(tensor.dtype).copy_(tensor)
    return message
