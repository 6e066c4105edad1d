"""Of many skipped batches some are reported, and at the end their number."""

from __future__ import annotations

import os

import pytest
from kit.ranks import HOSTNAME

import ddp_callbacks.data.bad_batches
from ddp_callbacks.data.bad_batches import BadBatches, Fault


def test_many_skipped_batches_are_reported_now_and_then_and_counted_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports count all skipped batches."""
    said: list[str] = []
    monkeypatch.setattr(ddp_callbacks.data.bad_batches, "say", lambda text, level: said.append(text))
    bad = BadBatches()
    for batch in range(10_000):
        bad.report(bad.agree(Fault.NAN, 1.0), f"epoch 0, batch {batch}")
    bad.close()
    assert len(said) == 10 + 9 + 1
    assert f"epoch 0, batch 0 is skipped. rank 0 (host {HOSTNAME}, pid {os.getpid()}): the loss is NaN" == said[0]
    assert said[-2].startswith(
        "epoch 0, batch 9999 is skipped (10000 so far; not each is reported from now on). rank 0"
    )
    assert said[-1] == "10000 batches were skipped in this run, because of rank 0 for 10000"
