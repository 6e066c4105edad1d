"""Rank, world size and address of this process, from the launcher's variables or explicit arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_callbacks.cluster.schedulers import DEFAULT_PORT, number, number_on_host, read_launcher
from ddp_callbacks.errors import ConfigurationError

SECRET = "DDP_CALLBACKS_SECRET"
"""Environment variable: a secret that all processes of the job know. Without it, rank 0 makes one for its store."""

HEARTBEAT_TIMEOUT = "DDP_CALLBACKS_HEARTBEAT_TIMEOUT"
"""Environment variable: seconds of silence of a machine after which the processes give it up; default 10."""

KEEP_GOING = "DDP_CALLBACKS_KEEP_GOING"
"""Environment variable: ``ddprun --keep-going`` sets it to 1, and continues without processes that were lost."""

SUCCESSOR = "DDP_CALLBACKS_SUCCESSOR"
"""Environment variable: ``ddprun --keep-going`` sets it to 1 for a new process that replaces a killed one.

Once it is ready to join, it writes ``{"ready": true}`` to the file that TORCHELASTIC_ERROR_FILE names, in a line.
"""

NEWS = "DDP_CALLBACKS_NEWS"
"""Environment variable: a file of this node, to which ``ddprun`` adds what its processes are to know.

Each line is JSON, and adds to what the lines before it say, or changes it:

- ``{"ended": {"3": 0}}``: the process that was started as this rank has exited with code 0.
- ``{"members": {"generation": 1, "ranks": [0, 2, 3], "replaced": {"2": 1}}}``, with ``--keep-going``: who takes part,
  how often that has changed, and how often the process of a rank was replaced. Ranks that have exited with code 0 stay.
- ``{"stores": {"1 [...]": ["10.0.0.2", 41234]}}``: where members that form a group meet. Their rank 0 has written this
  line to the file that TORCHELASTIC_ERROR_FILE names, since the first node, with the first store, may be lost.

A rank that is preempted writes ``{"preempted": true}`` there once its checkpoint is written.
"""

REPORT = "DDP_CALLBACKS_REPORT"
"""Environment variable: a pipe to ``ddprun``, to which a rank writes in JSON where its time goes, and its warnings."""

NO_REPORT = "DDP_CALLBACKS_NO_REPORT"
"""Environment variable: ``ddprun --no-report`` sets it to 1."""

TRACE = "DDP_CALLBACKS_TRACE"
"""Environment variable: the steps that ``ddprun --trace`` records."""


@dataclass(frozen=True)
class WorkerEnv:
    """This process's place in the process group.

    Attributes:
        rank: Rank of this process, ``0 <= rank < world_size``.
        world_size: Number of processes.
        local_rank: Rank of this process on its node; selects the GPU.
        host: Address of rank 0's node; ``None`` for a single process.
        port: Port of the rendezvous store on ``host``; ``None`` for a single process.
        file: File through which the processes meet, instead of an address.
        several_hosts: Whether the launcher has started processes on several hosts; ``None`` if unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str | None = None
    port: int | None = None
    file: str | None = None
    several_hosts: bool | None = field(default=None, compare=False)

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
                f"and port {self.port!r}. Set MASTER_ADDR and MASTER_PORT, start with torchrun, or pass host: the "
                "address of rank 0, the same on every process."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigurationError(f"port must lie in [1, 65535], got {self.port}.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> WorkerEnv:
        """Read this process's place from the launcher's variables; a single process if there are none.

        The order is: torchrun, Open MPI, MPICH and Intel MPI, Slurm (``srun``; the batch script itself is a single
        process), Flux, PALS. ``MASTER_ADDR`` and ``MASTER_PORT`` are the address to meet at. Except with torchrun's
        variables, they are optional if all processes run on one host, and in a Slurm, PBS or LSF job, where rank 0 runs
        on the first host. Local: it doesn't communicate.

        Args:
            environ: The environment variables; by default, this process's.

        Raises:
            ConfigurationError: Only one of ``RANK`` and ``WORLD_SIZE`` is set, a value is not a number, the address is
                missing, or the launcher's variables lack the number of processes.
        """
        present = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
        if not present:
            return cls(**read_launcher(environ))
        if len(present) == 1:
            missing = "WORLD_SIZE" if present == ["RANK"] else "RANK"
            raise ConfigurationError(
                f"RANK and WORLD_SIZE must be set together, but {present[0]}={environ[present[0]]} is set and "
                f"{missing} is not. Start the script with torchrun, or set both, or unset {present[0]}."
            )
        size = number(environ, "WORLD_SIZE") or 0
        return cls(
            rank=number(environ, "RANK") or 0,
            world_size=size,
            local_rank=number(environ, "LOCAL_RANK") or 0,
            host=environ.get("MASTER_ADDR") or None,
            port=number(environ, "MASTER_PORT"),
            several_hosts=_several_hosts(size, environ),
        )


def stated_env(environ: Mapping[str, str] = os.environ) -> WorkerEnv:
    """Return the place that the variables state, wherever the processes meet; incomplete ones state nothing. Local."""
    with suppress(ConfigurationError):
        return WorkerEnv.from_environ({"MASTER_ADDR": "unknown", "MASTER_PORT": "1", **environ})
    return WorkerEnv()


def worker_env(
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    init_method: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> WorkerEnv:
    """Return this process's place by the arguments if given, or else by :meth:`WorkerEnv.from_environ`. Local.

    Args:
        rank, world_size: Rank of this process and number of processes. With ``init_method``, the default is RANK and
            WORLD_SIZE.
        host, port: Address to meet at; the default port is 29500.
        init_method: Where to meet, instead of ``host`` and ``port``: ``tcp://HOST:PORT`` (IPv6 in brackets) or
            ``file:///ABSOLUTE/PATH``. ``env://`` is the same as ``None``.
        environ: The environment variables.

    Raises:
        ConfigurationError: Only one of ``rank`` and ``world_size`` is given, there are two places to meet or none, or a
            value is out of range.
    """
    file = None
    if init_method is not None and init_method != "env://":
        if host is not None or port is not None:
            raise ConfigurationError(f"init_method={init_method!r} and host or port both say where to meet. Pass one.")
        host, port, file = _parse_url(init_method)
        if rank is None and world_size is None:
            rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    elif (rank, world_size, host, port) == (None, None, None, None):
        return WorkerEnv.from_environ(environ)
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"rank and world_size must be given together, and with a place to meet, got rank={rank}, "
            f"world_size={world_size}, host={host!r}, port={port!r} and init_method={init_method!r}. Pass all, or none "
            "and start with ddprun or torchrun."
        )
    rank, world_size = _integer("rank", rank), _integer("world_size", world_size)
    return WorkerEnv(
        rank=rank,
        world_size=world_size,
        local_rank=number(environ, "LOCAL_RANK") or 0,
        host=host,
        port=(None if host is None else DEFAULT_PORT) if port is None else _integer("port", port),
        file=file,
        several_hosts=_several_hosts(world_size, environ),
    )


def _parse_url(init_method: str) -> tuple[str | None, int | None, str | None]:
    """Return the host, port and file of an init method: host and port, or the file, are ``None``."""
    kind, _, rest = init_method.partition("://")
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and host and colon and port.isdigit():
        return host.removeprefix("[").removesuffix("]"), int(port), None
    if kind == "file" and rest.startswith("/"):
        return None, None, rest
    raise ConfigurationError(
        f"init_method must be env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH, got {init_method!r}."
    )


def host_identity() -> str:
    """Return a text that is equal for processes of this host and PID namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def processes_on_host(environ: Mapping[str, str]) -> int | None:
    """Return the number of the job's processes on this host, by the launcher's variables; ``None`` if unknown."""
    return number(environ, "LOCAL_WORLD_SIZE") or number_on_host(environ)


def _several_hosts(world_size: int, environ: Mapping[str, str]) -> bool | None:
    """Return ``False`` if LOCAL_WORLD_SIZE is ``world_size``, else ``None``: torchrun's nodes can share a machine."""
    here = number(environ, "LOCAL_WORLD_SIZE")
    return None if here is None or here < world_size else False


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        hint = " (argparse needs type=int)" if isinstance(value, str) else ""
        raise ConfigurationError(f"{name} must be an int, got {value!r} of type {type(value).__name__}{hint}.")
    return value
