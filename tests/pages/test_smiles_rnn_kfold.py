"""The SMILES example as a user starts it, and its molecules."""

from __future__ import annotations

import csv
import importlib
import re
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from kit.commands import TWO_PROCESSES, run
from kit.paths import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = ROOT / "examples"
OUTPUT = r"""fold 1: ROC AUC [01]\.\d{4} on dev in the best epoch, [01]\.\d{4} held out
fold 2: ROC AUC [01]\.\d{4} on dev in the best epoch, [01]\.\d{4} held out
2 processes: held-out ROC AUC 0\.\d{4}, standard deviation 0\.\d{4} over 2 folds"""
# 40 molecules in 2 folds: 20 are held out, 4 dev, 16 to train with in batches of 15 and 1, which only one process has.
SMALL = ["--molecules", 40, "--folds", 2, "--epochs", 2, "--batch-size", 15, "--dropout", 0]
AMINES = "methylamine, trimethylamine, quinuclidine, nicotine, morphine, lysine, lidocaine, chloroquine, serotonin"
# Amides, then nitrogens beside and in aromatic rings, beside unsaturated carbons and other atoms, charged, and none.
NO_AMINES = """paracetamol, urea, phenobarbital, aniline, benzocaine, pyridine, caffeine, melatonin, guanidine, DBU,
acetonitrile, methylhydrazine, isoniazid, N-nitrosodimethylamine, choline, nitromethane, betaine, ethanol, glucose"""


@pytest.fixture
def molecules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("molecules")


def test_each_molecule_is_complete_different_and_labelled(molecules: ModuleType) -> None:
    """The example's molecules are complete and rightly labelled."""
    with (EXAMPLES / "data" / "smiles.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        atoms, _ = molecules.parse(row["smiles"])
        counted = Counter(re.sub(r"^\[?([A-Za-z][a-z]?).*", r"\1", atom).capitalize() for atom in atoms)
        formula = {symbol: int(count or 1) for symbol, count in re.findall(r"([A-Z][a-z]?)(\d*)", row["formula"])}
        formula.pop("H", None)
        assert counted == formula, row
    smiles = {row["name"]: row["smiles"] for row in rows}
    assert len(smiles) == len(set(smiles.values())) == len(rows)
    for names, expected in ((AMINES, True), (NO_AMINES, False)):
        found = {name: molecules.has_aliphatic_amine(smiles[name]) for name in re.split(r",\s+", names)}
        assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize("smiles", ["", "=", "C=", "C1CC", "1CC", "C(C", "CC)", "C$", "C[N", "C.C", "C[[N]]"])
def test_what_is_no_molecule_is_refused(molecules: ModuleType, smiles: str) -> None:
    """It refuses strings that are no molecules."""
    with pytest.raises(ValueError, match="the SMILES string"):
        molecules.parse(smiles)


def write_plain_script(folder: Path) -> Path:
    """The example without its two added lines, and what it needs, in ``folder``."""
    shutil.copytree(EXAMPLES / "data", folder / "data")
    shutil.copy(EXAMPLES / "molecules.py", folder)
    script = (EXAMPLES / "smiles_rnn_kfold.py").read_text()
    plain, removed = re.subn(r'.*(?:import ddp_callbacks\.lightning|strategy="ddp_callbacks").*\n', "", script)
    assert removed == 2 and "import ddp_callbacks" not in plain
    path = folder / "plain.py"
    path.write_text(plain)
    return path


@pytest.mark.cold
def test_two_processes_equal_a_plain_trainer(tmp_path: Path) -> None:
    """Its Trainers equal plain ones, fold by fold."""
    plain = write_plain_script(tmp_path / "plain")
    one = run(["python", plain, *SMALL, "--runs", "one"], tmp_path, cold=True)
    two = run([*TWO_PROCESSES, EXAMPLES / "smiles_rnn_kfold.py", *SMALL, "--runs", "two"], tmp_path)
    lines = [line for line in two.splitlines() if not line.startswith("ddp_callbacks: summing CPU tensors")]
    assert re.fullmatch(OUTPUT, "\n".join(lines)), two
    assert one.splitlines() == [*lines[:-1], lines[-1].replace("2 processes", "1 process")]
    for fold in (1, 2):
        expected = curves(tmp_path / "one", fold)
        assert curves(tmp_path / "two", fold) == {name: pytest.approx(expected[name], abs=1e-4) for name in expected}
    assert written(tmp_path / "two") == written(tmp_path / "one"), "rank 1 must write nothing"


def curves(folder: Path, fold: int) -> dict[str, list[float]]:
    """What TensorBoard would show."""
    events = EventAccumulator(str(folder / f"fold_{fold}" / "version_0")).Reload()
    names = ("train_loss", "dev_roc_auc", "heldout_roc_auc")
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def written(folder: Path) -> list[str]:
    """The files, without the time and the process in the names of those for TensorBoard."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents.*", "tfevents", file) for file in files)
