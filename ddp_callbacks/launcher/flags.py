"""torchrun's flags: those that mean something here, and for each other one what to do instead.

They are listed here so that ``ddprun`` can parse a command line without torch; a test compares the list with torch's.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Mapping
from typing import Any, NoReturn

from ddp_callbacks.errors import ConfigurationError

_MEET = "the nodes meet at the first one; --master-addr and --master-port choose where"
_SAVED = "the output of every rank is saved in --log-dir on this machine; --show-ranks chooses what is shown"
_ONE_START = "start ddprun once, for all nodes (-H or --hostfile), or the script with torchrun on each of them"
_NAMED = "name the script itself"
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
    "--numa-binding": "bind the ranks with --no-python and numactl",
    "--virtual-local-rank": "select the GPU by LOCAL_RANK",
    "--print-completion": "shells complete the names of files only",
    "-n": "write --nproc-per-node N",
    "-np": "write --nproc-per-node N",
}


class _Refuse(Action):
    """A flag that is known only to be refused."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None) -> NoReturn:
        assert flag is not None
        known = flag if flag in REFUSED else flag.replace("_", "-")
        raise ConfigurationError(f"ddprun has no {flag}: {REFUSED[known]}.")


def add_flags_of_torchrun(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the flags; ``environ`` gives the defaults as for torchrun: ``PET_MAX_RESTARTS``."""
    group = parser.add_argument_group("flags that are torchrun's, too")
    add = _Adder(group, environ)
    add("nnodes", "number of nodes, or MIN:MAX for an elastic job", "", type=_nodes)
    add("nproc-per-node", "processes on each node: a number, auto, cpu, gpu or xpu", "", type=_processes)
    add("max-restarts", "restart the processes up to this many times after a failure", 0, type=_count)
    add("monitor-interval", "has no effect: ddprun notices every end at once", 0.1, type=float)
    add("shutdown-timeout", "seconds from SIGTERM to SIGKILL when the processes are ended (default: 2.5)", type=float)
    add("standalone", "has no effect: without nodes, ddprun runs on this machine only", switch=True)
    add("module", "run SCRIPT as a module, like python -m", switch=True, short="-m")
    add("no-python", "run SCRIPT as a program, without Python", switch=True)
    add("log-dir", "directory for the output (default: ddprun-logs)", "ddprun-logs")
    add("tee", "anything but 0 shows the output of every rank, like --show-ranks all", "0", short="-t")
    add("role", "name of the processes' role", "default")
    add("rdzv-id", "name of the job", "none")
    add("master-addr", "address of the first node at which the processes meet (default: on the way to it)")
    add("master-port", "port there (default: a free one)", 0, type=_count)
    for flag in REFUSED:
        spellings = [flag] if flag.count("-") < 3 else [flag, "--" + flag[2:].replace("-", "_")]
        group.add_argument(*spellings, action=_Refuse, nargs=0, help=SUPPRESS, dest="refused")


class _Adder:
    def __init__(self, group: _ArgumentGroup, environ: Mapping[str, str]) -> None:
        self._group, self._environ = group, environ

    def __call__(
        self, name: str, help: str, default: Any = None, *, short: str = "", switch: bool = False, **more: Any
    ) -> None:
        dashed, variable = f"--{name}", f"PET_{name.upper().replace('-', '_')}"
        spellings = [short] * bool(short) + [dashed] + [f"--{name.replace('-', '_')}"] * ("-" in name)
        given = self._environ.get(variable)
        if not switch:
            default = default if given is None else given
            self._group.add_argument(*spellings, default=default, help=help, **more)
            return
        if given not in (None, "0", "1"):
            raise ConfigurationError(f"the variable {variable} must be 0 or 1, got {given!r}.")
        self._group.add_argument(*spellings, action="store_true", default=given == "1", help=help)


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
