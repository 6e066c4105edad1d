"""Checksums of data that must be equal on all ranks and is too large to send."""

from __future__ import annotations

import ctypes
import functools
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch

_COLUMNS = 1024  # columns in which 8-byte words are summed; each has a different factor
_SMALL = 1 << 16  # bytes up to which zlib is faster: each operation on a tensor costs microseconds
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def checksum_of(value: Any, checksum: int = 0) -> int:
    """Return a checksum that is equal for equal values, in every process.

    Values are nested collections, tensors, arrays, plain data, and objects with a repr.

    Args:
        checksum: The checksum of preceding values.
    """
    if isinstance(value, torch.Tensor):
        number = checksum_of_memory(memory_of(value)) if is_dense(value) else 0
        return zlib.crc32(repr((value.dtype, value.shape, number)).encode(), checksum)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = [entry for item in value.items() for entry in item]
    if isinstance(value, set | frozenset):
        value = sorted(map(checksum_of, value))  # a set of strings has another order in each process
    if isinstance(value, list | tuple) and not all(type(entry) is int for entry in value):
        return functools.reduce(lambda found, entry: checksum_of(entry, found), value, zlib.crc32(b"[", checksum))
    return zlib.crc32(ADDRESS.sub("", repr(value)).encode(), checksum)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is dense, and its memory holds its values."""
    return not (
        torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided
    )


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, flat; without a copy if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # the stride of a single element may be any


def checksum_of_memory(memory: torch.Tensor) -> int:
    """Return a number that differs for almost all different contents. Takes about one pass over the memory.

    Args:
        memory: Flat, uint8, on any device.
    """
    if memory.numel() <= _SMALL:
        memory = memory.cpu()
        return zlib.crc32(ctypes.string_at(memory.data_ptr(), memory.numel()))
    # All odd: an even factor would move the highest bit of a word, a sign, out of the 64 bits of the sum.
    factors = torch.arange(_COLUMNS, device=memory.device).mul_(0x9E3779B97F4A7C2).add_(0x2545F4914F6CDD1D)
    words = memory[: memory.numel() // 8 * 8]
    words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
    rows = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    parts = rows.sum(0), words[rows.numel() :], memory[words.numel() * 8 :].to(torch.int64)
    return hash(tuple(int((part * factors[: part.numel()]).sum()) for part in parts))
