"""Attributes of a user's objects that a run changes: which can be saved, and what of them is in a file.

Plain are numbers, text, tensors, and lists, tuples, dicts and deques of them. Only what has changed since the run began
is in the file: a script may set anything else to another value before it goes on.
"""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch

from ddp_callbacks.comm.checksums import checksum_of, is_dense

Checksums = dict[str, int]  # of attributes, by name

_SCALARS = (type(None), bool, int, float, str)
_TENSOR, _DEQUE = "ddp_callbacks: not on the CPU", "ddp_callbacks: a deque"


def plain_attributes(owner: object, known: Collection[int] = ()) -> dict[str, Any]:
    """Those of an object that can be saved, as they are.

    Args:
        known: The result of :func:`memory_of_model`: a copy would part tensors there from the model.
    """
    return {
        name: value for name, value in vars(owner).items() if all(_is_plain(leaf, known) for leaf in _leaves(value))
    }


def memory_of_model(module: torch.nn.Module) -> set[int]:
    """Where its parameters and buffers are."""
    tensors = filter(is_dense, [*module.parameters(), *module.buffers()])
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def checksums_of(attributes: dict[str, Any]) -> Checksums:
    """To know later what has changed."""
    return {name: checksum_of(encode(value)) for name, value in attributes.items()}


def changed(attributes: dict[str, Any], before: Checksums) -> dict[str, Any]:
    """Those that differ from ``before``, encoded."""
    encoded = {name: encode(value) for name, value in attributes.items()}
    return {name: value for name, value in encoded.items() if before.get(name) != checksum_of(value)}


def encode(value: Any) -> Any:
    """A copy of plain data that :func:`torch.load` reads with ``weights_only=True``."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy if copy.is_cpu else {_TENSOR: copy}
    if isinstance(value, dict):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, deque):
        return {_DEQUE: [encode(entry) for entry in value], "maxlen": value.maxlen}
    if isinstance(value, list | tuple):
        return type(value)(map(encode, value))
    return value.item() if _is_numpys(value) else value


def decode(value: Any, device: torch.device | str) -> Any:
    """Inverse of :func:`encode`; tensors that were not on the CPU come to ``device``."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return value[_TENSOR].to(device)
        if _DEQUE in value:
            return deque((decode(entry, device) for entry in value[_DEQUE]), value["maxlen"])
        return {key: decode(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode(entry, device) for entry in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) not in (list, tuple, dict, deque):
        yield value
        return
    for entry in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(entry)


def _is_plain(leaf: Any, known: Collection[int]) -> bool:
    """Whether it is a scalar, or a tensor in none of the ``known`` memory."""
    if type(leaf) is torch.Tensor and is_dense(leaf):
        return leaf.untyped_storage().data_ptr() not in known
    return type(leaf) in _SCALARS or _is_numpys(leaf)


def _is_numpys(leaf: Any) -> bool:
    """Whether it is a scalar of NumPy's: going on, it is Python's."""
    return isinstance(leaf, numbers.Number) and hasattr(leaf, "item")
