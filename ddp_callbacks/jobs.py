"""The hosts that a scheduler has given to the job in which this process runs: PBS, Slurm, LSF."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError

_SLURM_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of_job(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """The hosts that PBS, Slurm or LSF has given to the job in which this process runs; none outside a job.

    Returns:
        Each host with the number of processes that the job asked for there, ``None`` where it does not say.

    Raises:
        ConfigurationError: The variables of the job cannot be read.
    """
    if path := environ.get("PBS_NODEFILE"):
        return _hosts_of_pbs(path)
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return _hosts_of_slurm(nodes, environ)
    if pairs := environ.get("LSB_MCPU_HOSTS"):
        return _hosts_of_lsf(pairs)
    return []


def _hosts_of_pbs(path: str) -> list[tuple[str, int | None]]:
    """The node file names a host once for each process that the job asked for there.

    That is ``mpiprocs`` in PBS Pro, 1 if the job does not say, and ``ppn`` in Torque.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise ConfigurationError(f"PBS_NODEFILE={path!r} cannot be read: {error}.") from error
    counts = Counter(line for line in lines if line)
    if not counts:
        raise ConfigurationError(f"PBS_NODEFILE={path!r} names no host.")
    said = set(counts.values()) != {1}  # else the node decides
    return [(name, count if said else None) for name, count in counts.items()]


def _hosts_of_slurm(nodes: str, environ: Mapping[str, str]) -> list[tuple[str, int | None]]:
    names = _expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") if environ.get("SLURM_NTASKS") else None
    if not tasks:
        return [(name, None) for name in names]
    counts: list[int] = []
    for part in tasks.split(","):
        match = _SLURM_TASKS.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"SLURM_TASKS_PER_NODE={tasks!r} is not understood at {part!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_TASKS_PER_NODE={tasks!r} speaks of {len(counts)} nodes, SLURM_JOB_NODELIST={nodes!r} of "
            f"{len(names)}."
        )
    said = set(counts) != {1}  # else the node decides
    return [(name, count if said else None) for name, count in zip(names, counts, strict=True)]


def _expand(nodes: str) -> list[str]:
    """Slurm's own program knows every form of its lists; a list without brackets is plain."""
    if "[" not in nodes:
        return nodes.split(",")
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST={nodes!r} needs the program scontrol, which is not in PATH here. Name the hosts by -H."
        )
    done = subprocess.run(
        [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ConfigurationError(f"scontrol show hostnames {nodes!r} failed: {done.stderr.strip()}.")
    return done.stdout.split()


def _hosts_of_lsf(pairs: str) -> list[tuple[str, int | None]]:
    words = pairs.split()
    if len(words) % 2 or not all(word.isdigit() and int(word) for word in words[1::2]):
        raise ConfigurationError(f"LSB_MCPU_HOSTS={pairs!r} must hold pairs of a host and a number.")
    return [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]
