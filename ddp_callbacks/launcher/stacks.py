"""Show where the ranks are, from the stacks that they write on request; ``ddprun stacks`` sends the request."""

from __future__ import annotations

import os
import re
import signal
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.node.processes import handled_by

SUMMARY = "stacks.txt"  # a file in the folder of a job's logs
WRITING = 1.0  # seconds for the stacks of all ranks to arrive
_TIMEOUT = 10.0  # seconds for the answer of a job
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_WAITS = re.compile(r"/(torch|ddp_callbacks)/")  # packages in which a rank most likely waits for others
_SHOWN = 8  # ranks to name in one line


def innermost(text: str) -> str:
    """Return the innermost line of the main thread, which faulthandler writes last; empty if there is none."""
    found = _FRAME.search(text.rpartition("(most recent call first):\n")[2])
    return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


def summary(lines: Mapping[str, str]) -> list[str]:
    """Return a line for each place where ranks are. Places where they don't wait for others come first, then rare ones.

    Args:
        lines: The innermost line of each rank, by the rank's name in the output.
    """
    ranks: dict[str, list[str]] = {}
    for rank, line in lines.items():
        ranks.setdefault(line or "unknown: no stack was written", []).append(rank)

    def interest(line: str) -> tuple[bool, int]:
        return bool(_WAITS.search(line)), len(ranks[line])

    return [f"{_names(ranks[line])}: {line}" for line in sorted(ranks, key=interest)]


def _names(ranks: list[str]) -> str:
    more = len(ranks) - _SHOWN
    return ", ".join(ranks[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def ask_job(argv: list[str]) -> str:
    """``ddprun stacks``: let a running job write the stacks of its ranks; return the summary of where they are.

    Raises:
        ConfigurationError: There is no such job here, or it does not answer.
    """
    parser = ArgumentParser(prog="ddprun stacks", description="Show where each rank of a running job is.")
    parser.add_argument("job", nargs="?", help="folder of its logs (default: the newest one in ddprun-logs)")
    folder = _folder(parser.parse_args(argv).job)
    number = folder.name.rpartition("-")[2]
    pid = int(number) if number.isdecimal() else 0
    if signal.SIGQUIT not in (handled_by(pid) or ()):
        raise ConfigurationError(f"the job of {folder} does not run on this machine.")
    answer, end = folder / SUMMARY, time.monotonic() + _TIMEOUT
    answer.unlink(missing_ok=True)
    os.kill(pid, signal.SIGQUIT)
    while not answer.exists():
        if time.monotonic() > end:
            raise ConfigurationError(f"the job of {folder} does not answer.")
        time.sleep(0.05)
    return answer.read_text()


def _folder(job: str | None) -> Path:
    found = sorted(Path("ddprun-logs").glob("*-*-*")) if job is None else [Path(job)]
    if not found or not found[-1].is_dir():
        raise ConfigurationError(
            f"there is no {job or 'job in ddprun-logs'}. Name the folder of its logs: ddprun stacks DIR/TIME-PID."
        )
    return found[-1].resolve()
