"""Save the plain attributes of a user's objects that a run changes.

Plain attributes are numbers, text, tensors, NumPy arrays, and Python's containers of these; generators can be encoded
as well. The file has only those that changed since the run began: a script may give the others new values before it
resumes.
"""

from __future__ import annotations

import itertools
import numbers
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.data.global_state import generator_types, get_state_of
from ddp_callbacks.data.nested import is_array

Checksums = dict[str, int]  # of the attributes, by name

_SCALARS = frozenset({type(None), bool, int, float, str})
_TENSOR, _ARRAY = "ddp_callbacks: not on the CPU", "ddp_callbacks: an array"
_GENERATOR, _CONTAINER = "ddp_callbacks: a generator", "ddp_callbacks: a container"
_CONTAINERS = {kind.__name__: kind for kind in (deque, set, frozenset, OrderedDict, Counter, defaultdict)}
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)}  # of a defaultdict


@dataclass
class GeneratorState:
    """In place of an attribute that is a generator: the state that it gets."""

    state: Any


def plain_attributes(owner: object, known: Collection[int] = (), largest: int = sys.maxsize - 1) -> dict[str, Any]:
    """Return the attributes of an object that can be saved, by name, without copying them.

    Args:
        known: The result of :func:`memory_of_model`. Tensors in this memory are left out: a loaded copy would no longer
            belong to the model.
        largest: Attributes with more numbers and texts are left out.
    """
    return {name: value for name, value in vars(owner).items() if _is_plain(value, known, largest)}


def memory_of_model(module: torch.nn.Module) -> set[int]:
    """Return the memory addresses of a module's dense parameters and buffers."""
    tensors = filter(is_dense, [*module.parameters(), *module.buffers()])
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def checksums_of(attributes: dict[str, Any]) -> Checksums:
    """Return a checksum of each attribute, for :func:`changed`."""
    return {name: checksum_of(encode(value)) for name, value in attributes.items()}


def changed(attributes: dict[str, Any], before: Checksums) -> dict[str, Any]:
    """Return the attributes whose checksum differs from ``before``, encoded."""
    encoded = {name: encode(value) for name, value in attributes.items()}
    return {name: value for name, value in encoded.items() if before.get(name) != checksum_of(value)}


def encode(value: Any) -> Any:
    """Return a copy of plain data that :func:`torch.load` reads with ``weights_only=True``."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy if copy.is_cpu else {_TENSOR: copy}
    if is_array(value):
        return {_ARRAY: torch.tensor(value)}
    if isinstance(value, GeneratorState):
        return {_GENERATOR: value.state}
    if isinstance(value, generator_types()):
        return {_GENERATOR: get_state_of(value)}
    if type(value) in _CONTAINERS.values():
        return _encode_container(value)
    if isinstance(value, dict):
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(value if _is_flat(value) else map(encode, value))
    return value.item() if _is_numpys(value) else value


def decode(value: Any, device: torch.device | str) -> Any:
    """Inverse of :func:`encode`. Moves tensors that were not on the CPU to ``device``."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return value[_TENSOR].to(device)
        if _ARRAY in value:
            return value[_ARRAY].numpy()
        if is_generator(value):
            return GeneratorState(value[_GENERATOR])
        if _CONTAINER in value:
            return _decode_container(value, device)
        return {key: decode(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode(entry, device) for entry in value)
    return value


def _encode_container(value: Any) -> dict[str, Any]:
    entries = [encode(list(entry)) for entry in value.items()] if isinstance(value, dict) else [*map(encode, value)]
    if isinstance(value, set | frozenset):
        entries.sort(key=repr)  # the order of texts differs from process to process
    options: dict[str, Any] = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
    if isinstance(value, defaultdict) and value.default_factory is not None:
        options = {"default_factory": value.default_factory.__name__}
    return {_CONTAINER: type(value).__name__, "entries": entries, **options}


def _decode_container(encoded: dict[str, Any], device: torch.device | str) -> Any:
    kind: Any = _CONTAINERS[encoded[_CONTAINER]]
    entries = [decode(entry, device) for entry in encoded["entries"]]
    if kind is defaultdict:
        return kind(_FACTORIES.get(encoded.get("default_factory", "")), entries)
    if kind is Counter:
        return kind(dict(entries))
    return kind(entries, encoded["maxlen"]) if kind is deque else kind(entries)


def is_generator(encoded: Any) -> bool:
    """Whether this is an encoded generator."""
    return isinstance(encoded, dict) and _GENERATOR in encoded


def _leaves(value: Any) -> Iterator[Any]:
    is_opaque = isinstance(value, defaultdict) and value.default_factory not in (None, *_FACTORIES.values())
    if is_opaque or type(value) not in (list, tuple, dict, *_CONTAINERS.values()):
        yield value
        return
    for entry in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
        yield from _leaves(entry)


def _is_plain(value: Any, known: Collection[int], largest: int) -> bool:
    if _is_flat(value):
        return len(value) <= largest
    leaves = list(itertools.islice(_leaves(value), largest + 1))
    return sum(map(_size_of, leaves)) <= largest and all(_is_plain_leaf(leaf, known) for leaf in leaves)


def _is_flat(value: Any) -> bool:
    """Whether ``value`` is a list or tuple of scalars, which may be long."""
    return type(value) in (list, tuple) and _SCALARS.issuperset(map(type, value))


def _size_of(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() if is_dense(leaf) else 1
    return leaf.size if is_array(leaf) else len(leaf) if isinstance(leaf, str) else 1


def _is_plain_leaf(leaf: Any, known: Collection[int]) -> bool:
    """Whether ``leaf`` is a scalar, an array of numbers, or a tensor outside the ``known`` memory."""
    if type(leaf) is torch.Tensor and is_dense(leaf):
        return leaf.untyped_storage().data_ptr() not in known
    if is_array(leaf) and not isinstance(leaf, torch.Tensor):
        return leaf.dtype.kind in "biufc"
    return type(leaf) in _SCALARS or _is_numpys(leaf)


def _is_numpys(leaf: Any) -> bool:
    """Whether ``leaf`` is a NumPy scalar; :func:`encode` makes it a Python scalar."""
    return isinstance(leaf, numbers.Number) and hasattr(leaf, "item")
