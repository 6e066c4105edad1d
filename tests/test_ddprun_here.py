"""``ddprun`` on this machine alone, as a user without other machines runs it."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Slowness

from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.meeting import choose_interface

LIMIT = 600.0  # seconds
DDPRUN = [sys.executable, "-m", "ddp_callbacks.launcher"]
ALIAS = [sys.executable, "-m", "ddp_callbacks"]
# Without torchrun: for what does not depend on it.
PLAIN = [sys.executable, "-P", str(Path(__file__).with_name("ddprun_with_plain_agent.py"))]


def ddprun(*argv: str, cwd: Path, stdin: str = "", command: list[str] = DDPRUN) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["PWD"] = str(cwd)
    return subprocess.run(
        [*command, *argv], cwd=cwd, env=environ, input=stdin, capture_output=True, text=True, timeout=LIMIT
    )


def write(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


@pytest.mark.cold
@pytest.mark.smoke
def test_two_ranks_start_with_their_output_apart(tmp_path: Path) -> None:
    script = "import os, sys; print('rank', os.environ['RANK'], repr(sys.stdin.read()), os.environ['OMP_NUM_THREADS'])"
    done = ddprun("--nproc-per-node", "2", write(tmp_path, script), cwd=tmp_path, stdin="not for the ranks")
    threads = max(1, usable_cores() // 2)
    each = f"{threads} thread{'' if threads == 1 else 's'} each"
    assert (done.returncode, done.stderr) == (0, f"ddprun: localhost: ranks 0-1, {each}, interface lo\n")
    assert done.stdout == f"[localhost:0] rank 0 '' {threads}\n"
    (folder,) = (tmp_path / "ddprun-logs").iterdir()
    assert (folder / "rank-1.log").read_text() == f"rank 1 '' {threads}\n"


@pytest.mark.cold
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("sys.exit(7)", 7, "no exception was printed"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_the_failing_rank_s(tmp_path: Path, end: str, code: int, reason: str) -> None:
    wait = "while True: time.sleep(1)"
    script = f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    print(1)\n    {end}\n{wait}\n"
    with Slowness() as slowness:
        done = ddprun("--nproc-per-node", "2", write(tmp_path, script), cwd=tmp_path)
    assert done.returncode == code
    cause, log = done.stderr.splitlines()[-2:]
    assert cause == f"ddprun: rank 1 on localhost failed with exit code {code}: {reason}"
    assert log.startswith("ddprun: its full output is in ") and log.endswith("/rank-1.log")
    assert slowness.took < 30 * slowness.factor


MISFORTUNES = """
import atexit, os, sys, time
import torch
from ddp_callbacks import join_process_group
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.process_group.failures import report_failure

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {}["sensor 7"]

def happens(what):
    if what == "slow to exit":
        atexit.register(time.sleep, 8)
        raise ValueError("the data are gone")
    if what == "reported, and exits with 0":
        report_failure(ValueError("the data are gone"))
        sys.exit(0)
    if what == "left":
        os._exit(0)
    if what == "loader":
        list(torch.utils.data.DataLoader(Rows(), num_workers=1))
    if what == "long message":
        raise ValueError("x" * 30_000_000)

join_process_group()
for step in range(10_000):
    settings = {"lr": 0.1}
    if os.environ["RANK"] == "1" and step == 3:
        happens(sys.argv[1])
        settings["lr"] = 0.2
    require_agreement(settings, "the Trial", "Give each the same.")
    time.sleep(0.01)
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("slow to exit", r"rank 1 on localhost failed(?: with exit code \d+)?: ValueError: the data are gone"),
        (
            "reported, and exits with 0",
            r"rank 1 on localhost exited with code 0 first. rank 0 on localhost reports: ddp_callbacks.errors.PeerError"
            r": rank 1 \(.*\) failed with ValueError: the data are gone",
        ),
        (
            "left",
            r"rank 1 on localhost exited with code 0 first. rank 0 on localhost reports: ddp_callbacks.errors.PeerError"
            r": rank 1 \(.*",
        ),
        (
            "loader",
            r"rank 1 on localhost failed(?: with exit code \d+)?: KeyError: 'sensor 7', in DataLoader worker process 0",
        ),
        ("long message", r"rank 1 on localhost failed(?: with exit code \d+)?: ValueError: x{1000,4000}(?:\.\.\.)?"),
        (
            "differs",
            r"rank [01] on localhost, like every rank, failed with exit code 1: ddp_callbacks.errors.MismatchError: "
            r"the ranks disagree about the Trial:\n  lr: 0.1 on rank 0; 0.2 on rank 1\nGive each the same.\n"
            r"Ranks: rank 0 \(.*\), rank 1 \(.*\)\.",
        ),
    ],
)
def test_who_came_first_is_named_with_what_happened(tmp_path: Path, what: str, says: str) -> None:
    with Slowness() as slowness:
        done = ddprun("--nproc-per-node", "2", write(tmp_path, MISFORTUNES), what, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(f"^ddprun: {says}$", done.stderr, re.M), done.stderr[-5000:]
    assert slowness.took < 40 * slowness.factor


@pytest.mark.cold
def test_a_caught_exception_is_not_the_cause_of_a_signal(tmp_path: Path) -> None:
    script = "import os, signal, traceback\ntry: open('/no')\nexcept OSError: traceback.print_exc()\n"
    done = ddprun(write(tmp_path, script + "os.kill(os.getpid(), signal.SIGSEGV)"), cwd=tmp_path)
    assert done.returncode == 139
    assert done.stderr.splitlines()[-2] == "ddprun: rank 0 on localhost failed with exit code 139: killed by SIGSEGV"


@pytest.mark.cold
def test_run_path_runs_the_script_in_its_own_way(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print(__name__, sys.argv[1:])")
    done = ddprun("--run-path", str(tmp_path / script), "a b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[localhost:0] __main__ ['a b']\n"), done.stderr


@pytest.mark.cold
def test_the_login_of_the_user_says_nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.7 50000 203.0.113.9 22")
    done = ddprun(write(tmp_path, "import os; print(os.environ['MASTER_ADDR'])"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[localhost:0] 127.0.0.1\n"), done.stderr


@pytest.mark.cold
def test_torchrun_s_tee_is_shown_with_its_node(tmp_path: Path) -> None:
    flags = ["--tee", "3", "--log-dir", str(tmp_path / "logs")]
    done = ddprun(*flags, write(tmp_path, "print('said')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[localhost] [default0]:said\n"), done.stderr
    assert [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")] == ["said\n"]


@pytest.mark.cold
@pytest.mark.smoke
def test_it_ends_when_nobody_reads_any_more(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nwhile True: print('line', flush=True); time.sleep(0.01)")
    process = subprocess.Popen(
        [*DDPRUN, script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == "[localhost:0] line\n"
        process.stdout.close()
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no_such.py"], "ddprun: localhost: file not found: no_such.py (working directory {cwd}).\n"),
        (["-H", "a,a", "x.py"], "ddprun: -H a,a: a is named twice. Name it once, with all its slots.\n"),
        (
            ["--python", "/no/python", "x.py"],
            "ddprun: localhost: cannot start the interpreter /no/python. Set its path ",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, argv: list[str], says: str) -> None:
    done = ddprun(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(says.format(cwd=tmp_path)) and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def as_plain_command(tmp_path: Path, text: str) -> str:
    """For --rsh: a program that leads to this machine."""
    (tmp_path / "enter").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "enter").chmod(0o755)
    return str(tmp_path / "enter")


@pytest.mark.parametrize(
    "runs", ['shift; exec "$@"', 'shift; exec bash -c "echo welcome; $*"', 'shift; exec dash -c "$*"']
)
def test_any_command_that_gives_a_pipe_leads_to_a_node(tmp_path: Path, runs: str) -> None:
    """One that starts the words that it is given, and one that gives them to a shell."""
    enter = as_plain_command(tmp_path, runs)
    script = write(tmp_path, "import os, sys; print(os.environ['RANK'], sys.argv[1:])")
    done = ddprun("-H", "pod-7", "--rsh", enter, script, "a b", cwd=tmp_path, command=PLAIN)
    assert (done.returncode, done.stdout) == (0, "[pod-7:0] 0 ['a b']\n"), done.stderr


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (
            'echo "error: pods pod-7 not found" >&2; exit 1',
            "enter cannot reach it (exit code 1): error: pods pod-7 not found",
        ),
        ("exit 0", "enter cannot reach it (exit code 0): no message"),
    ],
)
def test_a_command_that_does_not_reach_a_node_is_told_with_its_words(tmp_path: Path, runs: str, says: str) -> None:
    enter = as_plain_command(tmp_path, runs)
    done = ddprun("-H", "pod-7", "--rsh", enter, write(tmp_path, "print(1)"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ddprun: pod-7: {says}. Try: {enter} pod-7 true.\n"


def with_ssh(tmp_path: Path, text: str) -> dict[str, str]:
    """The environment in which ``text`` is what ssh does, in a folder of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PWD": str(tmp_path)}


TURNED_AWAY = """
echo kex_exchange_identification: Connection closed by remote host >&2
echo Connection closed by 10.0.0.1 port 22 >&2
exit 255
"""


@pytest.mark.parametrize(("times", "code"), [(2, 0), (3, 2)])
def test_a_login_that_an_sshd_has_no_time_for_is_tried_again(tmp_path: Path, times: int, code: int) -> None:
    environ = with_ssh(
        tmp_path, f'echo >>tries\n[ $(wc -l <tries) -le {times} ] && {{ {TURNED_AWAY} }}\nexec sh -c "${{@: -1}}"'
    )
    script = write(tmp_path, "print('started')")
    command = [*PLAIN, "-H", "198.51.100.7", script]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (code, "" if code else "[198.51.100.7:0] started\n"), done.stderr
    assert (tmp_path / "tries").read_text().count("\n") == 3
    if code:
        assert done.stderr == (
            "ddprun: 198.51.100.7: ssh cannot reach it: Connection closed by 10.0.0.1 port 22. "
            "Try: ssh 198.51.100.7 true.\n"
        )


def test_no_more_than_eight_log_in_at_the_same_time(tmp_path: Path) -> None:
    """sshd turns some away as soon as ten are not done yet, of the node or of a host on the way."""
    count = "mkdir -p running; touch running/$$; ls running | wc -l >>counts; sleep 0.2; rm running/$$"
    environ = with_ssh(tmp_path, f"{count}\necho Permission denied >&2\nexit 255")
    hosts = ",".join(f"198.51.100.{number}" for number in range(1, 25))
    command = [*DDPRUN, "-H", hosts, write(tmp_path, "print('started')")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr.count("login refused")) == (2, 24), done.stderr
    counts = list(map(int, (tmp_path / "counts").read_text().split()))
    assert len(counts) == 24 and 2 <= max(counts) <= 8


def test_help_has_the_hosts_first_and_torchrun_s_flags_after(tmp_path: Path) -> None:
    done = ddprun("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.index("--hostfile") < done.stdout.index("--nnodes") < done.stdout.index("--max-restarts")
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_python_m_ddp_callbacks_is_ddprun(tmp_path: Path, no_torch: dict[str, str]) -> None:
    """Without torch too, which neither may import before it handles signals."""
    for argv, code in ((["--dry-run", "-H", "localhost:2", "x.py"], 0), (["--nproc-per-nodes", "2", "x.py"], 2)):
        alias, own = (
            subprocess.run([*name, *argv], cwd=tmp_path, env=no_torch, capture_output=True, text=True, timeout=LIMIT)
            for name in (ALIAS, DDPRUN)
        )
        assert (alias.returncode, alias.stdout, alias.stderr) == (code, own.stdout, own.stderr)
        assert (alias.stdout + alias.stderr).startswith("node 0: localhost" if code == 0 else "ddprun: ")


@pytest.mark.parametrize("command", [DDPRUN, ALIAS], ids=["ddprun", "alias"])
def test_a_ctrl_c_while_modules_are_imported_is_not_lost(tmp_path: Path, command: list[str]) -> None:
    """An exception in a finalizer is ignored by Python, and so was the KeyboardInterrupt of Ctrl-C."""
    (tmp_path / "sitecustomize.py").write_text(
        """
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
    )
    (tmp_path / "script.py").write_text("print('started')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    start = ["env", "--default-signal=INT", *command, "script.py"]
    done = subprocess.run(start, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


NO_TORCH = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """The environment in which a Python has no torch."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    return {**os.environ, "PYTHONPATH": str(folder), "PWD": str(tmp_path)}


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "usage: ddprun [flags]"),
        (["doctor", "--help"], 0, "usage: ddprun doctor"),
        (["bench", "--help"], 0, "usage: ddprun bench"),
        (["--dry-run", "-H", "localhost:2", "x.py"], 0, "node 0: localhost"),
        (["--nproc-per-nodes", "2", "x.py"], 2, "ddprun: unknown flag --nproc-per-nodes: neither ddprun nor torchrun"),
        (["doctor", "--jsn"], 2, "ddprun: unrecognized arguments: --jsn"),
    ],
)
def test_it_answers_at_once_where_nothing_is_to_be_started(
    tmp_path: Path, no_torch: dict[str, str], argv: list[str], code: int, says: str
) -> None:
    """It waits for nothing, so its processor time is what a user waits; unlike that, it does not depend on others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*DDPRUN, *argv], cwd=tmp_path, env=no_torch, capture_output=True, text=True, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, (done.stdout + done.stderr)[: len(says)]) == (code, says)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.4


@pytest.mark.cold
@pytest.mark.smoke
def test_a_machine_without_torch_starts_a_job_where_there_is_one(tmp_path: Path, no_torch: dict[str, str]) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = write(tmp_path, "import os, torch; print(torch.tensor(int(os.environ['WORLD_SIZE'])))")
    command = [*DDPRUN, "--python", str(python), "--nproc-per-node", "2", script]
    done = subprocess.run(command, cwd=tmp_path, env=no_torch, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "[localhost:0] tensor(2)\n"), done.stderr


def test_a_port_that_is_taken_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ddprun("--master-port", str(port), write(tmp_path, "print('started')"), cwd=tmp_path)
    problem = f"ddprun: localhost: cannot listen on 127.0.0.1 port {port}: Address already in use."
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{problem} Choose another with --master-port or --master-addr.\n"


def test_the_interface_that_is_told_is_the_one_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert choose_interface("127.0.0.1") == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert choose_interface("127.0.0.1") == "lo"
