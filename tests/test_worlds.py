"""The processes that tests/cuda computes with, on CPUs: they answer, survive nothing, and are replaced."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_bodies
import pytest
import torch
import torch.distributed as dist
import worlds
from device_failures import assert_named, my_rank, train_until
from nursery import free_port
from worlds import Fresh, World, WorldFailed, why_not


def say_who(number: int) -> dict[str, Any]:
    print("printed by", my_rank())
    return {"pid": os.getpid(), "numbers": [torch.tensor(number + my_rank())]}


def raise_on_rank_1() -> None:
    if my_rank() == 1:
        raise ValueError("sensor 7 gave nothing")
    dist.barrier()


def take_too_long() -> None:
    time.sleep(600)


@pytest.mark.cold
def test_a_world_runs_bodies_in_the_same_processes_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "GRACE", 3.0)
    world = World("cpu", tmp_path)
    try:
        first, second = world.run(say_who, 5)
        assert [int(found["numbers"][0]) for found in (first, second)] == [5, 6]
        assert [found["pid"] for found in world.run(say_who, 1)] == [first["pid"], second["pid"]] == world.pids()
        world.run(device_bodies.ragged_batches, "cpu")
        with pytest.raises(WorldFailed) as raised:
            world.run(raise_on_rank_1)
        assert "ValueError: sensor 7 gave nothing" in str(raised.value) and "'failed']" in str(raised.value)
        assert "printed by" not in str(raised.value), "of an earlier body"
        assert world.pids() == []
        with pytest.raises(WorldFailed, match="in take_too_long"):
            world.run(take_too_long, deadline=1.0)
        assert world.run(say_who, 1)[0]["pid"] not in (first["pid"], second["pid"])
        assert why_not(world, device_bodies.a_sum, "cpu") == ""
    finally:
        world.close()


@pytest.mark.cold
def test_fresh_ranks_fail_as_forked_ones_do(tmp_path: Path) -> None:
    assert_named(Fresh("cpu").run_watched(train_until, 2, tmp_path, "cpu", "is killed", 1, True), "is killed", 30.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "a_sum on nccl: ['failed', 'failed']\nh:1:2 [0] init.cc:9 NCCL WARN Duplicate GPU detected : rank 0\nmore",
            "h:1:2 [0] init.cc:9 NCCL WARN Duplicate GPU detected : rank 0",
        ),
        ("a_sum on nccl: no answer in 80 s", "a_sum on nccl: no answer in 80 s"),
    ],
)
def test_why_nccl_refuses_is_said_in_its_own_words(text: str, reason: str) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise WorldFailed(text)

    world: Any = SimpleNamespace(run=run)
    assert why_not(world, device_bodies.a_sum) == reason


def test_a_world_that_cannot_join_is_a_failure_and_no_reason_to_skip() -> None:
    def run(*_: Any, **__: Any) -> None:
        raise WorldFailed("the start on nccl: ['ended with 1', 'ended with 1']\nTypeError: join_process_group()")

    world: Any = SimpleNamespace(run=run)
    with pytest.raises(WorldFailed, match="TypeError"):
        why_not(world, device_bodies.a_sum)


def test_two_ranks_on_a_gpu_believe_in_two_hosts() -> None:
    first, second = (worlds.environment("nccl", rank, 2, free_port()) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert "NCCL_HOSTID" not in worlds.environment("gloo", 0, 2, 1)
