"""Programs that nobody wrote, with a Trainer or a Trial: N processes have the numbers of one, or refuse by name."""

from __future__ import annotations

import os
from datetime import date

import pytest
from kit.once import once
from programs import Program, Verdicts, draw, has_failed, prove, script_of, shrink
from ways import Way

pytestmark = pytest.mark.shares_results()

OF_A_CHECK, OF_A_NIGHT = 10, 250
TONIGHT = int(os.environ.get("SEED", date.today().strftime("%Y%m%d")))
WAYS = [Way(2, resumed_on=3), Way(3, resumed_on=1), Way(2, layout=(1, 1), resumed_on=2)]


def programs(first: int, count: int) -> list[Program]:
    return [draw(host, seed) for seed in range(first, first + count) for host in ("trainer", "trial")]


@once
def verdicts(way: Way) -> Verdicts:
    return prove(programs(0, OF_A_CHECK), way)


@pytest.mark.wide
@pytest.mark.parametrize("program", programs(0, OF_A_CHECK), ids=lambda each: f"{each.host} {each.seed}")
def test_a_program_that_nobody_wrote_has_the_numbers_of_one_process(program: Program) -> None:
    """Programs of parts drawn at random give one process's numbers, cut or not."""
    verdict = verdicts(WAYS[0])[program]
    assert not has_failed(verdict), "\n".join([script_of(program, WAYS[0]), *verdict])


@pytest.mark.night
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.size} resumed on {way.resumed_on}")
def test_many_programs_that_nobody_wrote_have_the_numbers_of_one_process(way: Way) -> None:
    """A failing program is made smaller and printed."""
    found = prove(programs(TONIGHT, OF_A_NIGHT), way)
    smaller = shrink({program: verdict for program, verdict in found.items() if has_failed(verdict)}, way)
    assert not smaller, "\n\n".join(f"{script_of(each, way)}\n{verdict}" for each, verdict in smaller.items())
