"""Limit the cost of each test, by its tier, and of a whole tier. ``tests/budget.toml`` has the numbers.

``--tier`` selects tests: ``parts`` start no process; ``test`` prove the promises here; ``check`` adds real
interpreters, hosts, MPI and pages; ``night`` adds repetitions, GPUs and applications. Each tier contains those before.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.costs import costs as _costs
from kit.costs import count
from kit.paths import TESTS

TIERS = ("parts", "test", "check", "night")
CHECK = {"cold", "hosts", "mpi", "pages", "slow", "wide"}
NIGHT = {"apps", "cuda", "night"}
NUMBERS: dict[str, Any] = tomllib.loads((TESTS / "budget.toml").read_text())
FREE_OF_TORCH = ("-S", "-I", "from kit import")  # such commands don't import torch, or once for all tests

_totals = Counter[str]()  # costs of all tests
_seconds = Counter[str]()  # by test
_calibrations: list[float] = []  # of this process; on the controller of pytest-xdist those of all workers
_CALIBRATE_EVERY = 20.0  # seconds: CPU time grows with what else the cores do, which changes during a run
_begin = time.monotonic()


def tier_of(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    if marks & (NIGHT | CHECK) and "smoke" not in marks:
        return "night" if marks & NIGHT else "check"
    return "parts" if item.path.is_relative_to(TESTS / "parts") else "test"


def exceeded(tier: str, costs: Mapping[str, int]) -> list[str]:
    """Return the costs of one test, started or declared, that exceed the limits of its tier."""
    limits = NUMBERS["each"][tier]
    if costs.get("many_ranks"):
        limits = limits | {"ranks at once": NUMBERS["each"]["check"]["ranks at once"]}
    return [f"{costs[kind]} {kind} (at most {most})" for kind, most in limits.items() if costs.get(kind, 0) > most]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier and of those before it")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_count_interpreters)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tier:
        tiers = TIERS[: TIERS.index(config.option.tier) + 1]
        config.hook.pytest_deselected(items=[item for item in items if tier_of(item) not in tiers])
        items[:] = [item for item in items if tier_of(item) in tiers]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    result = yield
    marks = {mark.name: mark for mark in item.iter_markers()}
    declared = {"waits": marks["waits"].args[0] if "waits" in marks else 0, "many_ranks": int("many_ranks" in marks)}
    costs = {**_costs, **declared}
    _costs.clear()
    if hasattr(item.config, "workeroutput") and time.monotonic() - _begin > _CALIBRATE_EVERY * len(_calibrations):
        _calibrations.append(calibrate())
    item.user_properties.append(("costs", costs))
    if over := exceeded("smoke" if "smoke" in marks else tier_of(item), costs):
        pytest.fail(f"over the budget of its tier, {tier_of(item)}: {', '.join(over)}; see tests/budget.toml", False)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    if report.when == "teardown":
        _totals.update(dict[str, Any](report.user_properties).get("costs", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {})
    _totals["cpu"] += found.get("cpu", 0)
    _calibrations.extend(found.get("calibrations", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # on a worker of pytest-xdist, whose ranks and commands have ended
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        session.config.workeroutput["cpu"] = round(sum(usage.ru_utime + usage.ru_stime for usage in used))
        session.config.workeroutput["calibrations"] = _calibrations
    elif _is_whole(session.config):
        taken = statistics.fmean(_calibrations or [calibrate()])
        _totals["cpu"] = round(_totals["cpu"] / taken * NUMBERS["calibration"])
        if _over(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    config, write = terminalreporter.config, terminalreporter.write_line
    for name, seconds in _seconds.most_common(10) if config.option.tier else ():
        write(f"{seconds:6.1f} s  {name}")
    if _is_whole(config):
        allowed = NUMBERS["total"][config.option.tier]
        spent = ", ".join(f"{_totals[kind]} of {most} {kind}" for kind, most in allowed.items())
        write(f"Budget of {config.option.tier}: {spent} (CPU: seconds where the calibration takes as long as noted)")
        if _totals["cpu"] > allowed["cpu"]:
            write("WARNING: the tests take more CPU time than their budget")
        for kind in _over(config):
            write(f"ERROR: over the budget: {kind}. Take away, merge, or raise it in tests/budget.toml")


def _is_whole(config: pytest.Config) -> bool:
    """Whether a whole tier runs: only then are the totals those of the tier."""
    is_all = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return bool(config.option.tier and is_all and not config.option.keyword and not hasattr(config, "workerinput"))


def _over(config: pytest.Config) -> list[str]:
    allowed = NUMBERS["total"][config.option.tier]
    return [kind for kind, most in allowed.items() if _totals[kind] > most * (1.25 if kind == "cpu" else 1)]


def calibrate() -> float:
    """Return the seconds of CPU time that 200 steps of a small MLP take here and now."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10))
        x, begin = torch.randn(128, 256), time.process_time()
        for _ in range(200):
            layers(x).square().mean().backward()
        return time.process_time() - begin


def _count_interpreters(event: str, args: tuple[Any, ...]) -> None:
    """Count Python started by its path as cold; the warm server's is found on the PATH, see kit.commands."""
    if event == "subprocess.Popen" and not isinstance(args[1], str):
        program, words = Path(os.fspath(args[0])), " ".join(map(str, args[1]))
        is_python = program.is_absolute() and program.name.startswith("python")
        if is_python and not any(free in words for free in FREE_OF_TORCH):
            count("cold")
