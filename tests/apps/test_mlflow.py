"""MLflow in a folder: one run, with the values of one process."""

from __future__ import annotations

from pathlib import Path

from programs import assert_close, on_one, on_two

PROGRAM = ["train_with_logger.py", "mlflow"]


def test_mlflow_gets_the_values_of_one_process_in_one_run(tmp_path: Path) -> None:
    """MLflow gets one run with one process's values."""
    expected = on_one(PROGRAM, tmp_path)
    first, second = on_two(PROGRAM, "divided", tmp_path)
    assert [len(values) for name, values in expected["history"].items() if name == "loss_step"] == [10]
    assert_close(first, expected)
    assert set(second) == {"parameters"}
    assert len([*(tmp_path / "divided-mlflow").glob("*/*/metrics")]) == 1
