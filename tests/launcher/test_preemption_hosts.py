"""``ddprun`` on several hosts is asked to stop: the request reaches all of them, wherever it arrives first."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import DDPRUN, IMPATIENT, LIMIT, Run, of_job, on_hosts, program, wait_until, write
from kit.hosts import Host, HostBed
from kit.paths import ROOT
from test_ddprun_preemption import PATIENT, STOPS, WROTE, got, written

pytestmark = on_hosts("preemption")

HOSTS = ("h1", "h2", "h2")  # of the ranks
ALL = {f"{rank}-0" for rank in range(3)}
UP = [f"up-{key}" for key in ALL]
JOBS = ROOT / "examples" / "jobs"


@contextmanager
def start(bed: HostBed, folder: Path, *words: str, flags: tuple[str, ...] = ()) -> Iterator[Run]:
    """A run of three ranks that are up."""
    argv = ["-H", "h1:1,h2:2", *PATIENT, *flags, write(folder, STOPS), *words]
    with Run(folder, *argv, host=bed.hosts[0]) as run:
        run.await_files(*UP)
        yield run


def signal_rank(bed: HostBed, folder: Path, rank: int, number: int) -> None:
    """The rank has written its process id as its host sees it."""
    host = next(host for host in bed.hosts if host.name == HOSTS[rank])
    assert host.run("kill", f"-{number}", (folder / f"up-{rank}-0").read_text()).returncode == 0


@pytest.mark.parametrize("whom", ["ddprun", "rank 2"])
def test_a_request_reaches_each_rank_of_each_host_once(bed: HostBed, tmp_path: Path, whom: str) -> None:
    with start(bed, tmp_path) as run:
        if whom == "ddprun":
            run.signal(signal.SIGTERM)
        else:
            signal_rank(bed, tmp_path, 2, signal.SIGUSR1)
        assert run.end() == 75
    by_whom, of_rank_2 = ("stopped by SIGTERM: ", "SIGTERM") if whom == "ddprun" else ("", "SIGUSR1")
    assert run.lines[-1] == f"ddprun: {by_whom}{WROTE}"
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"], "2-0": [of_rank_2]}
    assert written(tmp_path) == ALL


def test_no_host_starts_again_before_all_have_written(bed: HostBed, tmp_path: Path) -> None:
    # h2 has lost all its ranks while that of h1 still writes.
    with start(bed, tmp_path, "slow", flags=("--max-restarts", "1")) as run:
        signal_rank(bed, tmp_path, 2, signal.SIGTERM)
        run.await_files("checkpoint-1-0", "checkpoint-2-0")
        assert written(tmp_path) == {"1-0", "2-0"}
        (tmp_path / "written").touch()
        run.await_files("up-0-1", "up-1-1", "up-2-1")
        assert written(tmp_path) == ALL, run.text
        run.signal(signal.SIGTERM)
        assert run.end() == 75
    assert run.lines[-1] == f"ddprun: stopped by SIGTERM: {WROTE}"
    assert got(tmp_path) == {f"{rank}-{times}": ["SIGTERM"] for rank in range(3) for times in (0, 1)}
    assert run.text.count("restart 1 of 1") == 2


def test_a_host_that_is_lost_while_all_write_is_the_cause(tmp_path: Path) -> None:
    """An error names a host lost while writing."""
    with HostBed(2) as bed, start(bed, tmp_path, flags=tuple(IMPATIENT)) as run:
        bed.power_off(bed.hosts[1])
        run.signal(signal.SIGTERM)
        assert run.end() == 1
        assert not of_job(bed.hosts[0])
    assert run.lines[-2].startswith("ddprun: h2: the connection was lost"), run.lines


def pbs(host: Host, folder: Path, qstat: str = "exit 1", script: str = STOPS) -> dict[str, str]:
    """The environment of a PBS job, with stand-ins for the programs of PBS.

    As PBS runs it: on the first host alone, with a host file that names a host once for each of its processes.
    """
    program(folder / "bin" / "qstat", qstat)
    program(folder / "bin" / "qsub", f'echo "$*" >>{folder}/submitted')
    program(folder / "bin" / "ddprun", f'exec {shlex.join(DDPRUN)} "$@"')
    (folder / "nodes").write_text("h1\nh2\nh2\n")
    write(folder, script)
    return host.environ(
        PBS_ENVIRONMENT="PBS_BATCH",
        PBS_JOBID="12.server",
        PBS_NODEFILE=str(folder / "nodes"),
        PBS_O_WORKDIR=str(folder),
        PATH=f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        SCRIPT="script.py",
    )


def test_the_pbs_script_of_the_docs_runs_on_the_hosts_of_its_job(bed: HostBed, tmp_path: Path) -> None:
    """In a PBS or Slurm job, `ddprun` takes its nodes."""
    host, script = bed.hosts[0], "import os; print(os.environ['WORLD_SIZE'], os.uname().nodename)"
    done = host.run("bash", str(JOBS / "ddp.pbs"), environ=pbs(host, tmp_path, script=script), timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "[h1:0] 3 h1\n"), done.stderr
    assert re.search(r"^ddprun: h2: ranks 1-2, \d+ threads? each, interface eth0$", done.stderr, re.M)


ENDS_SOON = "echo Resource_List.walltime = 00:01:38; echo stime = $(date '+%a %b %d %H:%M:%S %Y')"


@pytest.mark.waits(8)
def test_the_pbs_job_submits_itself_again_before_its_end(bed: HostBed, tmp_path: Path) -> None:
    # ddprun asks for its end once, when it begins: some seconds later, it asks all to stop.
    host = bed.hosts[0]
    script = str(JOBS / "preemptible.pbs")
    done = host.run("bash", script, environ=pbs(host, tmp_path, ENDS_SOON), timeout=LIMIT)
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[-1] == f"ddprun: stopped by the end of PBS job 12.server: {WROTE}"
    assert got(tmp_path) == {key: ["SIGTERM"] for key in ALL}
    assert (tmp_path / "submitted").read_text() == f"-v SCRIPT=script.py {tmp_path}/preemptible.pbs\n"


def test_a_pbs_job_that_is_deleted_writes_its_checkpoint_and_ends(bed: HostBed, tmp_path: Path) -> None:
    # qdel sends SIGCONT and SIGTERM to each process of the job's session, here of the whole host.
    host = bed.hosts[0]
    with (tmp_path / "err").open("wb") as err:
        environ = pbs(host, tmp_path)
        job = host.start("bash", str(JOBS / "preemptible.pbs"), environ=environ, stdout=err, stderr=err)
    try:
        wait_until(lambda: all((tmp_path / name).exists() for name in UP) or job.poll() is not None)
        for number in (signal.SIGCONT, signal.SIGTERM):
            for pid in host.processes():
                os.kill(pid, number)
        assert job.wait(LIMIT) == 75, (tmp_path / "err").read_text()
    finally:
        job.kill()
        job.wait()
    signals = got(tmp_path)
    assert {key: set(signals[key]) for key in ALL} == {key: {"SIGTERM"} for key in ALL}
    assert (tmp_path / "err").read_text().splitlines()[-1] == f"ddprun: stopped by SIGTERM: {WROTE}"
    assert not (tmp_path / "submitted").exists()
