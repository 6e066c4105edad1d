"""Show where the ranks are, from the stacks that they write on request; ``ddprun stacks`` sends the request."""

from __future__ import annotations

import itertools
import re
from argparse import ArgumentParser
from collections.abc import Mapping

from ddp_callbacks.reporting.requests import STACKS, ask

WRITING = 1.0  # seconds for the stacks of all ranks to arrive
_TIMEOUT = 10.0  # seconds for the answer of a job
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_OTHERS = "waiting for other ranks"
_WAITS = {  # by what is in the path of a frame
    "/ddp_callbacks/comm/": _OTHERS,
    "/ddp_callbacks/process_group/": _OTHERS,
    "/torch/distributed/": _OTHERS,
    "/torch/utils/data/dataloader.py": "waiting for a worker of a DataLoader",
}
_LIBRARY = re.compile(r"/(site-packages|dist-packages|ddp_callbacks|lib/python3\.\d+)/|^<")
_SHOWN = 8  # ranks to name in one line


def innermost(text: str) -> str:
    """Return the innermost line of the main thread, which faulthandler writes last; empty if nothing was written.

    If it is a library's, the innermost line of the user's comes first, and for what it waits.
    """
    frames = _FRAME.findall(text.rpartition("(most recent call first):\n")[2])
    if not frames:
        return "Python is still starting there, or has ended" if text else ""
    own = next((frame for frame in frames if not _LIBRARY.search(frame[0])), None)
    inside = frames if own is None else frames[: frames.index(own)]
    called = itertools.takewhile(lambda frame: frame[2] != "<module>", inside)  # an import of these waits for nobody
    waits = next((words for path, *_ in called for part, words in _WAITS.items() if part in path), "")
    first, second = "{}:{} in {}".format(*(own or frames[0])), [] if own is None else inside[:1]
    more = waits or "".join("in {}:{} in {}".format(*frame) for frame in second)
    return f"{first}, {more}" if more else first


def summary(lines: Mapping[str, str]) -> list[str]:
    """Return a line for each place where ranks are. Places where they don't wait for others come first, then rare ones.

    Args:
        lines: The innermost line of each rank, by the rank's name in the output.
    """
    ranks: dict[str, list[str]] = {}
    for rank, line in lines.items():
        ranks.setdefault(line or "unknown: it wrote no stack. Is it stopped (kill -CONT)?", []).append(rank)

    lines_by_interest = sorted(ranks, key=lambda line: (line.endswith(_OTHERS), len(ranks[line])))
    return [f"{_names(ranks[line])}: {line}" for line in lines_by_interest]


def _names(ranks: list[str]) -> str:
    more = len(ranks) - _SHOWN
    return ", ".join(ranks[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def ask_for_stacks(argv: list[str]) -> str:
    """``ddprun stacks``: let a running job write the stacks of its ranks; return the summary of where they are.

    Raises:
        ConfigurationError: There is no such job here, or it does not answer.
    """
    parser = ArgumentParser(prog="ddprun stacks", description="Show where each rank of a running job is.")
    parser.add_argument("job", nargs="?", help="its logs, or the --log-dir with them (default: ddprun-logs)")
    return ask(parser.parse_args(argv).job, STACKS, _TIMEOUT)
