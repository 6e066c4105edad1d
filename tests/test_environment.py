"""Who am I: a launcher's variables or explicit arguments; each mistake is a ValueError that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_callbacks import WorkerEnv, join_process_group
from ddp_callbacks.environment import DEFAULT_PORT, processes_on_host, worker_env
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.schedulers import hosts_of_job

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


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "181403649",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
ORTED_IN_SLURM = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # mpirun starts its daemons by srun
SRUN_PMI2 = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_APID": "99.pbs"}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "42.0",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_JOBID": "99.pbs",
    "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42",  # jsrun starts nothing on the first
}
# CRC-32 of "181403649" is 2682416830, of "42.0" 1413265556, of "99.pbs" 3026040015.
PORT_OPEN_MPI, PORT_SLURM, PORT_PBS = 26830, 25556, 20015

LAUNCHED: list[tuple[dict[str, str], WorkerEnv]] = [
    ({**OPEN_MPI, "MASTER_ADDR": "node0"}, WorkerEnv(3, 4, 1, "node0", PORT_OPEN_MPI)),
    ({**OPEN_MPI, "MASTER_ADDR": "node0", "MASTER_PORT": "4000"}, WorkerEnv(3, 4, 1, "node0", 4000)),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, WorkerEnv(3, 4, 1, "127.0.0.1", PORT_OPEN_MPI)),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, WorkerEnv()),
    ({**OPEN_MPI, **ORTED_IN_SLURM}, WorkerEnv(3, 4, 1, "gpu07", PORT_OPEN_MPI)),
    (MPICH, WorkerEnv(1, 2, 1, "127.0.0.1", 29500)),
    ({**MPICH, "MPI_LOCALNRANKS": "1", "LSB_MCPU_HOSTS": "a 1 b 1", "LSB_JOBID": ""}, WorkerEnv(1, 2, 1, "a", 29500)),
    (SLURM, WorkerEnv(5, 8, 1, "gpu07", PORT_SLURM)),
    (SRUN_PMI2, WorkerEnv(5, 8, 1, "gpu07", PORT_SLURM)),
    ({**SLURM, "SLURM_STEP_NODELIST": "rack[1-2]n[9,11-12],x"}, WorkerEnv(5, 8, 1, "rack1n9", PORT_SLURM)),
    ({**SLURM, "SLURM_STEP_NODELIST": "b,a[1-2]"}, WorkerEnv(5, 8, 1, "b", PORT_SLURM)),
    ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_SLURM)),
    (BATCH_SCRIPT, WorkerEnv()),
    ({**PALS, "PALS_LOCAL_SIZE": "8"}, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_PBS)),
    ({**PALS, "MASTER_ADDR": "node0"}, WorkerEnv(5, 8, 1, "node0", PORT_PBS)),
    (
        {**MPICH, "MPI_LOCALRANKID": "", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        WorkerEnv(1, 2, 1, "127.0.0.1", 29500),
    ),
    (FLUX, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_SLURM)),
    ({**FLUX, "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "node0"}, WorkerEnv(5, 8, 1, "node0", PORT_SLURM)),
    (MVAPICH, WorkerEnv(1, 2, 1, "127.0.0.1", 29500)),
    (JSRUN, WorkerEnv(5, 8, 1, "h1", PORT_PBS)),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, WorkerEnv()),
    (
        {"PMIX_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        WorkerEnv(1, 2, 0, "a", 1),
    ),
    ({**SLURM, **TORCHRUN}, WorkerEnv(5, 8, 1, "node0", 29511)),
]


@pytest.mark.parametrize(("environ", "expected"), LAUNCHED)
def test_the_variables_of_mpi_and_slurm_give_the_place_in_the_world(
    environ: dict[str, str], expected: WorkerEnv
) -> None:
    assert worker_env(environ=environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"PMIX_RANK": "1"},
        {"PALS_RANKID": "1"},
        {"FLUX_TASK_RANK": "1"},
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"},
        {"ALPS_APP_PE": "3"},
    ],
)
def test_processes_of_an_unknown_launcher_do_not_train_alone_in_silence(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        worker_env(environ=environ)
    name, value = next(iter(environ.items()))
    assert_says(caught.value, [f"{name}={value} means", "one of several", "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"])
    assert_says(caught.value, [f"RANK=${name}", "single process: RANK=0 WORLD_SIZE=1"])
    assert worker_env(environ={**environ, "RANK": "0", "WORLD_SIZE": "1"}) == WorkerEnv()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, None),  # its nodes may be one machine
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, False),
        (TORCHRUN, None),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, True),
        (MPICH, False),
        (SLURM, True),
        (FLUX, False),
        ({**PALS, "MASTER_ADDR": "a"}, True),
    ],
)
def test_whether_the_processes_are_on_several_hosts_is_known(environ: dict[str, str], expected: bool | None) -> None:
    assert worker_env(environ=environ).several_hosts is expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 4),
        (TORCHRUN, None),
        ({}, None),
        (OPEN_MPI, 2),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, 3),
        (SLURM, None),  # on several hosts
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, 8),
        (FLUX, 8),
    ],
)
def test_the_number_of_processes_on_this_host_is_known(environ: dict[str, str], expected: int | None) -> None:
    assert processes_on_host(environ) == expected


def test_in_a_pbs_job_rank_0_is_on_the_first_host_of_the_node_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n")
    environ = {**OPEN_MPI, "PMIX_NAMESPACE": "", "PBS_JOBID": "99.pbs", "PBS_NODEFILE": str(nodes)}
    assert worker_env(environ=environ) == WorkerEnv(3, 4, 1, "n1.cluster", PORT_PBS)
    with pytest.raises(ConfigurationError, match=r"PBS_NODEFILE='/nowhere' cannot be read: .*No such file"):
        worker_env(environ={**environ, "PBS_NODEFILE": "/nowhere"})


def test_mpi_on_several_hosts_without_an_address_says_how_to_give_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        worker_env(environ=OPEN_MPI)
    assert_says(
        caught.value, ["OMPI_COMM_WORLD_SIZE=4", "several hosts", "mpirun -x MASTER_ADDR=", "-genv MASTER_ADDR"]
    )


# mpirun is Open MPI's of the system; mpiexec is MPICH's, which its package puts beside Python.
STARTERS = {
    "Open MPI": [
        shutil.which("mpirun.openmpi") or shutil.which("mpirun"),
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "3",
    ],
    "MPICH": [shutil.which("mpiexec", path=str(Path(sys.executable).parent)), "-n", "3"],
}
RANKS_PROGRAM = """
from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import all_gather_json
env = join_process_group()
ranks = all_gather_json([env.rank, env.local_rank], "the ranks")
if env.rank == 0:
    print("ranks", ranks)
"""


@pytest.mark.cold
@pytest.mark.mpi
@pytest.mark.parametrize("name", STARTERS)
def test_processes_that_mpi_starts_find_each_other(name: str) -> None:
    command, *options = STARTERS[name]
    if command is None:
        pytest.skip(f"{name} is not installed")
    environ = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [command, *options, sys.executable, "-c", RANKS_PROGRAM],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks [[0, 0], [1, 1], [2, 2]]\n"


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


def test_a_torch_without_mpi_says_what_works_instead() -> None:
    with pytest.raises(ConfigurationError) as caught:
        join_process_group(backend="mpi")
    assert_says(
        caught.value, ['backend="mpi" needs a torch that was built with MPI', "mpi4py", "leave out backend", "mpirun"]
    )


def test_a_worker_env_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="rank"):
        WorkerEnv(0, 1).rank = 1  # type: ignore[misc]


def assert_says(error: Exception, parts: list[str]) -> None:
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{error!s} does not say {missing}"


# --- the hosts of a job -----------------------------------------------------------------------------------------------


def test_outside_a_job_there_are_no_hosts() -> None:
    assert hosts_of_job({}) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("n1\nn1\nn2\nn2\nn2\n", [("n1", 2), ("n2", 3)]),
        ("n1.cluster\nn2.cluster\n", [("n1.cluster", None), ("n2.cluster", None)]),
    ],
)
def test_hosts_of_a_pbs_job(tmp_path: Path, lines: str, expected: list[tuple[str, int | None]]) -> None:
    (tmp_path / "nodes").write_text(lines)
    assert hosts_of_job({"PBS_NODEFILE": str(tmp_path / "nodes")}) == expected


def test_a_pbs_node_file_that_says_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("\n")
    for path, says in ((tmp_path / "nodes", "names no host"), (tmp_path / "none", "cannot be read: .*No such file")):
        with pytest.raises(ConfigurationError, match=f"PBS_NODEFILE='.*{path.name}' {says}"):
            hosts_of_job({"PBS_NODEFILE": str(path)})


JOB = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2),2"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [("a", 4), ("b", 4), ("c", 2)]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_NTASKS": "3"}, [("a", None), ("b", None), ("c", None)]),
        ({"SLURM_NTASKS": ""}, [("a", None), ("b", None), ("c", None)]),
    ],
)
def test_hosts_of_a_slurm_job(changed: dict[str, str], expected: list[tuple[str, int | None]]) -> None:
    assert hosts_of_job({**JOB, **changed}) == expected


def test_slurms_own_program_expands_its_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bracketed = {**JOB, "SLURM_JOB_NODELIST": "gpu[07-09]"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"SLURM_JOB_NODELIST='gpu\[07-09\]' needs the program scontrol"):
        hosts_of_job(bracketed)
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-09]" ] && printf "gpu07\\ngpu08\\ngpu09\\n"\n')
    os.chmod(program, 0o755)
    assert hosts_of_job(bracketed) == [("gpu07", 4), ("gpu08", 4), ("gpu09", 2)]
    program.write_text('#!/bin/sh\necho "Invalid node list" >&2; exit 1\n')
    with pytest.raises(ConfigurationError, match="failed: Invalid node list"):
        hosts_of_job(bracketed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURM_TASKS_PER_NODE": "4(x2"}, r"SLURM_TASKS_PER_NODE='4\(x2' cannot be parsed at '4\(x2'"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, "lists 2 nodes, SLURM_JOB_NODELIST='a,b,c' 3"),
    ],
)
def test_slurm_variables_that_contradict_each_other_are_named(changed: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        hosts_of_job({**JOB, **changed})


def test_hosts_of_an_lsf_job() -> None:
    assert hosts_of_job({"LSB_MCPU_HOSTS": "hostA 4 hostB 2"}) == [("hostA", 4), ("hostB", 2)]
    for pairs in ("hostA", "hostA 4 hostB", "hostA four", "hostA 0"):
        with pytest.raises(ConfigurationError, match=f"LSB_MCPU_HOSTS='{pairs}' must hold pairs"):
            hosts_of_job({"LSB_MCPU_HOSTS": pairs})
