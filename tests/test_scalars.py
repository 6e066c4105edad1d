"""Rows of numbers from every rank: of any length, and of what is exchanged alone."""

from __future__ import annotations

import functools
import math
import os
import re
from typing import Any

import pytest
import torch.distributed as dist
from distributed import run_distributed

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.errors import MismatchError

pytestmark = pytest.mark.shares_results()

WORLD_SIZE = 3


def exchange_all(way: str) -> dict[str, Any]:
    os.environ[SWITCH] = "0" if way == "gloo" else "1"
    rank, rows = dist.get_rank(), ScalarExchange()
    unlike = [rank + 0.1] * rank
    long = [rank / 3] * (200 * rank)
    strange = [math.inf, -math.inf, 2.0**53, -0.0, 5e-324] if rank == 1 else [math.nan]
    results = {
        "unlike": rows.exchange(unlike, "a"),
        "long": rows.exchange(long, "b"),
        "long again": rows.exchange(long, "b"),
        "strange": rows.exchange(strange, "c"),
    }
    try:
        rows.exchange([], "the left" if rank else "the right")
    except MismatchError as error:
        results["mismatch"] = str(error)
    return results


@functools.cache
def exchanged(way: str) -> list[dict[str, Any]]:
    return run_distributed(exchange_all, WORLD_SIZE, way)


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_every_rank_gets_every_row(way: str) -> None:
    long = [[rank / 3] * (200 * rank) for rank in range(WORLD_SIZE)]
    for results in exchanged(way):
        assert results["unlike"] == [[], [1.1], [2.1, 2.1]]
        assert results["long"] == results["long again"] == long
        first, second, third = results["strange"]
        assert second == [math.inf, -math.inf, 2.0**53, 0.0, 5e-324]
        assert math.isnan(first[0]) and math.isnan(third[0])


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_ranks_that_exchange_different_things_are_told(way: str) -> None:
    first, *others = (results["mismatch"] for results in exchanged(way))
    assert re.match(
        r"rank 0.* exchanges the right, while rank 1.*, rank 2.* exchange the left\. Every rank must", first
    )
    assert others == [first, first]
