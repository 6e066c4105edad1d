"""The console script ``ddprun``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError
from ddp_callbacks.launcher.batch_job import job_end, requeue
from ddp_callbacks.launcher.launch import CannotStart, Interrupted, Launch, Limits
from ddp_callbacks.launcher.options import parse_doctor_options, parse_options, working_directory
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Here, Job, describe, is_this_machine
from ddp_callbacks.launcher.screen import Screen
from ddp_callbacks.launcher.stacks import ask_job
from ddp_callbacks.launcher.stdin import StandardInput
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.launcher.ways import command_to
from ddp_callbacks.schedulers import unknown_launcher

_BRIEF = 10.0  # seconds; a job that ends itself sooner would be started again without end
_FINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by which a user ends ddprun for good


def main() -> None:
    """Run ``ddprun`` with the arguments of this process, and exit with the job's code; 2 if nothing was started."""
    try:
        sys.exit(_main(sys.argv[1:]))
    except ConfigurationError as error:
        _say(str(error))
        sys.exit(2)


def _main(argv: list[str]) -> int:
    if argv[:1] == ["doctor"]:
        return _doctor(argv[1:])
    if argv[:1] == ["stacks"]:
        print(ask_job(argv[1:]), end="")
        return 0
    _forget_threads_of_pbs()
    job = parse_options(argv, os.environ, _here())
    _refuse_to_multiply()
    if job.dry_run:
        print(describe(job, lambda node: command_to(node, job.heartbeat_timeout)), end="")
        return 0
    return _launch_again(replace(job, environ=_terminal(job) | job.environ))


def _forget_threads_of_pbs() -> None:
    """PBS sets OMP_NUM_THREADS to the cores of a chunk, whatever runs there; that is no choice of the user's."""
    if "PBS_JOBID" in os.environ and os.environ.get("OMP_NUM_THREADS") == os.environ.get("NCPUS"):
        os.environ.pop("OMP_NUM_THREADS", None)


def _doctor(argv: list[str]) -> int:
    from ddp_callbacks.launcher.doctor import Doctor, show, show_json

    options = parse_doctor_options(argv, os.environ, _here())
    with Doctor(options.nodes, options.script) as doctor:
        findings = doctor.examine()
    works = all(finding.level != "red" for finding in findings)
    if options.json:
        show_json(findings, works)
    else:
        show([node.name for node in options.nodes], findings, Screen(sys.stdout))
    return 0 if works else 1


def _terminal(job: Job) -> dict[str, str]:
    """Variables that tell a program about the terminal behind its pipe, so that rich shows bars."""
    screen = Screen(sys.stdout)
    if not screen.is_terminal:
        return {}
    prefix = max(len(f"[{node.name}:0] ") for node in job.nodes) if job.prefix else 0
    found = {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(screen.width - prefix, 20))}
    return found | {name: os.environ[name] for name in ("TTY_COMPATIBLE",) if name in os.environ}


def _here() -> Here:
    return Here(sys.executable, working_directory(os.environ), is_this_machine)


def _launch_again(job: Job) -> int:
    """Run the job until it ends otherwise than by a preemption after which it is to be started again here."""
    while True:
        begin, launch = time.monotonic(), Launch(job, _limits(job))
        code = _run(launch)
        if code == 0 or not job.requeue or not (launch.stopped_by or code == EXIT_PREEMPTED):
            return code
        elsewhere = _requeue(launch, code, time.monotonic() - begin)
        _say(elsewhere or "starting again")
        if elsewhere:
            return code


def _requeue(launch: Launch, code: int, seconds: float) -> str | None:
    """Requeue the job; return what was done, or why not. ``None`` if it is to be started again here."""
    if code != EXIT_PREEMPTED and launch.has_begun:
        return f"not started again: not every process exited with {EXIT_PREEMPTED}"
    if not launch.stopped_by and seconds < _BRIEF:
        return f"not started again: its processes exited with {EXIT_PREEMPTED} after {seconds:.1f} s, and nobody asked"
    if line := requeue(os.environ):
        return line
    if launch.signal is None and not launch.has_begun:
        return f"not started again: {launch.stopped_by} came before any process had begun"
    return f"not started again, because {launch.stopped_by} stopped ddprun" if launch.signal in _FINAL else None


def _run(launch: Launch) -> int:
    with launch.ends_with_signals(), launch:
        try:
            launch.connect(_say)
            launch.meet()
            output = _output(launch)
            launch.start()
        except CannotStart as error:
            for problem in error.problems:
                _say(problem)
            return 2
        except Interrupted as interrupted:
            _say(str(interrupted))
            return interrupted.code
        return _watch(launch, output)


def _limits(job: Job) -> Limits:
    if job.time_limit is not None:
        return Limits(job.grace, job.time_limit, f"the time limit of {job.time_limit:g} s")
    end = None if job.grace is None else job_end(os.environ)
    if job.grace is None or end is None:
        return Limits(job.grace)
    if end.length is not None and end.length <= job.grace:  # each of its jobs would be asked to stop at once
        raise ConfigurationError(
            f"--grace must be shorter than the job, got {job.grace:g} s; {end.name} has {end.length:g} s."
        )
    return Limits(job.grace, end.left, f"the end of {end.name}")


def _watch(launch: Launch, output: Output) -> int:
    try:
        with output, StandardInput(launch.feed) as standard_input:
            return Watch(launch, output, standard_input.note_taken).run()
    except BrokenPipeError:
        # The reader is gone, as in ddprun ... | head. Discard what Python would still write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        print(f"ddprun: {text}", file=sys.stderr)


def _output(launch: Launch) -> Output:
    terminal = Terminal(sys.stdout.fileno(), sys.stderr.fileno(), lambda: launch.is_overdue)
    base = Path(launch.job.log_dir).absolute()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    folder = next(base / name for name in names if not (base / name).exists())  # it may have started again just now
    try:
        return Output(folder, launch.job.shown, launch.job.prefix, terminal)
    except OSError as error:
        raise ConfigurationError(
            f"cannot create {folder}: {error.strerror}. Choose another place with --log-dir."
        ) from None


def _refuse_to_multiply() -> None:
    """Refuse to run under srun or mpirun: a single ddprun starts every node, and these would start one per task."""
    if name := unknown_launcher(os.environ):
        raise ConfigurationError(
            f"ddprun was started as one of several processes ({name}={os.environ[name]}). Start it once, without "
            f"mpirun or the like, or start the script with that, not ddprun. If it is alone: env -u {name} ddprun ..."
        )
    env = WorkerEnv.from_environ()
    if env.world_size > 1:
        raise ConfigurationError(
            f"ddprun was started as rank {env.rank} of {env.world_size}. Start it once, without srun, mpirun or "
            "torchrun, or start the script with those, not ddprun."
        )
