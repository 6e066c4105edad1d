"""Unchanged applications of others train on two processes as on one; those that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import DEADLINE, run, start

pytestmark = pytest.mark.apps

HERE = Path(__file__).parent
# Each is a program of this folder that leaves in a file what it has computed.
CHEMPROP, DARTS, FORECASTING, NEURALFORECAST = ("chemprop", "darts", "pytorch_forecasting", "neuralforecast")
SCVI = "scvi"
RUNS_OF = {"wandb": "wandb/offline-run-*", "mlflow": "*/*/metrics"}  # files of each run of an experiment tracker
ROOTS = "val_RMSE"  # pytorch-forecasting logs the root of each batch; on two processes the mean of its parts' roots


def command(app: str) -> list[Any]:
    if importlib.util.find_spec(app) is None:
        pytest.skip(f"needs {app}: make check-apps")
    return [HERE / "train_with_logger.py", app] if app in RUNS_OF else [HERE / f"train_{app}.py"]


def on_one(app: str, folder: Path) -> dict[str, Any]:
    """What the program computes on one process, without the library."""
    run(["python", *command(app), "alone", folder / "one"], folder, cold=True)
    result: dict[str, Any] = torch.load(folder / "one.0", weights_only=True)
    return result


def on_two(app: str, kind: str, folder: Path) -> list[dict[str, Any]]:
    """What it computes on each of two processes."""
    run(["ddprun", "--nproc-per-node", 2, *command(app), kind, folder / kind], folder, cold=True)
    return [torch.load(folder / f"{kind}.{rank}", weights_only=True) for rank in range(2)]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-10, where: str = "") -> None:
    """Compare nested results number by number, to ``tolerance`` of each or of 1.

    Of 1: some gradients are zero but for rounding (a key's bias does not change a softmax), and Adam divides the
    rounding by itself.
    """
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected), where
        for key in expected:
            assert_close(actual[key], expected[key], tolerance, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_close(*pair, tolerance, f"{where} [{index}]")
    else:
        values = [torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected)]
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")


def test_chemprop_with_missing_targets(tmp_path: Path) -> None:
    """Unchanged chemprop trains and predicts as on one process."""
    expected = on_one(CHEMPROP, tmp_path)
    for actual in on_two(CHEMPROP, "weighted", tmp_path):
        assert_close(actual, expected)


def test_neuralforecast_which_makes_its_trainers_itself(tmp_path: Path) -> None:
    """So do neuralforecast, darts and scvi-tools."""
    expected, named = on_one(NEURALFORECAST, tmp_path), "its own validation losses"
    losses = expected.pop(named)
    for actual in on_two(NEURALFORECAST, "divided", tmp_path):
        # It adds these up in float32: 2^-24 for each of three roundings on either side.
        assert_close(actual.pop(named), losses, 6 * 2**-24)
        assert_close(actual, expected)


def test_darts(tmp_path: Path) -> None:
    expected = on_one(DARTS, tmp_path)
    for actual in on_two(DARTS, "divided", tmp_path):
        assert_close(actual, expected)


def test_scvi_which_divides_its_data_where_it_finds_ddp_in_the_name_of_the_strategy(tmp_path: Path) -> None:
    expected = on_one(SCVI, tmp_path)
    first, second = on_two(SCVI, "divided", tmp_path)
    assert {"elbo_train", "elbo_validation"} <= set(expected["history"])
    assert_close(first, expected)
    assert_close(second, {**expected, "history": {}})  # rank 0 alone has its logger's


def test_a_temporal_fusion_transformer(tmp_path: Path) -> None:
    """So does pytorch-forecasting's Transformer."""
    results = [on_one(FORECASTING, tmp_path), *on_two(FORECASTING, "weighted", tmp_path)]
    for values in (values for each in results for values in each["history"] if isinstance(values, dict)):
        values.pop(ROOTS, None)
    series, *rows = [each.pop("by series") for each in results]
    for each in results[1:]:
        assert_close(each, results[0])
    # Its callback collects the rows of its process, with their index.
    assert sorted([*rows[0], *rows[1]]) == sorted(series)
    assert_close({**rows[0], **rows[1]}, series)


@pytest.mark.parametrize("app", [CHEMPROP, FORECASTING])
def test_a_missing_weight_is_noticed_in_the_first_batch(tmp_path: Path, app: str) -> None:
    """`verify="first_batch"` says where it needs `weight=`."""
    process = start(["ddprun", "--nproc-per-node", 2, *command(app), "verified", tmp_path / "x"], tmp_path, cold=True)
    try:
        said, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # ddprun ends its processes
        said, _ = process.communicate(timeout=60)
    assert process.returncode != 0, said
    assert "the gradient of the first batch on 2 processes is not that of one process" in said, said
    assert "give weight=, in a Trainer weight=" in said, said


@pytest.mark.parametrize("app", RUNS_OF)
def test_an_experiment_tracker_gets_the_values_of_one_process_in_one_run(tmp_path: Path, app: str) -> None:
    """wandb and MLflow get one run with one process's values."""
    expected = on_one(app, tmp_path)
    first, second = on_two(app, "divided", tmp_path)
    assert {"loss_step", "loss_epoch", "norm", "val_loss"} <= set(expected["values"])
    assert_close(first, expected)
    assert set(second) == {"parameters"}
    assert len([*(tmp_path / f"divided-{app}").glob(RUNS_OF[app])]) == 1
