"""The settings of a job: what the user has asked for."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.node.ending import GRACE

_PATIENCE = 30.0  # seconds for a logger that flushes, as torchrun gives


class Job:
    """The value of each flag by its name, see :mod:`ddp_callbacks.launcher.flags`, and what follows from them.

    Attributes:
        nodes: The nodes in rank order.
        min_nodes: The smallest number of nodes with which the job starts, or is restarted.
        environ: Variables for the nodes that the user has named.
        forwarded: Variables of this process that every node gets without being named.
    """

    hosts: list[str] | None
    hostfile: str | None
    rsh: list[str] | None
    python: str | None
    chdir: str | None
    setup: str

    x: list[str] | None
    auto: bool
    independent: bool
    unchecked: bool
    dry_run: bool
    bind: str
    heartbeat_timeout: float

    grace: float | None
    keep_going: bool
    time_limit: float | None
    requeue: bool

    show_ranks: frozenset[int] | None
    no_report: bool
    trace: int
    no_prefix: bool

    nnodes: str
    nproc_per_node: str
    max_restarts: int
    shutdown_timeout: float
    module: bool
    no_python: bool
    standalone: bool
    log_dir: str
    master_addr: str | None
    master_port: int

    json: bool
    seconds: float
    bandwidth: float | None
    latency: float | None
    inexact: bool
    plot: str | None
    help_all: bool
    training_script: str | None
    training_script_args: list[str]

    nodes: tuple[NodePlan, ...]
    min_nodes: int
    environ: dict[str, str]
    forwarded: dict[str, str]

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def changed(self, **settings: Any) -> Job:
        """Return this job with other settings."""
        return Job(**vars(self) | settings)

    @property
    def command(self) -> list[str]:
        """The script, or ``-m`` and the module, and its arguments."""
        return [*(["-m"] if self.module else []), self.training_script or "", *self.training_script_args]

    @property
    def script(self) -> str | None:
        """The file that must exist on each node; ``None`` if there is none to check."""
        return None if self.module or self.no_python else self.training_script

    @property
    def program(self) -> tuple[str, str]:
        """The kind and name of the program to compare between nodes, see :mod:`ddp_callbacks.launcher.facts`."""
        if self.no_python or self.training_script is None:
            return "any", ""
        return "module" if self.module else "script", self.training_script

    @property
    def least_nodes(self) -> int:
        """The smallest number of nodes with which ``--keep-going`` continues: the MIN of ``--nnodes MIN:MAX``."""
        least, is_range, _ = self.nnodes.partition(":")
        return int(least) if is_range else 1

    @property
    def force(self) -> float:
        """Seconds from a request to stop to SIGKILL."""
        return GRACE if self.grace is None else self.grace

    @property
    def patience(self) -> float:
        """Seconds for the other ranks to end after one was preempted."""
        return _PATIENCE if self.grace is None else self.grace

    def words(self, node: NodePlan) -> list[str]:
        """Return the command of a rank on a node."""
        return [*([] if self.no_python else [node.python, "-u"]), *self.command]
