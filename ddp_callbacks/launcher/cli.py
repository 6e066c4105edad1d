"""The console script ``ddprun``."""

from __future__ import annotations

import errno
import os
import signal
import sys

from ddp_callbacks.cluster.environment import WorkerEnv
from ddp_callbacks.cluster.schedulers import is_shell_of_step, unknown_launcher
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.join import join
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.plan import describe
from ddp_callbacks.reporting.stacks import ask_for_stacks
from ddp_callbacks.reporting.status import show_status


def main() -> None:
    """Run ``ddprun`` with the arguments of this process, and exit with the job's code; 2 if nothing was started."""
    # A closed stream is None.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    try:
        try:
            code = _main(sys.argv[1:])
        finally:  # also after --help
            sys.stdout.flush()
        if code == 128 + signal.SIGINT:
            _end_by_interrupt()
        sys.exit(code)
    except BrokenPipeError:
        # The reader is gone, as in ddprun ... | head. Discard what Python would still write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"ddprun: cannot write to standard output: {error.strerror}", file=sys.stderr)
        os._exit(1)  # Python would try again
    except KeyboardInterrupt:
        _end_by_interrupt()
    except ConfigurationError as error:
        print(f"ddprun: {error}", file=sys.stderr)
        sys.exit(2)


def _end_by_interrupt() -> None:
    """End by SIGINT, as Python does: a shell's loop ends, too, and sees 130. After a code of 130 it would continue."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _main(argv: list[str]) -> int:
    if argv[:1] == ["stacks"]:
        print(ask_for_stacks(argv[1:]), end="")
        return 0
    if argv[:1] == ["status"]:
        return show_status(argv[1:])
    if argv[:1] == ["join"]:
        return join(argv[1:])
    if argv[:1] == ["doctor"]:
        from ddp_callbacks.launcher.doctor import examine

        return examine(parse_options(argv[1:], os.environ, command="doctor"))
    _forget_threads_of_pbs()
    command = "predict" if argv[:1] == ["predict"] else ""
    job = parse_options(argv[bool(command) :], os.environ, command=command)
    _refuse_to_multiply()
    if job.dry_run:
        print(describe(job), end="")
        return 0
    if command:
        from ddp_callbacks.launcher.predict import run_prediction

        return run_prediction(job)
    from ddp_callbacks.launcher.run_job import run

    return run(job)


def _forget_threads_of_pbs() -> None:
    """Drop the OMP_NUM_THREADS that PBS sets to the cores of a chunk, whatever runs there: no choice of the user's."""
    if "PBS_JOBID" in os.environ and os.environ.get("OMP_NUM_THREADS") == os.environ.get("NCPUS"):
        os.environ.pop("OMP_NUM_THREADS", None)


def _refuse_to_multiply() -> None:
    """Refuse to run under srun or mpirun: a single ddprun starts every node, and these would start one per task."""
    if name := unknown_launcher(os.environ):
        raise ConfigurationError(
            f"ddprun was started as one of several processes ({name}={os.environ[name]}). Start it once, without "
            f"mpirun or the like, or start the script with that, not ddprun. If it is alone: env -u {name} ddprun ..."
        )
    env = WorkerEnv.from_environ()
    if env.world_size > 1 and not is_shell_of_step(os.environ):
        raise ConfigurationError(
            f"ddprun was started as rank {env.rank} of {env.world_size}. Start it once, without srun, mpirun or "
            "torchrun, or start the script with those, not ddprun."
        )
