"""What more machines would bring: from what a script took on few and on more processes, see :mod:`.cost`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.reporting.cost import EXACT, INEXACT, Network, Step, Way
from ddp_callbacks.reporting.recorder import BACKWARD, BETWEEN, VALIDATION, WAITING

MACHINES = tuple(1 << exponent for exponent in range(11))  # 1 to 1,024
ASSUMED = Network(50e-6, 10e9 / 8)  # the network of a single machine
WORTH = 1.1  # times as fast: what twice as many machines must be
FEWEST = 20  # steps to measure


@dataclass(frozen=True)
class Measured:
    """The mean step of a run, without validations: its seconds, those of each part, and bytes of gradients."""

    machines: int
    processes: int
    seconds: float
    backward: float
    between: float
    waiting: float
    nbytes: float


def measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> Measured:
    """Return the mean step between two moments, see :meth:`.collector.Collector.data`.

    Raises:
        ConfigurationError: There were few steps, or machines with unlike numbers of processes.
    """
    command, nodes = " ".join(after["command"]), [rank["node"] for rank in after["ranks"]]
    if not nodes:
        raise ConfigurationError(
            f"{command} does not train with ddp_callbacks, or not yet. Add its callback or strategy, or give --auto if "
            "it has a Trainer or a Trial, and leave out --no-report."
        )
    counts = sorted({nodes.count(node) for node in nodes})
    if len(counts) > 1:
        raise ConfigurationError(
            f"each machine needs as many processes as the others, got {counts}. Name them: -H node1:4,node2:4."
        )
    begins = {rank["rank"]: rank for rank in before["ranks"]}
    ranks = [_mean(begins.get(rank["rank"]), rank, command) for rank in after["ranks"]]
    mean = {part: sum(each[part] for each in ranks) / len(ranks) for part in ranks[0]}
    seconds, nbytes = sum(mean.values()) - mean[VALIDATION], after["ranks"][0]["gradients"][0]
    parts = mean[BACKWARD], mean[BETWEEN], mean[WAITING]
    return Measured(len(nodes) // counts[0], len(nodes), seconds, *parts, nbytes)


def _mean(before: Mapping[str, Any] | None, after: Mapping[str, Any], command: str) -> dict[str, float]:
    """Return the seconds of a rank's step by part; of all its steps, if few came after ``before``."""
    if after["steps"] < FEWEST:
        raise ConfigurationError(
            f"{command} took {after['steps']} steps, and {FEWEST} are the least to measure. Let it train for longer: "
            "more epochs, smaller batches, or --seconds."
        )
    if before is None or after["steps"] - before["steps"] < FEWEST:
        before = {"steps": 0, "seconds": {}}
    steps, begin = after["steps"] - before["steps"], before["seconds"]
    return {part: (value - begin.get(part, 0.0)) / steps for part, value in after["seconds"].items()}


def predict(few: Measured, many: Measured, network: Network, ways: Sequence[Way]) -> dict[str, Any]:
    """Return what follows from two runs, as plain data for JSON.

    Args:
        few: One machine, if ``many`` are several; else one process of it. It has as many threads.
    """
    base = few if many.machines > 1 else many
    step = _step(few, many, base)
    return {
        "measured": [asdict(each) | {"times": base.seconds / each.seconds} for each in (few, many)],
        "step": asdict(step),
        "network": asdict(network),
        "predicted": [_row(step, machines, network, ways) for machines in sorted({*MACHINES, many.machines})],
    }


def _step(few: Measured, many: Measured, base: Measured) -> Step:
    """Return the step of ``base``. What many processes compute longer than their share is not divided."""
    whole = few.seconds - few.waiting - many.between  # a process alone does not tell what lies between its steps
    part = many.seconds - many.waiting - many.between
    divided = min(max((whole - part) / (1 - few.processes / many.processes), 0.0), whole)
    divided *= few.processes / base.processes
    return Step(base.seconds - divided, divided, many.backward / part, many.nbytes, base.processes)


def _row(step: Step, machines: int, network: Network, ways: Sequence[Way]) -> dict[str, Any]:
    return {
        "machines": machines,
        "processes": machines * step.processes,
        "ways": {
            way.name: {
                "seconds": step.seconds(machines, network, way),
                "divided": step.times_as_fast(machines, network, way, grows=False),
                "grown": step.times_as_fast(machines, network, way, grows=True),
            }
            for way in ways
        },
    }


def pays_until(found: Mapping[str, Any], way: str = EXACT.name) -> Mapping[str, Any]:
    """Return the row of the last number of machines that is worth it, with a divided batch: see :data:`WORTH`."""
    rows: list[Mapping[str, Any]] = [row for row in found["predicted"] if row["machines"] in MACHINES]
    times = [row["ways"][way]["divided"] for row in rows]
    return rows[next(i for i in range(len(rows)) if times[i + 1 :][:1] < [WORTH * times[i]])]


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to print."""
    few, many = found["measured"]
    times = few["seconds"] / many["seconds"]
    yield f"Measured: {_said(few)}; {_said(many)}, {times:.2f} times as fast."
    yield from _table(found)
    for way in found["predicted"][0]["ways"]:
        yield _sentence(found, way)
    network = found["network"]
    rate = f"{network['bandwidth'] * 8 / 1e9:.3g} Gbit/s (--bandwidth), {network['latency'] * 1e6:.3g} µs (--latency)"
    yield f"Network: {rate}{', assumed' if network == asdict(ASSUMED) else ''}."
    yield "Assumed: equal machines, a network that serves all of them at full rate, no late process."


def _said(run: Mapping[str, Any]) -> str:
    where = f"{_count(run['processes'], 'process')} on {_count(run['machines'], 'machine')}"
    return f"{where}, {run['seconds'] * 1e3:.3g} ms a step"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + (("es" if name.endswith("s") else "s") if number > 1 else "")


def _table(found: Mapping[str, Any]) -> Iterator[str]:
    _, *others = found["predicted"][0]["ways"]
    heads = "machines", "processes", "ms a step", "times as fast", "if the batch grows", *others
    rows: list[tuple[str, ...]] = [heads]
    for row in found["predicted"]:
        first, *more = row["ways"].values()
        times = first["divided"], first["grown"], *(each["divided"] for each in more)
        counts = f"{row['machines']:,}", f"{row['processes']:,}", f"{first['seconds'] * 1e3:.3g}"
        rows.append((*counts, *(f"{each:.2f}" for each in times)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("", *("  ".join(map(str.rjust, row, widths)) for row in rows), "")


def _sentence(found: Mapping[str, Any], way: str) -> str:
    """Say how far more machines pay."""
    last, rows = pays_until(found, way), found["predicted"]
    by = "With the batch divided" if way == EXACT.name else f"With {way}, which gives other numbers"
    if last["machines"] == 1:
        return f"{by}, two machines are {rows[1]['ways'][way]['divided']:.2f} times as fast as one: they do not pay."
    rest = "" if last["machines"] == MACHINES[-1] else f"; twice as many are not {WORTH:.2f} times as fast as these"
    return f"{by}, {last['machines']:,} machines are {last['ways'][way]['divided']:.1f} times as fast as one{rest}."


def ways(inexact: bool) -> Sequence[Way]:
    """Return the ways to sum that are compared: only exact ones, unless others are wanted."""
    return (EXACT, *(INEXACT if inexact else ()))
