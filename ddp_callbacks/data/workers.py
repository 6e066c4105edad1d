"""Keep the workers of a resumable loader alive when a signal goes to all processes of a job.

Slurm and PBS send SIGTERM, or the signal that you asked for, to every process of a step. The training process finishes
its batch and writes a checkpoint. Until then its workers must load; torch would end them at the signal.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


class WorkerStart:
    """A ``worker_init_fn`` that lets a worker survive ``_SIGNALS``. The worker ends when its loader ends.

    It sets an empty handler instead of ``SIG_IGN``, which programs that the worker starts would inherit.

    Args:
        init: The user's ``worker_init_fn``.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self.init is not None:
            self.init(worker)


def keep_workers(loader: DataLoader[Any]) -> None:
    """Let the workers of ``loader``, which this changes, outlive signals to the whole job."""
    if loader.num_workers:
        atexit.unregister(_kill_daemons)  # once is enough
        atexit.register(_kill_daemons)
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)


def _kill_daemons() -> None:
    """Kill workers at exit: ``multiprocessing`` would send SIGTERM, which they survive, and wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report the killed workers
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


@contextmanager
def spared_workers(loader: Any) -> Iterator[None]:
    """Block ``_SIGNALS`` in workers that start inside, from their first moment, if :func:`keep_workers` prepared them.

    This thread has them blocked, too: it gets signals from inside at the end.
    """
    with ExitStack() as stack:
        if isinstance(getattr(loader, "worker_init_fn", None), WorkerStart):
            if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
                resource_tracker.ensure_running()  # otherwise it starts with the first worker, and unblocks SIGTERM
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield
