"""The version stands in one place."""

from __future__ import annotations

from importlib.metadata import version

from ddp_callbacks import __version__


def test_the_version_stands_in_one_place() -> None:
    """The version stands in one place."""
    assert version("ddp_callbacks") == __version__
