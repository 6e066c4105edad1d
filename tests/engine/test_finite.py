"""A loss that is no number: who had the first is said, once."""

from __future__ import annotations

import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from shared_worlds import World
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from trainers import FEATURES, Net, fit, quiet

from ddp_callbacks.errors import NonFiniteLossWarning, PeerError
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = World(__name__)
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


HOSTS = {"Lightning": (train_by_lightning, "step 2"), "Torchbearer": (train_by_torchbearer, "epoch 0, batch 2")}


@WORLD.each(HOSTS)
def test_the_first_loss_that_is_no_number_is_told_once_with_rank_host_and_step(name: str) -> None:
    """One message names the first infinite loss."""
    train, where = HOSTS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NonFiniteLossWarning)
        train()
    said = [str(warning.message) for warning in caught if warning.category is NonFiniteLossWarning]
    assert len(said) == dist.get_rank()
    for text in said:
        assert text.startswith(f"rank 1 (host {os.uname().nodename}, pid ")
        assert f"the loss of {where} is nan, the first that is not finite" in text


@WORLD
def test_a_loss_that_is_no_number_ends_all_ranks_where_the_program_wants_an_error() -> None:
    """You may let it end all."""
    says = ("PeerError: rank 1 .* failed with NonFiniteLossWarning: rank 1", "NonFiniteLossWarning: rank 1 ")
    with pytest.raises((NonFiniteLossWarning, PeerError)) as caught:  # a warning is an error in these tests
        train_by_torchbearer()
    assert re.match(says[dist.get_rank()], f"{type(caught.value).__name__}: {caught.value}")
