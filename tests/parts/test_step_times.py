"""When the ranks compare their replicas again, and when a slow one is named: tables, without processes or a clock."""

from __future__ import annotations

import time

import pytest

from ddp_callbacks.replicas.checks import steps_until_next
from ddp_callbacks.replicas.step_times import StepTimes, Stragglers


@pytest.mark.parametrize(
    ("costs", "steps", "interval"),
    [
        ([0.001, 0.001], [0.001, 0.001], 200),  # half of 1 % of the time
        ([0.001, 0.004], [0.001, 0.001], 200),  # the second rank has waited
        ([0.0004, 0.002], [0.1, 0.1], 1),
        ([0.0151, 0.02], [0.1, 0.11], 31),
        ([0.0, 0.0], [0.1, 0.1], 1),  # not yet known
        ([1.0, 1.0], [0.01, 0.01], 20_000),
        ([60.0, 60.0], [0.01, 0.01], 30_000),  # five minutes
        ([9.0, 9.0], [700.0, 700.0], 1),
    ],
)
def test_comparisons_take_half_a_percent_of_the_time(costs: list[float], steps: list[float], interval: int) -> None:
    assert steps_until_next(costs, steps) == interval


FAST, SLOW = [0.010, 0.014, 0.010], [0.010, 0.041, 0.011]  # seconds
LOADS = [0.050, 0.014, 0.010]
EVEN = [FAST, FAST, FAST]
FORWARD = "has taken {} times as long for a step as the {}, for a minute now; most of it in forward (41 ms, {} 14 ms)"
IN_FORWARD = (2, FORWARD.format("1.8", "median", "median"))
CASES = {
    "for a minute": ([(20, 9, [FAST, FAST, SLOW])] * 5, [[], [], [IN_FORWARD], [], []]),
    "at once, if that is a minute": ([(70, 9, [FAST, FAST, SLOW])], [[IN_FORWARD]]),
    "fast in between": (
        [(59, 9, [FAST, FAST, SLOW]), (1, 9, EVEN), (59, 9, [FAST, FAST, SLOW]), (1, 9, [FAST, FAST, SLOW])],
        [[], [], [], [IN_FORWARD]],
    ),
    "again": (
        [(70, 9, [FAST, FAST, SLOW]), (1, 9, EVEN), (70, 9, [FAST, FAST, SLOW])],
        [[IN_FORWARD], [], [IN_FORWARD]],
    ),
    "not half as slow again": ([(70, 9, [FAST, FAST, [0.010, 0.025, 0.016]])], [[]]),
    "most are slow": ([(70, 9, [FAST, SLOW, SLOW])], [[]]),
    "one stop of a minute": ([(70, 1, [FAST, FAST, SLOW]), (1, 1, EVEN)], [[], []]),
    "steps of a minute": ([(60, 1, [FAST, FAST, SLOW])] * 4, [[], [], [IN_FORWARD], []]),
    "of two": ([(70, 9, [SLOW, FAST])], [[(0, FORWARD.format("1.8", "other rank", "other rank"))]]),
    "of four": ([(70, 9, [SLOW, FAST, SLOW, FAST])], [[(0, IN_FORWARD[1]), (2, IN_FORWARD[1])]]),
    "nothing was measured": ([(70, 9, [[0.0] * 3, [0.0] * 3])], [[]]),
    "loading": (
        [(70, 9, [LOADS, FAST, FAST])],
        [
            [
                (
                    0,
                    FORWARD.format("2.2", "median", "median").replace(
                        "in forward (41 ms, median 14", "loading or between steps (50 ms, median 10"
                    ),
                )
            ]
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_is_slow_for_a_minute_is_named_once(case: str) -> None:
    """Slow ranks are named."""
    exchanges, said = CASES[case]
    stragglers = Stragglers()
    assert [list(stragglers.note(*each)) for each in exchanges] == said


def test_the_time_of_a_wait_is_of_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = StepTimes()
    for part in ("between steps", "in forward", "in backward", None):
        times.mark(part)  # type: ignore[arg-type]
    times.end_step()
    assert times.take() == [2.0, 2.0, 4.0]
    assert times.take() == [0.0, 0.0, 0.0]


def test_one_step_that_stops_for_a_minute_makes_no_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.1, 60.1, 60.3])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = StepTimes()
    for _ in range(3):
        times.end_step()
    assert times.take() == pytest.approx([0.15, 0.0, 0.0])
