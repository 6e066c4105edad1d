"""The logged numbers of an epoch take a few bytes, for any number of batches."""

from __future__ import annotations

import pytest
import torch

from ddp_callbacks.lightning.history import History, Record, join


@pytest.mark.parametrize("operation", ["mean", "sum", "max", "min"])
def test_an_epoch_of_many_batches_keeps_and_sends_a_few_numbers(operation: str) -> None:
    """An epoch's logged numbers take a few bytes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5000, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 4, (2, 5000), generator=generator).double()
    histories = [History(operation), History(operation)]
    for batch in range(5000):
        for rank, history in enumerate(histories):
            weight, total = float(weights[rank, batch]), float(weights[:, batch].sum())
            is_stand_in = not weight and total > 0
            value = values[rank, batch]
            history.add(Record(batch, weight, total, weight or 3.0, weight, False, is_stand_in, value))
            assert len(history.state_dict()["records"]) < 256
    sent = [history.parts() for history in histories]
    assert [part.numel() for parts in sent for part in parts] == [6, 0] * 2
    found, _ = join([(sums, rows) for sums, rows in sent], operation)
    # Where no rank counts, the mean is over nothing.
    counted = (weights > 0) | (weights.sum(0) == 0)
    mean = (values * weights).sum() / weights.sum()
    expected = mean if operation == "mean" else getattr(values[counted], operation)()
    assert found == pytest.approx(float(expected), rel=1e-10)
