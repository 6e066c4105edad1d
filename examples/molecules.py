"""The molecules of the example ``smiles_rnn_kfold.py``: SMILES strings, and a label that is computed from each.

``data/smiles.csv`` lists common substances by name, formula and structure: drugs, vitamins, hormones, amino acids,
natural products, solvents. The structures are facts of chemistry, written without stereochemistry, in RDKit's canonical
form.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

FILE = Path(__file__).parent / "data" / "smiles.csv"

_TOKEN = re.compile(r"\[[^\[\]]+\]|Br|Cl|[BCNOPSFI]|[bcnops]|%\d\d|[-=#:()\d]")
_BONDS = ("-", "=", "#", ":")

Bond = tuple[int, int, str]  # two atoms, by number, and what is written between them


def read_molecules(count: int | None = None) -> tuple[list[str], list[int]]:
    """The SMILES strings, and their labels: 1 with an aliphatic amine, else 0. With ``count`` so many, of all kinds."""
    with FILE.open(newline="") as lines:
        smiles = [row["smiles"] for row in csv.DictReader(lines)]
    if count is not None:
        smiles = smiles[:: max(1, len(smiles) // count)][:count]
    return smiles, [int(has_aliphatic_amine(molecule)) for molecule in smiles]


def has_aliphatic_amine(smiles: str) -> bool:
    """Whether a nitrogen is bound to nothing but hydrogens and saturated carbons.

    Such a nitrogen is basic: in water it takes up a proton. The nitrogens of amides, anilines, pyridines and nitriles
    do not count, nor those with a charge.
    """
    atoms, bonds = parse(smiles)
    neighbours: list[list[int]] = [[] for _ in atoms]
    saturated = [True] * len(atoms)
    for one, other, order in bonds:
        neighbours[one].append(other)
        neighbours[other].append(one)
        if order not in ("", "-"):
            saturated[one] = saturated[other] = False
    return any(
        atom == "N" and saturated[number] and all(atoms[near] == "C" and saturated[near] for near in neighbours[number])
        for number, atom in enumerate(atoms)
    )


def parse(smiles: str) -> tuple[list[str], list[Bond]]:
    """The atoms of a molecule as they are written (lower case where aromatic), and the bonds between them.

    Raises:
        ValueError: An unknown symbol, an open parenthesis or an open ring.
    """
    atoms: list[str] = []
    bonds: list[Bond] = []
    branches: list[int] = []  # the atoms to go back to
    rings: dict[str, tuple[int, str]] = {}  # the atoms that wait for the other end of a ring
    last, order = -1, ""
    for token in tokenize(smiles):
        if token in _BONDS:
            order = token
            continue
        if token == "(":
            branches.append(last)
        elif token == ")" and branches:
            last = branches.pop()
        elif token in rings:
            other, other_order = rings.pop(token)
            bonds.append((other, last, order or other_order))
        elif token.strip("%").isdigit() and atoms:
            rings[token] = last, order
        elif token[0].isalpha() or token[0] == "[":
            atoms.append(token)
            if last >= 0:
                bonds.append((last, len(atoms) - 1, order))
            last = len(atoms) - 1
        else:
            raise ValueError(f"{token} out of place in the SMILES string {smiles}")
        order = ""
    if branches or rings or order or not atoms:
        raise ValueError(f"the SMILES string {smiles!r} is not complete")
    return atoms, bonds


def tokenize(smiles: str) -> list[str]:
    """The symbols of a SMILES string: those of ``CC(=O)Cl`` are ``C C ( = O ) Cl``."""
    tokens = _TOKEN.findall(smiles)
    if "".join(tokens) != smiles:
        raise ValueError(f"unknown symbols in the SMILES string {smiles}")
    return tokens
