"""The command line of ``ddprun``: what it says of the job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from argparse import REMAINDER, SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from ddp_callbacks.auto import AUTO
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.flags import FORWARDED, NODES, add_flags, add_some
from ddp_callbacks.launcher.hosts import Host, parse_hosts, read_hostfile
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.plan import Here, Job, NodePlan, plan_nodes
from ddp_callbacks.schedulers import cores_of_job, hosts_of_job
from ddp_callbacks.versions import __version__

_ABOUT = """\
Start a script on every process of every node. ddprun reaches the nodes over ssh and sets the variables of torchrun.

  ddprun train.py --lr 0.1                        on this machine
  ddprun -H node1:4,node2:4 train.py --lr 0.1     four processes on each of two nodes
  ddprun --hostfile hosts train.py                nodes from a file, one per line: HOST slots=N, or HOST:N
  ddprun train.py                                 in a PBS, Slurm or LSF job: on the job's nodes
  ddprun --rsh srun train.py                      in a Slurm job: through srun instead of ssh
  ddprun doctor -H node1,node2                    check that a run on these nodes would work
  ddprun stacks                                   show where each rank of a running job is
"""
_WITHOUT_PIPE = ("pbs_tmrsh", "pbsdsh")  # for --rsh
_SRUN = ("srun", "--overlap", "--mpi=none", "--cpu-bind=none", "-N1", "-n1", "-w", "{host}")
_PLAIN = re.compile(r"[0-9,-]*")  # the devices that another node may have, too
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
    def __init__(self, environ: Mapping[str, str], show_all: bool = False) -> None:
        super().__init__(prog="ddprun", usage=_USAGE, allow_abbrev=False)
        self.environ = environ
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
        self.add_argument("--version", action="version", version=f"ddprun {__version__}")
        add_flags(self, environ, show_all)
        self.add_argument("training_script", help=SUPPRESS)
        self.add_argument("training_script_args", nargs=REMAINDER, help=SUPPRESS)

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


class _HelpAll(Action):
    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, _RunParser)
        _RunParser(parser.environ, show_all=True).print_help()
        parser.exit()


def parse_options(argv: Sequence[str], environ: Mapping[str, str], here: Here) -> Job:
    """Parse the command line, without the program's name.

    Raises:
        ConfigurationError: With a one-line message.
    """
    if not argv:
        raise ConfigurationError(_NO_SCRIPT)
    parser = _RunParser(environ)
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
        bind=args.bind,
        role=args.role,
        run_id=args.rdzv_id,
        environ=_variables([f"{AUTO}=1"] * args.auto + args.variables, environ, nodes),
        forwarded=_forwarded(environ),
        shown=args.show_ranks if args.tee == "0" else None,
        prefix=not args.no_prefix,
        log_dir=args.log_dir,
        heartbeat_timeout=args.heartbeat_timeout,
        kill_after=args.shutdown_timeout,
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
    add_some(parser, NODES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("script", nargs="?", help="a script that every node must have")
    args = parser.parse_args(argv)
    return DoctorOptions(_nodes(args, environ, here, ""), args.json, args.script)


def _nodes(args: Namespace, environ: Mapping[str, str], here: Here, processes: str) -> tuple[NodePlan, ...]:
    hosts = _hosts(args, environ) or [Host("localhost")]
    usual = NodePlan("", None, 0, processes, args.python or here.python, args.chdir or here.cwd, setup=args.setup)
    if args.rsh is None and "SLURM_JOB_ID" in environ and not (args.hosts or args.hostfile) and shutil.which("srun"):
        return plan_nodes(hosts, replace(usual, instead=_srun()), here)
    return plan_nodes(hosts, replace(usual, rsh=_rsh(args.rsh)), here)


def _srun() -> tuple[str, ...]:
    """The words by which srun starts one process on a node beside others, with all cores of the job there."""
    said = subprocess.run(["srun", "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    return (*_SRUN[:1], *(["--external-launcher"] if "--external-launcher" in said else []), *_SRUN[1:])


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
    if words == ["srun"]:
        return _srun()
    return tuple(words) if "{host}" in text else (*words, "{host}")


def _hosts(args: Namespace, environ: Mapping[str, str]) -> list[Host]:
    """Hosts from ``-H``, a host file, or the current job; none if it is to run here."""
    if args.hosts is not None and args.hostfile is not None:
        raise ConfigurationError("-H and --hostfile both name the nodes. Use one of them.")
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    found = hosts_of_job(environ)
    cores = cores_of_job(len(found), environ)
    return [Host(name, slots, cores=there) for (name, slots), there in zip(found, cores, strict=True)]


def _forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The current settings of the libraries, so that all nodes have the same.

    But which GPUs are visible is a matter of each node: their names and numbers differ.
    """
    found = {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    return {name: value for name, value in found.items() if not name.endswith("_VISIBLE_DEVICES")}


def _variables(given: Sequence[str], environ: Mapping[str, str], nodes: Sequence[NodePlan]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name:
            raise ConfigurationError(f"-x takes NAME or NAME=VALUE, got {text!r}.")
        found = {name: value} if equals else {each: environ[each] for each in environ if fnmatchcase(each, name)}
        if not found:
            raise ConfigurationError(f"-x {name}: the variable is not set here. Set it, or write -x {name}=VALUE.")
        variables.update(found)
    for name, value in variables.items():
        if name.endswith("_VISIBLE_DEVICES") and not _PLAIN.fullmatch(value) and any(node.host for node in nodes):
            raise ConfigurationError(
                f"-x {name}: {value} names devices of one machine, which the other nodes do not have. Give their "
                f"numbers: -x {name}=0,1"
            )
    return variables


def working_directory(environ: Mapping[str, str]) -> str:
    """The current directory, by the user's name for it: its resolved path may not exist on another node."""
    named = environ.get("PWD", "")
    return named if os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, ".") else os.getcwd()
