"""The model of the cost: values worked out by hand, its limits, and a fit that finds what the times were made with."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from cost import (
    BF16,
    EXACT,
    Calibration,
    FilledBucket,
    Job,
    Layout,
    Machine,
    Sample,
    Sync,
    choose,
    compute_time,
    diloco,
    efficiency,
    fit,
    memory_times,
    memory_traffic,
    ring_traffic,
    step_time,
    sum_time,
    wire_time,
    wire_traffic,
)
from hypothesis import given
from hypothesis import strategies as st

MB = 1 << 20
SYNCS = (EXACT, BF16, diloco(50))
# Messages of 1 ms, 100 MB/s between hosts, 1 GB/s in memory.
MACHINE = Machine(1e-3, 100e6, rounding=1e-9, memory_overhead=1e-4, memory_bandwidth=1e9)
# Two buckets of 10 MB, the first full at 40 ms, the second when backward ends, at 90 ms; the optimizer takes 10 ms.
JOB = Job(0.1, (FilledBucket(10e6, 0.04), FilledBucket(10e6, 0.09)), 0.01)

seconds = st.floats(1e-6, 1.0)
rates = st.floats(1e6, 1e11)
machines = st.builds(Machine, seconds, rates, st.floats(0, 1e-8), seconds, rates, st.floats(0.25, 64))
layouts = st.builds(Layout, st.integers(1, 1024), st.integers(1, 16))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    fulls = sorted(draw(st.lists(seconds, min_size=1, max_size=5)))
    buckets = tuple(FilledBucket(draw(st.floats(1e3, 1e9)), full) for full in fulls)
    after = draw(seconds)
    return Job(fulls[-1] + after, buckets, after)


# --- by hand ----------------------------------------------------------------------------------------------------------

FAST = replace(MACHINE, bandwidth=1e9)
SHARED = replace(MACHINE, cores=2)
ADD, COPY = 0.0001 + 0.015, 0.010  # seconds for 10 MB of two ranks in memory
BY_HAND: dict[str, tuple[Any, Any]] = {
    # Of three pieces two go at a time: 2 * 2 messages of 1 ms; and 10 MB at 100 MB/s.
    "10 MB between two hosts": (wire_traffic(Layout(2), 10e6), (4, 10e6)),
    "their time": (wire_time(MACHINE, Layout(2), 10e6), 0.104),
    # The first bucket is on the wire from 40 to 144 ms, the second after it until 248 ms.
    "an exact step": (step_time(MACHINE, JOB, Layout(2), EXACT), 0.248 + 0.01),
    "its efficiency": (efficiency(MACHINE, JOB, Layout(2), EXACT), 0.1 / 0.258),
    # From 40 to 54 ms and from 90 to 104 ms.
    "a fast wire waits for backward": (step_time(FAST, JOB, Layout(2), EXACT), 0.104 + 0.01),
    # As many messages as for the exact 10 MB, with 5 MB of bf16.
    "half precision on four hosts": (wire_traffic(Layout(4), 10e6, half=True), (2 * 2 * 3, 2 * 3 / 4 * 5e6)),
    # The control numbers follow: few bytes, so 3 messages.
    "a step in half precision": (step_time(MACHINE, JOB, Layout(4), BF16), 0.04 + 2 * 0.097 + 0.003 + 0.01),
    # Each of four carries 2.5 MB, in one piece; the host sends as many bytes as before.
    "carriers of a host share the wire": (wire_traffic(Layout(2, 4), 10e6), (2, 10e6)),
    "few bytes are gathered": (wire_traffic(Layout(4), 1000), (3, 3000)),
    "few bytes in half precision": (wire_traffic(Layout(4), 1000, half=True), (3, 1500)),
    "float64 is sent as two bytes each": (wire_traffic(Layout(2), 80e6, half=True, itemsize=8), (20, 20e6)),
    "a ring of all ranks has more messages": (ring_traffic(Layout(8, 4), 10e6), (14, 2 * 7 / 8 * 10e6)),
    # Of 12 MB, three ranks add up 4 MB each: two others' (two reads, a write), and copy it to two (a read, a write).
    "12 MB in memory": (memory_traffic(Layout(1, 3), 12e6), (2 * 4e6 * 3, 2 * 4e6 * 2)),
    "their time in memory": (memory_times(MACHINE, Layout(1, 3), 12e6), (0.0241, 0.016)),
    # On one host sums follow backward, which ends at 90 ms: 10 MB of two ranks each time.
    "a step on one host": (step_time(MACHINE, JOB, Layout(1, 2), EXACT), 0.09 + 2 * ADD + COPY + 0.01),
    "the same in half precision": (step_time(MACHINE, JOB, Layout(1, 2), BF16), 0.09 + 2 * ADD + COPY + 0.01),
    "one exact sum": (sum_time(MACHINE, JOB, Layout(2)), 0.208),
    "DiLoCo adds its share of one": (step_time(MACHINE, JOB, Layout(2), diloco(50)), 0.1 + 0.208 / 50),
    "four processes on two cores": (compute_time(SHARED, JOB, Layout(1, 4)), 0.2),
    "two processes on two cores": (compute_time(SHARED, JOB, Layout(1, 2)), 0.1),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_model_gives_what_one_works_out_by_hand(name: str) -> None:
    """The cost model equals a calculation by hand."""
    found, expected = BY_HAND[name]
    assert found == pytest.approx(expected)


def test_the_mildest_of_the_fast_ways_is_chosen() -> None:
    assert choose(replace(MACHINE, latency=0, bandwidth=1e12), JOB, Layout(2), SYNCS) == EXACT
    assert choose(MACHINE, JOB, Layout(2), SYNCS[:2]) == BF16
    assert choose(MACHINE, JOB, Layout(2), SYNCS) == diloco(50)


# --- what holds for all -----------------------------------------------------------------------------------------------


@given(machines, jobs(), layouts, st.sampled_from(SYNCS))
def test_one_rank_only_computes_and_no_synchronization_makes_a_step_shorter(
    machine: Machine, job: Job, layout: Layout, sync: Sync
) -> None:
    """In it nothing makes a step shorter."""
    assert step_time(machine, job, Layout(1), sync) == compute_time(machine, job, Layout(1))
    assert step_time(Machine(0.0, math.inf), job, layout, sync) == pytest.approx(job.compute)
    assert 0 < efficiency(machine, job, layout, sync) <= 1 + 1e-9


@given(machines, jobs(), layouts, st.sampled_from(SYNCS), st.floats(1, 100))
def test_a_better_network_costs_no_more(machine: Machine, job: Job, layout: Layout, sync: Sync, factor: float) -> None:
    better = replace(machine, latency=machine.latency / factor, bandwidth=machine.bandwidth * factor)
    assert step_time(better, job, layout, sync) <= step_time(machine, job, layout, sync) * (1 + 1e-9)


# --- the fit ----------------------------------------------------------------------------------------------------------

SIZES = (4096, MB, 4 * MB, 16 * MB)


def samples(machine: Machine, layout: Layout, noise: float) -> list[Sample]:
    """As the model makes them, with noise that only ever makes longer; the same numbers each time."""
    chance = random.Random(7)
    found = []
    for nbytes in SIZES:
        times = {
            "memory": sum(memory_times(machine, layout, nbytes)),
            "wire": wire_time(machine, layout, nbytes),
            "half": wire_time(machine, layout, nbytes, half=True),
        }
        found += [Sample(level, nbytes, time * (1 + noise * chance.random())) for level, time in times.items() if time]
    messages, sent = ring_traffic(layout, 4096)
    found.append(Sample("ring", 4096, messages * machine.latency + sent / machine.bandwidth))
    return found


@pytest.mark.parametrize("layout", [Layout(2, 4), Layout(3, 2)])
def test_the_fit_finds_the_machine(layout: Layout) -> None:
    true = Machine(3e-4, 24e6, 2e-9, 1e-3, 3e9)
    assert vars(fit(samples(true, layout, 0.0), layout, Machine(0.0, 1.0))) == pytest.approx(vars(true), rel=1e-6)


def test_the_fit_stands_noise_and_an_outlier() -> None:
    """Its fit stands noise and outliers."""
    true, layout = Machine(3e-4, 120e6, 2e-9, 1e-3, 3e9), Layout(2, 2)
    noisy = samples(true, layout, 0.04)
    at = next(i for i, sample in enumerate(noisy) if sample.level == "wire" and sample.nbytes == 4 * MB)
    noisy[at] = replace(noisy[at], seconds=2 * noisy[at].seconds)
    found = fit(noisy, layout, Machine(0.0, 1.0))
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
    assert found.latency == pytest.approx(true.latency, rel=0.1)
    assert found.memory_bandwidth == pytest.approx(true.memory_bandwidth, rel=0.05)


def test_a_calibration_survives_json() -> None:
    known = Calibration(Layout(2, 2), MACHINE, JOB, {"exact": 0.3}, (Sample("wire", MB, 0.1),))
    assert Calibration.from_json(known.to_json()) == known
