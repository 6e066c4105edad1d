"""Run commands as a user types them, on the loopback network, with one thread and a time limit.

``python``, ``torchrun`` and ``ddprun`` are those of :mod:`kit.warm`, unless a test asks for the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit.costs import count
from kit.ranks import HOST, free_port
from kit.warm import Server
from kit.wrapper import COLD

DEADLINE = 600.0  # seconds, on a machine that is busy with other work
TWO_PROCESSES = ["torchrun", "--standalone", "--local-addr", HOST, "--nproc-per-node", 2]


def environment(*, cold: bool = False) -> dict[str, str]:
    """Return variables for commands: their folders first in PATH, one thread, the loopback network."""
    folders = [Server.running.folder, Path(sys.executable).parent]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PATH"] = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return environ | ({COLD: "1"} if cold else {})


def start(command: list[Any], folder: Path, *, cold: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Start ``command`` in ``folder``, with one thread, on the loopback network."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [str(part) for part in command]
    if not Path(words[0]).is_absolute():  # kit.budget counts absolute ones
        count("cold" if cold else "warm")
    return subprocess.Popen(words, cwd=folder, text=True, **{"env": environment(cold=cold), **streams, **options})


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for ``process`` and return its output; the test fails if it fails or takes too long."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def run(command: list[Any], folder: Path, *, cold: bool = False) -> str:
    return finish(start(command, folder, cold=cold))


def run_by_hand(script: list[Any], folders: list[Path], *, cold: bool = False) -> list[str]:
    """Run two processes, started as a user would on two nodes; return the output of each."""
    command = ["python", *script, "--world-size", 2, "--host", HOST, "--port", free_port(), "--rank"]
    with (
        start([*command, 0], folders[0], cold=cold) as rank_0,
        start([*command, 1], folders[1], cold=cold) as rank_1,
    ):
        try:
            return [finish(rank_0), finish(rank_1)]
        finally:
            rank_0.kill()
            rank_1.kill()
