"""``ddprun status``: a table of what each rank of a running job does, redrawn in place on a terminal."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.reporting.requests import STATUS, ask, folder_of
from ddp_callbacks.reporting.summary import in_words, percent, still_for

_TIMEOUT = 10.0  # seconds for the answer of a job
_EVERY = 2.0  # seconds between two tables
_LATELY = 10.0  # seconds after which a rank without a step counts as still
_LINE = 100  # characters of a last line
_HEAD = ("node", "rank", "epoch", "step", "steps/s", "waits", "memory", "last step", "last line")
_HOME = "\x1b[H\x1b[J"  # the cursor goes to the corner, and all after it is cleared


def show_status(argv: Sequence[str]) -> int:
    """Print the table of a running job, again and again on a terminal until the job ends; return the exit code.

    Raises:
        ConfigurationError: There is no such job here, or it does not answer.
    """
    parser = ArgumentParser(prog="ddprun status", description="Show what each rank of a running job does.")
    parser.add_argument("job", nargs="?", help="its logs, or the --log-dir with them (default: ddprun-logs)")
    parser.add_argument("--once", action="store_true", help="print one table; so does an output that is no terminal")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON, once")
    options = parser.parse_args(argv)
    job = str(folder_of(options.job))  # also once it has ended, and another one runs
    text = ask(job, STATUS, _TIMEOUT, STATUS)
    if options.json or options.once or not sys.stdout.isatty():
        print(text if options.json else table(json.loads(text)))
        return 0
    while True:
        size = get_terminal_size()
        lines = [line[: size.columns] for line in table(json.loads(text)).splitlines()[: size.lines - 1]]
        print(_HOME + "\n".join(lines), flush=True)
        time.sleep(_EVERY)
        try:
            text = ask(job, STATUS, _TIMEOUT, STATUS)
        except ConfigurationError as end:
            print(end)
            return 0


def table(data: Mapping[str, Any]) -> str:
    """Return a line for each rank that has trained, below a header."""
    if not data["is_sent"]:
        return f"{_title(data)}; it was started with --no-report, which leaves out what ddprun status shows"
    if not data["ranks"]:
        return f"{_title(data)}; no rank has begun to train with ddp_callbacks"
    rows = [_HEAD, *(_row(rank) for rank in data["ranks"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return "\n".join([_title(data), *lines, *_advice([rank for rank in data["ranks"] if not rank["is_lost"]])])


def _advice(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what to do if all ranks seem to hang: if one does, the others wait for it."""
    if since := still_for(ranks):
        yield f"No rank has taken a step for {in_words(since)}. Where they are: ddprun stacks"


def _title(data: Mapping[str, Any]) -> str:
    return f"{' '.join(data['command'])}: for {in_words(data['seconds'])}"


def _row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    memory = " + ".join(f"{size / 1024:.1f}" for size in rank["memory"]) + " GB"
    stepped = f"{in_words(rank['stepped'])} ago{', validating' * (rank['stage'] == 'validating')}"
    is_still = rank["is_lost"] or rank["stepped"] > _LATELY
    rate = 0.0 if is_still else rank["lately"]["rate"]
    steps = f"{rank['steps']:,}", f"{rate:.3g}", percent(rank["lately"]["waiting"])
    last = "lost" if rank["is_lost"] else stepped, rank["line"][:_LINE]
    return rank["node"], str(rank["rank"]), str(rank["epoch"]), *steps, memory, *last
