"""Commands as a user types them: started on the loopback network with one thread, and waited for with a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DEADLINE = 120.0  # seconds
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
TWO_PROCESSES = [*TORCHRUN, "--nproc-per-node", "2"]


def start(command: list[Any], folder: Path) -> subprocess.Popen[str]:
    """Start ``command`` in ``folder``, with one thread, on the loopback network."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What ``process`` prints until it ends; the test fails if it fails or takes too long."""
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def run(command: list[Any], folder: Path) -> str:
    return finish(start(command, folder))


def run_by_hand(script: list[Any], folders: list[Path]) -> list[str]:
    """What each of two processes prints that are started as a user would on two nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *script, "--world-size", 2, "--host", "127.0.0.1", "--port", port, "--rank"]
    with start([*command, 0], folders[0]) as rank_0, start([*command, 1], folders[1]) as rank_1:
        try:
            return [finish(rank_0), finish(rank_1)]
        finally:
            rank_0.kill()
            rank_1.kill()
