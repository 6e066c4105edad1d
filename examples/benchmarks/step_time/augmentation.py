"""Time what the seeds of samples cost in a loader: nothing else is loaded, so each sample takes as little as it can.

python examples/benchmarks/step_time/augmentation.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch
from main import quartiles
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks import resumable_loader

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: torch.rand(()).item(),
    "NumPy": np.random.rand,
    "random": random.random,
}


class Drawing(Dataset[float]):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> float:
        return self.draw()


def seconds(loader: DataLoader[float]) -> float:
    """A pass takes this long per sample."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - start) / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    torch.set_num_threads(1)
    print("| draws by | without seeds, µs a sample | seeds cost, median | quartiles |\n|---|---|---|---|")
    for name, draw in DRAWS.items():
        plain = DataLoader(Drawing(draw), 64)
        seeded = resumable_loader(DataLoader(Drawing(draw), 64))
        rounds = [(seconds(plain), seconds(seeded)) for _ in range(15)]
        without = quartiles([one for one, _ in rounds])[1]
        first, median, third = quartiles([other - one for one, other in rounds])
        print(f"| {name} | {without * 1e6:.1f} | **{median * 1e6:.1f}** | {first * 1e6:.1f} to {third * 1e6:.1f} |")


if __name__ == "__main__":
    main()
