"""The format of small messages: plain data as JSON, then the raw bytes of tensors. No pickle."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.comm.checksums import memory_of

Json = Any  # anything json.dumps accepts; numbers keep every bit, including NaN and infinities

_PLAIN = {type(None), bool, int, float, str}


def encode(header: Json, tensors: Sequence[torch.Tensor]) -> bytes:
    """Encode the result of :func:`pack` as an 8-byte length, the JSON, and the tensors' raw bytes."""
    specs = [[str(tensor.dtype).removeprefix("torch."), [*tensor.shape], tensor.device.type] for tensor in tensors]
    text = json.dumps([header, specs]).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *map(bytes_of, tensors)])


def decode(message: bytes) -> Any:
    """Return the value that was packed and encoded. Tensors of GPUs come to this process's current one."""
    offset = 8 + int.from_bytes(message[:8], "little")
    header, specs = json.loads(message[8:offset])
    tensors = []
    for name, shape, device in specs:
        dtype = getattr(torch, name)
        end = offset + math.prod(shape) * dtype.itemsize
        tensors.append(tensor_of(message[offset:end], dtype).view(shape).to(device))
        offset = end
    return unpack(header, tensors)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the raw bytes of a dense tensor on any device, in row-major order."""
    flat = memory_of(tensor.cpu())
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def tensor_of(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor with these raw bytes, on the CPU."""
    if not content:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=dtype)  # a bytearray is aligned, and may be written


def pack(value: Any) -> tuple[Json, list[torch.Tensor]]:
    """Convert nested plain data to JSON, in which tensors are replaced by their index; return it and the tensors.

    Raises:
        TypeError: The data hold anything but tensors, NumPy arrays of numbers, numbers, strings, ``None``, lists,
            tuples and dicts.
    """
    tensors: list[torch.Tensor] = []
    return _pack(value, tensors), tensors


def _pack(value: Any, tensors: list[torch.Tensor]) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list and _PLAIN.issuperset(map(type, value)):
        return [*value]  # a copy, also for a single process
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value).__module__ == "numpy":
        tensors.append(torch.as_tensor(value.copy()))
        return {"array": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_pack(item, tensors) for item in value]}
    raise TypeError(
        f"only tensors, arrays and plain data can be sent between processes, got a {type(value).__name__}: {value!r}"
    )


def unpack(value: Json, tensors: Sequence[torch.Tensor]) -> Any:
    """Inverse of :func:`pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, item),) = value.items()
    if kind in ("tensor", "array"):
        return tensors[item] if kind == "tensor" else tensors[item].numpy()[()]  # numbers stay numbers
    if kind == "dict":
        return {unpack(key, tensors): unpack(entry, tensors) for key, entry in item}
    return (list if kind == "list" else tuple)(unpack(entry, tensors) for entry in item)
