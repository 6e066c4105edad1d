"""What ``ddprun predict`` says: its model worked out by hand, and made-up runs whose network it must find."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_callbacks.comm import group_sums, hierarchical
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import buckets
from ddp_callbacks.reporting import cost, plot, prediction
from ddp_callbacks.reporting.cost import EXACT, INEXACT, Network, Step
from ddp_callbacks.reporting.prediction import Measured, Validations
from ddp_callbacks.reporting.recorder import PARTS

MiB = 1 << 20
NETWORK = Network(1e-3, 100e6)  # messages of 1 ms, 100 MB/s
BF16, DILOCO = INEXACT
# The optimizer takes 10 ms. 90 ms are divided, half of them backward. Two buckets: 1 MiB, and 10 MiB.
STEP = Step(0.01, 0.09, 0.5, 11 * MiB)
FIRST = 1 * MiB / 100e6  # seconds on the wire of two machines
BY_HAND: dict[str, tuple[float, float]] = {
    "one machine": (STEP.seconds(1, NETWORK), 0.1),
    # 1 MiB goes through the ring: 2 messages. It is there 1/11 of backward (22.5 ms) after its begin, and sent before
    # the second one is: then that one takes 2 * 2 messages, as only 8 MiB go at a time.
    "two machines": (STEP.seconds(2, NETWORK), 0.01 + 0.045 + 0.004 + 10 * FIRST),
    # Backward has 45 ms, as each has as many samples as one machine had.
    "two machines with twice the batch": (STEP.seconds(2, NETWORK, batch=2), 0.01 + 0.09 + 0.004 + 10 * FIRST),
    # A slower wire is busy with the first bucket when backward ends.
    "a slow wire": (
        STEP.seconds(2, Network(0.0, 10e6)),
        0.01 + 0.0225 + 0.0225 / 11 + 11 * MiB / 10e6,
    ),
    "half of the bytes": (STEP.seconds(2, NETWORK, BF16), 0.01 + 0.045 + 0.004 + 5 * FIRST),
    # 12 MiB of parameters in two buckets after every fiftieth step; nothing hides them.
    "now and then": (STEP.seconds(2, NETWORK, DILOCO), 0.01 + 0.045 + (0.002 + 0.004 + 11 * FIRST) / 50),
    # Of 32 KiB, four machines gather all: 3 messages, each with the whole. Of more, they would send too much.
    "few bytes": (replace(STEP, nbytes=32 << 10).seconds(4, NETWORK), 0.01 + 0.0225 + 0.003 + 3 * (32 << 10) / 100e6),
    "more": (replace(STEP, nbytes=40 << 10).seconds(4, NETWORK), 0.01 + 0.0225 + 0.006 + 6 * (10 << 10) / 100e6),
    # Each of four processes carries a quarter: 2.5 MiB go at once.
    "processes share a link": (replace(STEP, processes=4).seconds(2, NETWORK), 0.01 + 0.045 + 0.002 + 10 * FIRST),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_model_gives_what_one_works_out_by_hand(name: str) -> None:
    """The cost model equals a calculation by hand."""
    found, expected = BY_HAND[name]
    assert found == pytest.approx(expected)


def test_the_model_counts_as_the_library_sums() -> None:
    sums = [(1 << size, ranks) for size in range(8, 24) for ranks in range(2, 20)]
    assert [cost.is_gathered(*each) for each in sums] == [group_sums.is_gathered(*each) for each in sums]
    assert cost.CHUNK == hierarchical.CHUNK_NBYTES
    assert buckets.FIRST_BUCKET_MB * MiB == cost.FIRST_BUCKET


seconds = st.floats(1e-6, 1.0)
steps = st.builds(Step, seconds, seconds, st.floats(0, 1), st.floats(1e3, 1e10), st.integers(1, 16))
networks = st.builds(Network, seconds, st.floats(1e6, 1e11))


@given(steps, networks, st.integers(2, 1024), st.sampled_from([EXACT, *INEXACT]), st.floats(1, 100))
def test_no_sum_makes_a_step_shorter_and_a_better_network_costs_no_more(
    step: Step, network: Network, machines: int, way: cost.Way, factor: float
) -> None:
    """In it nothing makes a step shorter."""
    better = Network(network.latency / factor, network.bandwidth * factor)
    found = step.seconds(machines, network, way)
    assert step.fixed + step.divided / machines <= step.seconds(machines, better, way) * (1 + 1e-9)
    assert step.seconds(machines, better, way) <= found * (1 + 1e-9)
    assert step.times_as_fast(machines, network, way, grows=True) <= machines * (1 + 1e-9)


def run_of(step: Step, machines: int, network: Network, overhead: float = 0.0) -> Measured:
    """A run as the model makes it; ``overhead`` are seconds of computing that do not depend on the samples."""
    whole = step.seconds(machines, network)
    computing, waiting = step.divided / machines + overhead, whole - step.fixed - step.divided / machines
    return Measured(
        machines,
        machines * step.processes,
        whole,
        step.backward * computing,
        step.fixed - overhead,
        waiting,
        step.nbytes,
    )


@pytest.mark.parametrize("overhead", [0.0, 0.005])
def test_two_runs_and_sums_tell_what_more_machines_take(overhead: float) -> None:
    """It finds what made-up runs were made with."""
    step, network = replace(STEP, processes=4), Network(2e-4, 24e6)
    few, many = (run_of(step, machines, network, overhead) for machines in (1, 2))
    sums = 2e-4 + cost.SIZES[0] / 24e6, 2 * (2e-4 + cost.SIZES[1] / 2 / 24e6)  # gathered, and by the ring
    found = prediction.predict(few, many, cost.network_of(sums, 2), (EXACT,))
    assert found["network"] == pytest.approx({"latency": 2e-4, "bandwidth": 24e6})
    for row in found["predicted"]:
        assert row["ways"]["exact"]["seconds"] == pytest.approx(step.seconds(row["machines"], network))
    assert [run["times"] for run in found["measured"]] == [1.0, few.seconds / many.seconds]


def test_one_machine_needs_an_assumed_network_which_is_said() -> None:
    """It says when it assumes a network."""
    few = Measured(1, 1, 0.11, 0.0, 0.0, 0.0, 11 * MiB)  # a process alone does not tell its parts
    many = Measured(1, 2, 0.07, 0.02, 0.01, 0.01, 11 * MiB)
    found = prediction.predict(few, many, prediction.ASSUMED, (EXACT,))
    assert found["step"]["divided"] == pytest.approx(0.05) and found["step"]["fixed"] == pytest.approx(0.02)
    said = list(prediction.lines(found))
    measured = "1 process on 1 machine, 110 ms a step; 2 processes on 1 machine, 70 ms a step (14 % waiting), 1.57"
    assert said[0] == f"Measured: {measured} times as fast."
    assert said[-2] == "Network: 10 Gbit/s (--bandwidth), 50 µs (--latency), assumed."
    given = prediction.predict(few, many, Network(1e-6, 1.25e8), (EXACT,))
    assert list(prediction.lines(given))[-2] == "Network: 1 Gbit/s (--bandwidth), 1 µs (--latency)."


def predicted(bandwidth: float, inexact: bool = False) -> dict[str, Any]:
    network = Network(5e-5, bandwidth)
    few, many = (run_of(STEP, machines, network) for machines in (1, 2))
    return prediction.predict(few, many, network, prediction.ways(inexact))


def test_it_says_where_more_machines_stop_paying() -> None:
    fast, slow = predicted(1.25e9), predicted(5e6)
    last = prediction.pays_until(fast)
    times = {row["machines"]: row["ways"]["exact"]["divided"] for row in fast["predicted"]}
    assert times[2 * last["machines"]] < 1.1 * times[last["machines"]]
    assert times[last["machines"]] >= 1.1 * times[last["machines"] // 2]
    says = (
        f"With the batch divided, {last['machines']} machines are {times[last['machines']]:.1f} times as fast as one; "
    )
    assert f"{says}twice as many are not 1.10 times as fast as these." in prediction.lines(fast)
    assert any(line.endswith("times as fast as one: they do not pay.") for line in prediction.lines(slow))


def test_ways_with_other_numbers_are_told_only_when_asked() -> None:
    """It names inexact ways only when asked."""
    assert "DiLoCo" not in "\n".join(prediction.lines(predicted(1e8)))
    said = "\n".join(prediction.lines(predicted(1e8, inexact=True)))
    assert "With bf16, which gives other numbers, " in said and "DiLoCo(every=50)" in said


def test_the_prediction_is_plain_data_from_which_it_is_drawn() -> None:
    """The prediction of cost has tables, a plot and JSON."""
    found = predicted(1e8)
    read = json.loads(json.dumps(found), parse_constant=pytest.fail)
    drawn = plot.draw(read, "a < b")
    assert drawn == plot.draw(found, "a < b") and "a &lt; b" in drawn
    tags = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(drawn).iter()]
    assert tags.count("circle") == 2 and "(prefers-color-scheme: dark)" in drawn and "script" not in tags


def moment(
    *ranks: tuple[str, int], each: float = 0.01, compares: float = 0.0, between: float = 0.0, compared: float = 0.0
) -> dict[str, Any]:
    """Ranks by node and steps, which took ``each`` seconds for each part of a step, and compared some batches."""

    def times(steps: int) -> dict[str, Any]:
        waits = dict.fromkeys(PARTS, 0.0) | {"between steps": between * steps}
        seconds = dict.fromkeys(PARTS, compares + each * steps)
        return {
            "steps": steps,
            "seconds": seconds | {"between steps": seconds["between steps"] + compared},
            "waits": waits,
        }

    said = [
        times(steps)
        | {
            "rank": n,
            "node": node,
            "first": times(1),
            "gradients": [4, 0, 0],
            "batch": 64,
            "loads_all": False,
            "validated": [0, 0, 0],
            "compared": compared,
        }
        for n, (node, steps) in enumerate(ranks)
    ]
    return {"command": ["t.py"], "ranks": said}


def test_a_step_is_the_mean_after_the_first_ones() -> None:
    before, after = moment(("a", 30), ("b", 30), each=1.0), moment(("a", 130), ("b", 130), each=0.5)
    found = prediction.measured(before, after)
    assert found.machines == 2 and asdict(found)["waiting"] == pytest.approx((65 - 30) / 100)
    assert found.seconds == pytest.approx(5 * found.waiting)  # all parts but validation
    short = prediction.measured(moment(("a", 30)), moment(("a", 40), compares=9.0))  # of all steps but the first
    assert short.seconds == pytest.approx(0.05)
    later = prediction.measured(moment(("a", 30)), moment(("a", 130), compared=0.5))
    assert later.seconds == pytest.approx(0.05)


def test_waits_for_what_one_rank_does_between_steps_are_no_waits_for_sums() -> None:
    found = prediction.measured(moment(("a", 1), between=0.004), moment(("a", 41), between=0.004))
    assert (found.between, found.waiting) == pytest.approx((0.014, 0.006))


def test_a_mean_says_how_uneven_its_steps_are() -> None:
    before, middle = moment(("a", 30), ("b", 30), each=0.0), moment(("a", 80), ("b", 80), each=0.5 * 50 / 80)
    found = prediction.measured(before, moment(("a", 130), ("b", 130), each=0.75 * 100 / 130), middle)
    assert found.steps == 100 and found.spread == pytest.approx(1 / 3)


FEW = Measured(1, 1, 0.05, 0.0, 0.0, 0.0, MiB, steps=500)
MANY = Measured(1, 2, 0.03, 0.02, 0.0, 0.0, MiB, steps=500)
VALIDATES = replace(FEW, validations=Validations(5, 500, 25.0))
MEANS = "These are means of {} steps (first half: 0% off) and 500 steps (first half: {}% off): --seconds for more."
ONE_IS_FASTER = "One process trains faster here than several: on several machines, start one on each."
LEFT_OUT = "Left out: validations. Not each run had a whole one: let both train for longer (--seconds)."


@pytest.mark.parametrize(
    ("few", "many", "says"),
    [
        (FEW, MANY, []),
        (replace(FEW, steps=60), MANY, [MEANS.format(60, 0)]),
        (FEW, replace(MANY, spread=0.5), [MEANS.format(500, 50)]),
        (
            replace(FEW, steps=60, is_over=True),
            MANY,
            [
                "These are means of 60 steps and 500 steps (first half: 0% off): the script ended by itself, so "
                "let it train for more epochs."
            ],
        ),
        (FEW, replace(MANY, seconds=0.06), [ONE_IS_FASTER]),
        (FEW, replace(MANY, validation=0.02), [LEFT_OUT]),
        (
            VALIDATES,
            replace(MANY, validation=0.05, validations=Validations(2, 200, 4.0)),
            ["Validations take 50 % and 40 % of that (5 and 2 of them): --seconds for more."],
        ),
    ],
)
def test_it_says_what_its_numbers_leave_out_and_how_good_they_are(
    few: Measured, many: Measured, says: list[str]
) -> None:
    found = prediction.predict(few, many, NETWORK, (EXACT,))
    first, *more, _ = [*itertools.takewhile(bool, prediction.lines(found)), ""]
    assert first.startswith("Measured: ") and more == says


def test_a_batch_that_each_process_loads_whole_gains_nothing_by_growing() -> None:
    few, many = replace(FEW, seconds=0.07), replace(MANY, seconds=0.065, loading=0.06, loads_all=True)
    found = prediction.predict(few, many, Network(0.0, 1e15), (EXACT,))
    assert found["predicted"][-1]["ways"]["exact"]["grown"] == pytest.approx(0.065 / 0.06, rel=0.01)


def test_validations_that_nobody_has_seen_are_told() -> None:
    *_, last = prediction.lines(prediction.predict(FEW, MANY, NETWORK, (EXACT,)))
    assert last.endswith(", no late process, no validations (the runs had none).")


def test_a_run_that_is_cut_amid_a_validation_counts_the_whole_ones() -> None:
    few = replace(FEW, seconds=0.04, validation=0.05, validations=Validations(4, 400, 16.0))
    many = replace(MANY, seconds=0.02, backward=0.01, validation=0.03, validations=Validations(1, 100, 4.0))
    found = prediction.predict(few, many, NETWORK, (EXACT,))
    assert [run["seconds"] for run in found["measured"]] == pytest.approx([0.08, 0.06])


@pytest.mark.parametrize(("samples", "machines"), [(4, 2), (6, 4)])
def test_more_processes_than_samples_gain_nothing(samples: int, machines: int) -> None:
    few, many = (replace(each, samples=samples) for each in (FEW, replace(MANY, seconds=0.026, backward=0.015)))
    network = Network(0.0, 1e15)
    found = prediction.predict(few, many, network, (EXACT,))
    assert prediction.pays_until(found)["machines"] == machines
    times = {row["machines"]: row["ways"]["exact"] for row in found["predicted"]}
    assert times[1024]["divided"] == pytest.approx(times[machines]["divided"], rel=1e-3)
    assert times[1024]["grown"] > 500
    limit = f"A batch has {samples} samples, so more than {samples} processes cannot divide it."
    assert limit in prediction.lines(found)


def test_runs_are_compared_with_validations_or_both_without() -> None:
    # One process, whose loader is none of torch's, does not tell when it validates.
    few, many = replace(FEW, seconds=0.06, is_whole=True), replace(MANY, seconds=0.004, validation=0.03)
    found = prediction.predict(few, many, NETWORK, (EXACT,))
    assert [run["seconds"] for run in found["measured"]] == pytest.approx([0.06, 0.034])
    assert min(row["ways"]["exact"]["seconds"] for row in found["predicted"]) > 0


def test_a_gain_that_cannot_be_is_refused() -> None:
    says = "^2 processes took 7.0 times as many steps per second as 1, so the runs did not do the same. Let both train"
    with pytest.raises(ConfigurationError, match=says):
        prediction.predict(replace(FEW, seconds=0.07), replace(MANY, seconds=0.01, backward=0.005), NETWORK, (EXACT,))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (moment(), "t.py does not train with ddp_callbacks, or not yet. Add its callback or strategy, or give --auto"),
        (
            moment(("a", 20)),
            "t.py took 19 steps after the first ones, and 20 are the least to measure. Let it train for longer",
        ),
        (
            moment(("a", 20)) | {"ranks": [each | {"first": each} for each in moment(("a", 20))["ranks"]]},
            "t.py took 0 steps after the first ones",  # they came with the first message
        ),
        (
            moment(("a", 99), ("a", 99), ("b", 99)),
            r"as many processes as the others, got \[1, 2\]. Name them",
        ),
    ],
)
def test_a_run_that_cannot_be_measured_is_named(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        prediction.measured(moment(), data)


def test_waits_for_a_validation_are_no_waits_for_sums() -> None:
    before, after = moment(("a", 1)), moment(("a", 41))
    after["ranks"][0]["waits"]["validation"] = 0.004 * 40
    found = prediction.measured(before, after)
    assert (found.waiting, found.validation) == pytest.approx((0.006, 0.014))


def test_what_the_processes_of_one_machine_wait_is_not_divided() -> None:
    few, many = (run_of(replace(STEP, processes=4), machines, NETWORK) for machines in (1, 2))
    late = replace(few, seconds=few.seconds + 0.01, waiting=0.01)
    divided = [prediction.predict(each, many, NETWORK, (EXACT,))["step"]["divided"] for each in (few, late)]
    assert divided[0] == pytest.approx(divided[1])


def test_machines_that_are_slower_than_one_are_not_taken_for_processes() -> None:
    slow = predicted(5e6)
    assert slow["measured"][1]["times"] < 1 and ONE_IS_FASTER not in prediction.lines(slow)
