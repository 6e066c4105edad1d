"""What runs on a node, through the shell that ssh would start: it all arrives unchanged, and ends with the launcher."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Slowness

from ddp_callbacks.launcher.connection import Connection, Event
from ddp_callbacks.launcher.launch import AGENT
from ddp_callbacks.launcher.node import GREETING, HEADER
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.plan import NodePlan
from ddp_callbacks.launcher.remote import BOOTSTRAP, as_hex, message, opening

LIMIT = 200.0  # seconds
ECHO = """
import json, os, sys
print(json.dumps([[os.fsencode(word).hex() for word in sys.argv[1:]], os.getcwdb().hex(),
                  os.environb.get(b"PROBE", b"").hex(), json.load(sys.stdin)["probe"]]))
"""


class Node:
    """What sshd does, the login shell with the command, and what comes from there."""

    def __init__(self, python: str = sys.executable, shell: str = "/bin/sh") -> None:
        self.process = subprocess.Popen(
            [shell, "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.write(opening(python))

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def tell(self, do: str, **values: Any) -> None:
        self.write(message(do, **values))

    def run(self, program: str, *arguments: str, environ: dict[str, str] | None = None) -> None:
        argv = [sys.executable, "-c", program, *arguments]
        variables = {as_hex(name): as_hex(value) for name, value in (environ or {}).items()}
        self.tell("run", argv=[as_hex(word) for word in argv], environ=variables, job={"probe": "job"})

    def frame(self) -> tuple[bytes, bytes]:
        """The kind and the bytes of the next; bounded by the time limit of the test."""
        assert self.process.stdout is not None
        header = self.process.stdout.read(HEADER.size)
        assert header, self.errors()
        kind, _, length = HEADER.unpack(header)
        data = self.process.stdout.read(length + 1)
        assert data.endswith(b"\n")
        return kind, data[:-1]

    def greet(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.read(len(GREETING)) == GREETING, self.errors()

    def answer(self) -> Any:
        kind, data = self.frame()
        assert kind == b"r", (kind, data)
        return json.loads(data)

    def result(self) -> tuple[int, bytes, bytes]:
        """Exit code, standard output and standard error of the job, after the answer to ``run``."""
        said = {b"o": b"", b"e": b"", b"m": b""}
        while True:
            kind, data = self.frame()
            if kind == b"x":
                code = json.loads(data)["code"]
                assert self.process.wait(LIMIT) == code
                return code, said[b"o"], said[b"e"]
            said[kind] += data

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()


@contextmanager
def node(**options: Any) -> Iterator[Node]:
    made = Node(**options)
    try:
        made.greet()
        yield made
    finally:
        made.close()


NASTY = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "\n",
    "a\n",
    "$(touch /x)",
    "`id`",
    "; rm x",
    "*",
    "%s",
    "é",
    "-x",
    "!!",
    "\udcff",
]
texts = st.binary(max_size=20).filter(lambda raw: b"\0" not in raw).map(os.fsdecode)


def assert_arrives(arguments: list[str], value: str, shell: str = "/bin/sh") -> None:
    with node(shell=shell) as it:
        it.run(ECHO, *arguments, environ={"PROBE": value})
        assert it.answer() == {}
        code, out, err = it.result()
    assert code == 0, err
    sent = [as_hex(word) for word in arguments]
    assert json.loads(out) == [sent, as_hex(os.getcwd()), as_hex(value), "job"]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "tcsh", "csh"])
def test_arguments_and_values_arrive_unchanged_through_every_login_shell(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    assert_arrives(NASTY, "".join(NASTY), path)


@settings(max_examples=12, deadline=None)
@given(st.lists(texts, max_size=4), texts)
def test_any_bytes_arrive_unchanged(arguments: list[str], value: str) -> None:
    assert_arrives(arguments, value)


def test_interpreter_and_working_directory_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "it's a $HOME\n; folder\udcff "
    folder.mkdir()
    (folder / "script").touch()
    python = folder / "python 3\\n"
    python.symlink_to(sys.executable)
    with node(python=str(python)) as it:
        it.tell("enter", cwd=as_hex(str(folder)))
        assert it.answer() == {}
        it.tell("find", path=as_hex("script"))
        assert it.answer() == {}
        it.run("import os; print(os.getcwdb().hex())")
        assert it.answer() == {}
        assert it.result()[:2] == (0, as_hex(str(folder)).encode() + b"\n")


def test_nothing_of_the_job_stands_on_a_command_line() -> None:
    with node() as it:
        program = "print(open(f'/proc/{__import__(\"os\").getppid()}/cmdline').read())"
        it.run(program, "argument-7", environ={"SECRET": "value-7"})
        it.answer()
        code, out, _ = it.result()
    assert code == 0
    assert b"sys.stdin.buffer" in out and b"argument-7" not in out and b"value-7" not in out


def test_the_jobs_exit_code_and_output_come_back() -> None:
    with node() as it:
        it.run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(37)")
        it.answer()
        assert it.result() == (37, b"out\n", b"err\n")
    with node() as it:
        it.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        it.answer()
        assert it.result()[0] == 128 + signal.SIGKILL


def test_much_output_comes_back_whole_and_in_order() -> None:
    with node() as it:
        it.run("import sys\nfor i in range(300000): sys.stdout.write(f'{i}\\n')")
        it.answer()
        _, out, _ = it.result()
    assert out.split() == [b"%d" % i for i in range(300000)]


def test_what_cannot_be_is_said_in_the_answer(tmp_path: Path) -> None:
    with node() as it:
        it.tell("enter", cwd=as_hex("/nowhere"))
        assert it.answer() == {"problem": "cannot enter the working directory /nowhere: No such file or directory"}
        it.tell("enter", cwd=as_hex(str(tmp_path)))
        assert it.answer() == {}
        it.tell("find", path=as_hex("train.py"))
        assert it.answer() == {"problem": f"file not found: train.py (working directory {tmp_path})"}
        it.tell("run", argv=[as_hex("/nowhere/python")], environ={}, job={})
        assert it.answer() == {"problem": "cannot start /nowhere/python: No such file or directory"}
        it.tell("listen", address="192.0.2.1", port=0)
        assert it.answer() == {"problem": "cannot listen on 192.0.2.1 port 0: Cannot assign requested address"}
        it.tell("listen", address="127.0.0.1", port=0)
        port = it.answer()["port"]
        with node() as other:
            other.tell("listen", address="127.0.0.1", port=port)
            assert "Address already in use" in other.answer()["problem"]
            other.tell("reach", addresses=[("127.0.0.1", port), ("127.0.0.1", 1)], seconds=5)
            assert other.answer() == {
                "problems": [None, "cannot connect to 127.0.0.1 port 1: Connection refused"],
            }


def test_an_interpreter_that_is_not_there_is_named() -> None:
    done = subprocess.run(["/bin/sh", "-c", BOOTSTRAP], input=opening("/nowhere/python"), capture_output=True)
    assert done.returncode == 127
    assert b"/nowhere/python" in done.stderr


# --- the end ----------------------------------------------------------------------------------------------------------

# A worker in a session of its own, with a child that has let itself be orphaned; both deaf to SIGTERM if told so.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = sys.argv[1] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
others, said = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(1, b"grandchild %d\\n" % os.getpid())
        os.write(said, b"g")
        time.sleep(1000)
    os.write(1, b"child %d\\n" % os.getpid())
    os.write(said, b"c")
    if sys.argv[2] == "orphan":
        os._exit(0)
    time.sleep(1000)
os.write(1, b"job %d\\n" % os.getpid())
if sys.argv[3] == "ends":
    os.read(others, 1), os.read(others, 1)
    sys.exit(5)
time.sleep(1000)
"""


def start_family(it: Node, *how: str) -> list[int]:
    it.run(FAMILY, *how)
    it.answer()
    said = b""
    while said.count(b"\n") < 3:
        kind, data = it.frame()
        said += data if kind == b"o" else b""
    return [int(word) for word in said.split()[1::2]]


def runs(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("how", "end", "limit"),
    [
        (("hears", "stays", "stays"), "close", 2.0),
        (("hears", "orphan", "stays"), "close", 2.0),
        (("deaf", "stays", "stays"), "close", 4.0),
        (("deaf", "orphan", "stays"), "at once", 1.0),
        (("hears", "orphan", "stays"), "end", 2.0),
        (("deaf", "stays", "stays"), "silence", 4.0),
        (("hears", "orphan", "ends"), "", 2.0),
        (("deaf", "stays", "ends"), "", 4.0),
    ],
)
def test_the_whole_job_ends_with_the_launcher_or_by_itself(how: tuple[str, ...], end: str, limit: float) -> None:
    it = Node()
    it.greet()
    if end == "silence":
        it.tell("hello", silence=1.0)
        it.answer()
    pids = start_family(it, *how)
    with Slowness() as slowness:
        if end == "close":
            assert it.process.stdin is not None
            it.process.stdin.close()
        elif end in ("end", "at once"):
            it.tell("end", at_once=end == "at once")
        code = it.process.wait(LIMIT)
    try:
        assert [pid for pid in pids if runs(pid)] == []
        assert slowness.took < limit * slowness.factor
        assert code == (5 if not end else 128 + (signal.SIGKILL if "deaf" in how else signal.SIGTERM))
    finally:
        for pid in filter(runs, [*pids, it.process.pid]):
            os.kill(pid, signal.SIGKILL)
        it.close()


def test_who_is_heard_of_goes_on() -> None:
    with node() as it:
        it.tell("hello", silence=0.5)
        it.answer()
        pids = start_family(it, "hears", "stays", "stays")
        for _ in range(10):
            time.sleep(0.2)
            it.tell("beat")
        assert all(map(runs, pids))
    assert not any(map(runs, pids))


def test_an_end_that_comes_with_the_job_is_not_lost() -> None:
    argv = [as_hex(word) for word in ("sleep", "1000")]
    with node() as it:
        it.write(message("run", argv=argv, environ={}, job={}) + message("end", at_once=False))
        it.answer()
        assert it.result()[0] == 128 + signal.SIGTERM


def test_signals_that_reach_the_node_do_not_leave_the_job_alone() -> None:
    with node() as it:
        pids = start_family(it, "hears", "stays", "stays")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # what a closed terminal and sshd's end send
            it.process.send_signal(number)
        assert it.process.poll() is None
    assert [pid for pid in pids if runs(pid)] == []


def test_the_folder_of_the_job_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with node() as it:
        it.run("import json, os, sys; name = json.load(sys.stdin)['folder']; os.mkdir(name); print(name)")
        it.answer()
        assert it.result()[1].startswith(f"{tmp_path}/ddprun-".encode())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cold
@pytest.mark.parametrize("killed", ["node", "agent"])
def test_the_folder_of_the_job_is_removed_although_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """The node's program, or the agent: the other one sees to it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "script.py").write_text("import time; print('up', flush=True); time.sleep(1000)")
    events: queue.Queue[Event] = queue.Queue()
    node = Connection(NodePlan("here", None, 0, "1", sys.executable, "/"), events, LIMIT)
    node.greet()
    port = node.ask("listen", address="127.0.0.1", port=0)["port"]
    options = parse_options(["--nproc-per-node", "1", str(tmp_path / "script.py")], {})
    job = {
        "torchrun": options.torchrun,
        "command": [as_hex(word) for word in options.command],
        "rendezvous": "fixed",
        "node_rank": 0,
        "address": "127.0.0.1",
        "port": port,
    }
    node.ask("run", argv=[as_hex(word) for word in (sys.executable, *AGENT)], environ={}, job=job)
    while not (event := events.get(timeout=LIMIT)).data.startswith(b"up"):
        assert event.kind in "moe", event
    assert len(list(tmp_path.glob("ddprun-*"))) == 1
    ours = children(os.getpid()) - {os.getpid()}
    (program,) = [pid for pid in ours if b"sys.stdin.buffer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (agent,) = children(program)
    os.kill({"node": program, "agent": agent}[killed], signal.SIGKILL)
    while events.get(timeout=LIMIT).kind != "closed":
        pass
    end = time.monotonic() + LIMIT
    while (left := list(tmp_path.glob("ddprun-*"))) and time.monotonic() < end:
        time.sleep(0.05)
    node.close(LIMIT)
    assert left == []


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_kernel_without_pidfd_open_does(tmp_path: Path) -> None:
    """Linux 4.18, that of many clusters, does not have it."""
    (tmp_path / "sitecustomize.py").write_text(NO_PIDFD)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')  # without -I
    python.chmod(0o755)
    with node(python=str(python)) as it:
        it.run("import os, sys; print(hasattr(os, 'pidfd_open')); sys.exit(3)")
        assert it.answer() == {}
        assert it.result()[:2] == (3, b"False\n")


NO_PIDFD = """
import os
del os.pidfd_open
"""


class Held(queue.Queue[Event]):
    """Lets whoever puts something wait, as a terminal may that takes no output."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def put(self, event: Event, block: bool = True, timeout: float | None = None) -> None:
        self.reached.set()
        assert self.released.wait(LIMIT)
        super().put(event, block, timeout)


def test_a_node_that_is_let_go_while_the_terminal_is_waited_for_is_read_to_its_end() -> None:
    """ddprun ended with the traceback of a thread that read from a closed file."""
    events = Held()
    node = Connection(NodePlan("here", None, 0, "1", sys.executable, "/"), events, LIMIT)
    node.greet()
    argv = [as_hex(word) for word in (sys.executable, "-c", "print('hello', end='')")]
    node.ask("run", argv=argv, environ={}, job={})
    assert events.reached.wait(LIMIT)
    node.close(LIMIT)
    events.released.set()
    came = [events.get(timeout=LIMIT)]
    while came[-1].kind != "closed":
        came.append(events.get(timeout=LIMIT))
    assert b"".join(event.data for event in came if event.kind == "o") == b"hello"
