"""What steps, epochs and runs cost apart: a Torchbearer Trial and a Lightning Trainer, each with DDP and with ours.

    ddprun --nproc-per-node 2 examples/benchmarks/epoch_cost/main.py

A round times three runs of each way, one after another: one short epoch, many short epochs, and one long epoch. What
the second costs more is the price of epochs, what the third costs more is the price of steps. The ratio compares the
run of many short epochs with that of the same host (Trial or Trainer) under DDP in the same round.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchbearer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

STEPS, EPOCHS = 6, 10  # of short epochs; a long one has as many steps as all of them
BATCH = 32  # samples per process
Run = Callable[[int, int], None]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def data_of(steps: int) -> TensorDataset:
    samples = steps * BATCH * dist.get_world_size()
    torch.manual_seed(1)
    return TensorDataset(torch.randn(samples, 784), torch.randint(0, 10, (samples,)))


def train_trial(model: nn.Module, loader: DataLoader, epochs: int, callbacks: list[torchbearer.Callback]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trial = torchbearer.Trial(
        model, optimizer, nn.functional.cross_entropy, metrics=["loss", "acc"], callbacks=callbacks, verbose=0
    )
    trial.with_train_generator(loader).run(epochs)


def trial_with_ddp(steps: int, epochs: int) -> None:
    data = data_of(steps)
    sampler: DistributedSampler = DistributedSampler(data)

    @torchbearer.callbacks.on_start_epoch
    def shuffle(state: dict) -> None:
        sampler.set_epoch(state[torchbearer.EPOCH])

    train_trial(DistributedDataParallel(make_model()), DataLoader(data, BATCH, sampler=sampler), epochs, [shuffle])


def trial_with_ours(steps: int, epochs: int) -> None:
    loader = DataLoader(data_of(steps), BATCH * dist.get_world_size(), shuffle=True)
    train_trial(make_model(), loader, epochs, [DDPCallback(verify=None)])


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_trainer(strategy: str | CallbackStrategy, batch: int, steps: int, epochs: int) -> None:
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data_of(steps), batch, shuffle=True))


WAYS: dict[str, Run] = {
    "Trial, DDP": trial_with_ddp,
    "Trial, ours": trial_with_ours,
    "Trainer, DDP": lambda steps, epochs: train_trainer("ddp", BATCH, steps, epochs),
    "Trainer, ours": lambda steps, epochs: train_trainer(
        CallbackStrategy(verify=None), BATCH * dist.get_world_size(), steps, epochs
    ),
}
RUNS = {"short": (STEPS, 1), "epochs": (STEPS, 1 + EPOCHS), "steps": (STEPS * (1 + EPOCHS), 1)}


def time_run(run: Run, steps: int, epochs: int) -> float:
    """Milliseconds."""
    dist.barrier()
    start = time.perf_counter()
    run(steps, epochs)
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


def time_rounds(names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each run of each way, one entry per round."""
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in RUNS} for name in names}
    for index in range(-1, rounds):  # the first round warms up
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            for kind, (steps, epochs) in RUNS.items():
                milliseconds = time_run(WAYS[name], steps, epochs)
                if index >= 0:
                    times[name][kind].append(milliseconds)
    return times


def table(times: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| way | step, ms | epoch, ms | run, ms | ratio to DDP, median | quartiles |", "|---|---|---|---|---|---|"]
    for name, kinds in times.items():
        short, epochs, steps = (statistics.median(kinds[kind]) for kind in RUNS)
        step = (steps - short) / (STEPS * EPOCHS)
        epoch = (epochs - steps) / EPOCHS
        run = short - epoch - STEPS * step
        baseline = times.get(name.replace("ours", "DDP"), kinds)["epochs"]
        ratios = [own / base for own, base in zip(kinds["epochs"], baseline, strict=True)]
        first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
        lines.append(
            f"| {name} | {step:.2f} | {epoch:.1f} | {run:.0f} | **{median:.2f}** | {first:.2f} to {third:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of three runs per way (default 15)")
    parser.add_argument("--only", help="ways whose name begins so: Trial, Trainer")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    env = join_process_group()
    if env.world_size == 1:
        parser.error("start it with ddprun or torchrun, on at least two processes")
    times = time_rounds([name for name in WAYS if name.startswith(arguments.only or "")], arguments.rounds)
    if env.rank == 0:
        print(table(times))
    leave_process_group()


if __name__ == "__main__":
    main()
