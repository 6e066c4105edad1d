"""Who am I: the variables of torchrun, MPI or Slurm, or explicit arguments, as one frozen :class:`WorkerEnv`."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError

DEFAULT_PORT = 29500  # torch's own default rendezvous port


@dataclass(frozen=True)
class WorkerEnv:
    """This process's place in the world.

    Attributes:
        rank: Number of this process in the world, ``0 <= rank < world_size``.
        world_size: Number of processes.
        local_rank: Number of this process on its node; selects the GPU.
        host: Address on which rank 0's node answers, ``None`` in a world of one.
        port: Port of the rendezvous store on ``host``, ``None`` in a world of one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {self.world_size}.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank must lie in [0, world_size), got rank {self.rank} in a world of {self.world_size}. "
                f"Number the processes from 0 to {self.world_size - 1}."
            )
        if self.local_rank < 0:
            raise ConfigurationError(f"local_rank must not be negative, got {self.local_rank}.")
        if self.world_size > 1 and (self.host is None or self.port is None):
            raise ConfigurationError(
                f"a world of {self.world_size} processes needs an address to meet at, got host {self.host!r} "
                f"and port {self.port!r}. Set MASTER_ADDR and MASTER_PORT, start with torchrun, or pass host and port."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigurationError(f"port must lie in [1, 65535], got {self.port}.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> WorkerEnv:
        """The place that a launcher's variables give this process; a world of one where there are none.

        Read in this order: torchrun's, Open MPI's, MPICH's and Intel MPI's, Slurm's (of ``srun``; the batch script
        itself is a world of one). ``MASTER_ADDR`` and ``MASTER_PORT`` say where to meet. With MPI and Slurm they need
        not be set where all processes are on one host, nor in a Slurm, PBS or LSF job, whose first host has rank 0.

        Raises:
            ConfigurationError: Only one of ``RANK`` and ``WORLD_SIZE`` is set, a value is not a number, or the
                address is missing.
        """
        present = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
        if not present:
            return _from_mpi_or_slurm(environ)
        if len(present) == 1:
            missing = "WORLD_SIZE" if present == ["RANK"] else "RANK"
            raise ConfigurationError(
                f"RANK and WORLD_SIZE must be set together, but {present[0]}={environ[present[0]]} is set and "
                f"{missing} is not. Start the script with torchrun, or set both, or unset {present[0]}."
            )
        return cls(
            rank=_number(environ, "RANK") or 0,
            world_size=_number(environ, "WORLD_SIZE") or 0,
            local_rank=_number(environ, "LOCAL_RANK") or 0,
            host=environ.get("MASTER_ADDR") or None,
            port=_number(environ, "MASTER_PORT"),
        )


def worker_env(
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> WorkerEnv:
    """Explicit arguments where given, else the environment.

    Raises:
        ConfigurationError: ``rank`` and ``world_size`` are not given together, or the values cannot be.
    """
    if rank is None and world_size is None:
        if host is not None or port is not None:
            raise ConfigurationError(
                f"host={host!r} and port={port!r} were given without rank and world_size. Pass all of them, or none "
                "and start with torchrun."
            )
        return WorkerEnv.from_environ(environ)
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"rank and world_size must be given together, got rank={rank} and world_size={world_size}."
        )
    rank, world_size = _integer("rank", rank), _integer("world_size", world_size)
    if host is None and world_size > 1:
        raise ConfigurationError(
            f"host must be given with rank={rank} and world_size={world_size}: the address of rank 0, the same on "
            "every process."
        )
    return WorkerEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK") or 0,
        host=host,
        port=(None if host is None else DEFAULT_PORT) if port is None else _integer("port", port),
    )


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        hint = " (argparse needs type=int)" if isinstance(value, str) else ""
        raise ConfigurationError(f"{name} must be an int, got {value!r} of type {type(value).__name__}{hint}.")
    return value


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a whole number, got {name}={text!r}.") from None


# --- MPI and Slurm ----------------------------------------------------------------------------------------------------

# The variables for rank, size, local rank, and local size. Slurm's are those of a step: a batch script has SLURM_PROCID
# and SLURM_NTASKS, too, but is one process.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)
_JOBS = (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PBS_JOBID",), ("LSB_JOBID",))


def _from_mpi_or_slurm(environ: Mapping[str, str]) -> WorkerEnv:
    for names in _LAUNCHERS:
        if all(environ.get(name) for name in names):
            rank, size, local_rank, last = (_number(environ, name) or 0 for name in names)
            if size == 1:
                return WorkerEnv()
            on_one_host = last == (1 if names[0].startswith("SLURM") else size)
            host = environ.get("MASTER_ADDR") or ("127.0.0.1" if on_one_host else _first_host(environ))
            if not host:
                raise ConfigurationError(
                    f"{names[1]}={size} processes are on several hosts, and nothing says which host has rank 0. Set "
                    "MASTER_ADDR to its address: mpirun -x MASTER_ADDR=ADDRESS (Open MPI), mpiexec -genv MASTER_ADDR "
                    "ADDRESS (MPICH, Intel MPI)."
                )
            return WorkerEnv(rank, size, local_rank, host, _number(environ, "MASTER_PORT") or _job_port(environ))
    return WorkerEnv()


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of the Slurm step, or of the PBS or LSF job; empty where there is none."""
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        # rack[1-2]n[07,09],other: the first of each bracket, up to the first comma outside
        return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]
    if path := environ.get("PBS_NODEFILE"):
        try:
            return next((line.strip() for line in Path(path).read_text().splitlines() if line.strip()), "")
        except OSError as error:
            raise ConfigurationError(f"PBS_NODEFILE={path!r} cannot be read: {error}.") from error
    return next(iter(environ.get("LSB_MCPU_HOSTS", "").split()), "")


def _job_port(environ: Mapping[str, str]) -> int:
    """A port that is the same on all processes of a job, and most likely another one in another job."""
    for names in _JOBS:
        if all(environ.get(name) for name in names):
            job = ".".join(environ[name] for name in names)
            return 20000 + zlib.crc32(job.encode()) % 10000  # below the ports that systems hand out by themselves
    return DEFAULT_PORT
