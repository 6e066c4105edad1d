"""The Tuner and its callback find the learning rate that they find on one process."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from trainer_cases import Bodies, quiet
from trainers import Net, fit, loader, outcome, trainer

from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


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
    batch_size = 2


def find_batch_size() -> None:
    Tuner(made_for(CallbackStrategy())).scale_batch_size(Sized(), loader(29, 8))


@pytest.mark.parametrize("search", [find_batch_size, lambda: fit(CallbackStrategy(), callbacks=[BatchSizeFinder()])])
def test_a_search_for_a_batch_size_is_refused_as_under_ddp(search: Callable[[], Any]) -> None:
    """It refuses batch-size searches."""
    with quiet(), pytest.raises(Exception, match="not supported with distributed strategies"):
        search()
