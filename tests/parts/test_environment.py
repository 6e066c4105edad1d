"""Who am I: a launcher's variables or explicit arguments; each mistake is a ValueError that says what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ddp_callbacks.cluster.environment import DEFAULT_PORT, WorkerEnv, processes_on_host, worker_env
from ddp_callbacks.cluster.schedulers import hosts_of_job
from ddp_callbacks.errors import ConfigurationError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}


def without(*names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in (TORCHRUN | changed).items() if name not in names}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"MASTER_ADDR": "node0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_without_a_launcher_it_is_a_world_of_one(environ: dict[str, str]) -> None:
    """Without a launcher you have a world of one."""
    alone = WorkerEnv(rank=0, world_size=1, local_rank=0, host=None, port=None)
    assert worker_env(environ=environ) == alone == worker_env(0, 1, environ={})


def test_explicit_arguments_win_over_the_environment() -> None:
    """`join_process_group` takes a launcher's variables, or your arguments."""
    assert worker_env(environ=TORCHRUN) == WorkerEnv(5, 8, local_rank=1, host="node0", port=29511)
    assert WorkerEnv.from_environ(without("LOCAL_RANK")).local_rank == 0
    assert worker_env(0, 2, "10.0.0.1", 4000, environ=TORCHRUN) == WorkerEnv(0, 2, 1, "10.0.0.1", 4000)
    assert worker_env(rank=0, world_size=2, host="127.0.0.1", environ={}).port == DEFAULT_PORT == 29500


def variables(prefix: str, **values: str) -> dict[str, str]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


OPEN_MPI = variables("OMPI_COMM_WORLD", RANK="3", SIZE="4", LOCAL_RANK="1", LOCAL_SIZE="2")
OPEN_MPI["PMIX_NAMESPACE"] = "181403649"
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = variables("SLURM", JOB_ID="42", STEP_ID="0", PROCID="5", LOCALID="1")
SLURM |= variables("SLURM_STEP", NUM_TASKS="8", NUM_NODES="2", NODELIST="gpu[07-08]")
BATCH_SCRIPT = variables("SLURM", JOB_ID="42", PROCID="0", NTASKS="8", LOCALID="0")
ORTED_IN_SLURM = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # mpirun starts its daemons by srun
SRUN_PMI2 = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_APID": "99.pbs"}
FLUX = variables("FLUX", TASK_RANK="5", JOB_SIZE="8", TASK_LOCAL_ID="1", JOB_NNODES="1", JOB_ID="42.0")
# CRC-32 of "181403649" is 2682416830, of "42.0" 1413265556, of "99.pbs" 3026040015.
PORT_OPEN_MPI, PORT_SLURM, PORT_PBS = 26830, 25556, 20015

LAUNCHED: list[tuple[dict[str, str], WorkerEnv]] = [
    ({**OPEN_MPI, "MASTER_ADDR": "node0"}, WorkerEnv(3, 4, 1, "node0", PORT_OPEN_MPI)),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, WorkerEnv(3, 4, 1, "127.0.0.1", PORT_OPEN_MPI)),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, WorkerEnv()),
    ({**OPEN_MPI, **ORTED_IN_SLURM}, WorkerEnv(3, 4, 1, "gpu07", PORT_OPEN_MPI)),
    (MPICH, WorkerEnv(1, 2, 1, "127.0.0.1", 29500)),
    ({**MPICH, "MPI_LOCALNRANKS": "1", "LSB_MCPU_HOSTS": "a 1 b 1", "LSB_JOBID": ""}, WorkerEnv(1, 2, 1, "a", 29500)),
    (SLURM, WorkerEnv(5, 8, 1, "gpu07", PORT_SLURM)),
    (SRUN_PMI2, WorkerEnv(5, 8, 1, "gpu07", PORT_SLURM)),
    ({**SLURM, "SLURM_STEP_NODELIST": "rack[1-2]n[9,11-12],x"}, WorkerEnv(5, 8, 1, "rack1n9", PORT_SLURM)),
    ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_SLURM)),
    (BATCH_SCRIPT, WorkerEnv()),
    ({**PALS, "PALS_LOCAL_SIZE": "8"}, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_PBS)),
    (
        {**MPICH, "MPI_LOCALRANKID": "", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        WorkerEnv(1, 2, 1, "127.0.0.1", 29500),
    ),
    (FLUX, WorkerEnv(5, 8, 1, "127.0.0.1", PORT_SLURM)),
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
    """Processes of Open MPI, MPICH, Slurm, PBS, Flux and LSF find their rank."""
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
        {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"},
    ],
)
def test_processes_of_an_unknown_launcher_do_not_train_alone_in_silence(environ: dict[str, str]) -> None:
    """Processes of an unknown launcher never train alone."""
    with pytest.raises(ConfigurationError) as caught:
        worker_env(environ=environ)
    name, value = next(iter(environ.items()))
    for part in (f"{name}={value} means", f"RANK=${name}", "single process: RANK=0 WORLD_SIZE=1"):
        assert part in str(caught.value)
    assert worker_env(environ={**environ, "RANK": "0", "WORLD_SIZE": "1"}) == WorkerEnv()


@pytest.mark.parametrize(
    ("name", "several", "one"),
    [
        ("PET_NNODES", ["2", "1:4"], ["1", "1:1", ""]),
        ("SM_HOSTS", ['["algo-1","algo-2"]'], ['["algo-1"]']),
    ],
)
def test_nodes_of_a_platform_do_not_train_alone_in_silence(name: str, several: list[str], one: list[str]) -> None:
    for value in several:
        with pytest.raises(ConfigurationError, match=rf"^{name}={re.escape(value)} means .* Start it by torchrun, or"):
            worker_env(environ={name: value})
        assert worker_env(environ={name: value, **TORCHRUN}).world_size == 8
    for value in one:
        assert worker_env(environ={name: value}) == WorkerEnv()


# Whether the processes are on several hosts, and how many are on this one.
PLACES: list[tuple[dict[str, str], bool | None, int | None]] = [
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, None, 4),  # its nodes may be one machine
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, False, 8),
    (TORCHRUN, None, None),
    ({**OPEN_MPI, "MASTER_ADDR": "a"}, True, 2),
    ({**MPICH, "MPI_LOCALNRANKS": "2"}, False, 2),
    (SLURM, True, None),
    ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, False, 8),
    (FLUX, False, 8),
]


@pytest.mark.parametrize(("environ", "several_hosts", "here"), PLACES)
def test_what_is_known_of_the_hosts_of_the_processes(
    environ: dict[str, str], several_hosts: bool | None, here: int | None
) -> None:
    assert worker_env(environ=environ).several_hosts is several_hosts
    assert processes_on_host(environ) == here


def test_in_a_pbs_job_rank_0_is_on_the_first_host_of_the_node_file(tmp_path: Path) -> None:
    """PBS's first host gets rank 0."""
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n")
    environ = {**OPEN_MPI, "PMIX_NAMESPACE": "", "PBS_JOBID": "99.pbs", "PBS_NODEFILE": str(nodes)}
    assert worker_env(environ=environ) == WorkerEnv(3, 4, 1, "n1.cluster", PORT_PBS)


def test_a_worker_env_cannot_be_changed() -> None:
    """Nothing changes a `WorkerEnv`."""
    with pytest.raises(AttributeError, match="rank"):
        WorkerEnv(0, 1).rank = 1  # type: ignore[misc]


# --- the hosts of a job -----------------------------------------------------------------------------------------------


JOB = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_NTASKS": "10", "SLURM_TASKS_PER_NODE": "4(x2),2"}
HOSTS: dict[str, tuple[dict[str, str], list[tuple[str, int | None]]]] = {
    "none": ({}, []),
    "Slurm": (JOB, [("a", 4), ("b", 4), ("c", 2)]),
    "a task on each": ({**JOB, "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_NTASKS": "3"}, [(name, None) for name in "abc"]),
    "no tasks": ({**JOB, "SLURM_NTASKS": ""}, [(name, None) for name in "abc"]),
    "LSF": ({"LSB_MCPU_HOSTS": "hostA 4 hostB 2"}, [("hostA", 4), ("hostB", 2)]),
    "PBS": ({"PBS_NODEFILE": "n1\nn1\nn2\nn2\nn2\n"}, [("n1", 2), ("n2", 3)]),
    "PBS, a slot on each": ({"PBS_NODEFILE": "n1.cluster\nn2.cluster\n"}, [("n1.cluster", None), ("n2.cluster", None)]),
}


@pytest.mark.parametrize("name", HOSTS)
def test_the_hosts_of_a_job_are_those_of_its_variables(tmp_path: Path, name: str) -> None:
    environ, expected = HOSTS[name]
    if "PBS_NODEFILE" in environ:
        (tmp_path / "nodes").write_text(environ["PBS_NODEFILE"])
        environ = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert hosts_of_job(environ) == expected


def test_slurms_own_program_expands_its_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own program expands its lists."""
    bracketed = {**JOB, "SLURM_JOB_NODELIST": "gpu[07-09]"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"SLURM_JOB_NODELIST='gpu\[07-09\]': scontrol is not in PATH"):
        hosts_of_job(bracketed)
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-09]" ] && printf "gpu07\\ngpu08\\ngpu09\\n"\n')
    os.chmod(program, 0o755)
    assert hosts_of_job(bracketed) == [("gpu07", 4), ("gpu08", 4), ("gpu09", 2)]
    program.write_text('#!/bin/sh\necho "Invalid node list" >&2; exit 1\n')
    with pytest.raises(ConfigurationError, match="failed: Invalid node list"):
        hosts_of_job(bracketed)
