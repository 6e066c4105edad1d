"""torchrun's agent on one node, with a store that listens on a single address and separate output for each rank.

:mod:`ddp_callbacks.launcher.node` runs it with the job as JSON on its standard input. It handles the arguments as
torchrun's command does, with the same functions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from argparse import Namespace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.meeting import choose_interface
from ddp_callbacks.launcher.node import GRACE
from ddp_callbacks.launcher.rounds import BACKEND, Rendezvous, Reports, Rounds
from ddp_callbacks.launcher.torchrun_flags import FLAGS

_PR_SET_PDEATHSIG = 1
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_LONGEST_MESSAGE = 4096  # characters of an exception to report
SHUTDOWN_TIMEOUT = 1  # seconds for the other workers of a node to end after one has failed
_LOOK = 0.05  # seconds between two looks at workers that end by themselves
_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)  # which ask the job to stop; torchrun handles the others


def main() -> int:
    """Run the job on this node; return its exit code."""
    gc.freeze()  # torch's objects stay: collecting them again at exit takes 0.2 s
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until torchrun handles it
    job = json.load(sys.stdin.buffer)
    _close_standard_input()
    with socket.socket(fileno=job["control"]) as control:
        _end_with_parent(control)
        os.mkdir(job["folder"], 0o700)
        try:
            return _run_and_tell(job, control)
        finally:
            shutil.rmtree(job["folder"], ignore_errors=True)


def _run_and_tell(job: dict[str, Any], control: socket.socket) -> int:
    reports = Reports(control)
    for number in _REQUESTS:
        signal.signal(number, lambda number, _: reports.send({"asked": signal.Signals(number).name}))
    try:
        _run(job, control, reports)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            reports.send({"failed": _describe(rank, failure)})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:
        traceback.print_exc()
        reports.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _end_with_parent(control: socket.socket) -> None:
    """End this process if the node's program is killed; nothing else would end it and its workers."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may be gone already: then its end of the socket is closed, whichever process has adopted this one.
    if select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK):
        sys.exit(128 + signal.SIGTERM)


def _close_standard_input() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)


def _run(job: dict[str, Any], control: socket.socket, reports: Reports) -> None:
    args = _arguments(job)
    processes = _processes(args.nproc_per_node)
    args.nproc_per_node = str(processes)
    if args.shutdown_timeout is None:
        args.shutdown_timeout = SHUTDOWN_TIMEOUT
    _end_workers_soon(args.shutdown_timeout, job.get("grace"), reports)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    interface = choose_interface(job["address"])
    rounds = Rounds(control, job["members"] if job["rendezvous"] == "elastic" else None)
    redirected = args.redirects != "0" or args.tee != "0" or args.logs_specs
    if not redirected:
        args.log_dir = job["folder"]
    if job["rendezvous"] is not None:
        rendezvous_handler_registry.register(BACKEND, lambda parameters: Rendezvous(parameters, job, rounds, reports))
        args.rdzv_backend, args.rdzv_endpoint, args.node_rank = BACKEND, f"{job['address']}:{job['port']}", 0
    elif args.master_port is None:
        args.master_port = 29500  # as in torchrun's command
    config, command, arguments = config_from_args(args)
    if args.run_path and not redirected:  # torch would run it in a child that cannot write to a pipe
        command, arguments = sys.executable, ["-u", "-c", _RUN_PATH, args.training_script, *args.training_script_args]
    if not redirected:
        config.logs_specs = _Pipes(job["folder"], reports)
    assert config.logs_specs is not None
    config.logs_specs = _SameRound(config.logs_specs, rounds, reports)
    reports.send({"agent": {"processes": processes, "threads": os.environ["OMP_NUM_THREADS"], "interface": interface}})
    elastic_launch(config, command)(*arguments)


def _arguments(job: dict[str, Any]) -> Namespace:
    """The result of torchrun's parser.

    Raises:
        ValueError: This node's torchrun lacks a given flag.
    """
    args = get_args_parser().parse_args(["SCRIPT"])
    args.training_script, *args.training_script_args = (os.fsdecode(bytes.fromhex(word)) for word in job["command"])
    defaults = {flag.name: flag.default for flag in FLAGS}
    for name, value in job["torchrun"].items():
        if not hasattr(args, name) and value and value != defaults.get(name):
            raise ValueError(f"torchrun of torch {torch.__version__} has no flag --{name.replace('_', '-')}")
        setattr(args, name, value)
    return args


def _end_workers_soon(seconds: int, grace: float | None, reports: Reports) -> None:
    """Report which workers have ended before ending the others, and give those at most ``seconds``.

    torchrun waits up to 30 s for them, whatever --shutdown-timeout is, before it reports anything: its
    SubprocessContext closes with the default timeout of this method as soon as it finds a failure. And it does not
    report the exit of a worker that it notices while ending the others.

    Workers that were asked to stop get no signal from torchrun for ``grace`` seconds: the node's program has passed
    the signal on to them, and a second one would end them in the middle of their checkpoint.
    """
    close = PContext.close
    told: dict[PContext, set[int]] = {}

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        if context not in told:
            told.clear()
            _tell_of_ends(context, reports, told.setdefault(context, set()))
        if _are_asked_to_stop(context, reports):
            _await_workers(context, reports, told[context], GRACE if grace is None else grace)
        # Without the node's program, nobody else has asked them.
        close(context, death_sig, seconds if reports.are_read or grace is None else math.ceil(grace))

    PContext.close = close_soon  # type: ignore[method-assign, assignment]


def _are_asked_to_stop(context: PContext, reports: Reports) -> bool:
    """Whether the workers end by themselves: a signal came, or one of them has written its checkpoint."""
    received = sys.exception()
    if not isinstance(received, SignalException):
        return EXIT_PREEMPTED in (handler.proc.poll() for handler in _handlers(context).values())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send it to each process of the job, beside ddprun
    reports.send({"ending": received.sigval.name})
    return reports.are_read


def _await_workers(context: PContext, reports: Reports, told: set[int], seconds: float) -> None:
    """Wait until all workers have ended, and report those that end meanwhile."""
    limit = time.monotonic() + seconds
    while len(told) < len(_handlers(context)) and time.monotonic() < limit and reports.are_read:
        time.sleep(_LOOK)
        _tell_of_ends(context, reports, told)


def _handlers(context: PContext) -> dict[int, Any]:
    """The workers by local rank; empty before they are started."""
    return getattr(context, "subprocess_handlers", {})


def _tell_of_ends(context: PContext, reports: Reports, told: set[int]) -> None:
    """Report each worker that has ended, once: its local rank is then in ``told``."""
    for local_rank, handler in _handlers(context).items():
        code = handler.proc.poll()
        if code is not None and local_rank not in told:
            told.add(local_rank)
            failure = ProcessFailure(local_rank, handler.proc.pid, code, context.error_files[local_rank])
            reports.send({"noticed": _describe(int(context.envs[local_rank]["RANK"]), failure)})


def _processes(nproc_per_node: str) -> int:
    """One process per GPU, or else one per CPU socket, unless torchrun's flag is given."""
    if nproc_per_node:
        return int(determine_local_world_size(nproc_per_node))
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else _sockets()


def _sockets() -> int:
    """The number of CPU sockets on which this process may run; 1 if unknown."""
    packages = set()
    for core in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id") as file:
                packages.add(file.read().strip())
        except OSError:
            pass
    return max(1, len(packages))


def _describe(rank: int, failure: ProcessFailure) -> dict[str, Any]:
    recorded = failure.error_file_data["message"]
    return {
        "rank": rank,
        "pid": failure.pid,
        "code": failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else None,
        # written by torch's @record, if the script uses it
        "message": recorded["message"][:_LONGEST_MESSAGE] if isinstance(recorded, dict) else None,
    }


class _Pipes(LogsSpecs):
    """A pipe for each stream of each worker; the node's program reads the other end."""

    def __init__(self, folder: str, reports: Reports) -> None:
        super().__init__(folder)
        self._folder = folder
        self._reports = reports
        self._open: list[int] = []

    @property
    def root_log_dir(self) -> str:
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for descriptor in self._open:  # from the previous attempt
            os.close(descriptor)
        self._open = []
        to = LogsDest()
        for local_rank, env in envs.items():
            attempt = env["TORCHELASTIC_RESTART_COUNT"]
            out, err = os.pipe(), os.pipe()
            self._reports.send({"rank": int(env["RANK"])}, [out[0], err[0]])
            for read, _ in (out, err):
                os.close(read)
            self._open += [out[1], err[1]]
            # torchrun opens files by name
            to.stdouts[local_rank] = f"/proc/{os.getpid()}/fd/{out[1]}"
            to.stderrs[local_rank] = f"/proc/{os.getpid()}/fd/{err[1]}"
            to.error_files[local_rank] = os.path.join(self._folder, f"error-{attempt}-{local_rank}.json")
            env["TORCHELASTIC_ERROR_FILE"] = to.error_files[local_rank]
        return to


class _SameRound(LogsSpecs):
    """Reports which workers are about to start, and sets the same TORCHELASTIC_RESTART_COUNT on all nodes.

    torch uses it as a prefix in the workers' store.

    torchrun counts separately on each node, and does not count a restart caused by another node: workers with different
    counts would deadlock. This is the only place that sees their variables before the start.
    """

    def __init__(self, logs_specs: LogsSpecs, rounds: Rounds, reports: Reports) -> None:
        self._logs_specs = logs_specs
        self._rounds = rounds
        self._reports = reports

    @property
    def root_log_dir(self) -> str:
        return self._logs_specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._rounds.number is not None:
            for env in envs.values():
                env["TORCHELASTIC_RESTART_COUNT"] = str(self._rounds.number)
        ranks = [int(env["RANK"]) for env in envs.values()]
        self._reports.send({"workers": {"ranks": ranks, "attempt": int(envs[0]["TORCHELASTIC_RESTART_COUNT"])}})
        return self._logs_specs.reify(envs)


if __name__ == "__main__":
    sys.exit(main())
