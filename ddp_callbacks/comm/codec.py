"""The format of small messages: plain data as JSON, then the raw bytes of tensors. No pickle."""

from __future__ import annotations

import ctypes
import json
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
        tensor = torch.empty(shape, dtype=getattr(torch, name), device="cpu")
        tensors.append(tensor_of(message[offset : offset + tensor.nbytes], tensor).to(device))
        offset += tensor.nbytes
    return unpack(header, tensors)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the raw bytes of a dense tensor on any device, in row-major order."""
    flat = memory_of(tensor.cpu())
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def tensor_of(content: bytes, tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite ``tensor`` with these raw bytes, and return it."""
    if content:
        found = torch.frombuffer(bytearray(content), dtype=torch.uint8)  # a bytearray is aligned, and may be written
        tensor.copy_(found.view(tensor.dtype).view(tensor.shape))
    return tensor


def pack(value: Any) -> tuple[Json, list[torch.Tensor]]:
    """Convert nested plain data to JSON, in which tensors are replaced by their index; return it and the tensors.

    Raises:
        TypeError: The data hold anything but tensors, NumPy arrays of numbers, numbers, strings, ``None``, lists,
            tuples and dicts.
    """
    tensors: list[torch.Tensor] = []
    return _pack(value, tensors), tensors


def _pack(value: Any, tensors: list[torch.Tensor]) -> Json:
    if type(value) is list and _PLAIN.issuperset(map(type, value)):
        return {"plain": [*value]}  # a copy, also for a single process
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value).__module__ == "numpy" and not isinstance(value, float):
        tensors.append(torch.as_tensor(value.copy()))
        return {"array": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"only tensors, arrays and plain data can be sent between processes, got a {type(value).__name__}: {value!r}"
    )


def unpack(value: Json, tensors: Sequence[torch.Tensor]) -> Any:
    """Inverse of :func:`pack`."""
    ((kind, item),) = value.items()
    if kind in ("tensor", "array"):
        return tensors[item] if kind == "tensor" else tensors[item].numpy()[()]  # numbers stay numbers
    if kind == "dict":
        return {unpack(key, tensors): unpack(entry, tensors) for key, entry in item}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(entry, tensors) for entry in item)
    return item
