"""neuralforecast: it makes its Trainers itself, of pytorch_lightning, and saves what it has trained."""

from __future__ import annotations

from pathlib import Path

from programs import assert_close, on_one, on_two

PROGRAM = "train_neuralforecast.py"


def test_neuralforecast_trains_predicts_and_saves_on_two_processes_as_on_one(tmp_path: Path) -> None:
    """Unchanged neuralforecast trains, predicts and saves, too."""
    expected, named = on_one(PROGRAM, tmp_path), "its own validation losses"
    losses = expected.pop(named)
    for actual in on_two(PROGRAM, "divided", tmp_path):
        # It adds these up in float32: 2^-24 for each of three roundings on either side.
        assert_close(actual.pop(named), losses, 6 * 2**-24)
        assert_close(actual, expected)
