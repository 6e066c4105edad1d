"""Compare the results of N processes with those of one."""

from __future__ import annotations

from typing import Any

import torch


def assert_equal(actual: Any, expected: Any, relative: float, where: str = "") -> None:
    """Compare nested results number by number."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_equal(actual[key], expected[key], relative, f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, relative, f"{where} [{index}]")
    elif expected is None or isinstance(expected, str):
        assert actual == expected, where
    else:
        torch.testing.assert_close(
            torch.as_tensor(actual, dtype=torch.float64),
            torch.as_tensor(expected, dtype=torch.float64),
            rtol=relative,
            atol=0.0,
            msg=lambda text: f"{where}: {text}",
        )
