"""Gather the outputs of batches that were dealt out whole among the ranks, on every rank and in order."""

from __future__ import annotations

import collections
import io
import itertools
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.comm.checksums import is_dense
from ddp_callbacks.comm.codec import bytes_of
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

OUTPUTS_AT_ONCE = 32  # per rank and message; every rank holds the messages of all ranks

_NO_OUTPUT = object()


def gather_outputs(outputs: Sequence[Any]) -> list[Any]:
    """Return each rank's first output, in the order of the ranks, then each rank's second, and so on. A collective.

    Tensors are sent directly. Anything else is pickled, as in :func:`torch.distributed.all_gather_object`.

    Args:
        outputs: This rank's outputs; the ranks may have different numbers of them.

    Raises:
        ConfigurationError: An output cannot be pickled.
        PeerError: Another rank failed, died or went silent.
    """
    if get_world_size() == 1:
        return list(outputs)
    found: list[Any] = []
    for start in itertools.count(0, OUTPUTS_AT_ONCE):
        own, is_last = outputs[start : start + OUTPUTS_AT_ONCE], start + OUTPUTS_AT_ONCE >= len(outputs)
        tensors: list[torch.Tensor] = []
        gathered = all_gather_object((_pickle(own, tensors), tensors, is_last), "the predictions")
        by_rank = [_unpickle(pickled, parts) for pickled, parts, _ in gathered]
        by_rank[get_rank()] = list(own)
        turns = itertools.zip_longest(*by_rank, fillvalue=_NO_OUTPUT)
        found += [output for turn in turns for output in turn if output is not _NO_OUTPUT]
        if all(is_last for *_, is_last in gathered):
            break
    return found


def _pickle(outputs: Sequence[Any], tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the outputs pickled, as bytes, but append their tensors to ``tensors``."""
    file = io.BytesIO()
    try:
        _Pickler(file, tensors).dump(list(outputs))
    except Exception as error:
        classes = ", ".join(sorted({type(output).__name__ for output in outputs}))
        raise ConfigurationError(
            f"a prediction, of {classes}, cannot be sent to the other processes, as it cannot be pickled "
            f"({error}). Return tensors, or what can be pickled. (In Lightning, "
            "trainer.predict(..., return_predictions=False) sends nothing; writers get each process's batches.)"
        ) from error
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpickle(pickled: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Inverse of :func:`_pickle`."""
    return list(_Unpickler(io.BytesIO(bytes_of(pickled)), tensors).load())


class _Pickler(pickle.Pickler):
    """Keeps tensors out of the pickle, and makes named tuples portable whose class cannot be imported."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or not is_dense(value):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def reducer_override(self, value: Any) -> Any:
        is_named_tuple = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
        if not is_named_tuple or getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value:
            return NotImplemented
        return collections.namedtuple, (value.__name__, value._fields)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._tensors[place]
