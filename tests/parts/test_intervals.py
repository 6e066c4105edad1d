"""When a checkpoint is due: after some batches, at the end of an epoch, or when a time has passed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_callbacks.checkpoints.intervals import Every, make_interval
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer import Resume


@pytest.mark.parametrize(
    ("every", "expected"), [(timedelta(seconds=10), [20, 40]), (15, [15, 30]), (None, [10, 20, 30, 40])]
)
def test_a_checkpoint_is_written_when_it_is_due(
    every: Every, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`every=` counts batches, epochs or minutes."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    interval, written = make_interval(every, None), []
    for batch in range(1, 41):  # of half a second; an epoch has ten
        now[0] += 0.5
        if interval.is_due(is_batch=True, is_epoch_end=batch % 10 == 0):
            written.append(batch)
            interval.note_written()
    assert written == expected


@pytest.mark.parametrize("every", [0, -1, True, 1.5, timedelta(0)])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="every must be a positive number of training batches"):
        Resume("run.pt", every=every)
