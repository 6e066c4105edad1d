"""pytorch-forecasting: batches of nested tuples, series of different lengths, predictions that a callback collects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from programs import assert_close, failing, on_one, on_two

PROGRAM = "train_pytorch_forecasting.py"
ROOTS = "val_RMSE"  # it logs the root of each batch; on two processes that is the mean of the roots of its parts


def without_roots(history: list[Any]) -> list[Any]:
    return [
        {name: value for name, value in each.items() if name != ROOTS} if isinstance(each, dict) else each
        for each in history
    ]


def test_a_temporal_fusion_transformer_trains_and_predicts_on_two_processes_as_on_one(tmp_path: Path) -> None:
    """pytorch-forecasting's Temporal Fusion Transformer does, too."""
    expected, actual = on_one(PROGRAM, tmp_path), on_two(PROGRAM, "weighted", tmp_path)
    series = expected.pop("by series")
    expected["history"] = without_roots(expected["history"])
    rows = [each.pop("by series") for each in actual]
    for each in actual:
        each["history"] = without_roots(each["history"])
        assert_close(each, expected)
    # Its callback collects the rows of its process, with their index.
    assert sorted([*rows[0], *rows[1]]) == sorted(series)
    assert_close({**rows[0], **rows[1]}, series)


def test_a_temporal_fusion_transformer_without_a_weight_is_noticed_in_the_first_batch(tmp_path: Path) -> None:
    said = failing(PROGRAM, "verified", tmp_path)
    assert "the gradient of the first batch on 2 processes is not that of one process" in said, said
    assert "give weight=, or correct it" in said, said
