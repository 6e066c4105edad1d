"""Which parameters travel together: every one once, one kind per bucket, sizes kept, the order fixed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_callbacks.gradients.buckets import FIRST_BUCKET_MB, MB, Forecast, assign_buckets

CPU = torch.device("cpu")
KB = MB // 1024


@dataclass(frozen=True)
class Parameter:
    """What decides a parameter's bucket, on devices that there are not."""

    size: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def numel(self) -> int:
        return self.size


specs_strategy = st.lists(
    st.builds(
        Parameter,
        size=st.one_of(st.integers(0, 2000), st.integers(0, 2_000_000)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex128]),
        device=st.sampled_from([CPU, torch.device("cuda", 0), torch.device("cuda", 1)]),
        requires_grad=st.booleans(),
    ),
    max_size=40,
)
caps_strategy = st.floats(1e-6, 100.0)


def sized(*kilobytes: float, trainable: bool = True, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [Parameter(int(size * KB / dtype.itemsize), dtype, CPU, trainable) for size in kilobytes]


@settings(max_examples=100, deadline=None)
@given(specs_strategy, caps_strategy)
def test_every_parameter_is_in_one_bucket_of_its_kind_in_the_reverse_of_registration(
    specs: list[Any], cap: float
) -> None:
    """Every bucket holds one dtype and device."""
    buckets = assign_buckets(specs, cap)
    assert sorted(itertools.chain(*buckets)) == list(range(len(specs)))
    assert all(buckets)
    for bucket in buckets:
        assert len({kind_of(specs[i]) for i in bucket}) == 1
    for of_kind in by_kind(specs, buckets):
        indices = [*itertools.chain(*of_kind)]
        assert indices == sorted(indices, reverse=True)
    again: list[Any] = [replace(spec, device=torch.device(str(spec.device))) for spec in specs]
    assert assign_buckets(again, cap) == buckets  # by the parameters alone


def nbytes_of(spec: Parameter) -> int:
    return spec.size * spec.dtype.itemsize


def kind_of(spec: Parameter) -> tuple[Any, ...]:
    return spec.dtype, spec.device, spec.requires_grad


def by_kind(specs: list[Any], buckets: list[list[int]]) -> list[list[list[int]]]:
    kinds = dict.fromkeys(kind_of(specs[bucket[0]]) for bucket in buckets)
    return [[bucket for bucket in buckets if kind_of(specs[bucket[0]]) == kind] for kind in kinds]


@settings(max_examples=50, deadline=None)
@given(specs_strategy, caps_strategy)
def test_a_bucket_is_closed_by_the_parameter_that_reaches_the_cap(specs: list[Any], cap: float) -> None:
    """Buckets close at `bucket_cap_mb`, the first at 1 MiB."""
    for buckets in by_kind(specs, assign_buckets(specs, cap)):
        for position, bucket in enumerate(buckets):
            limit = (min(cap, FIRST_BUCKET_MB) if position == 0 else cap) * MB
            assert sum(nbytes_of(specs[i]) for i in bucket[:-1]) < limit
            if position < len(buckets) - 1:
                assert sum(nbytes_of(specs[i]) for i in bucket) >= limit


@pytest.mark.parametrize(
    ("specs", "cap", "expected"),
    [
        pytest.param(sized(10, 10, 10), 25, [[2, 1, 0]], id="small ones share a bucket"),
        pytest.param(sized(10, 10, 10), 11 / 1024, [[2, 1], [0]], id="the one that reaches the cap is in"),
        pytest.param(sized(1, 5000, 1), 2, [[2, 1], [0]], id="a large one closes its bucket"),
        pytest.param(sized(1500, 1500, 700, 700), 25, [[3, 2], [1, 0]], id="the first is closed at 1 MiB already"),
        pytest.param(sized(0, 0), 1e-6, [[1, 0]], id="parameters without elements reach nothing"),
        pytest.param(sized(1) + sized(1, dtype=torch.float64) + sized(1), 25, [[2, 0], [1]], id="dtypes do not mix"),
        pytest.param(sized(1) + sized(1, trainable=False) + sized(1), 25, [[2, 0], [1]], id="frozen ones are apart"),
        pytest.param(
            sized(2000) + sized(2000, dtype=torch.float64) + sized(1),
            1,
            [[1], [2, 0]],
            id="a bucket that fills first goes first",
        ),
    ],
)
def test_examples(specs: list[Any], cap: float, expected: list[list[int]]) -> None:
    assert assign_buckets(specs, cap) == expected


@pytest.mark.parametrize(
    "pattern", [[(0, 1)], [(0,), (1,)], [(0,), (0,), (1,)], [(0,), (0,), (0,), (1,)], [(0,), (1,), (0, 1)]]
)
def test_what_follows_is_guessed_from_what_followed_before(pattern: list[tuple[int, ...]]) -> None:
    """Backwards predict what the next one sends."""
    forecast, guesses = Forecast((0, 1)), []
    for filled in pattern * 8:
        guesses.append(forecast.guess)
        forecast.note(filled)
    assert guesses[-4 * len(pattern) :] == pattern * 4
