"""A real Slurm on real hosts: ``srun`` starts the script itself, and ``ddprun`` finds the hosts of its job."""

from __future__ import annotations

import os
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
AuthInfo=socket={socket}
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
