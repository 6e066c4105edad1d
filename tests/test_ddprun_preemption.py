"""``ddprun`` is asked to stop: each process gets the signal once and writes its checkpoint, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import Slowness
from test_ddprun_here import DDPRUN, LIMIT, PLAIN

from ddp_callbacks.errors import EXIT_PREEMPTED
from ddp_callbacks.launcher.batch_job import job_end, requeue

# Waits for a signal, and writes for half a second. A process of its own, as a DataLoader's worker, notes signals, too.
STOPS = """
import os, signal, sys, time
rank, words = int(os.environ["RANK"]), sys.argv[1:]
start = sum(name.startswith(f"up-{rank}-") for name in os.listdir())

def wait_for(*names):
    while not any(map(os.path.exists, names)):
        time.sleep(0.01)

def notes(path):
    def note(number, _):
        with open(path, "a") as file:
            print(signal.Signals(number).name, file=file, flush=True)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)

if "late" in words:  # it still imports
    open(f"imports-{rank}", "w").close()
    wait_for("sent")
notes(f"got-{rank}-{start}")
child = os.fork()
if not child:
    notes("got-child")
    wait_for("never")
open(f"up-{rank}-{start}", "w").write(str(os.getpid()))
wait_for(f"got-{rank}-{start}")
time.sleep(0.5)
if "slow" in words and rank == 0:
    wait_for("written")
if "deaf" in words and rank == 1:
    wait_for("never")
os.kill(child, signal.SIGKILL)
open(f"checkpoint-{rank}-{start}", "w").close()
code = 0 if "done" in words else 1 if "full" in words else 3 if "fails" in words and rank == 1 else 75
sys.exit(code)
"""
WROTE = "preempted, checkpoint written"


class Run:
    """``ddprun`` with two processes on this machine, which are up."""

    def __init__(self, folder: Path, *argv: str, command: list[str] = PLAIN, **variables: str) -> None:
        (folder / "script.py").write_text(STOPS)
        self.folder = folder
        with (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                ["env", "--default-signal=INT,HUP", *command, *([] if "-H" in argv else ["-H", "localhost:2"]), *argv],
                cwd=folder,
                env={**os.environ, "PWD": str(folder), **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )

    def await_files(self, *names: str) -> None:
        self.wait_until(lambda: all((self.folder / name).exists() for name in names))

    def await_text(self, text: str) -> None:
        self.wait_until(lambda: text in self.text)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end
            time.sleep(0.01)

    @property
    def text(self) -> str:
        return (self.folder / "err").read_text()

    def end(self) -> int:
        return self.process.wait(LIMIT)

    def got(self) -> dict[str, list[str]]:
        """The signals of each process, by rank and start."""
        return {path.name[4:]: path.read_text().split() for path in self.folder.glob("got-*")}

    def written(self) -> set[str]:
        return {path.name[11:] for path in self.folder.glob("checkpoint-*")}


@contextmanager
def running(folder: Path, *argv: str, command: list[str] = PLAIN, **variables: str) -> Iterator[Run]:
    run = Run(folder, *argv, command=command, **variables)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


UP = ("up-0-0", "up-1-0")


@pytest.mark.parametrize(
    ("number", "passed", "command"),
    [
        pytest.param(signal.SIGTERM, "SIGTERM", PLAIN, id="SIGTERM"),
        pytest.param(signal.SIGUSR1, "SIGUSR1", PLAIN, id="SIGUSR1"),
        pytest.param(signal.SIGUSR2, "SIGTERM", PLAIN, id="SIGUSR2"),
        pytest.param(signal.SIGINT, "SIGTERM", PLAIN, id="SIGINT"),
        pytest.param(signal.SIGHUP, "SIGTERM", PLAIN, id="SIGHUP"),
        pytest.param(signal.SIGUSR1, "SIGUSR1", DDPRUN, id="SIGUSR1 torchrun", marks=pytest.mark.cold),
    ],
)
def test_a_signal_reaches_each_rank_once_and_nothing_else(
    tmp_path: Path, number: signal.Signals, passed: str, command: list[str]
) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py", command=command) as run:
        run.await_files(*UP)
        run.process.send_signal(number)
        assert run.end() == EXIT_PREEMPTED == 75
    assert run.got() == {"0-0": [passed], "1-0": [passed]}
    assert run.written() == {"0-0", "1-0"}
    assert run.text.splitlines()[1:] == [
        f"ddprun: {number.name}: asking all processes to stop within {LIMIT:g} s",
        f"ddprun: stopped by {number.name}: {WROTE}",
    ]


def test_without_a_flag_there_are_some_seconds_for_a_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, "script.py") as run:
        run.await_files(*UP)
        run.process.terminate()
        code = run.end()
    assert run.got() == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}
    assert (code, run.text.splitlines()[1:]) == (75, [f"ddprun: stopped by SIGTERM: {WROTE}"])


def test_after_the_grace_all_are_ended_by_force(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "3", "--requeue", "script.py", "deaf") as run:
        run.await_files(*UP)
        with Slowness() as slowness:
            run.process.terminate()
            assert run.end() == 128 + signal.SIGTERM
    assert 3 < slowness.took < 5 * slowness.factor
    assert run.written() == {"0-0"}
    assert run.text.splitlines()[-3:] == [
        "ddprun: stopped by SIGTERM",
        "ddprun: rank 1 on localhost was killed after --grace 3",
        "ddprun: not started again: not every process exited with 75",
    ]
    assert ended(run)


def ended(run: Run) -> bool:
    """Whether nothing is left of the ranks."""
    pids = [int(path.read_text()) for path in run.folder.glob("up-*")]
    return len(pids) >= 2 and not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_that_fails_while_others_write_is_a_failure(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py", "fails") as run:
        run.await_files(*UP)
        run.process.terminate()
        assert run.end() == 3
    assert run.text.splitlines()[-2] == "ddprun: rank 1 on localhost failed with exit code 3: no exception was printed"
    assert run.written() == {"0-0", "1-0"} and WROTE not in run.text


def test_a_job_that_is_done_while_it_is_asked_to_stop_has_succeeded(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "--requeue", "script.py", "done") as run:
        run.await_files(*UP)
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 0
    assert run.text.splitlines()[-1] == "ddprun: stopped by SIGUSR1, but all processes exited with code 0: done"


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py", "deaf") as run:
        run.await_files(*UP)
        run.process.send_signal(signal.SIGINT)
        run.await_files("got-1-0")
        with Slowness() as slowness:
            run.process.send_signal(signal.SIGINT)
            assert run.end() == 130
    assert slowness.took < 3 * slowness.factor
    assert run.text.splitlines()[-1].endswith(" killed at the second signal")
    assert ended(run)


def test_if_no_rank_can_write_its_checkpoint_the_summary_says_so(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "--requeue", "script.py", "full") as run:
        run.await_files(*UP)
        run.process.terminate()
        assert run.end() == 1
    assert " failed with exit code 1: no exception was printed\n" in run.text
    assert run.text.splitlines()[-1] == "ddprun: not started again: not every process exited with 75"


def test_a_time_limit_in_which_nothing_begins_does_not_start_the_job_forever(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", "2", "--time-limit", "2.001", "--requeue", "script.py") as run:
        assert run.end() == 128 + signal.SIGTERM
    assert run.text.splitlines()[-1] == (
        "ddprun: not started again: the time limit of 2.001 s came before any process had begun"
    )


def test_signals_that_come_together_are_one_request(tmp_path: Path) -> None:
    """As a scheduler sends them, to a script that passes them on, too."""
    with running(tmp_path, "--grace", str(LIMIT), "script.py") as run:
        run.await_files(*UP)
        run.process.send_signal(signal.SIGCONT)
        run.process.terminate()
        run.await_text("asking all processes to stop")
        run.process.terminate()
        assert run.end() == 75
    assert run.got() == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}


def test_a_rank_that_still_starts_gets_the_signal_when_it_can_take_it(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py", "late") as run:
        run.await_files("imports-0", "imports-1")
        run.process.send_signal(signal.SIGUSR1)
        run.await_text("asking all processes to stop")
        (tmp_path / "sent").touch()
        assert run.end() == 75
    assert run.got() == {"0-0": ["SIGUSR1"], "1-0": ["SIGUSR1"]}


def test_without_a_grace_a_rank_that_handles_nothing_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "script.py", "late") as run:
        run.await_files("imports-0", "imports-1")
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 128 + signal.SIGUSR1
    assert run.text.splitlines()[-1] == "ddprun: stopped by SIGUSR1"


def test_the_time_limit_asks_all_to_stop_by_the_grace_before(tmp_path: Path) -> None:
    begin = time.monotonic()
    with running(tmp_path, "--grace", "60", "--time-limit", "64", "script.py") as run:
        assert run.end() == 75
    assert time.monotonic() - begin > 4
    assert run.got() == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}
    assert run.text.splitlines()[-1] == f"ddprun: stopped by the time limit of 64 s: {WROTE}"


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}.union(*(descendants(int(child)) for child in children))


def lines(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.cold
@pytest.mark.parametrize("command", [PLAIN, DDPRUN], ids=["plain", "torchrun"])
def test_a_scheduler_may_signal_every_process_of_the_job(tmp_path: Path, command: list[str]) -> None:
    """As Slurm and PBS do: the node's program and torchrun's agent, too, which must not end the ranks."""
    with running(tmp_path, "--grace", str(LIMIT), "script.py", command=command) as run:
        run.await_files(*UP)
        for pid in descendants(run.process.pid) - children_of_ranks(run):
            os.kill(pid, signal.SIGTERM)
        run.process.terminate()
        code = run.end()
    assert code == 75, run.text
    assert run.written() == {"0-0", "1-0"}
    assert {name: set(signals) for name, signals in run.got().items()} == {"0-0": {"SIGTERM"}, "1-0": {"SIGTERM"}}
    assert run.text.splitlines()[-1].endswith(WROTE) and "Traceback" not in run.text


def children_of_ranks(run: Run) -> set[int]:
    return set().union(*(descendants(int((run.folder / name).read_text())) for name in UP))


@pytest.mark.cold
@pytest.mark.parametrize(
    ("whom", "number", "command"),
    [
        pytest.param("script.py", signal.SIGTERM, PLAIN, id="rank"),
        pytest.param("stdin.buffer", signal.SIGTERM, PLAIN, id="node"),
        pytest.param("plain_agent.py", signal.SIGUSR1, PLAIN, id="agent"),
        pytest.param("launcher.agent", signal.SIGTERM, DDPRUN, id="agent of torchrun"),
        pytest.param("script.py", signal.SIGUSR1, DDPRUN, id="rank of torchrun"),
    ],
)
def test_a_request_may_arrive_at_any_process(
    tmp_path: Path, whom: str, number: signal.Signals, command: list[str]
) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py", command=command) as run:
        run.await_files(*UP)
        os.kill(next(pid for pid in sorted(descendants(run.process.pid)) if whom in lines(pid)), number)
        code = run.end()
    assert code == 75, run.text
    assert run.written() == {"0-0", "1-0"}
    assert run.text.splitlines()[-1] == f"ddprun: {WROTE}"


@pytest.mark.cold
def test_the_ranks_start_again_if_only_one_of_them_was_signalled(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "--max-restarts", "1", "script.py", command=DDPRUN) as run:
        run.await_files(*UP)
        os.kill(int((tmp_path / "up-1-0").read_text()), signal.SIGTERM)
        run.await_files("up-0-1", "up-1-1")
        assert run.written() == {"0-0", "1-0"}
        run.process.terminate()
        assert run.end() == 75
    assert "restart 1 of 1" in run.text
    assert run.written() == {"0-0", "1-0", "0-1", "1-1"}
    assert run.got() == {name: ["SIGTERM"] for name in run.written()}


def test_ranks_write_although_ddprun_was_killed(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "script.py") as run:
        run.await_files(*UP)
        pids = descendants(run.process.pid)
        run.process.kill()
        end = time.monotonic() + LIMIT
        while any(map(runs, pids)):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert run.written() == {"0-0", "1-0"}
    assert run.got() == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}


# --- starting again ---------------------------------------------------------------------------------------------------


def test_outside_a_job_requeue_starts_again_but_not_after_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "--grace", str(LIMIT), "--requeue", "script.py") as run:
        run.await_files(*UP)
        run.process.send_signal(signal.SIGUSR1)
        run.await_files("up-0-1", "up-1-1")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 75
    assert run.text.count("ddprun: starting again\n") == 1
    assert run.text.splitlines()[-1] == "ddprun: not started again, because SIGINT stopped ddprun"
    assert run.written() == {"0-0", "1-0", "0-1", "1-1"}


def test_a_request_before_anything_has_started_requeues_the_job(tmp_path: Path, programs: Callable[..., None]) -> None:
    path = os.environ["PATH"] + ":" + str(Path(sys.executable).parent) + ":/usr/bin:/bin"
    programs(squeue="echo RUNNING", scontrol="exit 0", enter=f"touch {tmp_path}/waits; exec sleep {LIMIT:g}")
    flags = ["-H", "far:2", "--rsh", "enter", "--grace", "60", "--requeue", "script.py"]
    with running(tmp_path, *flags, PATH=path, SLURM_JOB_ID="7", SLURM_JOB_END_TIME="9999999999") as run:
        run.await_files("waits")
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 128 + signal.SIGUSR1
    assert run.text == "ddprun: stopped by SIGUSR1\nddprun: requeued Slurm job 7\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes stand-ins for a scheduler's programs, the only ones there are."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**texts: str) -> None:
        for name, text in texts.items():
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n{text}\n')
            (folder / name).chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("environ", "texts", "says", "calls"),
    [
        (
            {"SLURM_JOB_ID": "7"},
            {"squeue": "echo RUNNING", "scontrol": "exit 0"},
            "requeued Slurm job 7",
            ["squeue -h -t all -j 7 -o %T", "scontrol requeue 7"],
        ),
        (
            {"SLURM_JOB_ID": "7"},
            {"squeue": "echo CANCELLED", "scontrol": "exit 0"},
            "Slurm job 7 not requeued: it is CANCELLED",
            ["squeue -h -t all -j 7 -o %T"],
        ),
        (
            {"SLURM_JOB_ID": "7"},
            {"squeue": "echo RUNNING", "scontrol": "echo Requested operation is presently disabled. >&2; exit 1"},
            "Slurm job 7 not requeued: scontrol requeue 7 failed: Requested operation is presently disabled",
            ["squeue -h -t all -j 7 -o %T", "scontrol requeue 7"],
        ),
        ({"SLURM_JOB_ID": "7"}, {}, "Slurm job 7 not requeued: scontrol is not in PATH", []),
        ({"PBS_JOBID": "7.s"}, {"qrerun": "exit 0"}, "requeued PBS job 7.s", ["qrerun 7.s"]),
        (
            {"PBS_JOBID": "7.s"},
            {"qrerun": "echo qrerun: Unauthorized Request 7.s >&2; exit 159"},
            "PBS job 7.s not requeued: qrerun 7.s failed: qrerun: Unauthorized Request 7.s. Let the job script submit "
            "itself again after exit code 75, as examples/jobs/preemptible.pbs does",
            ["qrerun 7.s"],
        ),
        ({"LSB_JOBID": "7"}, {}, "LSF job 7: LSF requeues it if it was submitted with bsub -Q 75", []),
        ({}, {}, None, []),
    ],
)
def test_a_job_is_requeued_by_its_scheduler_or_one_line_says_why_not(
    tmp_path: Path,
    programs: Callable[..., None],
    environ: dict[str, str],
    texts: dict[str, str],
    says: str | None,
    calls: list[str],
) -> None:
    programs(**texts)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert requeue(environ) == says
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not calls or (tmp_path / "calls").read_text().splitlines() == calls


@pytest.mark.parametrize(
    ("environ", "texts", "left", "length", "name"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "in 100"}, {}, 100, None, "Slurm job 7"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "in 100", "SLURM_JOB_START_TIME": "in -20"},
            {},
            100,
            120,
            "Slurm job 7",
        ),
        ({"SLURM_JOB_ID": "7"}, {"squeue": "echo 1-02:03:04 2-00:00:00"}, 93784, 172800, "Slurm job 7"),
        ({"SLURM_JOB_ID": "7"}, {"squeue": "echo 59:01 1:00:00"}, 3541, 3600, "Slurm job 7"),
        ({"SLURM_JOB_ID": "7"}, {"squeue": "echo 59:01 INVALID"}, 3541, None, "Slurm job 7"),
        ({"SLURM_JOB_ID": "7"}, {"squeue": "echo UNLIMITED UNLIMITED"}, None, None, ""),
        ({"SLURM_JOB_ID": "7"}, {}, None, None, ""),
        (
            {"PBS_JOBID": "7.s"},
            {"qstat": "printf '    Resource_List.walltime = 01:00:00\\n    stime = NOW\\n'"},
            3600,
            3600,
            "PBS job 7.s",
        ),
        (
            {"PBS_JOBID": "7"},
            {"qstat": "printf '    Resource_List.walltime = 100:00:00\\n    start_time = NOW\\n'"},
            360000,
            360000,
            "PBS job 7",
        ),
        ({"PBS_JOBID": "7"}, {"qstat": "echo nothing"}, None, None, ""),
        ({"PBS_JOBID": "7"}, {"qstat": "echo qstat: Unknown Job Id >&2; exit 153"}, None, None, ""),
        ({}, {}, None, None, ""),
    ],
)
def test_the_end_of_a_job_is_found(
    programs: Callable[..., None],
    environ: dict[str, str],
    texts: dict[str, str],
    left: float | None,
    length: float | None,
    name: str,
) -> None:
    now = time.strftime("%a %b %d %H:%M:%S %Y")
    programs(**{program: text.replace("NOW", now) for program, text in texts.items()})
    moment = int(time.time())
    for variable, value in environ.items():
        if value.startswith("in "):
            environ = {**environ, variable: str(moment + int(value.split()[1]))}
    found = job_end(environ)
    if left is None:
        assert found is None
    else:
        assert found is not None and (found.length, found.name) == (length, name)
        assert left - 30 < found.left <= left + 1


def test_the_end_of_the_job_counts_if_a_grace_is_given(tmp_path: Path, programs: Callable[..., None]) -> None:
    path = os.environ["PATH"] + ":" + str(Path(sys.executable).parent) + ":/usr/bin:/bin"
    programs(squeue="case $* in *%l) echo 1:04 1:00:00;; *) echo RUNNING;; esac", scontrol="exit 0")
    variables = {"PATH": path, "SLURM_JOB_ID": "7"}
    with running(tmp_path, "--grace", "60", "--requeue", "script.py", **variables) as run:
        assert run.end() == 75
    assert run.got() == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}
    assert run.text.splitlines()[-2:] == [
        f"ddprun: stopped by the end of Slurm job 7: {WROTE}",
        "ddprun: requeued Slurm job 7",
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["squeue -h -j 7 -o %L %l", "squeue -h -t all -j 7 -o %T", "scontrol requeue 7"]


def test_a_job_that_is_no_longer_than_the_grace_is_refused_not_requeued_forever(
    tmp_path: Path, programs: Callable[..., None]
) -> None:
    programs(squeue="echo 0:58 1:00", scontrol="exit 0")
    command = [*DDPRUN, "--grace", "60", "--requeue", "script.py"]
    variables = {**os.environ, "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.stderr == "ddprun: --grace must be shorter than the job, got 60 s; Slurm job 7 has 60 s.\n"
    assert done.returncode == 2
    assert (tmp_path / "calls").read_text() == "squeue -h -j 7 -o %L %l\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--grace", "-1"], "argument --grace: takes a positive number, got '-1'. See ddprun --help."),
        (["--time-limit", "soon"], "argument --time-limit: takes a positive number, got 'soon'. See ddprun --help."),
        (["--grace", "90", "--time-limit", "60"], "--time-limit must be longer than --grace (90 s), got 60."),
    ],
)
def test_a_wrong_time_is_refused(tmp_path: Path, flags: list[str], says: str) -> None:
    done = subprocess.run([*DDPRUN, *flags, "x.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (2, f"ddprun: {says}\n")
