"""The flags of ``ddprun``: its own, those that it shares with torchrun, and a remedy for each other one of torchrun's.

torchrun's are listed here so that ``ddprun`` can parse a command line without torch; a test compares them with torch's.

A flag is an attribute of :class:`.job.Job` of the same name. What the ranks get of it, :func:`.plan.starts` puts in
``StartRanks`` of node/processes, where ``start_rank`` uses it on each node: ``one_stream`` is an example.
"""

from __future__ import annotations

import os
import re
import shlex
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.node.binding import KINDS
from ddp_callbacks.launcher.node.ending import GRACE

PATIENCE = 10.0
"""Seconds without a heartbeat until a connection counts as lost. TCP retries after 6 and 13 seconds of silence."""

# Variables that all nodes get: these prefixes configure libraries that take part in training.
FORWARDED = (
    *("CUDA_", "CUBLAS_", "DDP_CALLBACKS_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_", "LD_LIBRARY_PATH"),
    *("LIGHTNING_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PL_", "PYTHON", "PYTORCH_", "ROCR_", "TOKENIZERS_"),
    *("SLURM_CPUS_PER_TASK", "TORCH_", "TORCHINDUCTOR_", "UCX_"),
)


def _takes(words: str, pattern: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a type for argparse: a text that matches ``pattern``, which the error describes by ``words``."""

    def parse(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ArgumentTypeError(f"takes {words}, got {text!r}")
        return convert(text)

    return parse


def _ranks(text: str) -> frozenset[int] | None:
    return None if text == "all" else frozenset(map(int, text.split(",")))


_RANKS = _takes("rank numbers separated by commas, or all", r"all|\d+(,\d+)*", _ranks)
_POSITIVE = _takes("a positive number of seconds", r"(?=.*[1-9])\d*\.?\d+", float)
_SECONDS = _takes("seconds, at least 2", r"0*([2-9]|[1-9]\d+)(\.\d*)?", float)
_BINDING = _takes(", ".join(KINDS), "|".join(KINDS))
_NODES = _takes("a number of at least 1, or MIN:MAX", r"|[1-9]\d*(:[1-9]\d*)?")
_PROCESSES = _takes("a number of at least 1, auto, cpu, gpu or xpu", r"|auto|cpu|gpu|xpu|[1-9]\d*")
_PORT = _takes("a port up to 65535", r"\d{1,4}|[1-5]\d{4}|6([0-4]\d{3}|5([0-4]\d\d|5([0-2]\d|3[0-5])))", int)
_PATH = os.path.expanduser
_COUNT = _takes("a whole number that is not negative", r"\d+", int)


@dataclass(frozen=True)
class Flag:
    """A flag of the command line.

    Attributes:
        spellings: All its spellings, separated by spaces.
        help: The help text: ``--help-all`` shows it, and ``--help`` if the flag is ``usual``.
        metavar: The name of its value; empty for a switch.
        type: Parses the value.
        repeats: Whether the flag may be given more than once.
    """

    spellings: str
    help: str
    metavar: str = ""
    default: Any = None
    type: Callable[[str], Any] = str
    usual: bool = False
    repeats: bool = False

    def add_to(self, parser: Any, is_shown: bool) -> None:
        """Add the flag to a parser."""
        words, kind = self.spellings.split(), {"action": "store_true"}
        if self in TORCHRUN:
            words += [f"--{word[2:].replace('-', '_')}" for word in words if "-" in word[2:]]
        if self.metavar:
            taken = {"metavar": self.metavar, "type": self.type, "default": self.default}
            kind = taken | {"action": "append" if self.repeats else "store"}
        parser.add_argument(*words, help=self.help if is_shown else SUPPRESS, **kind)


_RSH = "reaches the nodes instead of ssh: srun, blaunch, or 'kubectl exec -i {host} --', say"
NODES = (
    Flag("-H --hosts", "the nodes, named as for ssh, rank 0's first", "HOST[:SLOTS],...", usual=True, repeats=True),
    Flag("--hostfile", "the same from a file, also with python= and chdir=", "FILE", type=_PATH, usual=True),
    Flag("--rsh", _RSH, "COMMAND", type=shlex.split),
    Flag("--python", "Python interpreter on the nodes (default: path of this one)", "PATH"),
    Flag("--chdir", "working directory on the nodes (default: the current one)", "DIR"),
    Flag("--setup", "runs once on each node, in bash, before Python: 'module load cuda'", "COMMAND", ""),
)
START = (
    Flag("-x", "a variable for every process; 'WANDB_*' for several", "NAME[=VALUE]", usual=True, repeats=True),
    Flag("--auto", "an unedited script trains on all: a Lightning Trainer, a Torchbearer Trial", usual=True),
    Flag("--independent", "the processes join no process group on purpose: no warning says that they have not"),
    Flag("--unchecked", "start even if nodes' scripts or versions differ, or some can't connect"),
    Flag("--dry-run", "print what would run on each node, and start nothing", usual=True),
    Flag("--bind", "gives each process cores of its own, or those of a NUMA node", "|".join(KINDS), "none", _BINDING),
    Flag("--heartbeat-timeout", f"a node is lost after (default: {PATIENCE:g})", "SECONDS", PATIENCE, _SECONDS),
)
END = (
    Flag("--grace", "time for a checkpoint if asked to stop (default: 2.5)", "SECONDS", type=_POSITIVE, usual=True),
    Flag("--keep-going", "survive killed processes and lost nodes, with our callback or strategy", usual=True),
    Flag("--time-limit", "end after this time; it is asked to stop --grace earlier", "SECONDS", type=_POSITIVE),
    Flag("--requeue", f"requeue the Slurm or PBS job if all processes exited with {EXIT_PREEMPTED}"),
)
OUTPUT = (
    Flag("--show-ranks", "ranks whose output is shown: 0,3 or all (default: 0)", "RANKS", "0", _RANKS, usual=True),
    Flag("--no-report", "say nothing at the end about where the time went, and write no report.html"),
    Flag("--trace", "record what all processes do in N steps, from the fourth on, for Perfetto", "N", 0, _COUNT),
    Flag("--no-prefix", "don't start each line with [node:rank]"),
)
_PROCESSES_HELP = "processes on each node: a number, auto, cpu, gpu or xpu (default: one per GPU or CPU socket)"
TORCHRUN = (
    Flag("--nnodes", "number of nodes; MIN:MAX: so few are enough", "N", "", _NODES),
    Flag("--nproc-per-node", _PROCESSES_HELP, "N", "", _PROCESSES, usual=True),
    Flag("--max-restarts", "restart all up to this many times after a failure", "N", 0, _COUNT, usual=True),
    Flag("--shutdown-timeout", f"from SIGTERM to SIGKILL (default: {GRACE:g})", "SECONDS", GRACE, _POSITIVE),
    Flag("--standalone", "on this machine only, also in a Slurm, PBS or LSF job"),
    Flag("--module -m", "run SCRIPT as a module, like python -m", usual=True),
    Flag("--no-python", "run SCRIPT as a program, without Python"),
    Flag("--log-dir", "saves the output of every rank (default: ddprun-logs)", "DIR", "ddprun-logs", _PATH, usual=True),
    Flag("--master-addr", "where the processes meet: an address of the first node", "ADDRESS"),
    Flag("--master-port", "port there (default: a free one)", "PORT", 0, _PORT),
)
PREDICT = (
    Flag("--seconds", "how long each of two runs trains, once warm (default: 20)", "SECONDS", 20.0, _POSITIVE),
    Flag("--bandwidth", "Gbit/s of a machine (default: measured; on one machine, 10)", "GBIT", type=_POSITIVE),
    Flag("--latency", "of a message between them (default: measured; 50)", "MICROSECONDS", type=_POSITIVE),
    Flag("--inexact", "also with bf16 and DiLoCo, which give other numbers than one process"),
    Flag("--plot", "draws it there", "FILE.svg", type=_PATH),
    Flag("--json", "print JSON instead of a table"),
)
GROUPS = {"nodes": NODES, "start": START, "end": END, "output": OUTPUT, "flags that are torchrun's, too": TORCHRUN}

# Remedies for flags that ddprun does not have.
_INSTEAD = {
    "the nodes meet at the first one; --master-addr and --master-port choose where": (
        "--rdzv-backend --rdzv-endpoint --rdzv-conf"
    ),
    "start ddprun once, for all nodes (-H or --hostfile), or the script with torchrun on each of them": (
        "--node-rank --local-addr"
    ),
    "the output of every rank is saved in --log-dir; --show-ranks all and --no-prefix choose what is shown": (
        "--tee -t --redirects -r --local-ranks-filter --logs-specs --duplicate-stdout-filters "
        "--duplicate-stderr-filters --log-line-prefix-template --verbose -v"
    ),
    "leave it out": (
        "--role --rdzv-id --monitor-interval --run-path --start-method --event-log-handler --signals-to-handle "
        "--virtual-local-rank --print-completion --multi-gpu --use-env --config-file"
    ),
    "it counts all processes. Name those of each node: --nproc-per-node N, or -H node1:N,node2:N": (
        "-n -np --np --nprocs --ntasks"
    ),
    "write --nproc-per-node N, the number of processes on each node": (
        "--nproc --num-processes --num-gpus --gpus --gpus-per-node --ntasks-per-node --npernode -ppn"
    ),
    "set a node's port in your ~/.ssh/config, or write --rsh 'ssh -p 2222'": "--ssh-port --port -p",
    "write -H node1,node2, or --hostfile FILE": (
        "--host --machinefile --include --nodes -N --num-nodes --num-machines"
    ),
    "write -x NAME=VALUE": "--env -env -genv --export",
    "write --bind core, or --bind numa": "--numa-binding --bind-to --map-by --cpu-bind",
    "ssh or --rsh reaches the nodes, and no MPI": "--mca --mpi --launcher --oversubscribe --allow-run-as-root",
    "name a file, which each process reads": "-c",
}
REFUSED = {flag: remedy for remedy, flags in _INSTEAD.items() for flag in flags.split()}
