"""Import and initialize MPI through mpi4py, and check it against the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.versions import how_to_install

try:
    import mpi4py

    if not hasattr(mpi4py, "MPI"):  # otherwise the import would initialize MPI, and finalize it at exit
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
    raise ConfigurationError(
        f'backend="mpi4py" needs mpi4py and an MPI library: {how_to_install("mpi4py", "mpich")}. On a cluster with '
        f"its own MPI, leave out mpich. Cause: {error}"
    ) from error

# A variable that only this launcher sets, its name, and mpi4py's name for its library.
_LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "Open MPI", "Open MPI"),)


def initialize(environ: Mapping[str, str] = os.environ) -> None:
    """Initialize MPI, once per process, with support for threads that take turns.

    Raises:
        ConfigurationError: The library is not the launcher's, lacks thread support, or has been finalized.
    """
    if MPI.Is_finalized():
        raise ConfigurationError("MPI has been finalized, and cannot be used again in this process.")
    if not MPI.Is_initialized():
        _check_library(environ)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigurationError(
            "MPI was initialized without threads. Remove mpi4py.rc.thread_level or mpi4py.rc.threads from the script, "
            "or use an MPI library that was built with threads."
        )


def finalizes_itself() -> bool:
    """Whether mpi4py finalizes MPI at exit, because it was imported before this module."""
    return mpi4py.rc.finalize is not False


def check_world(env: WorkerEnv) -> None:
    """Raise ConfigurationError unless ``env`` matches this process's place in MPI_COMM_WORLD."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, size) == (env.rank, env.world_size):
        return
    if size == 1:
        raise ConfigurationError(
            f"this process is rank {env.rank} of {env.world_size}, but MPI knows of no other process: it was not "
            f'started by the mpiexec of {library()}. Start it as "mpiexec -n {env.world_size} python ..." (srun: '
            "--mpi=pmix or --mpi=pmi2), or leave backend out and let gloo connect the processes."
        )
    raise ConfigurationError(
        f"this process is rank {env.rank} of {env.world_size}, but to MPI it is rank {rank} of {size}. Let one "
        "launcher number the processes: unset RANK and WORLD_SIZE, or pass no rank and world_size."
    )


def library() -> str:
    """Name and version of the MPI library."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _check_library(environ: Mapping[str, str]) -> None:
    """Refuse MPICH under Open MPI's launcher: it would end the process with an obscure message."""
    vendor, _ = MPI.get_vendor()
    for variable, launcher, expected in _LAUNCHERS:
        if environ.get(variable) and vendor != expected:
            raise ConfigurationError(
                f"{launcher}'s mpirun has started this process, but mpi4py has loaded {library()}. Start it with the "
                "mpiexec of that library (pip puts it beside python), or set MPI4PY_LIBMPI to the libmpi.so of "
                f"{launcher}."
            )
