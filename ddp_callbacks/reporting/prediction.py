"""What more machines would bring: from what a script took on few and on more processes, see :mod:`.cost`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.reporting.cost import EXACT, INEXACT, Network, Step, Way, part_of
from ddp_callbacks.reporting.recorder import BACKWARD, BETWEEN, LOADING, PARTS, VALIDATION, WAITING
from ddp_callbacks.reporting.summary import in_digits, percent

MACHINES = tuple(1 << exponent for exponent in range(11))  # 1 to 1,024
ASSUMED = Network(50e-6, 10e9 / 8)  # the network of a single machine
WORTH = 1.1  # times as fast: what twice as many machines must be
FEWEST = 20  # steps to measure
_FEW, _UNEVEN = 100, 0.05  # steps, and a spread, that are told
_MORE = {False: "--seconds for more", True: "the script ended by itself, so let it train for more epochs"}
_MOST = 1.2  # times as fast as processes allow: caches help, more is no measurement


class Validations(NamedTuple):
    """Those that were whole: how many, the steps of the training until the last of them, and seconds of all."""

    number: int
    steps: int
    seconds: float


_NONE = Validations(0, 1, 0.0)


@dataclass(frozen=True)
class Measured:
    """The mean step of a run: its seconds, those of each part, and bytes of gradients.

    Attributes:
        seconds: Without validations.
        validation: Seconds of validations, as a part of each step.
        validations: Those of the whole run.
        samples: Of a batch, on all processes; 0 if unknown.
        is_whole: Whether validations could not be told from the rest: no loader of torch's has marked them.
        steps: How many were measured.
        spread: By how much the first half of them took longer or shorter than all, as a share.
        is_over: Whether the script has ended by itself; then the spread is unknown, and 0.
        loading: Seconds.
        loads_all: Whether each process loads whole batches.
    """

    machines: int
    processes: int
    seconds: float
    backward: float
    between: float
    waiting: float
    nbytes: float
    validation: float = 0.0
    validations: Validations = _NONE
    samples: int = 0
    is_whole: bool = False
    steps: int = 0
    spread: float = 0.0
    is_over: bool = False
    loading: float = 0.0
    loads_all: bool = False


def measured(before: Mapping[str, Any], after: Mapping[str, Any], middle: Mapping[str, Any] | None = None) -> Measured:
    """Return the mean step between two moments, see :meth:`.collector.Collector.data`.

    Args:
        middle: A moment between them, for the spread; ``None`` if the script has ended by itself.

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
    steps, mean, waits = _mean(before, after)
    if steps < FEWEST:
        raise ConfigurationError(
            f"{command} took {steps} steps after the first ones, and {FEWEST} are the least to measure. Let it train "
            "for longer: more epochs, smaller batches, or --seconds if it was cut."
        )
    nbytes = after["ranks"][0]["gradients"][0]
    # Others wait for what one rank does between steps, such as a checkpoint: it takes so long on each.
    between, apart = mean[BETWEEN] + waits[BETWEEN], waits[BETWEEN] + waits[VALIDATION]
    parts = mean[BACKWARD], between, mean[WAITING] - apart, nbytes
    _, *first = _mean(before, middle if middle and len(middle["ranks"]) == len(nodes) else after)
    seconds, of_first = (sum(own.values()) - _validation(own, waited) for own, waited in ((mean, waits), first))
    counted, spread = (len(nodes) // counts[0], len(nodes)), abs(of_first / seconds - 1)
    return Measured(
        *counted,
        seconds,
        *parts,
        validation=_validation(mean, waits),
        validations=Validations(*after["ranks"][0]["validated"]),
        samples=max(rank["batch"] for rank in after["ranks"]),
        is_whole=not mean[LOADING],
        steps=steps,
        spread=spread,
        is_over=middle is None,
        loading=mean[LOADING],
        loads_all=any(rank["loads_all"] for rank in after["ranks"]),
    )


def _validation(mean: Mapping[str, float], waits: Mapping[str, float]) -> float:
    return mean[VALIDATION] + waits[VALIDATION]


def _mean(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, dict[str, float], dict[str, float]]:
    """Return a number of steps, and the mean seconds of one, without comparisons, and those of its waits, by part.

    If few steps came after ``before``, all count but those of the first message, which compare the first batch.
    """
    begins, ends = _begin(before, after), {rank["rank"]: rank for rank in after["ranks"]}
    steps = {each: end["steps"] - begins[each]["steps"] for each, end in ends.items()}

    def mean(kind: str, part: str) -> float:
        spent = ((end[kind][part] - begins[each][kind][part]) / max(steps[each], 1) for each, end in ends.items())
        return float(sum(spent)) / len(ends)

    seconds, waits = ({part: mean(kind, part) for part in PARTS} for kind in ("seconds", "waits"))
    for each, end in ends.items():
        compared = end["compared"] - begins[each].get("compared", end["compared"])
        seconds[BETWEEN] -= compared / max(steps[each], 1) / len(ends)
    return min(steps.values()), seconds, waits


def _begin(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the totals of each rank from which on steps count."""
    begins, ends = ({rank["rank"]: rank for rank in moment["ranks"]} for moment in (before, after))
    if begins.keys() != ends.keys() or min(ends[each]["steps"] - begins[each]["steps"] for each in ends) < FEWEST:
        return {each: end["first"] for each, end in ends.items()}
    return begins


def predict(few: Measured, many: Measured, network: Network, ways: Sequence[Way]) -> dict[str, Any]:
    """Return what follows from two runs, as plain data for JSON.

    Args:
        few: One machine, if ``many`` are several; else one process of it. It has as many threads.

    Raises:
        ConfigurationError: The runs cannot have done the same.
    """
    if few.is_whole or many.is_whole:  # then both with validations
        few, many = (replace(run, seconds=run.seconds + run.validation, validation=0.0) for run in (few, many))
    elif few.validations.number and many.validations.number:
        few, many = _with_validations(few, many)
    times = few.seconds / many.seconds
    if times > _MOST * many.processes / few.processes:
        raise ConfigurationError(
            f"{_count(many.processes, 'process')} took {times:.1f} times as many steps per second as {few.processes}, "
            "so the runs did not do the same. Let both train for longer (--seconds), and alike on any number of "
            "processes."
        )
    base = few if many.machines > 1 else many
    step = _step(few, many, base)
    return {
        "measured": [asdict(each) | {"times": base.seconds / each.seconds} for each in (few, many)],
        "step": asdict(step),
        "network": asdict(network),
        "predicted": [_row(step, machines, network, ways) for machines in sorted({*MACHINES, many.machines})],
    }


def _with_validations(few: Measured, many: Measured) -> tuple[Measured, Measured]:
    """Add to the steps their share of whole validations, which are as frequent in both as in the run with more."""
    number, steps, _ = max(few.validations, many.validations)
    shares = (run.validations.seconds / run.validations.number * number / steps for run in (few, many))
    runs = zip((few, many), shares, strict=True)
    few, many = (replace(run, seconds=run.seconds + share, validation=share) for run, share in runs)
    return few, many


def _step(few: Measured, many: Measured, base: Measured) -> Step:
    """Return the step of ``base``. What many processes compute longer than their share is not divided."""
    whole = few.seconds - few.waiting - many.between  # a process alone does not tell what lies between its steps
    part = many.seconds - many.waiting - many.between
    own, others, of_base = (part_of(many.samples, run.processes) for run in (few, many, base))
    divided = min(max((whole - part) / (1 - others / own), 0.0), whole) if others < own else 0.0
    divided = min(divided * of_base / own, base.seconds)
    loading = base.loading if many.loads_all else 0.0
    known = many.backward / part, many.nbytes, base.processes, many.samples, min(loading, base.seconds - divided)
    return Step(base.seconds - divided, divided, *known)


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
    if min(few["steps"], many["steps"]) < _FEW or max(few["spread"], many["spread"]) > _UNEVEN:
        yield f"These are means of {_counted(few)} and {_counted(many)}: {_MORE[few['is_over'] or many['is_over']]}."
    counts = [Validations(*run["validations"]).number for run in (few, many)]
    if all(counts):
        shares = " and ".join(percent(run["validation"] / run["seconds"]) for run in (few, many))
        counted = " and ".join(f"{count:,}" for count in counts)
        yield f"Validations take {shares} of that ({counted} of them): --seconds for more."
    elif few["validation"] or many["validation"]:
        yield "Left out: validations. Not each run had a whole one: let both train for longer (--seconds)."
    if few["machines"] == many["machines"] and times < 1 - _UNEVEN:
        yield "One process trains faster here than several: on several machines, start one on each."
    yield from _table(found)
    for way in found["predicted"][0]["ways"]:
        yield _sentence(found, way)
    network = found["network"]
    rate = f"{network['bandwidth'] * 8 / 1e9:.3g} Gbit/s (--bandwidth), {network['latency'] * 1e6:.3g} µs (--latency)"
    yield f"Network: {rate}{', assumed' if network == asdict(ASSUMED) else ''}."
    if samples := found["step"]["samples"]:
        yield f"A batch has {_count(samples, 'sample')}, so more than {_count(samples, 'process')} cannot divide it."
    is_seen = any(counts) or few["validation"] or many["validation"]
    more = "" if is_seen else ", no validations (the runs had none)"
    yield f"Assumed: equal machines, a network that serves all of them at full rate, no late process{more}."


def _counted(run: Mapping[str, Any]) -> str:
    return f"{run['steps']:,} steps" + ("" if run["is_over"] else f" (first half: {run['spread']:.0%} off)")


def _said(run: Mapping[str, Any]) -> str:
    where = f"{_count(run['processes'], 'process')} on {_count(run['machines'], 'machine')}"
    share = run["waiting"] / run["seconds"]
    waiting = f" ({percent(share)} waiting)" if share > _UNEVEN else ""
    return f"{where}, {in_digits(run['seconds'] * 1e3)} ms a step{waiting}"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + (("es" if name.endswith("s") else "s") if number > 1 else "")


def _table(found: Mapping[str, Any]) -> Iterator[str]:
    _, *others = found["predicted"][0]["ways"]
    heads = "machines", "processes", "ms a step", "times as fast", "if the batch grows", *others
    rows: list[tuple[str, ...]] = [heads]
    for row in found["predicted"]:
        first, *more = row["ways"].values()
        times = first["divided"], first["grown"], *(each["divided"] for each in more)
        counts = f"{row['machines']:,}", f"{row['processes']:,}", in_digits(first["seconds"] * 1e3)
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
