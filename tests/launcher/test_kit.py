"""What the tests start is what users start: forked interpreters are like real ones, and nothing stays unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import wait_until, write
from kit import warm
from kit.commands import environment, run, start
from kit.leftovers import Machine
from kit.ranks import Nursery, note, run_distributed
from kit.worlds import run_on

LIMIT = 300.0  # seconds
IDENTITY = "import sys; print(sys.executable)"

SHOWS_ALL = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sys.path[0], __doc__, __spec__ is None)
print(sys.warnoptions, sys.dont_write_bytecode, [s.line_buffering for s in (sys.stdout, sys.stderr)])
print(sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:-1])
"""
SPAWNS = """
import multiprocessing, os, sys

def square(x):
    print("squares", __name__, os.path.basename(sys.executable), flush=True)
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3, 4]))
"""
LEAVES = """
import atexit, threading, time
file = open("left.txt", "w")
file.write("not closed")
atexit.register(lambda: print("registered", open("left.txt").read() == ""))
threading.Thread(target=lambda: (time.sleep(0.1), print("the thread ends"))).start()
"""
RAISES = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('sensor 7') from error\n"
PROGRAMS: dict[str, list[str]] = {
    "-c": ["-c", SHOWS_ALL, "one"],
    "-m": ["-u", "-m", "shows", "one"],
    "a script": ["-W", "error", "shows.py", "--one", "", "a b"],
    "processes that are spawned": ["spawns.py"],
    "what is left at the end": ["leaves.py"],
    "an exception": ["raises.py"],
    "an exit": ["-c", "import sys; sys.exit('text')"],
    "an interrupt": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()"],
    "an abort": ["-c", "import os; os.abort()"],
    "an unknown option": ["-Z"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs").resolve()
    for name, text in {"shows": SHOWS_ALL, "raises": RAISES, "leaves": LEAVES, "spawns": SPAWNS}.items():
        (made / f"{name}.py").write_text(text)
    return made


@pytest.mark.cold
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_interpreter_does_what_the_real_one_does(folder: Path, name: str) -> None:
    """Forked interpreters do what real ones do."""
    found = []
    for python in ("python", sys.executable):
        done = subprocess.run(
            [python, *PROGRAMS[name]], cwd=folder, env=environment(), input=b"given", capture_output=True, timeout=LIMIT
        )
        told = [text.decode().replace(sys.executable, "python") for text in (done.stdout, done.stderr)]
        found.append((done.returncode, *told))
    assert found[0] == found[1]


@pytest.mark.cold
@pytest.mark.parametrize("words", [["-X", "utf8", "-c", IDENTITY], ["hides.py"]])
def test_what_cannot_be_imitated_is_left_to_the_real_one(server: warm.Server, tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, IDENTITY, "hides.py")
    write(tmp_path, "", "tqdm.py")  # in place of a module that has been imported
    assert run(["python", *words], tmp_path) == f"{sys.executable}\n"
    assert len(server.cold_starts()) == 1


def test_signals_go_on_to_the_forked_one_and_its_end_comes_back(tmp_path: Path) -> None:
    script = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
print(os.getpid(), flush=True)
time.sleep(300)
"""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with start(["python", "-c", script], tmp_path) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == "told\n"
            process.send_signal(number)
            assert process.wait(LIMIT) == -number
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]


# --- ranks ------------------------------------------------------------------------------------------------------------


def say_who(number: int) -> dict[str, Any]:
    return {"numbers": [torch.tensor(number + int(os.environ["RANK"]))]}


def fail_on_rank_1() -> None:
    note("begins")
    if os.environ["RANK"] == "1":
        raise ValueError("sensor 7 gave nothing")


def take_too_long() -> None:
    time.sleep(600)


@pytest.mark.parametrize("kind", ["", pytest.param("cpu", marks=pytest.mark.cold)])
def test_ranks_end_as_scripts_do(tmp_path: Path, kind: str) -> None:
    ranks = Nursery(kind).run(fail_on_rank_1, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 1] and [rank.notes for rank in ranks] == [{"begins": None}] * 2
    assert ranks[1].stderr.endswith("ValueError: sensor 7 gave nothing\n")
    assert [rank.code for rank in Nursery(kind).run(take_too_long, 1, tmp_path, deadline=1.0)] == [-signal.SIGKILL]


@pytest.mark.parametrize("kind", ["", pytest.param("cpu", marks=pytest.mark.cold)])
def test_what_ranks_return_comes_back_or_their_output(kind: str) -> None:
    def on_two(body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_on(kind, body, *args) if kind else run_distributed(body, 2, *args)

    assert [int(found["numbers"][0]) for found in on_two(say_who, 5)] == [5, 6]
    with pytest.raises(AssertionError, match=r"exit codes(?s:.*)sensor 7 gave nothing"):
        on_two(fail_on_rank_1)


def leave_an_orphan() -> None:
    note("left", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)


def test_processes_whose_parent_has_ended_are_seen(server: warm.Server, tmp_path: Path) -> None:
    """Tests see processes that they leave behind."""
    machine = Machine(server.pid)
    (rank,) = Nursery().run(leave_an_orphan, 1, tmp_path)
    of_a_command = run(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"], tmp_path)
    left = {rank.notes["left"], int(of_a_command)}
    assert set(machine.processes()) == left
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not machine.processes())
