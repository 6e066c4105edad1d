"""Whose random numbers steps and samples draw: the option of each host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import HOSTS, Rows, draw_all
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import run_distributed

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackFabricStrategy, CallbackStrategy
from ddp_callbacks.lightning import DDPCallback as LightningCallback
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()


@once
def found(size: int, randomness: str, workers: int = 0) -> list[dict[str, Rows]]:
    return run_distributed(draw_all, size, randomness, workers)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_with_seeds_by_sample_one_process_draws_what_several_draw(size: int, host: str) -> None:
    """`randomness="by_sample"` draws as one process."""
    one, several = found(1, "by_sample")[0], found(size, "by_sample")
    assert_equal(several[0][host], one[host], relative=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize("host", HOSTS)
def test_seeds_by_sample_do_not_depend_on_workers(host: str) -> None:
    assert_equal(found(2, "by_sample", 2)[0][host], found(1, "by_sample")[0][host], relative=1e-12)


@pytest.mark.parametrize("host", HOSTS)
def test_on_one_process_samples_draw_as_without_us_unless_seeded(host: str) -> None:
    plain = found(1, "")[0][host]
    for randomness in ("global", "by_process"):
        assert_equal(found(1, randomness)[0][host], plain, relative=0.0)
    seeded = found(1, "by_sample")[0][host]
    assert not any(torch.equal(seeded[name], plain[name]) for name in plain)


@pytest.mark.parametrize("host", HOSTS)
def test_by_process_the_dropout_of_each_process_differs_from_that_of_one(host: str) -> None:
    apart, together = (found(2, randomness)[0][host] for randomness in ("by_process", "global"))
    assert_equal(together, found(1, "by_sample")[0][host], relative=1e-12)
    assert not torch.allclose(*(next(iter(rows.values())) for rows in (apart, together)), rtol=1e-6)


@pytest.mark.parametrize("make", [CallbackStrategy, LightningCallback, CallbackFabricStrategy, DDPCallback])
def test_an_unknown_randomness_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r'randomness must be "global" .*"by_process" .*, got \'by_rank\'\.'):
        make(randomness="by_rank")
