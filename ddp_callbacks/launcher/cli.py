"""The console script ``ddprun``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError
from ddp_callbacks.launcher.batch_job import job_end, requeue
from ddp_callbacks.launcher.launch import CannotStart, Interrupted, Launch, Limits
from ddp_callbacks.launcher.options import (
    Options,
    parse_doctor_options,
    parse_options,
    working_directory,
)
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Here, Plan, describe, is_this_machine, make_plan, plan_nodes
from ddp_callbacks.launcher.screen import Screen
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.launcher.ways import command_to
from ddp_callbacks.schedulers import unknown_launcher

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
    options = parse_options(argv, os.environ)
    _refuse_to_multiply()
    plan = make_plan(options, _here())
    if options.dry_run:
        print(describe(plan, lambda node: command_to(node, options.heartbeat_timeout)), end="")
        return 0
    plan = replace(plan, environ=_terminal(plan, options) | plan.environ)
    return _launch_again(plan, options)


def _doctor(argv: list[str]) -> int:
    from ddp_callbacks.launcher.doctor import Doctor, show, show_json

    options = parse_doctor_options(argv, os.environ)
    nodes = plan_nodes(options.nodes, "", _here())
    with Doctor(nodes, options.script) as doctor:
        findings = doctor.examine()
    works = all(finding.level != "red" for finding in findings)
    if options.json:
        show_json(findings, works)
    else:
        show([node.name for node in nodes], findings, Screen(sys.stdout))
    return 0 if works else 1


def _terminal(plan: Plan, options: Options) -> dict[str, str]:
    """Variables that tell a program about the terminal behind its pipe, so that rich shows bars."""
    screen = Screen(sys.stdout)
    if not screen.is_terminal:
        return {}
    prefix = max(len(f"[{node.name}:0] ") for node in plan.nodes) if options.prefix else 0
    found = {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(screen.width - prefix, 20))}
    return found | {name: os.environ[name] for name in ("TTY_COMPATIBLE",) if name in os.environ}


def _here() -> Here:
    return Here(sys.executable, working_directory(os.environ), is_this_machine)


def _launch_again(plan: Plan, options: Options) -> int:
    """Run the job until it ends otherwise than by a preemption after which it is to be started again here."""
    while True:
        launch = Launch(plan, options.heartbeat_timeout, _limits(options))
        code = _run(launch, options, lambda folder, terminal: Output(folder, options.shown, options.prefix, terminal))
        if code == 0 or not options.requeue or not (launch.stopped_by or code == EXIT_PREEMPTED):
            return code
        elsewhere = _requeue(launch, code)
        _say(elsewhere or "starting again")
        if elsewhere:
            return code


def _requeue(launch: Launch, code: int) -> str | None:
    """Requeue the job; return what was done, or why not. ``None`` if it is to be started again here."""
    if code != EXIT_PREEMPTED and launch.has_begun:
        return f"not started again: not every process exited with {EXIT_PREEMPTED}"
    if line := requeue(os.environ):
        return line
    if launch.signal is None and not launch.has_begun:
        return f"not started again: {launch.stopped_by} came before any process had begun"
    return f"not started again, because {launch.stopped_by} stopped ddprun" if launch.signal in _FINAL else None


def _launch(plan: Plan, options: Options, make_output: Callable[[Path, Terminal], Output]) -> int:
    return _run(Launch(plan, options.heartbeat_timeout, _limits(options)), options, make_output)


def _run(launch: Launch, options: Options, make_output: Callable[[Path, Terminal], Output]) -> int:
    with launch.ends_with_signals(), launch:
        try:
            launch.connect(_say)
            meeting = launch.meet()
            output = _output(options, launch, make_output)
            launch.start(*meeting)
        except CannotStart as error:
            for problem in error.problems:
                _say(problem)
            return 2
        except Interrupted as interrupted:
            _say(str(interrupted))
            return interrupted.code
        return _watch(launch, output)


def _limits(options: Options) -> Limits:
    if options.time_limit is not None:
        return Limits(options.grace, options.time_limit, f"the time limit of {options.time_limit:g} s")
    end = None if options.grace is None else job_end(os.environ)
    if options.grace is None or end is None:
        return Limits(options.grace)
    if end.length is not None and end.length <= options.grace:  # each of its jobs would be asked to stop at once
        raise ConfigurationError(
            f"--grace must be shorter than the job, got {options.grace:g} s; {end.name} has {end.length:g} s."
        )
    return Limits(options.grace, end.left, f"the end of {end.name}")


def _watch(launch: Launch, output: Output) -> int:
    try:
        with output:
            return Watch(launch.plan, launch, output).run()
    except BrokenPipeError:
        # The reader is gone, as in ddprun ... | head. Discard what Python would still write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _say(text: str) -> None:
    print(f"ddprun: {text}", file=sys.stderr)


def _output(options: Options, launch: Launch, make_output: Callable[[Path, Terminal], Output]) -> Output:
    terminal = Terminal(sys.stdout.fileno(), sys.stderr.fileno(), lambda: launch.is_overdue)
    base = Path(options.torchrun["log_dir"] or "ddprun-logs").absolute()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    folder = next(base / name for name in names if not (base / name).exists())  # it may have started again just now
    try:
        return make_output(folder, terminal)
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
