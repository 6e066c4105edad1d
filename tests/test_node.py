"""What a node is sent, through the shell that ssh would start: it arrives unchanged, and ends with the connection."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_callbacks.launcher.remote import BOOTSTRAP, Job

LIMIT = 20.0  # seconds
ECHO = """
import json, os, sys
print(json.dumps([[os.fsencode(word).hex() for word in sys.argv[1:]], os.getcwdb().hex(),
                  os.environb.get(b"PROBE", b"").hex(), sys.stdin.read()]))
"""


def start(job: Job, shell: str = "/bin/sh", **options: Any) -> subprocess.Popen[bytes]:
    """What sshd does: the login shell with the command."""
    process = subprocess.Popen(
        [shell, "-c", BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    assert process.stdin is not None
    process.stdin.write(job.message())
    process.stdin.flush()
    return process


def output(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """Wait for the end without closing the lifeline; what was printed must fit into the pipes."""
    try:
        code = process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
    out, err = process.communicate()
    return code, out, err


def python_job(program: str, *arguments: str, **options: Any) -> Job:
    return Job(sys.executable, [sys.executable, "-c", program, *arguments], **{"cwd": "/", **options})


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
    code, out, err = output(start(python_job(ECHO, *arguments, environ={"PROBE": value}), shell))
    assert code == 0, err
    assert json.loads(out) == [
        [os.fsencode(word).hex() for word in arguments],
        b"/".hex(),
        os.fsencode(value).hex(),
        "",
    ]


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
    python = folder / "python 3\\n"
    python.symlink_to(sys.executable)
    job = Job(str(python), [sys.executable, "-c", "import os; print(os.getcwdb().hex())"], str(folder))
    assert output(start(job))[:2] == (0, os.fsencode(str(folder)).hex().encode() + b"\n")


def test_nothing_of_the_job_stands_on_a_command_line(tmp_path: Path) -> None:
    program = "print(open(f'/proc/{__import__(\"os\").getppid()}/cmdline').read())"
    code, out, _ = output(start(python_job(program, "argument-7", environ={"SECRET": "value-7"})))
    assert code == 0
    assert b"sys.stdin.buffer" in out and b"argument-7" not in out and b"value-7" not in out


def test_the_jobs_exit_code_and_output_come_back() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(37)"
    assert output(start(python_job(program))) == (37, b"out\n", b"err\n")
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert output(start(python_job(kill)))[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("job", "code", "says"),
    [
        (Job("/nowhere/python", ["true"], "/"), 127, b"/nowhere/python"),
        (
            Job(sys.executable, ["true"], "/nowhere"),
            2,
            b"ddprun: cannot enter the working directory /nowhere: No such file",
        ),
        (Job(sys.executable, ["/nowhere/torchrun"], "/"), 2, b"ddprun: cannot start /nowhere/torchrun: No such file"),
    ],
)
def test_what_cannot_be_started_is_named(job: Job, code: int, says: bytes) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, err = process.communicate(job.message(), timeout=LIMIT)
    assert process.returncode == code
    assert says in err


# --- the end ----------------------------------------------------------------------------------------------------------

# A worker in a session of its own, with a child that has let itself be orphaned; both deaf to SIGTERM if told so.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = sys.argv[1] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        print("grandchild", os.getpid(), flush=True)
        time.sleep(1000)
    print("child", os.getpid(), flush=True)
    if sys.argv[2] == "orphan":
        os._exit(0)
    time.sleep(1000)
print("job", os.getpid(), flush=True)
if sys.argv[3] == "ends":
    time.sleep(0.3)
    sys.exit(5)
time.sleep(1000)
"""


def start_family(*how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    process = start(python_job(FAMILY, *how), start_new_session=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(3)]  # bounded by the time limit of the test
    return process, pids


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
        (("deaf", "orphan", "stays"), "K", 1.0),
        (("hears", "orphan", "stays"), "T", 2.0),
        (("hears", "orphan", "ends"), "", 2.0),
        (("deaf", "stays", "ends"), "", 2.0),
    ],
)
def test_the_whole_job_ends_with_the_lifeline_or_by_itself(how: tuple[str, ...], end: str, limit: float) -> None:
    process, pids = start_family(*how)
    assert process.stdin is not None
    begin = time.monotonic()
    if end == "close":
        process.stdin.close()
    elif end:
        process.stdin.write(end.encode())
        process.stdin.flush()
    try:
        code = process.wait(LIMIT)
        took = time.monotonic() - begin
        assert [pid for pid in pids if runs(pid)] == []
        assert took < limit
        assert code == (5 if not end else 128 + (signal.SIGKILL if "deaf" in how else signal.SIGTERM))
    finally:
        for pid in filter(runs, [*pids, process.pid]):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize(("word", "number"), [(b"T", signal.SIGTERM), (b"K", signal.SIGKILL)])
def test_a_word_that_comes_with_the_job_is_not_lost(word: bytes, number: int) -> None:
    process = subprocess.Popen(["/bin/sh", "-c", BOOTSTRAP], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(Job(sys.executable, ["sleep", "1000"], "/").message() + word)
    process.stdin.flush()
    try:
        assert process.wait(LIMIT) == 128 + number
    finally:
        process.stdin.close()  # ends the job, if it still runs
        process.wait(LIMIT)


def test_signals_that_reach_the_node_do_not_leave_the_job_alone() -> None:
    process, pids = start_family("hears", "stays", "stays")
    assert process.stdin is not None
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # what a closed terminal and sshd's end send
        process.send_signal(number)
    assert process.poll() is None
    process.stdin.close()
    process.wait(LIMIT)
    assert [pid for pid in pids if runs(pid)] == []
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
