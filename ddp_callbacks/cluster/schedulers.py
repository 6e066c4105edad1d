"""Read the variables of schedulers and MPI launchers: rank, world size, and the hosts of a job (PBS, Slurm, LSF)."""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_callbacks.errors import ConfigurationError

DEFAULT_PORT = 29500  # torch's default
_TIMEOUT = 30.0  # seconds for a command of a scheduler


@dataclass(frozen=True)
class _Names:
    """The names of a launcher's variables; ``local_size`` or ``nodes`` shows whether there are several hosts."""

    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: str = ""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in (self.rank, self.size, self.local_rank, self.nodes) if name)

    def is_on_one_host(self, environ: Mapping[str, str]) -> bool:
        if self.nodes:
            return number(environ, self.nodes) == 1
        return number(environ, self.local_size) == number(environ, self.size)


# For Slurm, these are a step's variables: a batch script also has SLURM_PROCID and SLURM_NTASKS, but is one process.
_LAUNCHERS = (
    _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nodes="SLURM_STEP_NUM_NODES"),
    _Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES"),
    _Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # PALS
    _Names("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
# Variables that show that a launcher has started this process, and the names of the variables with the world size.
_RANKS = {launcher.rank: launcher.size for launcher in _LAUNCHERS if launcher.rank != "SLURM_PROCID"} | {
    "PMIX_RANK": "",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",  # MVAPICH2
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",  # jsrun
    "SUBMITIT_LOCAL_GLOBALID": "SUBMITIT_LOCAL_NTASKS",
}
# Variables of platforms that start the script once on each node (Kubeflow, SageMaker), and what they hold for one node.
_PLATFORMS = {"PET_NNODES": "|1|1:1", "SM_HOSTS": "[^,]*"}
_NODE_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "OAR_NODEFILE")  # PBS's, Grid Engine's, OAR's
# What names a job, most special first.
_JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID SLURM_STEP_ID", "PALS_APID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_SAY_WHERE = (
    "Set MASTER_ADDR to the address of rank 0's host: mpirun -x MASTER_ADDR=ADDRESS (Open MPI), mpiexec -genv "
    "MASTER_ADDR ADDRESS (MPICH, Intel MPI); export it before srun, flux run or another mpiexec."
)


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable; ``None`` if it is not set. Raises ConfigurationError unless it is an integer."""
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, got {name}={text!r}.") from None


def read_launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables of MPI, Slurm, PALS, Flux or LSF.

    Returns:
        The arguments of :class:`ddp_callbacks.cluster.environment.WorkerEnv`; none for a single process.

    Raises:
        ConfigurationError: A launcher has started this process, but its variables lack the world size or the address.
    """
    for launcher in _LAUNCHERS:
        if launcher.has_started(environ):
            return _read(launcher, environ)
    if name := unknown_launcher(environ):
        example = f" (RANK=${name})" if name in _RANKS else ""
        raise ConfigurationError(
            f"{name}={environ[name]} means that a launcher started this process as one of several, but not how "
            "they meet, so each would train alone. Start it by torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT for each process: let the launcher start a shell script that exports them"
            f"{example} and then starts python. For a single process: RANK=0 WORLD_SIZE=1."
        )
    return {}


def number_on_host(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that the launcher has started on this host; ``None`` if unknown."""
    launcher = next((each for each in _LAUNCHERS if each.has_started(environ)), None)
    if launcher is None or not (launcher.local_size or launcher.is_on_one_host(environ)):
        return None
    return number(environ, launcher.local_size or launcher.size)


def unknown_launcher(environ: Mapping[str, str]) -> str:
    """Return a variable of a launcher of several processes that lacks the others, or is unknown; empty if none."""
    if any(launcher.has_started(environ) for launcher in _LAUNCHERS):
        return ""
    found = [name for name, size in _RANKS.items() if environ.get(name) and number(environ, size) != 1]
    found += [name for name, one in _PLATFORMS.items() if not re.fullmatch(one, environ.get(name, ""))]
    return next(iter(found), "")


def is_shell_of_step(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in the terminal of ``srun --pty bash``: a shell, though it counts as a task."""
    return "SLURM_PTY_PORT" in environ and any(map(os.isatty, (0, 1, 2)))


def _read(launcher: _Names, environ: Mapping[str, str]) -> dict[str, Any]:
    rank, size, local_rank = (
        number(environ, name) or 0 for name in (launcher.rank, launcher.size, launcher.local_rank)
    )
    if size == 1:
        return {}
    several_hosts = not launcher.is_on_one_host(environ)
    host = environ.get("MASTER_ADDR") or (_first_host(environ) if several_hosts else "127.0.0.1")
    if not host:
        raise ConfigurationError(
            f"{launcher.size}={size} processes are on several hosts, and nothing tells which host has rank 0. "
            f"{_SAY_WHERE}"
        )
    return {
        "rank": rank,
        "world_size": size,
        "local_rank": local_rank,
        "host": host,
        "port": number(environ, "MASTER_PORT") or _job_port(environ),
        "several_hosts": several_hosts,
    }


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of the Slurm step, or of the PBS or LSF job; empty outside of these."""
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        # rack[1-2]n[07,09],other: take the first number of each bracket, up to the first comma outside of brackets
        return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]
    with suppress(ConfigurationError):  # the error of the caller says what to do
        return next((name for name, _ in hosts_of_job(environ)), "")
    return ""


def _job_port(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all processes of a job, and most likely differs between jobs."""
    for names in map(str.split, _JOBS):
        if all(environ.get(name) for name in names):
            job = ".".join(environ[name] for name in names)
            return 20000 + zlib.crc32(job.encode()) % 10000  # below the ephemeral ports
    return DEFAULT_PORT


_SLURM_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of_job(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """Return the hosts of the PBS, Slurm or LSF job that this process runs in; empty outside a job.

    Returns:
        Each host with the number of processes that the job requested there; ``None`` if unspecified.

    Raises:
        ConfigurationError: The variables of the job cannot be read.
    """
    for name in _NODE_FILES:
        if path := environ.get(name):
            return _hosts_of_file(name, path)
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return _hosts_of_slurm(nodes, environ)
    if pairs := environ.get("LSB_MCPU_HOSTS"):
        return _hosts_of_lsf(pairs)
    return []


def _hosts_of_file(name: str, path: str) -> list[tuple[str, int | None]]:
    """Count the lines per host in a node file. PBS's has one line for each process that the job requested there.

    The job requests them as ``mpiprocs`` in PBS Pro (1 if unspecified) and ``ppn`` in Torque.
    """
    try:
        counts = Counter(line.split()[0] for line in Path(path).read_text().splitlines() if line.strip())
    except OSError as error:
        raise ConfigurationError(f"{name}={path!r} cannot be read: {error}.") from error
    if not counts:
        raise ConfigurationError(f"{name}={path!r} names no host.")
    if name != "PBS_NODEFILE" and len(counts) > 1:
        hosts = ",".join(counts)
        raise ConfigurationError(f"{name}={path!r}: this scheduler's jobs are not read. With ddprun, write -H {hosts}.")
    said = set(counts.values()) != {1}  # counts of 1 everywhere may be the default: the node then decides
    return [(host, count if said else None) for host, count in counts.items() if name == "PBS_NODEFILE"]


def _hosts_of_slurm(nodes: str, environ: Mapping[str, str]) -> list[tuple[str, int | None]]:
    if (number(environ, "SLURM_HET_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}: ddprun starts in no heterogeneous job. Start the script "
            "on all components: srun --het-group=0,1 python train.py; or name the hosts with -H, if ssh reaches them."
        )
    names = _expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") if environ.get("SLURM_NTASKS") else None
    if not tasks:
        return [(name, None) for name in names]
    counts = _counts(tasks, "SLURM_TASKS_PER_NODE")
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_TASKS_PER_NODE={tasks!r} is not of the {len(names)} nodes of the job. Start ddprun without srun."
        )
    said = set(counts) != {1}  # counts of 1 everywhere may be the default: the node then decides
    return [(name, count if said else None) for name, count in zip(names, counts, strict=True)]


def _counts(text: str, name: str) -> list[int]:
    """Return the numbers in a list such as ``4(x2),2``, the value of the variable ``name``."""
    counts: list[int] = []
    for part in text.split(","):
        match = _SLURM_COUNT.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"{name}={text!r} cannot be parsed at {part!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def cores_of_job(hosts: int, environ: Mapping[str, str] = os.environ) -> list[int | None]:
    """Return the number of the job's cores on each host; ``None`` if unknown. PBS tells only the first chunk's."""
    found: list[int | None] = [number(environ, "NCPUS") if "PBS_NODEFILE" in environ else None] * hosts
    if cpus := environ.get("SLURM_JOB_CPUS_PER_NODE"):
        found[:] = _counts(cpus, "SLURM_JOB_CPUS_PER_NODE")
    return found if len(found) == hosts else [None] * hosts


def gpus_of_job(environ: Mapping[str, str]) -> dict[str, int]:
    """Return for each host the GPUs of the Slurm job that a step there must ask for; none if it has them unasked."""
    if not {"SLURM_GPUS", "SLURM_GPUS_PER_TASK"} & environ.keys():
        return {}
    said, _ = output_of("scontrol", "show", "job", "-d", environ["SLURM_JOB_ID"])
    found = dict[str, int]()
    for nodes, resources in re.findall(r"^ *Nodes=(\S+) .*GRES=(\S*)", said, re.M):
        count = sum(map(int, re.findall(r"gpu(?::[^:,(]+)?:(\d+)\(", resources)))  # gpu:a100:2(IDX:0-1)
        found |= dict.fromkeys(_expand(nodes), count)
    return found


def _expand(nodes: str) -> list[str]:
    """Expand a node list. If it has brackets, this calls scontrol, which knows every form."""
    if "[" not in nodes:
        return nodes.split(",")
    found, problem = output_of("scontrol", "show", "hostnames", nodes)
    if problem:
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST={nodes!r}: {problem}. Name the hosts with -H, or use --standalone."
        )
    return found.split()


def _hosts_of_lsf(pairs: str) -> list[tuple[str, int | None]]:
    words = pairs.split()
    if len(words) % 2 or not all(word.isdigit() and int(word) for word in words[1::2]):
        raise ConfigurationError(f"LSB_MCPU_HOSTS={pairs!r} must hold pairs of a host and a number.")
    return [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]


def output_of(*argv: str) -> tuple[str, str]:
    """Run a command; return its output, and why it failed. At least one of these is empty."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT)
    except FileNotFoundError:
        return "", f"{argv[0]} is not in PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    said = " ".join((done.stderr or done.stdout).split())
    return "", f"{' '.join(argv)} failed: {said.rstrip('.') or f'exit code {done.returncode}'}"
