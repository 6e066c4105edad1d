"""Train on handwritten digits in a run that may be stopped at any moment and goes on where it was.

    python preemptible.py run.pt                                        one process
    ddprun --nproc-per-node 2 --grace 30 preemptible.py run.pt          two; Ctrl-C, SIGTERM or SIGUSR1 stops it
    ddprun --nproc-per-node 3 --grace 30 preemptible.py run.pt          goes on, on three

    python preemptible.py --draw preemptible.svg      a run that is cut three times, over one that is not

``Resume(path)`` is what makes an ordinary Torchbearer script preemptible.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial

from ddp_callbacks import get_rank
from ddp_callbacks.comm import all_reduce
from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.torchbearer import SHARE, DDPCallback, Resume

PARTS = ((1, 60), (2, 140), (3, 250), (1, None))
"""The run that is drawn: the number of processes of each part, and the batch at which it is asked to stop."""


class Losses(Callback):  # type: ignore[misc]
    """The loss of each batch, over all processes; its state is in the checkpoint.

    Args:
        path: Rank 0 writes the losses there, as JSON, at the end of the run, and prints the number of each batch;
            ``None`` for neither.
        seconds: How long a batch takes at least.
    """

    def __init__(self, path: str | None, seconds: float) -> None:
        super().__init__()
        self._path, self._seconds = path, seconds
        self._losses: list[float] = []

    def on_step_training(self, state: Any) -> None:
        share = state[SHARE].local / state[SHARE].total if SHARE in state else 1.0
        loss = state[torchbearer.LOSS].detach().reshape(1) * share
        self._losses.append(float(all_reduce(loss, "the loss of a batch")))
        if self._path is not None and get_rank() == 0:
            print(f"batch {len(self._losses)}", flush=True)
        time.sleep(self._seconds)

    def on_end(self, state: Any) -> None:
        if self._path is not None and get_rank() == 0:
            Path(self._path).write_text(json.dumps(self._losses))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> Losses:
        self._losses = list(state["losses"])
        return self


def main() -> None:
    args = parse_arguments()
    if args.draw:
        draw(args.draw)
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).double()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[DDPCallback(), Losses(args.losses, args.seconds), Resume(args.checkpoint)],
    )
    trial.to("cpu", torch.float64).with_train_generator(DataLoader(load_digits(), batch_size=32, shuffle=True))
    history = trial.run(args.epochs, verbose=0)
    if get_rank() == 0:
        print(f"epoch {len(history)}: loss {history[-1]['loss']:.12f}, accuracy {history[-1]['acc']:.4f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits; stop and go on anywhere.")
    parser.add_argument("checkpoint", nargs="?", default="run.pt", help="written when asked to stop, and each epoch")
    parser.add_argument("--epochs", type=int, default=8, help="epochs in all")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long a batch takes at least")
    parser.add_argument("--losses", metavar="PATH", help="write the losses of all batches to this file, as JSON")
    parser.add_argument("--draw", metavar="PATH", help="cut a run three times, and draw it over one that is not cut")
    return parser.parse_args()


def load_digits() -> TensorDataset:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, which come with the package."""
    from sklearn.datasets import load_digits as load

    bunch = load()
    return TensorDataset(torch.tensor(bunch.data / 16), torch.tensor(bunch.target))


# --- the drawing ------------------------------------------------------------------------------------------------------


def draw(path: str) -> None:
    """Train without a cut and with three, by real signals, and draw both losses and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole, cut, ends = train_both()
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1))
    above.plot(range(1, len(whole) + 1), whole, color="0.75", linewidth=5, label="not cut, 1 process")
    starts = [0, *ends[:-1]]
    for (processes, _), start, end in zip(PARTS, starts, ends, strict=True):
        label = f"{processes} process{'es' if processes > 1 else ''}"
        above.plot(range(start + 1, end + 1), cut[start:end], linewidth=1, label=label)
    for axes in (above, below):
        for end in ends[:-1]:
            axes.axvline(end + 0.5, color="0.4", linestyle=":", linewidth=1)
    above.set(ylabel="loss of the batch", yscale="log")
    above.legend(title="SIGTERM at the dotted lines", loc="upper right", ncols=2)
    difference = [max(abs(a - b), 1e-18) for a, b in zip(whole, cut, strict=True)]
    below.plot(range(1, len(whole) + 1), difference, ".", markersize=2, color="0.2")
    below.set(xlabel="batch", ylabel="difference", yscale="log", ylim=(1e-19, 1e-11))
    figure.tight_layout()
    figure.savefig(path)
    print(f"largest difference {max(difference):.1e}, of {len(whole)} batches")


def train_both() -> tuple[list[float], list[float], list[int]]:
    """The losses of the run that is not cut and of the one that is, and where the parts of that one end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, "whole", 1, None)
        whole = json.loads((folder / "whole.json").read_text())
        ends = [train(folder, "cut", processes, stop) for processes, stop in PARTS]
        cut = json.loads((folder / "cut.json").read_text())
    return whole, cut, ends


def train(folder: Path, name: str, processes: int, stop: int | None) -> int:
    """Train until the end, or send SIGTERM at batch ``stop``; the number of batches that are trained then."""
    script = [__file__, str(folder / f"{name}.pt"), "--losses", str(folder / f"{name}.json")]
    command = [sys.executable, "-m", "ddp_callbacks.launcher", "--nproc-per-node", str(processes), "--grace", "60"]
    slow = [] if stop is None else ["--seconds", "0.01"]
    job = subprocess.Popen([*command, "--no-prefix", *script, *slow], stdout=subprocess.PIPE, text=True, cwd=folder)
    assert job.stdout is not None
    last = 0
    for line in job.stdout:
        if line.startswith("batch "):
            last = int(line.split()[1])
            if last == stop:
                os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == (0 if stop is None else EXIT_PREEMPTED), f"{name}: exit code {job.returncode}"
    return last


if __name__ == "__main__":
    main()
