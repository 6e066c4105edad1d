"""The command line of ``ddprun``: flags for the nodes, and those that it shares with torchrun."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from argparse import REMAINDER, SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from ddp_callbacks.auto import AUTO
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError
from ddp_callbacks.launcher.flags import add_flags_of_torchrun
from ddp_callbacks.launcher.hosts import Host, parse_hosts, read_hostfile
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.plan import Here, Job, NodePlan, plan_nodes
from ddp_callbacks.schedulers import hosts_of_job
from ddp_callbacks.versions import __version__

PATIENCE = 30.0
"""Seconds without a heartbeat until a connection counts as lost. TCP retries after 6 and 13 seconds of silence."""

_ABOUT = """\
Start a script on every process of every node. ddprun reaches the nodes over ssh and sets the variables of torchrun.

  ddprun train.py --lr 0.1                        on this machine
  ddprun -H node1:4,node2:4 train.py --lr 0.1     four processes on each of two nodes
  ddprun --hostfile hosts train.py                nodes from a file, one per line: HOST slots=N, or HOST:N
  ddprun train.py                                 in a PBS, Slurm or LSF job: on the job's nodes
  ddprun --rsh 'srun --overlap -N1 -n1 -w {host}' train.py     the same, through srun instead of ssh
  ddprun doctor -H node1,node2                    check that a run on these nodes would work
"""
# Variables that all nodes get: these prefixes configure libraries that take part in training.
FORWARDED = (
    *("CUDA_", "CUBLAS_", "DDP_CALLBACKS_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_", "LD_LIBRARY_PATH"),
    *("LIGHTNING_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PL_", "PYTHON", "PYTORCH_", "ROCR_", "TOKENIZERS_"),
    *("TORCH_", "TORCHINDUCTOR_", "UCX_"),
)
_WITHOUT_PIPE = ("pbs_tmrsh", "pbsdsh")  # for --rsh
_NO_SCRIPT = "name a script to run: ddprun train.py. See ddprun --help."
_USAGE = "ddprun [flags] SCRIPT [the script's arguments]"


@dataclass(frozen=True)
class DoctorOptions:
    """The options of ``ddprun doctor``."""

    nodes: tuple[NodePlan, ...]
    json: bool
    script: str | None


class _OneLineParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. See {self.prog} --help.")


class _RunParser(_OneLineParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            raise ConfigurationError(_NO_SCRIPT)
        super().error(message)

    def format_help(self) -> str:
        usage, _, flags = super().format_help().partition("\n\n")
        return f"{usage}\n\n{_ABOUT}\n{flags}"

    def refuse_unknown(self, flags: Sequence[str]) -> NoReturn:
        """Report an unknown flag, with similar known ones."""
        flag = flags[0].partition("=")[0]
        known = [spelling for action in self._actions for spelling in action.option_strings if len(spelling) > 2]
        close = get_close_matches(flag, known, 1, 0.8)
        hint = f"Did you mean {close[0]}?" if close else "If it belongs to your script, put it after the script."
        raise ConfigurationError(
            f"unknown flag {flag}: neither ddprun nor torchrun has it. {hint} See {self.prog} --help."
        )


def _add_flags(parser: ArgumentParser) -> None:
    _add_host_flags(parser)
    start = parser.add_argument_group("start")
    _add_variables(start)
    start.add_argument(
        "--auto",
        action="append_const",
        const=f"{AUTO}=1",
        dest="variables",
        help="train an unedited script on all processes: a Lightning Trainer with the default strategy, a Torchbearer "
        "Trial",
    )
    start.add_argument("--dry-run", action="store_true", help="print what would run on each node, and start nothing")
    start.add_argument(
        "--heartbeat-timeout",
        type=_patience,
        default=PATIENCE,
        metavar="SECONDS",
        help="declare a node lost after this many silent seconds and stop the job; an elastic job continues without it "
        f"(default: {PATIENCE:g}, which survives a network outage of 10 seconds)",
    )
    start.add_argument("--version", action="version", version=f"ddprun {__version__}")
    _add_end_flags(parser.add_argument_group("end"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--show-ranks",
        default="0",
        type=_ranks,
        metavar="RANKS",
        help="ranks whose output is shown: 0,3 or all (default: 0). The output of every rank is also saved on this "
        "machine, in --log-dir (default: ddprun-logs)",
    )
    output.add_argument("--no-prefix", action="store_true", help="don't start each line with [node:rank]")


def _add_end_flags(end: _ActionsContainer) -> None:
    end.add_argument(
        "--grace",
        type=_positive,
        metavar="SECONDS",
        help="time for a checkpoint: when ddprun is asked to stop, all processes get the signal, and this much later "
        f"everything is ended by force (default: {GRACE:g}). With this flag, the signal waits for a process that does "
        "not handle it yet",
    )
    end.add_argument(
        "--time-limit",
        type=_positive,
        metavar="SECONDS",
        help="end the job after this time; it is asked to stop by SIGTERM, --grace earlier (default with --grace: the "
        "end of the Slurm or PBS job, where it can be found)",
    )
    end.add_argument(
        "--requeue",
        action="store_true",
        help=f"after a preemption (all processes exited with {EXIT_PREEMPTED}), requeue the Slurm or PBS job. "
        "Elsewhere start again, unless Ctrl-C, SIGTERM or SIGHUP stopped ddprun",
    )


def _add_variables(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "-x",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        dest="variables",
        help="pass this variable to every process; without =VALUE, with its value on this machine. Repeatable. "
        f"Settings of the libraries are always passed: {', '.join(f'{name}*' for name in FORWARDED)}",
    )


def _add_host_flags(parser: ArgumentParser) -> None:
    """Add the flags for nodes and the locations on them."""
    hosts = parser.add_argument_group("nodes")
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="HOST[:SLOTS],...",
        help="the nodes, named as for ssh; rank 0 runs on the first. SLOTS is the number of processes on that node; "
        "--nproc-per-node overrides it. Default: one per GPU, or one per CPU socket if there is no GPU",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file; lines may also set python= and chdir=")
    hosts.add_argument(
        "--rsh",
        metavar="COMMAND",
        help="reach the nodes with this command instead of ssh. It must run /bin/sh on the node and pass on input and "
        "output: 'srun --overlap -N1 -n1 -w {host}', blaunch, or 'kubectl exec -i {host} --', for example. "
        "Without {host}, the name of the node is appended",
    )
    hosts.add_argument("--python", metavar="PATH", help="Python interpreter on the nodes (default: path of this one)")
    hosts.add_argument("--chdir", metavar="DIR", help="working directory on the nodes (default: the current one)")


def parse_options(argv: Sequence[str], environ: Mapping[str, str], here: Here) -> Job:
    """Parse the command line, without the program's name.

    Raises:
        ConfigurationError: With a one-line message.
    """
    if not argv:
        raise ConfigurationError(_NO_SCRIPT)
    parser = _RunParser(prog="ddprun", usage=_USAGE, allow_abbrev=False)
    _add_flags(parser)
    add_flags_of_torchrun(parser, environ)
    parser.add_argument("training_script", help=SUPPRESS)
    parser.add_argument("training_script_args", nargs=REMAINDER, help=SUPPRESS)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    _refuse_contradictions(args)
    nodes = _nodes(args, environ, here, args.nproc_per_node)
    command = (args.training_script, *args.training_script_args)
    return Job(
        nodes=nodes,
        min_nodes=_min_nodes(args, nodes),
        max_restarts=args.max_restarts,
        address=args.master_addr,
        port=args.master_port,
        script=None if args.module or args.no_python else args.training_script,
        has_python=not args.no_python,
        command=("-m", *command) if args.module else command,
        role=args.role,
        run_id=args.rdzv_id,
        environ=_variables(args.variables, environ),
        forwarded=_forwarded(environ),
        shown=args.show_ranks if args.tee == "0" else None,
        prefix=not args.no_prefix,
        log_dir=args.log_dir,
        heartbeat_timeout=args.heartbeat_timeout,
        kill_after=GRACE if args.shutdown_timeout is None else args.shutdown_timeout,
        grace=args.grace,
        time_limit=args.time_limit,
        requeue=args.requeue,
        dry_run=args.dry_run,
    )


def _refuse_contradictions(args: Namespace) -> None:
    if args.time_limit is not None and args.time_limit <= (args.grace or GRACE):
        raise ConfigurationError(
            f"--time-limit must be longer than --grace ({args.grace or GRACE:g} s), got {args.time_limit:g}."
        )
    if args.module and args.no_python:
        raise ConfigurationError("--module and --no-python cannot be combined.")


def _min_nodes(args: Namespace, nodes: Sequence[NodePlan]) -> int:
    low, _, high = args.nnodes.partition(":")
    if not low:
        return len(nodes)
    if not int(low) <= len(nodes) <= int(high or low):
        raise ConfigurationError(
            f"--nnodes {args.nnodes} does not match the number of nodes, {len(nodes)}. Name the nodes with -H or "
            "--hostfile, and leave --nnodes out or give a range that contains their number."
        )
    return int(low)


def parse_doctor_options(argv: Sequence[str], environ: Mapping[str, str], here: Here) -> DoctorOptions:
    """Parse the command line after ``ddprun doctor``; errors as in :func:`parse_options`."""
    parser = _OneLineParser(
        prog="ddprun doctor", description="Check that a run on these nodes would work, and say what to fix."
    )
    _add_host_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("script", nargs="?", help="a script that every node must have")
    args = parser.parse_args(argv)
    return DoctorOptions(_nodes(args, environ, here, ""), args.json, args.script)


def _nodes(args: Namespace, environ: Mapping[str, str], here: Here, processes: str) -> tuple[NodePlan, ...]:
    hosts = _hosts(args, environ) or [Host("localhost")]
    return plan_nodes(hosts, processes, args.python or here.python, args.chdir or here.cwd, _rsh(args.rsh), here)


def _rsh(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--rsh takes a command, got {text!r}: {error}.") from None
    if not words:
        raise ConfigurationError("--rsh takes a command, got an empty one.")
    if os.path.basename(words[0]) in _WITHOUT_PIPE:
        raise ConfigurationError(
            f"--rsh {text!r}: {words[0]} passes on neither input nor output; what it starts writes to the job's files. "
            "Leave out --rsh if ssh can reach the nodes, or start the processes with mpiexec."
        )
    if shutil.which(words[0]) is None:
        raise ConfigurationError(f"--rsh {text!r}: program {words[0]} not found in PATH.")
    return tuple(words) if "{host}" in text else (*words, "{host}")


def _hosts(args: Namespace, environ: Mapping[str, str]) -> list[Host]:
    """Hosts from ``-H``, a host file, or the current job; none if it is to run here."""
    if args.hosts is not None and args.hostfile is not None:
        raise ConfigurationError("-H and --hostfile both name the nodes. Use one of them.")
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    return [Host(name, slots) for name, slots in hosts_of_job(environ)]


def _forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The current settings of the libraries, so that all nodes have the same.

    But which GPUs are visible is a matter of each node: their names and numbers differ.
    """
    found = {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    return {name: value for name, value in found.items() if not name.endswith("_VISIBLE_DEVICES")}


def _variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name:
            raise ConfigurationError(f"-x takes NAME or NAME=VALUE, got {text!r}.")
        if not equals and name not in environ:
            raise ConfigurationError(f"-x {name}: the variable is not set here. Set it, or write -x {name}=VALUE.")
        variables[name] = value if equals else environ[name]
    return variables


def _ranks(text: str) -> frozenset[int] | None:
    if text == "all":
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ArgumentTypeError(f"takes rank numbers separated by commas, or all, got {text!r}")
    return frozenset(int(rank) for rank in text.split(","))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"takes a positive number, got {text!r}")
    return value


def _patience(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) < 2:
        raise ArgumentTypeError(f"takes seconds, at least 2, got {text!r}")
    return float(text)


def working_directory(environ: Mapping[str, str]) -> str:
    """The current directory, by the user's name for it: its resolved path may not exist on another node."""
    named = environ.get("PWD", "")
    return named if os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, ".") else os.getcwd()
