"""``ddprun`` over real ssh between real hosts: what it starts, how it ends, what it says."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import host_bed
import pytest
import torch
from host_bed import Host, HostBed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_node import NASTY

from ddp_callbacks.launcher.remote import as_hex

WANTED = os.environ.get("SETUP_HOSTS") == "1" or bool(os.environ.get("CI"))
REASON = host_bed.missing() if WANTED else "real hosts are made with SETUP_HOSTS=1"
# One after the other: what is measured here is how soon something ends.
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.xdist_group("hosts")]

LIMIT = 60.0  # seconds, for a start and an orderly end
# Where the tests run in the background of a shell, or under nohup, these two are ignored.
DDPRUN = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "ddp_callbacks.launcher"]
DIGITS = Path(__file__).parent.parent / "examples" / "digits" / "train.py"


@pytest.fixture(scope="module")
def bed() -> Iterator[HostBed]:
    with HostBed(3) as made:
        yield made


@pytest.fixture
def bed_of_two() -> Iterator[HostBed]:
    """For tests that break it."""
    with HostBed(2) as made:
        yield made


def ddprun(host: Host, *argv: str, cwd: Path, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
    return host.run(
        *DDPRUN, *argv, timeout=timeout, cwd=cwd, environ=host.environ(PWD=str(cwd), PYTHONDONTWRITEBYTECODE="1")
    )


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


# --- the start --------------------------------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PROBE"]
print(json.dumps([os.uname().nodename, {name: os.environ.get(name) for name in names}]))
"""


def test_ranks_follow_the_order_of_the_hosts_and_share_one_address(bed: HostBed, tmp_path: Path) -> None:
    h1, _, h3 = bed.hosts
    done = ddprun(
        h1, "-H", "h3:2,h1:1,h2:1", "--show-ranks", "all", "-x", "PROBE=a b", write(tmp_path, SHOW), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = dict(re.fullmatch(r"\[(\w+:\d)\] (.*)", line).groups() for line in done.stdout.splitlines())  # type: ignore[union-attr]
    assert sorted(lines) == ["h1:2", "h2:3", "h3:0", "h3:1"]
    cores = len(os.sched_getaffinity(0))
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


EPOCHS = [str(DIGITS), "--epochs", "4", "--checkpoint", "digits.pt"]


@pytest.fixture(scope="module")
def one_process(bed: HostBed, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What the digits give on one process."""
    folder = tmp_path_factory.mktemp("one")
    done = ddprun(bed.hosts[0], "--nproc-per-node", "1", *EPOCHS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return history(folder)


def history(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch in the checkpoint, but for those of the last batches."""
    state = torch.load(folder / "digits.pt", weights_only=False)
    epochs = next(value for key, value in state.items() if str(key) == "history")
    return [{name: value for name, value in epoch.items() if not name.startswith("running_")} for epoch in epochs]


def test_the_digits_train_across_hosts_as_on_one_process(
    bed: HostBed, tmp_path: Path, one_process: list[dict[str, float]]
) -> None:
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:2,h3:1", *EPOCHS, cwd=tmp_path, timeout=120)
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


def test_a_lightning_module_trains_across_hosts_as_on_one_process(bed: HostBed, tmp_path: Path) -> None:
    one = bed.hosts[0].run(sys.executable, *LIGHTNING, str(tmp_path / "one"), "--strategy", "auto", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:2", *LIGHTNING, str(tmp_path / "three"), cwd=tmp_path, timeout=120)
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


def test_an_elastic_run_goes_on_without_a_node_that_lost_its_power(
    bed_of_two: HostBed, tmp_path: Path, one_process: list[dict[str, float]]
) -> None:
    h1, h2 = bed_of_two.hosts
    elastic = ["--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=2"]
    with Run(h1, "-H", "h1:1,h2:1", *elastic, *EPOCHS, cwd=tmp_path) as run:
        wait_until(lambda: (tmp_path / "digits.pt").exists() or run.process.poll() is not None)
        bed_of_two.power_off(h2)
        code, _ = run.end()
    assert code == 0, run.text
    assert re.search(r"ddprun: h2: the connection was lost.*; goes on without it", run.text)
    assert "1 process (checksum" in run.text
    assert_went_on(tmp_path, run.text, one_process)


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
    done = host.run("bash", str(script), environ=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ddprun: h2: ranks 2-3, 1 thread each, eth0" in done.stderr
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


@pytest.mark.parametrize("flags", [[], ["--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1"]])
def test_nothing_listens_on_all_interfaces(bed: HostBed, tmp_path: Path, flags: list[str]) -> None:
    h1 = bed.hosts[0]
    done = ddprun(h1, "-H", "h1:1,h2:1", "--no-prefix", *flags, write(tmp_path, LISTENERS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    addresses = {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines() if "LISTEN" in line}
    assert addresses == {h1.address}


def test_no_argument_or_value_stands_on_a_command_line_of_ssh(bed: HostBed, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time; print('up', flush=True); time.sleep(100)")
    with Run(bed.hosts[0], "-H", "h1:1,h2:1", "-x", "SECRET=value-7", script, "argument-7", cwd=tmp_path) as run:
        run.await_text("up", 1)
        lines = "".join(line for host in bed.hosts for line in host.processes().values() if "script.py" not in line)
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 143
        assert "sys.stdin.buffer" in lines and "argument-7" not in lines and "value-7" not in lines


ECHO = """
import json, os, sys
print(json.dumps([[os.fsencode(word).hex() for word in sys.argv[1:]], os.environb[b"PROBE"].hex(), os.getcwdb().hex()]))
"""


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
    node = Connection(plan, events, 60.0)
    node.greet()
    argv = [word.encode().hex() for word in (sys.executable, "-c", sys.argv[1])] + arguments
    node.ask("run", argv=argv, environ={b"PROBE".hex(): value}, job={})
    said = b""
    while (event := events.get()).kind != "x":
        said += event.data if event.kind in "oe" else b""
    node.close(5.0)
    print(said.decode().strip(), flush=True)
"""


def test_any_bytes_arrive_unchanged_over_ssh(bed: HostBed) -> None:
    words = st.binary(max_size=30).filter(lambda raw: b"\0" not in raw)
    command = [sys.executable, "-c", OVER_SSH, ECHO]
    with bed.hosts[0].start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
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
    assert process.returncode == 0


# --- the end ----------------------------------------------------------------------------------------------------------

STAY = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("up", os.environ["RANK"], flush=True)
time.sleep(1000)
"""


class Run:
    """``ddprun`` on a host, with what it has printed so far."""

    def __init__(self, host: Host, *argv: str, cwd: Path) -> None:
        self._out, self._err = cwd / "out", cwd / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = host.start(
                *DDPRUN,
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
        return self._out.read_text() + self._err.read_text()

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


def pid_of_ddprun(host: Host) -> int:
    return next(pid for pid, line in host.processes().items() if " -m ddp_callbacks.launcher " in line)


def wait_until(holds: Callable[[], bool], limit: float = LIMIT) -> float:
    """How long it took, in seconds."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < limit
        time.sleep(0.05)
    return time.monotonic() - begin


def of_job(*hosts: Host) -> list[str]:
    return [line for host in hosts for line in host.processes().values()]


def started(bed: HostBed, tmp_path: Path, *flags: str) -> Run:
    run = Run(bed.hosts[0], "-H", "h1:1,h2:2", "--show-ranks", "all", write(tmp_path, STAY), *flags, cwd=tmp_path)
    run.await_text("up ", 3)
    return run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, 137)]
)
def test_all_is_gone_soon_after_a_signal(bed: HostBed, tmp_path: Path, number: int, code: int) -> None:
    with started(bed, tmp_path, "deaf") as run:
        run.signal(number)
        assert wait_until(lambda: not of_job(*bed.hosts)) < 5
        ended, lines = run.end()
        assert ended in (code, -number)
        if number != signal.SIGKILL:
            assert lines[-1] == f"ddprun: ended by {signal.Signals(number).name}"


def test_a_closed_terminal_does_not_end_what_nohup_has_started(bed: HostBed, tmp_path: Path) -> None:
    script = write(tmp_path, "import time; print('up', flush=True); time.sleep(3); print('done', flush=True)")
    host = bed.hosts[0]
    command = ["env", "--ignore-signal=HUP", *DDPRUN[2:], script]
    process = host.start(*command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[localhost:0] up\n"
        os.kill(pid_of_ddprun(host), signal.SIGHUP)
        assert process.stdout.read() == b"[localhost:0] done\n"
    assert process.returncode == 0


def test_a_second_ctrl_c_ends_at_once(bed: HostBed, tmp_path: Path) -> None:
    with started(bed, tmp_path, "deaf") as run:
        pid = run.pid()
        os.kill(pid, signal.SIGINT)
        time.sleep(0.2)  # two signals at the same moment are one
        os.kill(pid, signal.SIGINT)
        assert wait_until(lambda: not of_job(*bed.hosts)) < 1.5
        assert run.end()[0] == 130


def kill_on(host: Host, words: str) -> None:
    for pid, line in host.processes().items():
        if words in line:
            os.kill(pid, signal.SIGKILL)


def kill_sshd_session(host: Host) -> None:
    namespace = os.readlink(f"/proc/{host.pid}/ns/pid")
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_text()
            if os.readlink(f"/proc/{entry}/ns/pid") == namespace and "root@notty" in line:
                os.kill(int(entry), signal.SIGKILL)
        except OSError:
            pass


@pytest.mark.parametrize(
    ("event", "code", "says"),
    [
        (
            lambda bed: kill_on(bed.hosts[1], "script.py"),
            137,
            r"rank [12] on h2 failed with exit code 137: ended by SIGKILL",
        ),
        (lambda bed: kill_on(bed.hosts[1], "launcher.agent"), 137, r"h2: torchrun's agent ended with exit code 137"),
        (lambda bed: kill_on(bed.hosts[0], "ssh -T"), 1, r"h2: the connection was lost"),
        (lambda bed: kill_sshd_session(bed.hosts[1]), 1, r"h2: the connection was lost"),
    ],
    ids=["worker killed", "agent killed", "ssh killed", "sshd killed"],
)
def test_what_ends_one_node_ends_all(
    bed: HostBed, tmp_path: Path, event: Callable[[HostBed], None], code: int, says: str
) -> None:
    with started(bed, tmp_path, "deaf") as run:
        event(bed)
        assert wait_until(lambda: not of_job(*bed.hosts)) < 5
        ended, lines = run.end()
        assert ended == code, run.text
        assert re.match(f"ddprun: {says}", lines[-2]), lines


@pytest.mark.parametrize("event", ["cable", "power"])
def test_a_node_that_is_cut_off_ends_all(bed_of_two: HostBed, tmp_path: Path, event: str) -> None:
    bed = bed_of_two
    h1, h2 = bed.hosts
    with started(bed, tmp_path) as run:
        if event == "power":
            bed.power_off(h2)
        else:
            bed.set_link(h2, up=False)
            assert wait_until(lambda: not of_job(h2)) < 5
        ended, lines = run.end()
        assert not of_job(h1)
        assert ended == 1
        assert lines[-2].startswith("ddprun: h2: the connection was lost"), lines


def test_a_cut_of_a_shared_connection_is_noticed(bed_of_two: HostBed, tmp_path: Path) -> None:
    """ssh's own signs of life are those of the connection that is shared."""
    h1, h2 = bed_of_two.hosts
    (h1.home / ".ssh" / "config").write_text(f"ControlPath {tmp_path}/master\n")
    master = h1.start("ssh", "-M", "-N", "h2", stdin=subprocess.DEVNULL)
    wait_until((tmp_path / "master").exists)
    try:
        with started(bed_of_two, tmp_path) as run:
            bed_of_two.set_link(h2, up=False)
            assert wait_until(lambda: not [line for line in of_job(h1) if "ssh -M" not in line]) < 9
            code, lines = run.end()
            assert code == 1
            assert lines[-2] == "ddprun: h2: the connection was lost (nothing came for 3.5 s)", lines
    finally:
        master.kill()
        master.wait()


def test_a_killed_program_of_a_node_leaves_no_worker(bed: HostBed, tmp_path: Path) -> None:
    with started(bed, tmp_path) as run:
        kill_on(bed.hosts[1], "sys.stdin.buffer")
        assert wait_until(lambda: not [line for line in of_job(*bed.hosts) if "script.py" in line]) < 5
        assert run.end()[0] == 1
    kill_on(bed.hosts[1], "sleep 1000")  # in sessions of their own, and nobody is left who knows of them


def test_a_terminal_that_takes_nothing_does_not_keep_anything_running(bed: HostBed, tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nwhile True: print('x' * 1000, flush=True)")
    host = bed.hosts[0]
    with host.start(*DDPRUN, "-H", "h1:1,h2:1", script, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(pid_of_ddprun(host), signal.SIGTERM)
        assert wait_until(lambda: not of_job(*bed.hosts)) < 9
        process.stdout.read()
    assert process.returncode == 143


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
    time.sleep(0.1)
"""


def test_what_a_stranger_writes_to_the_store_is_not_run(bed: HostBed, tmp_path: Path) -> None:
    h1, _, h3 = bed.hosts
    elastic = ["-H", "h1:1,h2:1", "--max-restarts", "1", "--master-port", "29611", "--show-ranks", "all"]
    with Run(h1, *elastic, write(tmp_path, STAY), cwd=tmp_path) as run:
        run.await_text("up ", 2)
        h3.run(sys.executable, "-c", STRANGER, str(tmp_path / "owned"))
        run.end()
    assert not (tmp_path / "owned").exists()
    assert "someone who does not belong to this job has written to its store" in run.text


def test_an_elastic_run_does_not_wait_for_a_node_that_was_not_there(bed: HostBed, tmp_path: Path) -> None:
    begin = time.monotonic()
    done = ddprun(bed.hosts[0], "-H", "h1:1,nowhere:1", "--nnodes", "1:2", write(tmp_path, SHOW), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ddprun: goes on without nowhere: the host is unknown ")
    assert time.monotonic() - begin < 30


def test_an_elastic_run_goes_on_without_an_agent_that_was_killed(bed: HostBed, tmp_path: Path) -> None:
    flags = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1", "--show-ranks", "all"]
    with Run(bed.hosts[0], "-H", "h1:1,h2:1", *flags, write(tmp_path, STAY), cwd=tmp_path) as run:
        run.await_text("up ", 2)
        kill_on(bed.hosts[1], "launcher.agent")
        run.await_text("goes on without it", 1)
        assert [line for line in of_job(bed.hosts[0]) if "-u script.py" in line]
        run.signal(signal.SIGINT)
        assert run.end()[0] == 130


def test_the_first_of_two_failures_is_told(bed: HostBed, tmp_path: Path) -> None:
    """Both within a second, and the first one's neighbour takes its time to end."""
    script = """
import os, signal, sys, time
rank = os.environ["RANK"]
print("up", flush=True)
if rank == "1":
    time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)
if rank == "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(100)
"""
    begin = time.monotonic()
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:2", write(tmp_path, script), cwd=tmp_path)
    assert time.monotonic() - begin < 20
    assert done.returncode == 137, done.stderr
    assert "ddprun: rank 1 on h2 failed with exit code 137: ended by SIGKILL" in done.stderr


def test_a_cable_that_comes_back_soon_ends_nothing(bed_of_two: HostBed, tmp_path: Path) -> None:
    with started(bed_of_two, tmp_path) as run:
        bed_of_two.set_link(bed_of_two.hosts[1], up=False)
        time.sleep(1)
        bed_of_two.set_link(bed_of_two.hosts[1], up=True)
        time.sleep(4)
        assert run.process.poll() is None
        assert len([line for line in of_job(*bed_of_two.hosts) if "script.py" in line]) >= 3
        run.signal(signal.SIGINT)
        assert run.end()[0] == 130


FAIL = """
import os, time
print("up", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("the data of rank 1 are gone")
time.sleep(1000)
"""


def test_the_last_lines_name_node_rank_exception_and_log(bed: HostBed, tmp_path: Path) -> None:
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:1", write(tmp_path, FAIL), cwd=tmp_path)
    *_, quoted, cause, log = done.stderr.splitlines()
    assert done.returncode == 1
    assert quoted == "[h2:1] ValueError: the data of rank 1 are gone"
    assert cause == "ddprun: rank 1 on h2 failed with exit code 1: ValueError: the data of rank 1 are gone"
    path = Path(log.removeprefix("ddprun: its whole output is in "))
    assert path.read_text().splitlines()[0] == "up" and path.is_relative_to(tmp_path / "ddprun-logs")
    assert not of_job(*bed.hosts)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.fixture
def refusing_login(bed: HostBed) -> Iterator[None]:
    keys = bed.hosts[1].home / ".ssh" / "authorized_keys"
    good = keys.read_text()
    keys.write_text("")
    yield
    keys.write_text(good)


@pytest.fixture
def other_host_key(bed: HostBed) -> Iterator[None]:
    known = bed.hosts[0].home / ".ssh" / "known_hosts"
    good = known.read_text()
    lines = good.splitlines()
    key = lines[2].split()[2]
    known.write_text(
        "\n".join(line.rpartition(" ")[0] + " " + key if line.startswith("h2") else line for line in lines)
    )
    yield
    known.write_text(good)


@pytest.fixture
def unknown_host_key(bed: HostBed) -> Iterator[None]:
    known = bed.hosts[0].home / ".ssh" / "known_hosts"
    good = known.read_text()
    known.write_text("")
    yield
    known.write_text(good)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refusing_login", r"h2: the login is refused \(.*Permission denied.*\)\..*ssh-copy-id h2, or ssh-add\."),
        ("other_host_key", r"h2: its host key is not the known one\..*ssh-keygen -R h2.*"),
        ("unknown_host_key", r"h2: its host key is not among the known hosts\. Check and accept it: ssh h2 true\."),
    ],
)
def test_a_login_that_does_not_work_is_explained(
    bed: HostBed, tmp_path: Path, request: pytest.FixtureRequest, fault: str, says: str
) -> None:
    request.getfixturevalue(fault)
    done = ddprun(bed.hosts[0], "-H", "h1:1,h2:1", write(tmp_path, "print('started')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"ddprun: {says}\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-H", "h1,nowhere"], [r"nowhere: the host is unknown \(.*\)\. Check the name, or add it to ~/.ssh/config\."]),
        (["-H", "h1,10.83.0.99"], [r"10.83.0.99: ssh cannot reach it: .*\. Try: ssh 10.83.0.99 true\."]),
        (
            ["-H", "h1,h2", "--python", "/no/python"],
            [rf"h{i}: cannot start the interpreter /no/python\. .*" for i in (1, 2)],
        ),
        (
            ["-H", "h1,h2", "--chdir", "/no"],
            [rf"h{i}: the working directory /no cannot be entered: .*" for i in (1, 2)],
        ),
        (
            ["-H", "h1,10.83.0.1"],
            [r"h1 and 10.83.0.1 are the same machine\. Name it once, with the .*"],
        ),
        (
            ["--hostfile", "hosts"],
            [r"h2: ddp_callbacks is not installed .*: ssh h2 /usr/bin/python3 -m pip install ddp_callbacks\."],
        ),
        (["-H", "h1,h2", "--master-addr", "10.83.0.99"], [r"h1: cannot listen on 10.83.0.99 .*--master-addr\."]),
    ],
    ids=["unknown host", "dead host", "no python", "no folder", "host twice", "not installed", "no address"],
)
def test_a_node_that_cannot_do_its_part_is_named_before_anything_starts(
    bed: HostBed, tmp_path: Path, flags: list[str], says: list[str]
) -> None:
    write(tmp_path, "h1\nh2 python=/usr/bin/python3\n", "hosts")
    done = ddprun(bed.hosts[0], *flags, write(tmp_path, "print('started')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(says), done.stderr
    for line, pattern in zip(lines, says, strict=True):
        assert re.fullmatch(f"ddprun: {pattern}", line)
    assert not (tmp_path / "ddprun-logs").exists()


@pytest.mark.usefixtures("firewall")
def test_a_port_that_a_firewall_closes_is_named(bed: HostBed, tmp_path: Path) -> None:
    h1 = bed.hosts[0]
    done = ddprun(h1, "-H", "h1:1,h2:1", write(tmp_path, "print('started')"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"ddprun: h2: cannot connect to 10.83.0.1 port \d+: timed out\. Open the ports .*\n", done.stderr
    )


# --- the doctor -------------------------------------------------------------------------------------------------------


def doctor(host: Host, *argv: str, cwd: Path) -> tuple[int, list[dict[str, str]], float]:
    """Its exit code, what it found, and how long it took."""
    begin = time.monotonic()
    done = ddprun(host, "doctor", "--json", *argv, cwd=cwd)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["works"] == (done.returncode == 0)
    return done.returncode, report["findings"], time.monotonic() - begin


def test_the_doctor_finds_three_good_nodes_good(bed: HostBed, tmp_path: Path) -> None:
    code, found, took = doctor(bed.hosts[0], "-H", "h1,h2,h3", write(tmp_path, ""), cwd=tmp_path)
    assert (code, took < 20) == (0, True), found
    assert {finding["check"] for finding in found if finding["level"] != "green"} <= {
        "encryption",
        "/dev/shm",
        "memory",
    }
    checks = ["reached", "folder", "script", "clock", "python", "torch", "ddp_callbacks", "cores", "memory", "address"]
    for check in [*checks, "/dev/shm", "GPUs", "ports"]:
        assert {finding["node"] for finding in found if finding["check"] == check} == {"h1", "h2", "h3"}, check
    (result,) = [finding for finding in found if finding["check"] == "all-reduce"]
    assert re.fullmatch(r"[\d.]+ ms for one number, \d+ MB/s from each node", result["text"])
    (encryption,) = [finding for finding in found if finding["check"] == "encryption"]
    assert "unencrypted" in encryption["remedy"]
    assert not of_job(*bed.hosts)


@pytest.mark.parametrize(
    ("fault", "flags", "check", "says"),
    [
        ("refusing_login", [], "reached", r"the login is refused .*ssh-copy-id h2.*"),
        ("unknown_host_key", [], "reached", r"its host key is not among the known hosts.*ssh h2 true"),
        ("other_host_key", [], "reached", r"its host key is not the known one.*ssh-keygen -R h2.*"),
        (None, ["no_such.py"], "script", r"there is no file no_such.py .*rsync -a --mkpath .* h2:.*"),
        ("other_folder", [], "folder", r"the working directory /no/such cannot be entered.*rsync .*--chdir"),
        ("no_python", [], "reached", r"cannot start the interpreter /no/python\. Name the one there by --python.*"),
        ("bare_python", [], "torch", r"torch is not installed: ssh h2 /usr/bin/python3 -m pip install torch==.*"),
        ("firewall", [], "ports", r"cannot connect to 10.83.0.1 port \d+: timed out\. .*ufw allow from 10.83.0.2.*"),
    ],
)
def test_the_doctor_names_each_fault_and_what_mends_it(
    bed: HostBed,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    fault: str | None,
    flags: list[str],
    check: str,
    says: str,
) -> None:
    of_h2 = {
        "other_folder": "chdir=/no/such",
        "no_python": "python=/no/python",
        "bare_python": "python=/usr/bin/python3",
    }
    if fault is not None and fault not in of_h2:
        request.getfixturevalue(fault)
    hosts = write(tmp_path, f"h1\nh2 {of_h2.get(fault or '', '')}\n", "hosts")
    code, found, took = doctor(bed.hosts[0], "--hostfile", hosts, *flags, cwd=tmp_path)
    assert (code, took < 20) == (1, True)
    red = {(finding["node"], finding["check"]): finding["remedy"] for finding in found if finding["level"] == "red"}
    assert re.fullmatch(says, red["h2", check]), red
    assert red["", "all-reduce"] == "not tried: mend the above first"
    others = {key for key in red if key not in {("h2", check), ("", "all-reduce")}}
    lacking = {("h2", name) for name in ("ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning")}
    assert others <= {("h1", "script"), ("h1", "ports")} | lacking


@pytest.fixture
def firewall(bed: HostBed) -> Iterator[None]:
    """h1 takes nothing from h2 but the answers of its sshd."""
    close_ports(bed.hosts[0])
    yield
    assert bed.hosts[0].run("nft", "delete", "table", "inet", "t").returncode == 0


def close_ports(host: Host) -> None:
    chain = "type filter hook input priority 0\n ip saddr 10.83.0.2 tcp sport != 22 drop\n"
    rules = f"table inet t {{\n chain i {{\n {chain} }}\n}}\n"
    assert host.run("nft", "-f", "-", input=rules).returncode == 0


def test_starts_that_are_ended_at_any_moment_leave_nothing(bed: HostBed, tmp_path: Path) -> None:
    """DDPRUN_STARTS says how many; a hundred take twelve minutes, and --timeout=0."""
    moments = random.Random(7)
    script = write(tmp_path, STAY)
    for _ in range(int(os.environ.get("DDPRUN_STARTS", "12"))):
        with Run(bed.hosts[0], "-H", "h1:1,h2:1", script, cwd=tmp_path) as run:
            time.sleep(moments.uniform(0, 12))
            number = moments.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
            run.process.poll()
            if any("-m ddp_callbacks.launcher " in line for line in bed.hosts[0].processes().values()):
                run.signal(number)
            else:
                run.process.kill()
            end = time.monotonic() + 6
            while (left := of_job(*bed.hosts)) and time.monotonic() < end:
                time.sleep(0.05)
            assert not left
            run.end()
