"""The callbacks of a Trial without processes: what the bundle holds, Flatten, and settings that are refused."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

import ddp_callbacks.torchbearer
from ddp_callbacks.torchbearer import DDPCallback, Flatten


def test_the_bundle_is_a_list_of_callbacks() -> None:
    """`DDPCallback` is a list of callbacks, in order; five of them are public."""
    names = [type(callback).__name__ for callback in DDPCallback()]
    public = ["BroadcastParameters", "ShardData", "AllReduceGradients", "ReduceMetrics", "RankZeroOutput"]
    assert [name for name in names if name in ddp_callbacks.torchbearer.__all__] == public
    assert names[-1] == "StopTogether"


def test_flatten_acts_in_training_validation_and_prediction() -> None:
    """`Flatten` makes each sample one-dimensional."""
    x, y, model = torch.randn(6, 2, 3), torch.arange(6), nn.Linear(6, 10)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    made = Trial(model, sgd, nn.CrossEntropyLoss(), callbacks=[Flatten()], verbose=0)
    made.with_generators(DataLoader(TensorDataset(x, y), 2), DataLoader(TensorDataset(x, y), 2)).run(1)
    predictions = made.with_test_generator(DataLoader(TensorDataset(x), 4)).predict()
    torch.testing.assert_close(predictions, model(x.flatten(1)).detach())
