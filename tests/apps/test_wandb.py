"""wandb, offline: one run, with the values of one process."""

from __future__ import annotations

from pathlib import Path

from programs import assert_close, on_one, on_two

PROGRAM = ["train_with_logger.py", "wandb"]


def test_wandb_gets_the_values_of_one_process_in_one_run(tmp_path: Path) -> None:
    """wandb gets one run with one process's values."""
    expected = on_one(PROGRAM, tmp_path)
    first, second = on_two(PROGRAM, "divided", tmp_path)
    assert {"loss_step", "loss_epoch", "norm", "val_loss"} < set(expected["summary"])
    assert_close(first, expected)
    assert set(second) == {"parameters"}
    assert len([*(tmp_path / "divided-wandb" / "wandb").glob("offline-run-*")]) == 1
