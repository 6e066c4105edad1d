"""torchrun's flags, so that ``ddprun`` can parse a command line without importing torch.

A test compares the table with the parser of the installed torch. The node's torchrun implements the flags.
"""

from __future__ import annotations

from argparse import REMAINDER, SUPPRESS, ArgumentParser, _ArgumentGroup
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.errors import ConfigurationError

TORCH = "2.13"  # whose flags these are


def _filters(text: str) -> list[str]:
    """Parse ``a,b``, where ``,,`` is a literal comma."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


@dataclass(frozen=True)
class Flag:
    """The properties of one flag for argparse.

    Attributes:
        spellings: The first long one gives the name of the value and of the variable.
        help: The help text.
        default: The value if neither the command line nor the variable gives one.
        type: Converts its text to a value.
        choices: The allowed texts; ``None`` for any.
        is_switch: Whether it takes no value.
        has_variable: Whether ``PET_NAME`` in the environment gives the default.
    """

    spellings: tuple[str, ...]
    help: str
    default: Any = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    is_switch: bool = False
    has_variable: bool = True

    @property
    def name(self) -> str:
        """The name of its value."""
        long = next(spelling for spelling in self.spellings if spelling.startswith("--"))
        return long[2:].replace("-", "_")

    def add_to(self, parser: _ArgumentGroup, environ: Mapping[str, str]) -> None:
        """Add it to ``parser``."""
        given = environ.get(f"PET_{self.name.upper()}") if self.has_variable else None
        default = self.default if given is None else given
        if not self.is_switch:
            parser.add_argument(*self.spellings, type=self.type, choices=self.choices, default=default, help=self.help)
            return
        if given not in (None, "0", "1"):
            raise ConfigurationError(f"the variable PET_{self.name.upper()} must be 0 or 1, got {given!r}.")
        parser.add_argument(*self.spellings, action="store_true", default=default in (True, "1"), help=self.help)


def _flag(name: str, help: str, default: Any = None, short: str = "", **more: Any) -> Flag:
    dashed = f"--{name}"
    both = (dashed,) if "-" not in name else (dashed, f"--{name.replace('-', '_')}")
    return Flag((short, *both) if short else both, help, default, **more)


def _switch(name: str, help: str, short: str = "") -> Flag:
    return _flag(name, help, False, short, is_switch=True)


_NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")

FLAGS = (
    _flag("nnodes", "number of nodes, or MIN:MAX for an elastic job", "1:1"),
    _flag("nproc-per-node", "processes on each node: a number, auto, cpu, gpu or xpu", "1"),
    _flag("rdzv-backend", "rendezvous backend", "static"),
    _flag("rdzv-endpoint", "address of the rendezvous, HOST:PORT", ""),
    _flag("rdzv-id", "name of the job", "none"),
    _flag("rdzv-conf", "settings of the rendezvous backend: KEY=VALUE,...", ""),
    _switch("standalone", "run on this node only, with the rendezvous on a free port"),
    _flag("max-restarts", "restart the processes up to this many times after a failure", 0, type=int),
    _flag("monitor-interval", "seconds between checks of the processes", 0.1, type=float),
    _flag(
        "start-method", "multiprocessing start method of functions", "spawn", choices=("spawn", "fork", "forkserver")
    ),
    _flag("event-log-handler", "name of a registered event handler", "null"),
    _flag("role", "role name of the processes", "default"),
    _switch("module", "run SCRIPT as a module, like python -m", short="-m"),
    _switch("no-python", "run SCRIPT as a program, without Python"),
    _switch("run-path", "run SCRIPT (an absolute path) with runpy.run_path"),
    _flag("log-dir", "directory for the output"),
    _flag("redirects", "streams to write to --log-dir on the nodes only: 1 (stdout), 2, 3 (both), 0:1,1:2", "0", "-r"),
    _flag("tee", "streams to write to --log-dir on the nodes and to show here, as for --redirects", "0", "-t"),
    _flag("local-ranks-filter", "local ranks whose output is shown: 0,1", ""),
    _flag("duplicate-stdout-filters", "also write stdout lines with one of these texts to a file", [], type=_filters),
    _flag("duplicate-stderr-filters", "the same for stderr", [], type=_filters),
    _flag("node-rank", "rank of this node, for a static rendezvous", 0, type=int),
    _flag("master-addr", "address of the first node, for a static rendezvous", "127.0.0.1"),
    _flag("master-port", "port on the first node", type=int),
    _flag("local-addr", "address of this node"),
    _flag("logs-specs", "entry point of a custom LogsSpecs, which decides where output goes", has_variable=False),
    _flag("numa-binding", "bind each process to CPU cores near its GPU", choices=_NUMA_BINDINGS, has_variable=False),
    _flag("signals-to-handle", "signals to pass on to the processes", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    _flag("shutdown-timeout", "seconds between SIGTERM and SIGKILL when the processes of a node are stopped", type=int),
    _switch("virtual-local-rank", "show each process its GPU as device 0, with LOCAL_RANK 0"),
)


def torchrun_parser(environ: Mapping[str, str]) -> ArgumentParser:
    """A parser of torchrun's command line, without ``--help``; ``environ`` gives the defaults as for torchrun."""
    parser = ArgumentParser(usage="", add_help=False)
    flags = parser.add_argument_group(f"torchrun's flags (torch {TORCH})")
    for flag in FLAGS:
        flag.add_to(flags, environ)
    parser.add_argument("training_script", help=SUPPRESS)
    parser.add_argument("training_script_args", nargs=REMAINDER, help=SUPPRESS)
    return parser
