"""``ddprun`` is asked to stop: each process gets the signal once and writes its checkpoint, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import DDPRUN, LIMIT, PLAIN, Run, ddprun, processes_in, wait_until, write
from kit.machine import Slowness

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
UP = ("up-0-0", "up-1-0")
PATIENT = ("--grace", str(LIMIT))


@contextmanager
def start(folder: Path, *words: str, flags: tuple[str, ...] = PATIENT, command: list[str] = PLAIN) -> Iterator[Run]:
    """Two processes on this machine, which are up."""
    with Run(folder, "-H", "localhost:2", *flags, write(folder, STOPS), *words, command=command) as run:
        run.await_files(*UP)
        yield run


def got(folder: Path) -> dict[str, list[str]]:
    """The signals of each process, by rank and start."""
    return {path.name[4:]: path.read_text().split() for path in folder.glob("got-*")}


def written(folder: Path) -> set[str]:
    return {path.name[11:] for path in folder.glob("checkpoint-*")}


@pytest.mark.parametrize(
    ("number", "passed", "command"),
    [
        pytest.param(signal.SIGTERM, "SIGTERM", PLAIN, id="SIGTERM"),
        pytest.param(signal.SIGUSR1, "SIGUSR1", PLAIN, id="SIGUSR1"),
        pytest.param(signal.SIGUSR2, "SIGTERM", PLAIN, id="SIGUSR2", marks=pytest.mark.night),
        pytest.param(signal.SIGINT, "SIGTERM", PLAIN, id="SIGINT"),
        pytest.param(signal.SIGHUP, "SIGTERM", PLAIN, id="SIGHUP", marks=pytest.mark.night),
        pytest.param(signal.SIGUSR1, "SIGUSR1", DDPRUN, id="SIGUSR1 torchrun", marks=pytest.mark.cold),
    ],
)
def test_a_signal_reaches_each_rank_once_and_nothing_else(
    tmp_path: Path, number: signal.Signals, passed: str, command: list[str]
) -> None:
    """Every rank gets a request to stop once."""
    with start(tmp_path, command=command) as run:
        run.process.send_signal(number)
        assert run.end() == EXIT_PREEMPTED == 75
    assert got(tmp_path) == {"0-0": [passed], "1-0": [passed]}
    assert written(tmp_path) == {"0-0", "1-0"}
    assert run.lines[1:] == [
        f"ddprun: {number.name}: asking all processes to stop within {LIMIT:g} s",
        f"ddprun: stopped by {number.name}: {WROTE}",
    ]


def test_without_a_flag_there_are_some_seconds_for_a_checkpoint(tmp_path: Path) -> None:
    with start(tmp_path, flags=()) as run:
        run.process.terminate()
        code = run.end()
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}
    assert (code, run.lines[1:]) == (75, [f"ddprun: stopped by SIGTERM: {WROTE}"])


@pytest.mark.slow
@pytest.mark.waits(3)
def test_after_the_grace_all_are_ended_by_force(tmp_path: Path) -> None:
    """After the grace, or Ctrl-C again, `ddprun` kills all."""
    with start(tmp_path, "deaf", flags=("--grace", "3", "--requeue")) as run, Slowness() as slowness:
        run.process.terminate()
        assert run.end() == 128 + signal.SIGTERM
    assert 3 < slowness.took < 5 * slowness.factor
    assert written(tmp_path) == {"0-0"}
    assert run.lines[-3:] == [
        "ddprun: stopped by SIGTERM",
        "ddprun: rank 1 on localhost was killed after --grace 3",
        "ddprun: not started again: not every process exited with 75",
    ]
    assert not processes_in(tmp_path)


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with start(tmp_path, "deaf") as run:
        run.process.send_signal(signal.SIGINT)
        run.await_files("got-1-0")
        with Slowness() as slowness:
            run.process.send_signal(signal.SIGINT)
            assert run.end() == 130
    assert slowness.took < 3 * slowness.factor
    assert run.lines[-1].endswith(" killed at the second signal")
    assert not processes_in(tmp_path)


NOT_ALL_WROTE = "ddprun: not started again: not every process exited with 75"


@pytest.mark.parametrize(
    ("how", "number", "code", "says"),
    [
        pytest.param(
            "fails",
            signal.SIGTERM,
            3,
            "ddprun: rank 1 on localhost failed with exit code 3: no exception was printed",
            id="one fails",
        ),
        pytest.param("full", signal.SIGTERM, 1, NOT_ALL_WROTE, id="none can write"),
        pytest.param(
            "done",
            signal.SIGUSR1,
            0,
            "ddprun: stopped by SIGUSR1, but all processes exited with code 0: done",
            id="all are done",
        ),
    ],
)
def test_how_the_ranks_have_ended_decides_what_is_told(
    tmp_path: Path, how: str, number: int, code: int, says: str
) -> None:
    """A request changes neither failure nor success."""
    with start(tmp_path, how, flags=(*PATIENT, "--requeue")) as run:
        run.process.send_signal(number)
        assert run.end() == code
    assert says in run.lines[-3:]
    assert written(tmp_path) == {"0-0", "1-0"} and WROTE not in run.text


def test_signals_that_come_together_are_one_request(tmp_path: Path) -> None:
    # As a scheduler sends them, to a script that passes them on, too.
    with start(tmp_path) as run:
        run.process.send_signal(signal.SIGCONT)
        run.process.terminate()
        run.await_text("asking all processes to stop")
        run.process.terminate()
        assert run.end() == 75
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}


@pytest.mark.parametrize("flags", [PATIENT, ()], ids=["grace", "none"])
def test_a_rank_that_still_starts_gets_the_signal_when_it_can_take_it(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A rank that still starts gets the request later."""
    with Run(tmp_path, "-H", "localhost:2", *flags, write(tmp_path, STOPS), "late") as run:
        run.await_files("imports-0", "imports-1")
        run.process.send_signal(signal.SIGUSR1)
        if flags:
            run.await_text("asking all processes to stop")
            (tmp_path / "sent").touch()
        assert run.end() == (75 if flags else 128 + signal.SIGUSR1)
    assert got(tmp_path) == ({"0-0": ["SIGUSR1"], "1-0": ["SIGUSR1"]} if flags else {})
    assert run.lines[-1] == f"ddprun: stopped by SIGUSR1{f': {WROTE}' if flags else ''}"


def without_ranks(run: Run) -> dict[int, str]:
    """The processes of the job but for the ranks and what they have started."""
    return {pid: line for pid, line in run.processes().items() if "script.py" not in line or pid == run.pid()}


@pytest.mark.parametrize("command", [PLAIN, pytest.param(DDPRUN, marks=pytest.mark.cold)], ids=["plain", "torchrun"])
def test_a_scheduler_may_signal_every_process_of_the_job(tmp_path: Path, command: list[str]) -> None:
    # As Slurm and PBS do: the node's program and torchrun's agent, too, which must not end the ranks.
    with start(tmp_path, command=command) as run:
        ranks = [int((tmp_path / name).read_text()) for name in UP]
        for pid in [*without_ranks(run), *ranks]:
            os.kill(pid, signal.SIGTERM)
        code = run.end()
    assert code == 75, run.text
    assert written(tmp_path) == {"0-0", "1-0"}
    assert {name: set(signals) for name, signals in got(tmp_path).items()} == {"0-0": {"SIGTERM"}, "1-0": {"SIGTERM"}}
    assert run.lines[-1].endswith(WROTE) and "Traceback" not in run.text


@pytest.mark.parametrize(
    ("whom", "number", "command"),
    [
        pytest.param("script.py", signal.SIGTERM, PLAIN, id="rank"),
        pytest.param("stdin.buffer", signal.SIGTERM, PLAIN, id="node"),
        pytest.param("launcher.agent", signal.SIGUSR1, DDPRUN, id="agent", marks=pytest.mark.cold),
        pytest.param("script.py", signal.SIGUSR1, DDPRUN, id="rank of torchrun", marks=pytest.mark.cold),
    ],
)
def test_a_request_may_arrive_at_any_process(
    tmp_path: Path, whom: str, number: signal.Signals, command: list[str]
) -> None:
    """The request may arrive at any process."""
    with start(tmp_path, command=command) as run:
        rank = int((tmp_path / "up-0-0").read_text())
        (pid,) = [rank] if whom == "script.py" else [pid for pid, line in run.processes().items() if whom in line]
        os.kill(pid, number)
        code = run.end()
    assert code == 75, run.text
    assert written(tmp_path) == {"0-0", "1-0"}
    assert run.lines[-1] == f"ddprun: {WROTE}"


@pytest.mark.cold
def test_the_ranks_start_again_if_only_one_of_them_was_signalled(tmp_path: Path) -> None:
    """Preempted ranks restart after all have written."""
    with start(tmp_path, flags=(*PATIENT, "--max-restarts", "1"), command=DDPRUN) as run:
        os.kill(int((tmp_path / "up-1-0").read_text()), signal.SIGTERM)
        run.await_files("up-0-1", "up-1-1")
        assert written(tmp_path) == {"0-0", "1-0"}
        run.process.terminate()
        assert run.end() == 75
    assert "restart 1 of 1" in run.text
    assert written(tmp_path) == {"0-0", "1-0", "0-1", "1-1"}
    assert got(tmp_path) == {name: ["SIGTERM"] for name in written(tmp_path)}


def test_ranks_write_although_ddprun_was_killed(tmp_path: Path) -> None:
    """Ranks keep their grace if you kill `ddprun`."""
    with start(tmp_path) as run:
        run.process.kill()
        wait_until(lambda: not processes_in(tmp_path))
    assert written(tmp_path) == {"0-0", "1-0"}
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}


# --- starting again ---------------------------------------------------------------------------------------------------


def test_outside_a_job_requeue_starts_again_but_not_after_ctrl_c(tmp_path: Path) -> None:
    """Outside a job `--requeue` starts again."""
    with start(tmp_path, flags=(*PATIENT, "--requeue")) as run:
        run.process.send_signal(signal.SIGUSR1)
        run.await_files("up-0-1", "up-1-1")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 75
    assert run.text.count("ddprun: starting again\n") == 1
    assert run.lines[-1] == "ddprun: not started again, because SIGINT stopped ddprun"
    assert written(tmp_path) == {"0-0", "1-0", "0-1", "1-1"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes stand-ins for a scheduler's programs, the only ones there are; the path with others behind them."""
    folder, path = tmp_path / "bin", os.environ["PATH"]
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**texts: str) -> str:
        for name, text in texts.items():
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n{text}\n')
            (folder / name).chmod(0o755)
        return f"{folder}:{path}:/usr/bin:/bin"

    return make


def test_a_request_before_anything_has_started_requeues_the_job(tmp_path: Path, programs: Callable[..., str]) -> None:
    path = programs(squeue="echo RUNNING", scontrol="exit 0", enter=f"touch {tmp_path}/waits; exec sleep {LIMIT:g}")
    flags = ["-H", "far:2", "--rsh", "enter", "--grace", "60", "--requeue", "script.py"]
    with Run(tmp_path, *flags, PATH=path, SLURM_JOB_ID="7", SLURM_JOB_END_TIME="9999999999") as run:
        run.await_files("waits")
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 128 + signal.SIGUSR1
    assert run.text == "ddprun: stopped by SIGUSR1\nddprun: requeued Slurm job 7\n"


STATE = "squeue -h -t all -j 7 -o %T"
DISABLED = "Requested operation is presently disabled"
UNAUTHORIZED = "qrerun: Unauthorized Request 7.s"
SUBMIT_AGAIN = "Let the job script submit itself again after exit code 75, as examples/jobs/preemptible.pbs does"


@pytest.mark.parametrize(
    ("job", "texts", "says", "calls"),
    [
        (
            "SLURM_JOB_ID=7",
            {"squeue": "echo RUNNING", "scontrol": "exit 0"},
            "requeued Slurm job 7",
            [STATE, "scontrol requeue 7"],
        ),
        (
            "SLURM_JOB_ID=7",
            {"squeue": "echo CANCELLED", "scontrol": "exit 0"},
            "Slurm job 7 not requeued: it is CANCELLED",
            [STATE],
        ),
        (
            "SLURM_JOB_ID=7",
            {"squeue": "echo RUNNING", "scontrol": f"echo {DISABLED}. >&2; exit 1"},
            f"Slurm job 7 not requeued: scontrol requeue 7 failed: {DISABLED}",
            [STATE, "scontrol requeue 7"],
        ),
        ("SLURM_JOB_ID=7", {}, "Slurm job 7 not requeued: scontrol is not in PATH", []),
        ("PBS_JOBID=7.s", {"qrerun": "exit 0"}, "requeued PBS job 7.s", ["qrerun 7.s"]),
        (
            "PBS_JOBID=7.s",
            {"qrerun": f"echo {UNAUTHORIZED} >&2; exit 159"},
            f"PBS job 7.s not requeued: qrerun 7.s failed: {UNAUTHORIZED}. {SUBMIT_AGAIN}",
            ["qrerun 7.s"],
        ),
        ("LSB_JOBID=7", {}, "LSF job 7: LSF requeues it if it was submitted with bsub -Q 75", []),
        ("HOME=/", {}, None, []),
    ],
)
def test_a_job_is_requeued_by_its_scheduler_or_one_line_says_why_not(
    tmp_path: Path, programs: Callable[..., str], job: str, texts: dict[str, str], says: str | None, calls: list[str]
) -> None:
    """`--requeue` requeues the job, or says why not."""
    programs(**texts)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert requeue(dict([job.split("=")])) == says
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not calls or (tmp_path / "calls").read_text().splitlines() == calls


SLURM, PBS = {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.s"}


@pytest.mark.parametrize(
    ("environ", "texts", "left", "length"),
    [
        (SLURM | {"SLURM_JOB_END_TIME": "in 100"}, {}, 100, None),
        (SLURM | {"SLURM_JOB_END_TIME": "in 100", "SLURM_JOB_START_TIME": "in -20"}, {}, 100, 120),
        (SLURM, {"squeue": "echo 1-02:03:04 2-00:00:00"}, 93784, 172800),
        (SLURM, {"squeue": "echo 59:01 1:00:00"}, 3541, 3600),
        (SLURM, {"squeue": "echo 59:01 INVALID"}, 3541, None),
        (SLURM, {"squeue": "echo UNLIMITED UNLIMITED"}, None, None),
        (SLURM, {}, None, None),
        (PBS, {"qstat": "echo Resource_List.walltime = 01:00:00; echo stime = NOW"}, 3600, 3600),
        (PBS, {"qstat": "echo Resource_List.walltime = 100:00:00; echo start_time = NOW"}, 360000, 360000),
        (PBS, {"qstat": "echo nothing"}, None, None),
        (PBS, {"qstat": "echo qstat: Unknown Job Id >&2; exit 153"}, None, None),
        ({}, {}, None, None),
    ],
)
def test_the_end_of_a_job_is_found(
    programs: Callable[..., str],
    environ: dict[str, str],
    texts: dict[str, str],
    left: float | None,
    length: float | None,
) -> None:
    now, moment = time.strftime("%a %b %d %H:%M:%S %Y"), int(time.time())
    programs(**{program: text.replace("NOW", now) for program, text in texts.items()})
    for variable, value in environ.items():
        if value.startswith("in "):
            environ = {**environ, variable: str(moment + int(value.split()[1]))}
    found = job_end(environ)
    if left is None:
        assert found is None
    else:
        assert found is not None and found.length == length
        assert found.name == ("PBS job 7.s" if "PBS_JOBID" in environ else "Slurm job 7")
        assert left - 30 < found.left <= left + 1


@pytest.mark.slow
@pytest.mark.waits(4)
def test_all_are_asked_to_stop_by_the_grace_before_the_end(tmp_path: Path, programs: Callable[..., str]) -> None:
    """`--time-limit` and a job's end ask to stop."""
    path = programs(squeue="case $* in *%l) echo 1:04 1:00:00;; *) echo RUNNING;; esac", scontrol="exit 0")
    by_flag, by_job = tmp_path / "flag", tmp_path / "job"
    for folder in (by_flag, by_job):
        folder.mkdir()
        write(folder, STOPS)
    flags, begin = ["-H", "localhost:2", "--grace", "60"], time.monotonic()
    with (
        Run(by_flag, *flags, "--time-limit", "64", "script.py", PATH=path) as limited,
        Run(by_job, *flags, "--requeue", "script.py", PATH=path, SLURM_JOB_ID="7") as ending,
    ):
        assert (limited.end(), ending.end()) == (75, 75)
    assert time.monotonic() - begin > 4
    assert got(by_flag) == got(by_job) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}
    assert limited.lines[-1] == f"ddprun: stopped by the time limit of 64 s: {WROTE}"
    stopped = f"ddprun: stopped by the end of Slurm job 7: {WROTE}"
    assert ending.lines[-2:] == [stopped, "ddprun: requeued Slurm job 7"]
    assert (tmp_path / "calls").read_text().splitlines() == ["squeue -h -j 7 -o %L %l", STATE, "scontrol requeue 7"]


def test_a_time_limit_in_which_nothing_begins_does_not_start_the_job_forever(tmp_path: Path) -> None:
    flags = ["-H", "localhost:2", "--grace", "2", "--time-limit", "2.001", "--requeue"]
    with Run(tmp_path, *flags, write(tmp_path, STOPS)) as run:
        assert run.end() == 128 + signal.SIGTERM
    reason = "the time limit of 2.001 s came before any process had begun"
    assert run.lines[-1] == f"ddprun: not started again: {reason}"


def test_a_job_that_is_no_longer_than_the_grace_is_refused_not_requeued_forever(
    tmp_path: Path, programs: Callable[..., str]
) -> None:
    path = programs(squeue="echo 0:58 1:00", scontrol="exit 0")
    done = ddprun("--grace", "60", "--requeue", "script.py", cwd=tmp_path, PATH=path, SLURM_JOB_ID="7")
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
    done = ddprun(*flags, "x.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"ddprun: {says}\n")
