"""Join a model's outputs for the parts of batches to its outputs for the whole batches.

An output may be nested: tensors and arrays in lists, tuples and dicts of any kind. To find the values that have an
entry per sample, we look at all batches together: if the parts differ in size, a length that equals every part's number
of samples is no coincidence.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.codec import Json
from ddp_callbacks.comm.collectives import all_gather_tensors
from ddp_callbacks.data.nested import arrays_in, is_array, rebuild_mapping, rebuild_sequence
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_world_size

BATCHES_AT_ONCE = 32  # sent together; every rank holds the whole message

Column = list[list[Any]]  # the values at one place in the outputs: batches x parts


def gather_outputs(outputs: Sequence[Any], sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the outputs for whole batches on every rank. A collective: all ranks must have the same number of batches.

    Tensors and plain data are sent directly. Other objects are pickled, as in
    :func:`torch.distributed.all_gather_object`. Classes of mappings and named tuples are not sent: this rank's own
    outputs supply them.

    Args:
        outputs: This rank's output for its part of each batch, or for a padding batch.
        sizes: The number of samples of each part; 0 for a padding batch, whose output is ignored.
        group: ``None`` is the default group.

    Raises:
        ConfigurationError: Outputs cannot be joined; names their place and kind.
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size(group) == 1:
        return list(outputs)
    values: Column = []
    counts: list[list[int]] = []
    for start in range(0, len(outputs), BATCHES_AT_ONCE):
        mine = sizes[start : start + BATCHES_AT_ONCE]
        tensors: list[torch.Tensor] = []
        sent = [_encode(output, tensors) for output, size in zip(outputs[start:], mine, strict=False) if size]
        gathered = all_gather_tensors([list(mine), sent], tensors, "the predictions", group)
        received = [iter([_decode(text, parts, outputs[0]) for text in texts]) for (_, texts), parts in gathered]
        for batch in zip(*(by_batch for (by_batch, _), _ in gathered), strict=True):
            values.append([next(parts) for parts, size in zip(received, batch, strict=True) if size])
            counts.append([size for size in batch if size])
    return join_outputs(values, counts)


def join_outputs(values: Column, sizes: list[list[int]]) -> list[Any]:
    """Join the outputs for parts to those for whole batches. Local.

    =============================================  ====================================================================
    tensor, array                                  concatenated along the (first) dimension that has the samples
    list, tuple with one entry for each sample     concatenated
    floating-point number or tensor of the part    averaged, weighted by samples
    dict, list, tuple with anything in it          entry by entry
    dicts without a common key                     their union
    equal values; strings, integers                the first
    =============================================  ====================================================================

    If all parts have the same size, a list of that length counts as one entry per sample unless all its tensors have a
    dimension of that size; a tuple doesn't, unless it holds strings.

    Args:
        values: For each batch, the outputs of its parts; each part has at least one sample.
        sizes: The number of samples of each part.

    Raises:
        ConfigurationError: A value cannot be joined; names its place and kind.
    """
    divided = [index for index, parts in enumerate(values) if len(parts) > 1]
    joined = _Join([sizes[index] for index in divided]).join([values[index] for index in divided], "output")
    whole = [parts[0] if parts else None for parts in values]
    for index, value in zip(divided, joined, strict=True):
        whole[index] = value
    return whole


class _Join:
    """Joins the parts of batches of known sizes."""

    def __init__(self, sizes: list[list[int]]) -> None:
        self._sizes = sizes
        self._flat = [size for parts in sizes for size in parts]
        self._vary = len(set(self._flat)) > 1

    def join(self, column: Column, place: str) -> list[Any]:
        if not column:
            return []
        values = [value for parts in column for value in parts]
        if all(map(is_array, values)):
            return self._arrays(column, values, place)
        if all(isinstance(value, Mapping) for value in values):
            return self._mappings(column, place)
        if all(isinstance(value, list | tuple) for value in values):
            return self._sequences(column, values, place)
        return [self._others(parts, sizes, place) for parts, sizes in zip(column, self._sizes, strict=True)]

    def _arrays(self, column: Column, values: list[Any], place: str) -> list[Any]:
        dimension = self._dimension(values)
        if dimension is None and all(len({part.shape for part in parts}) == 1 for parts in column):
            return [_average(parts, sizes) for parts, sizes in zip(column, self._sizes, strict=True)]
        return [_concatenate(parts, dimension or 0, place) for parts in column]

    def _dimension(self, values: list[Any]) -> int | None:
        """The dimension to join arrays along: it has the samples, or the same number of rows for each."""
        for dimension in range(min(value.ndim for value in values)):
            if all(value.shape[dimension] == size for value, size in zip(values, self._flat, strict=True)):
                return dimension
        if not min(value.ndim for value in values):
            return None
        rows = {divmod(value.shape[0], size) for value, size in zip(values, self._flat, strict=True)}
        return 0 if len(rows) == 1 and rows.pop()[1] == 0 and values[0].shape[0] else None

    def _mappings(self, column: Column, place: str) -> list[Any]:
        keys = [list(part) for parts in column for part in parts]
        if all(set(own) == set(keys[0]) for own in keys):
            entries = {
                key: self.join([[part[key] for part in parts] for parts in column], f"{place}[{key!r}]")
                for key in keys[0]
            }
            return [
                rebuild_mapping(parts[0], {key: entries[key][index] for key in entries})
                for index, parts in enumerate(column)
            ]
        union = [{key: part[key] for part in parts for key in part} for parts in column]
        if any(len(own) != sum(map(len, parts)) for own, parts in zip(union, column, strict=True)):
            raise _refusal(place, "has other keys for each part")
        return [rebuild_mapping(parts[0], own) for own, parts in zip(union, column, strict=True)]

    def _sequences(self, column: Column, values: list[Any], place: str) -> list[Any]:
        lengths = [len(value) for value in values]
        by_sample = lengths == self._flat and (self._vary or _lists_samples(values, self._flat))
        if hasattr(values[0], "_fields") or (len(set(lengths)) == 1 and not by_sample):
            entries = [
                self.join([[part[index] for part in parts] for parts in column], f"{place}[{index}]")
                for index in range(lengths[0])
            ]
            return [
                rebuild_sequence(parts[0], [entry[index] for entry in entries]) for index, parts in enumerate(column)
            ]
        return [type(parts[0])(entry for part in parts for entry in part) for parts in column]

    def _others(self, parts: list[Any], sizes: list[int], place: str) -> Any:
        first = parts[0]
        if all(isinstance(part, float) for part in parts) and len(set(parts)) > 1:
            return math.fsum(map(operator.mul, parts, sizes)) / sum(sizes)
        plain = isinstance(first, str | bytes | int | float) and len(set(map(type, parts))) == 1
        if plain or all(_are_equal(first, part) for part in parts):
            return first
        raise _refusal(place, f"is one {type(first).__name__} for the whole part")


def _lists_samples(values: list[Any], sizes: list[int]) -> bool:
    """Whether lists as long as the parts, which all have the same size, have one entry for each sample."""
    if isinstance(values[0], tuple):  # a tuple of strings is a DataLoader's
        return all(isinstance(entry, str | bytes) for value in values for entry in value)
    arrays = [(array, size) for value, size in zip(values, sizes, strict=True) for array in arrays_in(value)]
    return not arrays or not all(size in array.shape for array, size in arrays)


def _concatenate(parts: list[Any], dimension: int, place: str) -> Any:
    shapes = {tuple(size for index, size in enumerate(part.shape) if index != dimension) for part in parts}
    if len(shapes) > 1 or not min(part.ndim for part in parts):
        raise _refusal(place, f"has the shapes {[list(part.shape) for part in parts]} for the parts of one batch")
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([part.to(parts[0].device) for part in parts], dimension)
    return sys.modules["numpy"].concatenate(parts, dimension)


def _average(parts: list[Any], sizes: list[int]) -> Any:
    first = parts[0]
    tensors = [part if isinstance(part, torch.Tensor) else torch.as_tensor(part) for part in parts]
    if not tensors[0].is_floating_point():
        return first
    total = sum(tensor.double() * size for tensor, size in zip(tensors, sizes, strict=True))
    mean = (total / sum(sizes)).to(tensors[0].dtype)  # type: ignore[union-attr]
    return mean if isinstance(first, torch.Tensor) else mean.numpy()


def _are_equal(first: Any, second: Any) -> bool:
    try:
        return first is second or bool(first == second)
    except Exception:
        return False


def _refusal(place: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the predictions for the parts of a batch cannot be joined: {place} {what}. Return tensors with the samples "
        "along one dimension and equal other dimensions, or a list with one entry for each sample. (In Lightning, "
        "trainer.predict(..., return_predictions=False) joins nothing; hooks and writers get each process's part.)"
    )


# --- on the wire ------------------------------------------------------------------------------------------------------


def _encode(value: Any, tensors: list[torch.Tensor]) -> Json:
    """Encode as JSON: tensors by number, other objects as pickles, collections without their classes."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_encode(entry, tensors) for entry in value]}
    if type(value) in (type(None), bool, int, float, str):
        return {"plain": value}
    try:
        pickled = pickle.dumps(value)
    except Exception as error:
        raise _refusal(f"an object of {type(value).__name__}", f"cannot be pickled ({error})") from error
    tensors.append(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
    return {"pickled": len(tensors) - 1}


def _decode(value: Json, tensors: Sequence[torch.Tensor], like: Any) -> Any:
    """Inverse of :func:`_encode`; mappings and tuples take their classes from ``like``, this rank's output."""
    ((kind, item),) = value.items()
    if kind == "tensor":
        return tensors[item]
    if kind == "pickled":
        pickled = tensors[item].cpu()
        return pickle.loads(ctypes.string_at(pickled.data_ptr(), pickled.numel()))
    if kind == "dict":
        own = like if isinstance(like, Mapping) else {}
        pairs = [(_decode(key, tensors, None), entry) for key, entry in item]
        example = next(iter(own.values()), None)  # for keys that differ between parts
        return rebuild_mapping(own, {key: _decode(entry, tensors, own.get(key, example)) for key, entry in pairs})
    if kind in ("list", "tuple"):
        models = list(like) if isinstance(like, list | tuple) else []
        examples = itertools.chain(models, itertools.repeat(models[-1] if models else None))
        entries = [_decode(entry, tensors, example) for entry, example in zip(item, examples, strict=False)]
        same = isinstance(like, list if kind == "list" else tuple)
        return rebuild_sequence(like, entries) if same else entries if kind == "list" else tuple(entries)
    return item
