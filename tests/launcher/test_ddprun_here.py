"""``ddprun`` on this machine alone, as a user without other machines runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from jobs import (
    DDPRUN,
    LIMIT,
    NASTY,
    PYTHON,
    STAY,
    Run,
    ddprun,
    environment,
    processes_in,
    program,
    wait_until,
    write,
)
from kit.machine import Slowness

from ddp_callbacks.launcher.connection import Connection, NodeProblem, Shared
from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.launch import Launch
from ddp_callbacks.launcher.node.program import Node
from ddp_callbacks.launcher.options import parse_options

ALIAS = [*PYTHON, "-m", "ddp_callbacks"]


@pytest.mark.cold
@pytest.mark.smoke
def test_two_ranks_start_with_their_output_apart(tmp_path: Path) -> None:
    """`ddprun` starts N processes and keeps each one's output; rank 0 has its input."""
    variables = "os.environ['OMP_NUM_THREADS'], os.environ['MASTER_ADDR']"
    script = write(tmp_path, f"import os, sys; print('rank', os.environ['RANK'], repr(sys.stdin.read()), {variables})")
    login = {"SSH_CONNECTION": "198.51.100.7 50000 203.0.113.9 22"}  # says nothing of this machine
    done = ddprun("--nproc-per-node", "2", script, cwd=tmp_path, stdin="for rank 0", **login)
    threads = max(1, usable_cores() // 2)
    each = f"{threads} thread{'' if threads == 1 else 's'} each"
    assert (done.returncode, done.stderr) == (0, f"ddprun: localhost: ranks 0-1, {each}, interface lo\n")
    assert done.stdout == f"[localhost:0] rank 0 'for rank 0' {threads} 127.0.0.1\n"
    (folder,) = (tmp_path / "ddprun-logs").iterdir()
    assert (folder / "rank-1.log").read_text() == f"rank 1 '' {threads} 127.0.0.1\n"


WARNS = """
import os, time
from ddp_callbacks.errors import warn
del os.environ["DDP_CALLBACKS_REPORT"]  # as the recorder does
while os.environ["RANK"] == "1" and not os.path.exists("said"):
    time.sleep(0.01)
warn("all")
open("said", "w").close()
if os.environ["RANK"] == "1":
    warn("one")
"""


def test_a_warning_of_rank_1_alone_is_shown_and_one_of_all_ranks_once(tmp_path: Path) -> None:
    done = ddprun("--nproc-per-node", "2", write(tmp_path, WARNS), cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "Warning" in line]
    shown = ["0] {}:7: UserWarning: all", "1] {}:10: UserWarning: one"]
    assert said == [f"[localhost:{each.format(tmp_path / 'script.py')}" for each in shown], done.stderr


def test_rank_0_gets_much_input_as_fast_as_it_reads_and_the_end_of_it(tmp_path: Path) -> None:
    script = "import os, sys\nif os.environ['RANK'] == '0': print(sum(map(int, sys.stdin)), flush=True)"
    numbers = "\n".join(map(str, range(200_000)))
    done = ddprun("-H", "localhost:2", "--no-prefix", write(tmp_path, script), cwd=tmp_path, stdin=numbers)
    assert (done.returncode, done.stdout) == (0, f"{sum(range(200_000))}\n"), done.stderr


# Starts Python with these arguments on the terminal that is its standard input, as a shell in the foreground does.
ON_ITS_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # whatever nohup has started the tests
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
]


@pytest.mark.cold
@pytest.mark.parametrize("where", [[], ["-H", "far:1", "--rsh", "env -u"]], ids=["here", "on another machine"])
def test_rank_0_reads_what_is_typed(tmp_path: Path, where: list[str]) -> None:
    """Rank 0 reads what you type."""
    script = write(tmp_path, "print('got', input('name? '), input())")
    outside, inside = os.openpty()
    command = [*ON_ITS_TERMINAL, *DDPRUN[3:], *where, "--no-prefix", script]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdin=inside, **streams) as process:
        os.write(outside, b"Ada\nLovelace\n")
        said, errors = process.communicate(timeout=LIMIT)
    for descriptor in (outside, inside):
        os.close(descriptor)
    assert said == b"name? got Ada Lovelace\n", errors


@pytest.mark.parametrize("where", [[], ["-H", "far:1", "--rsh", "env -u"]], ids=["here", "on another machine"])
def test_a_loop_over_standard_input_runs_once_for_each_line(tmp_path: Path, where: list[str]) -> None:
    """Shell loops over `ddprun` lose no line."""
    script = write(tmp_path, "import sys\nprint('got', sys.argv[1:])")
    command = shlex.join([*DDPRUN, *where, "--no-prefix", script])
    loop = f"while read line; do {command} $line; done; echo all"
    words, lines = ["bash", "-c", loop], "1\n2\n3\n"
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(tmp_path), input=lines, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout == "got ['1']\ngot ['2']\ngot ['3']\nall\n", done.stderr


def test_rank_0_finds_the_end_of_its_input_again_after_a_restart(tmp_path: Path) -> None:
    script = "import os, sys\nprint(repr(sys.stdin.read()))\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    done = ddprun("--max-restarts", "1", "--no-prefix", write(tmp_path, script), cwd=tmp_path, stdin="once")
    assert (done.returncode, done.stdout) == (0, "'once'\n''\n"), done.stderr


CHARMAPS = Path("/usr/share/i18n/charmaps")


@pytest.mark.cold
@pytest.mark.skipif(not CHARMAPS.exists(), reason="needs character sets, of Debian's package locales")
@pytest.mark.parametrize("where", ["here", "on another machine"])
def test_messages_keep_their_bytes_where_the_locale_is_not_utf_8(tmp_path: Path, where: str) -> None:
    compiled = ["localedef", "--no-archive", "-c", "-f", "GBK", "-i", "POSIX", str(tmp_path / "zh.GBK")]
    subprocess.run(compiled, capture_output=True, timeout=LIMIT)
    (folder := tmp_path / "\u4e57").mkdir()  # in GBK its second byte is a backslash
    script = write(folder, "import sys\nprint(sys.flags.utf8_mode)\nraise ValueError('\\u4e57')", "\u4e57.py")
    locale = {"LOCPATH": str(tmp_path), "LC_ALL": "zh.GBK"}
    if where == "here":
        done = ddprun("--nproc-per-node", "1", script, "\u4e57", cwd=folder, **locale)
    else:
        rsh = " ".join(["env -u {host}", *(f"{name}={value}" for name, value in locale.items())])
        done = ddprun("-H", "far:1", "--rsh", rsh, script, "\u4e57", cwd=folder)
    node = "localhost" if where == "here" else "far"
    assert (done.returncode, done.stdout) == (1, f"[{node}:0] 0\n"), done.stderr
    *_, said, log = done.stderr.splitlines()
    assert said == f"ddprun: rank 0 on {node} failed with exit code 1: ValueError: \u4e57"
    assert f"{folder}/ddprun-logs" in log


def test_an_answer_that_comes_too_late_answers_nothing_else(tmp_path: Path) -> None:
    async def ask_twice() -> dict[str, object]:
        plan = NodePlan("here", python=sys.executable, cwd=str(tmp_path), is_here=True)
        node = Connection(plan, Shared(patience=LIMIT))
        try:
            await node.greet()
            late = f"while ! test -e {tmp_path}/asked; do sleep 0.01; done; echo late"
            with pytest.raises(NodeProblem, match="no answer within"):
                await node.ask(0.1, Node.output, ["sh", "-c", late], LIMIT)
            asking = asyncio.create_task(node.ask(None, Node.output, ["echo", "in time"], LIMIT))
            await asyncio.sleep(0)  # it has asked
            (tmp_path / "asked").touch()
            return await asking
        finally:
            await node.close(LIMIT)

    assert asyncio.run(ask_twice())["out"] == "in time\n"


CAUGHT = "try: open('/no')\n    except OSError: traceback.print_exc()\n    os.kill(os.getpid(), signal.SIGSEGV)"
CAUGHT_AND_EXIT = CAUGHT.replace("os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(3)")


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("sys.exit(7)", 7, "no exception was printed"),
        ("sys.exit('no more data')", 1, "no exception ended it; its last output: no more data"),
        (CAUGHT_AND_EXIT, 3, "no exception ended it; its last output: .* No such file or directory: '/no'"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), 40)", 168, "killed by signal 40"),
        (CAUGHT, 139, "killed by SIGSEGV"),
    ],
)
def test_the_exit_code_is_the_failing_rank_s(tmp_path: Path, end: str, code: int, reason: str) -> None:
    """It exits with the failed rank's code."""
    wait = "while True: time.sleep(1)"
    script = (
        f"import os, signal, sys, time, traceback\nif os.environ['RANK'] == '1':\n    print(1)\n    {end}\n{wait}\n"
    )
    with Slowness() as slowness:
        done = ddprun("-H", "localhost:2", write(tmp_path, script), cwd=tmp_path)
    assert done.returncode == code
    cause, log = done.stderr.splitlines()[-2:]
    assert re.fullmatch(f"ddprun: rank 1 on localhost failed with exit code {code}: {reason}", cause), cause
    assert log.startswith("ddprun: its full output is in ") and log.endswith("/rank-1.log")
    assert slowness.took < 30 * slowness.factor


# Rank 0 is killed, and its new process joins; rank 2 exits, and rank 1 waits until all is known.
GOES_ON = """
import os, signal, sys, time
rank, is_new = os.environ["RANK"], os.environ.get("DDP_CALLBACKS_SUCCESSOR")
print(f"rank {rank}, new: {is_new}", flush=True)
if rank == "0" and not is_new:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "0":
    print(repr(sys.stdin.read()), flush=True)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        file.write('{"ready": true}\\n')
if rank == "1":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        print('{"stores": {"1": ["h1", 7]}}', file=file)
    known = []
    with open(os.environ["DDP_CALLBACKS_NEWS"]) as news:
        while len(known) < 5:
            time.sleep(0.05)
            known += news.readlines()
    print(os.environ["DDP_CALLBACKS_KEEP_GOING"], "".join(sorted(known)), end="")
"""


@pytest.mark.cold
def test_a_job_goes_on_without_a_killed_process_and_replaces_it(tmp_path: Path) -> None:
    """`--keep-going` replaces killed processes."""
    script = write(tmp_path, GOES_ON)
    done = ddprun("-H", "localhost:3", "--keep-going", script, cwd=tmp_path, stdin="for rank 0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "ddprun: rank 0 on localhost was killed by SIGKILL; continuing with 2 processes",
        "ddprun: rank 0 on localhost: a new process joins; continuing with 3 processes",
        "ddprun: done, with 1 of 3 processes lost on the way, 1 of them replaced",
    ]
    assert done.stdout.splitlines()[0] == "[localhost:0] rank 0, new: None"
    (log,) = tmp_path.glob("ddprun-logs/*/rank-1.log")
    assert log.read_text().splitlines()[1:] == [
        '1 {"ended": {"0": 0}}',
        '{"ended": {"2": 0}}',
        '{"members": {"generation": 1, "ranks": [1, 2], "replaced": {}}}',
        '{"members": {"generation": 2, "ranks": [0, 1, 2], "replaced": {"0": 1}}}',
        '{"stores": {"1": ["h1", 7]}}',
    ]
    (log,) = tmp_path.glob("ddprun-logs/*/rank-0.log")
    assert log.read_text() == "rank 0, new: None\nrank 0, new: 1\n''\n"


STOPS = """
import os, pathlib, signal, time
if os.environ["RANK"] == "1":
    if "DDP_CALLBACKS_SUCCESSOR" not in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)
    pathlib.Path("new").touch()
while not os.path.exists("new"):
    time.sleep(0.01)
"""


@pytest.mark.cold
@pytest.mark.waits(2)
def test_a_job_goes_on_without_a_process_that_stays_stopped(tmp_path: Path) -> None:
    flags = ("-H", "localhost:2", "--keep-going", "--heartbeat-timeout", "2")
    done = ddprun(*flags, write(tmp_path, STOPS), cwd=tmp_path, COLD_PYTHON="1")
    assert done.returncode == 0, done.stderr
    killed = "killed by ddprun, as it was stopped (by SIGSTOP, say) for 2 s; continuing with 1 process"
    assert f"ddprun: rank 1 on localhost was {killed}" in done.stderr.splitlines()
    (log,) = tmp_path.glob("ddprun-logs/*/rank-1.log")
    assert log.read_text().startswith("ddprun kills this process, which was stopped for too long\n")


KEPT_ALIVE = """
import multiprocessing, os, sys, threading, time
rank = os.environ["RANK"]
if rank != os.environ["TORCHELASTIC_RESTART_COUNT"]:
    time.sleep(1000)
if rank == "0":
    sys.excepthook = lambda *_: None
    multiprocessing.Process(target=time.sleep, args=(1000,)).start()
threading.Thread(target=time.sleep, args=(1000,)).start()
raise ValueError(f"no data for rank {rank}")
"""


@pytest.mark.cold
@pytest.mark.waits(7)
def test_a_rank_that_its_own_thread_or_process_keeps_alive_after_an_exception_ends_the_job(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--grace", "0.5")
    done = ddprun(*flags, write(tmp_path, KEPT_ALIVE), cwd=tmp_path)
    kept = "has failed: ValueError: no data for rank"
    ends = "Its process has not ended yet, as Python, threads, child processes or exit handlers take time; "
    ends += "ddprun waits up to 0.5 s for it"
    said = [line.removeprefix("ddprun: ") for line in done.stderr.splitlines() if line.startswith("ddprun: rank")]
    assert (done.returncode, said) == (
        1,
        [
            f"rank 0 on localhost {kept} 0. {ends}",
            "rank 0 on localhost failed with exit code 1: ValueError: no data for rank 0; all start again",
            f"rank 1 on localhost {kept} 1. {ends}",
            "rank 1 on localhost failed with exit code 1: ValueError: no data for rank 1",
        ],
    )
    assert processes_in(tmp_path) == {}


@pytest.mark.cold
@pytest.mark.waits(6)
def test_a_thread_that_keeps_a_rank_alive_after_sys_exit_is_named(tmp_path: Path) -> None:
    script = "import sys, threading, time\nthreading.Thread(target=time.sleep, args=(5,), name='feeder').start()"
    done = ddprun("--nproc-per-node", "1", write(tmp_path, f"{script}\nsys.exit(3)"), cwd=tmp_path)
    remedy = "Join them, or make them daemon threads"
    said = f"rank 0 on localhost is over, but still runs: its thread feeder must end, too. {remedy}"
    assert done.returncode == 3 and f"ddprun: {said}\n" in done.stderr, done.stderr


MISFORTUNES = """
import atexit, os, sys, time
from ddp_callbacks import join_process_group
from ddp_callbacks.comm.agreement import require_agreement

def happens(what):
    if what == "slow to exit":
        atexit.register(time.sleep, 8)
        raise ValueError("the data are gone")
    if what in ("left", "exited before it joined"):
        os._exit(0)

if os.environ["RANK"] == "1":
    happens(sys.argv[1] + " before it joined")
join_process_group()
for step in range(10_000):
    settings = {"lr": 0.1}
    if os.environ["RANK"] == "1" and step == 3:
        happens(sys.argv[1])
        settings["lr"] = 0.2
    require_agreement(settings, "the Trial", "Give each the same.")
    time.sleep(0.01)
"""


WHO = {
    "slow to exit": r"rank 1 on localhost failed(?: with exit code \d+)?: ValueError: the data are gone",
    "differs": r"rank [01] on localhost, like every rank, failed with exit code 1: ddp_callbacks.errors.MismatchError: "
    r"the ranks disagree about the Trial:\n  lr: 0.1 on rank 0; 0.2 on rank 1\nGive each the same.\n"
    r"Ranks: rank 0 \(.*\), rank 1 \(.*\)\.",
    "left": r"rank 1 on localhost exited with code 0 first. rank 0 on localhost reports: "
    r"ddp_callbacks.errors.PeerError: rank 1 \(.*",
    "exited": r"rank 0 on localhost failed with exit code 1: ddp_callbacks.errors.RendezvousError: rank 1 of 2 did not "
    r"join at 127.0.0.1:\d+, but exited with code 0; rank 0 on host \S+ waited\..*",
}


@pytest.mark.cold
@pytest.mark.parametrize("what", WHO)
def test_who_came_first_is_named_with_what_happened(tmp_path: Path, what: str) -> None:
    with Slowness() as slowness:
        done = ddprun("--nproc-per-node", "2", write(tmp_path, MISFORTUNES), what, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(f"^ddprun: {WHO[what]}$", done.stderr, re.M), done.stderr[-5000:]
    assert slowness.took < 40 * slowness.factor


def test_it_ends_when_nobody_reads_any_more(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nwhile True: print('line', flush=True); time.sleep(0.01)")
    with Run(tmp_path, script, pipe=True) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == b"[localhost:0] line\n"
        run.process.stdout.close()
        assert run.end() == 128 + signal.SIGPIPE
    assert "Traceback" not in run.text


@pytest.mark.parametrize("words", [["doctor"], ["--dry-run", __file__]])
def test_what_it_prints_may_go_to_a_program_that_reads_less(tmp_path: Path, words: list[str]) -> None:
    command = ["bash", "-c", 'set -o pipefail; "$@" | true', "bash", *DDPRUN]
    done = ddprun(*words, cwd=tmp_path, command=command)
    assert (done.returncode, done.stderr) in [(128 + signal.SIGPIPE, ""), (0, "")]  # printed before that ended


def test_a_full_disk_under_what_it_prints_does_not_end_the_training(tmp_path: Path) -> None:
    script = write(tmp_path, "for i in range(100): print(i, flush=True)\nopen('ran', 'w').close()")
    command = ["sh", "-c", 'exec "$@" >/dev/full', "sh", *DDPRUN]
    done = ddprun(script, cwd=tmp_path, command=command)
    assert (done.returncode, (tmp_path / "ran").exists()) == (1, True), done.stderr
    (folder,) = (tmp_path / "ddprun-logs").iterdir()
    says = f"ddprun: what is printed here is not complete: No space left on device; all output is in {folder}"
    assert done.stderr.splitlines()[1:] == [says]
    assert (folder / "rank-0.log").read_text().split() == [*map(str, range(100))]
    done = ddprun("--dry-run", script, cwd=tmp_path, command=command)
    says = "ddprun: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, says)


STREAMS = """
import os, sys
for number in range(50):
    print("out", number)
    print("err", number, file=sys.stderr)
raise ValueError("at the end")
"""


@pytest.mark.parametrize("redirection", ["> said 2>&1", "2> said"])
def test_lines_keep_their_order_where_output_and_errors_go_to_one_place(tmp_path: Path, redirection: str) -> None:
    words = ["sh", "-c", f'"$@" {redirection}', "sh", *DDPRUN]
    done = ddprun("--no-prefix", write(tmp_path, STREAMS), cwd=tmp_path, command=words)
    kinds = ["out", "err"] if "1" in redirection else ["err"]
    expected = [f"{kind} {number}" for number in range(50) for kind in kinds]
    _, *said = (tmp_path / "said").read_text().splitlines()
    assert (done.returncode, said[: len(expected)], said[len(expected)]) == (
        1,
        expected,
        "Traceback (most recent call last):",
    )
    assert said[-2] == "ddprun: rank 0 on localhost failed with exit code 1: ValueError: at the end"
    assert done.stdout == ("" if "1" in redirection else "".join(f"out {number}\n" for number in range(50)))


def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    # As cron and daemons may start it.
    script = write(tmp_path, "import os, sys; open('ran', 'w').write(os.environ['RANK'] + sys.stdin.read())")
    done = ddprun(script, cwd=tmp_path, command=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *DDPRUN])
    assert (done.returncode, (tmp_path / "ran").read_text()) == (0, "0")


@pytest.mark.parametrize("name", ["in_no_path", "./without_its_first_line"])
def test_a_program_that_cannot_be_started_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    write(tmp_path, "echo started", name)
    (tmp_path / name).chmod(0o755)
    done = ddprun("--no-python", name, cwd=tmp_path)
    says = f"ddprun: localhost: cannot start {name}: .*Name a program in PATH, or by its path .* must begin with #!"
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr


def test_a_terminal_that_takes_nothing_does_not_keep_anything_running(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nwhile True: print('x' * 1000, flush=True)")
    with Run(tmp_path, script, pipe=True) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() and select.select([run.process.stdout], [], [], LIMIT)[0]
        with Slowness() as slowness:
            run.process.terminate()
            wait_until(lambda: not set(processes_in(tmp_path)) - {run.process.pid})
        assert slowness.took < 9 * slowness.factor
        run.process.stdout.read()
        assert run.end() == 143
    assert "Traceback" not in run.text


def test_a_closed_terminal_does_not_end_what_nohup_has_started(tmp_path: Path) -> None:
    stays = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('now'): time.sleep(0.05)"
    with Run(tmp_path, write(tmp_path, stays), command=["env", "--ignore-signal=HUP", *DDPRUN[2:]]) as run:
        run.await_text("up")
        run.process.send_signal(signal.SIGHUP)
        (tmp_path / "now").touch()
        assert run.end() == 0, run.text


HANGS = """
import os, signal, threading, time
known = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}}
for number, handler in known.items():  # as a Trainer does after a fit
    if handler is not None: signal.signal(number, handler)
def wait():
    print("up", flush=True)
    while not os.path.exists("now"): time.sleep(0.05)
def step(): wait()
def load(): wait()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
load() if os.environ["RANK"] == "1" else step()
"""


def test_a_running_job_is_asked_where_its_ranks_are_and_goes_on(tmp_path: Path) -> None:
    """`ddprun stacks` shows where ranks are."""
    with Run(tmp_path, "-H", "localhost:2", "--show-ranks", "all", write(tmp_path, HANGS)) as run:
        run.await_text("up", 2)
        run.process.send_signal(signal.SIGTSTP)
        asked, refused = ddprun("stacks", "ddprun-logs", cwd=tmp_path), ddprun("join", "-H", "localhost", cwd=tmp_path)
        (tmp_path / "now").touch()
        assert run.end() == 0, run.text
    assert re.match(r"rank 0 on localhost, rank 1 on localhost: .*script.py:8 in wait\n", asked.stdout), asked
    assert [line.removeprefix("ddprun: ") for line in run.lines[-2:]] == asked.stdout.splitlines()
    assert refused.stderr == "ddprun: no node can join the job: it was started without --keep-going.\n", refused
    assert "File" not in run.text and "ddprun: Ctrl-Z stops no job: " in run.text
    for rank, function in enumerate(("step", "load")):
        (log,) = tmp_path.glob(f"ddprun-logs/*/rank-{rank}.log")
        assert f" in {function}\n" in log.read_text()
    (tmp_path / "a-folder-beside").mkdir()
    for folder in ("a-folder-beside", "nowhere"):
        wrong = ddprun("stacks", folder, cwd=tmp_path)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
    over = ddprun("stacks", cwd=tmp_path)
    assert (over.returncode, over.stdout) == (2, "") and "has ended." in over.stderr


INNOCENT = """
import os, signal
signal.signal(signal.SIGQUIT, lambda *_: os.write(1, b"SIGQUIT"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(os.getpid(), flush=True)
while True: signal.pause()
"""


def test_a_request_reaches_no_process_of_another_job(tmp_path: Path) -> None:
    with subprocess.Popen([*PYTHON, "-c", INNOCENT], stdout=subprocess.PIPE, text=True) as innocent:
        assert innocent.stdout is not None
        folder = tmp_path / "ddprun-logs" / f"20261127-010101-{innocent.stdout.readline().strip()}"
        folder.mkdir(parents=True)
        done = ddprun("stacks", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"ddprun: the job of {folder} has ended.\n")
        innocent.terminate()
        assert innocent.stdout.read() == ""


def test_much_output_comes_whole_and_in_order(tmp_path: Path) -> None:
    """Much output arrives whole and in order."""
    script = write(tmp_path, "import sys\nfor i in range(300000): sys.stdout.write(f'{i}\\n')\nprint('end', end='')")
    done = ddprun("--no-prefix", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*map(str, range(300000)), "end"]


BAR = """
import os, sys, tqdm
for _ in tqdm.tqdm(range(3), "a long description of what this bar shows", mininterval=0, dynamic_ncols=True):
    pass
print("has a terminal:", os.isatty(1), file=sys.stderr)
if os.environ["RANK"] == "0":
    open("up", "w").close()
    while os.get_terminal_size(1).columns != 45 - len("[localhost:0] "):
        pass
"""


@pytest.mark.cold
@pytest.mark.parametrize("columns", [60, 200])
def test_a_progress_bar_is_as_wide_as_the_terminal_and_stays_on_its_line(tmp_path: Path, columns: int) -> None:
    """A bar stays on its line."""
    outside, inside = os.openpty()
    termios.tcsetwinsize(inside, (30, columns))
    command = [*ON_ITS_TERMINAL, *DDPRUN[3:], "-H", "localhost:2", write(tmp_path, BAR)]
    environ = environment(tmp_path, TERM="xterm")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
    said = b""
    with subprocess.Popen(command, cwd=tmp_path, env=environ, **streams) as process:
        os.close(inside)
        wait_until((tmp_path / "up").exists)
        termios.tcsetwinsize(outside, (30, 45))
        with suppress(OSError):  # the end of a terminal
            while data := os.read(outside, 1 << 16):
                said += data
    os.close(outside)
    assert process.returncode == 0, said
    drawn = [text for text in re.split(r"[\r\n]+", said.decode()) if "long description" in text]
    assert max(map(len, drawn)) == columns - 1, drawn
    (log,) = tmp_path.glob("ddprun-logs/*/rank-1.log")
    assert b"has a terminal: True" in said and "has a terminal: False" in log.read_text()


@pytest.mark.cold
def test_a_command_sets_up_the_node_before_the_ranks_start(tmp_path: Path) -> None:
    """`--setup` runs once on each node; what it leaves ends with the job."""
    script = write(tmp_path, "import os, sys; print(os.environ['FLAVOR'], len(os.sched_getaffinity(0)), sys.argv[1:])")
    program(tmp_path / "bin" / "only-here", f'exec {sys.executable} "$@"')
    (tmp_path / "env.sh").write_text(f"echo loaded\nexport FLAVOR='a b' PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / ".bash_profile").write_text("cd /\n")
    leaves = "sleep 1000 & (setsid sleep 1000 &) ; echo ran >> runs"
    setup = [
        "--setup",
        f"source ./env.sh; {leaves}  # mine",
        "--python",
        "only-here",
        "--bind",
        "core",
        "-H",
        "localhost:2",
    ]
    done = ddprun(*setup, script, "it's", cwd=tmp_path, HOME=str(tmp_path))
    cores = len(os.sched_getaffinity(0)) // 2
    assert (done.returncode, done.stdout) == (0, f'[localhost:0] a b {cores} ["it\'s"]\n'), done.stderr
    assert ((tmp_path / "runs").read_text(), processes_in(tmp_path)) == ("ran\n", {})
    for failing, says in {
        "source no-such-file": "(exit code 1): bash: line 1: no-such-file: No such file or directory",
        "exit 3": "(exit code 3): no output",
        "conda activate train": "(exit code 127): bash: line 1: conda: command not found. Begin with: source "
        "CONDA/etc/profile.d/conda.sh",
    }.items():
        done = ddprun("--setup", failing, script, cwd=tmp_path, HOME=str(tmp_path))
        says = f"ddprun: localhost: --setup {failing!r} or Python failed {says}.\n"
        assert (done.returncode, done.stderr) == (2, says)


def test_commands_that_set_up_a_node_may_take_longer_than_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_callbacks.launcher.launch._LONG", 0.5)
    said = list[str]()

    async def connect() -> None:
        setup = ["--setup", f"while ! test -e {tmp_path}/told; do sleep 0.01; done", "--chdir", str(tmp_path)]
        job = parse_options([*setup, write(tmp_path, "")], {})
        async with Launch(job, answer_timeout=0.2) as launch:
            await launch.connect(take)

    def take(line: str) -> None:
        said.append(line)
        (tmp_path / "told").touch()

    asyncio.run(connect())
    assert re.fullmatch("waiting for --setup 'while .*' on localhost; Ctrl-C ends the wait", said[0])


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no_such.py"], "localhost: file not found: no_such.py (working directory {cwd}).\n"),
        (["--python", "/no/python", "x.py"], "localhost: cannot start the interpreter /no/python. Install it "),
        (["--chdir", "/no", "x.py"], "localhost: cannot enter the working directory /no: No such file or directory."),
        (
            ["--master-addr", "192.0.2.1", "{program}"],
            "localhost: cannot listen on 192.0.2.1 port 0: Cannot assign requested address. Choose another with "
            "--master-port or --master-addr.\n",
        ),
        (
            ["--master-port", "{taken}", "{program}"],
            "localhost: cannot listen on 127.0.0.1 port {taken}: Address already in use. Choose another with "
            "--master-port or --master-addr.\n",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, argv: list[str], says: str) -> None:
    """An impossible command gets one line with the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"cwd": str(tmp_path), "taken": server.getsockname()[1], "program": __file__}
        done = ddprun(*(word.format(**names) for word in argv), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ddprun: {says.format(**names)}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


ONLY_THE_STANDARD_LIBRARY = """
import sys
class Finder:
    def find_spec(self, name, *_):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ("ddp_callbacks", "usercustomize"):
            raise ImportError(f"there is no {package} here")
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """The variable by which a Python finds the standard library and this package alone."""
    folder = tmp_path / "site"
    folder.mkdir()
    write(folder, ONLY_THE_STANDARD_LIBRARY, "sitecustomize.py")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "usage: ddprun [flags]"),
        (["--help-all"], 0, "usage: ddprun [flags]"),
        (["doctor", "--help"], 0, "usage: ddprun doctor"),
        (["--dry-run", "-H", "localhost:2", "x.py"], 0, "node 0: localhost"),
        (["--nproc-per-nodes", "2", "x.py"], 2, "ddprun: unknown flag --nproc-per-nodes: neither ddprun nor torchrun"),
        (["doctor", "--jsn"], 2, "ddprun: unknown flag --jsn: neither ddprun nor torchrun has it."),
    ],
)
def test_it_answers_without_torch_where_nothing_is_to_be_started(
    tmp_path: Path, no_torch: dict[str, str], argv: list[str], code: int, says: str
) -> None:
    """`--help`, `--dry-run` and wrong flags answer without torch."""
    done = ddprun(*argv, cwd=tmp_path, **no_torch)
    assert (done.returncode, (done.stdout + done.stderr)[: len(says)]) == (code, says)
    if argv[-1] == "x.py":
        alias = ddprun(*argv, cwd=tmp_path, command=ALIAS, **no_torch)
        assert (alias.returncode, alias.stdout, alias.stderr) == (code, done.stdout, done.stderr)
    if argv == ["--help"]:
        assert done.stdout.count("\n  -") == 15 and "--nnodes" not in done.stdout
    if argv == ["--help-all"]:
        assert done.stdout.index("--hostfile") < done.stdout.index("--nnodes N") < done.stdout.index("--no-python")
        assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.cold
def test_a_machine_without_torch_starts_a_job_where_there_is_one(tmp_path: Path, no_torch: dict[str, str]) -> None:
    python = program(tmp_path / "python", f'unset PYTHONPATH\nexec {sys.executable} "$@"')
    script = write(tmp_path, "import os, torch; print(torch.tensor(int(os.environ['WORLD_SIZE'])))")
    done = ddprun("--python", python, "--nproc-per-node", "2", script, cwd=tmp_path, **no_torch)
    assert (done.returncode, done.stdout) == (0, "[localhost:0] tensor(2)\n"), done.stderr


# --- the way to a node ------------------------------------------------------------------------------------------------

ECHO = """
import json, os, sys
print(json.dumps([[os.fsencode(word).hex() for word in sys.argv[1:]], os.environb[b"PROBE"].hex(), os.getcwdb().hex()]))
"""


def as_hex(text: str) -> str:
    return os.fsencode(text).hex()


@pytest.mark.parametrize("shell", ["none", "sh", "bash", "dash", "zsh", "fish", "tcsh", "csh"])
def test_any_bytes_arrive_through_any_command_and_login_shell(tmp_path: Path, shell: str) -> None:
    """Arguments, values and folders of any bytes arrive unchanged."""
    if shell != "none" and shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    # A command that starts the words that it is given, and one that gives them to a shell, which says something first.
    runs = 'exec "$@"' if shell == "none" else f'echo welcome; exec {shell} -c "$*"'
    folder = tmp_path / "it's a $HOME\n; folder\udcff "
    folder.mkdir()
    python = program(folder / "python 3\\n", f'exec {sys.executable} "$@"')
    enter = program(tmp_path / "enter", f"shift; {runs}")
    value = "".join(NASTY)
    flags = ["-H", "pod-7", "--rsh", enter, "--python", python, "--log-dir", str(tmp_path), "-x", f"PROBE={value}"]
    done = ddprun(*flags, write(folder, ECHO, "it's.py"), *NASTY, cwd=folder)
    assert done.returncode == 0, done.stderr
    label, _, said = done.stdout.partition(" ")
    assert label == "[pod-7:0]"
    assert json.loads(said) == [[as_hex(word) for word in NASTY], as_hex(value), as_hex(str(folder))]


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ('echo "error: pod-7 not found" >&2; exit 1', "enter cannot reach it (exit code 1): error: pod-7 not found"),
        ("exit 0", "enter cannot reach it (exit code 0): no message"),
    ],
)
def test_a_command_that_does_not_reach_a_node_is_told_with_its_words(tmp_path: Path, runs: str, says: str) -> None:
    enter = program(tmp_path / "enter", runs)
    done = ddprun("-H", "pod-7", "--rsh", enter, write(tmp_path, "print(1)"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ddprun: pod-7: {says}. Try: {enter} pod-7 true.\n"


def with_ssh(folder: Path, text: str) -> dict[str, str]:
    """The variable by which ``text`` is what ssh does, in a folder of its own."""
    program(folder / "bin" / "ssh", f"cd {folder}\n{text}")
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}"}


TURNED_AWAY = """
echo kex_exchange_identification: Connection closed by remote host >&2
echo Connection closed by 10.0.0.1 port 22 >&2
exit 255
"""


@pytest.mark.waits(2)
def test_a_login_that_an_sshd_has_no_time_for_is_tried_again(tmp_path: Path) -> None:
    """`ddprun` retries logins that busy hosts reject."""
    rejects = f'echo >>tries\n[ $(wc -l <tries) -le 2 ] && {{ {TURNED_AWAY} }}\nexec sh -c "${{@: -1}}"'
    variables = with_ssh(tmp_path, rejects)
    done = ddprun("-H", "192.0.2.7", write(tmp_path, "print('started')"), cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, "[192.0.2.7:0] started\n"), done.stderr
    assert (tmp_path / "tries").read_text().count("\n") == 3


def test_no_more_than_eight_log_in_at_the_same_time(tmp_path: Path) -> None:
    # sshd turns some away as soon as ten are not done yet, of the node or of a host on the way.
    count = "mkdir -p running; touch running/$$; ls running | wc -l >>counts; sleep 0.2; rm running/$$"
    variables = with_ssh(tmp_path, f"{count}\necho Permission denied >&2\nexit 255")
    hosts = ",".join(f"198.51.100.{number}" for number in range(1, 25))
    done = ddprun("-H", hosts, write(tmp_path, "print('started')"), cwd=tmp_path, **variables)
    assert (done.returncode, done.stderr.count("login refused")) == (2, 24), done.stderr
    counts = list(map(int, (tmp_path / "counts").read_text().split()))
    assert len(counts) == 24 and 2 <= max(counts) <= 8


def test_a_node_with_an_older_kernel_does(tmp_path: Path) -> None:
    """`ddprun` works on nodes with older kernels."""
    # Linux 4.18, that of many clusters, has no pidfd_open.
    write(tmp_path, "import os\ndel os.pidfd_open\n", "sitecustomize.py")
    lets_it_in = '[ "$1" = -I ] && shift'  # without that flag the file above is read
    python = program(tmp_path / "python", f'{lets_it_in}\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    script = write(tmp_path, "import os, sys; print(hasattr(os, 'pidfd_open')); sys.exit(3)")
    done = ddprun("--python", python, script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "[localhost:0] False\n"), done.stderr


# --- the end ----------------------------------------------------------------------------------------------------------

# A worker with a child, in a session of its own, whose child has let itself be orphaned.
FAMILY = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
others, said = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(said, b"g")
        time.sleep(1000)
    os.write(said, b"c")
    if "orphan" in sys.argv:
        os._exit(0)
    time.sleep(1000)
os.read(others, 1), os.read(others, 1)
print("up", flush=True)
while "ends" in sys.argv:
    time.sleep(0.01)
    if os.path.exists("now"):
        sys.exit(5)
time.sleep(1000)
"""


# How a job's processes are, what its ddprun gets, its exit code, and within how many seconds all is gone. One that is
# stopped is not heard of any more.
ENDS = {
    "hears": ([signal.SIGKILL], -signal.SIGKILL, 2),
    "orphan": ([signal.SIGKILL], -signal.SIGKILL, 2),
    "deaf": ([signal.SIGKILL], -signal.SIGKILL, 4),
    "orphan, by a signal": ([signal.SIGTERM], 143, 2),
    "deaf orphan, by two signals": ([signal.SIGINT, signal.SIGINT], -signal.SIGINT, 1),
    "deaf, by silence": ([signal.SIGSTOP], -signal.SIGKILL, 4),
    "orphan ends": ([], 5, 2),
    "deaf ends": ([], 5, 4),
}


@pytest.mark.waits(4)
def test_a_job_ends_whole_with_ddprun_or_by_itself(tmp_path: Path) -> None:
    """A job's end takes its orphans and folders along."""
    with ExitStack() as stack:
        runs = {}
        for how in ENDS:
            (tmp_path / how).mkdir()
            silence = "2" if "silence" in how else str(LIMIT)
            flags = ["--heartbeat-timeout", silence, *(["--grace", str(LIMIT)] if "two" in how else [])]
            words = [write(tmp_path / how, FAMILY), *how.partition(",")[0].split()]
            runs[how] = stack.enter_context(Run(tmp_path / how, *flags, *words))
        for how, run in runs.items():
            run.await_text("up")
            for number in ENDS[how][0][1:]:
                run.signal(number)
                run.await_text("asking all processes to stop")
        took: dict[str, float] = {}

        def all_are_gone() -> bool:
            for how in runs.keys() - took:
                stopped = {runs[how].process.pid} if signal.SIGSTOP in ENDS[how][0] else set()
                if not set(processes_in(tmp_path / how)) - stopped:
                    took[how] = time.monotonic() - begin
            return len(took) == len(runs)

        with Slowness() as slowness:
            begin = time.monotonic()
            for how, run in runs.items():
                (tmp_path / how / "now").touch()
                for number in ENDS[how][0][:1]:
                    run.signal(number)
            wait_until(all_are_gone)
        assert not {how: took[how] for how in ENDS if took[how] >= ENDS[how][2] * slowness.factor}, slowness.factor
    assert {how: run.end() for how, run in runs.items()} == {how: code for how, (_, code, _) in ENDS.items()}


def test_a_killed_program_of_a_node_leaves_no_rank(tmp_path: Path) -> None:
    with Run(tmp_path, write(tmp_path, STAY)) as run:
        run.await_text("up")
        (node,) = [pid for pid, line in run.processes().items() if "stdin.buffer" in line]
        os.kill(node, signal.SIGKILL)
        assert run.end() == 1
    assert re.search("^ddprun: localhost: the connection was lost", run.text, re.M)
    wait_until(lambda: not any("script.py" in line or "store" in line for line in processes_in(tmp_path).values()))
    for pid in processes_in(tmp_path):  # what a rank has started in a session of its own, of which nobody knows now
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("command", [DDPRUN, ALIAS], ids=["ddprun", "alias"])
def test_a_ctrl_c_while_modules_are_imported_is_not_lost(tmp_path: Path, command: list[str]) -> None:
    """Early Ctrl-C ends `ddprun` and `python -m ddp_callbacks`."""
    # An exception in a finalizer is ignored by Python, and so was the KeyboardInterrupt of Ctrl-C.
    interrupts = """
import os, signal, sys
class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(self, name, *_):
        if name == "ddp_callbacks.launcher.cli":
            Interrupted()
sys.meta_path.insert(0, Finder())
"""
    write(tmp_path, interrupts, "sitecustomize.py")
    done = ddprun(write(tmp_path, "print('started')"), cwd=tmp_path, command=command, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


# --- faults of former times -------------------------------------------------------------------------------------------

FAILS_BESIDE_A_DEAF_ONE = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
open(f"up-{os.environ['RANK']}", "w").close()
while not os.path.exists("up-0"):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise ValueError("the cause")
while True:
    time.sleep(1000)
"""


def test_a_ctrl_c_after_a_failure_does_not_hide_it(tmp_path: Path) -> None:
    flags = ["-H", "localhost:2", "--shutdown-timeout", str(LIMIT)]
    with Run(tmp_path, *flags, write(tmp_path, FAILS_BESIDE_A_DEAF_ONE)) as run:
        run.await_files("asked")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 1
    assert run.lines[-2] == "ddprun: rank 1 on localhost failed with exit code 1: ValueError: the cause"


CLEANS_UP = """
import os, sys, time
try:
    open(f"up-{os.environ['RANK']}", "w").close()
    time.sleep(1000)
finally:
    print("cleans up", file=sys.stderr)
"""


@pytest.mark.parametrize("flags", [[], ["--grace", str(LIMIT)]], ids=["", "grace"])
def test_ctrl_c_is_keyboard_interrupt_in_a_script_that_handles_no_signal(tmp_path: Path, flags: list[str]) -> None:
    with Run(tmp_path, "-H", "localhost:2", "--show-ranks", "all", *flags, write(tmp_path, CLEANS_UP)) as run:
        run.await_files("up-0", "up-1")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == -signal.SIGINT
    assert sum("cleans up" in line for line in run.lines) == 2
    assert run.lines[-1].startswith("ddprun: stopped by SIGINT"), run.lines


def test_a_command_that_outlives_what_it_has_started_does_not_keep_the_report_back(tmp_path: Path) -> None:
    runs = f'shift\n"$@"\nexec >&- 2>&-\nexec sleep {LIMIT:g}'
    enter, script = program(tmp_path / "enter", runs), write(tmp_path, "raise ValueError('x')")
    with Slowness() as slowness:
        done = ddprun("-H", "pod-7:1", "--rsh", enter, script, cwd=tmp_path)
    assert done.stderr.splitlines()[-2] == "ddprun: rank 0 on pod-7 failed with exit code 1: ValueError: x"
    assert slowness.took < 20 * slowness.factor


@pytest.mark.cold
def test_without_an_ssh_client_it_says_so(tmp_path: Path) -> None:
    done = ddprun(
        "-H", "far", write(tmp_path, ""), cwd=tmp_path, PATH=str(tmp_path), command=[sys.executable, *DDPRUN[3:]]
    )
    says = "ddprun: far: there is no ssh on this machine to reach it by. Install it, or name another: --rsh.\n"
    assert (done.returncode, done.stderr) == (2, says)


def test_a_job_that_ends_with_75_at_once_is_not_started_again_for_ever(tmp_path: Path) -> None:
    done = ddprun(
        "-H", "localhost:1", "--requeue", write(tmp_path, "raise SystemExit(75)"), cwd=tmp_path, LSB_JOBID="7"
    )
    assert done.returncode == 75
    assert re.search(
        r"^ddprun: not started again: .* exited with 75 after [\d.]+ s, and nobody asked$", done.stderr, re.M
    )


@pytest.mark.cold
def test_a_closed_terminal_ends_the_job_with_its_logs_whole(tmp_path: Path) -> None:
    """A closed terminal ends the job; its logs are whole."""
    talks = """
import os, signal, sys, time
def leave(*_):
    print("last words", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
open("up", "w").close()
while True:
    print("line", flush=True)
    time.sleep(0.01)
"""
    outside, inside = os.openpty()
    command = [*ON_ITS_TERMINAL, *DDPRUN[3:], write(tmp_path, talks)]
    environ = environment(tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        try:
            wait_until((tmp_path / "up").exists)
            os.close(outside)
            assert process.wait(LIMIT) == 128 + signal.SIGHUP
        finally:
            process.kill()
    (log,) = tmp_path.glob("ddprun-logs/*/rank-0.log")
    assert log.read_text().endswith("last words\n")
    assert (log.parent.stat().st_mode & 0o777) == 0o700
