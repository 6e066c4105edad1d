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

import pytest
from jobs import LIMIT, wait_until, write
from kit import hosts
from kit.hosts import Host, HostBed
from kit.paths import ROOT

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
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=h1 NodeAddr=10.83.0.1 CPUs=4 Gres=gpu:4 RealMemory=4000 State=UNKNOWN
NodeName=h2 NodeAddr=10.83.0.2 CPUs=4 Gres=gpu:4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=h1,h2 Default=YES State=UP OverSubscribe=FORCE:4
"""


ENDS = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or name


def _missing() -> str | None:
    lacking = [name for name in _PROGRAMS if shutil.which(_program(name)) is None]
    return hosts.missing() or (f"needs {', '.join(lacking)}" if lacking else None)


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
        end = time.monotonic() + LIMIT
        while (state := self.run(*query, cwd=self._folder).stdout.strip()) not in ENDS:
            assert time.monotonic() < end, state
            time.sleep(0.1)
        return state

    def _start_host(self, host: Host) -> None:
        socket = self._folder / f"munge-{host.name}"
        (self._folder / "key").write_bytes(b"k" * 1024)
        (self._folder / "key").chmod(0o400)
        for name in ("state", f"spool-{host.name}"):
            (self._folder / name).mkdir(exist_ok=True)
        (self._folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/run/gpu[0-3]\n")
        host.run("sh", "-c", "for i in 0 1 2 3; do mknod /run/gpu$i c 1 3; done")  # /dev/null, by other names
        config = self._folder / f"slurm-{host.name}.conf"
        config.write_text(CONFIG.format(folder=self._folder, socket=socket))
        files = {"key-file": self._folder / "key", "socket": socket}
        files |= {f"{name}-file": self._folder / f"munge-{host.name}.{name}" for name in ("pid", "log", "seed")}
        self._daemon(host, "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        wait_until(socket.exists)
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
        wait_until(lambda: self.run(*idle, cwd=self._folder).stdout.strip() == str(count))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with HostBed(2) as bed:
        yield Slurm(bed, tmp_path_factory.mktemp("slurm"))


EXAMPLES = ROOT / "examples"
DIGITS = [str(EXAMPLES / "digits" / "train.py"), "--epochs", "1"]


@pytest.mark.cold
def test_srun_starts_a_script_itself(slurm: Slurm, tmp_path: Path) -> None:
    """`srun` starts a script itself."""
    script = str(EXAMPLES / "digits_lightning" / "train.py")
    tasks = ["srun", "-N2", "--ntasks-per-node=1", "-K", sys.executable]
    done = slurm.run(*tasks, script, "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes: accuracy 0." in done.stdout
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


@pytest.mark.cold
def test_the_job_script_of_the_docs_trains_on_the_hosts_of_its_job(slurm: Slurm, tmp_path: Path) -> None:
    """The Slurm script of the docs trains."""
    script = str(EXAMPLES / "jobs" / "ddp.slurm")
    submitted = slurm.run("sbatch", "--parsable", "--ntasks-per-node=1", script, *DIGITS, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    ended_as = slurm.wait(submitted.stdout.strip())
    (log,) = tmp_path.glob("train-*.log")
    said = log.read_text()
    assert ended_as == "COMPLETED", said
    for host in ("h1: rank 0", "h2: rank 1"):
        assert f"ddprun: {host}, 2 threads each, interface eth0" in said or os.cpu_count() == 1
    assert "2 processes hold equal parameters" in said


def test_ddprun_under_srun_says_how_to_start_it(slurm: Slurm, tmp_path: Path) -> None:
    script = write(tmp_path, "print('started')")
    done = slurm.run("srun", "-N2", sys.executable, "-m", "ddp_callbacks.launcher", script, cwd=tmp_path)
    assert done.returncode == 2
    assert "ddprun was started as rank 0 of 2. Start it once, without srun" in done.stderr
    assert done.stdout == ""


NO_SSH = """
import os
names = ("SLURM_STEP_ID", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK")
print(os.uname().nodename, *(os.environ.get(name, "none") for name in names), flush=True)
"""
# What srun would take as flags: it would number the lines, write to a file, and have one GPU and one core.
INPUT = {"SLURM_LABELIO": "1", "SLURM_STDOUTMODE": "file", "SRUN_CPUS_PER_TASK": "1"}


@pytest.mark.cold
@pytest.mark.parametrize(("asked", "gpus"), [("--gpus-per-task=1", "0,1"), ("--gpus=4", "0")])  # Slurm takes 3 and 1
def test_srun_takes_ssh_s_place_in_a_job(slurm: Slurm, tmp_path: Path, asked: str, gpus: str) -> None:
    """Where ssh fails in Slurm, `ddprun` uses srun."""
    # In an allocation whose nodes let nobody in.
    ddprun = ["ddprun", "--show-ranks", "all", "--no-prefix"]
    variables = [f"{name}={value}" for name, value in INPUT.items()]
    path = "PATH=" + str(no_ssh(tmp_path)) + ":" + slurm.environ(slurm.login)["PATH"]
    allocation = ["salloc", "-N2", "--ntasks-per-node=2", "--cpus-per-task=2", asked]
    batch = ["env", path, *variables, *ddprun, write(tmp_path, NO_SSH)]
    done = slurm.run(*allocation, *batch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = sorted((line.split() for line in done.stdout.splitlines() if line[:1] == "h"), key=lambda words: words[2])
    assert [words[:1] + words[2:4] for words in said] == [[f"h{1 + rank // 2}", str(rank), "4"] for rank in range(4)]
    assert [words[1] == "none" for words in said] == [True, True, False, False]  # a process here, a step there
    assert [words[4:] for words in said[2:]] == [[gpus, "2"]] * 2


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
# As the example, for nodes that let nobody in: the processes of h2 are a step of the job.
IN_A_STEP = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append --output=%x-%j.log
exec ddprun --grace 90 --requeue --rsh srun "$@"
"""
# What Slurm signals, as an option of sbatch, and what the job says of it. Slurm looks twice a minute whether it is
# time in the next half minute, so that the signal comes 25 to 55 seconds after the start, when all ranks are up; ddprun
# would stop by itself after one and a half minutes.
WHOM = {
    "batch": ("B:USR1@125", "ddprun: SIGUSR1: asking all processes to stop within 90 s"),
    "steps": ("USR1@125", "ddprun: SIGUSR1 on h2: asking all processes to stop within 90 s"),
}


def submit(slurm: Slurm, folder: Path, *flags: str) -> str:
    """The number of the job, once its four ranks are up."""
    folder.mkdir()
    script = (
        EXAMPLES / "jobs" / "preemptible.slurm" if folder.name == "batch" else folder / write(folder, IN_A_STEP, "job")
    )
    done = slurm.run("sbatch", "--parsable", *flags, str(script), write(folder, STOPS), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def await_ranks(folder: Path) -> None:
    wait_until(lambda: all((folder / f"start-{rank}-0").exists() for rank in range(4)))


def printed(folder: Path, numbers: str) -> str:
    """The log of the job. In its first run each rank got one of these signals, or one twice, and ended by itself."""
    (log,) = folder.glob("*.log")
    first = min((folder / "ddprun-logs").iterdir())
    for rank in range(4):
        signals = rf"{rank}( {numbers}){{1,2}}\n"
        text = (first / f"rank-{rank}.log").read_text()
        assert re.fullmatch(rf"up {rank} on h\d\nwrote {signals}leaves {signals}", text), (
            f"rank {rank}: {text}\n{log.read_text()}"
        )
    return log.read_text()


@pytest.mark.cold
@pytest.mark.waits(40)
def test_a_job_that_slurm_signals_before_its_end_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Preemptible Slurm and PBS jobs requeue themselves."""
    jobs = {}
    for what, (whom, _) in WHOM.items():
        jobs[what] = submit(slurm, tmp_path / what, "--time=3", f"--signal={whom}")
    for what, job in jobs.items():
        await_ranks(tmp_path / what)
        ended_as, log = slurm.wait(job), printed(tmp_path / what, "SIG(USR1|TERM)")
        assert ended_as == "COMPLETED", log
        assert WHOM[what][1] in log.splitlines()
        assert re.search(rf"preempted, checkpoint written\n(.*\n)*ddprun: requeued Slurm job {job}$", log, re.M), log
        assert log.count("went on 0") == 1 and "Traceback" not in log
        assert len(list((tmp_path / what).glob("start-*"))) == 8


@pytest.mark.cold
def test_a_job_that_is_cancelled_writes_its_checkpoint_and_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """After `scancel` or `qdel` they write, and end."""
    # Slurm sends SIGTERM to each process of the batch step: ddprun, its ssh or srun, the nodes' programs and the ranks.
    jobs = {what: submit(slurm, tmp_path / what) for what in WHOM}
    for what, job in jobs.items():
        await_ranks(tmp_path / what)
        slurm.run("scancel", job, cwd=tmp_path)
    for what, job in jobs.items():
        ended_as, log = slurm.wait(job), printed(tmp_path / what, "SIGTERM")
        assert re.search(r"^ddprun: stopped by SIGTERM( on h\d)?: preempted, checkpoint written$", log, re.M), log
        assert re.search(f"^ddprun: Slurm job {job} not requeued: it is (COMPLETING|CANCELLED)$", log, re.M), log
        assert ended_as == "CANCELLED"
        assert len(list((tmp_path / what).glob("start-*"))) == 4
