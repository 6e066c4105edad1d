"""Start processes from a script or a notebook that is a single process itself."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_callbacks.cluster.environment import worker_env
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError, Preempted
from ddp_callbacks.process_group import DEFAULT_TIMEOUT, join_process_group, leave_process_group
from ddp_callbacks.process_group.failures import report_end
from ddp_callbacks.process_group.preemption import SIGNALS

_PARALLEL = 1 << 17  # numbers that torch sums in several threads
_TRIAL = 10.0  # seconds, for what takes a millisecond


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    init_method: str = "env://",
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Start ``nprocs`` processes that join a process group and call ``fn(*args)``; blocks until all have ended.

    A process's rank is ``node_rank * nprocs`` plus its local rank. On several nodes, call this on each one with its
    ``node_rank`` and the same other arguments. The return value of ``fn`` is dropped: let rank 0 write a file.

    From a script the processes start with ``spawn``, so ``fn`` must be defined at the top level of a module, and the
    script needs ``if __name__ == "__main__":``. In a notebook they are forked and see what its cells have defined; the
    notebook must not have used CUDA, nor computed with several threads, before.

    SIGTERM and SIGUSR1 are passed on to the processes: they may write a checkpoint (:class:`ddp_callbacks.Preemption`).

    Args:
        fn: The function that each process runs. A single process also runs it in one new process.
        nprocs: Number of processes on this node.
        args: Arguments of ``fn``.
        nnodes, node_rank: Number of nodes, and the rank of this node.
        init_method: Where to meet: ``env://`` (MASTER_ADDR and MASTER_PORT; optional on a single node),
            ``tcp://HOST:PORT``, or ``file:///PATH``, see :func:`join_process_group`.
        backend, timeout: As in :func:`join_process_group`.

    Raises:
        ConfigurationError: A number is out of range, there is no address to meet at, forked processes could not
            compute, or the script lacks ``if __name__ == "__main__":``.
        ProcessRaisedException: From torch: ``fn`` raised on a process; holds the traceback. The other processes are
            ended.
        ProcessExitedException: From torch: a process was killed, or exited with a non-zero exit code.
        Preempted: The processes were asked to stop and have written a checkpoint.
    """
    if nprocs < 1 or nnodes < 1:
        raise ConfigurationError(f"nprocs and nnodes must be at least 1, got nprocs={nprocs} and nnodes={nnodes}.")
    if not 0 <= node_rank < nnodes:
        raise ConfigurationError(f"node_rank must lie in [0, nnodes), got {node_rank} of {nnodes} nodes.")
    first, size = node_rank * nprocs, nnodes * nprocs
    with _address(init_method, nnodes) as where:
        worker_env(first, size, init_method=where)  # raises here rather than in the new processes
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": nprocs}  # torchrun's variables, which others read, too
        places = [{"RANK": first + number, "LOCAL_RANK": number, **place} for number in range(nprocs)]
        options: dict[str, Any] = {"nprocs": nprocs, "join": False, "start_method": _start_method()}
        context = mp.start_processes(_run, (fn, args, places, where, backend, timeout), **options)
        with _passing_signals_on(context.pids()) as passed:
            try:
                while not context.join():
                    pass
            except mp.ProcessExitedException as error:
                _end_as_the_processes(error, passed)
                raise


@contextmanager
def _passing_signals_on(pids: Sequence[int]) -> Iterator[list[int]]:
    """Pass the signals that ask to stop on to the processes. Yield a list that collects their numbers."""
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # A program that handles or ignores a signal itself keeps its handler.
    is_main = threading.current_thread() is threading.main_thread()
    mine = [number for number in SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, pass_on)
    try:
        yield passed
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _end_as_the_processes(error: mp.ProcessExitedException, passed: Sequence[int]) -> None:
    """End with the exit code 75 of a preemption, or by the signal that has ended the processes."""
    if error.exit_code == EXIT_PREEMPTED:
        name = signal.Signals(passed[0]).name if passed else "a request on one of them"
        raise Preempted(name, "the checkpoint of the processes") from None
    if passed and error.exit_code == -passed[0]:
        signal.signal(passed[0], signal.SIG_DFL)
        os.kill(os.getpid(), passed[0])


def _start_method() -> str:
    frames = (frame for frame, _ in traceback.walk_stack(None))
    if any((each.f_globals.get("__name__"), each.f_code.co_name) == ("__mp_main__", "<module>") for each in frames):
        raise ConfigurationError(
            "spawn was called by a process that still imports the script, and each new process would do the same. Put "
            'the call, and all that is to be done once, under if __name__ == "__main__".'
        )
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script and os.path.exists(script):
        return "spawn"
    require_forkable()
    return "fork"


def require_forkable() -> None:
    """Raise :class:`ConfigurationError` if forked processes could not compute. Blocks for 10 seconds in that case.

    Some libraries of threads, such as GNU's OpenMP, wait forever in a forked process if they were in use before. A
    notebook has other threads, too, so a process is forked that tries it.
    """
    again = "Restart the kernel, and start the processes before anything in the notebook"
    if dist.is_initialized():
        raise ConfigurationError(f"this process has joined a process group, which forked ones cannot. {again} joins.")
    if torch.cuda.is_initialized():
        raise ConfigurationError(f"CUDA is already in use, so that forked processes cannot use it. {again} uses CUDA.")
    if torch.get_num_threads() == 1:
        return
    trial = mp.get_context("fork").Process(target=lambda: torch.ones(_PARALLEL).sum())
    trial.start()
    trial.join(_TRIAL)
    if trial.is_alive():
        trial.kill()
        trial.join()
        raise ConfigurationError(
            f"this process has computed with {torch.get_num_threads()} threads, and forked processes would wait for "
            f"these forever. {again} computes, or set OMP_NUM_THREADS=1 before Python starts."
        )


@contextmanager
def _address(init_method: str, nnodes: int) -> Iterator[str]:
    """Yield the URL to meet at: ``init_method``; for env://, MASTER_ADDR and MASTER_PORT, or a free local port."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if init_method != "env://" or host:
        yield init_method if init_method != "env://" else f"tcp://{host}:{port or 29500}"
        return
    if nnodes > 1:
        raise ConfigurationError(
            f'{nnodes} nodes need an address to meet at: set MASTER_ADDR, or pass init_method="tcp://HOST:PORT" with '
            "the address of node 0."
        )
    with socket.socket() as kept:
        # Bound but not listening: rank 0 can bind it too (SO_REUSEADDR), and no other program can take it first.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{kept.getsockname()[1]}"


def _run(
    index: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    places: list[dict[str, int]],
    init_method: str,
    backend: str | None,
    timeout: timedelta,
) -> None:
    os.environ.update({name: str(number) for name, number in places[index].items()})
    join_process_group(init_method=init_method, backend=backend, timeout=timeout)
    try:
        fn(*args)
    except BaseException as error:
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0, EXIT_PREEMPTED)
        if dist.is_initialized() and not ends_well:
            report_end(error)
        raise
    leave_process_group()
