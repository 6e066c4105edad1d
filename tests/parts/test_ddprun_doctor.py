"""What ``ddprun doctor`` makes of the facts about the nodes; with real hosts it is in test_hosts_faults."""

from __future__ import annotations

import io
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from kit.paths import ROOT

from ddp_callbacks.launcher.diagnosis import GIB, Facts, Finding, judge, judge_clock
from ddp_callbacks.launcher.doctor import show
from ddp_callbacks.launcher.facts import facts, usable_cores
from ddp_callbacks.launcher.screen import Screen

GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0+cpu", "ddp_callbacks": "0.1.0", "lightning": "2.6.6"},
    "cores": 8,
    "memory": 16 * GIB,
    "free_memory": 9 * GIB,
    "shared_memory": 8 * GIB,
    "gpus": [],
}


def findings(**changed: Any) -> list[Finding]:
    """Of three nodes, the third with these facts."""
    nodes = {f"n{i}": Facts(f"ssh n{i} ", "/p/python", GOOD) for i in (1, 2)}
    nodes["n3"] = Facts("ssh n3 ", "/p/python", {**GOOD, **changed})
    return judge(nodes)


def packages(**changed: str | None) -> dict[str, Any]:
    versions = {**GOOD["packages"], **changed}
    return {"packages": {name: version for name, version in versions.items() if version is not None}}


def test_equal_nodes_are_green() -> None:
    found = findings()
    assert {finding.level for finding in found} == {"green"}
    assert {finding.check for finding in found} == {
        "python", "torch", "ddp_callbacks", "lightning", "cores", "memory", "/dev/shm", "GPUs",
    }  # fmt: skip


INSTALL = "Run: ssh n3 /p/python -m pip install"
NEEDS_2_13 = f"{INSTALL} torch==2.13.0"
THIS = f"{ROOT} (the folder of its repository; no package index has it)"
SHARED = "DataLoader workers pass batches through it. Run: mount -o remount,size=8g /dev/shm; for Docker: docker run"


@pytest.mark.parametrize(
    ("changed", "check", "level", "text", "remedy"),
    [
        (
            packages(torch="2.12.0"),
            "torch",
            "red",
            "2.12.0",
            f"torch 2.12.0, but 2.13.0+cpu on the others. {NEEDS_2_13}",
        ),
        (packages(torch=None), "torch", "red", "missing", f"torch is not installed. {NEEDS_2_13}"),
        (
            packages(ddp_callbacks=None),
            "ddp_callbacks",
            "red",
            "missing",
            f"ddp_callbacks is not installed. {INSTALL} {THIS}",
        ),
        (
            packages(lightning="2.6.5"),
            "lightning",
            "red",
            "2.6.5",
            f"lightning 2.6.5, but 2.6.6 on the others. {INSTALL} lightning==2.6.6",
        ),
        (
            {"python": "3.12.1"},
            "python",
            "amber",
            "3.12.1",
            "Python 3.12.1, but 3.11 on the others. Choose another with --python",
        ),
        (
            {"free_memory": GIB // 2},
            "memory",
            "amber",
            "0.5 of 16.0 GiB free",
            "less than 1 GiB is free. Check: ssh n3 ps aux --sort=-rss | head",
        ),
        ({"shared_memory": 64 << 20}, "/dev/shm", "amber", "64 MiB free", f"{SHARED} --shm-size=8g"),
    ],
)
def test_each_fault_is_named_with_what_mends_it(
    changed: dict[str, Any], check: str, level: Any, text: str, remedy: str
) -> None:
    bad = [finding for finding in findings(**changed) if finding.level != "green"]
    assert bad == [Finding("n3", check, level, text, remedy)]


def test_a_node_without_gpus_among_others_is_red() -> None:
    """The doctor names a node without GPUs among others."""
    nodes = {"a": Facts("", "p", {**GOOD, "gpus": ["H100", "H100"]}), "b": Facts("ssh b ", "p", GOOD)}
    gpus = [finding for finding in judge(nodes) if finding.check == "GPUs"]
    assert [(finding.level, finding.text) for finding in gpus] == [("green", "2 x H100"), ("red", "none")]


def test_a_clock_is_judged_with_the_uncertainty_of_the_look() -> None:
    """It allows for uncertainty when it compares clocks."""
    assert judge_clock("a", 0.9, 0.0).level == "green"
    assert judge_clock("a", -4.0, 3.5).level == "green"
    assert judge_clock("a", -90.0, 0.2) == Finding(
        "a", "clock", "amber", "-90.0 s", "its clock is 90 s behind. Run: timedatectl set-ntp true"
    )


def test_the_facts_of_this_machine() -> None:
    found = facts()
    assert found["packages"]["torch"] == metadata.version("torch")  # without +cu130, where PyPI's torch has it
    assert found["python"] == sys.version.split()[0]
    assert found["memory"] > found["free_memory"] > 0
    assert found["interfaces"]["127.0.0.1"] == "lo"


def test_the_table_is_plain_text_where_no_terminal_is() -> None:
    out = io.StringIO()
    found = [
        *findings(**packages(torch="2.12.0")),
        Finding("", "all-reduce", "red", "not tried", "mend the above"),
    ]
    show(["n1", "n2", "n3"], found, Screen(out))
    text = out.getvalue()
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["torch"])
    assert row.split() == ["torch", "2.13.0+cpu", "2.13.0+cpu", "FAIL", "2.12.0"]
    assert (
        "FAIL n3, torch: torch 2.12.0, but 2.13.0+cpu on the others. "
        "Run: ssh n3 /p/python -m pip install torch==2.13.0\n" in text
    )
    assert text.endswith("FAIL all-reduce: mend the above\nA run would not work.\n")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, None, id="no limit"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="max"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1, id="docker --cpus 1.5"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 1",
            },
            1,
            id="less than one, of a group above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
            id="version 1",
        ),
        pytest.param({}, None, id="no control groups"),
    ],
)
def test_cores_are_those_that_a_container_s_quota_leaves(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    """Threads respect a container's CPU quota."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(str(tmp_path)) == (cores or len(os.sched_getaffinity(0)))
