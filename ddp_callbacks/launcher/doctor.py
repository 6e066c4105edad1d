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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ddp_callbacks.launcher.connection import Connection, NodeProblem
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.launch import Launch, Unfit, ask_all
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.output import Output, Terminal
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.same import differences, how_to_copy
from ddp_callbacks.launcher.watch import Watch
from ddp_callbacks.versions import how_to_install_this

LIMIT = 20.0  # seconds in total
_PATIENCE = 3.5  # seconds without a heartbeat until a connection counts as lost
_ANSWER_TIMEOUT = 10.0  # seconds; a node that takes longer is not asked again
_FACTS_TIMEOUT = 8.0  # seconds for a node's facts
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


async def _examine(job: Job) -> list[Finding]:
    doctor = Doctor(job)
    await doctor.examine()
    names = [plan.name for plan in job.nodes]
    return sorted(_worst(doctor.findings), key=lambda finding: [*names, finding.node].index(finding.node))


class Doctor:
    """Checks the nodes of a job by what ``ddprun`` does, with a probe in place of the script.

    Attributes:
        findings: The results so far.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._launch = Launch(_probe(job), LIMIT + GRACE, f"the limit of {LIMIT:g} s for all checks", _ANSWER_TIMEOUT)
        self.findings: list[Finding] = []

    async def examine(self) -> None:
        """Make all checks. Takes little more than :data:`LIMIT` seconds."""
        async with self._launch:
            try:
                await self._examine()
            except asyncio.CancelledError:
                self._fail("", "all-reduce", f"stopped by {self._launch.stopped_by}")

    async def _examine(self) -> None:
        nodes = self._launch.nodes
        problems = await ask_all(self._look, nodes)
        known = [node for node in nodes if node not in problems]
        self.findings += judge({node.plan: node.place for node in known})
        if len(known) > 1 or known == nodes:
            await self._meet(known)
        if len(nodes) == 1:
            return
        if any(finding.level == "red" for finding in self.findings):
            self.findings.append(Finding("", "all-reduce", "red", "skipped", "skipped: fix the problems above first"))
        else:
            await self._all_reduce()
        plain = "traffic between the nodes is not encrypted; use a network that you trust"
        self.findings.append(Finding("", "encryption", "amber", "none", plain))

    def _fail(self, node: str, check: str, says: str) -> None:
        self.findings.append(Finding(node, check, "red", "failed", says))

    async def _look(self, node: Connection) -> None:
        """Reach a node, and set the facts about it."""
        plan, script, begin = node.plan, self._job.script, time.monotonic()
        program, other = self._job.program, f"{how_to_copy(plan)}. Or choose another with --chdir"
        for check, remedy, attempt in (
            ("reached", "", node.greet),
            ("folder", other, partial(node.enter, self._job.forwarded | self._job.environ, None)),
            ("script", other, partial(node.enter, {}, script)),
            ("python", "Choose another with --python", partial(node.look, "all", _FACTS_TIMEOUT, program)),
        ):
            try:
                await attempt()
            except NodeProblem as problem:
                self._fail(plan.name, check, f"{problem}. {remedy}" if remedy else str(problem))
                raise
            by = "ssh" if plan.rsh is None else os.path.basename(plan.rsh[0])
            way = "here" if plan.is_here else f"by {by}, {time.monotonic() - begin:.1f} s"
            if text := {"reached": way, "folder": plan.cwd, "script": script}.get(check):
                self.findings.append(Finding(plan.name, check, "green", text))

    async def _meet(self, nodes: list[Connection]) -> None:
        problems: Mapping[Connection, NodeProblem] = {}
        try:
            await self._launch.meet(nodes)
        except Unfit as unfit:
            problems = unfit.problems
        for node in nodes:
            where = f" ({interface})" if (interface := node.place.get("interface")) else ""
            self.findings.append(Finding(node.plan.name, "address", "green", f"{node.address}{where}"))
            if node in problems:
                self._fail(node.plan.name, "ports", str(problems[node]))
            elif len(nodes) > 1:
                self.findings.append(Finding(node.plan.name, "ports", "green", "reaches the others"))

    async def _all_reduce(self) -> None:
        """Run an all-reduce with one process per node, and note the line that the probe prints."""
        heard = _Heard()
        self._launch.start(self._launch.nodes)
        with TemporaryDirectory(prefix="ddprun-") as folder:
            with closing(Output(Path(folder) / "logs", frozenset({0}), False, heard)) as output:
                code = await Watch(self._launch, output).run()
            said = [line for line in heard.lines("e") if line.startswith("ddprun: ") and folder not in line]
        if code:  # each node has begun with a line
            why = "; ".join(line.removeprefix("ddprun: ") for line in said[len(self._launch.nodes) :])
            self._fail("", "all-reduce", why or "the probe failed")
        else:
            self.findings.append(Finding("", "all-reduce", "green", heard.lines("o")[-1]))


class _Heard(Terminal):
    """Keeps what would go to the terminal."""

    def __init__(self) -> None:
        self._said = {"o": b"", "e": b""}

    def write(self, stream: str, data: bytes) -> None:
        self._said[stream] += data

    def lines(self, stream: str) -> list[str]:
        return self._said[stream].decode(errors="replace").splitlines()


def _probe(job: Job) -> Job:
    """Return the job that runs the probe instead of the script."""
    arguments = {"training_script": "-P", "training_script_args": ["-m", "ddp_callbacks.launcher.probe"]}
    alone = {"module": False, "no_python": False, "keep_going": False, "max_restarts": 0, "grace": None}
    return Job(**vars(job) | arguments | alone | {"min_nodes": len(job.nodes), "heartbeat_timeout": _PATIENCE})


# --- findings from the facts ------------------------------------------------------------------------------------------


def judge(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> list[Finding]:
    """Return all findings about nodes from their facts, see :mod:`ddp_callbacks.launcher.facts`."""
    return _worst([*_programs(nodes), *_sizes(nodes), *_gpus(nodes)])


def _finding(node: str, check: str, is_good: bool, text: str, remedy: str, level: _Level = "amber") -> Finding:
    return Finding(node, check, "green", text) if is_good else Finding(node, check, level, text, remedy)


def _programs(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    """A package on any node must be on all of them; what is not the same where numbers depend on it stops a run."""
    usual = dict.fromkeys(_NEEDED, "")
    for facts in reversed(nodes.values()):
        usual |= facts["packages"]
    for plan, facts in nodes.items():
        yield Finding(plan.name, "python", "green", facts["python"])
        for name, version in usual.items():
            yield _package(plan, name, facts["packages"].get(name, ""), version)
    for plan, name, remedy in differences(nodes):
        yield Finding(plan.name, name, "red", "differs", remedy)


def _package(plan: NodePlan, name: str, own: str, usual: str) -> Finding:
    python, wanted = f"{plan.shell}{plan.python}", f"{name}=={usual.partition('+')[0]}" if usual else name
    command = how_to_install_this(python) if name == "ddp_callbacks" else f"{python} -m pip install {wanted}"
    if not own:
        return Finding(plan.name, name, "red", "missing", f"{name} is not installed. Run: {command}")
    return _finding(plan.name, name, own == usual, own, f"{name} {own}, but {usual} on the others. Run: {command}")


def _worst(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, of each check of each node only the red ones if there are any."""
    red = {(finding.node, finding.check) for finding in findings if finding.level == "red"}
    return [each for each in findings if each.level == "red" or (each.node, each.check) not in red]


def _sizes(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    for plan, facts in nodes.items():
        yield Finding(plan.name, "cores", "green", str(facts["cores"]))
        free, shared = facts["free_memory"], facts["shared_memory"]
        text = f"{free / GIB:.1f} of {facts['memory'] / GIB:.1f} GiB free"
        remedy = f"less than 1 GiB is free. Check: {plan.shell}ps aux --sort=-rss | head"
        yield _finding(plan.name, "memory", free >= _MEMORY, text, remedy)
        yield _finding(plan.name, "/dev/shm", shared >= _SHARED_MEMORY, f"{shared / GIB:.1f} GiB free", _MORE_SHARED)


def _gpus(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    has_none = not any(facts["gpus"] for facts in nodes.values())
    for plan, facts in nodes.items():
        text = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(facts["gpus"]).items()) or "none"
        remedy = f"no GPU found, but others have some. Check: {plan.shell}nvidia-smi"
        yield _finding(plan.name, "GPUs", has_none or bool(facts["gpus"]), text, remedy, "red")


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
