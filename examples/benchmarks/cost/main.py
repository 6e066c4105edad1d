"""Check the model of the cost: calibrate once on a small layout, predict larger ones, and measure these.

    python examples/benchmarks/cost/main.py             # 2, 3, 4 ranks; 2, 3, 4 hosts (Linux, root)

Each layout runs ``predict.py``, which measures whole steps. The calibration on two ranks of one host predicts the
steps of 3 and 4 ranks there; the one on two hosts with one rank each, those of 3 and 4 hosts, for each rate of the
links. The hosts are made of namespaces (``tests/kit/hosts.py``) and share this machine's cores, which a prediction is
told: each of H hosts has an H-th of them. Layouts come in turns, so that whatever else the machine does meets all;
measured and predicted times are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost import BF16, EXACT, Calibration, Layout, diloco, efficiency, step_time
from predict import HOSTS, plot

ROOT = Path(__file__).parents[3]
DDPRUN = [sys.executable, "-m", "ddp_callbacks.launcher"]
LIMIT = 900.0  # seconds, for one run
GOAL = 0.15


@dataclass(frozen=True)
class Case:
    """So many hosts with so many ranks on each, on links of a rate; on this machine itself where there is none."""

    layout: Layout
    rate: str | None

    def __str__(self) -> str:
        return f"{self.layout.hosts} hosts, {self.rate}" if self.rate else f"{self.layout.ranks} ranks on one host"

    def cores(self) -> float:
        """That each host has."""
        return len(os.sched_getaffinity(0)) / (self.layout.hosts if self.rate else 1)


def cases(rates: list[str]) -> list[Case]:
    alone = [Case(Layout(1, ranks), None) for ranks in (2, 3, 4)]
    return alone + [Case(Layout(hosts), rate) for rate in rates for hosts in (2, 3, 4)]


def run(case: Case, seconds: float) -> Calibration:
    """Calibrate on these hosts."""
    path = f"PYTHONPATH={os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}"
    flags = ["--no-prefix", "--log-dir", "/tmp/ddprun-logs", "-x", "OMP_NUM_THREADS=1"]
    script = [str(Path(__file__).with_name("predict.py")), "--json", "--seconds", str(seconds)]
    if case.rate is None:
        command = [*DDPRUN, *flags, "--nproc-per-node", str(case.layout.ranks), *script]
    else:
        names = ",".join(f"h{number}:{case.layout.ranks_per_host}" for number in range(1, case.layout.hosts + 1))
        bed = [sys.executable, str(ROOT / "tests" / "kit" / "hosts.py"), "--rate", case.rate, str(case.layout.hosts)]
        command = [*bed, "env", path, *DDPRUN, *flags, "-x", path, "-H", names, *script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True)
    found = json.loads(done.stdout)["calibration"]
    return Calibration.from_json(json.dumps(_with_infinities(found)))


def _with_infinities(found: dict[str, Any]) -> dict[str, Any]:
    machine = {name: math.inf if value is None else value for name, value in found["machine"].items()}
    return {**found, "machine": machine}


def predictions(small: Calibration, of: Case, case: Case) -> dict[str, float]:
    """Seconds per step of ``case``, from what was found on ``of``."""
    assert small.layout.ranks_per_host <= of.cores() and small.layout == of.layout
    machine = replace(small.machine, cores=case.cores())
    return {sync.name: step_time(machine, small.job, case.layout, sync) for sync in (EXACT, BF16)}


def table(found: dict[Case, list[Calibration]]) -> str:
    lines = ["| layout | synchronization | measured, ms | predicted, ms | error |", "|---|---|---|---|---|"]
    first: dict[str | None, Case] = {}
    for case, turns in found.items():
        of = first.setdefault(case.rate, case)
        pairs = list(zip(turns, found[of], strict=False))
        for name in turns[0].steps:
            measured = statistics.median(own.steps[name] for own, _ in pairs)
            predicted = statistics.median(predictions(small, of, case)[name] for _, small in pairs)
            error = predicted / measured - 1
            mark = "" if abs(error) <= GOAL else " (missed)"
            where = f"{case}{' (calibrated here)' if case == of else ''}"
            lines.append(f"| {where} | {name} | {measured * 1e3:.0f} | {predicted * 1e3:.0f} | {error:+.0%}{mark} |")
    return "\n".join(lines)


def growth(found: Calibration) -> str:
    """Efficiency by the number of hosts."""
    syncs = (EXACT, BF16, diloco(50))
    lines = [f"| hosts | {' | '.join(sync.name for sync in syncs)} |", "|---|" + "---|" * len(syncs)]
    for count in HOSTS:
        layout = replace(found.layout, hosts=count)
        shares = [efficiency(found.machine, found.job, layout, sync) for sync in syncs]
        lines.append(f"| {count:,} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="calibrations of each layout (default 3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long each takes (default 30)")
    parser.add_argument("--rates", nargs="*", default=["200mbit", "1gbit"], help="of the links; none: one host only")
    parser.add_argument("--plot", type=Path, help="where to draw it; cost.png, to show it in README.md")
    arguments = parser.parse_args()
    found: dict[Case, list[Calibration]] = {case: [] for case in cases(arguments.rates)}
    for turn in range(arguments.turns):
        for case, turns in found.items():
            turns.append(run(case, arguments.seconds))
            print(f"turn {turn + 1}, {case}: {turns[-1].to_json()}", file=sys.stderr, flush=True)
    print(table(found))
    last = found[cases(arguments.rates)[-3]][-1]  # on the smallest layout of the last rate
    if last.layout.hosts > 1:
        print(f"\n{growth(last)}")
        if arguments.plot:
            plot(last.machine, last, (EXACT, BF16, diloco(50)), arguments.plot)


if __name__ == "__main__":
    main()
