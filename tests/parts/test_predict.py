"""What the benchmark of the cost prints of a calibration: tables, and what it recommends."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import predict
import pytest
from calibration import load_training
from cost import (
    BF16,
    EXACT,
    Calibration,
    FilledBucket,
    Job,
    Layout,
    Machine,
    choose,
    diloco,
    shared,
    step_time,
    times_as_fast,
)
from predict import gain_sentence
from screen import Screen

from ddp_callbacks.errors import ConfigurationError

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


def test_a_model_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model.py").write_text(MODEL)
    assert load_training(f"{tmp_path}/own_model.py:make").loss().item() > 0
    with pytest.raises(ConfigurationError, match=r"must return \(module, loss\) .* it returned 7\."):
        load_training(f"{tmp_path}/own_model.py:nothing")
    with pytest.raises(ConfigurationError, match="--model no_such:make cannot be imported: No module named 'no_such'"):
        load_training("no_such:make")


def row(text: str, *first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(first)] == list(first))


def test_the_tables_hold_what_the_model_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prediction of cost has tables, a plot and JSON."""
    printed = io.StringIO()
    predict.show(TWO_HOSTS, predict.parse(["--plot", str(tmp_path / "plot.png")]), Screen(printed))
    text = printed.getvalue()
    predicted = step_time(TWO_HOSTS.machine, JOB, Layout(2, 4), EXACT)
    assert row(text, "exact") == ["exact", "200.0", f"{predicted * 1e3:.1f}", f"{predicted / 0.2 - 1:+.0%}"]
    machine, here = TWO_HOSTS.machine, Layout(2, 4)
    step = step_time(machine, shared(JOB, 2 / 1024), Layout(1024, 4), EXACT)
    times = [times_as_fast(machine, JOB, here, 1024, EXACT, grows=grows) for grows in (False, True)]
    assert row(text, "1,024") == ["1,024", "4,096", f"{step:.3g}", *(f"{each:.2f}" for each in times)]
    assert "recommended" not in text and "DiLoCo" not in text
    assert "Assumptions: equal hosts" in text and "Assumed: " not in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    predict.show(TWO_HOSTS, predict.parse(["--json"]), Screen(printed))
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["machine"]["memory_bandwidth"] is None
    assert found["predicted"][1]["exact"][0] == predicted


def test_a_divided_batch_gains_less_than_one_that_grows() -> None:
    machine = Machine(0.0, 2.1e9)  # the gradients take 10 ms of a host's link for each host, and twice that at most
    alone = step_time(machine, shared(JOB, 2), Layout(1), EXACT)
    assert alone == pytest.approx(0.19)  # of which 10 ms follow backward
    divided, grown = (times_as_fast(machine, JOB, Layout(2), 8, EXACT, grows=grows) for grows in (False, True))
    assert 1 < divided < 6 < grown < 8
    assert divided == alone / step_time(machine, shared(JOB, 0.25), Layout(8), EXACT)
    said = gain_sentence(machine, JOB, Layout(2))
    assert said.startswith("With the batch divided, 32 hosts are 5.6 times as fast as one; twice as many are not 1.10")
    slow = gain_sentence(Machine(0.0, 1e7), JOB, Layout(2))
    assert slow.startswith("With the batch divided, no number of hosts is worth it: two are 0.")


def test_a_network_that_is_not_there_is_assumed_and_said() -> None:
    """It says when it assumes a network."""
    alone = replace(TWO_HOSTS, layout=Layout(1, 4), machine=Machine(0.0, math.inf))
    machine, remarks = predict.with_network(alone, None, None)
    assert (machine.latency, machine.bandwidth) == (predict.ASSUMED_LATENCY, predict.ASSUMED_BANDWIDTH)
    assert "the network was not measured. Assumed: 10 Gbit/s and 50 µs." in remarks[0]
    given = predict.parse(["--latency", "5", "--bandwidth", "100"])
    named = predict.with_network(alone, given.latency, given.bandwidth)
    assert named == (Machine(pytest.approx(5e-6), 12.5e9), [])
    assert predict.with_network(TWO_HOSTS, None, 1.25e8) == (Machine(1e-4, 1.25e8), [])


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
    assert predict.sentences(Machine(1e-6, bandwidth), JOB, Layout(2), (EXACT, BF16, diloco(50)))[0] == first


def test_where_the_choice_changes_is_said() -> None:
    """It chooses the mildest fast way."""
    machine, syncs = Machine(2e-4, 1e10), (EXACT, BF16, diloco(50))
    first, *others = predict.sentences(machine, JOB, Layout(2), syncs)
    # 2 ms for 20 MB, and 6 messages.
    assert first == "On 2 hosts, exact is recommended (97%): no other way shortens a step by more than 3%."
    count, name = next(
        (count, sync.name) for count in predict.HOSTS if (sync := choose(machine, JOB, Layout(count), syncs)) != EXACT
    )
    assert others[0].startswith(f"From {count:,} hosts on, {name} (")
