"""A loss that is no number: who had the first is said, once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.once import once
from kit.ranks import run_distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from trainers import FEATURES, Net, fit, quiet

from ddp_callbacks.errors import NonFiniteLossWarning, PeerError
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

STEP = 2  # whose second half, rank 1's, has a sample without a value


def data() -> TensorDataset:
    inputs = torch.randn(32, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs[STEP * 8 + 7, 0] = float("nan")
    return TensorDataset(inputs, torch.arange(32) % 3)


def train_by_lightning() -> None:
    with quiet():
        warnings.simplefilter("always", NonFiniteLossWarning)
        fit("ddp_callbacks", Net(), DataLoader(data(), 8))


def train_by_torchbearer() -> None:
    model = nn.Linear(FEATURES, 3).double()
    trial = Trial(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), callbacks=[DDPCallback()])
    trial.with_train_generator(DataLoader(data(), 8)).to("cpu", torch.float64).run(2, verbose=0)


def said_in(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NonFiniteLossWarning)
        train()
    return [str(warning.message) for warning in caught if warning.category is NonFiniteLossWarning]


def error_in(train: Callable[[], None]) -> str:
    """On one rank the warning, which is an error in these tests; on the other what it hears of it."""
    try:
        train()
    except (NonFiniteLossWarning, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_all() -> Any:
    said = {train.__name__: said_in(train) for train in (train_by_lightning, train_by_torchbearer)}
    return said, error_in(train_by_torchbearer)


@once
def by_rank() -> list[Any]:
    return run_distributed(train_all, 2)


@pytest.mark.parametrize(
    ("host", "where"), [("train_by_lightning", "step 2"), ("train_by_torchbearer", "epoch 0, batch 2")]
)
def test_the_first_loss_that_is_no_number_is_told_once_with_rank_host_and_step(host: str, where: str) -> None:
    """One message names the first infinite loss."""
    (first, _), (second, _) = by_rank()
    assert first[host] == []
    (text,) = second[host]
    assert text.startswith(f"rank 1 (host {os.uname().nodename}, pid ")
    assert f"the loss of {where} is nan, the first that is not finite" in text


def test_a_loss_that_is_no_number_ends_all_ranks_where_the_program_wants_an_error() -> None:
    """You may let it end all."""
    (_, heard), (_, raised) = by_rank()
    assert raised.startswith("NonFiniteLossWarning: rank 1 (")
    assert heard.startswith("PeerError: rank 1 (") and "failed with NonFiniteLossWarning: rank 1" in heard
