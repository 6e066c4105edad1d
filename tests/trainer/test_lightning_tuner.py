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
from trainer_cases import OURS, Bodies, message_of, on_one, quiet
from trainers import Net, data, fit, loader, outcome, trainer

from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


MEMORY = 4  # samples of a batch


def made_for(strategy: Any, **options: Any) -> pl.Trainer:
    gc.freeze()  # each trial collects garbage: not among all that was there before
    return trainer(strategy, default_root_dir=tempfile.gettempdir(), **options)


def find_learning_rate(strategy: Any, **options: Any) -> Any:
    made, module = made_for(strategy, max_epochs=3), Net()
    finder = Tuner(made).lr_find(module, loader(29, 8), num_training=20, **options)
    assert finder is not None
    made.fit(module, loader(29, 8))
    return finder.suggestion(skip_begin=4), finder.results, module.lr, outcome(made, module)


@WORLD.as_on_one(relative=1e-8)
def test_the_tuner_finds_the_learning_rate_that_it_finds_on_one_process(strategy: Any) -> Any:
    """The Tuner finds what it finds on one process."""
    finder = LearningRateFinder(num_training_steps=20)
    made, module = made_for(strategy, callbacks=[finder]), Net()
    made.fit(module, loader(29, 8), loader(13, 5, 9))
    assert finder.optimal_lr is not None
    return [
        find_learning_rate(strategy, mode="linear"),
        find_learning_rate(strategy, early_stop_threshold=None),
        [module.lr, finder.optimal_lr.results["loss"], outcome(made, module)],
    ]


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
    found = Tuner(made).scale_batch_size(module, method=method, steps_per_trial=2, max_trials=4, **options)
    return found, module.batch_size, {name: value.clone() for name, value in module.state_dict().items()}


@WORLD.as_on_one(relative=1e-8)
def test_the_tuner_finds_the_batch_size_for_which_all_have_memory(strategy: Any) -> Any:
    return {
        "enough": search(strategy, Sized(), max_val=8),
        "bisected": search(strategy, Sized("training_step"), mode="binsearch"),
        **{place: search(strategy, Sized(place)) for place in PLACES},
        **{method: search(strategy, Sized(step), method) for method, step in STEPS.items()},
    }


@WORLD.as_on_one(relative=1e-8)
def test_a_fit_and_predictions_have_the_size_that_the_callback_finds(strategy: Any) -> Any:
    module, predicts = Sized("on_train_batch_end"), Sized("predict_step")
    made = made_for(strategy, callbacks=[BatchSizeFinder(steps_per_trial=2, max_trials=4)], max_epochs=2)
    made.fit(module)
    tested = made.test(module, loader(13, 5, 9), verbose=False)
    predicted = made_for(strategy, callbacks=[BatchSizeFinder(max_trials=4)]).predict(predicts)
    return module.batch_size, outcome(made, module), tested, predicted, predicts.batch_size


def test_the_search_works_under_the_strategy_on_one_process() -> None:
    with quiet():
        assert search(CallbackStrategy(), Sized("training_step"))[0] == MEMORY


# --- what is no lack of memory ----------------------------------------------------------------------------------------


@WORLD
def failing_in_a_trial() -> Any:
    message = message_of(
        lambda: Tuner(made_for(OURS)).scale_batch_size(Sized("training_step", ZeroDivisionError), max_trials=6)
    )
    return message.partition(":")[0], fit(OURS)


def test_another_error_in_a_trial_ends_the_search_on_all_who_can_train_again() -> None:
    expected = on_one(fit)
    assert_equal(WORLD.returned(failing_in_a_trial), [["PeerError", expected], ["ZeroDivisionError", expected]], 1e-10)
