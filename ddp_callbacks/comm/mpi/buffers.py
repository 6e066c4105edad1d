"""Tensors as MPI buffers: memory, count and datatype. Tensors that MPI cannot send are copied to one that it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks.comm.mpi.runtime import MPI
from ddp_callbacks.errors import ConfigurationError

Spec: TypeAlias = Any  # mpi4py's BufSpec

CHUNK = 2**30
"""Maximum number of elements in a message: before MPI 4.0, counts had to fit into C's int."""

_NUMBERS: dict[torch.dtype, MPI.Datatype] = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_HALVES = (torch.float16, torch.bfloat16)
# For data that are only moved, any type of the same size will do.
_WORDS = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}

_Ops: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Ops.SUM: MPI.SUM,
    _Ops.AVG: MPI.SUM,
    _Ops.PRODUCT: MPI.PROD,
    _Ops.MIN: MPI.MIN,
    _Ops.MAX: MPI.MAX,
    _Ops.BAND: MPI.BAND,
    _Ops.BOR: MPI.BOR,
    _Ops.BXOR: MPI.BXOR,
}
_BITWISE = (_Ops.BAND, _Ops.BOR, _Ops.BXOR)
# On bytes of 0 and 1, so that the results are 0 and 1.
_BOOLEAN = {
    _Ops.SUM: MPI.MAX,
    _Ops.MAX: MPI.MAX,
    _Ops.PRODUCT: MPI.MIN,
    _Ops.MIN: MPI.MIN,
    _Ops.BAND: MPI.BAND,
    _Ops.BOR: MPI.BOR,
    _Ops.BXOR: MPI.BXOR,
}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its autograd history.

    Raises:
        ConfigurationError: MPI cannot take it: it is not on the CPU, or not dense.
    """
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise ConfigurationError(
            f"backend mpi4py takes dense tensors on the CPU, got one on {tensor.device} of layout {tensor.layout}. Use "
            "gloo or NCCL for these, or copy it."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension, in order: the same memory if they are contiguous, otherwise a copy."""
    tensor = plain(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.contiguous().view(-1)


def shares(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the two share memory, which MPI forbids for a send and a receive buffer."""
    return first.numel() > 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def moved(tensor: torch.Tensor, parts: int = 1) -> Spec:
    """The buffer of a flat tensor of any dtype to send or receive, in ``parts`` equal parts."""
    return _spec(tensor, _WORDS[tensor.element_size()], tensor.numel() // parts)


def moved_in_parts(tensor: torch.Tensor, counts: Sequence[int]) -> Spec:
    """The same with a part of ``counts[rank]`` elements for each rank."""
    return _spec(tensor, _WORDS[tensor.element_size()], (counts, list(accumulate(counts, initial=0))[:-1]))


def chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a flat tensor into chunks of at most :data:`CHUNK` elements, one message each."""
    return [tensor] if tensor.numel() <= CHUNK else tensor.split(CHUNK)


@dataclass(frozen=True)
class Reduction:
    """MPI's operation and dtype for a torch operation and dtype.

    MPI lacks float16 and bfloat16: they are reduced in float32 and rounded once, at the end.
    """

    op: MPI.Op
    average: bool
    dtype: torch.dtype

    @classmethod
    @cache
    def of(cls, kind: Any, dtype: torch.dtype) -> Reduction:
        """The reduction of ``dtype`` by ``kind``, a ``ReduceOp.RedOpType``. ConfigurationError if there is none."""
        average = kind == _Ops.AVG
        if dtype == torch.bool and kind in _BOOLEAN:
            return cls(_BOOLEAN[kind], False, torch.uint8)
        computed = torch.float32 if dtype in _HALVES else dtype
        if dtype.is_complex and kind in (_Ops.SUM, _Ops.AVG):
            computed = dtype.to_real()
        whole = not dtype.is_floating_point and not dtype.is_complex
        if computed not in _NUMBERS or kind not in _OPS or (kind in _BITWISE and not whole) or (average and whole):
            raise ConfigurationError(
                f"backend mpi4py cannot reduce {dtype} by {str(kind).rpartition('.')[2]}. It knows SUM, PRODUCT, MIN "
                "and MAX of real numbers, AVG of floating-point ones, SUM and AVG of complex ones, and BAND, BOR and "
                "BXOR of whole ones."
            )
        return cls(_OPS[kind], average, computed)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements, flat, in the dtype of the reduction; the same memory if possible."""
        elements = flat(tensor)
        if elements.is_complex():
            return torch.view_as_real(elements).view(-1)
        if elements.dtype == torch.bool:
            return elements.view(torch.uint8)
        return elements if elements.dtype == self.dtype else elements.to(self.dtype)

    def spec(self, staged: torch.Tensor, parts: int = 1) -> Spec:
        """The buffer of a staged tensor, or of a chunk, in ``parts`` equal parts."""
        return _spec(staged, _NUMBERS[self.dtype], staged.numel() // parts)

    def unstage(self, staged: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
        """Write the result of ``size`` ranks into ``tensor``."""
        if self.average:
            staged.div_(size)
        copy_back(staged, tensor)


def copy_back(staged: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a flat tensor (elements, or their real and imaginary parts) to ``tensor`` unless they share memory."""
    if staged.data_ptr() == tensor.data_ptr() and not tensor.is_conj() and not tensor.is_neg():
        return
    if tensor.is_complex() and not staged.is_complex():
        staged = torch.view_as_complex(staged.view(-1, 2))
    elif tensor.dtype == torch.bool and staged.dtype == torch.uint8:
        staged = staged.view(torch.bool)
    plain(tensor).copy_(staged.view(tensor.shape))


def _spec(tensor: torch.Tensor, datatype: MPI.Datatype, count: Any) -> Spec:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), count, datatype]
