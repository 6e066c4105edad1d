"""Settings that cannot be are refused where they are given, with the rule, the value and the remedy."""

from __future__ import annotations

import importlib
import shlex
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from test_environment import without
from torch import nn

from ddp_callbacks import DiLoCo, GradientSynchronizer, LocalSGD, Preemption, join_process_group, spawn
from ddp_callbacks.cluster.environment import worker_env
from ddp_callbacks.cluster.schedulers import hosts_of_job
from ddp_callbacks.comm.agreement import module_settings
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.hosts import parse_hostfile, parse_hosts
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.torchbearer import AllReduceGradients, DDPCallback, Resume, ShardData

Row = tuple[Any, ...]  # what is given (arguments by name, or a text), and parts of the message

SLURM = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2),2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


ENVIRONMENTS: list[Row] = [
    (without("WORLD_SIZE"), "must be set together", "RANK=5", "WORLD_SIZE is not", "torchrun", "unset RANK"),
    (without("RANK"), "must be set together", "WORLD_SIZE=8", "RANK is not", "torchrun", "unset WORLD_SIZE"),
    (without(RANK="five"), "RANK must be a whole number", "RANK='five'"),
    (without(MASTER_PORT="http"), "MASTER_PORT must be a whole number", "MASTER_PORT='http'"),
    (without(RANK="8"), "rank must lie in [0, world_size)", "rank 8 in a world of 8", "from 0 to 7"),
    (without(LOCAL_RANK="-1"), "local_rank must not be negative", "got -1"),
    (without("MASTER_ADDR"), "needs an address", "host None", "port 29511", "MASTER_ADDR", "torchrun", "pass host"),
    (without("MASTER_PORT"), "needs an address", "host 'node0'", "port None", "MASTER_PORT"),
    (without(MASTER_PORT="65536"), "port must lie in [1, 65535]", "got 65536"),
    (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        *("OMPI_COMM_WORLD_SIZE=4", "several hosts", "mpirun -x MASTER_ADDR=", "-genv MASTER_ADDR"),
    ),
]
JOBS: list[Row] = [
    ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2"}, "SLURM_TASKS_PER_NODE='4(x2' cannot be parsed at '4(x2'"),
    ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, "is not of the 3 nodes of the job. Start ddprun without srun"),
    ({"LSB_MCPU_HOSTS": "hostA 4 hostB"}, "LSB_MCPU_HOSTS='hostA 4 hostB' must hold pairs"),
    ({"LSB_MCPU_HOSTS": "hostA 0"}, "LSB_MCPU_HOSTS='hostA 0' must hold pairs"),
    ({"PBS_NODEFILE": "/dev/null"}, "PBS_NODEFILE='/dev/null' names no host"),
    ({"PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE='/nowhere' cannot be read: ", "No such file"),
]
LAZY: list[Row] = [({}, "parameter 0.weight has no shape yet, as its module is lazy", "Pass one batch")]
JOINS: list[Row] = [
    ({"rank": 1}, "given together", "rank=1", "world_size=None"),
    ({"world_size": 2, "host": "a"}, "given together", "rank=None", "world_size=2"),
    ({"host": "node0"}, "given together", "host='node0'", "torchrun"),
    ({"rank": "0", "world_size": 2, "host": "a"}, "rank must be an int", "'0' of type str", "type=int"),
    ({"rank": 0, "world_size": 2, "host": "a", "port": "80"}, "port must be an int", "'80'", "type=int"),
    ({"rank": True, "world_size": 2, "host": "a"}, "rank must be an int", "True of type bool"),
    ({"rank": 2, "world_size": 2, "host": "a"}, "rank must lie in [0, world_size)", "rank 2", "from 0 to 1"),
    ({"rank": -1, "world_size": 2, "host": "a"}, "rank must lie in [0, world_size)", "rank -1"),
    ({"rank": 0, "world_size": 0}, "world_size must be at least 1", "got 0"),
    ({"rank": 1, "world_size": 2}, "needs an address to meet at", "address of rank 0", "the same on every process"),
    ({"rank": 0, "world_size": 2, "host": "a", "port": 0}, "port must lie in [1, 65535]", "got 0"),
    ({"backend": "mpi"}, "needs a torch that was built with MPI", "mpi4py", "leave out backend", "mpirun"),
]
METHODS = "init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"
SPAWNS: list[Row] = [
    ({"nprocs": 0}, "nprocs and nnodes must be at least 1, got nprocs=0"),
    ({"nprocs": 1, "nnodes": 2, "node_rank": 2}, "node_rank must lie in [0, nnodes), got 2 of 2"),
    ({"nprocs": 1, "nnodes": 2}, "2 nodes need an address to meet at: set MASTER_ADDR, or pass"),
    ({"nprocs": 2, "init_method": "tcp://nowhere"}, METHODS),
    ({"nprocs": 2, "init_method": "file://relative"}, METHODS),
]
LIMITS: list[Row] = [
    ({"time_limit": limit}, "time_limit must be a timedelta longer than zero, or None, got ")
    for limit in (timedelta(0), 60)
]
INTERVALS: list[Row] = [
    ({"every": every}, "every must be a positive number of training batches") for every in (0, True, 1.5, timedelta(0))
]


def hook_of_one_argument(bucket: Any) -> Any:
    raise AssertionError


def torchs_hook(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        return getattr(importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}"), name)


HOOKS: list[tuple[Any, ...]] = [
    ("fp16", "comm_hook must be callable as hook(state, bucket)", "'fp16'"),
    (hook_of_one_argument, "hook(state, bucket)", "hook_of_one_argument has the signature (bucket"),
    (
        torchs_hook("ddp_zero_hook", "hook_with_zero_step"),
        *("hook_with_zero_step needs DistributedDataParallel", "ZeroRedundancyOptimizer"),
    ),
    (
        torchs_hook("optimizer_overlap_hooks", "_hook_then_optimizer"),
        *("_hook_then_optimizer needs DistributedDataParallel", "runs the optimizer"),
    ),
    (
        torchs_hook("mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook"),
        *("needs DistributedDataParallel", "use bf16_compress_hook instead"),
    ),
]
TRIALS: list[Row] = [
    ({"skip_batch": "any"}, 'skip_batch must be None or "non_finite" in a Trial'),
    ({"skip_batch": "non_finite", "sync": DiLoCo(every=8)}, "they do not meet in each step"),
    ({"on_divergence": "warn"}, 'on_divergence must be "raise" or "repair", got \'warn\''),
    ({"batch_size": "globl"}, '"global"', '"per_process"', "got 'globl'"),
    ({"batch_size": 64}, 'batch_size must be "global"', "got 64"),
    ({"reduction": "average"}, 'reduction must be "mean", "sum" or None', "'average'"),
    ({"weight": 0.5}, "weight must be a function of the Trial's state", "0.5"),
    ({"bucket_cap_mb": -25}, "bucket_cap_mb must be positive", "got -25"),
    ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be positive", "got nan"),
    ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be", "'25'"),
    ({"sync": 8}, 'sync must be "every_step", LocalSGD'),
    ({"sync": LocalSGD(8), "comm_hook": print}, "a comm_hook sums gradients"),
    ({"sync": LocalSGD(8), "reduction": "sum"}, "local steps, which would be shorter", 'reduction="mean"'),
    ({"sync": LocalSGD(8), "bucket_cap_mb": -1}, "bucket_cap_mb must be positive"),
    *(({"comm_hook": hook}, *says) for hook, *says in HOOKS),
]
NO_BUCKET = {"bucket_cap_mb": 0}, "bucket_cap_mb must be positive, got 0"


# --- command lines ----------------------------------------------------------------------------------------------------


def plan(text: str) -> Any:
    return parse_options(shlex.split(text), {}, lambda name: name == "here")


DDPRUN: list[Row] = [
    ("", "name a script to run: ddprun train.py. See ddprun --help."),
    (
        "--lr 1 train.py",
        "unknown flag --lr: neither ddprun nor torchrun has it. If it belongs to your script, put it "
        "after the script. See ddprun --help.",
    ),
    ("--logs train.py", "unknown flag --logs:"),
    ("--nproc-per-nodes=2 t.py", "nor torchrun has it. Did you mean --nproc-per-node? See ddprun --help."),
    ("-H a,a t.py", "-H a,a: a is named twice. Name it once, with all its slots."),
    ("-H a --hostfile f t.py", "-H and --hostfile both name the nodes. Use one of them."),
    ("--hostfile /no/file t.py", "cannot read the host file /no/file: "),
    ("-x NO_SUCH t.py", "-x NO_SUCH: no such variable is set here. Set it, or write -x NO_SUCH=VALUE."),
    ("-x NO_SUCH_* t.py", "-x NO_SUCH_*: no variable with such a name is set here. Set one, or leave it out."),
    ("-x =1 t.py", "-x takes NAME or NAME=VALUE, got '=1'."),
    ("-x 'A B=3' t.py", "-x takes NAME or NAME=VALUE, got 'A B=3'."),
    ("-x PWD,HOME t.py", "-x takes NAME or NAME=VALUE, got 'PWD,HOME'. Each variable has an -x."),
    ("-x RANK=7 t.py", "-x RANK: ddprun sets it for each process."),
    ("--show-ranks 0-3 t.py", "argument --show-ranks: takes rank numbers separated by commas, or all, got '0-3'. See"),
    (
        "--nproc-per-node 0 t.py",
        "argument --nproc-per-node/--nproc_per_node: takes a number of at least 1, auto, cpu, gpu or xpu, got '0'. See",
    ),
    (
        "--nproc-per-node many t.py",
        "--nproc_per_node: takes a number of at least 1, auto, cpu, gpu or xpu, got 'many'. See",
    ),
    ("--nnodes 0 t.py", "argument --nnodes: takes a number of at least 1, or MIN:MAX, got '0'. See"),
    ("--nnodes 3 -H a,b t.py", "--nnodes 3 does not match the number of nodes, 2. Name the nodes with -H"),
    (
        "--max-restarts -1 t.py",
        "--max_restarts: takes a whole number that is not negative, got '-1'. See",
    ),
    (
        "--node-rank 1 -H a,b t.py",
        "ddprun has no --node-rank: start ddprun once, for all nodes (-H or",
    ),
    ("-n2 t.py", "ddprun has no -n: it counts all processes. Name those of each node: --nproc-per-node N, or"),
    ("-np 4 -H n1:2,n2:2 t.py", "ddprun has no -np: it counts all processes. Name those of each node: --nproc"),
    ("-c 'print(1)'", "ddprun has no -c: name a file"),
    ("--num_processes 2 t.py", "ddprun has no --num_processes: write --nproc-per-node N"),
    ("--tee 3 t.py", "ddprun has no --tee: the output of every rank is saved in --log-dir; --show-ranks"),
    ("--gpus=2 t.py", "ddprun has no --gpus: write --nproc-per-node N"),
    ("--host n1,n2 t.py", "ddprun has no --host: write -H node1,node2"),
    ("--ssh-port 2222 -H n1 t.py", "set a node's port in your ~/.ssh/config, or write --rsh 'ssh -p 2222'."),
    ("--mca btl tcp t.py", "ddprun has no --mca: ssh or --rsh reaches the nodes"),
    ("--bind socket t.py", "argument --bind: takes none, core, numa, got 'socket'. See ddprun --help."),
    (
        "-H a -x CUDA_VISIBLE_DEVICES=GPU-7ef t.py",
        "-x CUDA_VISIBLE_DEVICES: GPU-7ef names devices of one machine, which the other nodes do not have. Give their "
        "numbers: -x CUDA_VISIBLE_DEVICES=0,1",
    ),
    ("-H /etc/hosts t.py", "-H /etc/hosts is a file. Write --hostfile /etc/hosts."),
    ("-m --no-python t", "--module and --no-python cannot be combined."),
    (
        "--rdzv-backend etcd t.py",
        "ddprun has no --rdzv-backend: the nodes meet at the first one; --master-addr",
    ),
    ("--requeue t.py", "--requeue needs a Slurm, PBS or LSF job. Elsewhere, --max-restarts starts again."),
    (
        "--keep-going --max-restarts 1 t.py",
        "--keep-going and --max-restarts both say what follows when a process is lost: ",
        "Use one of them.",
    ),
    ("--heartbeat-timeout 0 t.py", "argument --heartbeat-timeout: takes seconds, at least 2, got '0'. See"),
    ("--grace -1 t.py", "argument --grace: takes a positive number of seconds, got '-1'. See ddprun"),
    ("--grace 90 --time-limit 60 t.py", "--time-limit must be longer than --grace (90 s), got 60."),
    ("--time-limit soon t.py", "argument --time-limit: takes a positive number of seconds, got 'soon'. See ddprun"),
    ("--rsh 'none-such {host}' t.py", "--rsh: program 'none-such' not found"),
    ("--rsh /bin/pbs_tmrsh t.py", "--rsh: /bin/pbs_tmrsh passes on"),
    ("--rsh '' t.py", "--rsh: program '' not found"),
    ("""--rsh "a 'b" t.py""", 'argument --rsh: invalid split value: "a \'b". See'),
    (
        "--master-port 65536 t.py",
        "--master_port: takes a port up to 65535, got '65536'. See",
    ),
]
HOSTS: list[Row] = [
    ("", "-H : '' is not a host. Write HOST or HOST:SLOTS"),
    ("node1,,node2", "'' is not a host"),
    ("node1:4,node1:2", "node1 is named twice. Name it once, with all its slots"),
    ("node1:0", "the slots of node1 must be a number of at least 1, got '0'"),
    ("node1:", "at least 1, got ''"),
    ("node1:²", "at least 1, got '²'"),
    ("fe80::1", "write an IPv6 address in brackets, got 'fe80::1': [fe80::1]"),
    ("-oProxyCommand=evil", "'-oProxyCommand=evil' is not a host"),
    ("node1;reboot", "'node1;reboot' is not a host"),
    ("node 1", "'node 1' is not a host"),
]
HOSTFILES: list[Row] = [
    ("# nothing\n\n", "hosts: no host given"),
    ("node1 slots=4\nnode2 slot=4", "hosts, line 2: cannot parse 'slot=4'. Write HOST slots=N"),
    ("node1 4", "hosts, line 1: cannot parse '4'"),
    ("\nnode1 slots=no", "hosts, line 2: the slots of node1 must be a number of at least 1, got 'no'"),
    ("node1:2 slots=4", "hosts, line 1: slots is given twice"),
    ("node1\nnode2\nnode1 slots=2", "hosts: node1 is named twice"),
    ("node1 chdir='/data", 'hosts, line 1: No closing quotation: "node1 chdir=\'/data"'),
]

TABLE: dict[str, tuple[Callable[..., Any], list[Row]]] = {
    "variables": (lambda **environ: worker_env(environ=environ), ENVIRONMENTS),
    "variables of a job": (lambda **environ: hosts_of_job(environ), JOBS),
    "join_process_group": (join_process_group, JOINS),
    "spawn": (partial(spawn, print), SPAWNS),
    "Preemption": (Preemption, LIMITS),
    "Resume": (partial(Resume, "run.pt"), INTERVALS),
    "DDPCallback": (DDPCallback, TRIALS),
    "AllReduceGradients": (AllReduceGradients, [NO_BUCKET]),
    "ShardData": (ShardData, [({"batch_size": "globl"}, "globl")]),
    "GradientSynchronizer": (partial(GradientSynchronizer, nn.Linear(1, 1)), [NO_BUCKET]),
    "a lazy module": (lambda: module_settings(nn.Sequential(nn.LazyLinear(2))), LAZY),
    "ddprun": (plan, DDPRUN),
    "-H": (parse_hosts, HOSTS),
    "host file": (lambda text: parse_hostfile(text, "hosts"), HOSTFILES),
}
ROWS = [
    pytest.param(who, given, says, id=f"{name}: {says[0]}")
    for name, (who, rows) in TABLE.items()
    for given, *says in rows
]


@pytest.mark.parametrize(("who", "given", "says"), ROWS)
def test_a_setting_that_cannot_be_is_refused(who: Callable[..., Any], given: Any, says: list[str]) -> None:
    """An error names impossible settings, command lines and hosts, and their remedy."""
    with pytest.raises(ValueError) as caught:
        who(given) if isinstance(given, str) else who(**given)
    assert isinstance(caught.value, ConfigurationError)
    missing = [part for part in says if part not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"
