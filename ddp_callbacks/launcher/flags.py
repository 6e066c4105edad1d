"""The flags of ``ddprun``: its own, those that are torchrun's, too, and for each other of torchrun what to do instead.

torchrun's are listed here so that ``ddprun`` can parse a command line without torch; a test compares them with torch's.
"""

from __future__ import annotations

import math
import re
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError
from ddp_callbacks.launcher.node.binding import KINDS
from ddp_callbacks.launcher.node.ending import GRACE

PATIENCE = 10.0
"""Seconds without a heartbeat until a connection counts as lost. TCP retries after 6 and 13 seconds of silence."""

# Variables that all nodes get: these prefixes configure libraries that take part in training.
FORWARDED = (
    *("CUDA_", "CUBLAS_", "DDP_CALLBACKS_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_", "LD_LIBRARY_PATH"),
    *("LIGHTNING_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PL_", "PYTHON", "PYTORCH_", "ROCR_", "TOKENIZERS_"),
    *("TORCH_", "TORCHINDUCTOR_", "UCX_"),
)


_PROCESSES_HELP = "processes on each node: a number, auto, cpu, gpu or xpu (default: one per GPU or CPU socket)"


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


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) < 2:
        raise ArgumentTypeError(f"takes seconds, at least 2, got {text!r}")
    return float(text)


def _binding(text: str) -> str:
    if text not in KINDS:
        raise ArgumentTypeError(f"takes {', '.join(KINDS)}, got {text!r}")
    return text


def _nodes(text: str) -> str:
    if text and not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise ArgumentTypeError(f"takes a number of at least 1, or MIN:MAX, got {text!r}")
    return text


def _processes(text: str) -> str:
    if text.lstrip("+-").isdigit() and int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    if text and not text.isdigit() and text not in ("auto", "cpu", "gpu", "xpu") and not _is_accelerator(text):
        raise ArgumentTypeError(f"takes a number, auto, cpu, gpu or xpu, got {text!r}")
    return text


def _is_accelerator(name: str) -> bool:
    """Whether torch was built for such a device; without torch here, the nodes find out."""
    try:
        from ddp_callbacks._torch import name_of_own_accelerator
    except ImportError:
        return name.isidentifier()
    return name == name_of_own_accelerator()


def _count(text: str) -> int:
    if not text.isdigit():
        raise ArgumentTypeError(f"takes a whole number that is not negative, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        spellings: Separated by spaces.
        help: For ``--help``, or only ``--help-all`` unless it is ``usual``.
        metavar: The name of its value; empty for a switch.
        type: Parses the value.
        repeats: Whether it may be given more than once.
    """

    spellings: str
    help: str
    metavar: str = ""
    default: Any = None
    type: Callable[[str], Any] = str
    usual: bool = False
    repeats: bool = False

    @property
    def variable(self) -> str:
        """By which torchrun takes it, too."""
        return "PET_" + self.spellings.split()[0].lstrip("-").upper().replace("-", "_")

    def add_to(self, parser: Any, default: Any, is_shown: bool) -> None:
        words = self.spellings.split()
        words += [f"--{word[2:].replace('-', '_')}" for word in words if self in TORCHRUN and "-" in word[2:]]
        more: dict[str, Any] = {"help": self.help if is_shown else SUPPRESS, "default": default}
        if not self.metavar:
            parser.add_argument(*words, action="store_true", **more | {"default": bool(default)})
        elif self.repeats:
            parser.add_argument(
                *words, action="append", metavar=self.metavar, dest="variables", **more | {"default": []}
            )
        else:
            parser.add_argument(*words, type=self.type, metavar=self.metavar, **more)


NODES = (
    Flag("-H --hosts", "the nodes, named as for ssh; rank 0 runs on the first", "HOST[:SLOTS],...", usual=True),
    Flag("--hostfile", "the same from a file; lines may also set python= and chdir=", "FILE", usual=True),
    Flag("--rsh", "reaches the nodes instead of ssh: srun, blaunch, or 'kubectl exec -i {host} --', say", "COMMAND"),
    Flag("--python", "Python interpreter on the nodes (default: path of this one)", "PATH"),
    Flag("--chdir", "working directory on the nodes (default: the current one)", "DIR"),
    Flag("--setup", "goes before each process, in bash: 'source env.sh && module load cuda'", "COMMAND", ""),
)
START = (
    Flag("-x", "a variable for every process; 'WANDB_*' for several", "NAME[=VALUE]", usual=True, repeats=True),
    Flag("--auto", "an unedited script trains on all: a Lightning Trainer, a Torchbearer Trial", usual=True),
    Flag("--dry-run", "print what would run on each node, and start nothing", usual=True),
    Flag("--bind", "gives each process cores of its own, or those of a NUMA node", "|".join(KINDS), "none", _binding),
    Flag("--heartbeat-timeout", f"a node is lost after (default: {PATIENCE:g})", "SECONDS", PATIENCE, _seconds),
)
END = (
    Flag("--grace", "time for a checkpoint when it is asked to stop", "SECONDS", type=_positive, usual=True),
    Flag("--time-limit", "end after this time; it is asked to stop --grace earlier", "SECONDS", type=_positive),
    Flag("--requeue", f"start again, or requeue the job, if all processes exited with {EXIT_PREEMPTED}"),
)
OUTPUT = (
    Flag("--show-ranks", "ranks whose output is shown: 0,3 or all (default: 0)", "RANKS", "0", _ranks, usual=True),
    Flag("--no-prefix", "don't start each line with [node:rank]"),
)
TORCHRUN = (
    Flag("--nnodes", "number of nodes, or MIN:MAX for an elastic job", "N", "", _nodes),
    Flag("--nproc-per-node", _PROCESSES_HELP, "N", "", _processes, usual=True),
    Flag("--max-restarts", "restart all up to this many times after a failure", "N", 0, _count, usual=True),
    Flag("--monitor-interval", "has no effect: ddprun notices every end at once", "SECONDS", 0.1, float),
    Flag("--shutdown-timeout", f"from SIGTERM to SIGKILL (default: {GRACE:g})", "SECONDS", GRACE, float),
    Flag("--standalone", "has no effect: without nodes, ddprun runs on this machine only"),
    Flag("--module -m", "run SCRIPT as a module, like python -m", usual=True),
    Flag("--no-python", "run SCRIPT as a program, without Python"),
    Flag("--log-dir", "saves the output of every rank (default: ddprun-logs)", "DIR", "ddprun-logs", usual=True),
    Flag("--tee -t", "anything but 0 shows the output of every rank, like --show-ranks all", "N", "0"),
    Flag("--role", "name of the processes' role", "NAME", "default"),
    Flag("--rdzv-id", "name of the job", "NAME", "none"),
    Flag("--master-addr", "where the processes meet: an address of the first node", "ADDRESS"),
    Flag("--master-port", "port there (default: a free one)", "PORT", 0, _count),
)
GROUPS = {"nodes": NODES, "start": START, "end": END, "output": OUTPUT, "flags that are torchrun's, too": TORCHRUN}

_MEET = "the nodes meet at the first one; --master-addr and --master-port choose where"
_SAVED = "the output of every rank is saved in --log-dir on this machine; --show-ranks chooses what is shown"
_ONE_START = "start ddprun once, for all nodes (-H or --hostfile), or the script with torchrun on each of them"
_NAMED = "name the script itself"
_PROCESSES = "write --nproc-per-node N"
REFUSED = {
    "--rdzv-backend": _MEET,
    "--rdzv-endpoint": _MEET,
    "--rdzv-conf": _MEET,
    "--node-rank": _ONE_START,
    "--local-addr": _ONE_START,
    "--redirects": _SAVED,
    "-r": _SAVED,
    "--local-ranks-filter": _SAVED,
    "--logs-specs": _SAVED,
    "--log-line-prefix-template": "a line that is shown begins with [HOST:LOCAL_RANK], the files have no prefix",
    "--duplicate-stdout-filters": _SAVED,
    "--duplicate-stderr-filters": _SAVED,
    "--run-path": _NAMED,
    "--start-method": _NAMED,
    "--event-log-handler": "ddprun prints what happens on standard error",
    "--signals-to-handle": "SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 always reach the ranks; see --grace",
    "--numa-binding": "write --bind numa, or --bind core",
    "--virtual-local-rank": "select the GPU by LOCAL_RANK",
    "--print-completion": "shells complete the names of files only",
    "-n": _PROCESSES,
    "-np": _PROCESSES,
}


class _Refuse(Action):
    """A flag that is known only to be refused."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None) -> NoReturn:
        assert flag is not None
        known = flag if flag in REFUSED else flag.replace("_", "-")
        raise ConfigurationError(f"ddprun has no {flag}: {REFUSED[known]}.")


def add_flags(parser: ArgumentParser, environ: Mapping[str, str], show_all: bool) -> None:
    """Add all flags; ``environ`` gives the defaults as for torchrun: ``PET_MAX_RESTARTS``."""
    usual = parser.add_argument_group("flags")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title) if show_all else usual
        for flag in flags:
            flag.add_to(group, _default(flag, environ), show_all or flag.usual)
    for refused in REFUSED:
        spellings = [refused] if refused.count("-") < 3 else [refused, "--" + refused[2:].replace("-", "_")]
        parser.add_argument(*spellings, action=_Refuse, nargs="?", help=SUPPRESS, dest="refused")


def add_some(parser: ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add these flags."""
    for flag in flags:
        flag.add_to(parser, flag.default, is_shown=True)


def _default(flag: Flag, environ: Mapping[str, str]) -> Any:
    given = environ.get(flag.variable) if flag in TORCHRUN else None
    if given is None or flag.metavar:
        return flag.default if given is None else given
    if given not in ("0", "1"):
        raise ConfigurationError(f"the variable {flag.variable} must be 0 or 1, got {given!r}.")
    return given == "1"
