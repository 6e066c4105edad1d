"""What the facts about the nodes mean for a run. No communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddp_callbacks.versions import how_to_install_this

Level = Literal["green", "amber", "red"]
GIB = 1 << 30
_CLOCK = 1.0  # seconds; with a larger difference, files of one node look too new on another
_MEMORY = 1 * GIB  # free memory
_SHARED_MEMORY = GIB // 4  # free; a container has 64 MB by default
_NEEDED = ("torch", "ddp_callbacks")


@dataclass(frozen=True)
class Finding:
    """One cell of the table.

    Attributes:
        node: Its name; empty for all of them together.
        check: The checked property.
        level: ``red``: a run would fail; ``amber``: it may surprise.
        text: The finding, in a few words.
        remedy: For red and amber: a full sentence with the command to type.
    """

    node: str
    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """The facts about one node, see :mod:`ddp_callbacks.launcher.facts`, and the prefix of commands for it."""

    shell: str  # "ssh node1 ", empty for this machine
    python: str
    values: Mapping[str, Any]


def judge(nodes: Mapping[str, Facts]) -> list[Finding]:
    """All findings about nodes that answered, in the order of the table."""
    findings = [_version_of_python(name, nodes) for name in nodes]
    for package in dict.fromkeys([*_NEEDED, *(name for facts in nodes.values() for name in facts.values["packages"])]):
        findings += _versions(package, nodes)
    for name, facts in nodes.items():
        findings += [_cores(name, facts), _memory(name, facts), _shared_memory(name, facts)]
    return findings + _gpus(nodes)


def judge_clock(node: str, ahead: float, uncertainty: float) -> Finding:
    """Seconds by which a clock is ahead of this machine's, and the uncertainty."""
    text = f"{ahead:+.1f} s"
    if abs(ahead) <= _CLOCK + uncertainty:
        return Finding(node, "clock", "green", text)
    remedy = f"its clock is {abs(ahead):.0f} s {'fast' if ahead > 0 else 'slow'}. Run: timedatectl set-ntp true"
    return Finding(node, "clock", "amber", text, remedy)


def _version_of_python(name: str, nodes: Mapping[str, Facts]) -> Finding:
    own = nodes[name].values["python"]
    usual = _usual(facts.values["python"].rpartition(".")[0] for facts in nodes.values())
    if own.startswith(f"{usual}."):
        return Finding(name, "python", "green", own)
    return Finding(
        name, "python", "amber", own, f"Python {own}, but {usual} on the others. Choose another with --python"
    )


def _versions(package: str, nodes: Mapping[str, Facts]) -> list[Finding]:
    """A package on any node must be on all of them, in the same version."""
    found = {name: facts.values["packages"].get(package) for name, facts in nodes.items()}
    usual = _usual(version for version in found.values() if version is not None)
    findings = []
    for name, version in found.items():
        if version == usual and version is not None:
            findings.append(Finding(name, package, "green", version))
            continue
        wanted = package if usual is None else f"{package}=={usual.partition('+')[0]}"
        what = f"{package} is not installed" if version is None else f"{package} {version}, but {usual} on the others"
        python = f"{nodes[name].shell}{nodes[name].python}"
        command = how_to_install_this(python) if package == "ddp_callbacks" else f"{python} -m pip install {wanted}"
        level: Level = "amber" if package == "numpy" else "red"
        findings.append(Finding(name, package, level, version or "missing", f"{what}. Run: {command}"))
    return findings


def _usual(values: Any) -> str | None:
    """The most frequent value; the first one among equals."""
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value], default=None)


def _cores(name: str, facts: Facts) -> Finding:
    return Finding(name, "cores", "green", str(facts.values["cores"]))


def _memory(name: str, facts: Facts) -> Finding:
    free, whole = facts.values["free_memory"], facts.values["memory"]
    if free is None or whole is None:
        return Finding(name, "memory", "green", "unknown")
    text = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free"
    if free >= _MEMORY:
        return Finding(name, "memory", "green", text)
    return Finding(
        name, "memory", "amber", text, f"less than 1 GiB is free. Check: {facts.shell}ps aux --sort=-rss | head"
    )


def _shared_memory(name: str, facts: Facts) -> Finding:
    free = facts.values["shared_memory"]
    if free is not None and free >= _SHARED_MEMORY:
        return Finding(name, "/dev/shm", "green", f"{free / GIB:.1f} GiB free")
    text = "missing" if free is None else f"{free >> 20} MiB free"
    remedy = (
        "DataLoader workers pass batches through it. Run: mount -o remount,size=8g /dev/shm; for Docker: docker run "
    )
    return Finding(name, "/dev/shm", "amber", text, f"{remedy}--shm-size=8g")


def _gpus(nodes: Mapping[str, Facts]) -> list[Finding]:
    counts = {name: len(facts.values["gpus"]) for name, facts in nodes.items()}
    findings = []
    for name, facts in nodes.items():
        text = ", ".join(f"{count} x {gpu}" for gpu, count in Counter(facts.values["gpus"]).items()) or "none"
        if counts[name] or not any(counts.values()):
            findings.append(Finding(name, "GPUs", "green", text))
        else:
            remedy = f"no GPU found, but others have some. Check: {facts.shell}nvidia-smi"
            findings.append(Finding(name, "GPUs", "red", text, remedy))
    return findings
