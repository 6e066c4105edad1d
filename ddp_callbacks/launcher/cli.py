"""The console script ``ddprun``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.connection import ssh_command
from ddp_callbacks.launcher.launch import CannotStart, Interrupted, Launch
from ddp_callbacks.launcher.options import Options, parse_options, working_directory
from ddp_callbacks.launcher.output import Output
from ddp_callbacks.launcher.plan import Plan, describe, is_this_machine, make_plan
from ddp_callbacks.launcher.watch import Watch


def main() -> None:
    """Run ``ddprun`` with the arguments of this process, and exit with the job's code; 2 if nothing was started."""
    try:
        sys.exit(_main(sys.argv[1:]))
    except ConfigurationError as error:
        print(f"ddprun: {error}", file=sys.stderr)
        sys.exit(2)


def _main(argv: list[str]) -> int:
    options = parse_options(argv, os.environ)
    _refuse_to_multiply()
    plan = make_plan(options, sys.executable, working_directory(os.environ), is_this_machine)
    if options.dry_run:
        print(describe(plan, lambda host: ssh_command(host, options.heartbeat_timeout)), end="")
        return 0
    return _launch(plan, options)


def _launch(plan: Plan, options: Options) -> int:
    with Launch(plan, options.heartbeat_timeout) as launch, launch.ends_with_signals():
        try:
            launch.connect(say=lambda text: print(f"ddprun: {text}", file=sys.stderr))
            meeting = launch.meet()
            output = _output(options)
            launch.start(*meeting)
        except CannotStart as error:
            for problem in error.problems:
                print(f"ddprun: {problem}", file=sys.stderr)
            return 2
        except Interrupted:
            return 128 + (launch.signal or 0)
        try:
            return Watch(plan, launch, output).run()
        finally:
            output.close()


def _output(options: Options) -> Output:
    base = Path(options.torchrun["log_dir"] or "ddprun-logs").absolute()
    folder = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        return Output(folder, options.shown, options.prefix, sys.stdout.buffer, sys.stderr.buffer)
    except OSError as error:
        raise ConfigurationError(f"cannot make {folder}: {error.strerror}. Name another place by --log-dir.") from None


def _refuse_to_multiply() -> None:
    """One command starts every node: under srun or mpirun there would be one for each task."""
    env = WorkerEnv.from_environ()
    if env.world_size > 1:
        raise ConfigurationError(
            f"ddprun was itself started as rank {env.rank} of {env.world_size}. Start it once, not under srun, mpirun "
            "or torchrun; or start the script itself with those."
        )
