"""Read which nodes to use, and how many processes on each."""

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
class Host:
    """A node of the job.

    Attributes:
        name: Its name for ssh: an alias of the ssh configuration, ``user@host``, a name or an address.
        slots: Number of processes; ``None`` lets the node decide (one per GPU, or else per CPU socket).
        python: The interpreter there, if it differs from ``--python``.
        chdir: The working directory there, if it differs from ``--chdir``.
        cores: How many the job has there; ``None`` for all that the node lets it use.
    """

    name: str
    slots: int | None = None
    python: str | None = None
    chdir: str | None = None
    cores: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Parse ``-H``: ``node1:4,node2``, with an IPv6 address in brackets.

    Raises:
        ConfigurationError: There is no host, a host is named twice, or a number of slots is not positive.
    """
    source = f"-H {text}"
    if os.path.isfile(text):
        raise ConfigurationError(f"{source} is a file. Write --hostfile {text}.")
    return _checked([_host_and_slots(part.strip(), source) for part in text.split(",")], source)


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Parse a host file: one host per line, ``#`` begins a comment.

    It accepts Open MPI's and DeepSpeed's ``node1 slots=4`` and MPICH's ``node1:4``. ``python=`` and ``chdir=`` are
    extensions; quote values with spaces as in a shell. Open MPI's ``max_slots=`` is ignored.

    Args:
        text: The contents of the file.
        source: Its name, for messages.

    Raises:
        ConfigurationError: With the name of the file and the line.
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
    return _checked(hosts, source)


def read_hostfile(path: str) -> list[Host]:
    """Read a host file; see :func:`parse_hostfile`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the host file {path}: {error}.") from error
    return parse_hostfile(text, path)


def _host_of_line(words: list[str], where: str) -> Host:
    host = _host_and_slots(words[0], where)
    settings: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "python", "chdir", *_IGNORED) or not value:
            raise ConfigurationError(
                f"{where}: cannot parse {word!r}. Write HOST slots=N, optionally with python=PATH and chdir=PATH."
            )
        if key in settings or (key == "slots" and host.slots is not None):
            raise ConfigurationError(f"{where}: {key} is given twice.")
        settings[key] = value
    slots = _positive(settings["slots"], host.name, where) if "slots" in settings else host.slots
    return Host(host.name, slots, settings.get("python"), settings.get("chdir"))


def _host_and_slots(text: str, where: str) -> Host:
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
    return Host(name, _positive(slots, name, where) if colon else None)


def _positive(text: str, host: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigurationError(f"{where}: the slots of {host} must be a number of at least 1, got {text!r}.")
    return int(text)


def _checked(hosts: list[Host], source: str) -> list[Host]:
    if not hosts:
        raise ConfigurationError(f"{source}: no host given.")
    twice = [name for name, count in Counter(host.name for host in hosts).items() if count > 1]
    if twice:
        raise ConfigurationError(f"{source}: {twice[0]} is named twice. Name it once, with all its slots.")
    return hosts
