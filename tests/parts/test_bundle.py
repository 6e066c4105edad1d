"""The callbacks of a Trial without processes: what the bundle holds, Flatten, and settings that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

import ddp_callbacks.torchbearer as public
from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer import AllReduceGradients, AverageParameters, DDPCallback, Flatten


def test_the_bundle_is_a_list_of_public_callbacks() -> None:
    """`DDPCallback` is a list of public callbacks, in order."""
    names = [type(callback).__name__ for callback in DDPCallback()]
    assert names == [
        "ReportFailures",
        "BroadcastParameters",
        "ShardData",
        "MergeBuffers",
        "AllReduceGradients",
        "ReduceMetrics",
        "GatherPredictions",
        "CompareReplicas",
        "RankZeroOutput",
        "AgreeToStop",
    ]
    assert set(names) <= set(public.__all__)


def test_the_bundle_takes_the_word_of_sync() -> None:
    def kinds(bundle: DDPCallback) -> set[type]:
        return {type(item) for item in bundle} & {AllReduceGradients, AverageParameters}

    assert kinds(DDPCallback()) == kinds(DDPCallback(sync="every_step")) == {AllReduceGradients}
    assert kinds(DDPCallback(sync=LocalSGD(8))) == kinds(DDPCallback(sync=DiLoCo(50))) == {AverageParameters}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPCallback(sync=8), 'sync must be "every_step", LocalSGD'),
        (lambda: DDPCallback(sync=LocalSGD(8), comm_hook=print), "a comm_hook sums gradients"),
        (lambda: DDPCallback(sync=LocalSGD(8), bucket_cap_mb=-1), "bucket_cap_mb must be positive"),
        (lambda: AverageParameters("every_step"), "sync must be LocalSGD"),
    ],
)
def test_wrong_settings_of_sync_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_flatten_keeps_the_batch_dimension() -> None:
    flatten = Flatten()
    state = {torchbearer.X: torch.zeros(5, 1, 28, 28)}
    flatten.on_sample(state)
    assert state[torchbearer.X].shape == (5, 784)
    state = {torchbearer.X: [torch.zeros(3, 2, 2), (torch.zeros(3), None)]}
    flatten.on_sample_validation(state)
    assert state[torchbearer.X][0].shape == (3, 4)
    assert state[torchbearer.X][1][0].shape == (3,)


def test_flatten_acts_in_training_validation_and_prediction() -> None:
    """`Flatten` makes each sample one-dimensional."""
    x, y, model = torch.randn(6, 2, 3), torch.arange(6), nn.Linear(6, 10)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    made = Trial(model, sgd, nn.CrossEntropyLoss(), callbacks=[Flatten()], verbose=0)
    made.with_generators(DataLoader(TensorDataset(x, y), 2), DataLoader(TensorDataset(x, y), 2)).run(1)
    predictions = made.with_test_generator(DataLoader(TensorDataset(x), 4)).predict()
    torch.testing.assert_close(predictions, model(x.flatten(1)).detach())
