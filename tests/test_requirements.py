"""Versions: what is used of torch and Lightning beside their public names, and what messages say to install."""

from __future__ import annotations

import re
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector import result

from ddp_callbacks import _torch, join_process_group
from ddp_callbacks.lightning import package
from ddp_callbacks.versions import how_to_install, how_to_install_this, require_names

ROOT = Path(__file__).parents[1]


def test_the_private_names_of_torch_and_lightning_are_there() -> None:
    require_names("torch", _torch.PRIVATE)
    require_names("torchmetrics", package.OF_TORCHMETRICS)
    for home in (lightning.pytorch, pytorch_lightning):
        require_names("lightning", [f"{home.__name__}.{name}" for name in package.PRIVATE])


def test_a_lightning_that_lacks_one_is_named_with_the_versions_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(result, "_ResultCollection")
    with pytest.raises(ImportError) as caught:
        package.make("lightning", __name__)
    lacks = r"lightning 2\.\d+\.\d+ has no lightning\.pytorch\.\S+\.result\._ResultCollection\.log, which ddp_callb"
    assert re.match(lacks, str(caught.value)), caught.value
    assert "It supports lightning" in str(caught.value) and 'pip install "lightning' in str(caught.value)


def test_a_torch_that_lacks_one_is_named_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "PRIVATE", ("torch.distributed:ProcessGroup._gone",))
    with pytest.raises(
        ImportError, match=r"torch 2\S+ has no torch\.distributed\.ProcessGroup\._gone, which ddp_callb"
    ):
        join_process_group(0, 2, "127.0.0.1")
    assert not dist.is_initialized()


def test_only_versions_that_the_tests_have_seen_are_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.13,<2.14"' in text
    assert text.count("lightning>=2.6,!=2.6.2,!=2.6.3,<2.7") == 2


def test_no_message_or_page_tells_to_install_a_package_that_no_index_has() -> None:
    texts = [*ROOT.glob("*.md"), *(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md"))]
    for path in [*(ROOT / "ddp_callbacks").rglob("*.py"), *texts]:
        assert not re.search(r"pip install [^{]?ddp_callbacks", path.read_text()), path
    assert how_to_install_this("ssh n1 python") == (
        f"ssh n1 python -m pip install {ROOT} (the folder of its repository; no package index has it)"
    )
    assert how_to_install("no-such-package") == 'pip install "no-such-package"'
    assert how_to_install("mpi4py").startswith('pip install "mpi4py')
