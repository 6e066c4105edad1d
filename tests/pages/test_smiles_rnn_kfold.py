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
COUNTING = """
import runpy, sys
import torch.distributed as dist

join = dist.init_process_group

def counted(*args, **options):
    join(*args, **options)
    print("joined a process group\\n", end="", flush=True)  # in one piece: the processes print side by side

dist.init_process_group = counted
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def molecules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("molecules")


def rows() -> list[dict[str, str]]:
    with (EXAMPLES / "data" / "smiles.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


# --- the molecules ----------------------------------------------------------------------------------------------------


def test_each_structure_is_complete_and_has_the_heavy_atoms_of_its_formula(molecules: ModuleType) -> None:
    """The example's molecules are complete and rightly labelled."""
    for row in rows():
        atoms, _ = molecules.parse(row["smiles"])
        counted = Counter(re.sub(r"^\[?([A-Za-z][a-z]?).*", r"\1", atom).capitalize() for atom in atoms)
        formula = {symbol: int(count or 1) for symbol, count in re.findall(r"([A-Z][a-z]?)(\d*)", row["formula"])}
        formula.pop("H", None)
        assert counted == formula, row


def test_no_molecule_is_there_twice() -> None:
    for column in ("name", "smiles"):
        assert [value for value, count in Counter(row[column] for row in rows()).items() if count > 1] == []


@pytest.mark.parametrize(
    "smiles",
    ["", "=", "C=", "C1CC", "1CC", "C(C", "CC)", "C$", "C[N", "C.C", "C[[N]]"],
    ids=lambda smiles: smiles or "-",
)
def test_what_is_no_molecule_is_refused(molecules: ModuleType, smiles: str) -> None:
    """It refuses strings that are no molecules."""
    with pytest.raises(ValueError, match="the SMILES string"):
        molecules.parse(smiles)


def test_bonds_of_branches_and_rings(molecules: ModuleType) -> None:
    assert molecules.parse("CC(=O)N") == (["C", "C", "O", "N"], [(0, 1, ""), (1, 2, "="), (1, 3, "")])
    assert molecules.parse("C1CC=1Cl") == (["C", "C", "C", "Cl"], [(0, 1, ""), (1, 2, ""), (0, 2, "="), (2, 3, "")])
    assert molecules.parse("n%12[nH]c%12") == (["n", "[nH]", "c"], [(0, 1, ""), (1, 2, ""), (0, 2, "")])


AMINES = (
    "methylamine, trimethylamine, piperidine, quinuclidine, nicotine, morphine, atropine, dopamine, lysine, quinine"
)
AMINES_BESIDE_OTHER_NITROGENS = "lidocaine, procaine, ampicillin, chloroquine, sildenafil, serotonin, histamine"
NO_AMINES = {
    "amide": "paracetamol, urea, dimethylformamide, benzylpenicillin, saccharin, carbaryl, phenobarbital",
    "bound to an aromatic ring": "aniline, N,N-dimethylaniline, benzocaine, sulfanilamide, trimethoprim",
    "in an aromatic ring": "pyridine, imidazole, indole, caffeine, melatonin",
    "bound to an unsaturated carbon": "guanidine, metformin, DBU, nifedipine, acetonitrile, diazepam",
    "bound to another atom": "methylhydrazine, isoniazid, acetone oxime, N-nitrosodimethylamine, cyclophosphamide",
    "charged": "choline, acetylcholine, nitromethane, betaine",
    "none": "ethanol, glucose, aspirin, cholesterol",
}


@pytest.mark.parametrize(
    ("names", "expected"),
    [(AMINES, True), (AMINES_BESIDE_OTHER_NITROGENS, True), *((names, False) for names in NO_AMINES.values())],
    ids=["amines", "amines beside other nitrogens", *NO_AMINES],
)
def test_label_of_known_molecules(molecules: ModuleType, names: str, expected: bool) -> None:
    smiles = {row["name"]: row["smiles"] for row in rows()}
    found = {name: molecules.has_aliphatic_amine(smiles[name]) for name in names.split(", ")}
    assert found == dict.fromkeys(found, expected)


# --- the training -----------------------------------------------------------------------------------------------------


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
    """Its Trainers share one group and equal plain ones."""
    (tmp_path / "count.py").write_text(COUNTING)
    plain = write_plain_script(tmp_path / "plain")

    one = run(["python", plain, *SMALL, "--runs", "one"], tmp_path, cold=True)
    two = run([*TWO_PROCESSES, "count.py", EXAMPLES / "smiles_rnn_kfold.py", *SMALL, "--runs", "two"], tmp_path)

    lines = [line for line in two.splitlines() if not line.startswith("ddp_callbacks: summing CPU tensors")]
    assert lines[:2] == ["joined a process group"] * 2, f"once on each process, for all folds:\n{two}"
    assert re.fullmatch(OUTPUT, "\n".join(lines[2:])), two
    assert one.splitlines() == [*lines[2:-1], lines[-1].replace("2 processes", "1 process")]
    for fold in (1, 2):
        assert curves(tmp_path / "two", fold) == {
            name: pytest.approx(values, abs=1e-4) for name, values in curves(tmp_path / "one", fold).items()
        }
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
