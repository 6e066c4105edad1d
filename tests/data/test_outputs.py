"""Outputs of whole batches are joined in order: every kind of value, and the ways they travel."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_distributed

from ddp_callbacks.data.outputs import _pickle, gather_outputs
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
    mine = batches(*SIZES)[dist.get_rank() :: dist.get_world_size()]
    rows = [output.rows for output in gather_outputs([of_local_class(batch) for batch in mine])]
    return gather_outputs(list(map(with_objects, mine))), rows, gather_outputs(mine)


SIZES = [*range(1, 80), 3, 5]  # an odd number, in several messages


def test_objects_tensors_and_arrays_of_all_ranks_are_gathered_in_order() -> None:
    """`predict` returns outputs of any class in order."""
    whole = batches(*SIZES)
    for objects, *tensors in run_distributed(gather, 2):
        assert_same(objects, [with_objects(batch) for batch in whole])
        assert_same(tensors, [whole, whole])


def test_outputs_that_cannot_be_sent_are_named_with_their_class() -> None:
    """An error names outputs that `predict` can't send."""
    with pytest.raises(ConfigurationError, match=r"a prediction, of list, cannot be sent .* pickled .*Return tensors"):
        _pickle([[lambda: None]], [])
