"""``ddprun`` over real ssh between real hosts: what it starts, how it ends, what it says."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import commands
import host_bed
import pytest
import torch
from host_bed import Host, HostBed
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import Slowness
from test_ddprun_here import MISFORTUNES
from test_node import NASTY

from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.remote import as_hex

WANTED = os.environ.get("SETUP_HOSTS") == "1" or bool(os.environ.get("CI"))
REASON = host_bed.missing() if WANTED else "real hosts are made with SETUP_HOSTS=1"
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.hosts]

# Each group has hosts of its own, and runs on one of pytest's workers.
starts, trains, restarts, ends, faults = (
    pytest.mark.xdist_group(f"hosts-{name}") for name in ("starts", "trains", "restarts", "ends", "faults")
)

LIMIT = 600.0  # seconds until a test gives up; less than pytest's own limit
# Where the tests run in the background of a shell, or under nohup, these two are ignored.
PYTHON = ["env", "--default-signal=INT,HUP", sys.executable]
DDPRUN = [*PYTHON, "-m", "ddp_callbacks.launcher"]
# Without torchrun: for what does not depend on it.
PLAIN = [*PYTHON, "-P", str(Path(__file__).with_name("ddprun_with_plain_agent.py"))]
IMPATIENT = ["--heartbeat-timeout", "3.5"]
DIGITS = Path(__file__).parent.parent / "examples" / "digits" / "train.py"


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[HostBed]:
    with HostBed(3) as made:
        yield made


@pytest.fixture
def bed(three_hosts: HostBed) -> Iterator[HostBed]:
    """Nothing of a test may stay there; what did does not harm the next one."""
    yield three_hosts
    end = time.monotonic() + 60
    while (left := of_job(*three_hosts.hosts)) and time.monotonic() < end:
        time.sleep(0.05)
    three_hosts.end_all()
    assert not left


@pytest.fixture
def bed_of_two() -> Iterator[HostBed]:
    """For tests that break it."""
    with HostBed(2) as made:
        yield made


def ddprun(
    host: Host, *argv: str, cwd: Path, command: list[str] = DDPRUN, timeout: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    environ = host.environ(PWD=str(cwd), PYTHONDONTWRITEBYTECODE="1")
    return host.run(*command, *argv, timeout=timeout, cwd=cwd, environ=environ)


@contextmanager
def running(host: Host, *argv: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end of the block, if it still runs."""
    with host.start(*argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


# --- the start --------------------------------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PROBE"]
print(json.dumps([os.uname().nodename, {name: os.environ.get(name) for name in names}]))
"""


@starts
@pytest.mark.cold
def test_ranks_follow_the_order_of_the_hosts_and_share_one_address(bed: HostBed, tmp_path: Path) -> None:
    h1, _, h3 = bed.hosts
    done = ddprun(
        h1, "-H", "h3:2,h1:1,h2:1", "--show-ranks", "all", "-x", "PROBE=a b", write(tmp_path, SHOW), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = dict(re.fullmatch(r"\[(\w+:\d)\] (.*)", line).groups() for line in done.stdout.splitlines())  # type: ignore[union-attr]
    assert sorted(lines) == ["h1:2", "h2:3", "h3:0", "h3:1"]
    cores = usable_cores()
    for label, text in lines.items():
        host, variables = json.loads(text)
        processes = 2 if host == "h3" else 1
        assert label == f"{host}:{variables['RANK']}"
        assert variables == {
            "RANK": label[-1],
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1" if label == "h3:1" else "0",
            "MASTER_ADDR": h3.address,
            "OMP_NUM_THREADS": str(max(1, cores // processes)),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PROBE": "a b",
        }


@starts
def test_what_sets_up_a_library_here_is_alike_on_all_nodes(bed: HostBed, tmp_path: Path) -> None:
    host = bed.hosts[0]
    script = write(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('NCCL_DEBUG'))")
    environ = host.environ(PWD=str(tmp_path), OMP_NUM_THREADS="3", NCCL_DEBUG="a 'b'")
    done = host.run(*PLAIN, "-H", "h1:1,h2:1", "--show-ranks", "all", script, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[h1:0] 3 a 'b'", "[h2:1] 3 a 'b'"]


EPOCHS = [str(DIGITS), "--epochs", "4", "--checkpoint", "digits.pt"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What the digits give on one process."""
    folder = tmp_path_factory.mktemp("one")
    commands.run(["python", *EPOCHS], folder)
    return history(folder)


def history(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch in the checkpoint, but for those of the last batches."""
    state = torch.load(folder / "digits.pt", weights_only=False)
    epochs = next(value for key, value in state.items() if str(key) == "history")
    return [{name: value for name, value in epoch.items() if not name.startswith("running_")} for epoch in epochs]


@trains
@pytest.mark.cold
def test_the_digits_train_across_hosts_as_on_one_process(
    bed: HostBed, tmp_path: Path, one_process: list[dict[str, float]]
) -> None:
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:2,h3:1", *EPOCHS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 processes hold equal parameters" in done.stdout
    assert len(one_process) == 4
    for ours, theirs in zip(history(tmp_path), one_process, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


LIGHTNING = [str(DIGITS.parent.parent / "digits_lightning" / "train.py"), "--epochs", "2", "--logs"]


def logged(folder: Path) -> list[dict[str, float]]:
    """What Lightning's CSVLogger has written; NaN where a line has no such value."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [{name: float(text or "nan") for name, text in row.items()} for row in csv.DictReader(file)]


@trains
@pytest.mark.cold
def test_a_lightning_module_trains_across_hosts_as_on_one_process(bed: HostBed, tmp_path: Path) -> None:
    commands.run(["python", *LIGHTNING, tmp_path / "one", "--strategy", "auto"], tmp_path)
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:2", *LIGHTNING, str(tmp_path / "three"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 processes: accuracy " in done.stdout
    expected = logged(tmp_path / "one")
    assert len(expected) > 10
    for ours, theirs in zip(logged(tmp_path / "three"), expected, strict=True):
        assert ours == {name: pytest.approx(value, rel=1e-4, nan_ok=True) for name, value in theirs.items()}
    checkpoints = {path.name for path in (tmp_path / "three").rglob("*.ckpt")}
    assert checkpoints == {path.name for path in (tmp_path / "one").rglob("*.ckpt")}


def assert_went_on(folder: Path, text: str, one_process: list[dict[str, float]]) -> None:
    """The first epoch was trained once, before the end of a worker; the last line came after a start at a later one."""
    epochs = history(folder)
    assert len(epochs) == 4
    assert epochs[0] == pytest.approx(one_process[0], rel=1e-5)
    last_start = text.replace("\r", "\n").rindex("[00:00<?, ?it/s]")
    assert re.search(r"[123]/4 $", text[:last_start]), text


@restarts
@pytest.mark.cold
@pytest.mark.parametrize("killed", ["h1", "h2"])
def test_a_restarted_run_goes_on_from_its_checkpoint(
    bed: HostBed, tmp_path: Path, one_process: list[dict[str, float]], killed: str
) -> None:
    with Run(bed.hosts[0], "-H", "h1:1,h2:1", "--max-restarts", "1", *EPOCHS, cwd=tmp_path) as run:
        wait_until(lambda: (tmp_path / "digits.pt").exists() or run.process.poll() is not None)
        kill_on(next(host for host in bed.hosts if host.name == killed), f"-u {DIGITS}")
        code, _ = run.end()
    assert code == 0, run.text
    assert "restart 1 of 1" in run.text
    assert "2 processes hold equal parameters" in run.text
    assert_went_on(tmp_path, run.text, one_process)


@restarts
@pytest.mark.cold
def test_an_elastic_run_goes_on_without_a_node_that_lost_its_power(
    bed_of_two: HostBed, tmp_path: Path, one_process: list[dict[str, float]]
) -> None:
    h1, h2 = bed_of_two.hosts
    elastic = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=2"]
    with Run(h1, "-H", "h1:1,h2:1", *IMPATIENT, *elastic, *EPOCHS, cwd=tmp_path) as run:
        wait_until(lambda: (tmp_path / "digits.pt").exists() or run.process.poll() is not None)
        bed_of_two.power_off(h2)
        code, _ = run.end()
    assert code == 0, run.text
    assert re.search(r"ddprun: h2: the connection was lost.*; continuing without it", run.text)
    assert "1 process (checksum" in run.text
    assert_went_on(tmp_path, run.text, one_process)


WAIT = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
attempt, host = os.environ["TORCHELASTIC_RESTART_COUNT"], os.uname().nodename
print("up", rank, "of", world_size, "on", host, "attempt", attempt, flush=True)
dist.barrier()
if attempt == "0" and host == "h1" and os.path.exists("fails"):
    time.sleep(1)  # the others have gone on
    raise ValueError("at first")
if world_size > 1 and not os.path.exists("fails"):
    if rank:
        time.sleep(1000)
    dist.barrier()
dist.barrier()
print("done", rank, flush=True)
"""


@restarts
@pytest.mark.cold
def test_an_elastic_run_goes_on_within_seconds_of_a_silent_loss(bed_of_two: HostBed, tmp_path: Path) -> None:
    """Rank 0 waits in a collective of torch's for 30 minutes; nothing tells it that the other host is gone."""
    h1, h2 = bed_of_two.hosts
    flags = ["-H", "h1:1,h2:1", "--nnodes", "1:2", "--max-restarts", "1", "--show-ranks", "all", *IMPATIENT]
    with Run(h1, *flags, write(tmp_path, WAIT), cwd=tmp_path) as run:
        run.await_text("up ", 2)
        with Slowness() as slowness:
            bed_of_two.set_link(h2, up=False)
            run.await_text("continuing without it", 1)
            run.await_text("up 0 of 1 on h1 attempt 1", 1)
        assert run.end()[0] == 0, run.text
    assert re.search(r"ddprun: h2: the connection was lost .*; continuing without it", run.text)
    assert "ddprun: h1: rank 0, " in run.text and "eth0, restart 1 of 1" in run.text
    assert slowness.took < 9 * slowness.factor


@restarts
@pytest.mark.cold
def test_rank_0_is_on_the_first_host_also_after_a_restart(bed: HostBed, tmp_path: Path) -> None:
    """h2 is the first here, although its address is not."""
    (tmp_path / "fails").touch()
    flags = ["-H", "h2:1,h3:1,h1:1", "--max-restarts", "1", "--show-ranks", "all", "--no-prefix"]
    done = ddprun(bed.hosts[0], *flags, write(tmp_path, WAIT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hosts = ["h2", "h3", "h1"]
    said = [line for line in done.stdout.splitlines() if line.startswith("up ")]
    assert sorted(said) == sorted(
        f"up {rank} of 3 on {host} attempt {attempt}" for rank, host in enumerate(hosts) for attempt in (0, 1)
    )


@trains
@pytest.mark.cold
def test_the_pbs_script_of_the_docs_trains_on_the_hosts_of_its_job(bed: HostBed, tmp_path: Path) -> None:
    """As PBS runs it: on the first host alone, with a host file that names a host once for each of its processes."""
    nodes = tmp_path / "nodes"
    nodes.write_text("h1\nh1\nh2\nh2\n")
    host = bed.hosts[0]
    environ = host.environ(
        PBS_ENVIRONMENT="PBS_BATCH",
        PBS_JOBID="12.server",
        PBS_NODEFILE=str(nodes),
        PBS_O_WORKDIR=str(tmp_path),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        SCRIPT=f"{DIGITS} --epochs 1",
    )
    script = Path(__file__).parents[1] / "examples" / "jobs" / "ddp.pbs"
    done = host.run("bash", str(script), environ=environ, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "ddprun: h2: ranks 2-3, 1 thread each, interface eth0" in done.stderr
    assert "4 processes hold equal parameters" in done.stdout


LISTENERS = """
import os, subprocess
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(subprocess.run(["ss", "-tlnH"], capture_output=True, text=True).stdout)
dist.barrier()
dist.destroy_process_group()
"""


@starts
@pytest.mark.cold
@pytest.mark.parametrize("flags", [[], ["--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1"]])
def test_nothing_listens_on_all_interfaces(bed: HostBed, tmp_path: Path, flags: list[str]) -> None:
    h1 = bed.hosts[0]
    done = ddprun(h1, "-H", "h1:1,h2:1", "--no-prefix", *flags, write(tmp_path, LISTENERS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    addresses = {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines() if "LISTEN" in line}
    assert addresses == {h1.address}


@starts
def test_no_argument_or_value_stands_on_a_command_line_of_ssh(bed: HostBed, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time; print('up', flush=True); time.sleep(100)")
    flags = ["-H", "h1:1,h2:1", "-x", "SECRET=value-7"]
    with Run(bed.hosts[0], *flags, script, "argument-7", cwd=tmp_path, command=PLAIN) as run:
        run.await_text("up", 1)
        lines = "".join(line for host in bed.hosts for line in host.processes().values() if "script.py" not in line)
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143
        assert "sys.stdin.buffer" in lines and "argument-7" not in lines and "value-7" not in lines


ECHO = """
import json, os, sys
print(json.dumps([[os.fsencode(word).hex() for word in sys.argv[1:]], os.environb[b"PROBE"].hex(), os.getcwdb().hex()]))
"""


@starts
@pytest.mark.cold
def test_arguments_values_and_folders_of_any_bytes_arrive_unchanged(bed: HostBed, tmp_path: Path) -> None:
    folder = tmp_path / "a 'folder' $HOME; \n\udcff"
    folder.mkdir()
    arguments, value = [*NASTY, "-H", "h3", "--", "--lr=1"], "".join(NASTY)
    flags = [
        "-H",
        "h1:1,h2:1",
        "--show-ranks",
        "all",
        "--no-prefix",
        "-x",
        f"PROBE={value}",
        "--log-dir",
        str(tmp_path),
    ]
    name = "it's a script\udcfe.py"
    done = ddprun(bed.hosts[0], *flags, write(folder, ECHO, name), *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = [[as_hex(word) for word in arguments], as_hex(value), as_hex(str(folder))]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2


# On a host, for each line of JSON (arguments, value): what arrives of them on h2, over an ssh connection of its own.
OVER_SSH = """
import json, queue, sys
from ddp_callbacks.launcher.connection import Connection
from ddp_callbacks.launcher.plan import NodePlan
plan = NodePlan("h2", "h2", 1, "1", sys.executable, "/")
for line in sys.stdin:
    arguments, value = json.loads(line)
    events = queue.Queue()
    node = Connection(plan, events, 600.0)
    node.greet()
    argv = [word.encode().hex() for word in (sys.executable, "-c", sys.argv[1])] + arguments
    node.ask("run", argv=argv, environ={b"PROBE".hex(): value}, job={})
    said = b""
    while (event := events.get()).kind != "x":
        said += event.data if event.kind in "oe" else b""
    node.close(5.0)
    print(said.decode().strip(), flush=True)
"""


@starts
def test_any_bytes_arrive_unchanged_over_ssh(bed: HostBed) -> None:
    words = st.binary(max_size=30).filter(lambda raw: b"\0" not in raw)
    command = [sys.executable, "-c", OVER_SSH, ECHO]
    with running(bed.hosts[0], *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        @settings(max_examples=40, deadline=None)
        @given(st.lists(words, max_size=5), words)
        def arrives(arguments: list[bytes], value: bytes) -> None:
            sent = [[word.hex() for word in arguments], value.hex()]
            stdin.write(json.dumps(sent).encode() + b"\n")
            stdin.flush()
            assert json.loads(stdout.readline())[:2] == sent

        arrives()
        stdin.close()
        assert process.wait(LIMIT) == 0


# --- the end ----------------------------------------------------------------------------------------------------------

STAY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"deaf\\n"))
print("up", os.environ["RANK"], flush=True)
while True:
    time.sleep(1000)
"""


class Run:
    """``ddprun`` on a host, with what it has printed so far."""

    def __init__(self, host: Host, *argv: str, cwd: Path, command: list[str] = DDPRUN) -> None:
        self._out, self._err = cwd / "out", cwd / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = host.start(
                *command,
                *argv,
                cwd=cwd,
                environ=host.environ(PWD=str(cwd), PYTHONDONTWRITEBYTECODE="1"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.host = host

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        return "".join(path.read_text(errors="replace") for path in (self._out, self._err))

    def await_text(self, text: str, times: int) -> None:
        """Until it has been printed so often."""
        wait_until(lambda: self.text.count(text) >= times or self.process.poll() is not None)
        assert self.text.count(text) >= times, self.text

    def pid(self) -> int:
        """Of ``ddprun`` itself, not of what leads into the host."""
        return pid_of_ddprun(self.host)

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and the last lines."""
        return self.process.wait(LIMIT), self._err.read_text().splitlines()


def pids_of_ddprun(host: Host) -> list[int]:
    names = (" -m ddp_callbacks.launcher ", " " + PLAIN[-1])
    return [pid for pid, line in host.processes().items() if any(name in line for name in names)]


def pid_of_ddprun(host: Host) -> int:
    """The oldest: what it is about to start as another program has its name, too."""
    return min(pids_of_ddprun(host))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def of_job(*hosts: Host) -> list[str]:
    return [line for host in hosts for line in host.processes().values()]


@contextmanager
def started(
    bed: HostBed, tmp_path: Path, *arguments: str, flags: Sequence[str] = (), command: list[str] = PLAIN
) -> Iterator[Run]:
    """Three workers that stay."""
    argv = ["-H", "h1:1,h2:2", "--show-ranks", "all", *flags, write(tmp_path, STAY), *arguments]
    with Run(bed.hosts[0], *argv, cwd=tmp_path, command=command) as run:
        run.await_text("up ", 3)
        yield run


@ends
@pytest.mark.parametrize(
    ("number", "code", "command"),
    [
        pytest.param(signal.SIGINT, 130, PLAIN, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, PLAIN, id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, PLAIN, id="SIGHUP"),
        pytest.param(signal.SIGKILL, 137, PLAIN, id="SIGKILL"),
        pytest.param(signal.SIGINT, 130, DDPRUN, id="SIGINT torchrun", marks=pytest.mark.cold),
        pytest.param(signal.SIGKILL, 137, DDPRUN, id="SIGKILL torchrun", marks=pytest.mark.cold),
    ],
)
def test_all_is_gone_soon_after_a_signal(
    bed: HostBed, tmp_path: Path, number: int, code: int, command: list[str]
) -> None:
    with started(bed, tmp_path, "deaf", command=command) as run:
        with Slowness() as slowness:
            run.signal(number)
            wait_until(lambda: not of_job(*bed.hosts))
        assert slowness.took < 5 * slowness.factor
        ended, lines = run.end()
        assert ended in (code, -number)
        if number != signal.SIGKILL:
            assert lines[-1] == f"ddprun: stopped by {signal.Signals(number).name}"


@ends
def test_a_closed_terminal_does_not_end_what_nohup_has_started(bed: HostBed, tmp_path: Path) -> None:
    """The script ends when it is told to, after the terminal was closed."""
    script = """
import os, time
print("up", flush=True)
while not os.path.exists("closed"):
    time.sleep(0.05)
print("done", flush=True)
"""
    host = bed.hosts[0]
    command = ["env", "--ignore-signal=HUP", *PLAIN[2:], write(tmp_path, script)]
    with running(host, *command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[localhost:0] up\n"
        os.kill(pid_of_ddprun(host), signal.SIGHUP)
        (tmp_path / "closed").touch()
        assert process.stdout.read() == b"[localhost:0] done\n"
        assert process.wait(LIMIT) == 0


@ends
def test_a_second_ctrl_c_ends_at_once(bed: HostBed, tmp_path: Path) -> None:
    with started(bed, tmp_path, "deaf") as run:
        run.signal(signal.SIGINT)
        run.await_text("deaf", 3)  # two signals at the same moment would be one
        with Slowness() as slowness:
            run.signal(signal.SIGINT)
            wait_until(lambda: not of_job(*bed.hosts))
        assert slowness.took < 1.5 * slowness.factor
        assert run.end()[0] == 130


def kill_on(host: Host, words: str) -> None:
    for pid, line in host.processes().items():
        if words in line:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_sshd_session(host: Host) -> None:
    for pid, line in host.processes(of_sshd=True).items():
        if "root@notty" in line:
            os.kill(pid, signal.SIGKILL)


@ends
@pytest.mark.parametrize(
    ("event", "command", "code", "says"),
    [
        pytest.param(
            lambda bed: kill_on(bed.hosts[1], "script.py"),
            DDPRUN,
            137,
            r"rank [12] on h2 failed with exit code 137: killed by SIGKILL",
            id="worker killed",
            marks=pytest.mark.cold,
        ),
        pytest.param(
            lambda bed: kill_on(bed.hosts[1], "launcher.agent"),
            DDPRUN,
            137,
            r"h2: torchrun's agent ended with exit code 137",
            id="agent killed",
            marks=pytest.mark.cold,
        ),
        pytest.param(
            lambda bed: kill_on(bed.hosts[0], "ssh -T"), PLAIN, 1, r"h2: the connection was lost", id="ssh killed"
        ),
        pytest.param(
            lambda bed: kill_sshd_session(bed.hosts[1]), PLAIN, 1, r"h2: the connection was lost", id="sshd killed"
        ),
    ],
)
def test_what_ends_one_node_ends_all(
    bed: HostBed, tmp_path: Path, event: Callable[[HostBed], None], command: list[str], code: int, says: str
) -> None:
    with started(bed, tmp_path, "deaf", command=command) as run:
        with Slowness() as slowness:
            event(bed)
            wait_until(lambda: not of_job(*bed.hosts))
        assert slowness.took < 5 * slowness.factor
        ended, lines = run.end()
        assert ended == code, run.text
        assert re.match(f"ddprun: {says}", lines[-2]), lines


@ends
@pytest.mark.cold
def test_a_node_whose_cable_is_out_ends_all(bed_of_two: HostBed, tmp_path: Path) -> None:
    h1, h2 = bed_of_two.hosts
    with started(bed_of_two, tmp_path, flags=IMPATIENT, command=DDPRUN) as run:
        with Slowness() as slowness:
            bed_of_two.set_link(h2, up=False)
            wait_until(lambda: not of_job(h2))
        assert slowness.took < 5 * slowness.factor
        ended, lines = run.end()
        assert not of_job(h1)
        assert ended == 1
        assert lines[-2].startswith("ddprun: h2: the connection was lost"), lines


@ends
def test_a_node_that_has_lost_its_power_ends_all(bed_of_two: HostBed, tmp_path: Path) -> None:
    h1, h2 = bed_of_two.hosts
    with started(bed_of_two, tmp_path, flags=IMPATIENT) as run:
        bed_of_two.power_off(h2)
        ended, lines = run.end()
        assert not of_job(h1)
        assert ended == 1
        assert lines[-2].startswith("ddprun: h2: the connection was lost"), lines


@ends
def test_a_cut_of_a_shared_connection_is_noticed(bed_of_two: HostBed, tmp_path: Path) -> None:
    """ssh's own signs of life are those of the connection that is shared."""
    h1, h2 = bed_of_two.hosts
    (h1.home / ".ssh" / "config").write_text(f"ControlPath {tmp_path}/master\n")
    with running(h1, "ssh", "-M", "-N", "h2", stdin=subprocess.DEVNULL):
        wait_until((tmp_path / "master").exists)
        with started(bed_of_two, tmp_path, flags=IMPATIENT) as run:
            with Slowness() as slowness:
                bed_of_two.set_link(h2, up=False)
                wait_until(lambda: not [line for line in of_job(h1) if "ssh -M" not in line])
            assert slowness.took < 9 * slowness.factor
            code, lines = run.end()
            assert code == 1
            assert lines[-2] == "ddprun: h2: the connection was lost (silent for 3.5 s)", lines


@ends
@pytest.mark.cold
def test_a_killed_program_of_a_node_leaves_no_worker(bed: HostBed, tmp_path: Path) -> None:
    """But what a worker has started in a session of its own: nobody is left who knows of it."""
    with started(bed, tmp_path, command=DDPRUN) as run:
        with Slowness() as slowness:
            kill_on(bed.hosts[1], "sys.stdin.buffer")
            wait_until(lambda: not [line for line in of_job(*bed.hosts) if "script.py" in line])
        assert slowness.took < 5 * slowness.factor
        assert run.end()[0] == 1
    bed.end_all()


@ends
def test_a_terminal_that_takes_nothing_does_not_keep_anything_running(bed: HostBed, tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nwhile True: print('x' * 1000, flush=True)")
    host = bed.hosts[0]
    terminal = {"stdout": subprocess.PIPE, "pipesize": 4096}  # takes one piece at a time
    with running(host, *PLAIN, "-H", "h1:1,h2:1", script, cwd=tmp_path, **terminal) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert select.select([process.stdout], [], [], LIMIT)[0]
        with Slowness() as slowness:
            os.kill(pid_of_ddprun(host), signal.SIGTERM)
            wait_until(lambda: not of_job(*bed.hosts))
        assert slowness.took < 9 * slowness.factor
        process.stdout.read()
        assert process.wait(LIMIT) == 143


STRANGER = """
import base64, os, pickle, sys, time
from torch.distributed import TCPStore
class Run:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[1],)
store = TCPStore("10.83.0.1", 29611, is_master=False, wait_for_workers=False)
for _ in range(20):
    store.set("torch.rendezvous.none", base64.b64encode(b"x" * 32 + pickle.dumps(Run())).decode())
    store.set("torch.rendezvous.none", base64.b64encode(pickle.dumps(Run())).decode())
    store.set("none/1/here/1", pickle.dumps(Run()))
    time.sleep(0.1)
"""


@starts
@pytest.mark.cold
def test_what_a_stranger_writes_to_the_store_is_not_run(bed: HostBed, tmp_path: Path) -> None:
    h1, _, h3 = bed.hosts
    elastic = ["-H", "h1:1,h2:1", "--max-restarts", "1", "--master-port", "29611", "--show-ranks", "all"]
    with Run(h1, *elastic, write(tmp_path, STAY), cwd=tmp_path) as run:
        run.await_text("up ", 2)
        h3.run(sys.executable, "-c", STRANGER, str(tmp_path / "owned"), timeout=LIMIT)
        kill_on(bed.hosts[1], "script.py")
        run.await_text("up ", 4)  # they meet again all the same
        run.signal(signal.SIGINT)
        assert run.end()[0] == 130
    assert not (tmp_path / "owned").exists()


@starts
@pytest.mark.cold
def test_an_elastic_run_does_not_wait_for_a_node_that_was_not_there(bed: HostBed, tmp_path: Path) -> None:
    with Slowness() as slowness:
        done = ddprun(bed.hosts[0], "-H", "h1:1,nowhere:1", "--nnodes", "1:2", write(tmp_path, SHOW), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ddprun: continuing without nowhere: unknown host ")
    assert slowness.took < 12 * slowness.factor  # much less than the 30 s for which torchrun waits for late nodes


@ends
@pytest.mark.cold
def test_an_elastic_run_goes_on_without_an_agent_that_was_killed(bed: HostBed, tmp_path: Path) -> None:
    flags = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1", "--show-ranks", "all"]
    with Run(bed.hosts[0], "-H", "h1:1,h2:1", *flags, write(tmp_path, STAY), cwd=tmp_path) as run:
        run.await_text("up ", 2)
        kill_on(bed.hosts[1], "launcher.agent")
        run.await_text("continuing without it", 1)
        run.await_text("up 0", 2)
        run.signal(signal.SIGINT)
        assert run.end()[0] == 130


@ends
@pytest.mark.cold
def test_the_first_of_two_failures_is_told(bed: HostBed, tmp_path: Path) -> None:
    """Both within a second, and the first one's neighbour takes its time to end."""
    script = """
import os, signal, sys, time
rank = os.environ["RANK"]
if rank == "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if rank == "1":
    time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""
    with Run(bed.hosts[0], "-H", "h1:1,h2:2", "--show-ranks", "all", write(tmp_path, script), cwd=tmp_path) as run:
        run.await_text("up", 3)
        with Slowness() as slowness:
            code, lines = run.end()
    assert slowness.took < 9 * slowness.factor
    assert code == 137, lines
    assert "ddprun: rank 1 on h2 failed with exit code 137: killed by SIGKILL" in lines


@ends
@pytest.mark.cold
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("slow to exit", r"rank 1 on h2 failed(?: with exit code 1)?: ValueError: the data are gone"),
        ("left", r"rank 1 on h2 exited with code 0 first. rank 0 on h1 reports: .*PeerError: rank 1 \(host h2, .*"),
    ],
)
def test_who_came_first_is_named_although_another_host_ends_first(
    bed: HostBed, tmp_path: Path, what: str, says: str
) -> None:
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:1", write(tmp_path, MISFORTUNES), what, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(f"^ddprun: {says}$", done.stderr, re.M), done.stderr


@ends
def test_a_network_that_is_away_for_ten_seconds_ends_nothing(bed_of_two: HostBed, tmp_path: Path) -> None:
    """TCP tries again some seconds after it is back; watched for longer than the silence that ddprun bears (30 s)."""
    with started(bed_of_two, tmp_path) as run:
        bed_of_two.set_link(bed_of_two.hosts[1], up=False)
        time.sleep(10)
        bed_of_two.set_link(bed_of_two.hosts[1], up=True)
        time.sleep(24)
        assert run.process.poll() is None
        assert len([line for line in of_job(*bed_of_two.hosts) if "script.py" in line]) >= 3
        run.signal(signal.SIGINT)
        assert run.end()[0] == 130


EXCHANGE = """
import time
from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.collectives import all_gather_json
join_process_group()
print("up", flush=True)
last, longest, end = time.monotonic(), 0.0, time.monotonic() + 20
while not any(all_gather_json(time.monotonic() > end, "whether it is over")):
    longest, last = max(longest, time.monotonic() - last), time.monotonic()
    time.sleep(0.1)
leave_process_group()
print("longest", longest, flush=True)
"""


@ends
def test_a_machine_that_is_paused_for_ten_seconds_ends_nothing(bed: HostBed, tmp_path: Path) -> None:
    """As a virtual machine is that moves to other hardware."""
    host = bed.hosts[1]
    with Run(bed.hosts[0], "-H", "h1:1,h2:1", "--show-ranks", "all", write(tmp_path, EXCHANGE), cwd=tmp_path) as run:
        run.await_text("up", 2)
        paused = [*host.processes(), *host.processes(of_sshd=True)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in paused:
                os.kill(pid, number)
            time.sleep(10 if number == signal.SIGSTOP else 0)
        code, lines = run.end()
        assert code == 0, lines
        gaps = [float(gap) for gap in re.findall(r"longest ([0-9.]+)", run.text)]
    assert len(gaps) == 2 and min(gaps) > 9


FAIL = """
import os, time
print("up", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("the data of rank 1 are gone")
time.sleep(1000)
"""


@ends
@pytest.mark.cold
def test_the_last_lines_name_node_rank_exception_and_log(bed: HostBed, tmp_path: Path) -> None:
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:1", write(tmp_path, FAIL), cwd=tmp_path)
    *_, quoted, cause, log = done.stderr.splitlines()
    assert done.returncode == 1
    assert quoted == "[h2:1] ValueError: the data of rank 1 are gone"
    assert cause == "ddprun: rank 1 on h2 failed with exit code 1: ValueError: the data of rank 1 are gone"
    path = Path(log.removeprefix("ddprun: its full output is in "))
    assert path.read_text().splitlines()[0] == "up" and path.is_relative_to(tmp_path / "ddprun-logs")
    assert not of_job(*bed.hosts)


@starts
@pytest.mark.parametrize(
    ("command", "count"),
    [
        pytest.param(PLAIN, 30, id="plain"),
        pytest.param(DDPRUN, 3, id="torchrun", marks=pytest.mark.cold),
    ],
)
def test_starts_that_are_ended_at_any_moment_leave_nothing(
    bed: HostBed, tmp_path: Path, command: list[str], count: int
) -> None:
    """Spread over a whole start and a little more. DDPRUN_STARTS says how many; many need --timeout=0."""
    count = int(os.environ.get("DDPRUN_STARTS", count))
    argv = ["-H", "h1:1,h2:1", "--show-ranks", "all", write(tmp_path, STAY)]
    begin = time.monotonic()
    with Run(bed.hosts[0], *argv, cwd=tmp_path, command=command) as run:
        run.await_text("up ", 2)
        whole = 1.2 * (time.monotonic() - begin)
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143
    moments = random.Random(7)
    numbers = [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]
    for i in range(count):
        with Run(bed.hosts[0], *argv, cwd=tmp_path, command=command) as run:
            wait_until(lambda: pids_of_ddprun(bed.hosts[0]) != [])
            time.sleep(whole * moments.uniform(i, i + 1) / count)
            with Slowness() as slowness:
                run.signal(numbers[i % len(numbers)])
                wait_until(lambda: not of_job(*bed.hosts))
            assert slowness.took < 6 * slowness.factor
            run.end()


# --- another command than ssh -----------------------------------------------------------------------------------------


@pytest.fixture
def enter(bed: HostBed, tmp_path: Path) -> str:
    """A program that leads from this machine, which is none of the hosts, to one of them."""
    lines = "".join(f"    {host.name}) pid={host.pid} ;;\n" for host in bed.hosts)
    environ = "env -i HOME=/root PATH=$PATH SSH_CONNECTION='10.9.9.9 1 10.9.9.9 22'"
    namespaces = 'nsenter -t "$pid" -n -u -m -p --wdns=/ --'
    program = tmp_path / "enter"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{lines}esac\nshift\nexec {environ} {namespaces} "$@"\n')
    program.chmod(0o755)
    return str(program)


def ddprun_from_outside(*argv: str, cwd: Path, command: list[str] = DDPRUN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *argv],
        cwd=cwd,
        env={**os.environ, "PWD": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@starts
@pytest.mark.cold
def test_a_plain_command_takes_ssh_s_place(bed: HostBed, tmp_path: Path, enter: str) -> None:
    """The address at which the nodes meet is found without ssh; what SSH_CONNECTION says there is somebody else's."""
    flags = ["-H", "h1:1,h2:2", "--rsh", f"{enter} {{host}}", "--show-ranks", "all", "-x", "PROBE=a b"]
    done = ddprun_from_outside(*flags, write(tmp_path, SHOW), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert sorted((variables["RANK"], host) for host, variables in found) == [("0", "h1"), ("1", "h2"), ("2", "h2")]
    assert {variables["MASTER_ADDR"] for _, variables in found} == {bed.hosts[0].address}
    assert {variables["PROBE"] for _, variables in found} == {"a b"}


@ends
def test_a_job_that_a_plain_command_has_started_ends_with_a_signal_or_the_command(
    bed: HostBed, tmp_path: Path, enter: str
) -> None:
    flags = ["-H", "h1:1,h2:1", "--rsh", enter, "--show-ranks", "all", write(tmp_path, STAY), "deaf"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [*PLAIN, *flags], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(2):
                assert b"up" in process.stdout.readline()
            with Slowness() as slowness:
                process.send_signal(number)
                wait_until(lambda: not of_job(*bed.hosts))
            assert slowness.took < 5 * slowness.factor


@faults
@pytest.mark.cold
def test_the_doctor_looks_at_nodes_that_a_plain_command_reaches(bed: HostBed, tmp_path: Path, enter: str) -> None:
    done = ddprun_from_outside("doctor", "--json", "-H", "h1,h2", "--rsh", enter, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)["findings"]
    (h1, h2) = [finding["text"] for finding in found if finding["check"] == "reached"]
    assert h1.startswith("by enter, ") and h2.startswith("by enter, ")
    assert [finding["text"] for finding in found if finding["check"] == "address"] == [
        f"{host.address} (eth0)" for host in bed.hosts[:2]
    ]


# --- what cannot be ---------------------------------------------------------------------------------------------------

ANYTHING = "import sys; print('started')"


@pytest.fixture(scope="module")
def faulty() -> Iterator[HostBed]:
    """h1 is good; each other host has a fault of its own, here or in the host files below."""
    with HostBed(9) as made:
        h1, h2, *_, h9 = made.hosts
        (h2.home / ".ssh" / "authorized_keys").write_text("")
        known = h1.home / ".ssh" / "known_hosts"
        of_h1, of_h2, of_h3, _, *others = known.read_text().splitlines()
        of_h3 = of_h3.replace(of_h3.split()[2], of_h1.split()[2])
        known.write_text("\n".join([of_h1, of_h2, of_h3, *others, ""]))
        close_ports(h1, h9)
        yield made


def close_ports(host: Host, to: Host) -> None:
    """A firewall: what comes from there is dropped, but for the answers of its sshd."""
    chain = f"type filter hook input priority 0\n ip saddr {to.address} tcp sport != 22 drop\n"
    rules = f"table inet t {{\n chain i {{\n {chain} }}\n}}\n"
    assert host.run("nft", "-f", "-", input=rules).returncode == 0


@pytest.fixture(scope="module")
def refused(faulty: HostBed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one ``ddprun`` says of all its hosts."""
    folder = tmp_path_factory.mktemp("refused")
    there = f"chdir={folder}"
    python = f"python={sys.executable}"
    (folder / "hosts").write_text(
        f"""
h1 {python}                    # the folder of --chdir is not there
h2 {python} {there}            # refuses the login
h3 {python} {there}            # its host key has changed
h4 {python} {there}            # its host key is not known
h5 {there}                     # the interpreter of --python is not there
h6 {python}                    # the folder of --chdir is not there
h7 python=/usr/bin/python3 {there}
h8 {python} chdir=/usr         # has no script.py
h9 {python} {there}            # good
nowhere {python} {there}
10.83.0.99 {python} {there}
"""
    )
    flags = ["--hostfile", "hosts", "--python", "/no/python", "--chdir", "/no"]
    done = ddprun(faulty.hosts[0], *flags, write(folder, ANYTHING), cwd=folder, command=PLAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "ddprun-logs").exists()
    return done.stderr.splitlines()


LOGINS = {
    "refusing_login": r"h2: login refused \(.*Permission denied.*\)\..*ssh-copy-id h2, or ssh-add\.",
    "other_host_key": r"h3: its host key has changed\..*ssh-keygen -R h3.*",
    "unknown_host_key": r"h4: its host key is unknown\. Check and accept it: ssh h4 true\.",
}
NODES = {
    "unknown host": r"nowhere: unknown host \(.*\)\. Check the name, or add it to ~/.ssh/config\.",
    "dead host": r"10.83.0.99: ssh cannot reach it: .*\. Try: ssh 10.83.0.99 true\.",
    "no python": r"h5: cannot start the interpreter /no/python\. .*",
    "no folder": r"h6: cannot enter the working directory /no: .*",
    "no folder here": r"h1: cannot enter the working directory /no: .*",
    "no script": r"h8: file not found: script.py \(working directory /usr\)\.",
    "not installed": r"h7: ddp_callbacks is not installed .*Run: ssh h7 /usr/bin/python3 -m pip install /.* "
    r"\(the folder of its repository; no package index has it\)\.",
}


def line_of(says: str, lines: list[str]) -> str:
    """The one about the same host."""
    (line,) = [line for line in lines if line.startswith(f"ddprun: {says.partition(':')[0]}:")]
    return line


@faults
@pytest.mark.parametrize("fault", LOGINS)
def test_a_login_that_does_not_work_is_explained(refused: list[str], fault: str) -> None:
    assert re.fullmatch(f"ddprun: {LOGINS[fault]}", line_of(LOGINS[fault], refused))


@faults
@pytest.mark.parametrize("fault", NODES)
def test_a_node_that_cannot_do_its_part_is_named_before_anything_starts(refused: list[str], fault: str) -> None:
    assert re.fullmatch(f"ddprun: {NODES[fault]}", line_of(NODES[fault], refused))


@faults
def test_each_bad_node_is_named_once_and_no_good_one(refused: list[str]) -> None:
    named = [line.split(": ")[1] for line in refused]
    assert named == ["h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8", "nowhere", "10.83.0.99"]


@faults
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(
            ["-H", "h1,10.83.0.1"],
            r"h1 and 10.83.0.1 are the same machine\. Name it once, with .*",
            id="host twice",
        ),
        pytest.param(
            ["-H", "h1,h9", "--master-addr", "10.83.0.99"],
            r"h1: cannot listen on 10.83.0.99 .*--master-addr\.",
            id="no address",
        ),
        pytest.param(
            ["-H", "h1:1,h9:1"],
            r"h9: cannot connect to 10.83.0.1 port \d+: timed out\. Open the firewall of h1 .*",
            id="firewall",
        ),
    ],
)
def test_nodes_that_cannot_meet_are_named_before_anything_starts(
    faulty: HostBed, tmp_path: Path, flags: list[str], says: str
) -> None:
    done = ddprun(faulty.hosts[0], *flags, write(tmp_path, ANYTHING), cwd=tmp_path, command=PLAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"ddprun: {says}\n", done.stderr), done.stderr
    assert not (tmp_path / "ddprun-logs").exists()


# --- the doctor -------------------------------------------------------------------------------------------------------


def doctor(host: Host, *argv: str, cwd: Path) -> tuple[int, list[dict[str, str]]]:
    """Its exit code, and what it found.

    It gives up after 20 s. It is busy itself while the machine is watched, so less than that is asserted.
    """
    with Slowness() as slowness:
        done = ddprun(host, "doctor", "--json", *argv, cwd=cwd)
    assert slowness.took < 12 * slowness.factor
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["works"] == (done.returncode == 0)
    return done.returncode, report["findings"]


@faults
@pytest.mark.cold
def test_the_doctor_finds_three_good_nodes_good(bed: HostBed, tmp_path: Path) -> None:
    code, found = doctor(bed.hosts[0], "-H", "h1,h2,h3", write(tmp_path, ""), cwd=tmp_path)
    assert code == 0, found
    assert {finding["check"] for finding in found if finding["level"] != "green"} <= {
        "encryption",
        "/dev/shm",
        "memory",
    }
    checks = ["reached", "folder", "script", "clock", "python", "torch", "ddp_callbacks", "cores", "memory", "address"]
    for check in [*checks, "/dev/shm", "GPUs", "ports"]:
        assert {finding["node"] for finding in found if finding["check"] == check} == {"h1", "h2", "h3"}, check
    (result,) = [finding for finding in found if finding["check"] == "all-reduce"]
    assert re.fullmatch(r"[\d.]+ ms for one number, \d+ MB/s per node", result["text"])
    (encryption,) = [finding for finding in found if finding["check"] == "encryption"]
    assert "not encrypted" in encryption["remedy"]
    assert not of_job(*bed.hosts)


@pytest.fixture(scope="module")
def mended(faulty: HostBed, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What one look of the doctor finds red, by node and check, with its remedy."""
    folder = tmp_path_factory.mktemp("mended")
    (folder / "empty").mkdir()
    (folder / "hosts").write_text(
        f"""
h1
h2                             # refuses the login
h3                             # its host key has changed
h4                             # its host key is not known
h5 python=/no/python
h6 chdir=/no/such
h7 python=/usr/bin/python3     # has no torch
h8 chdir={folder}/empty        # has no script.py
h9                             # behind a firewall of h1
"""
    )
    code, found = doctor(faulty.hosts[0], "--hostfile", "hosts", write(folder, ""), cwd=folder)
    assert code == 1
    return {(finding["node"], finding["check"]): finding["remedy"] for finding in found if finding["level"] == "red"}


REMEDIES = {
    "refusing_login": ("h2", "reached", r"login refused .*ssh-copy-id h2.*"),
    "other_host_key": ("h3", "reached", r"its host key has changed.*ssh-keygen -R h3.*"),
    "unknown_host_key": ("h4", "reached", r"its host key is unknown.*ssh h4 true"),
    "no_script": ("h8", "script", r"file not found: script.py .*rsync -a --mkpath .* h8:.*"),
    "other_folder": ("h6", "folder", r"cannot enter the working directory /no/such: .*rsync .*--chdir"),
    "no_python": ("h5", "reached", r"cannot start the interpreter /no/python\. Set its path with --python.*"),
    "bare_python": ("h7", "torch", r"torch is not installed. Run: ssh h7 /usr/bin/python3 -m pip install torch==.*"),
    "firewall": ("h9", "ports", r"cannot connect to 10.83.0.1 port \d+: timed out\. .*ufw allow from 10.83.0.9.*"),
}


@faults
@pytest.mark.parametrize("fault", REMEDIES)
def test_the_doctor_names_each_fault_and_what_mends_it(mended: dict[tuple[str, str], str], fault: str) -> None:
    node, check, says = REMEDIES[fault]
    assert re.fullmatch(says, mended[node, check])


@faults
def test_the_doctor_finds_nothing_else_red_and_tries_no_sum(mended: dict[tuple[str, str], str]) -> None:
    assert mended["", "all-reduce"] == "skipped: fix the problems above first"
    lacking = {("h7", name) for name in ("ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning")}
    told = {(node, check) for node, check, _ in REMEDIES.values()} | {("", "all-reduce"), ("h1", "ports")}
    assert told <= set(mended) <= told | lacking
