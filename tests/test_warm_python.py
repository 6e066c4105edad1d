"""The interpreter that is forked for commands does what the real one does."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery

pytestmark = pytest.mark.cold  # beside each is the real interpreter

DEADLINE = 300.0  # seconds
IDENTITY = "import sys; print(sys.executable)"

SHOWS_ALL = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ.get("GIVEN"), __doc__)
print(sorted(name for name in globals()), sys.flags.optimize, sys.warnoptions, sys.dont_write_bytecode)
print([(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout)])
print(type(sys.stdout.buffer), os.umask(0), type(__loader__).__name__)
"""
SCRIPT = SHOWS_ALL + "print(__file__, __spec__, __cached__, __package__)\n"
RAISES = """
def f(x):
    return 1 / x

try:
    f(0)
except ZeroDivisionError as error:
    raise ValueError("sensor 7 gave nothing") from error
"""
PICKLES = """
import pickle

class Net:
    pass

print(pickle.dumps(Net()), type(pickle.loads(pickle.dumps(Net()))) is Net)
"""
SPAWNS = """
import multiprocessing, os, sys

def square(x):
    print("squares", __name__, os.path.basename(sys.executable), flush=True)
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3, 4]))
    print("spawned")
"""
LEAVES = """
import atexit, threading, time
file = open("left.txt", "w")
file.write("not closed")
atexit.register(print, "registered first")
atexit.register(lambda: print("registered last", open("left.txt").read() == ""))
threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ends"))).start()
print("the last line")
"""
WAITS = """
import os, signal, sys, time

def told(number, frame):
    print("told", number, flush=True)

for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, told)
print(os.getpid(), flush=True)
time.sleep(100)
"""

# Arguments, and what standard input holds.
PROGRAMS: dict[str, tuple[list[Any], bytes]] = {
    "-c": (["-c", SHOWS_ALL, "one", b"\xff\xfe"], b""),
    "-c in one word": (["-cprint(2)"], b""),
    "-m": (["-m", "module", "one"], b""),
    "-m of what is imported already": (["-m", "platform"], b""),
    "-m of nothing": (["-m", "module.nothing"], b""),
    "a script": (["script.py", "--one", b"\xff\xfe", "", "a b"], b""),
    "a script elsewhere": (["./folder/../folder/script.py", "-c"], b""),
    "a script behind a link": (["link.py"], b""),
    "a script with a name of other bytes": ([b"\xff.py"], b""),
    "no script": (["nothing.py"], b""),
    "a script that is not Python": (["broken.py"], b""),
    "standard input": (["-", "one"], SHOWS_ALL.encode()),
    "standard input without arguments": ([], b"print('read')"),
    "reads standard input": (["-c", "import sys; print(sys.stdin.read(), sys.stdin.buffer)"], b"sent\n"),
    "unbuffered": (["-u", "-c", SHOWS_ALL], b""),
    "without bytecode": (["-Bc", SHOWS_ALL], b""),
    "safe path": (["-P", "-c", "import module"], b""),
    "an exception": (["raises.py"], b""),
    "an exception in -c": (["-c", RAISES], b""),
    "sys.exit of text": (["-c", "import sys; sys.exit('text')"], b""),
    "sys.exit of None": (["-c", "import sys; sys.exit()"], b""),
    "sys.exit of 300": (["-c", "import sys; sys.exit(300)"], b""),
    "SystemExit of -1": (["-c", "raise SystemExit(-1)"], b""),
    "os._exit": (["-c", "import os; os._exit(3)"], b""),
    "abort": (["-c", "import os; os.abort()"], b""),
    "a signal": (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], b""),
    "an interrupt": (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()"], b""),
    "a recursion": (["-c", "f = lambda: f()\ntry: f()\nexcept RecursionError as error: print(error)"], b""),
    "the end": (["leaves.py"], b""),
    "an error in an exit handler": (["-c", "import atexit; atexit.register(lambda: 1 / 0)"], b""),
    "no standard output": (["-c", "import os, sys; os.close(1); print('lost')"], b""),
    "a class of the script": (["pickles.py"], b""),
    "warnings are errors": (["-W", "error", "-c", "import warnings; warnings.warn('bad')"], b""),
    "one kind of warning": (
        ["-Werror::UserWarning", "-c", "import warnings; warnings.warn('old', DeprecationWarning); warnings.warn('x')"],
        b"",
    ),
    "warnings": (["-c", "import warnings\nfor _ in range(2): warnings.warn('bad')"], b""),
    "options that are left to the real one": (["-I", "-c", "import sys; print(sys.flags, sys.executable)"], b""),
    "an unknown option": (["-Z"], b""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs").resolve()
    (made / "folder").mkdir()
    (made / "folder" / "script.py").write_text(SCRIPT)
    (made / "link.py").symlink_to("folder/script.py")
    (made / "module.py").write_text(SHOWS_ALL)
    Path(os.fsdecode(bytes(made) + b"/\xff.py")).write_text(SHOWS_ALL)
    (made / "broken.py").write_text("x = 1\nprint(x\n")
    for name, text in {"script": SCRIPT, "raises": RAISES, "leaves": LEAVES, "pickles": PICKLES}.items():
        (made / f"{name}.py").write_text(text)
    return made


def both(nursery: Nursery, arguments: list[Any], cwd: Path, given: bytes = b"", **variables: str) -> list[Any]:
    """What the real interpreter and the warm one do: exit code and output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"OMP_NUM_THREADS": "1", "GIVEN": "given"} | variables
    found = []
    for python in (sys.executable, str(nursery.wrappers / "python")):
        done = subprocess.run(
            [python, *arguments],
            cwd=cwd,
            env=environ,
            input=given,
            capture_output=True,
            timeout=DEADLINE,
        )
        names = rb"0x[0-9a-f]{9,}|" + b"|".join(re.escape(os.fsencode(name)) for name in (sys.executable, python))
        found.append((done.returncode, *(re.sub(names, b"...", text) for text in (done.stdout, done.stderr))))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same(nursery: Nursery, folder: Path, name: str) -> None:
    real, warm = both(nursery, *[PROGRAMS[name][0], folder, PROGRAMS[name][1]])
    assert warm == real


def test_processes_that_are_spawned_are_warm_too(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    real, warm = both(nursery, ["spawns.py"], tmp_path)
    assert warm == real
    assert real[0] == 0 and real[1].endswith(b"[9, 16]\nspawned\n")


def python(nursery: Nursery, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([nursery.wrappers / "python", *arguments], **options)


def printed(nursery: Nursery, *arguments: str, **options: Any) -> str:
    process = python(nursery, *arguments, **options)
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    return output


def test_it_is_forked(nursery: Nursery) -> None:
    program = "import sys; print(sys.executable, 'lightning.pytorch' in sys.modules)"
    assert printed(nursery, "-c", program) == f"{nursery.wrappers / 'python'} True\n"


def test_random_numbers_are_those_of_a_new_process(nursery: Nursery) -> None:
    program = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.initial_seed())"
    program += "; print(torch.rand(1).item())"
    first, second = (printed(nursery, "-c", program).split() for _ in range(2))
    assert len(first) == 4 and not set(first) & set(second)


@pytest.mark.parametrize("threads", ["1", "3", None])
def test_threads_are_as_many_as_the_variable_says(nursery: Nursery, threads: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    found = printed(nursery, "-c", "import torch; print(torch.get_num_threads())", env=environ)
    assert int(found) == int(threads or len(os.sched_getaffinity(0)))


def test_descriptors_keep_their_numbers(nursery: Nursery) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    high = os.dup2(write, 77)
    program = (
        f"import os; os.write({write}, b'low '); os.write(77, b'high'); print(sorted(os.listdir('/proc/self/fd')))"
    )
    real = subprocess.run([sys.executable, "-c", program], pass_fds=[write, high], capture_output=True, text=True)
    warm = printed(nursery, "-c", program, pass_fds=[write, high])
    os.close(write)
    os.close(high)
    with open(read) as pipe:
        assert pipe.read() == "low highlow high"
    assert warm == real.stdout


def test_a_descriptor_that_the_program_closes_is_closed(nursery: Nursery) -> None:
    """The wrapper that waits for it does not hold it open."""
    read, write = os.pipe()
    program = f"import os, time; os.write({write}, b'x'); os.close({write}); time.sleep(100)"
    with python(nursery, "-c", program, pass_fds=[write]) as process, open(read) as pipe:
        os.close(write)
        assert pipe.read() == "x"
        process.terminate()
        assert process.wait(DEADLINE) == -signal.SIGTERM


def hear() -> None:
    """Where the tests run in the background of a shell, or under nohup, these two are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def waiting(nursery: Nursery, **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that waits for signals, and its own process id."""
    with python(nursery, "-c", WAITS, **{"preexec_fn": hear, **options}) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_signals_are_passed_on(nursery: Nursery) -> None:
    with waiting(nursery) as (process, _):
        assert process.stdout is not None
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
            process.send_signal(number)
            assert process.stdout.readline() == f"told {int(number)}\n"
        process.terminate()
        assert process.wait(DEADLINE) == -signal.SIGTERM


def test_an_interrupt_raises(nursery: Nursery) -> None:
    with waiting(nursery) as (process, _):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == -signal.SIGINT
        assert errors.splitlines()[-1] == "KeyboardInterrupt"


def test_what_is_ignored_stays_ignored(nursery: Nursery) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with waiting(nursery, preexec_fn=ignore) as (process, _):
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == f"told {int(signal.SIGUSR1)}\n"


def test_with_the_wrapper_that_is_killed_ends_its_process(nursery: Nursery) -> None:
    with waiting(nursery) as (process, pid):
        child = os.pidfd_open(pid)
        process.kill()
        assert process.wait(DEADLINE) == -signal.SIGKILL
        assert_ends(child)


def test_a_process_that_is_killed_ends_its_wrapper(nursery: Nursery) -> None:
    with waiting(nursery) as (process, pid):
        os.kill(pid, signal.SIGKILL)
        assert process.wait(DEADLINE) == -signal.SIGKILL


def assert_ends(process: int) -> None:
    """The descriptor of a process becomes readable then."""
    assert select.select([process], [], [], DEADLINE)[0], "the process is still there"
    os.close(process)


def test_torchrun_starts_warm_workers(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.executable)\n")
    command = [nursery.wrappers / "torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "worker.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {nursery.wrappers / 'python'}" for rank in range(2)]


# --- what is left to the real interpreter -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["-I", "-c", IDENTITY], {}),
        (["-X", "utf8", "-c", IDENTITY], {}),
        (["-c", IDENTITY], {"COLD_PYTHON": "1"}),
        (["-c", IDENTITY], {"TQDM_DISABLE": "1"}),
        (["hides.py"], {}),
        (["-c", IDENTITY], {"PYTHONPATH": "hidden"}),
    ],
)
def test_what_cannot_be_imitated_is_cold(
    nursery: Nursery, tmp_path: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    (tmp_path / "hides.py").write_text(IDENTITY)
    (tmp_path / "tqdm.py").write_text("")
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("")
    found = printed(nursery, *arguments, cwd=tmp_path, env={**os.environ} | variables)
    assert found == f"{sys.executable}\n"


def test_a_folder_that_is_gone(nursery: Nursery, tmp_path: Path) -> None:
    command = 'mkdir gone; cd gone; rmdir ../gone; exec "$0" -c "import sys; print(sys.executable)"'
    found = subprocess.run(
        ["sh", "-c", command, nursery.wrappers / "python"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (found.stdout, found.stderr) == (f"{sys.executable}\n", "")


def test_nothing_outlives_the_server_that_is_killed(tmp_path: Path) -> None:
    made = Nursery()
    try:
        with waiting(made) as (process, pid):
            child = os.pidfd_open(pid)
            made._server.kill()
            assert_ends(child)
            assert process.wait(DEADLINE) in (70, -signal.SIGKILL)
        assert printed(made, "-c", IDENTITY) == f"{sys.executable}\n", "the real interpreter does it then"
    finally:
        made.close()
    assert not made.wrappers.exists()
