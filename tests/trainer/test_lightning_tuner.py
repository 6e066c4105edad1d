"""The Tuner and the callbacks that search for a batch size and a learning rate find what they find on one process."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from kit.compare import assert_equal
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader
from trainer_cases import OURS, Bodies, assert_as_on_one, on_one, quiet
from trainers import Net, data, fit, loader, outcome, trainer

from ddp_callbacks.errors import PeerError
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


MEMORY = 16  # samples of a batch


def made_for(strategy: Any, **options: Any) -> pl.Trainer:
    gc.freeze()  # each trial collects garbage: not among all that was there before
    return trainer(strategy, default_root_dir=tempfile.gettempdir(), **options)


def find_learning_rate(strategy: Any, **options: Any) -> Any:
    made, module = made_for(strategy, max_epochs=3), Net()
    finder = Tuner(made).lr_find(module, loader(29, 8), num_training=40, **options)
    assert finder is not None
    made.fit(module, loader(29, 8))
    return finder.suggestion(), finder.results["lr"], finder.results["loss"], module.lr, outcome(made, module)


@WORLD
def a_learning_rate_from_the_tuner(strategy: Any = OURS) -> Any:
    return [find_learning_rate(strategy, mode="linear"), find_learning_rate(strategy, early_stop_threshold=None)]


@WORLD
def a_learning_rate_from_the_callback(strategy: Any = OURS) -> Any:
    finder = LearningRateFinder(num_training_steps=20)
    made, module = made_for(strategy, callbacks=[finder]), Net()
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

    def need(self, where: str) -> None:
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if where == self.where and is_last and self.batch_size > MEMORY:
            raise self.error(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4611686018427387904 bytes"
            )


def _needing(where: str) -> Callable[..., Any]:
    def hook(self: Sized, *args: Any) -> Any:
        if where != "on_train_batch_end" or args[2] == 1:  # then Adam has stepped on this rank
            self.need(where)
        return getattr(Net, where)(self, *args)

    return hook


STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
PLACES = [
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_end",
]
for _place in [*PLACES, *STEPS.values()]:
    setattr(Sized, _place, _needing(_place))


def search(strategy: Any, module: Sized, method: str = "fit", **options: Any) -> Any:
    """What the Tuner finds, and that it leaves the parameters alone."""
    made = made_for(strategy)
    found = Tuner(made).scale_batch_size(module, method=method, steps_per_trial=3, max_trials=6, **options)
    return found, module.batch_size, {name: value.clone() for name, value in module.state_dict().items()}


@WORLD
def sizes_with_memory_for_all(strategy: Any = OURS) -> Any:
    return {mode: search(strategy, Sized(), mode=mode, max_val=32) for mode in ("power", "binsearch")}


@WORLD
def sizes_where_memory_runs_out(strategy: Any = OURS) -> Any:
    cases = [("power", place) for place in PLACES] + [("binsearch", "training_step")]
    return {case: search(strategy, Sized(case[1]), mode=case[0]) for case in cases}


@WORLD
def sizes_for_evaluations(strategy: Any = OURS) -> Any:
    return {method: search(strategy, Sized(step), method) for method, step in STEPS.items()}


@WORLD
def a_fit_with_the_size_that_the_callback_finds(strategy: Any = OURS) -> Any:
    results = []
    for place in (None, "on_train_batch_end"):
        module = Sized(place)
        made = made_for(strategy, callbacks=[BatchSizeFinder(steps_per_trial=3, max_trials=6)], max_epochs=2)
        made.fit(module)
        results.append((module.batch_size, outcome(made, module), made.test(module, loader(13, 5, 9), verbose=False)))
    return results


@WORLD
def predictions_with_the_size_that_the_callback_finds(strategy: Any = OURS) -> Any:
    results = []
    for place in (None, "predict_step"):
        module = Sized(place)
        made = made_for(strategy, callbacks=[BatchSizeFinder(max_trials=6)])
        results.append((made.predict(module), module.batch_size))
    return results


@pytest.mark.parametrize(
    "search_",
    [
        a_learning_rate_from_the_tuner,
        a_learning_rate_from_the_callback,
        sizes_with_memory_for_all,
        sizes_where_memory_runs_out,
        sizes_for_evaluations,
        a_fit_with_the_size_that_the_callback_finds,
        predictions_with_the_size_that_the_callback_finds,
    ],
)
def test_the_tuner_finds_what_it_finds_on_one_process(search_: Any) -> None:
    """The Tuner finds what it finds on one process."""
    assert_as_on_one(search_, 1e-8)


def test_the_search_works_under_the_strategy_on_one_process_and_lightning_refuses_it_under_ddp() -> None:
    with quiet():
        assert search(CallbackStrategy(), Sized("training_step"))[0] == MEMORY
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(made_for("ddp")).scale_batch_size(Sized())


# --- what is no lack of memory ----------------------------------------------------------------------------------------


@WORLD
def failing_in_a_trial() -> Any:
    with pytest.raises((ZeroDivisionError, PeerError)) as raised:
        Tuner(made_for(OURS)).scale_batch_size(Sized("training_step", ZeroDivisionError), max_trials=6)
    return type(raised.value).__name__, fit(OURS)


def test_another_error_in_a_trial_ends_the_search_on_all_who_can_train_again() -> None:
    (first, trained), (second, of_second) = WORLD.returned(failing_in_a_trial)
    assert (first, second) == ("PeerError", "ZeroDivisionError")
    expected = on_one(fit)
    assert_equal([trained, of_second], [expected, expected], 1e-10)
