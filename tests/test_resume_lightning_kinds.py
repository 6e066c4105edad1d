"""A fit goes on in every kind of pass: several loaders, limits, streams, loaders made anew, own samplers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import assert_equal
from lightning.pytorch.utilities import CombinedLoader
from lightning_scenarios import quiet
from resume_lightning_scenarios import Classifier, Data, Stream, comparable, joined, run
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results]

Kind = Callable[[int | None, str], dict[str, Any]]
KINDS: dict[str, Kind] = {}


def kind(function: Callable[[], tuple[pl.LightningModule, tuple[Any, ...], dict[str, Any]]]) -> None:
    """A fit, given by its module, its loaders and the options of the Trainer."""

    def fit(cut: int | None, path: str) -> dict[str, Any]:
        pl.seed_everything(7, verbose=False)
        with quiet():
            module, loaders, options = function()
        return run(cut, path, module, loaders, **options)

    KINDS[function.__name__] = fit


class Several(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])[0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("first", batch["b"][0][0].double(), on_step=True, on_epoch=False)


class Draws(Classifier):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self.loss(batch)[0]

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class EndsEarly(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Shrinks(Classifier):
    def train_dataloader(self) -> Any:
        return shuffled(29 - self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        return DataLoader(Data(13, 9), 5)


def shuffled(samples: int) -> Any:
    return DataLoader(Data(samples), 8, shuffle=True)


def two() -> list[Any]:
    return [DataLoader(Data(13, 9), 5), DataLoader(Data(7, 8), 3)]


def named(a: Any, b: Any) -> dict[str, Any]:
    return {"a": a, "b": b}


@kind
def a_shorter_loader_begins_again() -> Any:
    return Several(0.2), (named(shuffled(29), shuffled(13)), two()), {}


@kind
def the_shorter_loader_ends_the_epoch() -> Any:
    return Several(0.2), (CombinedLoader(named(shuffled(29), shuffled(13)), "min_size"), two()), {}


@kind
def limits() -> Any:
    return Classifier(0.2), (shuffled(29), two()), {"limit_train_batches": 3, "limit_val_batches": 2}


@kind
def streams() -> Any:
    validations = [DataLoader(Stream(13, 9), 5), DataLoader(Stream(7, 8), 3)]
    return Classifier(0.2), (DataLoader(Stream(29), 8), validations), {}


@kind
def streams_of_different_lengths() -> Any:
    streams = named(DataLoader(Stream(29), 8), DataLoader(Stream(13), 8))
    return Several(0.2), (streams, [DataLoader(Stream(13, 9), 5)]), {}


@kind
def a_hook_ends_the_epoch() -> Any:
    return EndsEarly(0.2), (shuffled(29), two()), {}


@kind
def loaders_made_anew() -> Any:
    return Shrinks(0.2), (), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}


@kind
def validations_by_steps() -> Any:
    options = {"max_epochs": -1, "max_steps": 7, "val_check_interval": 3, "check_val_every_n_epoch": None}
    return Classifier(0.2), (shuffled(29), two()), options


@kind
def the_last_step_is_validated() -> Any:
    return Classifier(0.2), (shuffled(29), two()), {"max_epochs": -1, "max_steps": 6, "val_check_interval": 2}


@kind
def steps_that_draw() -> Any:
    return Draws(0.2), (shuffled(29), two()), {}


@kind
def a_sampler_that_the_user_divides() -> Any:
    data = Data(29)
    return Classifier(0.2), (DataLoader(data, 8, sampler=DistributedSampler(data, 1, 0)), two()), UNDIVIDED


UNDIVIDED = {"use_distributed_sampler": False}


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_goes_on_in_every_kind_of_pass(tmp_path: Path, name: str) -> None:
    whole = KINDS[name](None, f"{tmp_path}/whole.ckpt")
    for cut in random.Random(name).sample(range(2, whole["moments"] + 1), 5):
        first, second = (KINDS[name](at, f"{tmp_path}/{cut}.ckpt") for at in (cut, None))
        assert first["is_cut"]
        made, expected = comparable(joined(first, second)), comparable(whole)
        if name == "steps_that_draw":  # hooks before the step get the batch of the step before
            made["samples"] = expected["samples"] = []
        assert_equal(made, expected, 0.0, f"cut at {cut}")
