"""``ddprun`` is asked to stop: each process gets the signal once and writes its checkpoint, with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import LIMIT, Run, ddprun, processes_in, program, wait_until, write
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
open(f"part-{rank}", "w").write(str(os.getpid()))
os.rename(f"part-{rank}", f"up-{rank}-{start}")  # whole when it is seen
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
IN_JOB = {"LSB_JOBID": "7"}  # without which there is nothing to requeue


@contextmanager
def start(folder: Path, *words: str, flags: tuple[str, ...] = PATIENT) -> Iterator[Run]:
    """Two processes on this machine, which are up."""
    with Run(folder, "-H", "localhost:2", *flags, write(folder, STOPS), *words, **IN_JOB) as run:
        run.await_files(*UP)
        yield run


def got(folder: Path) -> dict[str, list[str]]:
    """The signals of each process, by rank and start."""
    return {path.name[4:]: path.read_text().split() for path in folder.glob("got-*")}


def written(folder: Path) -> set[str]:
    return {path.name[11:] for path in folder.glob("checkpoint-*")}


def of_ddprun(run: Run, words: str) -> list[int]:
    """The processes of the job with these words in their command line, but for the ranks and what they have started."""
    own = {pid: line for pid, line in run.processes().items() if "script.py" not in line or pid == run.pid()}
    return [pid for pid, line in own.items() if words in line]


def ranks_of(run: Run) -> list[int]:
    return [int((run.folder / name).read_text()) for name in UP]


def several(run: Run) -> list[int]:
    """As schedulers send them, to a script that passes them on, too."""
    run.process.send_signal(signal.SIGCONT)
    run.process.terminate()
    run.await_text("asking all processes to stop")
    return [run.process.pid]


# Which processes get which signal, what each rank gets in the end, and what is told.
REQUESTS: dict[str, tuple[Callable[[Run], list[int]], signal.Signals, str, str]] = {
    "SIGUSR1": (lambda run: [run.process.pid], signal.SIGUSR1, "SIGUSR1", f"stopped by SIGUSR1: {WROTE}"),
    "SIGINT": (lambda run: [run.process.pid], signal.SIGINT, "SIGTERM", f"stopped by SIGINT: {WROTE}"),
    "several": (several, signal.SIGTERM, "SIGTERM", f"stopped by SIGTERM: {WROTE}"),
    "no grace": (lambda run: [run.process.pid], signal.SIGTERM, "SIGTERM", f"stopped by SIGTERM: {WROTE}"),
    # As Slurm and PBS do: the node's program and the ranks' store, too, which must not end the ranks.
    "each": (lambda run: [*of_ddprun(run, ""), *ranks_of(run)], signal.SIGTERM, "SIGTERM", WROTE),
    "rank": (lambda run: ranks_of(run)[:1], signal.SIGTERM, "SIGTERM", WROTE),
    "program": (lambda run: of_ddprun(run, "stdin.buffer"), signal.SIGTERM, "SIGTERM", WROTE),
}


@pytest.mark.parametrize("whom", REQUESTS)
def test_a_request_to_any_process_reaches_each_rank_once(tmp_path: Path, whom: str) -> None:
    """A request to any process reaches every rank once."""
    asked, number, each, says = REQUESTS[whom]
    with start(tmp_path, flags=() if whom == "no grace" else PATIENT) as run:
        for pid in asked(run):
            os.kill(pid, number)
        code = run.end()
    assert code == EXIT_PREEMPTED == 75, run.text
    signals = got(tmp_path)
    if whom == "each":
        signals = {name: sorted(set(signals[name])) for name in signals}
    assert signals == {"0-0": [each], "1-0": [each]}
    assert written(tmp_path) == {"0-0", "1-0"}
    assert run.lines[-1].endswith(f" {says}") and "Traceback" not in run.text


@pytest.mark.slow
@pytest.mark.waits(3)
def test_after_the_grace_all_are_ended_by_force(tmp_path: Path) -> None:
    """After the grace `ddprun` kills all."""
    with start(tmp_path, "deaf", flags=("--grace", "3", "--requeue")) as run, Slowness() as slowness:
        run.process.terminate()
        assert run.end() == 128 + signal.SIGTERM
    assert 3 < slowness.took < 5 * slowness.factor
    assert written(tmp_path) == {"0-0"}
    stopped, killed, where, logs, again = run.lines[-5:]
    assert (stopped, killed, again) == (
        "ddprun: stopped by SIGTERM",
        "ddprun: rank 1 on localhost was killed after --grace 3",
        "ddprun: not started again: not every process exited with 75",
    )
    assert re.fullmatch(r"ddprun: rank 1 on localhost: .*/script.py:\d+ in wait_for", where), where
    assert logs.startswith("ddprun: the stacks of all threads are in ")
    assert not processes_in(tmp_path)


STAYS = """
import signal, sys, time
if "slow" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: time.sleep(1000))
open("up", "w").close()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.waits(3)
@pytest.mark.parametrize(
    ("how", "flags"), [("slow", ["--grace", "1"]), ("slow", []), ("", [])], ids=["grace", "slow", "no handler"]
)
def test_a_signal_to_the_program_of_a_node_never_ends_the_job_well_nor_is_forgotten(
    tmp_path: Path, how: str, flags: list[str]
) -> None:
    """A job that a node's signal ends fails."""
    with Run(tmp_path, *flags, write(tmp_path, STAYS), *how.split()) as run:
        run.await_files("up")
        for pid in of_ddprun(run, "stdin.buffer"):
            os.kill(pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
    assert "ddprun: stopped by SIGTERM on localhost" in run.lines


# How the ranks end, the exit code, and what is told.
HOW = {
    "fails": (3, "rank 1 on localhost failed with exit code 3: no exception was printed"),
    "full": (1, "not started again: not every process exited with 75"),
    "done": (0, "stopped by SIGUSR1, but all processes exited with code 0: done"),
}


@pytest.mark.parametrize("how", HOW)
def test_how_the_ranks_have_ended_decides_what_is_told(tmp_path: Path, how: str) -> None:
    """A request changes neither failure nor success."""
    code, says = HOW[how]
    with start(tmp_path, how, flags=(*PATIENT, "--requeue")) as run:
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == code
    assert f"ddprun: {says}" in run.lines[-3:]
    assert written(tmp_path) == {"0-0", "1-0"} and WROTE not in run.text


ENDS = """
import atexit, os, sys, time
rank, code, seconds = os.environ["RANK"], int(sys.argv[1]), float(sys.argv[2])
if rank == "1":
    atexit.register(time.sleep, seconds)
    open("ends", "w").close()
while not os.path.exists("ends"):
    time.sleep(0.01)
sys.exit(75 if rank == "0" else code)
"""
# How long the second rank takes to end after the first was preempted, its exit code, the job's and what is told.
SLOW_ENDS = {
    "preempted too": (3, 75, 75, WROTE),
    "done": (0.7, 0, 1, "rank 0 on localhost exited with code 75, others with 0, and nobody had asked"),
    "fails": (0.7, 3, 3, "rank 1 on localhost failed with exit code 3: no exception was printed"),
    "never ends": (1000, 75, 143, "did not end within 1 s after another rank was preempted"),
}


@pytest.mark.slow
@pytest.mark.waits(3)
@pytest.mark.parametrize("how", SLOW_ENDS)
def test_a_rank_that_is_slow_to_end_does_not_change_the_exit_code_of_a_preempted_job(tmp_path: Path, how: str) -> None:
    """A preempted job exits with 75, however slowly."""
    seconds, own, code, says = SLOW_ENDS[how]
    flags = ["--grace", "1"] if how == "never ends" else []
    with Run(tmp_path, "-H", "localhost:2", *flags, write(tmp_path, ENDS), str(own), str(seconds)) as run:
        assert run.end() == code, run.text
    assert any(line.endswith(says) for line in run.lines[-3:]), run.text


@pytest.mark.parametrize("grace", [True, False])
def test_a_rank_that_still_starts_gets_the_signal_when_it_can_take_it(tmp_path: Path, grace: bool) -> None:
    """A rank that still starts gets the request later."""
    flags = PATIENT if grace else ()
    with Run(tmp_path, "-H", "localhost:2", *flags, write(tmp_path, STOPS), "late") as run:
        run.await_files("imports-0", "imports-1")
        run.process.send_signal(signal.SIGUSR1)
        if grace:
            run.await_text("asking all processes to stop")
            (tmp_path / "sent").touch()
        assert run.end() == (75 if grace else 128 + signal.SIGUSR1)
    assert got(tmp_path) == ({"0-0": ["SIGUSR1"], "1-0": ["SIGUSR1"]} if grace else {})
    assert run.lines[-1] == f"ddprun: stopped by SIGUSR1{f': {WROTE}' if grace else ''}"


def test_the_ranks_start_again_if_only_one_of_them_was_signalled(tmp_path: Path) -> None:
    """Preempted ranks restart after all have written."""
    with start(tmp_path, flags=(*PATIENT, "--max-restarts", "1")) as run:
        os.kill(int((tmp_path / "up-1-0").read_text()), signal.SIGTERM)
        run.await_files("up-0-1", "up-1-1")
        assert written(tmp_path) == {"0-0", "1-0"}
        run.process.terminate()
        assert run.end() == 75
    assert "restart 1 of 1" in run.text
    assert written(tmp_path) == {"0-0", "1-0", "0-1", "1-1"}
    assert got(tmp_path) == {name: ["SIGTERM"] for name in written(tmp_path)}


def test_ranks_write_although_ddprun_was_killed(tmp_path: Path) -> None:
    """Killing `ddprun` leaves ranks their grace."""
    with start(tmp_path) as run:
        run.process.kill()
        wait_until(lambda: not processes_in(tmp_path))
    assert written(tmp_path) == {"0-0", "1-0"}
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"]}


# --- starting again ---------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes stand-ins for a scheduler's programs, the only ones there are; the path with others behind them."""
    folder, path = tmp_path / "bin", os.environ["PATH"]
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(**texts: str) -> str:
        for name, text in texts.items():
            program(folder / name, f'echo "{name} $*" >>{tmp_path}/calls\n{text}')
        return f"{folder}:{path}:/usr/bin:/bin"

    return make


def test_a_request_before_anything_has_started_requeues_the_job(tmp_path: Path, programs: Callable[..., str]) -> None:
    path = programs(squeue="echo RUNNING", scontrol="exit 0", enter=f"touch {tmp_path}/waits; exec sleep {LIMIT:g}")
    flags = ["-H", "far:2", "--rsh", "enter", "--grace", "60", "--requeue", "script.py"]
    with Run(tmp_path, *flags, PATH=path, SLURM_JOB_ID="7") as run:
        run.await_files("waits")
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 128 + signal.SIGUSR1
    assert run.text == "ddprun: stopped by SIGUSR1\nddprun: requeued Slurm job 7\n"


STATE = "squeue -h -t all -j 7 -o %T"
SUBMIT_AGAIN = "Let the job script submit itself again after exit code 75, as examples/jobs/preemptible.pbs does"


@pytest.mark.parametrize(
    ("job", "texts", "says"),
    [
        ("SLURM_JOB_ID=7", {"squeue": "echo RUNNING", "scontrol": "exit 0"}, "requeued Slurm job 7"),
        ("SLURM_JOB_ID=7", {"squeue": "echo CANCELLED"}, "Slurm job 7 not requeued: it is CANCELLED"),
        (
            "SLURM_JOB_ID=7",
            {"squeue": "echo RUNNING", "scontrol": "echo Disabled. >&2; exit 1"},
            "Slurm job 7 not requeued: scontrol requeue 7 failed: Disabled",
        ),
        ("SLURM_JOB_ID=7", {"squeue": "echo SIGNALING", "scontrol": "exit 0"}, "requeued Slurm job 7"),
        ("SLURM_JOB_ID=7", {}, "Slurm job 7 not requeued: scontrol is not in PATH"),
        ("PBS_JOBID=7.s", {"qrerun": "exit 0"}, "requeued PBS job 7.s"),
        (
            "PBS_JOBID=7.s",
            {"qrerun": "echo Unauthorized >&2; exit 159"},
            f"PBS job 7.s not requeued: qrerun 7.s failed: Unauthorized. {SUBMIT_AGAIN}",
        ),
        ("LSB_JOBID=7", {}, "LSF job 7: LSF requeues it if it was submitted with bsub -Q 75"),
    ],
)
def test_a_job_is_requeued_by_its_scheduler_or_one_line_says_why_not(
    programs: Callable[..., str], job: str, texts: dict[str, str], says: str
) -> None:
    """`--requeue` requeues the job, or says why not."""
    programs(**texts)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert requeue(dict([job.split("=")])) == says
    finally:
        signal.signal(signal.SIGTERM, before)


SLURM, PBS = {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.s"}


@pytest.mark.parametrize(
    ("environ", "texts", "left", "length"),
    [
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
    found = job_end({name: str(moment + int(value)) if "TIME" in name else value for name, value in environ.items()})
    assert (found is None) == (left is None)
    if found is not None and left is not None:
        assert found.length == length
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


def test_a_job_that_is_no_longer_than_the_grace_is_refused_not_requeued_forever(
    tmp_path: Path, programs: Callable[..., str]
) -> None:
    path = programs(squeue="echo 0:58 1:00", scontrol="exit 0")
    done = ddprun("--grace", "60", "--requeue", "script.py", cwd=tmp_path, PATH=path, SLURM_JOB_ID="7")
    assert done.stderr == "ddprun: --grace must be shorter than the job, got 60 s; Slurm job 7 has 60 s.\n"
    assert done.returncode == 2
    assert (tmp_path / "calls").read_text() == "squeue -h -j 7 -o %L %l\n"
