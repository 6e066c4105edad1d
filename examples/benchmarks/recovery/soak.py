"""Kill a process every 29 seconds for half an hour: how much of the throughput is kept, and are the numbers exact?

    python examples/benchmarks/recovery/soak.py

The same training runs on several processes of which one at a time is killed, and on one, for the numbers. For the
throughput, a sixth of it runs undisturbed before that, and a sixth after it. Its loss is convex, so that rounding does
not grow over so many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, BATCH, FEATURES, CLASSES = 10240, 1024, 1000, 200
LAUNCHER = [sys.executable, "-m", "ddp_callbacks.launcher", "--keep-going", "--nproc-per-node"]
LIMIT = 3.0  # of the expected time, after which a run is given up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of the run that is disturbed, about (default 30)")
    parser.add_argument("--seconds", type=float, default=29, help="between two kills (default 29)")
    parser.add_argument("--processes", type=int, default=2, help="no more than there are cores (default 2)")
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.epochs is not None:
        train(options.epochs)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), [*LAUNCHER, str(options.processes)]
        few, many = (time_of(job, folder / f"try-{epochs}", epochs, 600) for epochs in (10, 40))
        epochs = round(60 * options.minutes * 30 / (many - few))
        print(f"{epochs} epochs of {ROWS // BATCH} steps", flush=True)
        limit = LIMIT * 60 * options.minutes
        before = time_of(job, folder / "before", epochs // 6, limit)
        begin, kills = time.monotonic(), Kills(folder / "disturbed", options.seconds, options.processes)
        took = time_of(job, folder / "disturbed", epochs, limit, kills)
        end = time.monotonic()
        after = time_of(job, folder / "after", epochs // 6, limit)
        report(3 * (before + after), took, kills.count, kills.missing(end) / (options.processes * (end - begin)))
        time_of([sys.executable], folder / "one", epochs, limit)
        different = distance(folder / "one", folder / "disturbed")
        print(f"largest difference from the parameters of one process: {different:.1e}")


class Kills:
    """Kills a process of a job again and again, each by its number, and notes for how long it is missing."""

    def __init__(self, folder: Path, seconds: float, processes: int) -> None:
        self._folder, self._seconds, self.processes = folder, seconds, processes
        self._next, self._killed = time.monotonic() + seconds, list[tuple[int, float]]()

    def look(self) -> None:
        """Kill one if it is time, and all take part."""
        processes = [*self._folder.glob("process-*")]
        if time.monotonic() < self._next or len(processes) < self.processes:
            return
        chosen = random.Random(len(self._killed)).choice(sorted(processes))
        number, pid = chosen.name.split("-")[1], int(chosen.read_text())
        chosen.rename(self._folder / f"killed-{len(self._killed)}")
        self._killed.append((int(number), time.monotonic()))
        self._next += self._seconds
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    @property
    def count(self) -> int:
        return len(self._killed)

    def missing(self, end: float) -> float:
        """Seconds for which processes were missing, in sum."""
        total = 0.0
        for rank, killed in self._killed:
            back = [float(path.read_text()) for path in self._folder.glob(f"back-{rank}-*")]
            total += min([at for at in back if at > killed], default=end) - killed
        return total


def time_of(command: list[str], folder: Path, epochs: int, limit: float, kills: Kills | None = None) -> float:
    """Train in a folder; return the seconds between the ends of the first and the last step."""
    folder.mkdir()
    environ = {**os.environ, "PWD": str(folder), "OMP_NUM_THREADS": "1"}
    words, end = [*command, __file__, "--epochs", str(epochs)], time.monotonic() + limit
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(words, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
                if kills is not None:
                    kills.look()
        finally:
            process.terminate()
    if process.wait():
        sys.exit((folder / "output").read_text())
    first, last = (float((folder / name).read_text()) for name in ("first", "last"))
    return last - first


def distance(one: Path, other: Path) -> float:
    """The largest difference between the parameters of two runs, of the largest parameter."""
    import torch

    first, second = (torch.load(folder / "parameters.pt") for folder in (one, other))
    return max(float((first[name] - second[name]).abs().max() / first[name].abs().max()) for name in first)


def report(undisturbed: float, took: float, kills: int, missing: float) -> None:
    kept = undisturbed / took
    print(f"undisturbed {undisturbed:.0f} s, with {kills} kills {took:.0f} s: {kept:.1%} of the throughput")
    print(f"{1 - missing:.1%} of the processes' time was there; of that, {kept / (1 - missing):.1%}", flush=True)


def train(epochs: int) -> None:
    import torch
    import torchbearer
    from torchbearer import Callback, Trial

    from ddp_callbacks import get_rank
    from ddp_callbacks.torchbearer import DDPCallback

    rank = os.environ.get("RANK", "0")  # it was started with

    class Times(Callback):  # type: ignore[misc]
        is_first = True

        def on_step_training(self, _: torchbearer.State) -> None:
            if self.is_first:
                self.is_first = False
                Path(f"back-{rank}-{os.getpid()}").write_text(str(time.monotonic()))
                Path(f"process-{rank}").write_text(str(os.getpid()))
                if not Path("first").exists():
                    Path("first").write_text(str(time.monotonic()))

    torch.manual_seed(1)
    x, y = torch.randn(ROWS, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))
    model = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=0.01)
    callbacks = [Times(), *([DDPCallback()] if "RANK" in os.environ else [])]
    trial = Trial(model, optimizer, torch.nn.CrossEntropyLoss(), callbacks=callbacks).to("cpu", torch.float64)
    trial.with_generators(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH, shuffle=True))
    trial.run(epochs, verbose=0)
    if get_rank() == 0:
        Path("last").write_text(str(time.monotonic()))
        torch.save(model.state_dict(), "parameters.pt")


if __name__ == "__main__":
    main()
