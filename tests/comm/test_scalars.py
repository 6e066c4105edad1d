"""Rows of numbers from every rank: of any length, and of what is exchanged alone."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from shared_worlds import GLOO, TWO, WIDE, World, by_rank

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.errors import MismatchError

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
STRANGE = [math.inf, -math.inf, 2.0**53, -0.0, 5e-324]


@WORLD.on(TWO, GLOO, WIDE)
def test_every_rank_gets_every_row() -> None:
    """Rows of numbers reach every rank bit for bit."""
    rank, size, rows = dist.get_rank(), dist.get_world_size(), ScalarExchange()
    assert rows.exchange([rank + 0.1] * rank, "a") == [[], [1.1], [2.1, 2.1]][:size]
    for _ in range(2):
        found = rows.exchange([rank / 3] * (200 * rank), "b")
        assert found == [[other / 3] * (200 * other) for other in range(size)]
    first, second, *third = rows.exchange(STRANGE if rank == 1 else [math.nan], "c")
    assert second == STRANGE
    assert all(math.isnan(value) for (value,) in [first, *third])


@WORLD.on(TWO, GLOO, WIDE)
def test_ranks_that_exchange_different_things_are_told() -> None:
    """Ranks that exchange different things raise an error."""
    says = r"rank 0.* exchanges the right, while rank 1.* exchanges? the left\. Every rank must"
    with pytest.raises(MismatchError, match=says) as caught:
        ScalarExchange().exchange([], "the left" if dist.get_rank() else "the right")
    assert by_rank(str(caught.value)) == [str(caught.value)] * dist.get_world_size()
