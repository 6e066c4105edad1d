"""``ddprun doctor``: checks all nodes at once, tests the connections between them, and suggests remedies."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.connection import Connection, NodeProblem
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.launch import (
    CannotStart,
    Launch,
    ask_all,
    refuse_interface,
    refuse_machines_named_twice,
    refuse_number_of_processes,
)
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.same import differences, remedy
from ddp_callbacks.launcher.streams import Output, Terminal
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.reporting.requests import new_folder

LIMIT = 20.0  # seconds in total
_SETUP = 120.0  # seconds more if there is a --setup
_PATIENCE = 3.5  # seconds without a heartbeat until a connection counts as lost
_ANSWER_TIMEOUT = 10.0  # seconds; a node that takes longer is not asked again
_PROBE = "ddp_callbacks.launcher.probe"
GIB = 1 << 30
_MEMORY = 1 * GIB  # free memory
_SHARED_MEMORY = GIB // 4  # free; a container has 64 MB by default
_MORE_SHARED = (
    "DataLoader workers pass batches through it. Run: mount -o remount,size=8g /dev/shm; for Docker: docker run "
    "--shm-size=8g"
)
_NEEDED = ("torch", "ddp_callbacks")
_Level = Literal["green", "amber", "red"]
_MARKS = {"green": "", "amber": "! ", "red": "FAIL "}


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        node: The node's name; empty for a check of all nodes together.
        check: The checked property.
        level: ``red``: a run would fail; ``amber``: a run may behave unexpectedly; ``green``: fine.
        text: The finding, in a few words.
        remedy: For red and amber: a full sentence with the command to type.
    """

    node: str
    check: str
    level: _Level
    text: str
    remedy: str = ""


def examine(job: Job) -> int:
    """Check the job's nodes and print the findings; return the exit code, 0 if a run would work."""
    findings = asyncio.run(_examine(job))
    works = all(finding.level != "red" for finding in findings)
    if job.json:
        print(json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\n".join(lines(findings)), "A run would work." if works else "A run would not work.", sep="\n")
    return 0 if works else 1


def _found(node: str, check: str, text: str, remedy: str = "", level: _Level = "red") -> Finding:
    """Return the result of a check, which is green without a remedy."""
    return Finding(node, check, level if remedy else "green", text, remedy)


async def _examine(job: Job) -> list[Finding]:
    """Do what ``ddprun`` does, with a probe in place of the script; return all findings, node by node.

    Takes little more than :data:`LIMIT` seconds without ``--setup``.
    """
    once = {"keep_going": False, "max_restarts": 0, "grace": None, "min_nodes": len(job.nodes)}
    seconds = LIMIT + (_SETUP if job.setup else 0.0)
    limit = f"the limit of {seconds:g} s for all checks"
    launch = Launch(job.changed(**once, heartbeat_timeout=_PATIENCE), seconds + GRACE, limit, _ANSWER_TIMEOUT)
    findings = _refused("", "logs", partial(_try_logs, job.log_dir))
    async with launch:
        try:
            await _look(launch, findings)
            if len(job.nodes) > 1:
                is_fine = all(finding.level != "red" for finding in findings)
                skipped = _found("", "all-reduce", "skipped", "skipped: fix the problems above first", "amber")
                findings.append(await _all_reduce(launch) if is_fine else skipped)
                plain = "traffic between the nodes is not encrypted; use a network that you trust"
                findings.append(_found("", "encryption", "none", plain, "amber"))
        except asyncio.CancelledError:
            findings.append(_found("", "all-reduce", "failed", f"stopped by {launch.stopped_by}"))
    names = [plan.name for plan in job.nodes]
    return sorted(findings, key=lambda finding: [*names, finding.node].index(finding.node))


def _try_logs(log_dir: str) -> None:
    """Raise ConfigurationError if logs cannot be written; leave nothing behind."""
    is_there = os.path.exists(log_dir)
    folder = new_folder(log_dir)
    rmtree(folder)
    if not is_there:
        folder.parent.rmdir()


async def _look(launch: Launch, findings: list[Finding]) -> None:
    """Look at each node, and at the ways from each to all others."""

    async def reach(node: Connection) -> None:
        plan, begin = node.plan, time.monotonic()
        try:
            await launch.reach(node, "all")
        except NodeProblem as problem:
            check = "python" if node.is_in_place else "folder" if node.greeted else "reached"
            findings.append(_found(plan.name, check, "failed", str(problem)))
            raise
        by = "ssh" if plan.rsh is None else os.path.basename(plan.rsh[0])
        way = "here" if plan.is_here else f"by {by}, {time.monotonic() - begin:.1f} s"
        findings.extend((_found(plan.name, "reached", way), _found(plan.name, "folder", plan.cwd)))

    unknown = await ask_all(reach, launch.nodes)
    known = [node for node in launch.nodes if node not in unknown]
    findings += judge({node.plan: node.place for node in known})
    for node in known:
        findings += _refused(node.plan.name, "processes", partial(refuse_number_of_processes, node))
        findings += _refused(node.plan.name, "interface", partial(refuse_interface, launch.job, node))
        node.place["processes"] = 1  # of the probe
    findings += _refused("", "machines", partial(refuse_machines_named_twice, known))
    if len(known) > 1 or not unknown:
        problems = await launch.try_to_meet(known)
        for node in known:
            name, says = node.plan.name, str(problems.get(node, ""))
            findings.append(_found(name, "address", f"{node.address} ({node.place.get('interface', '')})"))
            if len(known) > 1:
                findings.append(_found(name, "ports", "failed" if says else "reaches the others", says))


def _refused(node: str, check: str, start: Callable[[], None]) -> list[Finding]:
    """Return what a start would refuse."""
    try:
        start()
    except (ConfigurationError, CannotStart, NodeProblem) as problem:
        return [_found(node, check, "failed", str(problem).rstrip("."))]
    return []


async def _all_reduce(launch: Launch) -> Finding:
    """Run an all-reduce with one process per node; return the line that the probe prints."""
    heard, probe = _Heard(), {"training_script": "-P", "training_script_args": ["-m", _PROBE]}
    launch.job = launch.job.changed(**probe, module=False, no_python=False)
    launch.start(launch.nodes)
    with TemporaryDirectory(prefix="ddprun-") as folder:
        with closing(Output(Path(folder) / "logs", frozenset({0}), False, heard)) as output:
            code = await Watch(launch, output).run()
        said = [line for line in heard.lines("e") if line.startswith("ddprun: ") and folder not in line]
    if code == 0:
        return _found("", "all-reduce", heard.lines("o")[-1])
    why = "; ".join(line.removeprefix("ddprun: ") for line in said[len(launch.nodes) :])  # each node began with a line
    return _found("", "all-reduce", "failed", why or "the probe failed")


class _Heard(Terminal):
    """Keeps what would go to the terminal."""

    def __init__(self) -> None:
        self._said = {"o": b"", "e": b""}

    def write(self, stream: str, data: bytes) -> None:
        self._said[stream] += data

    def lines(self, stream: str) -> list[str]:
        return self._said[stream].decode(errors="replace").splitlines()


# --- findings from the facts ------------------------------------------------------------------------------------------


def judge(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> list[Finding]:
    """Return all findings about nodes from their facts, see :mod:`ddp_callbacks.launcher.facts`."""
    unlike = {(plan.name, name): says for plan, name, says in differences(nodes)}
    usual = dict.fromkeys(_NEEDED, "")
    for facts in reversed(list(nodes.values())):
        usual |= facts["packages"]
    has_gpus = any(facts["gpus"] for facts in nodes.values())
    found = []
    for plan, facts in nodes.items():
        for each in (*_programs(plan, facts, usual), *_machine(plan, facts, has_gpus)):
            says = unlike.get((each.node, each.check))
            found.append(_found(each.node, each.check, each.text, says) if says else each)
    return found


def _programs(plan: NodePlan, facts: Mapping[str, Any], usual: Mapping[str, str]) -> Iterator[Finding]:
    """What a run needs there. A package on any node, in its ``usual`` version, must be on all."""
    for kind in facts["same"].keys() & {"script", "module"}:
        yield _found(plan.name, kind, facts["program"])
    yield _found(plan.name, "python", facts["python"])
    for name, version in usual.items():
        own, missing = facts["packages"].get(name), f"{name} is not installed. {remedy(plan, name, version)}"
        level: _Level = "amber" if name == "numpy" else "red"
        yield _found(plan.name, name, own or "missing", "" if own else missing, level)


def _machine(plan: NodePlan, facts: Mapping[str, Any], has_gpus: bool) -> Iterator[Finding]:
    free, shared, gpus = facts["free_memory"], facts["shared_memory"], Counter(facts["gpus"])
    yield _found(plan.name, "cores", str(facts["cores"]))
    text = f"{free / GIB:.1f} of {facts['memory'] / GIB:.1f} GiB free"
    low = f"less than 1 GiB is free. Check: {plan.shell}ps aux --sort=-rss | head"
    yield _found(plan.name, "memory", text, "" if free >= _MEMORY else low, "amber")
    text = f"{shared / GIB:.1f} GiB free"
    yield _found(plan.name, "/dev/shm", text, "" if shared >= _SHARED_MEMORY else _MORE_SHARED, "amber")
    none = f"no GPU found, but others have some. Check: {plan.shell}nvidia-smi"
    text = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or "none"
    yield _found(plan.name, "GPUs", text, none if has_gpus and not gpus else "")


# --- the output -------------------------------------------------------------------------------------------------------


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for each check, with the nodes if they differ; then a line for each problem to fix."""
    checks: dict[str, dict[str, list[str]]] = {}
    for finding in findings:
        nodes = checks.setdefault(finding.check, {})
        nodes.setdefault(f"{_MARKS[finding.level]}{finding.text}", []).append(finding.node)
    said = []
    for check, nodes in checks.items():
        each = [f"{text} ({', '.join(names)})" if len(nodes) > 1 else text for text, names in nodes.items()]
        said.append(f"{check:<18} {'; '.join(each)}")
    for level in ("red", "amber"):
        for finding in (finding for finding in findings if finding.level == level):
            where = ", ".join(filter(None, (finding.node, finding.check)))
            said.append(f"{_MARKS[level]}{where}: {finding.remedy}")
    return [line.encode(errors="replace").decode() for line in said]  # a path may hold any bytes
