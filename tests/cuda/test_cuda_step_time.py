"""The benchmark of step times runs on a GPU. Its figures are measured by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_step_time import assert_all_are_compared, run_step_time

pytest.importorskip("matplotlib", reason="the benchmark draws its ratios by matplotlib")


def test_on_a_gpu_the_step_of_each_model_is_compared_with_ddp_by_gloo(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """The benchmark compares steps on a GPU with DDP's."""
    output = run_step_time(2, tmp_path, "--device", "cuda", "--backend", "gloo")
    record_property("ratios", output)
    assert_all_are_compared(output)


def test_on_a_gpu_the_step_of_one_process_is_compared_with_ddp(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    output = run_step_time(1, tmp_path, "--device", "cuda")
    record_property("ratios", output)
    assert_all_are_compared(output)
