"""The Tuner and the callbacks that search for a batch size and a learning rate find what they find on one process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning_scenarios import Net, data, loader, outcome, quiet, trainer
from test_equivalence import assert_equal
from torch.utils.data import DataLoader

from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results("world_size")]

Script = Callable[[Any], Any]
SCRIPTS: dict[str, Script] = {}
OURS = "ddp_callbacks"
MEMORY = 16  # samples of a batch


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def run_all() -> dict[str, Any]:
    with quiet():
        return {name: run(OURS) for name, run in SCRIPTS.items()}


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(run_all, world_size)


def find_learning_rate(strategy: Any, **options: Any) -> Any:
    made, module = trainer(strategy, max_epochs=3, default_root_dir=tempfile.gettempdir()), Net()
    finder = Tuner(made).lr_find(module, loader(29, 8), num_training=40, **options)
    assert finder is not None
    made.fit(module, loader(29, 8))
    return finder.suggestion(), finder.results["lr"], finder.results["loss"], module.lr, outcome(made, module)


@script
def a_learning_rate_from_the_tuner(strategy: Any) -> Any:
    return [find_learning_rate(strategy, mode="linear"), find_learning_rate(strategy, early_stop_threshold=None)]


@script
def a_learning_rate_from_the_callback(strategy: Any) -> Any:
    finder = LearningRateFinder(num_training_steps=20)
    made, module = trainer(strategy, callbacks=[finder], default_root_dir=tempfile.gettempdir()), Net()
    made.fit(module, loader(29, 8), loader(13, 5, 9))
    return module.lr, finder.optimal_lr.results["loss"], outcome(made, module)


class Sized(Net):
    """Has loaders of its batch size, and no memory for more than so many samples, on the last rank alone.

    Args:
        where: The hook in which memory runs out; ``None``: it never does.
    """

    def __init__(self, where: str | None = None, error: type[Exception] = RuntimeError, **options: Any) -> None:
        super().__init__(optimizer=lambda module: torch.optim.Adam(module.parameters(), 0.01), **options)
        self.batch_size, self.where, self.error = 2, where, error

    def _loader(self) -> Any:
        return DataLoader(data(64), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def _need(self, where: str) -> None:
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if where == self.where and is_last and self.batch_size > MEMORY:
            raise self.error(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4611686018427387904 bytes"
            )

    def training_step(self, *args: Any) -> Any:
        self._need("training_step")
        return super().training_step(*args)

    def on_after_backward(self) -> None:
        self._need("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._need("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # Adam has stepped on this rank
            self._need("on_train_batch_end")

    def on_train_end(self) -> None:
        self._need("on_train_end")

    def validation_step(self, *args: Any) -> Any:
        self._need("validation_step")
        return super().validation_step(*args)

    def _test(self, *args: Any) -> Any:
        self._need("test_step")
        return Net.test_step(self, *args)

    test_step = _test

    def predict_step(self, *args: Any) -> Any:
        self._need("predict_step")
        return super().predict_step(*args)


PLACES = [
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_end",
]


def made_for(strategy: Any, **options: Any) -> pl.Trainer:
    return trainer(strategy, default_root_dir=tempfile.gettempdir(), **options)


def search(strategy: Any, module: Sized, method: str = "fit", **options: Any) -> Any:
    """What the Tuner finds, and that it leaves the parameters alone."""
    made = made_for(strategy)
    found = Tuner(made).scale_batch_size(module, method=method, steps_per_trial=3, max_trials=6, **options)
    return found, module.batch_size, {name: value.clone() for name, value in module.state_dict().items()}


@script
def sizes_with_memory_for_all(strategy: Any) -> Any:
    return {mode: search(strategy, Sized(), mode=mode, max_val=32) for mode in ("power", "binsearch")}


@script
def sizes_where_memory_runs_out(strategy: Any) -> Any:
    cases = [("power", place) for place in PLACES] + [("binsearch", "training_step")]
    return {case: search(strategy, Sized(case[1]), mode=case[0]) for case in cases}


@script
def sizes_for_evaluations(strategy: Any) -> Any:
    steps = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
    return {method: search(strategy, Sized(step), method) for method, step in steps.items()}


@script
def a_fit_with_the_size_that_the_callback_finds(strategy: Any) -> Any:
    results = []
    for place in (None, "on_train_batch_end"):
        module = Sized(place)
        made = made_for(strategy, callbacks=[BatchSizeFinder(steps_per_trial=3, max_trials=6)], max_epochs=2)
        made.fit(module)
        results.append((module.batch_size, outcome(made, module), made.test(module, loader(13, 5, 9), verbose=False)))
    return results


@script
def predictions_with_the_size_that_the_callback_finds(strategy: Any) -> Any:
    results = []
    for place in (None, "predict_step"):
        module = Sized(place)
        made = made_for(strategy, callbacks=[BatchSizeFinder(max_trials=6)])
        results.append((made.predict(module), module.batch_size))
    return results


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_the_tuner_finds_what_it_finds_on_one_process(world_size: int, name: str) -> None:
    with quiet():
        expected = SCRIPTS[name]("auto")
    for rank, results in enumerate(on_ranks(world_size)):
        assert_equal(results[name], expected, 1e-8, f"rank {rank}")


def test_the_search_works_under_the_strategy_on_one_process_and_lightning_refuses_it_under_ddp(tmp_path: Path) -> None:
    with quiet():
        assert search(CallbackStrategy(), Sized("training_step"))[0] == MEMORY
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(made_for("ddp")).scale_batch_size(Sized())


# --- what is no lack of memory ----------------------------------------------------------------------------------------


def fail_in_a_trial() -> Any:
    with quiet():
        made, module = made_for(OURS), Sized("training_step", ZeroDivisionError)
        try:
            Tuner(made).scale_batch_size(module, max_trials=6)
        except Exception as error:
            seen = type(error).__name__
        again, module = made_for(OURS, max_epochs=1), Net()
        again.fit(module, loader())
        return seen, dist.get_rank(), outcome(again, module)


def test_another_error_in_a_trial_ends_the_search_on_all_who_can_train_again() -> None:
    with quiet():
        alone, module = made_for("auto", max_epochs=1), Net()
        alone.fit(module, loader())
        expected = outcome(alone, module)
    for found, rank, trained in run_distributed(fail_in_a_trial, 2):
        assert found == ("PeerError" if rank == 0 else "ZeroDivisionError")
        assert_equal(trained, expected, 1e-10)
