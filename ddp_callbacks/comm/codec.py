"""The format of small messages: a JSON header, then the raw bytes of tensors. No pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

Json = Any  # anything json.dumps accepts; numbers keep every bit, including NaN and infinities


def encode(header: Json, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Encode as one flat uint8 tensor on the CPU: an 8-byte length, the JSON header, the tensors' raw bytes."""
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([header, specs]).encode()
    parts = [torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)]
    parts += [
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        for tensor in tensors
        if tensor.numel()
    ]
    return torch.cat(parts)


def decode(message: torch.Tensor, device: torch.device) -> tuple[Json, list[torch.Tensor]]:
    """Inverse of :func:`encode`; places the tensors on ``device``."""
    size = int.from_bytes(bytes(message[:8].tolist()), "little")
    text = bytearray(size)
    torch.frombuffer(text, dtype=torch.uint8).copy_(message[8 : 8 + size])
    header, specs = json.loads(text)
    offset, tensors = 8 + size, []
    for name, shape in specs:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        count = tensor.numel() * tensor.element_size()
        if count:
            tensor.view(-1).view(torch.uint8).copy_(message[offset : offset + count])
        offset += count
        tensors.append(tensor.to(device))
    return header, tensors


def pack(value: Any, tensors: list[torch.Tensor]) -> Json:
    """Convert nested plain data to JSON; append tensors to ``tensors`` and replace them by their index.

    Raises:
        TypeError: The data hold anything but tensors, numbers, strings, ``None``, lists, tuples and dicts.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"only tensors and plain data can be sent between processes, got a {type(value).__name__}: {value!r}"
    )


def unpack(value: Json, tensors: Sequence[torch.Tensor]) -> Any:
    """Inverse of :func:`pack`."""
    ((kind, item),) = value.items()
    if kind == "tensor":
        return tensors[item]
    if kind == "dict":
        return {unpack(key, tensors): unpack(entry, tensors) for key, entry in item}
    if kind in ("list", "tuple"):
        entries = [unpack(entry, tensors) for entry in item]
        return entries if kind == "list" else tuple(entries)
    return item
