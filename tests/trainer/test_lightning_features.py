"""The page says what you can give a Trainer: each row is used by a test."""

from __future__ import annotations

import ast
import inspect
import re

import lightning.pytorch as pl
import pytest
from kit.once import once
from kit.paths import ROOT, TESTS
from lightning.pytorch import callbacks, loggers, profilers
from lightning.pytorch.accelerators import MPSAccelerator, XLAAccelerator
from lightning.pytorch.plugins import LayerSync
from torch import nn
from trainers import fit, quiet

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = pytest.mark.usefixtures("seed_variables")


@pytest.mark.parametrize("accelerator", [MPSAccelerator, XLAAccelerator])
def test_accelerators_other_than_cpus_and_cuda_gpus_are_refused(accelerator: type) -> None:
    """The strategy refuses TPUs and MPS."""
    strategy = CallbackStrategy(accelerator=object.__new__(accelerator))
    with pytest.raises(ConfigurationError, match=f"runs on CPUs and CUDA GPUs, not with {accelerator.__name__}"):
        strategy.setup_distributed()


class AppliesLayers(LayerSync):
    """A user's plugin."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.done.append("applied")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.done.append("reverted")
        return model


def test_a_plugin_for_the_layers_is_applied_in_a_fit_and_reverted_after_it() -> None:
    plugin = AppliesLayers()
    with quiet():
        fit("ddp_callbacks", plugins=[plugin])
    assert plugin.done == ["applied", "reverted"]


# --- the table of the page --------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "how_to" / "lightning.md"
HEADING = "## What you can give a Trainer"
BEFORE = "# --- the table of the page"
FOLDERS = ("apps", "launcher", "scenarios", "trainer")

BY_ANOTHER_NAME = {
    "Checkpoint": "ModelCheckpoint",
    "CheckpointIO": "TorchCheckpointIO",
    "ClusterEnvironment": "srun",
    "MLFlowLogger": "mlflow",
    "PassThroughProfiler": "Trainer",
    "Profiler": "SimpleProfiler",
    "num_nodes": "srun",
    "Tuner.lr_find": "lr_find",
    "Tuner.scale_batch_size": "scale_batch_size",
    "WandbLogger": "wandb",
    "return None": "skip_batch",
}
"""Rows that no script names: base classes, defaults, and words of this page."""

SHOWN_NOWHERE = {"CometLogger", "LitLogger", "XLAProfiler", "model_registry"}
"""They need accounts, services or devices that no machine of the tests has; the page says "not tested"."""


def rows() -> dict[str, str]:
    """What the page says of each name in the first column of its tables."""
    text = PAGE.read_text()
    section = text[text.index(HEADING) + len(HEADING) :].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {name.partition("=")[0]: row[-1] for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


@once
def code_of_tests() -> str:
    """Without comments and docstrings, and without what follows :data:`BEFORE` in this file."""
    texts = [path.read_text().partition(BEFORE)[0] for folder in FOLDERS for path in (TESTS / folder).glob("*.py")]
    return "\n".join(ast.unparse(ast.parse(text)) for text in texts)


def test_each_row_of_the_page_is_something_that_a_test_uses() -> None:
    """The page lists everything that a Trainer takes."""
    assert set(rows()) >= {*BY_ANOTHER_NAME, *SHOWN_NOWHERE}
    words = set(re.findall(r"\w+", code_of_tests()))
    assert {name for name in rows() if BY_ANOTHER_NAME.get(name, name) not in words} == SHOWN_NOWHERE
    assert [name for name in SHOWN_NOWHERE if "not tested" not in rows()[name]] == []


def test_a_message_that_a_row_quotes_is_one_that_a_test_expects() -> None:
    quoted = {name: re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", row)) for name, row in rows().items()}
    refused = {name: messages for name, messages in quoted.items() if messages}
    assert set(refused) == {"accelerator", "FSDPPrecision", "prepare_data"}
    expected = [message.rstrip(". ") for messages in refused.values() for message in messages]
    assert [message for message in expected if message not in code_of_tests()] == []


def test_the_page_has_a_row_for_each_argument_of_a_trainer_and_each_class_that_it_takes() -> None:
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    classes = {name for package in (callbacks, loggers, profilers) for name in package.__all__}
    assert not (arguments | classes) - set(rows())
