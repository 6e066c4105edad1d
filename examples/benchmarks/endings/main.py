"""Time how soon a job starts, and how soon all of it ends when something happens to it, on this machine.

    python examples/benchmarks/endings/main.py

Each round runs one job of every kind, one after another. A job trains a small model on three processes; after some
steps one thing happens to it. The start is compared with torchrun's, in pairs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DDPRUN = [sys.executable, "-m", "ddp_callbacks.launcher"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
LIMIT = 120.0  # seconds for one job
STEPS = 5  # before it happens
RAISES, KILLED = "an exception on one process reaches the others", "a killed process is named by the others"
SIGNALS = {
    "SIGTERM for ddprun ends every process": signal.SIGTERM,
    "SIGKILL for ddprun ends every process": signal.SIGKILL,
}
# Within how many seconds everyone has heard of it, on a machine that is not busy.
PROMISES = {RAISES: 3.0, KILLED: 5.0, **dict.fromkeys(SIGNALS, 5.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.worker)
        return
    found: dict[str, list[float]] = {name: [] for name in PROMISES}
    starts: dict[str, list[float]] = {"ddprun": [], "torchrun": []}
    for _ in range(options.rounds):
        for name in PROMISES:
            found[name].append(time_of_signal(SIGNALS[name]) if name in SIGNALS else time_of_event(name))
        for name, command in (("ddprun", DDPRUN), ("torchrun", TORCHRUN)):
            starts[name].append(start_and_end(command))
    show(found, starts)


def show(found: dict[str, list[float]], starts: dict[str, list[float]]) -> None:
    print("| what | promised, s | median, s | longest, s |\n|---|---|---|---|")
    for name, promised in PROMISES.items():
        times = found[name]
        print(f"| {name} | {promised:g} | {statistics.median(times):.2f} | {max(times):.2f} |")
    print("\n| two processes that do nothing | median, s | shortest to longest, s |\n|---|---|---|")
    for name, times in starts.items():
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} to {max(times):.2f} |")
    ratios = [ours / theirs for ours, theirs in zip(starts["ddprun"], starts["torchrun"], strict=True)]
    print(
        f"\nddprun / torchrun, pair by pair: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def start_and_end(command: list[str]) -> float:
    """How long a job of two processes takes that do nothing."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "nothing.py").write_text("")
        begin = time.monotonic()
        subprocess.run(
            [*command, "--master-port", str(free_port()), "--nproc-per-node", "2", "nothing.py"],
            cwd=name,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PWD": name},
            check=True,
            capture_output=True,
            timeout=LIMIT,
        )
        return time.monotonic() - begin


def time_of_event(name: str) -> float:
    """From what happens on one of three processes, which nobody but they themselves can end, to the last error."""
    with tempfile.TemporaryDirectory() as folder:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", name],
                cwd=folder,
                env={**os.environ, **address, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(3)
        ]
        for rank in ranks:
            rank.wait(LIMIT)
        happened = json.loads((Path(folder) / "happened").read_text())
        return max(json.loads((Path(folder) / f"heard-{rank}").read_text()) for rank in (0, 2)) - happened


def time_of_signal(number: int) -> float:
    """From the signal to the end of the last of three processes that ddprun has started."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*DDPRUN, "--nproc-per-node", "3", __file__, "--worker", "none"]
        environ = {**os.environ, "PWD": folder, "OMP_NUM_THREADS": "1"}
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=nowhere, stderr=nowhere) as job:
            wait_for(lambda: len(list(Path(folder).glob("up-*"))) == 3, "the processes did not start")
            pids = [int(path.read_text()) for path in Path(folder).glob("up-*")]
            begin = time.monotonic()
            job.send_signal(number)
            wait_for(lambda: not any(runs(pid) for pid in pids), "the processes did not end")
            return time.monotonic() - begin


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(holds: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(problem)
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- on each process --------------------------------------------------------------------------------------------------


def train(name: str) -> None:
    """Train until it happens."""
    import torch

    from ddp_callbacks import GradientSynchronizer, join_process_group
    from ddp_callbacks.errors import PeerError

    rank = join_process_group().rank
    model = torch.nn.Linear(100, 100)
    synchronizer = GradientSynchronizer(model)
    step = 0
    try:
        while True:
            model(torch.ones(8, 100)).sum().backward()
            step += 1
            if step == STEPS:
                note(f"up-{rank}", os.getpid())
            if step >= STEPS and rank == 1:
                happen(name)
    except PeerError:
        note(f"heard-{rank}", time.monotonic())
        raise
    finally:
        synchronizer.close()


def happen(name: str) -> None:
    if name not in (RAISES, KILLED):
        return
    wait_for(lambda: len(list(Path().glob("up-*"))) == 3, "the others did not start")
    note("happened", time.monotonic())
    if name == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the benchmark's")


def note(name: str, value: float) -> None:
    """For the process that measures; complete when it is there."""
    Path(f".{name}").write_text(json.dumps(value))
    Path(f".{name}").rename(name)


if __name__ == "__main__":
    main()
