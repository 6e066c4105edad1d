"""``ddprun`` as the tests run it: on this machine, or on a host of :mod:`kit.hosts`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kit import hosts
from kit.hosts import Host

LIMIT = 600.0  # seconds until a test gives up; less than pytest's own limit
# Where the tests run in the background of a shell, or under nohup, these two are ignored.
PYTHON = ["env", "--default-signal=INT,HUP", sys.executable]
DDPRUN = [*PYTHON, "-m", "ddp_callbacks.launcher"]
REASON = hosts.missing()  # why there can be no hosts here
# Words of any bytes, as arguments and values may be.
DRAWN = random.Random(7)
NASTY = ["", " ", "a b", "'", '"', "\\", "\n", "a\n", "$(touch /x)", "`id`", "; rm x", "*", "%s", "-x", "!!", "\udcff"]
NASTY += [os.fsdecode(bytes(DRAWN.choices(range(1, 256), k=DRAWN.randint(0, 30)))) for _ in range(100)]
IMPATIENT = ["--heartbeat-timeout", "3.5"]

# Stays, beside a process in a session of its own. "deaf" to SIGTERM, it says so for each.
STAY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"deaf\\n"))
print("up", os.environ["RANK"], flush=True)
while True:
    time.sleep(1000)
"""


def on_hosts(group: str) -> list[Any]:
    """The marks of a file's tests, which share their hosts."""
    without = pytest.mark.skipif(REASON is not None, reason=str(REASON))
    return [without, pytest.mark.hosts, pytest.mark.xdist_group(f"hosts-{group}")]


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


def program(path: Path, text: str) -> str:
    """A program of the shell, as what leads to a node or belongs to a scheduler."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def environment(cwd: Path, host: Host | None = None, **variables: str) -> dict[str, str]:
    """Of a user who has gone to the folder ``cwd``."""
    here = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**(host.environ() if host else here), "PWD": str(cwd), "PYTHONDONTWRITEBYTECODE": "1", **variables}


def ddprun(
    *argv: str, cwd: Path, host: Host | None = None, command: list[str] = DDPRUN, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """``ddprun`` until its end."""
    words = [*command, *argv]
    return subprocess.run(
        host.command(*words, cwd=cwd) if host else words,
        cwd=None if host else cwd,
        env=environment(cwd, host, **variables),
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=LIMIT,
    )


def processes_in(folder: Path) -> dict[int, str]:
    """The command lines of all processes that work in ``folder``, as those of a job do, here and on hosts."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended by now
            if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                found[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def of_job(*there: Host) -> list[str]:
    """The command lines of all that runs on hosts."""
    return [line for host in there for line in host.processes().values()]


def signal_on(host: Host, words: str, number: int = signal.SIGKILL) -> None:
    """To every process of a host whose command line has these words."""
    for pid, line in host.processes().items():
        if words in line:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Run:
    """``ddprun`` that runs beside the test, with what it has printed so far; it is killed at the end of the block.

    Args:
        folder: Where it runs; what it prints is in its files "out" and "err".
        host: Where it is typed; by default, here.
        pipe: Whether its standard output is a small pipe instead, which takes one piece at a time.
    """

    def __init__(
        self,
        folder: Path,
        *argv: str,
        host: Host | None = None,
        command: list[str] = DDPRUN,
        pipe: bool = False,
        **variables: str,
    ) -> None:
        self.folder, self.host = folder, host
        words = [*command, *argv]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                host.command(*words, cwd=folder) if host else words,
                cwd=None if host else folder,
                env=environment(folder, host, **variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=err,
                pipesize=4096,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def text(self) -> str:
        return "".join((self.folder / name).read_text(errors="replace") for name in ("out", "err"))

    @property
    def lines(self) -> list[str]:
        """What it has written to its standard error."""
        return (self.folder / "err").read_text(errors="replace").splitlines()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or self.process.poll() is not None)
        assert holds(), self.text

    def await_text(self, text: str, times: int = 1) -> None:
        """Until it has been printed so often."""
        self.wait_until(lambda: self.text.count(text) >= times)

    def await_files(self, *names: str) -> None:
        self.wait_until(lambda: all((self.folder / name).exists() for name in names))

    def processes(self) -> dict[int, str]:
        """All of its job that run where it does: itself, and the processes that it has started."""
        found = processes_in(self.folder)
        return (
            found if self.host is None else {pid: line for pid, line in self.host.processes().items() if pid in found}
        )

    def pid(self) -> int:
        """Of ``ddprun`` itself: the oldest, as what it is about to start as another program has its name, too."""
        if self.host is None:
            return self.process.pid
        found: list[int] = []
        while not found and self.process.poll() is None:  # what leads into the host comes first
            found = [pid for pid, line in self.processes().items() if " -m ddp_callbacks.launcher " in line]
        return min(found)

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(LIMIT)
