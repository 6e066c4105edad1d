"""Join and leave the default process group."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from importlib import import_module
from types import TracebackType

import torch
import torch.distributed as dist

from ddp_callbacks._torch import require_torch
from ddp_callbacks.cluster.environment import KEEP_GOING, WorkerEnv, stated_env, worker_env
from ddp_callbacks.cluster.schedulers import number
from ddp_callbacks.errors import ConfigurationError, is_called_by_us
from ddp_callbacks.process_group.failures import announce_join, report_end
from ddp_callbacks.process_group.gpu import select_gpu
from ddp_callbacks.process_group.members_file import Members
from ddp_callbacks.process_group.presence import presence
from ddp_callbacks.process_group.runs import destroy_groups
from ddp_callbacks.process_group.survivors import form_group_of
from ddp_callbacks.replacement import Replacements
from ddp_callbacks.reporting.recorder import end_training
from ddp_callbacks.versions import how_to_install

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default for gloo
_MPI4PY = "mpi4py"  # the backend of ddp_callbacks.mpi
_as_one = ContextVar("as one process", default=False)
_alone = ContextVar("this library, too", default=False)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in ``group``; 0 before it joins a group."""
    return 0 if _is_one_process() else dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes in ``group``; 1 before this process joins a group."""
    return 1 if _is_one_process() else dist.get_world_size(group)


def _is_one_process() -> bool:
    return not dist.is_initialized() or _alone.get() or (is_as_one_process() and not is_called_by_us(2))


@contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, a step of the program computes a whole batch: for it, though not for this library, there is one process.

    So it counts terms that it divides by the number of processes, such as a prior, as one process does.
    """
    token = _as_one.set(True)

    def for_caller(original: Callable[..., int], of_one: int, group: dist.ProcessGroup | None = None) -> int:
        return original(group) if is_called_by_us() else of_one

    with Replacements() as replaced:
        replaced.callback(_as_one.reset, token)
        replaced.set(dist, "get_world_size", partial(for_caller, dist.get_world_size, 1))
        replaced.set(dist, "get_rank", partial(for_caller, dist.get_rank, 0))
        yield


def is_as_one_process() -> bool:
    """Whether this is inside :func:`as_one_process`."""
    return _as_one.get()


@contextmanager
def in_step() -> Iterator[None]:
    """Inside, a step of the program runs: what it gathers within :func:`as_one_process` is what one process has."""
    token = _alone.set(is_as_one_process())
    try:
        yield
    finally:
        _alone.reset(token)


def current_env() -> WorkerEnv:
    """Return this process's place in the default group, wherever that comes from; before it joins one, the launcher's.

    Local.
    """
    if not dist.is_initialized():
        return WorkerEnv.from_environ()
    local_rank = number(os.environ, "LOCAL_RANK")
    local_rank = stated_env().local_rank if local_rank is None else local_rank
    return WorkerEnv(get_rank(), get_world_size(), local_rank, file="")


def require_place(rank: int | None, size: int | None, by: str) -> None:
    """Raise ConfigurationError if ``by`` states another rank or world size than the default group has. Local.

    Args:
        rank, size: What it states; ``None``: nothing.
        by: What states it, for messages, in the plural: "the arguments".
    """
    found = get_rank(), get_world_size()
    stated = found[0] if rank is None else rank, found[1] if size is None else size
    if stated != found:
        raise ConfigurationError(
            f"this process is rank {found[0]} of {found[1]} in the process group that it has joined, but {by} state "
            f"rank {stated[0]} of {stated[1]}. Leave them out, or let them state what the group has: a process trains "
            "with its group."
        )


def resolve_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return ``group``, or the default group for ``None``. Check first that there are at least two ranks."""
    resolved = dist.group.WORLD if group is None else group
    assert resolved is not None
    return resolved


def join_process_group(
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    *,
    init_method: str | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> WorkerEnv:
    """Join the default process group; call it once in each process.

    The callbacks and strategies of this library call it for you. Without arguments, rank and world size come from the
    variables of torchrun, MPI or Slurm (see :class:`~ddp_callbacks.WorkerEnv`). If there are none, this is a single
    process. For a single process, also a launcher's, no group is made and nothing is started: call
    :func:`~ddp_callbacks.get_rank` and :func:`~ddp_callbacks.get_world_size`, not torch's. A default group that exists
    already is used unchanged: from then on, rank and world size are those of the group. The process leaves the group
    when it exits. Blocks until all processes have joined.

    Args:
        rank, world_size: Rank of this process, and the number of all processes. Pass both or neither.
        host: Address of rank 0, the same on every process. The rendezvous store on rank 0 listens only there, so it
            must be an address of that machine. A name that does not resolve yet is looked up again within ``timeout``;
            a name that means 127.0.1.1 on rank 0 stands for the address that other machines reach.
        port: Port of the store; default 29500.
        init_method: Where to meet, as in torch, instead of host and port: ``tcp://HOST:PORT``, ``file:///PATH`` (a file
            that all processes see), or ``env://``, which is the same as ``None``.
        backend: As in :func:`torch.distributed.init_process_group`. ``None`` means gloo, plus NCCL for CUDA tensors if
            CUDA is available.
        device: The device this process computes on. ``"cuda:3"`` becomes the current GPU at once; with ``"cpu"`` no GPU
            is touched. ``"cuda"`` or ``None``: if the process sees several GPUs, the one whose number is its local rank
            becomes the current GPU when this thread first uses CUDA. A GPU that you have selected yourself stays.
        timeout: How long to wait for the other processes to join, and later the longest silence in a collective.

    Returns:
        Rank, world size and address of this process.

    Raises:
        ConfigurationError: The arguments or variables contradict each other, or the group that exists already; torch
            lacks the backend, ``device`` is ``"cuda"`` where there are more processes than GPUs, or processes on other
            hosts cannot reach the address of rank 0.
        ImportError: This version of torch lacks something that the library needs.
        PeerError: Another process failed or died while the connections were made.
        RendezvousError: Nothing answers at the address, or a rank did not join within ``timeout``.
    """
    if dist.is_initialized():
        require_place(rank, world_size, "the arguments")
        if not os.environ.get(KEEP_GOING):  # otherwise the group may have lost processes
            stated = stated_env()
            if stated.world_size >= max(2, dist.get_world_size()):  # a launcher's process may have started some itself
                require_place(stated.rank, stated.world_size, "the launcher's variables")
        announce_join()
        return current_env()
    device = None if device is None else torch.device(device)
    chosen = _choose_backend(backend, device)
    env = worker_env(rank, world_size, host, port, init_method)
    if env.world_size == 1:
        if chosen == _MPI4PY:  # MPI checks the size: under an unknown launcher, each would train alone
            import_module("ddp_callbacks.mpi").start(0, 1)
        return env
    require_torch()
    if chosen != _MPI4PY:  # mpi4py runs on CPUs
        select_gpu(env.local_rank, device)
    atexit.register(leave_process_group)
    _report_uncaught_exceptions()
    return form_group_of(Members(env), chosen, timeout)[0]


def leave_process_group() -> None:
    """Leave the default group, if there is one, and tell the ranks that still wait for this one. Safe to call twice.

    It does not wait for the others. Only rank 0 waits, usually for some milliseconds, until they have heard that it
    leaves. Let rank 0 leave last: without it, the others hear of no failure or deadlock among them, and notice a death
    only by a broken connection.
    """
    if not _is_member():
        return
    end_training()
    presence().leave()
    destroy_groups()


def _is_member() -> bool:
    """Whether this process has joined. A forked child inherits the group, but is not a member."""
    return dist.is_initialized() and presence().pid == os.getpid()


def _choose_backend(backend: str | None, device: torch.device | None) -> str:
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigurationError(
            'backend="mpi" needs a torch that was built with MPI, which the wheels are not. Use '
            f'backend="mpi4py" ({how_to_install("mpi4py")}), or leave out backend: gloo and NCCL work under '
            "mpirun, too."
        )
    if backend == _MPI4PY:
        import_module("ddp_callbacks.mpi")  # registers the backend with torch, or says that mpi4py is missing
    if backend is not None:
        return backend
    for_gpus = torch.cuda.is_available() and dist.is_nccl_available() and (device is None or device.type != "cpu")
    return "cpu:gloo,cuda:nccl" if for_gpus else "gloo"


def _report_uncaught_exceptions() -> None:
    """Tell the other ranks before the interpreter prints an exception that ends this process."""
    previous = sys.excepthook

    def report(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        if _is_member():
            report_end(exception)
        previous(kind, exception, trace)

    sys.excepthook = report
