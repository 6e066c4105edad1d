"""Versions: this one stands in one place, and which others are excluded."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from ddp_callbacks import __version__


def test_the_version_stands_in_one_place() -> None:
    """The version stands in one place."""
    assert version("ddp_callbacks") == __version__


def test_the_versions_of_lightning_that_were_compromised_are_excluded() -> None:
    """Lightning 2.6.2 and 2.6.3, which were compromised, are excluded."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in ("lightning", "pytorch-lightning"):
        assert f'"{name}>=2.6,!=2.6.2,!=2.6.3,<' in text
