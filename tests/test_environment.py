"""Who am I: torchrun's variables or explicit arguments; each mistake is a ValueError that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_callbacks import WorkerEnv, join_process_group
from ddp_callbacks.environment import DEFAULT_PORT, worker_env
from ddp_callbacks.errors import ConfigurationError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}


def without(*names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in (TORCHRUN | changed).items() if name not in names}


def test_torchruns_variables_are_read() -> None:
    assert worker_env(environ=TORCHRUN) == WorkerEnv(5, 8, local_rank=1, host="node0", port=29511)
    assert WorkerEnv.from_environ(without("LOCAL_RANK")).local_rank == 0


@pytest.mark.parametrize("environ", [{}, {"RANK": "", "WORLD_SIZE": ""}, {"MASTER_ADDR": "node0"}, {"LOCAL_RANK": "3"}])
def test_without_a_launcher_it_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert worker_env(environ=environ) == WorkerEnv(rank=0, world_size=1, local_rank=0, host=None, port=None)


def test_a_world_of_one_needs_no_address() -> None:
    assert worker_env(environ={"RANK": "0", "WORLD_SIZE": "1"}) == WorkerEnv()
    assert worker_env(0, 1, environ={}) == WorkerEnv()


def test_explicit_arguments_win_over_the_environment() -> None:
    assert worker_env(0, 2, "10.0.0.1", 4000, environ=TORCHRUN) == WorkerEnv(0, 2, 1, "10.0.0.1", 4000)
    assert worker_env(rank=0, world_size=2, host="127.0.0.1", environ={}).port == DEFAULT_PORT == 29500


# Each: the environment, and what the message must hold: the rule, the value seen, the remedy.
BROKEN_ENVIRONMENTS: list[tuple[dict[str, str], list[str]]] = [
    (without("WORLD_SIZE"), ["must be set together", "RANK=5", "WORLD_SIZE is not", "torchrun", "unset RANK"]),
    (without("RANK"), ["must be set together", "WORLD_SIZE=8", "RANK is not", "torchrun", "unset WORLD_SIZE"]),
    (without(RANK="five"), ["RANK must be a whole number", "RANK='five'"]),
    (without(WORLD_SIZE="8.0"), ["WORLD_SIZE must be a whole number", "WORLD_SIZE='8.0'"]),
    (without(LOCAL_RANK="gpu1"), ["LOCAL_RANK must be a whole number", "LOCAL_RANK='gpu1'"]),
    (without(MASTER_PORT="http"), ["MASTER_PORT must be a whole number", "MASTER_PORT='http'"]),
    (without(RANK="8"), ["rank must lie in [0, world_size)", "rank 8 in a world of 8", "from 0 to 7"]),
    (without(RANK="-1"), ["rank must lie in [0, world_size)", "rank -1", "from 0 to 7"]),
    (without(WORLD_SIZE="0"), ["world_size must be at least 1", "got 0"]),
    (without(WORLD_SIZE="-2"), ["world_size must be at least 1", "got -2"]),
    (without(LOCAL_RANK="-1"), ["local_rank must not be negative", "got -1"]),
    (without("MASTER_ADDR"), ["needs an address", "host None", "port 29511", "MASTER_ADDR", "torchrun", "pass host"]),
    (without("MASTER_PORT"), ["needs an address", "host 'node0'", "port None", "MASTER_PORT"]),
    (without(MASTER_PORT="0"), ["port must lie in [1, 65535]", "got 0"]),
    (without(MASTER_PORT="65536"), ["port must lie in [1, 65535]", "got 65536"]),
]


@pytest.mark.parametrize(("environ", "says"), BROKEN_ENVIRONMENTS)
def test_a_broken_environment_is_named(environ: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        worker_env(environ=environ)
    assert_says(caught.value, says)


BROKEN_ARGUMENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"rank": 1}, ["given together", "rank=1", "world_size=None"]),
    ({"world_size": 2, "host": "a"}, ["given together", "rank=None", "world_size=2"]),
    ({"host": "node0"}, ["without rank and world_size", "host='node0'", "torchrun"]),
    ({"port": 29511}, ["without rank and world_size", "port=29511"]),
    ({"rank": "0", "world_size": 2, "host": "a"}, ["rank must be an int", "'0' of type str", "type=int"]),
    ({"rank": 0, "world_size": "2", "host": "a"}, ["world_size must be an int", "'2' of type str", "type=int"]),
    ({"rank": 0, "world_size": 2, "host": "a", "port": "80"}, ["port must be an int", "'80'", "type=int"]),
    ({"rank": 0.0, "world_size": 2, "host": "a"}, ["rank must be an int", "0.0 of type float"]),
    ({"rank": True, "world_size": 2, "host": "a"}, ["rank must be an int", "True of type bool"]),
    ({"rank": 2, "world_size": 2, "host": "a"}, ["rank must lie in [0, world_size)", "rank 2", "from 0 to 1"]),
    ({"rank": -1, "world_size": 2, "host": "a"}, ["rank must lie in [0, world_size)", "rank -1"]),
    ({"rank": 0, "world_size": 0}, ["world_size must be at least 1", "got 0"]),
    ({"rank": 0, "world_size": 2}, ["host must be given with rank=0 and world_size=2", "address of rank 0"]),
    ({"rank": 1, "world_size": 2, "port": 4000}, ["host must be given with rank=1", "the same on every process"]),
    ({"rank": 0, "world_size": 2, "host": "a", "port": 70000}, ["port must lie in [1, 65535]", "got 70000"]),
    ({"rank": 0, "world_size": 2, "host": "a", "port": 0}, ["port must lie in [1, 65535]", "got 0"]),
    ({"rank": 0, "world_size": 2, "host": "a", "port": -1}, ["port must lie in [1, 65535]", "got -1"]),
]


@pytest.mark.parametrize(("arguments", "says"), BROKEN_ARGUMENTS)
def test_broken_arguments_are_named_before_anything_is_opened(arguments: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        join_process_group(**arguments)
    assert isinstance(caught.value, ConfigurationError)
    assert_says(caught.value, says)


def test_a_worker_env_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="rank"):
        WorkerEnv(0, 1).rank = 1  # type: ignore[misc]


def assert_says(error: Exception, parts: list[str]) -> None:
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{error!s} does not say {missing}"
