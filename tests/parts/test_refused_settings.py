"""Settings that cannot be are refused where they are given, with the rule, the value and the remedy."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch import nn

from ddp_callbacks import DiLoCo, GradientSynchronizer, Preemption, join_process_group, spawn
from ddp_callbacks.environment import worker_env
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.schedulers import hosts_of_job
from ddp_callbacks.torchbearer import AllReduceGradients, DDPCallback, ShardData

Row = tuple[dict[str, Any], list[str]]  # arguments, and what the message says of them

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}
SLURM = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2),2"}


def without(*names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in (TORCHRUN | changed).items() if name not in names}


ENVIRONMENTS: list[tuple[dict[str, str], list[str]]] = [
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
JOBS: list[tuple[dict[str, str], list[str]]] = [
    ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2"}, ["SLURM_TASKS_PER_NODE='4(x2' cannot be parsed at '4(x2'"]),
    ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, ["lists 2 nodes, SLURM_JOB_NODELIST='a,b,c' 3"]),
    *(
        ({"LSB_MCPU_HOSTS": pairs}, [f"LSB_MCPU_HOSTS='{pairs}' must hold pairs"])
        for pairs in ("hostA", "hostA 4 hostB", "hostA four", "hostA 0")
    ),
]
JOINS: list[Row] = [
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
    ({"backend": "mpi"}, ["needs a torch that was built with MPI", "mpi4py", "leave out backend", "mpirun"]),
]
METHODS = "init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"
SPAWNS: list[Row] = [
    ({"nprocs": 0}, ["nprocs and nnodes must be at least 1, got nprocs=0"]),
    ({"nprocs": 1, "nnodes": 2, "node_rank": 2}, ["node_rank must lie in [0, nnodes), got 2 of 2"]),
    ({"nprocs": 1, "nnodes": 2}, ["2 nodes need an address to meet at: set MASTER_ADDR, or pass"]),
    ({"nprocs": 2, "init_method": "tcp://nowhere"}, [METHODS]),
    ({"nprocs": 2, "init_method": "file://relative"}, [METHODS]),
]
LIMITS: list[Row] = [
    ({"time_limit": limit}, ["time_limit must be a timedelta longer than zero, or None, got "])
    for limit in (timedelta(0), 60, "04:00:00")
]


def hook_of_one_argument(bucket: Any) -> Any:
    raise AssertionError


def torchs_hook(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        return getattr(importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}"), name)


TRIALS: list[Row] = [
    ({"skip_batch": "any"}, ['skip_batch must be None or "non_finite" in a Trial']),
    ({"skip_batch": "non_finite", "sync": DiLoCo(every=8)}, ["they do not meet in each step"]),
    ({"batch_size": "globl"}, ['"global"', '"per_process"', "got 'globl'"]),
    ({"batch_size": 64}, ['batch_size must be "global"', "got 64"]),
    ({"reduction": "average"}, ['reduction must be "mean", "sum" or None', "'average'"]),
    ({"reduction": "none"}, ['reduction must be "mean", "sum" or None', "'none'"]),
    ({"weight": 0.5}, ["weight must be a function of the Trial's state", "0.5"]),
    ({"bucket_cap_mb": 0}, ["bucket_cap_mb must be positive", "got 0"]),
    ({"bucket_cap_mb": -25}, ["bucket_cap_mb must be positive", "got -25"]),
    ({"bucket_cap_mb": float("nan")}, ["bucket_cap_mb must be positive", "got nan"]),
    ({"bucket_cap_mb": "25"}, ["bucket_cap_mb must be", "'25'"]),
    ({"comm_hook": "fp16"}, ["comm_hook must be callable as hook(state, bucket)", "'fp16'"]),
    (
        {"comm_hook": hook_of_one_argument},
        ["hook(state, bucket)", "hook_of_one_argument has the signature (bucket"],
    ),
    (
        {"comm_hook": torchs_hook("ddp_zero_hook", "hook_with_zero_step")},
        ["hook_with_zero_step needs DistributedDataParallel", "ZeroRedundancyOptimizer"],
    ),
    (
        {"comm_hook": torchs_hook("optimizer_overlap_hooks", "_hook_then_optimizer")},
        ["_hook_then_optimizer needs DistributedDataParallel", "runs the optimizer"],
    ),
    (
        {"comm_hook": torchs_hook("mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook")},
        ["needs DistributedDataParallel", "use bf16_compress_hook instead"],
    ),
]
NO_BUCKET: Row = ({"bucket_cap_mb": 0}, ["bucket_cap_mb must be positive, got 0"])


def of(who: Callable[..., Any], rows: list[Row]) -> list[Any]:
    """A test of each row, named after who refuses it and what is said first."""
    return [pytest.param(who, arguments, says, id=f"{who.__name__} {says[0]}") for arguments, says in rows]


def environ_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(**environ: str) -> Any:
        return function(environ=environ)

    read.__name__ = function.__name__
    return read


@pytest.mark.parametrize(
    ("who", "arguments", "says"),
    [
        *of(environ_of(worker_env), ENVIRONMENTS),
        *of(environ_of(hosts_of_job), JOBS),
        *of(join_process_group, JOINS),
        *of(spawn, SPAWNS),
        *of(Preemption, LIMITS),
        *of(DDPCallback, TRIALS),
        *of(AllReduceGradients, [NO_BUCKET]),
        *of(ShardData, [({"batch_size": "globl"}, ["globl"])]),
        *of(GradientSynchronizer, [NO_BUCKET]),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    who: Callable[..., Any], arguments: dict[str, Any], says: list[str]
) -> None:
    """An error names impossible settings and their remedy."""
    places = {spawn: [print], GradientSynchronizer: [nn.Linear(1, 1)]}
    with pytest.raises(ValueError) as caught:
        who(*places.get(who, []), **arguments)
    assert isinstance(caught.value, ConfigurationError)
    missing = [part for part in says if part not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"
