"""``ddprun doctor``: checks all nodes at once, tests the connections between them, and suggests remedies."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddp_callbacks.launcher.connection import Connection, Event, NodeProblem, connections
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.plan import Job, starts
from ddp_callbacks.versions import how_to_install_this

LIMIT = 20.0  # seconds in total
_PATIENCE = 3.5  # seconds without a heartbeat
_ANSWER_TIMEOUT = 10.0  # seconds; a node that takes longer is not asked again
_FACTS_TIMEOUT = 8.0  # seconds
_REACH_TIMEOUT = 2.0  # seconds per connection
GIB = 1 << 30
_MEMORY = 1 * GIB  # free memory
_SHARED_MEMORY = GIB // 4  # free; a container has 64 MB by default
_NEEDED = ("torch", "ddp_callbacks")
_MARKS = {"green": "", "amber": "! ", "red": "FAIL "}


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        node: Its name; empty for all of them together.
        check: The checked property.
        level: ``red``: a run would fail; ``amber``: it may surprise.
        text: The finding, in a few words.
        remedy: For red and amber: a full sentence with the command to type.
    """

    node: str
    check: str
    level: Literal["green", "amber", "red"]
    text: str
    remedy: str = ""


def examine(job: Job) -> int:
    """Check the job's nodes, and print what was found; return the exit code."""
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
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.nodes = connections(job.nodes, self._events, _PATIENCE, _ANSWER_TIMEOUT)
        self._findings: list[Finding] = []
        self._held: dict[Connection, tuple[str, int]] = {}  # the address and port on which a node listens

    async def examine(self) -> list[Finding]:
        """All findings, node by node; takes little more than :data:`LIMIT` seconds."""
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
        self, node: Connection, check: str, attempt: Awaitable[str | None], remedy: str = "", text: str = ""
    ) -> bool:
        """Note what an attempt has found, or else ``text``, or its problem and the remedy; return whether it worked."""
        try:
            if found := await attempt or text:
                self._findings.append(Finding(node.plan.name, check, "green", found))
            return True
        except NodeProblem as problem:
            says = f"{problem}. {remedy}" if remedy else str(problem)
            self._findings.append(Finding(node.plan.name, check, "red", "failed", says))
            return False

    async def _reach(self, node: Connection) -> str:
        begin = time.monotonic()
        await node.greet()
        by = "ssh" if node.plan.rsh is None else os.path.basename(node.plan.rsh[0])
        return "here" if node.plan.is_here else f"by {by}, {time.monotonic() - begin:.1f} s"

    async def _listen(self, node: Connection) -> str:
        address = node.addresses[0] if len(self.nodes) > 1 and node.addresses else "127.0.0.1"
        self._held[node] = address, await node.listen(address, 0)
        interface = node.place["interfaces"].get(address)
        return f"{address} ({interface})" if interface else address

    async def _reach_others(self, node: Connection) -> None:
        """Connect from this node to all others. Called on all nodes, this tests both directions between any two."""
        attempt = node.reach([held for other, held in self._held.items() if other is not node], _REACH_TIMEOUT)
        remedy = f"Open the firewall of that node, for example: ufw allow from {self._held[node][0]}"
        await self._try(node, "ports", attempt, remedy, "reaches the others")

    async def _check_all_reduce(self) -> None:
        """Run an all-reduce with one process per node."""
        if any(finding.level == "red" for finding in self._findings):
            found = Finding("", "all-reduce", "red", "skipped", "skipped: fix the problems above first")
        else:
            try:
                found = Finding("", "all-reduce", "green", await self._all_reduce())
            except NodeProblem as problem:
                found = Finding("", "all-reduce", "red", "failed", str(problem))
        self._findings.append(found)

    async def _all_reduce(self) -> str:
        where = self._held[self.nodes[0]]
        for node in self.nodes:
            node.place["processes"] = 1
            await node.find_interface(where[0])
        messages = starts(_probe(self._job), [(node.plan, node.place) for node in self.nodes], where)
        for node, message in zip(self.nodes, messages, strict=True):
            node.tell("start", **message)
        said: dict[str, bytes] = {"o": b"", "e": b""}
        running = len(self.nodes)
        while running:
            try:
                event = await asyncio.wait_for(self._events.get(), max(0.0, self._end - time.monotonic()))
            except TimeoutError:
                raise NodeProblem(f"did not end within {LIMIT:g} s, the limit for all checks") from None
            ended = json.loads(event.data).get("ended") if event.kind == "m" else None
            if event.kind in said:
                said[event.kind] += event.data
            elif event.kind == "closed" or (ended and ended["code"]):
                last = said["e"].decode(errors="replace").strip().rpartition("\n")[2]
                raise NodeProblem(f"failed on {event.node.plan.name}: {last}")
            running -= bool(ended)
        return said["o"].decode().strip() or "ended without a result"


def _probe(job: Job) -> Job:
    """The job that runs the probe instead of the script."""
    arguments = {"training_script": "-P", "training_script_args": ["-m", "ddp_callbacks.launcher.probe"]}
    return Job(**vars(job) | arguments | {"module": False, "no_python": False})


def _copy(plan: NodePlan) -> str:
    """How to copy the working directory to the node."""
    if plan.is_here:
        return f"Choose another with --chdir, or: mkdir -p {shlex.quote(plan.cwd)}"
    if plan.rsh is not None:
        return f"Copy it there, or choose another with --chdir. Check: {plan.shell}ls -l"
    here = shlex.quote(f"{os.getcwd()}/")
    return (
        f"Copy it: rsync -a --mkpath {here} {shlex.quote(f'{plan.host}:{plan.cwd}/')}. Or choose another with --chdir"
    )


# --- what the facts mean ----------------------------------------------------------------------------------------------


def judge(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> list[Finding]:
    """All findings about nodes from their facts, see :mod:`ddp_callbacks.launcher.facts`."""
    packages = dict.fromkeys([*_NEEDED, *(name for facts in nodes.values() for name in facts["packages"])])
    findings = [*_pythons(nodes)]
    for package in packages:
        findings += _versions(package, nodes)
    for plan, facts in nodes.items():
        findings += _sizes(plan, facts)
    return [*findings, *_gpus(nodes)]


def _finding(
    node: str, check: str, is_good: bool, text: str, remedy: str, level: Literal["amber", "red"] = "amber"
) -> Finding:
    return Finding(node, check, "green", text) if is_good else Finding(node, check, level, text, remedy)


def _usual(values: Iterable[str]) -> str:
    """The most frequent value; the first one among equals; empty if there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), "")


def _pythons(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    usual = _usual(facts["python"].rpartition(".")[0] for facts in nodes.values())
    for plan, facts in nodes.items():
        own = facts["python"]
        remedy = f"Python {own}, but {usual} on the others. Choose another with --python"
        yield _finding(plan.name, "python", own.startswith(f"{usual}."), own, remedy)


def _versions(package: str, nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    """A package on any node must be on all of them, in the same version."""
    found = {plan: facts["packages"].get(package) for plan, facts in nodes.items()}
    usual = _usual(version for version in found.values() if version)
    wanted = f"{package}=={usual.partition('+')[0]}" if usual else package
    for plan, version in found.items():
        what = f"{package} {version}, but {usual} on the others" if version else f"{package} is not installed"
        python = f"{plan.shell}{plan.python}"
        command = how_to_install_this(python) if package == "ddp_callbacks" else f"{python} -m pip install {wanted}"
        level: Literal["amber", "red"] = "amber" if package == "numpy" else "red"
        is_usual = version is not None and version == usual
        yield _finding(plan.name, package, is_usual, version or "missing", f"{what}. Run: {command}", level)


def _sizes(plan: NodePlan, facts: Mapping[str, Any]) -> Iterator[Finding]:
    yield Finding(plan.name, "cores", "green", str(facts["cores"]))
    free, shared = facts["free_memory"], facts["shared_memory"]
    text = f"{free / GIB:.1f} of {facts['memory'] / GIB:.1f} GiB free"
    remedy = f"less than 1 GiB is free. Check: {plan.shell}ps aux --sort=-rss | head"
    yield _finding(plan.name, "memory", free >= _MEMORY, text, remedy)
    remedy = (
        "DataLoader workers pass batches through it. Run: mount -o remount,size=8g /dev/shm; for Docker: docker run "
    )
    text = f"{shared / GIB:.1f} GiB free"
    yield _finding(plan.name, "/dev/shm", shared >= _SHARED_MEMORY, text, f"{remedy}--shm-size=8g")


def _gpus(nodes: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[Finding]:
    has_none = not any(facts["gpus"] for facts in nodes.values())
    for plan, facts in nodes.items():
        text = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(facts["gpus"]).items()) or "none"
        remedy = f"no GPU found, but others have some. Check: {plan.shell}nvidia-smi"
        yield _finding(plan.name, "GPUs", has_none or bool(facts["gpus"]), text, remedy, "red")


# --- the output -------------------------------------------------------------------------------------------------------


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each check, with the nodes where they differ; below, what to fix."""
    said = []
    for check in dict.fromkeys(finding.check for finding in findings):
        nodes: dict[str, list[str]] = {}
        for finding in findings:
            if finding.check == check:
                nodes.setdefault(f"{_MARKS[finding.level]}{finding.text}", []).append(finding.node)
        each = [f"{text} ({', '.join(names)})" if len(nodes) > 1 else text for text, names in nodes.items()]
        said.append(f"{check:<18} {'; '.join(each)}")
    for level in ("red", "amber"):
        for finding in findings:
            if finding.level == level:
                said.append(
                    f"{_MARKS[level]}{', '.join(filter(None, (finding.node, finding.check)))}: {finding.remedy}"
                )
    return said
