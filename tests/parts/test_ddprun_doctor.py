"""What ``ddprun doctor`` makes of the facts about the nodes; with real hosts it is in test_hosts_faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kit.paths import ROOT

from ddp_callbacks.launcher.doctor import GIB, Finding, judge
from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.hosts import NodePlan

GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "program": "t.py",
    "same": {"python": "3.11", "torch": "2.13.0", "ddp_callbacks": "1a", "lightning": "2.6.6", "script": "2b"},
    "packages": {"torch": "2.13.0+cpu", "ddp_callbacks": "0.1.0", "lightning": "2.6.6"},
    "cores": 8,
    "memory": 16 * GIB,
    "free_memory": 9 * GIB,
    "shared_memory": 8 * GIB,
    "gpus": [],
}


def findings(**changed: Any) -> list[Finding]:
    """Of three nodes, the third with these facts."""
    facts = {"n1": GOOD, "n2": GOOD, "n3": {**GOOD, **changed}}
    return judge({NodePlan(name, python="/p/python", cwd="/there"): of_node for name, of_node in facts.items()})


def packages(**changed: str | None) -> dict[str, Any]:
    """With these versions; ``None`` for one that is missing."""
    versions = {**GOOD["packages"], **changed}
    known = {name: version for name, version in versions.items() if version is not None}
    return {"packages": known, **unlike(**{name: version or "" for name, version in changed.items()})}


def unlike(**changed: str) -> dict[str, Any]:
    return {"same": {**GOOD["same"], **changed}}


COPY = f"Copy it: rsync -a --mkpath {os.getcwd()}/ n3:/there/"
INSTALL = "Run: ssh n3 /p/python -m pip install"
THIS = f"{ROOT} (the folder of its repository; no package index has it)"
SHARED = "DataLoader workers pass batches through it. Run: mount -o remount,size=8g /dev/shm; for Docker: docker run"
FAULTS: list[tuple[dict[str, Any], str, Any, str, str]] = [
    (
        packages(torch="2.12.0"),
        *("torch", "red", "2.12.0", f"torch 2.12.0, but 2.13.0 on n1. {INSTALL} torch==2.13.0"),
    ),
    (packages(torch=None), "torch", "red", "missing", f"torch is not installed. {INSTALL} torch==2.13.0"),
    (
        packages(ddp_callbacks=None),
        *("ddp_callbacks", "red", "missing", f"ddp_callbacks is not installed. {INSTALL} {THIS}"),
    ),
    (
        {"python": "3.12.1", **unlike(python="3.12")},
        *("python", "red", "3.12.1", "python 3.12, but 3.11 on n1. Choose another with --python"),
    ),
    (unlike(script="2c"), "script", "red", "t.py", f"its script is not that of n1. {COPY}"),
    (
        unlike(ddp_callbacks="1b"),
        *("ddp_callbacks", "red", "0.1.0", f"its ddp_callbacks is not that of n1. {INSTALL} {THIS}"),
    ),
    (
        {"free_memory": GIB // 2},
        *("memory", "amber", "0.5 of 16.0 GiB free"),
        "less than 1 GiB is free. Check: ssh n3 ps aux --sort=-rss | head",
    ),
    ({"shared_memory": 64 << 20}, "/dev/shm", "amber", "0.1 GiB free", f"{SHARED} --shm-size=8g"),
]


@pytest.mark.parametrize(("changed", "check", "level", "text", "remedy"), FAULTS)
def test_each_fault_is_named_with_what_mends_it(
    changed: dict[str, Any], check: str, level: Any, text: str, remedy: str
) -> None:
    bad = [finding for finding in findings(**changed) if finding.level != "green"]
    assert bad == [Finding("n3", check, level, text, remedy)]


def test_without_any_node_that_was_reached_there_is_nothing_to_judge() -> None:
    assert judge({}) == []


def test_a_node_without_gpus_among_others_is_red() -> None:
    """The doctor names a node without GPUs among others."""
    nodes = {NodePlan("a"): {**GOOD, "gpus": ["H100", "H100"]}, NodePlan("b"): GOOD}
    gpus = [finding for finding in judge(nodes) if finding.check == "GPUs"]
    assert [(finding.level, finding.text) for finding in gpus] == [("green", "2 x H100"), ("red", "none")]


GROUP, QUOTA = "proc/self/cgroup", "sys/fs/cgroup"
CONTAINERS: dict[str, tuple[dict[str, str], int | None]] = {
    "no control groups": ({}, None),
    "no limit": ({GROUP: "0::/\n", f"{QUOTA}/cpu.max": "max 100000\n"}, None),
    "docker --cpus 1.5": ({GROUP: "0::/\n", f"{QUOTA}/cpu.max": "150000 100000\n"}, 1),
    "less than one, of a group above": (
        {GROUP: "0::/a/b\n", f"{QUOTA}/a/cpu.max": "50000 100000\n", f"{QUOTA}/a/b/cpu.max": "max 1"},
        1,
    ),
    "two threads of one core": (
        {f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list": "0-1\n" for thread in range(2)},
        1,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_cores_are_those_that_a_container_s_quota_leaves(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads respect a container's CPU quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    files, cores = CONTAINERS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert usable_cores(str(tmp_path)) == (cores or 2)
