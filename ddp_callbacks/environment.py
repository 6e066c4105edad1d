"""Who am I: the variables of torchrun, MPI or Slurm, or explicit arguments, as one frozen :class:`WorkerEnv`.

And what surrounds this process: the hosts of its job, the way to another host.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError

DEFAULT_PORT = 29500  # torch's own default rendezvous port
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True)
class WorkerEnv:
    """This process's place in the world.

    Attributes:
        rank: Number of this process in the world, ``0 <= rank < world_size``.
        world_size: Number of processes.
        local_rank: Number of this process on its node; selects the GPU.
        host: Address on which rank 0's node answers, ``None`` in a world of one.
        port: Port of the rendezvous store on ``host``, ``None`` in a world of one.
        file: The file in which the processes meet, in place of an address.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str | None = None
    port: int | None = None
    file: str | None = None

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
        if self.world_size > 1 and self.file is None and (self.host is None or self.port is None):
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
        Local; nobody is asked.

        Args:
            environ: The variables; those of this process if not given.

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


def worker_env_of(init_method: str, rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> WorkerEnv:
    """The place of a process that meets the others by ``tcp://HOST:PORT`` or ``file://PATH``; an IPv6 host in brackets.

    Raises:
        ConfigurationError: It is neither of these, or nothing says which process this is.
    """
    kind, _, rest = init_method.partition("://")
    if rank is None and world_size is None:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"init_method={init_method!r} needs rank and world_size, as arguments or as the variables RANK and "
            "WORLD_SIZE."
        )
    local_rank = _number(environ, "LOCAL_RANK") or 0
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and host and colon and port.isdigit():
        return WorkerEnv(rank, world_size, local_rank, host.removeprefix("[").removesuffix("]"), int(port))
    if kind == "file" and rest.startswith("/"):
        return WorkerEnv(rank, world_size, local_rank, file=rest)
    raise ConfigurationError(
        f"init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH, got {init_method!r}."
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
_SLURM_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
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
    return next((name for name, _ in hosts_of_job(environ)), "")


def _job_port(environ: Mapping[str, str]) -> int:
    """A port that is the same on all processes of a job, and most likely another one in another job."""
    for names in _JOBS:
        if all(environ.get(name) for name in names):
            job = ".".join(environ[name] for name in names)
            return 20000 + zlib.crc32(job.encode()) % 10000  # below the ports that systems hand out by themselves
    return DEFAULT_PORT


# --- the hosts of a job -----------------------------------------------------------------------------------------------


def hosts_of_job(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """The hosts that PBS, Slurm or LSF has given to the job in which this process runs; none outside a job.

    Returns:
        Each host with the number of processes that the job asked for there, ``None`` where it does not say.

    Raises:
        ConfigurationError: The variables of the job cannot be read.
    """
    if path := environ.get("PBS_NODEFILE"):
        return _hosts_of_pbs(path)
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return _hosts_of_slurm(nodes, environ)
    if pairs := environ.get("LSB_MCPU_HOSTS"):
        return _hosts_of_lsf(pairs)
    return []


def _hosts_of_pbs(path: str) -> list[tuple[str, int | None]]:
    """The node file names a host once for each process that the job asked for there.

    That is ``mpiprocs`` in PBS Pro, 1 if the job does not say, and ``ppn`` in Torque.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ConfigurationError(f"PBS_NODEFILE={path!r} cannot be read: {error}.") from error
    counts = Counter(line for line in lines if line)
    if not counts:
        raise ConfigurationError(f"PBS_NODEFILE={path!r} names no host.")
    said = set(counts.values()) != {1}  # else the node decides
    return [(name, count if said else None) for name, count in counts.items()]


def _hosts_of_slurm(nodes: str, environ: Mapping[str, str]) -> list[tuple[str, int | None]]:
    names = _expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") if environ.get("SLURM_NTASKS") else None
    if not tasks:
        return [(name, None) for name in names]
    counts: list[int] = []
    for part in tasks.split(","):
        match = _SLURM_TASKS.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"SLURM_TASKS_PER_NODE={tasks!r} is not understood at {part!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_TASKS_PER_NODE={tasks!r} speaks of {len(counts)} nodes, SLURM_JOB_NODELIST={nodes!r} of "
            f"{len(names)}."
        )
    said = set(counts) != {1}  # else the node decides
    return [(name, count if said else None) for name, count in zip(names, counts, strict=True)]


def _expand(nodes: str) -> list[str]:
    """Slurm's own program knows every form of its lists; a list without brackets is plain."""
    if "[" not in nodes:
        return nodes.split(",")
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST={nodes!r} needs the program scontrol, which is not in PATH here. Name the hosts by -H."
        )
    done = subprocess.run(
        [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ConfigurationError(f"scontrol show hostnames {nodes!r} failed: {done.stderr.strip()}.")
    return done.stdout.split()


def _hosts_of_lsf(pairs: str) -> list[tuple[str, int | None]]:
    words = pairs.split()
    if len(words) % 2 or not all(word.isdigit() and int(word) for word in words[1::2]):
        raise ConfigurationError(f"LSB_MCPU_HOSTS={pairs!r} must hold pairs of a host and a number.")
    return [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]


# --- the network ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """How this host reaches another: its own address on the way, and the interface that has it (empty if unknown)."""

    address: str
    interface: str


def route_to(host: str, port: int = 1) -> Route:
    """The route that packets to ``host`` take; nothing is sent. The interface is found for IPv4 alone.

    Raises:
        OSError: The name does not resolve, or there is no route.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
        if family != socket.AF_INET:
            return Route(own, "")
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(reply[20:24]) == own:
                return Route(own, name)
    return Route(own, "")
