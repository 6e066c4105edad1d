"""``ddprun doctor``: checks all nodes at once, tests the connections between them, and suggests remedies."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ddp_callbacks.launcher.connection import Connection, NodeProblem
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.launch import Launch, Unfit, ask_all
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.same import differences, remedy
from ddp_callbacks.launcher.watch import Watch

LIMIT = 20.0  # seconds in total
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
_Row = tuple[str, str, str, _Level]  # a check, its result, and the remedy if it is not fine, of this level
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


async def _examine(job: Job) -> list[Finding]:
    doctor = Doctor(job)
    await doctor.examine()
    names = [plan.name for plan in job.nodes]
    return sorted(doctor.findings, key=lambda finding: [*names, finding.node].index(finding.node))


class Doctor:
    """Checks the nodes of a job by what ``ddprun`` does, with a probe in place of the script.

    Attributes:
        findings: The results so far.
    """

    def __init__(self, job: Job) -> None:
        once = {"keep_going": False, "max_restarts": 0, "grace": None, "min_nodes": len(job.nodes)}
        self._job = Job(**vars(job) | once | {"heartbeat_timeout": _PATIENCE})
        limit = f"the limit of {LIMIT:g} s for all checks"
        self._launch = Launch(self._job, LIMIT + GRACE, limit, _ANSWER_TIMEOUT)
        self.findings: list[Finding] = []

    async def examine(self) -> None:
        """Make all checks. Takes little more than :data:`LIMIT` seconds."""
        async with self._launch:
            try:
                await self._look(self._launch.nodes)
                if len(self._job.nodes) > 1:
                    await self._look_between()
            except asyncio.CancelledError:
                self._note("", "all-reduce", "failed", f"stopped by {self._launch.stopped_by}")

    def _note(self, node: str, check: str, text: str, remedy: str = "", level: _Level = "red") -> None:
        """Note a result; without a remedy, it is fine."""
        self.findings.append(Finding(node, check, level if remedy else "green", text, remedy))

    async def _look(self, nodes: list[Connection]) -> None:
        """Look at each node, and at the ways from each to all others."""
        problems = await ask_all(self._reach, nodes)
        known = [node for node in nodes if node not in problems]
        self.findings += judge({node.plan: node.place for node in known})
        problems = {}
        if len(known) > 1 or known == nodes:
            try:
                await self._launch.meet(known)
            except Unfit as unfit:
                problems = unfit.problems
        for node in known:
            problem = problems.get(node, "")
            self._note(node.plan.name, "address", f"{node.address} ({node.place.get('interface', '')})")
            if len(nodes) > 1:
                self._note(node.plan.name, "ports", "failed" if problem else "reaches the others", str(problem))

    async def _reach(self, node: Connection) -> None:
        plan, begin = node.plan, time.monotonic()
        try:
            await self._launch.reach(node, "all")
        except NodeProblem as problem:
            check = "python" if node.is_in_place else "folder" if node.greeted else "reached"
            self._note(plan.name, check, "failed", str(problem))
            raise
        by = "ssh" if plan.rsh is None else os.path.basename(plan.rsh[0])
        self._note(plan.name, "reached", "here" if plan.is_here else f"by {by}, {time.monotonic() - begin:.1f} s")
        self._note(plan.name, "folder", plan.cwd)

    async def _look_between(self) -> None:
        if any(finding.level == "red" for finding in self.findings):
            self._note("", "all-reduce", "skipped", "skipped: fix the problems above first")
        else:
            await self._all_reduce()
        plain = "traffic between the nodes is not encrypted; use a network that you trust"
        self._note("", "encryption", "none", plain, "amber")

    async def _all_reduce(self) -> None:
        """Run an all-reduce with one process per node, and note the line that the probe prints."""
        heard, probe = _Heard(), {"training_script": "-P", "training_script_args": ["-m", _PROBE]}
        self._launch.job = Job(**vars(self._job) | probe | {"module": False, "no_python": False})
        self._launch.start(self._launch.nodes)
        with TemporaryDirectory(prefix="ddprun-") as folder:
            with closing(Output(Path(folder) / "logs", frozenset({0}), False, heard)) as output:
                code = await Watch(self._launch, output).run()
            said = [line for line in heard.lines("e") if line.startswith("ddprun: ") and folder not in line]
        if code:  # each node has begun with a line
            why = "; ".join(line.removeprefix("ddprun: ") for line in said[len(self._launch.nodes) :])
            self._note("", "all-reduce", "failed", why or "the probe failed")
        else:
            self._note("", "all-reduce", heard.lines("o")[-1])


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
    unlike = {(plan, name): says for plan, name, says in differences(nodes)}
    usual = dict.fromkeys(_NEEDED, "")
    for facts in reversed(nodes.values()):
        usual |= facts["packages"]
    has_gpus = any(facts["gpus"] for facts in nodes.values())
    found = []
    for plan, facts in nodes.items():
        for check, text, says, level in (*_programs(plan, facts, usual), *_machine(plan, facts, has_gpus)):
            says = unlike.get((plan, check), says)
            found.append(Finding(plan.name, check, level if says else "green", text, says))
    return found


def _programs(plan: NodePlan, facts: Mapping[str, Any], usual: Mapping[str, str]) -> Iterator[_Row]:
    """Rows for what a run needs there. A package on any node, in its ``usual`` version, must be on all."""
    for kind in facts["same"].keys() & {"script", "module"}:
        yield kind, facts["program"], "", "red"
    yield "python", facts["python"], "", "red"
    for name, version in usual.items():
        missing = f"{name} is not installed. {remedy(plan, name, version)}"
        own = facts["packages"].get(name)
        yield name, own or "missing", "" if own else missing, "amber" if name == "numpy" else "red"


def _machine(plan: NodePlan, facts: Mapping[str, Any], has_gpus: bool) -> Iterator[_Row]:
    yield "cores", str(facts["cores"]), "", "red"
    free, shared, gpus = facts["free_memory"], facts["shared_memory"], Counter(facts["gpus"])
    text = f"{free / GIB:.1f} of {facts['memory'] / GIB:.1f} GiB free"
    low = f"less than 1 GiB is free. Check: {plan.shell}ps aux --sort=-rss | head"
    yield "memory", text, "" if free >= _MEMORY else low, "amber"
    yield "/dev/shm", f"{shared / GIB:.1f} GiB free", "" if shared >= _SHARED_MEMORY else _MORE_SHARED, "amber"
    none = f"no GPU found, but others have some. Check: {plan.shell}nvidia-smi"
    text = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or "none"
    yield "GPUs", text, none if has_gpus and not gpus else "", "red"


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
