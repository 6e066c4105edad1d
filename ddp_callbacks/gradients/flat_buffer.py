"""The flat buffer of a bucket: gradients are copied in, reduced in place, and returned as views.

After a synchronization, ``parameter.grad`` is a view of the reduced buffer, so nothing is copied out. If the next
backward adds to these views (``zero_grad(set_to_none=False)`` keeps them), and all gradients still are views, they are
reduced in place. Otherwise the next gradients are copied into this buffer, if nothing else references it, or else into
another one. Three can reference it: a parameter, a user who kept ``parameter.grad``, and a user who kept a tensor made
from it (``grad.detach()``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from ddp_callbacks._torch import copy_each, count_of_tensors

_LARGE = 1 << 14  # elements per gradient above which one fused pass beats two foreach passes


class FlatBuffer:
    """A flat tensor with room for all gradients of a bucket and a tail.

    Attributes:
        flat: Shape ``[numel + tail]``.
        views: One view per parameter, with its shape and, if it is dense, its strides.
    """

    def __init__(self, flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.flat, self._parameters = flat, parameters
        offset = 0
        self.views: list[torch.Tensor] = []
        for parameter in parameters:
            self.views.append(_view_like(flat, offset, parameter))
            offset += parameter.numel()
        self.numel = offset
        self._references = self._count_references()

    def holds(self) -> list[bool]:
        """Return, for each parameter, whether its gradient is the view of this buffer."""
        return [parameter.grad is view for parameter, view in zip(self._parameters, self.views, strict=True)]

    def is_aliased(self) -> bool:
        """Whether a gradient, or anything outside, still references this buffer."""
        return any(self.holds()) or self._count_references() != self._references

    def _count_references(self) -> tuple[int, int]:
        storage = self.flat.untyped_storage()
        return count_of_tensors(storage), sys.getrefcount(storage) + sum(map(sys.getrefcount, self.views))


class BufferPool:
    """The buffers of one bucket: usually one :class:`FlatBuffer`, two if the user keeps gradients for a step."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        tail: int,
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    ) -> None:
        self.parameters = list(parameters)
        self._tail = tail
        self._allocate = allocate
        self._memories: list[FlatBuffer] = []  # the latest at the end

    def take(self, in_place: bool = False) -> FlatBuffer:
        """Return a buffer that nothing outside references.

        Args:
            in_place: Return the buffer that holds all gradients already instead, if there is one.
        """
        for memory in self._memories if in_place else []:
            if all(memory.holds()):
                self._memories = [memory]
                return memory
        free = [memory for memory in self._memories if not memory.is_aliased()]
        taken = free[0] if free else self._make()
        # Of the buffers that only the user references, keep the latest: users who keep gradients for a step free it.
        latest = self._memories[-1:]
        self._memories = [
            memory for memory in self._memories if memory not in free and (memory in latest or any(memory.holds()))
        ]
        self._memories.append(taken)
        return taken

    def abandon(self) -> None:
        """Forget all buffers: a pending collective may still write to them, one of NCCL without a reference to them."""
        self._memories = []

    def _make(self) -> FlatBuffer:
        numel = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        return FlatBuffer(self._allocate(numel + self._tail, first.dtype, first.device), self.parameters)


def copy_in(memory: FlatBuffer, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
    """Write ``scale * gradient`` into each view; zeros for ``None``, and everywhere if ``scale`` is 0.

    Either all gradients are the views themselves, or none is.

    A rank with weight 0 may hold NaN (the mean over no samples), which must not reach other ranks.
    """
    if scale == 0:
        memory.flat[: memory.numel].zero_()
        return
    sources, targets = [], []
    for gradient, view in zip(gradients, memory.views, strict=True):
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            gradient = gradient.detach() if gradient.requires_grad else gradient  # backward(create_graph=True)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
            targets.append(view)
    if sources and scale != 1 and memory.numel > _LARGE * len(memory.views):
        for source, target in zip(sources, targets, strict=True):
            torch.mul(source, scale, out=target)
        return
    if sources:
        copy_each(targets, sources)
    if scale != 1:
        memory.flat[: memory.numel].mul_(scale)  # zeros stay zeros


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    # empty_like keeps the strides of tensors that fill their memory without gaps or overlaps, and only of these.
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
