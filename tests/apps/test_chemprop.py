"""chemprop: graphs of different sizes, targets that are not all known, a loss that is a torchmetric."""

from __future__ import annotations

from pathlib import Path

from programs import assert_close, failing, on_one, on_two

PROGRAM = "train_chemprop.py"


def test_chemprop_with_missing_targets_trains_on_two_processes_as_on_one(tmp_path: Path) -> None:
    """Unchanged chemprop trains and predicts as on one process."""
    expected = on_one(PROGRAM, tmp_path)
    for actual in on_two(PROGRAM, "weighted", tmp_path):
        assert_close(actual, expected)


def test_chemprop_without_a_weight_is_noticed_in_the_first_batch(tmp_path: Path) -> None:
    """`verify="first_batch"` says where it needs `weight=`."""
    said = failing(PROGRAM, "verified", tmp_path)
    assert "the gradient of the first batch on 2 processes is not that of one process" in said, said
    assert "give weight=, or correct it" in said, said
