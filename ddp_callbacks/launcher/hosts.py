"""Read which nodes to use, and how many processes on each, from ``-H`` or a host file."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ddp_callbacks.errors import ConfigurationError

_IGNORED = ("max_slots", "max-slots", "max")  # Open MPI's limit for oversubscription


@dataclass(frozen=True)
class NodePlan:
    """A node of the job.

    Attributes:
        host: Its name for ssh: an alias of the ssh configuration, ``user@host``, a name or an address.
        processes: The number of processes, as in ``--nproc-per-node``; if empty, the node decides: one per GPU, or else
            per CPU socket.
        python: The interpreter.
        cwd: The working directory.
        cores: The number of cores that the job has there; ``None`` for all that the node lets it use.
        rank: The node rank.
        is_here: Whether the node is this machine, which needs no ssh.
        rsh: The command that reaches the node instead of ssh; ``None`` for ssh.
        setup: A bash command that runs there once, before the interpreter is looked for.
    """

    host: str
    processes: str = ""
    python: str = ""
    cwd: str = ""
    cores: int | None = None
    rank: int = 0
    is_here: bool = False
    rsh: tuple[str, ...] | None = None
    setup: str = ""

    @property
    def name(self) -> str:
        """The node's name in the output."""
        return self.host.rpartition("@")[2]

    @property
    def shell(self) -> str:
        """The prefix of a command to type for this node; empty for this machine."""
        return "" if self.is_here else f"{shlex.join(self.rsh or ('ssh', self.host))} "


def parse_hosts(text: str) -> list[NodePlan]:
    """Parse ``-H``: ``node1:4,node2``, with an IPv6 address in brackets.

    Raises:
        ConfigurationError: There is no host, a host is invalid or named twice, or a number of slots is not positive.
    """
    source = f"-H {text}"
    if os.path.isfile(text):
        raise ConfigurationError(f"{source} is a file. Write --hostfile {text}.")
    return _checked([_host_and_slots(part.strip(), source) for part in text.split(",")], source)


def parse_hostfile(text: str, source: str) -> list[NodePlan]:
    """Parse a host file: one host per line, ``#`` begins a comment.

    It accepts Open MPI's and DeepSpeed's ``node1 slots=4`` and MPICH's ``node1:4``. ``python=`` and ``chdir=`` are
    extensions; quote values with spaces as in a shell. Open MPI's ``max_slots=`` is ignored. A file of names alone may
    repeat each as often as it has slots, as PBS_NODEFILE does.

    Args:
        text: The contents of the file.
        source: Its name, for messages.

    Raises:
        ConfigurationError: The file is invalid; names the file and the line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}, line {number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigurationError(f"{where}: {error}: {line.strip()!r}.") from None
        if words:
            hosts.append(_host_of_line(words, where))
    counts = Counter(host.host for host in hosts)
    if max(counts.values(), default=1) > 1 and all(host == NodePlan(host.host) for host in hosts):
        return [NodePlan(name, str(count)) for name, count in counts.items()]
    return _checked(hosts, source)


def read_hostfile(path: str) -> list[NodePlan]:
    """Read a host file; see :func:`parse_hostfile`."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the host file {path}: {error}.") from error
    return parse_hostfile(text, path)


def _host_of_line(words: list[str], where: str) -> NodePlan:
    host = _host_and_slots(words[0], where)
    found = {"slots": host.processes} if host.processes else {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "python", "chdir", *_IGNORED) or not value:
            raise ConfigurationError(
                f"{where}: cannot parse {word!r}. Write HOST slots=N, optionally with python=PATH and chdir=PATH."
            )
        if key in found:
            raise ConfigurationError(f"{where}: {key} is given twice.")
        found[key] = _slots(value, host.host, where) if key == "slots" else value
    return NodePlan(host.host, found.get("slots", ""), found.get("python", ""), found.get("chdir", ""))


def _host_and_slots(text: str, where: str) -> NodePlan:
    name, colon, slots = text, "", ""
    if match := re.fullmatch(r"((?:[^@]*@)?)\[(.*)\](:?)(.*)", text):
        name, colon, slots = match[1] + match[2], match[3], match[4]
    elif text.count(":") == 1:
        name, colon, slots = text.partition(":")
    elif ":" in text:
        raise ConfigurationError(f"{where}: write an IPv6 address in brackets, got {text!r}: [{text}].")
    # ssh would treat a leading dash as an option.
    if not name or name.startswith("-") or not re.fullmatch(r"[\w.@:%-]+", name):
        raise ConfigurationError(f"{where}: {text!r} is not a host. Write HOST or HOST:SLOTS.")
    return NodePlan(name, _slots(slots, name, where) if colon else "")


def _slots(text: str, host: str, where: str) -> str:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ConfigurationError(f"{where}: the slots of {host} must be a number of at least 1, got {text!r}.")
    return text


def _checked(hosts: list[NodePlan], source: str) -> list[NodePlan]:
    if not hosts:
        raise ConfigurationError(f"{source}: no host given.")
    twice = [name for name, count in Counter(host.host for host in hosts).items() if count > 1]
    if twice:
        raise ConfigurationError(f"{source}: {twice[0]} is named twice. Name it once, with all its slots.")
    return hosts
