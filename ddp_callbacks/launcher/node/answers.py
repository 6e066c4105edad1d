"""What the launcher asks of a node before anything is started; each public function answers a message of its name."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


class Refusal(Exception):
    """This node cannot do what the launcher asked for."""


def describe() -> dict[str, Any]:
    """This node; ``address`` is the one that ssh reached."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = [file.read().strip(), socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return {"machine": machine, "address": connection[2] if len(connection) == 4 else None}


def enter(cwd: str, environ: dict[str, str], script: str | None) -> dict[str, Any]:
    """Change to the working directory, set variables for all that is started here, and check that a file exists."""
    os.environb.update({bytes.fromhex(name): bytes.fromhex(value) for name, value in environ.items()})
    folder = os.fsdecode(bytes.fromhex(cwd))
    try:
        os.chdir(folder)
    except OSError as error:
        raise Refusal(f"cannot enter the working directory {folder}: {error.strerror}") from None
    name = None if script is None else os.fsdecode(bytes.fromhex(script))
    if name is not None and not os.path.exists(name):
        raise Refusal(f"file not found: {name} (working directory {os.getcwd()})")
    return {}


def output(argv: list[str], seconds: float) -> dict[str, Any]:
    """The output of a short command."""
    words = [bytes.fromhex(word) for word in argv]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Refusal(f"{os.fsdecode(words[0])} took longer than {seconds:g} s") from None
    return {"code": done.returncode, "out": done.stdout.decode(), "err": done.stderr.decode(errors="replace")}


def route(address: str) -> dict[str, Any]:
    """This node's address on the route to another."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        return {"address": probe.getsockname()[0]}


def reach(addresses: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
    """Connect to ports that other nodes hold; for each, why it cannot be reached, or ``null``."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return {"problems": list(pool.map(partial(_cannot_reach, seconds), addresses))}


def _cannot_reach(seconds: float, where: tuple[str, int]) -> str | None:
    address, port = where
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return f"cannot connect to {address} port {port}: {error.strerror or error}"
    return None


ANSWERS = {function.__name__: function for function in (enter, output, route, reach)}


def hold_port(address: str, port: int) -> socket.socket:
    """Listen there; 0 finds a free port."""
    family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
    except OSError as error:
        raise Refusal(f"cannot listen on {address} port {port}: {error.strerror}") from None
    listener.listen(4096)
    return listener
