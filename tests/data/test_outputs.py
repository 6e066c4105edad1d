"""Outputs for parts of batches become those for whole ones: every kind of value, and the ways they travel."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_distributed

from ddp_callbacks.data.outputs import gather_outputs, join_outputs
from ddp_callbacks.errors import ConfigurationError


class Pair(NamedTuple):
    mean: torch.Tensor
    name: str


def compute(x: torch.Tensor, dimension: int = 0) -> dict[str, Any]:
    """What a model makes of ``x``: ``[samples, 2]``."""
    return {
        "rows": x * 2,
        "heads and samples": torch.stack([x, x + 1, x + 2]),
        "nodes": x.repeat_interleave(3, 0),
        "array": x.numpy(),
        "strings": numpy.array([f"{value:.0f}" for value in x[:, 0]]),
        "list": [f"row {value:.0f}" for value in x[:, 0]],
        "pair": (x, [float(value) for value in x[:, 0]]),
        "named": Pair(x, "constant"),
        "mean": x.mean(),
        "mean of columns": x.mean(0),
        "number": x.mean().item(),
        "defaults": collections.defaultdict(list, rows=x),
        "by sample": {f"{value:.0f}": value * 3 for value in x[:, 0]},
    }


def batches(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(2.0 * size, dtype=torch.float64).view(size, 2) + 100 * size for size in sizes]


def divide(batch: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [part for part in batch.tensor_split(parts) if len(part)]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    elif isinstance(expected, numpy.ndarray):
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
    else:
        assert found == (pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("sizes", [(8, 8, 5), (7,), (4, 1)])
def test_outputs_of_parts_become_those_of_whole_batches(sizes: tuple[int, ...]) -> None:
    """`predict` joins tensors, arrays, lists, numbers and strings."""
    whole = batches(*sizes)
    parts = [divide(batch, 3) for batch in whole]
    joined = join_outputs([[compute(part) for part in own] for own in parts], [[*map(len, own)] for own in parts])
    for found, batch in zip(joined, whole, strict=True):
        assert_same(found, compute(batch))


def test_a_pair_for_two_samples_stays_a_pair() -> None:
    ((names),) = join_outputs([[("a", "b"), ("c", "d")]], [[2, 2]])
    assert names == ("a", "b", "c", "d")


UNJOINED: dict[str, list[Any]] = {
    r"output\['found'\] has the shapes \[\[2, 7\], \[2, 9\]\] for the parts": [torch.zeros(2, 7), torch.zeros(2, 9)],
    r"output\['found'\] is one set for the whole part": [{1}, {2}],
    r"output\['found'\] has other keys for each part": [{"a": 1, "b": 2}, {"b": 3}],
}


@pytest.mark.parametrize("says", UNJOINED)
def test_outputs_that_cannot_be_joined_are_named_with_their_place(says: str) -> None:
    """An error names outputs that `predict` can't join."""
    with pytest.raises(ConfigurationError, match=says):
        join_outputs([[{"found": part} for part in UNJOINED[says]]], [[2, 2]])


class Day:
    """Of the user's; neither a tensor nor plain data."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Day) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


def of_local_class(x: torch.Tensor) -> Any:
    """As pytorch-forecasting makes its outputs: no pickle finds this class."""
    return collections.namedtuple("Output", ["rows", "names"])(x, [f"{value:.0f}" for value in x[:, 0]])


def with_objects(x: torch.Tensor) -> Any:
    schema = [{"freq": Day(int(value)), "row": row} for value, row in zip(x[:, 0], x, strict=True)]
    return x, schema, {"one for all": Day(3)}, compute(x)


def gather() -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [divide(batch, world_size) for batch in batches(*[5] * 40, 1)]
    sizes = [len(own[rank]) if rank < len(own) else 0 for own in parts]
    mine = [own[rank] if rank < len(own) else own[0] for own in parts]
    rows = [output.rows for output in gather_outputs([of_local_class(part) for part in mine], sizes)]
    return gather_outputs([with_objects(part) for part in mine], sizes), rows


def test_objects_tensors_and_arrays_of_all_ranks_are_gathered_in_order() -> None:
    whole = batches(*[5] * 40, 1)
    for objects, tensors in run_distributed(gather, 2):
        assert_same(objects, [with_objects(batch) for batch in whole])
        assert_same(tensors, whole)
