"""``ddprun bench``: its flags, and what it prints of a calibration."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.bench import command
from ddp_callbacks.launcher.bench.calibration import load_training
from ddp_callbacks.launcher.bench.command import Bench, sentences, with_network
from ddp_callbacks.launcher.bench.cost import (
    BF16,
    EXACT,
    MARK,
    Calibration,
    FilledBucket,
    Job,
    Layout,
    Machine,
    choose,
    diloco,
    step_time,
)
from ddp_callbacks.launcher.options import BenchOptions, parse_bench_options
from ddp_callbacks.launcher.output import Terminal
from ddp_callbacks.launcher.screen import Screen

JOB = Job(0.1, (FilledBucket(1e6, 0.05), FilledBucket(2e7, 0.09)), 0.01)
TWO_HOSTS = Calibration(Layout(2, 4), Machine(1e-4, 1.25e9), JOB, {"exact": 0.2, "bf16": 0.16}, ())
MODEL = """
import torch

def make():
    module = torch.nn.Linear(300, 1000)
    inputs = torch.randn(4, 300)
    return module, lambda: module(inputs).square().mean()

def nothing():
    return 7
"""


def options(*argv: str) -> BenchOptions:
    return parse_bench_options(argv, {})


# --- flags ------------------------------------------------------------------------------------------------------------


def test_this_machine_alone_gets_two_processes() -> None:
    found = [options(*argv).run.torchrun["nproc_per_node"] for argv in ([], ["--nproc-per-node", "3"], ["-H", "a,b"])]
    assert found == ["2", "3", ""]


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"--plot: cannot write to /no/such\. Name another place"):
        Bench(options("--plot", "/no/such/plot.png"), 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="matplotlib is not installed here: python -m pip install matplotlib"):
        Bench(options("--plot", "plot.png"), 2)


def test_a_model_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddprun bench` refuses wrong models."""
    (tmp_path / "own_model.py").write_text(MODEL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_training(f"{tmp_path}/own_model.py:make").loss().item() > 0
    with pytest.raises(ConfigurationError, match=r"must return \(module, loss\) .* it returned 7\."):
        load_training(f"{tmp_path}/own_model.py:nothing")
    with pytest.raises(ConfigurationError, match="--model no_such:make cannot be imported: No module named 'no_such'"):
        load_training("no_such:make")


# --- what is printed --------------------------------------------------------------------------------------------------


def shown(found: Calibration, folder: Path, *argv: str) -> str:
    """What is printed of a calibration that rank 0 has told in two pieces, after a line of its own."""
    with Bench(options(*argv), 2) as under_test:
        output = under_test.output(folder / "logs", Terminal(1, 2, lambda: True))
        text = f"hello\n{MARK}{json.dumps({'calibration': found.to_json()})}\n".encode()
        output.write("a", 0, "o", text[:40])
        output.write("a", 0, "o", text[40:])
        output.close()
    printed = io.StringIO()
    under_test.show(Screen(printed))
    assert "\x1b" not in printed.getvalue()
    return printed.getvalue()


def row(text: str, *first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(first)] == list(first))


def test_the_tables_hold_what_the_model_says(tmp_path: Path) -> None:
    """It prints tables, a plot and JSON."""
    text = shown(TWO_HOSTS, tmp_path, "-H", "a:4,b:4", "--plot", str(tmp_path / "plot.png"))
    predicted = step_time(TWO_HOSTS.machine, JOB, Layout(2, 4), EXACT)
    assert row(text, "exact") == ["exact", "200.0", f"{predicted * 1e3:.1f}", f"{predicted / 0.2 - 1:+.0%}"]
    times = [step_time(TWO_HOSTS.machine, JOB, Layout(1024, 4), sync) for sync in (EXACT, BF16, diloco(50))]
    cells = [cell for time in times for cell in (f"{time:.3g}", f"{0.1 / time:.0%}")]
    assert row(text, "1,024") == ["1,024", "4,096", *cells]
    assert "Assumptions: equal hosts" in text and "Assumed: " not in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "plot.png"]


def test_json_holds_no_infinity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(TWO_HOSTS, tmp_path, "-H", "a:4,b:4", "--json")
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["machine"]["memory_bandwidth"] is None
    assert found["predicted"][1]["exact"][0] == step_time(TWO_HOSTS.machine, JOB, Layout(2, 4), EXACT)


def test_a_network_that_is_not_there_is_assumed_and_said() -> None:
    """It says when it assumes a network."""
    alone = replace(TWO_HOSTS, layout=Layout(1, 4), machine=Machine(0.0, math.inf))
    machine, remarks = with_network(alone, options())
    assert (machine.latency, machine.bandwidth) == (command.ASSUMED_LATENCY, command.ASSUMED_BANDWIDTH)
    assert "the network was not measured. Assumed: 10 Gbit/s and 50 µs." in remarks[0]
    named = with_network(alone, options("--latency", "5", "--bandwidth", "100"))
    assert named == (Machine(pytest.approx(5e-6), 12.5e9), [])
    assert with_network(TWO_HOSTS, options("--bandwidth", "1")) == (Machine(1e-4, 1.25e8), [])


@pytest.mark.parametrize(
    ("bandwidth", "first"),
    [
        (1e12, "On 2 hosts, exact is recommended (100%): no other way is faster."),
        # Exact: 2.15 s on the wire and 0.01 s before and after. In half precision half of that. Else 0.1 + 2.1 / 50.
        (1e7, "On 2 hosts, DiLoCo(50) is recommended (70%): a step takes 0.07 of the time of exact."),
        # The second bucket takes 20 ms after backward, or 10: steps of 120 and 110 ms. DiLoCo would take 100.
        (1e9, "On 2 hosts, bf16 is recommended (91%): a step takes 0.92 of the time of exact."),
    ],
)
def test_what_it_would_choose_and_why(bandwidth: float, first: str) -> None:
    assert sentences(Machine(1e-6, bandwidth), JOB, Layout(2), (EXACT, BF16, diloco(50)))[0] == first


def test_where_the_choice_changes_is_said() -> None:
    """It chooses the mildest fast way."""
    machine, syncs = Machine(2e-4, 1e10), (EXACT, BF16, diloco(50))
    first, *others = sentences(machine, JOB, Layout(2), syncs)
    # 2 ms for 20 MB, and 6 messages.
    assert first == "On 2 hosts, exact is recommended (97%): no other way shortens a step by more than 3%."
    count, name = next(
        (count, sync.name) for count in command.HOSTS if (sync := choose(machine, JOB, Layout(count), syncs)) != EXACT
    )
    assert others[0].startswith(f"From {count:,} hosts on, {name} (")
