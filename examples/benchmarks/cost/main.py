"""Check ``ddprun predict``: what it says on two hosts about four, and what these take.

    OMP_NUM_THREADS=1 python examples/benchmarks/cost/main.py --json found.json     20 minutes (two cores, Linux, root)
    python examples/benchmarks/cost/main.py --draw found.json --plot cost.svg       the table; a picture of one case

The hosts, each with half a core, and the script are those of the benchmark ``gain``.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from ddp_callbacks.reporting.plot import draw

HERE = Path(__file__).parent
GAIN = HERE.parent / "gain"
CASES = (("convolutions", "1gbit"), ("perceptron", "1gbit"), ("convolutions", "20mbit"))
FEW, MANY = 2, 4
LIMIT = 600.0  # seconds, for one prediction


def predict(bed: Any, model: str, hosts: int, seconds: float, groups: Path, folder: Path) -> dict[str, Any]:
    """What ``ddprun predict`` says on so many hosts."""
    names = ",".join(host.name for host in bed.hosts[:hosts])
    flags = ["-H", names, "--nproc-per-node", "1", "--json", "--seconds", str(seconds), "--log-dir", str(folder)]
    script = [str(GAIN / "train.py"), "--models", model, "--epochs", "1000", "--control-groups", str(groups)]
    command = [sys.executable, "-m", "ddp_callbacks.launcher", "predict", *flags, "-x", "OMP_NUM_THREADS=1", *script]
    done = bed.hosts[0].run(*command, cwd=folder, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(seconds: float) -> dict[str, Any]:
    """Of each case: what two hosts predict, with the run on four among what was measured."""
    sys.path.insert(0, str(HERE.parents[2] / "tests"))
    from kit.hosts import HostBed, missing

    if reason := missing():
        raise SystemExit(reason)
    control_groups, found = runpy.run_path(str(GAIN / "main.py"))["control_groups"], {}
    bed = HostBed(MANY)
    names = [host.name for host in bed.hosts]
    with tempfile.TemporaryDirectory() as folder, control_groups(names) as groups, bed:
        for model, rate in CASES:
            for host in bed.hosts:
                bed.set_rate(host, rate)
            few, many = (predict(bed, model, hosts, seconds, groups, Path(folder)) for hosts in (FEW, MANY))
            found[f"{model}, {rate}"] = few | {"measured": [*few["measured"], many["measured"][1]]}
            print(f"{model}, {rate}: {many['measured']}", file=sys.stderr, flush=True)
    for each in found.values():
        each["measured"][2]["times"] = each["measured"][0]["seconds"] / each["measured"][2]["seconds"]
    return found


def table(found: dict[str, Any]) -> str:
    lines = ["| model and link | 1 host | 2 hosts | 4 hosts | predicted on 2 | error |", "|---|---|---|---|---|---|"]
    for name, case in found.items():
        measured = [run["seconds"] * 1e3 for run in case["measured"]]
        predicted = next(row for row in case["predicted"] if row["machines"] == MANY)["ways"]["exact"]["seconds"] * 1e3
        cells = " | ".join(f"{each:.0f} ms" for each in (*measured, predicted))
        lines.append(f"| {name} | {cells} | {predicted / measured[-1] - 1:+.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each run trains (default 15)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--draw", type=Path, help="measure nothing; read what was")
    parser.add_argument("--plot", type=Path, help="where to draw the first case, as SVG")
    arguments = parser.parse_args()
    found = json.loads(arguments.draw.read_text()) if arguments.draw else measure(arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if arguments.plot:
        arguments.plot.write_text(draw(next(iter(found.values())), "Times as fast by machines"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
