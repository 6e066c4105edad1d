"""A misfortune of one rank ends all of them, soon, with an error that names the rank, the host and the cause."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.once import once
from kit.ranks import HOSTNAME, Nursery, Rank, note, noting_errors
from misfortunes import (
    CAUGHT,
    PATIENCE,
    Misfortune,
    TheCause,
    my_rank,
    run_loop,
    run_trial,
    suffer,
    train_plainly,
    weights,
)
from side_by_side import World, run_side_by_side

from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.mailbox import Mailbox
from ddp_callbacks.errors import MismatchError, PeerError

pytestmark = pytest.mark.shares_results()


@dataclass(frozen=True)
class Case:
    """What happens to which rank, in which place of which program; to all if ``unlucky`` is -1."""

    program: str
    kind: str
    place: str = "step"
    unlucky: int = 1
    size: int = 2

    def __str__(self) -> str:
        return f"{self.program}, rank {self.unlucky} of {self.size} {self.kind}, {self.place}"

    def world(self) -> World:
        ranks = list(range(self.size)) if self.unlucky < 0 else [self.unlucky]
        layout = [self.size - 1, 1] if self.size > 2 else []
        stopped = self.unlucky if self.kind == "goes silent" else None
        return World(suffer, (self.program, self.kind, self.place, ranks, layout), self.size, stopped)


ON_TWO = [
    Case("loop", "raises"),
    Case("loop", "raises", "checkpoint", 0),
    Case("loop", "is killed", "data"),
    Case("loop", "is interrupted", unlucky=0),
    Case("loop", "votes alone"),
    Case("loop", "leaves", "", 0),
    Case("Trial", "raises", "callback", 0),
    Case("Trial", "raises", "worker"),
    Case("Trial", "raises", "validation"),
    Case("Trial", "raises", "before the run"),
    Case("Trial", "raises", unlucky=-1),
    Case("Trial", "is killed", "callback", 0),
    Case("Trial", "goes silent"),
    Case("Trial", "exits", unlucky=0),
    Case("Trial", "leaves", ""),
    Case("Trial", "skips the evaluation", "evaluation", 0),
    Case("Trial with local steps", "raises", unlucky=0),
    Case("Trial with local steps", "is killed"),
    Case("Trainer", "raises", "hook"),
    Case("Trainer", "raises", "between two runs", 0),
    Case("Trainer", "runs out of memory", unlucky=0),
    Case("Trainer", "is killed", "checkpoint"),
    Case("Trainer", "exits", "validation"),
    Case("Trainer", "votes alone", unlucky=0),
]
ON_THREE = [
    Case("loop", "raises", "data", 2, 3),
    Case("loop", "is killed", "step", 2, 3),
    Case("Trial", "goes silent", "callback", 1, 3),
    Case("Trial", "raises", "step", 0, 3),
    Case("Trainer", "is killed", "step", 0, 3),
    Case("Trainer", "raises", "validation", 2, 3),
    Case("Trainer", "votes alone", "step", 2, 3),
]
PLACES = {
    "loop": ("step", "data", "worker", "checkpoint"),
    "Trial": ("step", "callback", "data", "worker", "validation"),
    "Trainer": ("step", "hook", "data", "worker", "validation", "checkpoint"),
}
EACH = [
    Case(program, kind, place, unlucky, size)
    for program, places in PLACES.items()
    for place in places
    for kind in ("raises", "is killed", "goes silent", "exits", "votes alone")
    for size, unlucky in ((2, 0), (2, 1), (3, 1), (3, 2))
    if place != "worker" or kind == "raises"
    if kind != "goes silent" or unlucky > 0  # with rank 0 the store goes silent
]
AT_ONCE = 12  # worlds


@dataclass(frozen=True)
class Expected:
    """How the unlucky rank ends, and what the others say within so many seconds."""

    says: tuple[str, ...]
    within: float
    code: int = 1
    error: str = "PeerError"


WHO = "rank {rank} (host {host}, pid {pid})"
EXPECTED = {
    "raises": Expected(
        (
            WHO + " failed with TheCause:",
            "sensor 7 gave nothing",
            "Traceback (most recent call last)",
            "raise_the_cause",
        ),
        3,
    ),
    "runs out of memory": Expected((WHO + " failed with OutOfMemoryError: no room for the batch",), 3),
    "is killed": Expected((WHO + " died", "kernel log"), 5, -signal.SIGKILL),
    "goes silent": Expected((WHO + " died or went silent",), 12, -signal.SIGKILL),
    "is interrupted": Expected((WHO + " failed with KeyboardInterrupt",), 3, -signal.SIGINT),
    "exits": Expected((WHO, "SystemExit"), 5, 0),
    "leaves": Expected((WHO + " left the run", "Every rank must make the same calls (run, evaluate and predict"), 8, 0),
    "votes alone": Expected((WHO, "waits for the vote of one rank"), 3, error="MismatchError"),
}
EXPECTED["skips the evaluation"] = EXPECTED["leaves"]
EXPECTED["Trial leaves"] = Expected((WHO + " waits for the end of the run",), 3, error="MismatchError")


Ended = Callable[[Case], list[Rank]]


@pytest.fixture(scope="module")
def ended(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The ranks of a case, which ran side by side with the others of its table."""

    @once
    def run(cases: tuple[Case, ...]) -> dict[str, list[Rank]]:
        folder = tmp_path_factory.mktemp("failures")
        return run_side_by_side(nursery, folder, {str(case): case.world() for case in cases})

    def of(case: Case) -> list[Rank]:
        table = next(table for table in (ON_TWO, ON_THREE, EACH) if case in table)
        first = table.index(case) // AT_ONCE * AT_ONCE
        return run(tuple(table[first : first + AT_ONCE]))[str(case)]

    return of


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.waits(PATIENCE)] if case.kind == "goes silent" else [])
        for case in ON_TWO
        if case.unlucky >= 0
    ],
    ids=str,
)
def test_a_rank_that_fails_is_named_on_all_others(ended: Ended, case: Case) -> None:
    """All hear within seconds of ranks that fail or hang."""
    assert_named(ended(case), case)


@pytest.mark.wide
@pytest.mark.parametrize("case", ON_THREE, ids=str)
def test_a_rank_of_two_hosts_that_fails_is_named_on_all_others(ended: Ended, case: Case) -> None:
    assert_named(ended(case), case)


@pytest.mark.night
@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_rank_that_fails_anywhere_is_named_on_all_others(ended: Ended, case: Case) -> None:
    assert_named(ended(case), case)


def assert_named(ranks: list[Rank], case: Case) -> None:
    """All end soon, with an exit code that says so, and the others name the unlucky one and the cause."""
    expected, unlucky = EXPECTED.get(f"{case.program} {case.kind}", EXPECTED[case.kind]), ranks[case.unlucky]
    others = [rank for rank in ranks if rank is not unlucky]
    assert unlucky.code == expected.code, unlucky.stderr
    since = unlucky.noted_at.get("happens", unlucky.noted_at.get("error"))  # one whose run is shorter hears of it, too
    for rank in others:
        assert rank.code == 1, f"it still waited when it was killed: {rank.stderr}" if rank.code < 0 else rank.stderr
        kind, text = rank.notes["error"]
        assert kind == expected.error, text
        for part in expected.says:
            assert part.format(rank=case.unlucky, host=HOSTNAME, pid=unlucky.pid) in text, text
        assert kind in rank.stderr, "the error must end the script, with its traceback"
        assert rank.noted_at["error"] - since < expected.within * rank.slowness
        assert rank.ended - since < (expected.within + 7) * rank.slowness


CAUGHT_BY_ALL = [case for case in ON_TWO if case.kind in CAUGHT and " " not in case.place]


@pytest.mark.parametrize("case", CAUGHT_BY_ALL, ids=str)
def test_after_an_exception_that_all_catch_the_next_run_trains_as_one_process(ended: Ended, case: Case) -> None:
    """After an exception that all catch, they train on."""
    expected = train_plainly()
    for number, rank in enumerate(ended(case)):
        is_mine = case.unlucky in (number, -1)
        raised = "TheCause" if case.kind == "raises" else "OutOfMemoryError"
        heard = "MismatchError" if case.program == "loop" else "PeerError"  # nothing watches a loop of one's own
        assert rank.notes["caught"][0] == (raised if is_mine else heard), rank.notes["caught"]
        if "local" not in case.program:
            assert rank.notes["weights"] == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_a_loop_that_waits_for_one_that_has_given_up_hears_where_that_one_is(ended: Ended) -> None:
    _, text = ended(ON_TWO[0])[0].notes["caught"]
    assert re.search(r"waits for the gradients of .* to .* \(.*\.py:\d+\), while rank 1", text), text
    assert "waits for the begin of a run" in text


def fail_often() -> None:
    """In each round, all catch a failure of a loop, and train well once. Notes the mappings of shared memory."""
    torch.set_num_threads(1)
    join_process_group()
    seen = []
    for _ in range(4):
        with suppress(TheCause, PeerError, MismatchError):
            run_loop(Misfortune("raises at once" if my_rank() == 1 else "", "step"), timedelta(seconds=120))
        run_loop(Misfortune(), timedelta(seconds=120))
        gc.collect()
        seen.append(sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines()))
    note("seen", seen)


def test_failures_that_all_catch_leave_no_shared_memory(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(fail_often, 2, tmp_path):
        assert rank.code == 0, rank.stderr
        _, *later = rank.notes["seen"]  # what the last failed run had may stay until the next one
        assert len(set(later)) == 1, rank.notes["seen"]


def die_behind_a_long_message() -> None:
    """Rank 1 announces it, and is gone before rank 0 looks for it."""
    join_process_group()
    _, other = all_gather_object(os.getpid(), "the processes")
    collect = Mailbox.collect

    def collect_later(*args: Any) -> list[bytes]:
        if my_rank() == 1:
            os.kill(other, signal.SIGKILL)
        end = time.monotonic() + 60
        while os.path.exists(f"/proc/{other}/exe") and time.monotonic() < end:
            os.sched_yield()
        return collect(*args)

    Mailbox.collect = collect_later  # type: ignore[method-assign]
    with noting_errors():
        all_gather_object(torch.zeros(1 << 20), "a long message")


def test_a_rank_that_dies_behind_a_long_message_is_named(nursery: Nursery, tmp_path: Path) -> None:
    first, second = nursery.run(die_behind_a_long_message, 2, tmp_path)
    kind, text = first.notes["error"]
    assert kind == "PeerError" and f"rank 1 (host {HOSTNAME}, pid {second.pid}) died" in text, text


def fork_children() -> None:
    """A child that exits as an interpreter does, and one that raises: neither speaks for the rank."""
    torch.set_num_threads(1)
    join_process_group()
    for end in (lambda: sys.exit(0), lambda: 1 / 0):
        child = os.fork()
        if child == 0:
            end()
        os.waitpid(child, 0)
    misfortune = Misfortune("takes long" if my_rank() == 0 else "", "step")
    note("weights", weights(run_trial(misfortune, timedelta(seconds=120))))


def test_a_forked_child_that_ends_does_not_speak_for_the_rank(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(fork_children, 2, tmp_path):
        assert rank.code == 0, rank.stderr
        assert rank.notes["weights"] == pytest.approx(train_plainly(), rel=1e-10, abs=1e-10)
