"""Time how soon a job trains again after one of its processes was killed, on this machine.

    python examples/benchmarks/recovery/main.py

Each round runs one job of each way, one after another: three processes train a small model, and one of them kills
itself in a step that the round draws.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DDPRUN = [sys.executable, "-m", "ddp_callbacks.launcher", "--nproc-per-node", "3"]
WAYS = {"--keep-going": ["--keep-going"], "--max-restarts 1, a file each 20 steps": ["--max-restarts", "1"]}
TIMES = ("the next step", "the step that was cut")  # whose ends are timed
LIMIT = 120.0  # seconds for one job
STEPS, EPOCHS = 100, 6  # steps of an epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plot", type=Path, help="where to draw it; recovery.png, to show it in README.md")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        train(options.worker)
        return
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        step = random.Random(number).randint(STEPS, 4 * STEPS)
        for way, flags in WAYS.items():
            found[way].append(time_of_death(flags, step))
    print(f"| way | {' | '.join(f'{name}, median, s | longest' for name in TIMES)} |")
    print("|---|---|---|---|---|")
    for way, times in found.items():
        columns = (f"{statistics.median(column):.2f} | {max(column):.2f}" for column in zip(*times, strict=True))
        print(f"| {way} | {' | '.join(columns)} |")
    if options.plot:
        plot(found, options.plot)


def time_of_death(flags: list[str], step: int) -> tuple[float, float]:
    """Return the seconds from the death in a step until any step, and until this step, is done."""
    with tempfile.TemporaryDirectory() as name:
        environ = {**os.environ, "PWD": name, "OMP_NUM_THREADS": "1"}
        command = [*DDPRUN, *flags, __file__, "--worker", str(step)]
        subprocess.run(command, cwd=name, env=environ, check=True, capture_output=True, timeout=LIMIT)
        died = float((Path(name) / "died").read_text())
        lines = [line.split() for path in Path(name).glob("steps-*") for line in path.read_text().splitlines()]
        after = [(float(at) - died, int(done)) for at, done in lines if float(at) > died]
        return min(after)[0], min(at for at, done in after if done >= step)


def plot(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw each round as a point, and the medians as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 2.2), layout="constrained")
    columns = {
        f"{way}:\n{name}": [each[i] for each in times] for way, times in found.items() for i, name in enumerate(TIMES)
    }
    for row, times in enumerate(columns.values()):
        panel.plot(times, [row] * len(times), "o", color="tab:orange", alpha=0.7)
        panel.plot([statistics.median(times)] * 2, [row - 0.3, row + 0.3], color="black", linewidth=2)
    panel.set_yticks(range(len(columns)), list(columns), fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("seconds from the kill to the end of the step")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def train(dies_in: int) -> None:
    import torch
    import torchbearer
    from torchbearer import Callback, Trial

    from ddp_callbacks.torchbearer import DDPCallback, Resume

    keeps_going = "DDP_CALLBACKS_KEEP_GOING" in os.environ
    is_first = "DDP_CALLBACKS_SUCCESSOR" not in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = is_first and os.environ["RANK"] == "1"

    class Steps(Callback):  # type: ignore[misc]
        file = open(f"steps-{os.getpid()}", "a", buffering=1)

        def on_forward(self, state: torchbearer.State) -> None:
            if dies and state[torchbearer.EPOCH] * STEPS + state[torchbearer.BATCH] == dies_in:
                Path("died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

        def on_step_training(self, state: torchbearer.State) -> None:
            step = state[torchbearer.EPOCH] * STEPS + state[torchbearer.BATCH]
            self.file.write(f"{time.monotonic()} {step}\n")

    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * 32, 100), torch.randint(10, (STEPS * 32,)))
    model = torch.nn.Sequential(torch.nn.Linear(100, 700), torch.nn.ReLU(), torch.nn.Linear(700, 10))
    callbacks = [DDPCallback(), Steps(), *([] if keeps_going else [Resume("run.pt", every=20)])]
    trial = Trial(model, torch.optim.Adam(model.parameters()), torch.nn.CrossEntropyLoss(), callbacks=callbacks)
    trial.with_generators(torch.utils.data.DataLoader(data, 32, shuffle=True)).run(EPOCHS, verbose=0)


if __name__ == "__main__":
    main()
