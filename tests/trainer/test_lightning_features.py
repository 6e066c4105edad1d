"""What you can give a Trainer: the page has a row for each, and what cannot be is refused before anything starts."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fabric_loops import fabric
from kit.once import once
from kit.paths import ROOT, TESTS
from lightning.fabric.plugins.precision import FSDPPrecision as FSDPPrecisionOfFabric
from lightning.pytorch import callbacks, loggers, profilers
from lightning.pytorch.accelerators import MPSAccelerator, XLAAccelerator
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from trainers import Net, fit, loader, quiet, trainer

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackFabricStrategy, CallbackStrategy, DDPCallback

pytestmark = pytest.mark.usefixtures("seed_variables")

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": "local"}, 'batch_size must be "global"'),
    ({"weight": 3}, 'weight must be a function of a batch, or "cross_entropy", got 3'),
    ({"reduction": "none"}, 'reduction must be "mean" or "sum", got \'none\''),
    ({"reduction": "sum", "weight": len}, "Use one of the two"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
    ({"compress": "bf17"}, 'compress must be "bf16", "fp16" or None'),
    ({"sync": "often"}, 'sync must be "every_step", LocalSGD'),
    ({"sync": DiLoCo(50), "comm_hook": print}, "a comm_hook sums gradients"),
    ({"verify": True}, 'verify must be "warn", "first_batch"'),
    ({"verify": "first_batch", "sync": LocalSGD(8)}, "compares synchronized gradients, but sync="),
    ({"on_divergence": "warn"}, 'on_divergence must be "raise" or "repair"'),
    ({"skip_batch": "none"}, 'skip_batch must be None, "no_loss" (training_step returned None)'),
    ({"skip_batch": "any", "sync": LocalSGD(8)}, "they do not meet in each step"),
]


OF_FABRIC: list[tuple[dict[str, Any], str]] = [
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [*((CallbackStrategy, *row) for row in OPTIONS), *((CallbackFabricStrategy, *row) for row in OF_FABRIC)],
)
def test_an_option_of_a_strategy_that_cannot_be_is_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    """Strategies of Trainers and Fabric refuse impossible options when you make them."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        kind(**options)


@pytest.mark.parametrize("kind", [CallbackStrategy, CallbackFabricStrategy])
def test_what_only_ddp_takes_is_refused_by_python(kind: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'find_unused_parameters'"):
        kind(find_unused_parameters=True)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), 0.1)


skipping = functools.partial(CallbackStrategy, skip_batch="any")
FITS: dict[str, tuple[Callable[[], Any], str]] = {
    "a precision of FSDP": (
        lambda: fit("ddp_callbacks", plugins=[FSDPPrecision("32-true")]),
        "does not work with FSDPPrecision: FSDP divides the parameters",
    ),
    "a precision of FSDP in Fabric": (
        lambda: fabric("ddp_callbacks", plugins=FSDPPrecisionOfFabric("32-true")),
        'strategy="ddp_callbacks" does not work with FSDPPrecision: FSDP divides the',
    ),
    "skip_batch with manual optimization": (
        lambda: fit(skipping(), Manual()),
        'skip_batch="any" needs automatic optimization: Manual optimizes manually',
    ),
    "skip_batch with LBFGS": (
        lambda: fit(skipping(), Net(optimizer=lbfgs)),
        'skip_batch="any" does not work with LBFGS',
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_trainer_is_refused_by_the_name_of_what_does_not_fit(name: str) -> None:
    """A Trainer refuses FSDP's precision plugin by name."""
    run, says = FITS[name]
    with quiet(), pytest.raises(ConfigurationError, match=re.escape(says)):
        run()


def too_late() -> Any:
    made = trainer("auto")
    made.callbacks.append(DDPCallback())
    made.fit(Net(), loader())


def of_the_other_package() -> Any:
    import pytorch_lightning

    made = pytorch_lightning.Trainer(accelerator="cpu", logger=False, callbacks=[DDPCallback()])
    made.callbacks[0].setup(made, None, "fit")


def of_the_other_package_that_is_imported() -> Any:
    importlib.import_module("pytorch_lightning")  # before: otherwise its package here is refused
    importlib.import_module("ddp_callbacks.pytorch_lightning")
    of_the_other_package()


OTHER_PACKAGE = (
    "this Trainer is one of pytorch_lightning, and this DDPCallback is for lightning: import it from "
    "ddp_callbacks.pytorch_lightning."
)
CALLBACKS: dict[str, tuple[Callable[[], Any], str]] = {
    "another strategy": (
        lambda: trainer("ddp", callbacks=DDPCallback()),
        "this Trainer has strategy='ddp', and a DDPCallback, whose strategy is 'ddp_callbacks'. Leave out strategy=, "
        "and give the callback the options; or leave out the callback.",
    ),
    "a strategy of ours with options of its own": (
        lambda: trainer(CallbackStrategy("per_process"), callbacks=[DDPCallback()]),
        "this Trainer has strategy=CallbackStrategy, and a DDPCallback",
    ),
    "an impossible option": (lambda: DDPCallback(reduction="median"), "reduction"),
    "too late": (
        too_late,
        "DDPCallback chooses the strategy when a Trainer is made; this one was made without it, and has "
        "SingleDeviceStrategy: Trainer(callbacks=[DDPCallback()]).",
    ),
    "the other package": (of_the_other_package, OTHER_PACKAGE),
    "the other package, which chooses strategies, too": (of_the_other_package_that_is_imported, OTHER_PACKAGE),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_cannot_choose_the_strategy_is_refused(name: str) -> None:
    """Lightning's `DDPCallback` refuses what it cannot change, by name."""
    run, says = CALLBACKS[name]
    with quiet(), pytest.raises(ConfigurationError, match=re.escape(says)):
        run()


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

PAGE = ROOT / "docs" / "reference" / "trainer.md"
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
    "ProgressBar": "TQDMProgressBar",
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


def test_the_page_has_a_row_for_each_argument_of_a_trainer_and_each_class_that_it_takes() -> None:
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    classes = {name for package in (callbacks, loggers, profilers) for name in package.__all__}
    assert not (arguments | classes) - {*rows(), "NeptuneLogger"}  # which newer versions no longer have
