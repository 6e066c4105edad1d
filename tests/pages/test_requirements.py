"""Versions: what is used of other libraries beside their public names, and what messages say to install."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.fabric.strategies
import pytest
import torch.distributed as dist
from kit.paths import ROOT
from lightning.pytorch.trainer.connectors.logger_connector import result

from ddp_callbacks import _torch, join_process_group
from ddp_callbacks.lightning import _logged, _parts, _progress, _torchmetrics, classes, packages
from ddp_callbacks.lightning.fabric.fabric_strategy import CallbackFabricMixin
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin
from ddp_callbacks.lightning.strategy_processes import ProcessesMixin
from ddp_callbacks.torchbearer import _torchbearer
from ddp_callbacks.versions import how_to_install, how_to_install_this, require_names

OF_SOME_PROGRAMS = _parts.PRIVATE_OF_PREDICTIONS + _parts.PRIVATE_OF_REQUEUES + _parts.PRIVATE_OF_TUNER
OF_TRAINER = _parts.PRIVATE + OF_SOME_PROGRAMS + _logged.PRIVATE + _progress.PRIVATE
OF_FABRIC = _parts.PRIVATE_OF_BOTH + _parts.PRIVATE_OF_FABRIC + _progress.PRIVATE_OF_LOGGERS
CONTRACTS = {
    _torch: _torch.PRIVATE,
    _parts: OF_TRAINER + _parts.PRIVATE_OF_BOTH + _parts.PRIVATE_OF_FABRIC,
    _logged: OF_TRAINER,
    _progress: OF_TRAINER + _progress.PRIVATE_OF_LOGGERS,
    _torchmetrics: _torchmetrics.PRIVATE,
    _torchbearer: _torchbearer.PRIVATE,
}
# Of namedtuple, ctypes and torch's autograd nodes: public in spite of their names.
DOCUMENTED = {"_fields", "_fields_", "_replace", "_saved_reduction", "_saved_total_weight"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "Replaced"}  # their second argument is an attribute's name


def test_the_private_names_of_torch_and_lightning_are_there() -> None:
    require_names("torch", _torch.PRIVATE)
    require_names("torchmetrics", _torchmetrics.PRIVATE)
    require_names("torchbearer", _torchbearer.PRIVATE)
    for name in ("lightning", "pytorch_lightning"):
        packages.require(name, OF_TRAINER, OF_FABRIC)


@pytest.mark.parametrize("home", CONTRACTS, ids=lambda home: str(home.__name__.rpartition(".")[2]))
def test_a_contract_names_each_private_name_that_its_file_uses(home: ModuleType) -> None:
    used = {name for _, name in _private_names_of_others(inspect.getsource(home))}
    named = set(re.findall(r"\w+", " ".join(CONTRACTS[home])))
    assert used and used <= named, used - named


def test_a_contract_names_what_is_overridden_in_classes_of_lightning() -> None:
    of_trainer, of_fabric = OF_TRAINER, _parts.PRIVATE_OF_FABRIC
    for ours, base, contract in (
        (CallbackStrategyMixin, lightning.pytorch.strategies.DDPStrategy, of_trainer),
        (ProcessesMixin, lightning.pytorch.strategies.DDPStrategy, of_trainer),
        (ProcessesMixin, lightning.fabric.strategies.DDPStrategy, of_fabric),
        (CallbackFabricMixin, lightning.fabric.strategies.DDPStrategy, of_fabric),
        (JointResults, result._ResultCollection, of_trainer),
    ):
        named = set(re.findall(r"\w+", " ".join(contract)))
        overridden = {name for name in vars(ours) if _is_private(name) and hasattr(base, name)}
        assert overridden and overridden <= named, overridden - named


def test_private_names_of_others_stand_in_one_file_for_each_library() -> None:
    """One file holds and lists another library's private names."""
    homes = {Path(inspect.getfile(home)) for home in CONTRACTS}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "ddp_callbacks").rglob("*.py"))
        if path not in homes
        for line, name in _private_names_of_others(path.read_text())
    ]
    assert not found, "\n".join(found)


def _private_names_of_others(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of what is private in other objects than ``self``, and not in Python's own modules."""
    for node in ast.walk(ast.parse(source)):
        names: list[Any] = []
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            names = [node.attr]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME and node.args[1:]
        ):
            owner, name = node.args[:2]
            names = [name.value] if isinstance(name, ast.Constant) and not _is_own(owner) else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            from_module = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            paths = [[*from_module, *alias.name.split(".")] for alias in node.names]
            outside = (path for path in paths if path[0] not in {"ddp_callbacks", *sys.stdlib_module_names})
            names = [part for path in outside for part in path]
        yield from ((node.lineno, name) for name in names if _is_private(name))


def _is_own(owner: ast.expr) -> bool:
    name = owner.func if isinstance(owner, ast.Call) else owner
    own = {"super"} if isinstance(owner, ast.Call) else {"self", "cls", *sys.stdlib_module_names}
    return isinstance(name, ast.Name) and name.id in own


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def test_a_lightning_that_lacks_one_is_named_with_the_versions_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(result, "_ResultCollection")
    with pytest.raises(ImportError) as caught:
        classes.make("lightning", __name__)
    lacks = r"lightning 2\.\d+\.\d+ has no lightning\.pytorch\.\S+\.result\._ResultCollection\.__init__, which ddp"
    assert re.match(lacks, str(caught.value)), caught.value
    assert "It supports lightning" in str(caught.value) and 'pip install "lightning' in str(caught.value)


def test_a_lightning_that_lacks_what_only_predictions_use_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lightning.pytorch.loops._PredictionLoop, _parts.BATCH_INDICES)
    packages.require("lightning", _parts.PRIVATE + _logged.PRIVATE, _parts.PRIVATE_OF_BOTH)
    with pytest.raises(ImportError, match=r"has no lightning\.pytorch\.\S+\._get_batch_indices, which ddp_callbacks"):
        packages.require("lightning", _parts.PRIVATE_OF_PREDICTIONS)


def test_a_missing_attribute_or_parameter_is_named() -> None:
    with pytest.raises(
        ImportError, match=r"lightning 2\.\S+ has no _gone in lightning\.pytorch\.Trainer\.__init__, which"
    ):
        require_names("lightning", ["lightning.pytorch:Trainer.__init__ uses _signal_connector, _gone"])
    with pytest.raises(ImportError, match=r"has no lightning\.pytorch\.Trainer\.fit\(self, gone\), which"):
        require_names("lightning", ["lightning.pytorch:Trainer.fit(self, gone)"])


def test_a_torch_that_lacks_one_is_named_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names versions that lack one."""
    monkeypatch.setattr(_torch, "PRIVATE", ("torch.distributed:ProcessGroup._gone",))
    with pytest.raises(
        ImportError, match=r"torch 2\S+ has no torch\.distributed\.ProcessGroup\._gone, which ddp_callb"
    ):
        join_process_group(0, 2, "127.0.0.1")
    assert not dist.is_initialized()


def test_no_message_or_page_tells_to_install_a_package_that_no_index_has() -> None:
    """Messages name only packages that you can install."""
    texts = [*ROOT.glob("*.md"), *(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md"))]
    for path in [*(ROOT / "ddp_callbacks").rglob("*.py"), *texts]:
        assert not re.search(r"pip install [^{]?ddp_callbacks", path.read_text()), path
    assert how_to_install_this("ssh n1 python") == (
        f"ssh n1 python -m pip install {ROOT} (the folder of its repository; no package index has it)"
    )
    assert how_to_install("no-such-package") == 'pip install "no-such-package"'
    assert how_to_install("mpi4py").startswith('pip install "mpi4py')
