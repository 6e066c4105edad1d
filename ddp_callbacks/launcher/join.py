"""``ddprun join``: new processes on more nodes take part in a running job."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.hosts import NodePlan, parse_hosts
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.options import nodes_of
from ddp_callbacks.reporting.requests import JOINED, ask

_TIMEOUT = 120.0  # seconds for the job to reach the nodes


def plans_to_add(job: Job, hosts: str, nodes: int) -> Sequence[NodePlan]:
    """Return the plans of nodes that a job is to add to the ``nodes`` that it has; they are like those otherwise.

    Args:
        hosts: The nodes, as in ``-H``.

    Raises:
        ConfigurationError: A host is invalid, or there would be too many.
    """
    found = nodes_of(job.changed(hosts=[hosts], hostfile=None, nproc_per_node=""), os.environ)
    most = job.nnodes.partition(":")[2]
    if most and nodes + len(found) > int(most):
        raise ConfigurationError(f"--nnodes allows {most} nodes, and the job has {nodes} by now.")
    return [replace(plan, processes=plan.processes or job.nproc_per_node) for plan in found]


def join(argv: list[str]) -> int:
    """Ask a running job to start processes on more nodes; return the exit code: 2 if it started none.

    Raises:
        ConfigurationError: There is no such job here, it does not answer, or a host is invalid.
    """
    parser = ArgumentParser(prog="ddprun join", description="Let more nodes take part in a running job (--keep-going).")
    parser.add_argument("job", nargs="?", help="its logs, or the --log-dir with them (default: ddprun-logs)")
    parser.add_argument("-H", "--hosts", required=True, metavar="HOST[:SLOTS],...", help="the nodes, named as for ssh")
    options = parser.parse_args(argv)
    parse_hosts(options.hosts)
    code, _, text = ask(options.job, JOINED, _TIMEOUT, options.hosts).partition("\n")
    for line in text.splitlines():
        print(f"ddprun: {line}", file=sys.stderr)
    return int(code)
