"""Measure the time to a given accuracy on 1, 2 and 4 hosts, each with half a core, and draw it.

    OMP_NUM_THREADS=1 python main.py --json gain.json      about 12 minutes on two cores (Linux, root)
    python main.py --draw gain.json                        gain.png, and the tables of the pages

The hosts are made of namespaces (``tests/kit/hosts.py``); a control group gives each half of a core while it trains,
however many hosts there are, so that four of them are four times one. The numbers of hosts come in turns, so that
whatever else the machine does meets all of them. The tables are those of the README and of
docs/explanation/what_do_i_gain.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGES = (HERE / "README.md", ROOT / "docs" / "explanation" / "what_do_i_gain.md")
HOSTS = (1, 2, 4)
LINK, SLOW_LINK = "1gbit", "20mbit"
TARGET = 0.9
EPOCHS = 6
SHARE, PERIOD = 0.5, 4000  # of a core for each host, in periods of so many microseconds
LIMIT = 600.0  # seconds, for one run
Runs = dict[str, dict[str, list[list[list[float]]]]]  # model, and hosts: of each run, of each epoch: seconds, accuracy


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def control_groups(names: list[str]) -> Iterator[Path]:
    """The folder in which each host has a control group with its share of a core."""
    first = Path("/sys/fs/cgroup/cpu")
    root = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"gain-{os.getpid()}"
    groups = [root / name for name in names]
    root.mkdir()
    try:
        if not first.is_dir():  # version 2
            for parent in (root.parent, root):
                (parent / "cgroup.subtree_control").write_text("+cpu")
        (root / ("cpu.shares" if first.is_dir() else "cpu.weight")).write_text("10000")  # other work gets what is left
        for group in groups:
            group.mkdir()
            if first.is_dir():
                (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(int(SHARE * PERIOD)))
            else:
                (group / "cpu.max").write_text(f"{int(SHARE * PERIOD)} {PERIOD}")
        yield root
    finally:
        for group in [*groups, root]:
            _remove(group)


def _remove(group: Path) -> None:
    """Once its last process is gone."""
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)
    group.rmdir()


def run(bed: Any, groups: Path, hosts: int, models: list[str], epochs: int, folder: Path) -> dict[str, Any]:
    """The report of ``train.py`` on so many hosts."""
    report = folder / "report.json"
    names = ",".join(host.name for host in bed.hosts[:hosts])
    script = [str(HERE / "train.py"), "--models", *models, "--epochs", str(epochs), "--report", str(report)]
    flags = ["-H", names, "--nproc-per-node", "1", "--log-dir", str(folder), "-x", "OMP_NUM_THREADS=1"]
    command = [sys.executable, "-m", "ddp_callbacks.launcher", *flags, *script, "--control-groups", str(groups)]
    done = bed.hosts[0].run(*command, cwd=folder, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(report.read_text())
    report.unlink()
    return found


def measure(repetitions: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests"))
    from kit.hosts import HostBed, missing

    if reason := missing():
        raise SystemExit(reason)
    runs: Runs = {}

    def note(model: str, hosts: int, epochs: list[list[float]]) -> None:
        runs.setdefault(model, {}).setdefault(str(hosts), []).append(epochs)
        seconds, accuracy = epochs[-1]
        print(f"{model} on {hosts}: {len(epochs)} epochs in {seconds:.1f} s, accuracy {accuracy:.4f}", flush=True)

    bed = HostBed(max(HOSTS))
    names = [host.name for host in bed.hosts]
    with tempfile.TemporaryDirectory() as folder, control_groups(names) as groups, bed:
        for turn in range(repetitions):
            at = turn % len(HOSTS)
            _set_rates(bed, LINK)
            for hosts in HOSTS[at:] + HOSTS[:at]:
                report = run(bed, groups, hosts, ["convolutions", "perceptron"], EPOCHS, Path(folder))
                for model, epochs in report.items():
                    note(model, hosts, epochs)
            _set_rates(bed, SLOW_LINK)
            note("slow link", 4, run(bed, groups, 4, ["convolutions"], 1, Path(folder))["convolutions"])
    return {"link": LINK, "slow_link": SLOW_LINK, "share": SHARE, "runs": runs}


def _set_rates(bed: Any, rate: str) -> None:
    for host in bed.hosts:
        bed.set_rate(host, rate)


# --- what was found --------------------------------------------------------------------------------------------------


def times_to(runs: list[list[list[float]]], target: float) -> list[float]:
    """Seconds to the end of the first epoch with this accuracy, of each run."""
    return [next(seconds for seconds, accuracy in epochs if accuracy >= target) for epochs in runs]


def epoch_times(runs: list[list[list[float]]]) -> list[float]:
    return [epochs[-1][0] / len(epochs) for epochs in runs]


def tables(found: dict[str, Any]) -> dict[str, str]:
    runs: Runs = found["runs"]
    return {"accuracy": _table_of_accuracy(runs["convolutions"]), "epochs": _table_of_epochs(runs)}


def _table_of_accuracy(runs: dict[str, list[list[list[float]]]]) -> str:
    lines = [
        f"| hosts | epochs to {TARGET:.0%} | seconds to {TARGET:.0%}, median | spread | times as fast "
        "| accuracy at the end |",
        "|---|---|---|---|---|---|",
    ]
    base = statistics.median(times_to(runs["1"], TARGET))
    for hosts, own in runs.items():
        times = times_to(own, TARGET)
        needed = {1 + next(i for i, (_, right) in enumerate(epochs) if right >= TARGET) for epochs in own}
        median = statistics.median(times)
        spread, at_end = f"{min(times):.1f} to {max(times):.1f}", _percents(epochs[-1][1] for epochs in own)
        count = " or ".join(map(str, sorted(needed)))
        lines.append(f"| {hosts} | {count} | **{median:.1f}** | {spread} | **{base / median:.2f}** | {at_end} |")
    return "\n".join(lines)


def _percents(values: Iterator[float]) -> str:
    return " or ".join(sorted({f"{100 * value:.1f} %" for value in values}))


def _table_of_epochs(runs: Runs) -> str:
    rows = [
        ("convolutions, 1 Gbit/s", runs["convolutions"]),
        ("perceptron, 1 Gbit/s", runs["perceptron"]),
        ("convolutions, 20 Mbit/s", {"1": runs["convolutions"]["1"], **runs["slow link"]}),
    ]
    lines = ["| model and link | 1 host | 2 hosts | 4 hosts |", "|---|---|---|---|"]
    for name, by_hosts in rows:
        base = statistics.median(epoch_times(by_hosts["1"]))
        cells = []
        for hosts in map(str, HOSTS):
            times = epoch_times(by_hosts.get(hosts, []))
            median = statistics.median(times) if times else 0.0
            cells.append(f"{median:.2f} s, {base / median:.2f} times as fast" if times else "not measured")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_tables(found: dict[str, Any]) -> None:
    """Between the comments of the pages that name a table."""
    for page in PAGES:
        text = page.read_text()
        for name, table in tables(found).items():
            text = re.sub(
                rf"(<!-- gain\.json: {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{table}\n\n\g<2>", text, flags=re.DOTALL
            )
        page.write_text(text)


def plot(found: dict[str, Any], path: Path) -> None:
    """Accuracy by epoch and by seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = found["runs"]["convolutions"]
    figure, (by_epoch, by_time) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    colors = {"1": "tab:blue", "2": "tab:orange", "4": "tab:green"}
    styles = {"1": ("o", 9), "2": ("s", 6), "4": ("^", 3)}
    for hosts, own in runs.items():
        label = f"{hosts} host{'s' * (hosts != '1')}"
        marker, size = styles[hosts]
        for turn, epochs in enumerate(own):
            first = label if turn == 0 else None
            right = [100 * accuracy for _, accuracy in epochs]
            numbers = range(1, len(epochs) + 1)
            by_epoch.plot(numbers, right, color=colors[hosts], marker=marker, markersize=size, lw=1, label=first)
            by_time.plot([seconds for seconds, _ in epochs], right, color=colors[hosts], lw=1, alpha=0.7)
        median = statistics.median(times_to(own, TARGET))
        by_time.plot(median, 100 * TARGET, "o", color=colors[hosts], label=f"{label}: {median:.0f} s")
    for panel in (by_epoch, by_time):
        panel.axhline(100 * TARGET, color="gray", linestyle="--", linewidth=1)
        panel.grid(alpha=0.25)
        panel.legend(loc="lower right")
    by_epoch.set_xlabel("epoch")
    by_epoch.set_ylabel("accuracy on the test images, %")
    by_epoch.set_title("Accuracy by epoch")
    by_time.set_xlabel("seconds of training")
    by_time.set_title(f"Accuracy by time, and the median time to {TARGET:.0%}")
    by_time.set_xlim(left=0)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="runs on each number of hosts (default 5)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--draw", type=Path, help="measure nothing; make gain.png and the tables from such a file")
    arguments = parser.parse_args()
    if arguments.draw:
        found = json.loads(arguments.draw.read_text())
        plot(found, HERE / "gain.png")
        write_tables(found)
    else:
        start = time.monotonic()
        found = measure(arguments.repetitions)
        if arguments.json:
            arguments.json.write_text(json.dumps(found) + "\n")
        print(f"{(time.monotonic() - start) / 60:.1f} minutes")
    print("\n\n".join(tables(found).values()))


if __name__ == "__main__":
    main()
