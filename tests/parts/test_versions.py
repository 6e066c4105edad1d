"""Versions: this one stands in one place, which others are excluded, and which are used with a warning."""

from __future__ import annotations

import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest

from ddp_callbacks import __version__, versions


def test_the_version_stands_in_one_place() -> None:
    """The version stands in one place."""
    assert version("ddp_callbacks") == __version__


def test_the_versions_of_lightning_that_were_compromised_are_excluded() -> None:
    """Lightning 2.6.2 and 2.6.3, which were compromised, are excluded."""
    for name in ("lightning", "pytorch-lightning"):
        assert ",!=2.6.2,!=2.6.3," in versions.SUPPORTED[name]


def test_messages_and_metadata_ask_for_the_same_versions() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, supported in versions.SUPPORTED.items():
        assert f'"{name}{supported.partition(",<")[0]}"' in text


def test_a_newer_torch_than_tested_is_used_and_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A warning names tested versions of torch."""
    monkeypatch.setitem(versions.SUPPORTED, "torch", ">=2.0,<2.2")
    versions._warn_of_an_untested.cache_clear()
    for _ in range(2):
        versions.require_names("torch", ["torch:Tensor._post_accumulate_grad_hooks"])
    (warning,) = recwarn
    text = str(warning.message)
    assert text.startswith(f"torch {version('torch')} is newer than what ddp_callbacks {__version__} was tested with")
    assert text.endswith('. If something fails: pip install "torch>=2.0,<2.2"')
    versions._warn_of_an_untested.cache_clear()


def test_versions_in_the_tested_range_pass_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    """Tested versions are used without a warning."""
    versions._warn_of_an_untested.cache_clear()
    for name in versions.SUPPORTED:
        versions.require_names(name, [])
    assert not list(recwarn)


def test_nothing_is_installed_that_changes_lightning_s_bar() -> None:
    """Nothing changes Lightning's bar."""
    needed = [line for line in requires("ddp_callbacks") or [] if "extra" not in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["torch"]  # type: ignore[index]
