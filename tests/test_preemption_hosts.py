"""``ddprun`` on several hosts is asked to stop: the request reaches all of them, wherever it arrives first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_bed import Host, HostBed
from test_ddprun_hosts import DDPRUN, IMPATIENT, LIMIT, PLAIN, REASON, Run, of_job, wait_until, write
from test_ddprun_preemption import STOPS, WROTE

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.hosts,
    pytest.mark.xdist_group("hosts-preemption"),
]

RANKS = {0: "h1", 1: "h2", 2: "h2"}
JOBS = Path(__file__).parents[1] / "examples" / "jobs"


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[HostBed]:
    with HostBed(2) as made:
        yield made


@pytest.fixture
def bed(two_hosts: HostBed) -> Iterator[HostBed]:
    yield two_hosts
    left = of_job(*two_hosts.hosts)
    two_hosts.end_all()
    assert not left


def start(bed: HostBed, folder: Path, *words: str, flags: tuple[str, ...] = (), command: list[str] = PLAIN) -> Run:
    """A run of three ranks that are up."""
    grace = ["-H", "h1:1,h2:2", "--grace", str(LIMIT), *flags]
    run = Run(bed.hosts[0], *grace, write(folder, STOPS), *words, cwd=folder, command=command)
    wait_until(lambda: are_up(folder, 0) or run.process.poll() is not None)
    assert are_up(folder, 0), run.text
    return run


def are_up(folder: Path, times: int) -> bool:
    return all((folder / f"up-{rank}-{times}").exists() for rank in RANKS)


def got(folder: Path) -> dict[str, list[str]]:
    return {path.name[4:]: path.read_text().split() for path in folder.glob("got-*")}


def signal_rank(bed: HostBed, folder: Path, rank: int, number: int) -> None:
    """The rank has written its process id as its host sees it."""
    host = next(host for host in bed.hosts if host.name == RANKS[rank])
    pid = max((path.stat().st_mtime_ns, path.read_text()) for path in folder.glob(f"up-{rank}-*"))[1]
    assert host.run("kill", f"-{number}", pid).returncode == 0


ALL = {f"{rank}-0" for rank in RANKS}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param(PLAIN, signal.SIGTERM, id="SIGTERM"),
        pytest.param(DDPRUN, signal.SIGUSR1, id="SIGUSR1 torchrun", marks=pytest.mark.cold),
    ],
)
def test_a_signal_reaches_each_rank_of_each_host_once(
    bed: HostBed, tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    with start(bed, tmp_path, command=command) as run:
        run.signal(number)
        code, lines = run.end()
    assert (code, lines[-1]) == (75, f"ddprun: stopped by {number.name}: {WROTE}")
    assert got(tmp_path) == {key: [number.name] for key in ALL}
    assert {path.name[11:] for path in tmp_path.glob("checkpoint-*")} == ALL


def test_a_rank_that_is_signalled_on_one_host_takes_all_along(bed: HostBed, tmp_path: Path) -> None:
    with start(bed, tmp_path) as run:
        signal_rank(bed, tmp_path, 2, signal.SIGUSR1)
        code, lines = run.end()
    assert (code, lines[-1]) == (75, f"ddprun: {WROTE}")
    assert got(tmp_path) == {"0-0": ["SIGTERM"], "1-0": ["SIGTERM"], "2-0": ["SIGUSR1"]}


@pytest.mark.cold
def test_no_host_starts_again_before_all_have_written(bed: HostBed, tmp_path: Path) -> None:
    """The agent of h2 has lost all its ranks while the one of h1 still writes."""
    with start(bed, tmp_path, "slow", flags=("--max-restarts", "1"), command=DDPRUN) as run:
        signal_rank(bed, tmp_path, 2, signal.SIGTERM)
        wait_until(lambda: all((tmp_path / f"checkpoint-{rank}-0").exists() for rank in (1, 2)))
        assert not (tmp_path / "checkpoint-0-0").exists()
        (tmp_path / "written").touch()
        wait_until(lambda: are_up(tmp_path, 1) or run.process.poll() is not None)
        assert (tmp_path / "checkpoint-0-0").exists(), run.text
        run.signal(signal.SIGTERM)
        code, lines = run.end()
    assert (code, lines[-1]) == (75, f"ddprun: stopped by SIGTERM: {WROTE}")
    assert got(tmp_path) == {key: ["SIGTERM"] for key in [f"{rank}-{times}" for rank in RANKS for times in (0, 1)]}
    assert run.text.count("restart 1 of 1") == 2


def test_a_rank_that_fails_on_another_host_is_the_cause(bed: HostBed, tmp_path: Path) -> None:
    with start(bed, tmp_path, "fails") as run:
        run.signal(signal.SIGTERM)
        code, lines = run.end()
    assert (code, lines[-2]) == (3, "ddprun: rank 1 on h2 failed with exit code 3: no exception was printed")


def test_a_host_that_is_lost_while_all_write_is_the_cause(tmp_path: Path) -> None:
    with HostBed(2) as bed, start(bed, tmp_path, flags=tuple(IMPATIENT)) as run:
        bed.power_off(bed.hosts[1])
        run.signal(signal.SIGTERM)
        code, lines = run.end()
        assert not of_job(bed.hosts[0])
    assert code == 1
    assert lines[-2].startswith("ddprun: h2: the connection was lost"), lines


def pbs(host: Host, folder: Path, qstat: str) -> dict[str, str]:
    """The environment of a PBS job, with stand-ins for the programs of PBS."""
    (folder / "bin").mkdir()
    for name, text in {"qstat": qstat, "qsub": f'echo "$*" >>{folder}/submitted'}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "nodes").write_text("h1\nh2\nh2\n")
    (folder / "script.py").write_text(STOPS)
    return host.environ(
        PBS_ENVIRONMENT="PBS_BATCH",
        PBS_JOBID="12.server",
        PBS_NODEFILE=str(folder / "nodes"),
        PBS_O_WORKDIR=str(folder),
        PATH=f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        SCRIPT="script.py",
    )


ENDS_SOON = "echo Resource_List.walltime = 00:01:50; echo stime = $(date '+%a %b %d %H:%M:%S %Y')"


@pytest.mark.cold
def test_the_pbs_job_submits_itself_again_before_its_end(bed: HostBed, tmp_path: Path) -> None:
    """ddprun asks for its end once, when it begins: 20 seconds later, it asks all to stop."""
    host = bed.hosts[0]
    script = str(JOBS / "preemptible.pbs")
    done = host.run("bash", script, environ=pbs(host, tmp_path, ENDS_SOON), timeout=LIMIT)
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines()[-1] == f"ddprun: stopped by the end of PBS job 12.server: {WROTE}"
    assert got(tmp_path) == {key: ["SIGTERM"] for key in ALL}
    assert (tmp_path / "submitted").read_text() == f"-v SCRIPT=script.py {tmp_path}/preemptible.pbs\n"


@pytest.mark.cold
def test_a_pbs_job_that_is_deleted_writes_its_checkpoint_and_ends(bed: HostBed, tmp_path: Path) -> None:
    """qdel sends SIGCONT and SIGTERM to each process of the job's session, here of the whole host."""
    host = bed.hosts[0]
    environ = pbs(host, tmp_path, "exit 1")
    with (tmp_path / "err").open("wb") as err:
        job = host.start("bash", str(JOBS / "preemptible.pbs"), environ=environ, stdout=err, stderr=err)
    try:
        wait_until(lambda: are_up(tmp_path, 0) or job.poll() is not None)
        for number in (signal.SIGCONT, signal.SIGTERM):
            for pid in host.processes():
                os.kill(pid, number)
        assert job.wait(LIMIT) == 75, (tmp_path / "err").read_text()
    finally:
        job.kill()
        job.wait()
    assert {name: set(signals) for name, signals in got(tmp_path).items() if name in ALL} == {
        key: {"SIGTERM"} for key in ALL
    }
    assert (tmp_path / "err").read_text().splitlines()[-1] == f"ddprun: stopped by SIGTERM: {WROTE}"
    assert not (tmp_path / "submitted").exists()
