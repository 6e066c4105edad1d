"""Runs that are cut at random moments go on, on other numbers of ranks and hosts, with the numbers of one process.

``CUTS`` is how often each scenario is cut, ``SEED`` chooses where; by default the date does.
"""

from __future__ import annotations

import datetime
import os
import random

import pytest
from ways import Way, names_in, prove

CUTS = int(os.environ.get("CUTS", "5"))
SEED = os.environ.get("SEED", str(datetime.date.today()))
SIZES = (1, 2, 3, 4)

pytestmark = [pytest.mark.night, pytest.mark.timeout(3 * 3600), pytest.mark.usefixtures("seed_variables")]


def choose(table: str, number: int) -> Way:
    chosen = random.Random(f"{SEED} {table} {number}")
    before, after = chosen.choice(SIZES), chosen.choice(SIZES)
    layout = chosen.choice([(), (max(before, after) - 1, 1)]) if max(before, after) > 1 else ()
    every = chosen.choice([1, 2, 5, None])
    return Way(before, layout=layout, gloo=chosen.random() < 0.2, resumed_on=after, resume=(("every", every),))


@pytest.mark.parametrize("table", ["trials", "trainer_features", "loops"])
@pytest.mark.parametrize("number", range(CUTS))
def test_runs_that_are_cut_at_random_go_on_with_the_numbers_of_those_that_are_not(table: str, number: int) -> None:
    """Cuts at random moments change no number."""
    way, wrong = choose(table, number), []
    for name in names_in(table, way):
        try:
            prove(table, way, name, seed=f"{SEED} {number}")
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, f"{way}: {len(wrong)} results differ:\n" + "\n".join(wrong)
