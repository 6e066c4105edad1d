"""Parse the command line of ``ddprun`` into a job."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from ddp_callbacks.auto import AUTO, INDEPENDENT
from ddp_callbacks.cluster.environment import KEEP_GOING, NO_REPORT, TRACE
from ddp_callbacks.cluster.network import addresses_of, is_loopback, own_addresses
from ddp_callbacks.cluster.schedulers import cores_of_job, gpus_of_job, hosts_of_job, output_of
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.batch_job import JOBS
from ddp_callbacks.launcher.flags import FORWARDED, GROUPS, NODES, PREDICT, REFUSED
from ddp_callbacks.launcher.hosts import NodePlan, parse_hosts, read_hostfile
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.meant import refuse_script
from ddp_callbacks.versions import __version__

_ABOUT = """\
Start a script on every process of every node. ddprun reaches the nodes over ssh and sets the variables of torchrun.

  ddprun train.py --lr 0.1                        on this machine
  ddprun -H node1:4,node2:4 train.py --lr 0.1     four processes on each of two nodes
  ddprun --hostfile hosts train.py                nodes from a file, one per line: HOST slots=N, or HOST:N
  ddprun train.py                                 in a PBS, Slurm or LSF job: on the job's nodes
  ddprun --rsh ssh train.py                       in a Slurm job: through ssh instead of srun
  ddprun doctor -H node1,node2                    check that a run on these nodes would work
  ddprun predict -H node1,node2 train.py          say how many times as fast more machines would be
  ddprun status                                   show what each rank of a running job does, and how fast
  ddprun stacks                                   show where each rank of a running job is
  ddprun join -H node3:4                          let a node take part in a running job"""
_ABOUT_DOCTOR = """\
Check that a run would work, and say what to fix. It takes all flags of ddprun: put "doctor" into your command."""
_ABOUT_PREDICT = """\
Train a script for a short time on few and on more processes, and say what more machines would bring. It takes all
flags of ddprun: put "predict" into your command. The script writes its files as always: name others for checkpoints."""
_WITHOUT_PIPE = ("pbs_tmrsh", "pbsdsh")  # commands that --rsh refuses: they pass on no input or output
# Starts a process on a node beside others, with all cores and GPUs of the job there.
_SRUN = ("srun", "--overlap", "--mpi=none", "--cpu-bind=none", "--gpus-per-node={gpus}", "-N1", "-n1", "-w", "{host}")
_OURS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
_PLAIN = re.compile(r"[0-9,-]*")  # numbers of devices, which other nodes may have, too


def is_this_machine(name: str) -> bool:
    """Whether a host needs no ssh, because the user has named it by this machine's name or address.

    Another machine may have the same name in another domain: this name's addresses tell.
    """
    own, short = socket.gethostname(), name.partition(".")[0]
    if is_loopback(name) or own == name or name == own.partition(".")[0] or name in own_addresses():
        return True
    return own == short and all(is_loopback(found) or found in own_addresses() for found in _addresses_of(name))


def _addresses_of(name: str) -> list[str]:
    """Return a host's addresses; none if only the configuration of ssh knows it."""
    try:
        return addresses_of(name, 0)
    except OSError:
        return []


class _Parser(ArgumentParser):
    def __init__(self, command: str, show_all: bool) -> None:
        super().__init__(
            prog=f"ddprun {command}".rstrip(),
            usage="%(prog)s [flags] SCRIPT [the script's arguments]",
            description={"doctor": _ABOUT_DOCTOR, "predict": _ABOUT_PREDICT}.get(command, _ABOUT),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command == "doctor":
            self.add_argument("--json", action="store_true", help="print JSON instead of lines")
        elif command:
            for flag in PREDICT:
                flag.add_to(self, is_shown=True)
        else:
            self.add_argument("--help-all", action="store_true", help="show all flags and exit")
            self.add_argument("--version", action="version", version=f"ddprun {__version__}")
        usual = self.add_argument_group("flags")
        for title, flags in GROUPS.items():
            group = self.add_argument_group(title) if show_all else usual
            for flag in flags:
                flag.add_to(group, is_shown=flags is NODES if command else show_all or flag.usual)
        self.add_argument("training_script", nargs="?", help=SUPPRESS)
        self.add_argument("training_script_args", nargs=REMAINDER, help=SUPPRESS)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse ignores a full disk

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. See {self.prog} --help.")

    def refuse_unknown(self, given: str) -> NoReturn:
        """Raise for an unknown flag, with a remedy or a similar known flag."""
        flag = given.partition("=")[0]
        name = flag.rstrip("0123456789")  # -n2
        if remedy := REFUSED.get(name.replace("_", "-")):
            raise ConfigurationError(f"ddprun has no {name}: {remedy}.")
        known = [spelling for spelling in self._option_string_actions if len(spelling) > 2]
        close = get_close_matches(flag, known, 1, 0.8)
        hint = f"Did you mean {close[0]}?" if close else "If it belongs to your script, put it after the script."
        says = f"unknown flag {flag}: neither ddprun nor torchrun has it. {hint} See {self.prog} --help."
        raise ConfigurationError(says)


def parse_options(
    argv: Sequence[str], environ: Mapping[str, str], is_here: Callable[[str], bool] = is_this_machine, command: str = ""
) -> Job:
    """Parse the command line: the arguments after ``ddprun``, or after ``command``, ``doctor`` or ``predict``.

    Raises:
        ConfigurationError: The command line is invalid; the message has one line.
    """
    parser = _Parser(command, show_all=False)
    job, unknown = parser.parse_known_args(argv, namespace=Job())
    if list(argv[: len(argv) - len(job.training_script_args)][-2:]) == [job.training_script, "--"]:
        job.training_script_args.insert(0, "--")  # argparse drops it
    if unknown:
        parser.refuse_unknown(unknown[0])
    if not command and job.help_all:
        _Parser(command, show_all=True).print_help()
        parser.exit()
    if command != "doctor" and job.training_script is None:
        raise ConfigurationError(f"name a script to run: {parser.prog} train.py. See {parser.prog} --help.")
    if job.script is not None:
        refuse_script(job.command)
    _refuse_contradictions(job, environ)
    job.nodes = nodes_of(job, environ, is_here)
    job.min_nodes = _min_nodes(job)
    choices = {AUTO: job.auto, INDEPENDENT: job.independent, KEEP_GOING: job.keep_going, NO_REPORT: job.no_report}
    switches = [f"{name}=1" for name, is_on in choices.items() if is_on] + [f"{TRACE}={job.trace}"] * bool(job.trace)
    job.environ = _variables([*switches, *(job.x or ())], environ, job.nodes)
    # Which GPUs are visible is a matter of each node: their names and numbers differ.
    found = {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    job.forwarded = {name: value for name, value in found.items() if not name.endswith("_VISIBLE_DEVICES")}
    return job


def _refuse_contradictions(job: Job, environ: Mapping[str, str]) -> None:
    if job.time_limit is not None and job.time_limit <= job.force:
        raise ConfigurationError(f"--time-limit must be longer than --grace ({job.force:g} s), got {job.time_limit:g}.")
    if job.module and job.no_python:
        raise ConfigurationError("--module and --no-python cannot be combined.")
    if job.hosts is not None and job.hostfile is not None:
        raise ConfigurationError("-H and --hostfile both name the nodes. Use one of them.")
    if job.keep_going and job.max_restarts:
        raise ConfigurationError(
            "--keep-going and --max-restarts both say what follows when a process is lost: the others continue, or all "
            "restart. Use one of them."
        )
    if job.trace and job.no_report:
        raise ConfigurationError("--trace needs what --no-report leaves out. Use one of them.")
    if job.requeue and not job.dry_run and not any(map(environ.get, JOBS)):
        raise ConfigurationError("--requeue needs a Slurm, PBS or LSF job. Elsewhere, --max-restarts starts again.")


def _min_nodes(job: Job) -> int:
    low, _, high = job.nnodes.partition(":")
    if not low:
        return len(job.nodes)
    if not int(low) <= len(job.nodes) <= int(high or low):
        raise ConfigurationError(
            f"--nnodes {job.nnodes} does not match the number of nodes, {len(job.nodes)}. Name the nodes with -H or "
            "--hostfile, and leave --nnodes out or give a range that contains their number."
        )
    return int(low)


def nodes_of(
    job: Job, environ: Mapping[str, str], is_here: Callable[[str], bool] = is_this_machine
) -> tuple[NodePlan, ...]:
    """Return the nodes in rank order; ``--nproc-per-node`` overrides their slots."""
    is_named = job.hosts is not None or job.hostfile is not None
    if job.rsh is None and not is_named and "SLURM_JOB_ID" in environ and shutil.which("srun"):
        job.rsh = ["srun"]
    rsh = _rsh(job.rsh)
    gpus = gpus_of_job(environ) if job.rsh == ["srun"] else {}
    return tuple(
        replace(
            host,
            processes=job.nproc_per_node or host.processes,
            python=_interpreter(host.python or job.python or sys.executable, environ),
            cwd=_absolute(host.cwd or job.chdir or ".", environ),
            rank=rank,
            is_here=is_here(host.host) and not (is_named and job.rsh is not None and is_loopback(host.host)),
            rsh=None if rsh is None else _filled(rsh, host.host, gpus),
            setup=job.setup,
        )
        for rank, host in enumerate(_hosts(job, environ) or [NodePlan("localhost")])
    )


def _interpreter(name: str, environ: Mapping[str, str]) -> str:
    """Return an interpreter's path; a bare name is looked up on each node."""
    return _absolute(name, environ) if "/" in name else name


def _absolute(path: str, environ: Mapping[str, str]) -> str:
    """Return a path as the user's shell understands it here."""
    path = os.path.expanduser(path)
    return path if os.path.isabs(path) else os.path.normpath(os.path.join(working_directory(environ), path))


def _hosts(job: Job, environ: Mapping[str, str]) -> list[NodePlan]:
    """Return the hosts from ``-H``, a host file, or the scheduler's job; none if the job is to run here."""
    if job.hosts is not None:
        return parse_hosts(",".join(job.hosts))
    if job.hostfile is not None:
        return read_hostfile(job.hostfile)
    if job.standalone:
        return []
    found = hosts_of_job(environ)
    cores = cores_of_job(len(found), environ)
    return [NodePlan(name, str(slots or ""), cores=there) for (name, slots), there in zip(found, cores, strict=True)]


def _rsh(words: list[str] | None) -> tuple[str, ...] | None:
    """Return the words of ``--rsh``, completed so that they contain ``{host}``; ``None`` for ssh."""
    if words is None:
        return None
    program = words[0] if words else ""
    if os.path.basename(program) in _WITHOUT_PIPE:
        raise ConfigurationError(
            f"--rsh: {program} passes on neither input nor output; what it starts writes to the job's files. Leave out "
            "--rsh if ssh can reach the nodes, or start the processes with mpiexec."
        )
    if shutil.which(program) is None:
        raise ConfigurationError(f"--rsh: program {program!r} not found in PATH.")
    if words == ["srun"]:
        said, _ = output_of("srun", "--help")
        return ("srun", *(["--external-launcher"] if "--external-launcher" in said else []), *_SRUN[1:])
    return tuple(words) if any("{host}" in word for word in words) else (*words, "{host}")


def _filled(rsh: Sequence[str], host: str, gpus: Mapping[str, int]) -> tuple[str, ...]:
    words = [word for word in rsh if host in gpus or "{gpus}" not in word]
    return tuple(word.replace("{host}", host).replace("{gpus}", str(gpus.get(host))) for word in words)


def _variables(given: Sequence[str], environ: Mapping[str, str], nodes: Sequence[NodePlan]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*" if equals else r"[\w*?!\[\]-]+", name):
            raise ConfigurationError(f"-x takes NAME or NAME=VALUE, got {text!r}. Each variable has an -x.")
        if _OURS.fullmatch(name):
            raise ConfigurationError(f"-x {name}: ddprun sets it for each process. Leave it out.")
        found = {name: value} if equals else {each: environ[each] for each in environ if fnmatchcase(each, name)}
        if not found:
            if name.isidentifier():
                raise ConfigurationError(f"-x {name}: no such variable is set here. Set it, or write -x {name}=VALUE.")
            raise ConfigurationError(f"-x {name}: no variable with such a name is set here. Set one, or leave it out.")
        variables.update(found)
    for name, value in variables.items():
        if name.endswith("_VISIBLE_DEVICES") and not _PLAIN.fullmatch(value) and not all(n.is_here for n in nodes):
            raise ConfigurationError(
                f"-x {name}: {value} names devices of one machine, which the other nodes do not have. Give their "
                f"numbers: -x {name}=0,1"
            )
    return variables


def working_directory(environ: Mapping[str, str]) -> str:
    """Return the current directory by the user's name for it: its resolved path may not exist on another node."""
    named = environ.get("PWD", "")
    try:
        return named if os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, ".") else os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError("the current directory was removed. Go to another one.") from None
