"""Answers to the launcher before the ranks start."""

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
    """Describe this node: its ``machine``, and the ``ends`` of ssh's connection to it: addresses there and here."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = [file.read().strip(), socket.gethostname(), os.readlink("/proc/self/ns/pid")]
    return {"machine": machine, "ends": connection[2::-2] if len(connection) == 4 else [None, None]}


class Answers:
    """Answers to the launcher before the ranks start."""

    def enter(self, cwd: str, environ: dict[str, str], script: str | None) -> dict[str, Any]:
        """Change to the working directory, set variables for all later processes, and check that the script exists."""
        os.environ.update(environ)
        try:
            os.chdir(cwd)
        except OSError as error:
            raise Refusal(f"cannot enter the working directory {cwd}: {error.strerror}") from None
        if script is not None and not os.path.exists(script):
            raise Refusal(f"file not found: {script} (working directory {os.getcwd()})")
        return {}

    def output(self, argv: list[str], seconds: float) -> dict[str, Any]:
        """Run a short command; return its exit code and output."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Refusal(f"{' '.join(argv[:3])} took longer than {seconds:g} s") from None
        return {"code": done.returncode, "out": os.fsdecode(done.stdout), "err": os.fsdecode(done.stderr)}

    def reach(self, addresses: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
        """Connect to ports of other nodes; return for each this node's own address, or why it cannot be reached."""
        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            return {"found": list(pool.map(partial(_reach, seconds), addresses))}


def _reach(seconds: float, where: tuple[str, int]) -> tuple[str, str]:
    address, port = where
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            return connection.getsockname()[0], ""
    except OSError as error:
        return "", error.strerror or str(error)


def hold_port(address: str, port: int) -> socket.socket:
    """Listen at an address; port 0 finds a free one."""
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(where, family=family, backlog=4096)
    except OSError as error:
        raise Refusal(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}") from None
