"""Walk and rebuild nested batches and outputs: tensors and arrays in lists, tuples and mappings."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader

from ddp_callbacks.errors import ConfigurationError


def is_array(value: Any) -> bool:
    """Whether ``value`` is a tensor or a NumPy array."""
    return isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and type(value).__name__ == "ndarray")


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield the values in nested mappings, lists and tuples."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    if values is None:
        yield value
    else:
        yield from itertools.chain.from_iterable(map(leaves_in, values))


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a nested value."""
    return filter(is_array, leaves_in(value))


def map_arrays(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a nested value like this one with the results of ``function`` for its tensors and arrays."""
    if isinstance(value, Mapping):
        return rebuild_mapping(value, {key: map_arrays(item, function) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return rebuild_sequence(value, [map_arrays(item, function) for item in value])
    return function(value) if is_array(value) else value


def without_rows(batch: Any) -> Any:
    """Return a batch like this one whose tensors and arrays, except scalars, have no rows."""
    return map_arrays(batch, lambda array: array[:0] if array.ndim else array)


def name_of(loader: Any) -> str:
    """Return the class name of the loader's data set, or of the loader if it has none, or another loader for one."""
    data = getattr(loader, "dataset", loader)
    return type(loader if isinstance(data, DataLoader) else data).__name__


def is_data_loader(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a ``DataLoader`` with a data set. A subclass without ``super().__init__()`` has none."""
    return isinstance(loader, DataLoader) and hasattr(loader, "dataset")


def length_of(loader: Any) -> int | None:
    """Return the number of batches; ``None`` if the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def has_state(loader: Any) -> bool:
    """Whether a loader can save its progress. Do not divide such a loader: a part knows one rank's progress only."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def undividable(name: str, why: str) -> ConfigurationError:
    """Return the error for a loader whose batches cannot be divided."""
    return ConfigurationError(
        f"a batch of {name} {why}, so it cannot be divided among the processes. Yield tensors that all have the "
        "samples in front, or give a DataLoader with samples by index a batch_size. Or let each process take whole "
        'batches in turn: batch_size="per_process".'
    )


def rebuild_mapping(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping like this one with ``items`` for its keys. User classes such as ``BatchEncoding`` work, too."""
    if type(mapping) is dict:
        return items
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)
    copied = copy.copy(mapping)
    for key, item in items.items():
        copied[key] = item
    return copied


def rebuild_sequence(sequence: Any, entries: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the same type with ``entries``."""
    return type(sequence)(*entries) if hasattr(sequence, "_fields") else type(sequence)(entries)
