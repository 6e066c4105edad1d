"""``ddprun doctor``: checks all nodes at once, tests the connections between them, and suggests remedies."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddp_callbacks.launcher.connection import Connection, NodeProblem, Shared
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.plan import Job, starts
from ddp_callbacks.versions import how_to_install_this

LIMIT = 20.0  # seconds in total
_PATIENCE = 3.5  # seconds without a heartbeat until a connection counts as lost
_ANSWER_TIMEOUT = 10.0  # seconds; a node that takes longer is not asked again
_FACTS_TIMEOUT = 8.0  # seconds for a node's facts
_REACH_TIMEOUT = 2.0  # seconds per connection
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
    try:
        return await doctor.examine()
    finally:
        await asyncio.gather(*(node.close(1.0) for node in doctor.nodes))


class Doctor:
    """Checks the nodes of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._end = time.monotonic() + LIMIT
        self._shared = Shared(_PATIENCE, _ANSWER_TIMEOUT)
        self.nodes = [Connection(plan, self._shared) for plan in job.nodes]
        self._findings: list[Finding] = []
        self._held: dict[Connection, tuple[str, int]] = {}  # the address and port on which a node listens

    async def examine(self) -> list[Finding]:
        """Return all findings, node by node. Takes little more than :data:`LIMIT` seconds."""
        await asyncio.gather(*map(self._look, self.nodes))
        known = [node for node in self.nodes if node.place]
        self._findings += judge({node.plan: node.place for node in known})
        await asyncio.gather(
            *(self._try(node, "address", self._listen(node), f"Check: {node.plan.shell}ip address") for node in known)
        )
        if len(self._held) > 1:
            await asyncio.gather(*map(self._reach_others, self._held))
        if len(self.nodes) > 1:
            await self._check_all_reduce()
            plain = "traffic between the nodes is not encrypted; use a network that you trust"
            self._findings.append(Finding("", "encryption", "amber", "none", plain))
        nodes = [node.plan.name for node in self.nodes]
        return sorted(self._findings, key=lambda finding: [*nodes, finding.node].index(finding.node))

    async def _look(self, node: Connection) -> None:
        plan, script = node.plan, self._job.script
        if not await self._try(node, "reached", self._reach(node)):
            return
        if await self._try(node, "folder", node.enter({}, None), _copy(plan), plan.cwd) and script is not None:
            await self._try(node, "script", node.enter({}, script), _copy(plan), script)
        await self._try(node, "python", node.look("all", _FACTS_TIMEOUT), "Choose another with --python")

    async def _try(
        self, node: Connection | None, check: str, attempt: Awaitable[str | None], remedy: str = "", text: str = ""
    ) -> bool:
        """Await a check; return whether it worked. Note its result, or else ``text``; or its problem and ``remedy``."""
        name = node.plan.name if node else ""
        try:
            if found := await attempt or text:
                self._findings.append(Finding(name, check, "green", found))
            return True
        except NodeProblem as problem:
            says = f"{problem}. {remedy}" if remedy else str(problem)
            self._findings.append(Finding(name, check, "red", "failed", says))
            return False

    async def _reach(self, node: Connection) -> str:
        begin = time.monotonic()
        await node.greet()
        by = "ssh" if node.plan.rsh is None else os.path.basename(node.plan.rsh[0])
        return "here" if node.plan.is_here else f"by {by}, {time.monotonic() - begin:.1f} s"

    async def _listen(self, node: Connection) -> str:
        address = node.addresses[0] if len(self.nodes) > 1 and node.addresses else "127.0.0.1"
        self._held[node] = address, await node.listen(address, 0)
        interface = node.place["interface"]
        return f"{address} ({interface})" if interface else address

    async def _reach_others(self, node: Connection) -> None:
        """Connect from this node to all others. Called on all nodes, this tests both directions between any two."""
        attempt = node.reach([held for other, held in self._held.items() if other is not node], _REACH_TIMEOUT)
        remedy = f"Open the firewall of that node, for example: ufw allow from {self._held[node][0]}"
        await self._try(node, "ports", attempt, remedy, "reaches the others")

    async def _check_all_reduce(self) -> None:
        if any(finding.level == "red" for finding in self._findings):
            skipped = Finding("", "all-reduce", "red", "skipped", "skipped: fix the problems above first")
            self._findings.append(skipped)
        else:
            await self._try(None, "all-reduce", self._all_reduce())

    async def _all_reduce(self) -> str:
        """Run an all-reduce with one process per node; return the line that the probe prints."""
        places = [(node.plan, node.place | {"processes": 1}) for node in self.nodes]
        for node, message in zip(self.nodes, starts(_probe(self._job), places, self._held[self.nodes[0]]), strict=True):
            node.tell("start", **message)
        said: dict[str, str] = defaultdict(str)
        running, events = len(self.nodes), self._shared.events
        while running:
            try:
                node, do, values = await asyncio.wait_for(events.get(), max(0.0, self._end - time.monotonic()))
            except TimeoutError:
                raise NodeProblem(f"did not end within {LIMIT:g} s, the limit for all checks") from None
            if do == "wrote":
                said[values["stream"]] += values["data"]
            elif do in ("closed", "problem") or values.get("code"):
                last = said["e"].strip().rpartition("\n")[2]
                raise NodeProblem(f"failed on {node.plan.name}: {values.get('text', last)}")
            running -= do == "ended"
        return said["o"].strip()


def _probe(job: Job) -> Job:
    """Return the job that runs the probe instead of the script."""
    arguments = {"training_script": "-P", "training_script_args": ["-m", "ddp_callbacks.launcher.probe"]}
    return Job(**vars(job) | arguments | {"module": False, "no_python": False})


def _copy(plan: NodePlan) -> str:
    """Say how to copy the working directory to the node."""
    if plan.is_here:
        return f"Choose another with --chdir, or: mkdir -p {shlex.quote(plan.cwd)}"
    if plan.rsh is not None:
        return f"Copy it there, or choose another with --chdir. Check: {plan.shell}ls -l"
    here = shlex.quote(f"{os.getcwd()}/")
    return (
        f"Copy it: rsync -a --mkpath {here} {shlex.quote(f'{plan.host}:{plan.cwd}/')}. Or choose another with --chdir"
    )


# --- findings from the facts ------------------------------------------------------------------------------------------


def judge(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> list[Finding]:
    """Return all findings about nodes from their facts, see :mod:`ddp_callbacks.launcher.facts`."""
    return [*_pythons(nodes), *_versions(nodes), *_sizes(nodes), *_gpus(nodes)]


def _finding(node: str, check: str, is_good: bool, text: str, remedy: str, level: _Level = "amber") -> Finding:
    return Finding(node, check, "green", text) if is_good else Finding(node, check, level, text, remedy)


def _usual(values: Iterable[str]) -> str:
    """Return the most frequent value; the first one among equals; empty if there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), "")


def _pythons(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    usual = _usual(facts["python"].rpartition(".")[0] for facts in nodes.values())
    for plan, facts in nodes.items():
        own = facts["python"]
        remedy = f"Python {own}, but {usual} on the others. Choose another with --python"
        yield _finding(plan.name, "python", own.startswith(f"{usual}."), own, remedy)


def _versions(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    """A package on any node must be on all of them, in the same version."""
    for package in dict.fromkeys([*_NEEDED, *(name for facts in nodes.values() for name in facts["packages"])]):
        usual = _usual(version for facts in nodes.values() if (version := facts["packages"].get(package)))
        wanted = f"{package}=={usual.partition('+')[0]}" if usual else package
        level: _Level = "amber" if package == "numpy" else "red"
        for plan, facts in nodes.items():
            version, python = facts["packages"].get(package), f"{plan.shell}{plan.python}"
            what = f"{package} {version}, but {usual} on the others" if version else f"{package} is not installed"
            command = how_to_install_this(python) if package == "ddp_callbacks" else f"{python} -m pip install {wanted}"
            remedy = f"{what}. Run: {command}"
            yield _finding(plan.name, package, bool(version) and version == usual, version or "missing", remedy, level)


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
