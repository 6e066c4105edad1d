"""Measure the parts of a training step on these nodes, and predict the time of a step on 1 to 1,024 of them.

    ddprun --nproc-per-node 2 predict.py                       two processes on this machine, and an assumed network
    ddprun -H node1:4,node2:4 predict.py                       these nodes and the network between them
    ddprun -H node1:4,node2:4 predict.py --model net.py:make   your model: make() returns (module, loss) or (module,
                                                               loss, optimizer); loss() computes the loss of a batch

Rank 0 prints tables, draws a plot, and recommends how to synchronize. Every process needs this folder and the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from calibration import calibrate, load_training
from cost import (
    BF16,
    EXACT,
    Calibration,
    Job,
    Layout,
    Machine,
    Sync,
    choose,
    diloco,
    efficiency,
    shared,
    step_time,
    times_as_fast,
)
from screen import Screen, Side, Table

from ddp_callbacks import join_process_group, leave_process_group

HOSTS = tuple(1 << exponent for exponent in range(11))  # 1 to 1,024
ASSUMED_LATENCY = 50e-6  # seconds
ASSUMED_BANDWIDTH = 10e9 / 8  # bytes per second
ASSUMPTIONS = (
    "Assumptions: equal hosts with one link each; a network that serves all of them at full rate; no stragglers; "
    "computing takes as long as it has samples; gloo's ring all-reduce, whose latency grows with the number of hosts."
)
WORTH = 1.1  # times as fast: what twice as many hosts must be
NO_MATPLOTLIB = "matplotlib is not installed here: python -m pip install matplotlib"


def main() -> None:
    arguments = parse(sys.argv[1:])
    sys.path.insert(0, "")
    env = join_process_group()
    training = load_training(arguments.model)
    found = calibrate(training, arguments.seconds, progress if env.rank == 0 else lambda share, doing: None)
    if env.rank == 0:
        show(found, arguments, Screen(sys.stdout))
    leave_process_group()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, the network in seconds and bytes per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help="or MODULE:FUNCTION (default: a perceptron)")
    parser.add_argument("--seconds", type=float, default=40.0, help="roughly how long to measure (default: 40)")
    parser.add_argument("--inexact", action="store_true", help="also bf16 and DiLoCo, which give other numbers")
    parser.add_argument("--every", type=int, default=50, help="steps between two syncs of DiLoCo (default: 50)")
    parser.add_argument("--latency", type=float, metavar="MICROSECONDS", help="of the network (default: measured)")
    parser.add_argument("--bandwidth", type=float, metavar="GBIT", help="Gbit/s per host (default: measured)")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the efficiency at a constant batch per process")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(argv)
    if arguments.every < 2:
        parser.error(f"--every must be at least 2, got {arguments.every}")
    if arguments.latency is not None:
        arguments.latency *= 1e-6
    if arguments.bandwidth is not None:
        arguments.bandwidth *= 1e9 / 8
    return arguments


def progress(share: float, doing: str) -> None:
    print(f"{share:4.0%} {doing}", file=sys.stderr, flush=True)


def show(found: Calibration, arguments: argparse.Namespace, screen: Screen) -> None:
    """Print the results, and draw the plot."""
    machine, remarks = with_network(found, arguments.latency, arguments.bandwidth)
    syncs = (EXACT, BF16, diloco(arguments.every)) if arguments.inexact else (EXACT,)
    if arguments.json:
        rows = [{"hosts": count, **_row(machine, found, count, syncs)} for count in HOSTS]
        gains = [{"times as fast": _gains(machine, found, count, syncs)} for count in HOSTS]
        hosts = [row | gain for row, gain in zip(rows, gains, strict=True)]
        print(json.dumps(_finite({"calibration": asdict(found), "machine": asdict(machine), "predicted": hosts})))
        return
    for table in (parts_table(machine, found), check_table(found), gain_table(machine, found, syncs)):
        screen.table(table)
    lines = [gain_sentence(machine, found.job, found.layout)]
    lines += sentences(machine, found.job, found.layout, syncs) if arguments.inexact else []
    for line in (*remarks, ASSUMPTIONS, *lines):
        screen.line(line)
    if not arguments.plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        screen.line(f"No plot: {NO_MATPLOTLIB}")
        return
    plot(machine, found, syncs, Path(arguments.plot))
    screen.line(f"plot: {arguments.plot}")


def with_network(found: Calibration, latency: float | None, bandwidth: float | None) -> tuple[Machine, list[str]]:
    """The machine with the user's network, or with a default if there was none to measure; and remarks."""
    machine, remarks = found.machine, []
    if found.layout.hosts == 1:
        machine = replace(machine, latency=ASSUMED_LATENCY, bandwidth=ASSUMED_BANDWIDTH)
        if latency is None or bandwidth is None:
            network = f"{ASSUMED_BANDWIDTH * 8 / 1e9:g} Gbit/s and {ASSUMED_LATENCY * 1e6:g} µs"
            remarks = [
                f"There is only one host, so the network was not measured. Assumed: {network}. Set others with "
                "--bandwidth and --latency."
            ]
    if latency is not None:
        machine = replace(machine, latency=latency)
    if bandwidth is not None:
        machine = replace(machine, bandwidth=bandwidth)
    return machine, remarks


# --- the output -------------------------------------------------------------------------------------------------------


def parts_table(machine: Machine, found: Calibration) -> Table:
    """The inputs of the cost model."""
    table = Table(("parts of a step", "left"), ("", "right"))
    rows = {
        "compute, ms": found.job.compute * 1e3,
        "gradients, MB": found.job.nbytes / 1e6,
        "latency between hosts, µs": machine.latency * 1e6,
        "bandwidth per host, Gbit/s": machine.bandwidth * 8 / 1e9,
    }
    if found.layout.ranks_per_host > 1:
        rows["memory bandwidth per process, GB/s"] = machine.memory_bandwidth / 1e9
    for name, value in rows.items():
        table.add_row(name, f"{value:.3g}")
    return table


def check_table(found: Calibration) -> Table:
    """Whole steps: measured, and predicted from their parts."""
    table = Table(("step on these nodes", "left"), ("measured, ms", "right"), ("predicted, ms", "right"), ("", "right"))
    for sync in (EXACT, BF16):
        if sync.name in found.steps:
            measured = found.steps[sync.name]
            predicted = step_time(found.machine, found.job, found.layout, sync)
            cells = f"{measured * 1e3:.1f}", f"{predicted * 1e3:.1f}", f"{predicted / measured - 1:+.0%}"
            table.add_row(sync.name, *cells)
    return table


def gain_table(machine: Machine, found: Calibration, syncs: Sequence[Sync]) -> Table:
    """By the number of hosts: how many times as fast as one, if the batch is divided, and if it grows."""
    names = ("batch divided: s/step", "times", "it grows: times")
    heads: list[tuple[str, Side]] = [(f"{sync.name}, {name}", "right") for sync in syncs for name in names]
    table = Table(("hosts", "right"), ("ranks", "right"), *heads)
    for count in HOSTS:
        layout = Layout(count, found.layout.ranks_per_host)
        job = shared(found.job, found.layout.hosts / count)
        cells = []
        for sync, (divided, grown) in zip(syncs, _gains(machine, found, count, syncs).values(), strict=True):
            cells += [f"{step_time(machine, job, layout, sync):.3g}", f"{divided:.2f}", f"{grown:.2f}"]
        table.add_row(f"{count:,}", f"{layout.ranks:,}", *cells)
    return table


def gain_sentence(machine: Machine, job: Job, here: Layout) -> str:
    """How far more hosts pay, if they divide the batch and sum exactly."""
    gains = [times_as_fast(machine, job, here, count, EXACT, grows=False) for count in HOSTS]
    last = next(i for i in range(len(HOSTS)) if gains[i + 1 :][:1] < [WORTH * gains[i]])
    if HOSTS[last] == 1:
        return f"With the batch divided, no number of hosts is worth it: two are {gains[1]:.2f} times as fast as one."
    rest = "" if last + 1 == len(HOSTS) else f"; twice as many are not {WORTH:.2f} times as fast as these"
    return f"With the batch divided, {HOSTS[last]:,} hosts are {gains[last]:.1f} times as fast as one{rest}."


def sentences(machine: Machine, job: Job, here: Layout, syncs: Sequence[Sync]) -> list[str]:
    """The recommended setting here, and where it changes."""
    chosen = {count: choose(machine, job, replace(here, hosts=count), syncs) for count in (here.hosts, *HOSTS)}
    first = chosen[here.hosts]
    share = efficiency(machine, job, here, first)
    hosts = f"{here.hosts} host{'s' if here.hosts > 1 else ''}"
    lines = [f"On {hosts}, {first.name} is recommended ({share:.0%}): {_reason(machine, job, here, first, syncs)}."]
    previous = first
    for count in HOSTS:
        if count > here.hosts and chosen[count] != previous:
            previous = chosen[count]
            share = efficiency(machine, job, replace(here, hosts=count), previous)
            lines.append(f"From {count:,} hosts on, {previous.name} ({share:.0%}).")
    return lines


def _reason(machine: Machine, job: Job, here: Layout, chosen: Sync, syncs: Sequence[Sync]) -> str:
    times = {sync: step_time(machine, job, here, sync) for sync in syncs}
    mildest, fastest = syncs[0], min(times.values())
    if chosen != mildest:
        return f"a step takes {times[chosen] / times[mildest]:.2f} of the time of {mildest.name}"
    if fastest >= 0.995 * times[chosen]:
        return "no other way is faster"
    return f"no other way shortens a step by more than {1 - fastest / times[chosen]:.0%}"


def plot(machine: Machine, found: Calibration, syncs: Sequence[Sync], path: Path) -> None:
    """Plot the efficiency by the number of hosts. An existing file is replaced once the new one is complete."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for sync, marker in zip(syncs, "osD^", strict=False):
        shares = [_row(machine, found, count, [sync])[sync.name][1] * 100 for count in HOSTS]
        axes.plot(HOSTS, shares, marker=marker, label=sync.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(HOSTS, [f"{count:,}" for count in HOSTS])
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)
    k = found.layout.ranks_per_host
    axes.set_xlabel(f"hosts, with {k} process{'' if k == 1 else 'es'} each")
    axes.set_ylabel("predicted efficiency, %\n(step without synchronization / step)")
    network = f"{machine.bandwidth * 8 / 1e9:.3g} Gbit/s, {machine.latency * 1e6:.3g} µs a message"
    job = f"{found.job.nbytes / 1e6:.3g} MB of gradients, {found.job.compute * 1e3:.3g} ms of compute"
    axes.set_title(f"{job}\n{network}", fontsize=10)
    axes.legend()
    figure.tight_layout()
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, suffix=path.suffix or ".png", delete=False) as file:
        temporary = Path(file.name)
    try:
        figure.savefig(temporary, dpi=150)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        pyplot.close(figure)


def _row(machine: Machine, found: Calibration, hosts: int, syncs: Sequence[Sync]) -> dict[str, tuple[float, float]]:
    """Seconds per step and efficiency, by the name of the synchronization."""
    layout = replace(found.layout, hosts=hosts)
    return {
        sync.name: (step_time(machine, found.job, layout, sync), efficiency(machine, found.job, layout, sync))
        for sync in syncs
    }


def _gains(machine: Machine, found: Calibration, hosts: int, syncs: Sequence[Sync]) -> dict[str, tuple[float, float]]:
    """How many times as fast as one host, with the batch divided and grown, by the name of the synchronization."""
    divided, grown = (
        [times_as_fast(machine, found.job, found.layout, hosts, sync, grows=grows) for sync in syncs]
        for grows in (False, True)
    )
    return {sync.name: pair for sync, *pair in zip(syncs, divided, grown, strict=True)}


def _finite(value: Any) -> Any:
    """``None`` instead of infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if value == math.inf else value


if __name__ == "__main__":
    main()
