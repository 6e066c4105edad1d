"""A real Slurm on real hosts: ``srun`` starts the script itself, and ``ddprun`` finds the hosts of its job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import host_bed
import pytest
from host_bed import Host, HostBed
from test_ddprun_hosts import DIGITS, LIMIT, WANTED, write

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")

CONFIG = """\
ClusterName=bed
SlurmctldHost=h1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
NodeName=h1 NodeAddr=10.83.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=h2 NodeAddr=10.83.0.2 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=h1,h2 Default=YES State=UP OverSubscribe=FORCE:4
"""


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or name


def _missing() -> str | None:
    if not WANTED:
        return "real hosts are made with SETUP_HOSTS=1"
    lacking = [name for name in _PROGRAMS if shutil.which(_program(name)) is None]
    return host_bed.missing() or (f"needs {', '.join(lacking)}" if lacking else None)


REASON = _missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.hosts,
    pytest.mark.xdist_group("hosts-slurm"),
]


class Slurm:
    def __init__(self, bed: HostBed, folder: Path) -> None:
        self.login: Host = bed.hosts[0]
        self._folder = folder
        for host in bed.hosts:
            self._start_host(host)
        self._await_nodes(len(bed.hosts))

    def environ(self, host: Host) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        config = str(self._folder / f"slurm-{host.name}.conf")
        return host.environ(SLURM_CONF=config, PATH=path, PYTHONDONTWRITEBYTECODE="1")

    def run(self, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ(self.login), "PWD": str(cwd)}
        return self.login.run(*argv, environ=environ, cwd=cwd, timeout=LIMIT)

    def wait(self, job: str) -> str:
        """How the job has ended. ``sbatch --wait`` would look ever less often."""
        query = ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]
        end, not_yet = time.monotonic() + LIMIT, ("", "PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        while (state := self.run(*query, cwd=self._folder).stdout.strip()) in not_yet:
            assert time.monotonic() < end, state
            time.sleep(0.1)
        return state

    def _start_host(self, host: Host) -> None:
        socket = self._folder / f"munge-{host.name}"
        (self._folder / "key").write_bytes(b"k" * 1024)
        (self._folder / "key").chmod(0o400)
        for name in ("state", f"spool-{host.name}"):
            (self._folder / name).mkdir(exist_ok=True)
        config = self._folder / f"slurm-{host.name}.conf"
        config.write_text(CONFIG.format(folder=self._folder, socket=socket))
        files = {"key-file": self._folder / "key", "socket": socket}
        files |= {f"{name}-file": self._folder / f"munge-{host.name}.{name}" for name in ("pid", "log", "seed")}
        self._daemon(host, "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        _wait_for(socket.exists)
        if host is self.login:
            self._daemon(host, "slurmctld", "-D", "-c", "-f", str(config))
        self._daemon(host, "slurmd", "-D", "-N", host.name, "-f", str(config))

    def _daemon(self, host: Host, name: str, *flags: str) -> None:
        """It ends with its host."""
        with (self._folder / f"{name}-{host.name}.out").open("wb") as out:
            argv = ["sh", "-c", '"$@" & ', "sh", _program(name), *flags]
            process = host.start(*argv, environ=self.environ(host), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            assert process.wait(LIMIT) == 0

    def _await_nodes(self, count: int) -> None:
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        _wait_for(lambda: self.run(*idle, cwd=self._folder).stdout.strip() == str(count))


def _wait_for(holds: object) -> None:
    assert callable(holds)
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with HostBed(2) as bed:
        yield Slurm(bed, tmp_path_factory.mktemp("slurm"))


EPOCHS = ["--epochs", "1"]


@pytest.mark.cold
def test_srun_starts_the_script_itself(slurm: Slurm, tmp_path: Path) -> None:
    tasks = ["-N2", "--ntasks-per-node=2", "-K"]
    done = slurm.run("srun", *tasks, sys.executable, str(DIGITS), *EPOCHS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 processes hold equal parameters" in done.stdout


@pytest.mark.cold
def test_srun_starts_a_lightning_script(slurm: Slurm, tmp_path: Path) -> None:
    script = DIGITS.parent.parent / "digits_lightning" / "train.py"
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", "-K", sys.executable, str(script), *EPOCHS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes: accuracy 0." in done.stdout
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


@pytest.mark.cold
def test_the_job_script_of_the_docs_trains_on_the_hosts_of_its_job(slurm: Slurm, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples" / "jobs" / "ddp.slurm"
    submitted = slurm.run("sbatch", "--parsable", str(script), str(DIGITS), *EPOCHS, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    ended_as = slurm.wait(submitted.stdout.strip())
    (log,) = tmp_path.glob("train-*.log")
    said = log.read_text()
    assert ended_as == "COMPLETED", said
    assert "ddprun: h1: ranks 0-1, 1 thread each, interface eth0" in said
    assert "ddprun: h2: ranks 2-3, 1 thread each, interface eth0" in said
    assert "4 processes hold equal parameters" in said


def test_ddprun_under_srun_says_how_to_start_it(slurm: Slurm, tmp_path: Path) -> None:
    script = write(tmp_path, "print('started')")
    done = slurm.run("srun", "-N2", sys.executable, "-m", "ddp_callbacks.launcher", script, cwd=tmp_path)
    assert done.returncode == 2
    assert "ddprun was started as rank 0 of 2. Start it once, without srun" in done.stderr
    assert done.stdout == ""


NO_SSH = """
import os
step, rank, world_size = (os.environ.get(name, "none") for name in ("SLURM_STEP_ID", "RANK", "WORLD_SIZE"))
print(step, os.uname().nodename, rank, world_size, flush=True)
"""


@pytest.mark.cold
def test_srun_takes_ssh_s_place_in_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """In an allocation whose nodes let nobody in."""
    rsh = "srun --overlap -N1 -n1 -w {host}"
    ddprun = ["ddprun", "--rsh", rsh, "--show-ranks", "all", "--no-prefix"]
    without_ssh = ["env", "PATH=" + str(no_ssh(tmp_path)) + ":" + slurm.environ(slurm.login)["PATH"]]
    allocation = ["salloc", "-N2", "--ntasks-per-node=2"]
    done = slurm.run(*allocation, *without_ssh, *ddprun, write(tmp_path, NO_SSH), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted(
        (line.split() for line in done.stdout.splitlines() if line.endswith(" 4")), key=lambda words: words[2]
    )
    assert [words[1:3] for words in said] == [["h1", "0"], ["h1", "1"], ["h2", "2"], ["h2", "3"]]
    assert [words[0] == "none" for words in said] == [True, True, False, False]  # a process here, a step there


def no_ssh(tmp_path: Path) -> Path:
    """A folder with an ssh that does not work."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    return folder


# Counts its starts, and notes each signal with the process that got it.
STOPS = """
import os, signal, sys, time
rank, host = os.environ["RANK"], os.uname().nodename
start = len([name for name in os.listdir() if name.startswith(f"start-{rank}-")])
open(f"start-{rank}-{start}", "w").close()
got = []
def note(number, _):
    got.append(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
print("up", rank, "on", host, flush=True)
while not got and start == 0:
    time.sleep(0.02)
if start:
    print("went on", rank, flush=True)
    sys.exit(0)
time.sleep(0.5)  # the step, and a checkpoint
print("wrote", rank, *got, flush=True)
time.sleep(0.5)
print("leaves", rank, *got, flush=True)
sys.exit(75)
"""
PREEMPTIBLE = Path(__file__).parents[1] / "examples" / "jobs" / "preemptible.slurm"
# As it, for nodes that let nobody in: the processes of h2 are a step of the job.
IN_A_STEP = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append --output=%x-%j.log
exec ddprun --grace 90 --requeue --rsh 'srun --overlap -N1 -n1 -w {host}' "$@"
"""


def as_file(folder: Path, script: Path | str) -> Path:
    """A job script, from the examples or from its text."""
    if isinstance(script, Path):
        return script
    (folder / "job").write_text(script)
    return folder / "job"


def submit(slurm: Slurm, folder: Path, *argv: str) -> str:
    """The number of the job, once its four ranks are up."""
    done = slurm.run("sbatch", "--parsable", *argv, write(folder, STOPS), cwd=folder)
    assert done.returncode == 0, done.stderr
    _wait_for(lambda: all((folder / f"start-{rank}-0").exists() for rank in range(4)))
    return done.stdout.strip()


def printed(folder: Path) -> tuple[str, dict[int, str]]:
    """The log of the job, and what each rank has printed in its first run."""
    (log,) = folder.glob("*.log")
    first = min((folder / "ddprun-logs").iterdir())
    return log.read_text(), {rank: (first / f"rank-{rank}.log").read_text() for rank in range(4)}


def assert_all_wrote(ranks: dict[int, str], numbers: str) -> None:
    """Each rank got one of these signals, or the same twice, and was left alone until its end."""
    for rank, text in ranks.items():
        assert re.fullmatch(
            rf"up {rank} on h\d\nwrote {rank}( {numbers}){{1,2}}\nleaves {rank}( {numbers}){{1,2}}\n", text
        )


@pytest.mark.cold
@pytest.mark.parametrize(
    ("whom", "script", "says"),
    [
        pytest.param(
            "B:USR1@100", PREEMPTIBLE, "ddprun: SIGUSR1: asking all processes to stop within 90 s", id="batch"
        ),
        pytest.param("USR1@100", IN_A_STEP, "ddprun: h2 got SIGUSR1: asking all processes to stop", id="steps"),
    ],
)
def test_a_job_that_slurm_signals_before_its_end_is_requeued_and_goes_on(
    slurm: Slurm, tmp_path: Path, whom: str, script: Path | str, says: str
) -> None:
    job = submit(slurm, tmp_path, "--time=2", f"--signal={whom}", str(as_file(tmp_path, script)))
    ended_as = slurm.wait(job)
    log, ranks = printed(tmp_path)
    assert ended_as == "COMPLETED", log
    assert_all_wrote(ranks, "SIG(USR1|TERM)")
    assert says in log.splitlines()
    assert re.search(rf"preempted, checkpoint written\n(.*\n)*ddprun: requeued Slurm job {job}$", log, re.M), log
    assert log.count("went on 0") == 1 and "Traceback" not in log
    assert len(list(tmp_path.glob("start-*"))) == 8


@pytest.mark.cold
@pytest.mark.parametrize("script", [PREEMPTIBLE, IN_A_STEP], ids=["batch", "steps"])
def test_a_job_that_is_cancelled_writes_its_checkpoint_and_is_not_requeued(
    slurm: Slurm, tmp_path: Path, script: Path | str
) -> None:
    """Slurm sends SIGTERM to each process of the batch step: ddprun, its ssh or srun, the agent and the ranks."""
    job = submit(slurm, tmp_path, str(as_file(tmp_path, script)))
    slurm.run("scancel", job, cwd=tmp_path)
    ended_as = slurm.wait(job)
    log, ranks = printed(tmp_path)
    assert_all_wrote(ranks, "SIGTERM")
    assert "ddprun: stopped by SIGTERM: preempted, checkpoint written" in log.splitlines(), log
    assert re.search(f"^ddprun: Slurm job {job} not requeued: it is (COMPLETING|CANCELLED)$", log, re.M), log
    assert ended_as == "CANCELLED"
    assert len(list(tmp_path.glob("start-*"))) == 4
