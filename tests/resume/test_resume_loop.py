"""A loop of one's own that is cut at any batch goes on at the next one, on any number of processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchbearer
import trainers
from kit.compare import assert_equal
from kit.ranks import Nursery, note, run_distributed
from loops import BATCHES, EPOCHS, Loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trials import data, trial
from ways import RELATIVE, Way, in_each, prove

import ddp_callbacks.lightning
from ddp_callbacks import (
    CheckpointFile,
    Preemption,
    join_process_group,
    load_checkpoint,
    resumable_loader,
    save_checkpoint,
)
from ddp_callbacks.errors import CheckpointError, ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.torchbearer import DDPCallback, Resume

pytestmark = pytest.mark.shares_results()

WAYS = {
    "one": Way(1, resumed_on=1),
    "two": Way(resumed_on=2),
    "one, resumed on two": Way(1, resumed_on=2),
    "two, resumed on one": Way(resumed_on=1),
    "two by gloo": Way(gloo=True, resumed_on=2, tier="wide"),
    "three on two hosts": Way(3, layout=(2, 1), resumed_on=3, tier="wide"),
    "three on two hosts, resumed on two": Way(3, layout=(2, 1), resumed_on=2, tier="wide"),
    "one, resumed on three on two hosts": Way(1, layout=(2, 1), resumed_on=3, tier="wide"),
}


@in_each("loops", WAYS)
def test_a_loop_that_is_cut_goes_on_at_the_next_batch(way: Way, name: str) -> None:
    """Your own loop resumes at the next batch."""
    prove("loops", way, name)


# --- a program --------------------------------------------------------------------------------------------------------


def signal_at(step: int, when: int, preemption: Preemption) -> None:
    """The last rank gets a signal. Its thread tells the others before the run, which is short, can end."""
    if step == when and get_rank() == get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while get_world_size() > 1 and preemption._agreement._counts is None:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.001)


def loop_program(path: str, when: int) -> Any:
    made = Loop("synchronized")
    load_checkpoint(path, made.objects)
    train = made.step
    with Preemption() as preemption:

        def step(*args: Any) -> None:
            train(*args)
            signal_at(BATCHES * made.progress["epoch"] + made.progress["batch"], when, preemption)
            if preemption.is_requested():
                save_checkpoint(path, made.objects)
                preemption.exit(path)

        made.step = step  # type: ignore[method-assign]
        made.run()
    losses, parameters = made.result()
    return losses, [value.tolist() for value in parameters]


def trial_program(path: str, when: int) -> Any:
    @torchbearer.callbacks.on_step_training
    def step(state: Any) -> None:
        signal_at(BATCHES * state[torchbearer.EPOCH] + state[torchbearer.BATCH] + 1, when, resume.preemption)

    resume = Resume(path)
    made = trial([DDPCallback(), resume], callbacks=[step]).with_train_generator(DataLoader(data(34), 8, True))
    history = made.run(EPOCHS)
    return [epoch["loss"] for epoch in history], [value.tolist() for value in made.state_dict()["model"].values()]


def trainer_program(path: str, when: int) -> Any:
    class Signals(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            signal_at(trainer.fit_loop.total_batch_idx + 1, when, resume.preemption)

    resume, module = ddp_callbacks.lightning.Resume(path), trainers.Net()
    with trainers.quiet():
        made = trainers.trainer("ddp_callbacks", callbacks=[resume, Signals()], max_epochs=3)
        made.fit(module, trainers.loader(shuffle=True), trainers.loader(13, 5, 9))
    return made.global_step, [value.tolist() for value in module.state_dict().values()]


PROGRAMS = {"loop": loop_program, "Trial": trial_program, "Trainer": trainer_program}


def program(name: str, path: str, when: int) -> None:
    join_process_group()
    note("result", PROGRAMS[name](path, when))


@pytest.mark.usefixtures("seed_variables")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_gets_a_signal_exits_with_75_and_the_next_start_goes_on(
    name: str, tmp_path: Path, nursery: Nursery
) -> None:
    """After SIGTERM a Trainer, a Trial or a loop exits with 75, and resumes."""
    for rank in nursery.run(program, 2, tmp_path, name, "run.pt", 7):
        assert (rank.code, rank.notes) == (75, {}), rank.stderr
    assert (tmp_path / "run.pt").exists()
    whole = PROGRAMS[name](str(tmp_path / "whole.pt"), 0)
    for rank in nursery.run(program, 2, tmp_path, name, "run.pt", 7):
        assert rank.code == 0, rank.stderr
        assert_equal(tuple(rank.notes["result"]), whole, RELATIVE)


def cut_with_statistics(path: str) -> list[torch.Tensor]:
    """This rank's own running statistics when the loop is saved."""
    made = Loop("dropout")
    made.run(3, lambda: save_checkpoint(path, made.objects))
    return [statistic.clone() for statistic in statistics_of(made)]


def statistics_of(loop: Loop) -> list[Any]:
    return [loop.model[1].running_mean, loop.model[1].running_var]


def test_on_another_number_running_statistics_are_the_mean_of_the_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(cut_with_statistics, 2, str(tmp_path / "run.pt"))
    alone = Loop("dropout")
    load_checkpoint(tmp_path / "run.pt", alone.objects)
    for found, one, other in zip(statistics_of(alone), first, second, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(found, (one + other) / 2, rtol=1e-12, atol=0)


def test_a_learning_rate_that_the_script_changes_is_not_ignored_silently(tmp_path: Path) -> None:
    def made(lr: float) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        return {
            "model": model,
            "first": torch.optim.AdamW(model.parameters(), 0.1),
            "other": torch.optim.Adam(model.parameters(), lr),
        }

    save_checkpoint(tmp_path / "run.pt", made(0.1))
    assert load_checkpoint(tmp_path / "run.pt", dict(reversed(made(0.1).items())))
    with pytest.warns(UserWarning, match=r"passes: lr of Adam 0\.1, now 0\.3\. The run resumes with"):
        load_checkpoint(tmp_path / "run.pt", made(0.3))


def test_a_loop_is_refused_what_it_cannot_go_on_from(tmp_path: Path) -> None:
    path, loop = tmp_path / "run.pt", Loop("no_sync")
    loop.run(3)
    assert not load_checkpoint(path, loop.objects)
    save_checkpoint(path, loop.objects)
    data = TensorDataset(torch.zeros(35, 5), torch.zeros(35, 1))
    others = {
        "model": (
            nn.Linear(5, 1),
            r"model: Sequential with 50 numbers in 4 parameters .* in the file, Linear with 6",
        ),
        "loader": (
            resumable_loader(DataLoader(data, 16)),
            r"samples of loader: 34 in the file, 35 now; batch size of loader: 8 in the file, 16 now",
        ),
        "another": ({}, r"objects: engine, .* in the file, another, engine, .* now"),
    }
    for name, (value, text) in others.items():
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(path, {**loop.objects, name: value})
    before = [value.clone() for value in loop.objects["model"].parameters()]
    grown = torch.optim.SGD([{"params": loop.objects["model"].parameters()}, {"params": [nn.Parameter(torch.ones(1))]}])
    name = next(name for name, value in loop.objects.items() if isinstance(value, torch.optim.Optimizer))
    with pytest.raises(CheckpointError, match=rf"groups of parameters of {name}: \[4\] in the file, \[4, 1\] now"):
        load_checkpoint(path, {**loop.objects, name: grown})
    assert all(map(torch.equal, loop.objects["model"].parameters(), before))
    with pytest.raises(ConfigurationError, match="'data' must have state_dict and load_state_dict, or be a dict of"):
        save_checkpoint(path, {"data": DataLoader(data)})
    with CheckpointFile(path) as file:
        file.write({}, {}, {})
    with pytest.raises(CheckpointError, match="belongs to another run"):
        load_checkpoint(path, loop.objects)
