"""The model of the cost: values worked out by hand, its limits, and a fit that finds what the times were made with."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.bench.cost import (
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


def test_an_exact_step_on_two_hosts() -> None:
    """The cost model equals a calculation by hand."""
    # 10 MB are three pieces, of which two go at a time: 2 * 2 messages of 1 ms; and 10 MB at 100 MB/s.
    assert wire_traffic(Layout(2), 10e6) == (4, 10e6)
    assert wire_time(MACHINE, Layout(2), 10e6) == pytest.approx(0.104)
    # The first bucket is on the wire from 40 to 144 ms, the second after it until 248 ms.
    assert step_time(MACHINE, JOB, Layout(2), EXACT) == pytest.approx(0.248 + 0.01)
    assert efficiency(MACHINE, JOB, Layout(2), EXACT) == pytest.approx(0.1 / 0.258)


def test_the_wire_waits_for_backward_where_it_is_fast() -> None:
    fast = replace(MACHINE, bandwidth=1e9)
    # From 40 to 54 ms and from 90 to 104 ms.
    assert step_time(fast, JOB, Layout(2), EXACT) == pytest.approx(0.104 + 0.01)


def test_half_precision_on_four_hosts() -> None:
    # 5 MB of bf16; a host sends 256 KiB to each at a time, so 1 MiB: 5 pieces with 3 messages each, after the first.
    assert wire_traffic(Layout(4), 10e6, half=True) == (1 + 5 * 3, 2 * 3 / 4 * 5e6)
    assert wire_time(MACHINE, Layout(4), 10e6, half=True) == pytest.approx(0.016 + 0.01 + 0.075)
    # The control numbers follow: few bytes, so 3 messages.
    assert step_time(MACHINE, JOB, Layout(4), BF16) == pytest.approx(0.04 + 2 * 0.101 + 0.003 + 0.01)


@pytest.mark.parametrize(
    ("layout", "nbytes", "options", "messages", "sent"),
    [
        # Each of four carries 2.5 MB, in one piece; the host sends as many bytes as before.
        pytest.param(Layout(2, 4), 10e6, {}, 2, 10e6, id="carriers of a host share the wire"),
        pytest.param(Layout(4), 1000, {}, 3, 3000, id="few bytes are gathered"),
        pytest.param(Layout(4), 1000, {"half": True}, 3, 1500, id="few bytes in half precision"),
        pytest.param(Layout(2), 80e6, {"half": True, "itemsize": 8}, 40, 20e6, id="float64 is sent as two bytes each"),
    ],
)
def test_what_goes_over_the_wire(
    layout: Layout, nbytes: float, options: dict[str, int], messages: int, sent: float
) -> None:
    assert wire_traffic(layout, nbytes, **options) == (messages, sent)  # type: ignore[arg-type]


def test_a_ring_of_all_ranks_has_more_messages() -> None:
    assert ring_traffic(Layout(8, 4), 10e6) == (14, 2 * 7 / 8 * 10e6)


def test_sums_in_memory() -> None:
    # Of 12 MB, three ranks add up 4 MB each: two others' (two reads, a write), and copy it to two (a read, a write).
    assert memory_traffic(Layout(1, 3), 12e6) == (2 * 4e6 * 3, 2 * 4e6 * 2)
    assert memory_times(MACHINE, Layout(1, 3), 12e6) == pytest.approx((0.0241, 0.016))
    # On one host sums follow backward, which ends at 90 ms: 10 MB of two ranks each time.
    add, copy = 0.0001 + 0.015, 0.010
    assert step_time(MACHINE, JOB, Layout(1, 2), EXACT) == pytest.approx(0.09 + 2 * add + copy + 0.01)
    assert step_time(MACHINE, JOB, Layout(1, 2), BF16) == step_time(MACHINE, JOB, Layout(1, 2), EXACT)


def test_diloco_adds_its_share_of_one_exact_sum() -> None:
    assert sum_time(MACHINE, JOB, Layout(2)) == pytest.approx(0.208)
    assert step_time(MACHINE, JOB, Layout(2), diloco(50)) == pytest.approx(0.1 + 0.208 / 50)


def test_processes_that_share_cores_compute_slower() -> None:
    shared = replace(MACHINE, cores=2)
    assert compute_time(shared, JOB, Layout(1, 4)) == pytest.approx(0.2)
    assert compute_time(shared, JOB, Layout(1, 2)) == pytest.approx(0.1)
    assert memory_times(shared, Layout(1, 4), 8e6) == pytest.approx(
        [2 * t for t in memory_times(MACHINE, Layout(1, 4), 8e6)]
    )


def test_the_mildest_of_the_fast_ways_is_chosen() -> None:
    assert choose(replace(MACHINE, latency=0, bandwidth=1e12), JOB, Layout(2), SYNCS) == EXACT
    assert choose(MACHINE, JOB, Layout(2), SYNCS[:2]) == BF16
    assert choose(MACHINE, JOB, Layout(2), SYNCS) == diloco(50)


def test_a_layout_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one host with one rank, got Layout\\(hosts=0"):
        Layout(0)


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


@given(machines, st.floats(MB, 1e10), st.floats(1, 100), st.integers(2, 512), st.integers(1, 1024))
def test_a_ring_takes_longer_for_more_bytes_and_more_hosts(
    machine: Machine, nbytes: float, factor: float, hosts: int, more: int
) -> None:
    time = wire_time(machine, Layout(hosts), nbytes)
    assert wire_time(machine, Layout(hosts), nbytes * factor) >= time
    assert wire_time(machine, Layout(hosts + more), nbytes) >= time


@given(machines, jobs(), layouts, st.integers(2, 1000))
def test_synchronizing_half_as_often_costs_half(machine: Machine, job: Job, layout: Layout, every: int) -> None:
    base = compute_time(machine, job, layout)
    often, seldom = (step_time(machine, job, layout, diloco(steps)) - base for steps in (every, 2 * every))
    assert seldom == pytest.approx(often / 2, abs=1e-9 * base)


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


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, 4), Layout(3, 2)])
def test_the_fit_finds_the_machine(layout: Layout) -> None:
    """Its fit stands noise and outliers."""
    true = Machine(3e-4, 24e6, 2e-9, 1e-3, 3e9) if layout.ranks_per_host > 1 else Machine(3e-4, 24e6, 2e-9)
    found = fit(samples(true, layout, 0.0), layout, Machine(0.0, 1.0))
    assert vars(found) == pytest.approx(vars(true), rel=1e-6)


def test_the_fit_stands_noise_and_an_outlier() -> None:
    true, layout = Machine(3e-4, 120e6, 2e-9, 1e-3, 3e9), Layout(2, 2)
    noisy = samples(true, layout, 0.04)
    at = next(i for i, sample in enumerate(noisy) if sample.level == "wire" and sample.nbytes == 4 * MB)
    noisy[at] = replace(noisy[at], seconds=2 * noisy[at].seconds)
    found = fit(noisy, layout, Machine(0.0, 1.0))
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
    assert found.latency == pytest.approx(true.latency, rel=0.1)
    assert found.memory_bandwidth == pytest.approx(true.memory_bandwidth, rel=0.05)


def test_what_costs_nothing_is_not_negative() -> None:
    # Half precision that is faster than the model allows, and a memory without overhead.
    fast = [Sample("half", MB, 1e-6), Sample("memory", MB, 0.001), Sample("memory", 4 * MB, 0.0041)]
    found = fit(fast, Layout(2, 2), MACHINE)
    assert found.rounding == 0.0 and found.memory_overhead == 0.0
    assert (found.latency, found.bandwidth) == (MACHINE.latency, MACHINE.bandwidth), "what was not measured stays"


def test_a_calibration_survives_json() -> None:
    known = Calibration(Layout(2, 2), MACHINE, JOB, {"exact": 0.3}, (Sample("wire", MB, 0.1),))
    assert Calibration.from_json(known.to_json()) == known
