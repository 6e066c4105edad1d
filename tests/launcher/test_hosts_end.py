"""The end of a job on real hosts: all of it goes soon, whatever ends it, and the cause is told."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import LIMIT, STAY, Run, of_job, on_hosts, processes_in, wait_until, write
from kit.hosts import Host, HostBed
from kit.machine import Slowness

pytestmark = on_hosts("ends")


def start(stack: ExitStack, folder: Path, host: Host | None, *argv: str, script: str = STAY) -> Run:
    """Three ranks in a folder of their own, which stay; the words behind "--" are theirs."""
    folder.mkdir(exist_ok=True)
    flags, _, words = " ".join(argv).partition(" -- ")
    argv = ("--show-ranks", "all", *flags.split(), write(folder, script), *words.split())
    return stack.enter_context(Run(folder, *argv, host=host))


def kill_in(folder: Path, host: Host, words: str) -> None:
    """Every process of the job in ``folder`` on a host whose command line has these words."""
    there = host.processes()
    for pid, line in processes_in(folder).items():
        if pid in there and words in line:
            os.kill(pid, signal.SIGKILL)


def kill_login(folder: Path, host: Host) -> None:
    """The sshd that leads to the node's program of the job."""
    (parent,) = [pid for pid, line in processes_in(folder).items() if PROGRAM in line and pid in host.processes()]
    while "sshd" not in Path(f"/proc/{parent}/cmdline").read_text():
        parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)


def interrupt_twice(run: Run) -> None:
    run.signal(signal.SIGINT)
    run.await_text("deaf", 3)  # two signals at the same moment would be one
    run.signal(signal.SIGINT)


PROGRAM = "stdin.buffer"  # in the command line of a node's program
LOST = "h2: the connection was lost"
DEAF = ("-H", "h1:1,h2:2", "--", "deaf")
SOON = 5  # seconds until all has gone
# What happens, the exit code, and what is told.
ENDS: dict[str, tuple[Callable[[Run, Host, Host], None], int, str]] = {
    "SIGINT": (lambda run, *_: run.signal(signal.SIGINT), 130, "stopped by SIGINT"),
    "SIGTERM": (lambda run, *_: run.signal(signal.SIGTERM), 143, "stopped by SIGTERM"),
    "SIGHUP": (lambda run, *_: run.signal(signal.SIGHUP), 129, "stopped by SIGHUP"),
    "SIGKILL": (lambda run, *_: run.signal(signal.SIGKILL), 137, ""),
    "SIGINT twice": (lambda run, *_: interrupt_twice(run), 130, ".* killed at the second signal"),
    "SIGTERM by enter": (lambda run, *_: run.signal(signal.SIGTERM), 143, "stopped by SIGTERM"),
    "SIGKILL by enter": (lambda run, *_: run.signal(signal.SIGKILL), 137, ""),
    "ssh": (lambda run, h1, _: kill_in(run.folder, h1, "ssh -T"), 1, LOST),
    "sshd": (lambda run, _, h2: kill_login(run.folder, h2), 1, LOST),
    "rank": (lambda run, _, h2: kill_in(run.folder, h2, "script.py"), 137, r"rank [12] on h2 .* killed by SIGKILL"),
    "store": (
        lambda run, h1, _: kill_in(run.folder, h1, "launcher.store"),
        1,
        "h1: the process that hosts the ranks' store",
    ),
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "rank", "store"], id="signals and processes"),
        pytest.param(["SIGINT twice", "ssh", "sshd", "SIGTERM by enter", "SIGKILL by enter"], id="others"),
    ],
)
def test_all_is_gone_soon_on_all_hosts(bed: HostBed, tmp_path: Path, enter: str, names: list[str]) -> None:
    """Signals, even SIGKILL, and a killed rank, ssh or sshd end all nodes."""
    with ExitStack() as stack:
        runs = {}
        for name in names:
            flags = ["--grace", str(LIMIT)] if "twice" in name else []  # for which the second signal does not wait
            host, flags = (None, ["--rsh", enter]) if "by enter" in name else (bed.hosts[0], flags)
            runs[name] = start(stack, tmp_path / name, host, *flags, *DEAF)
        for run in runs.values():
            run.await_text("up ", 3)
        with Slowness() as slowness:
            for name, run in runs.items():
                ENDS[name][0](run, *bed.hosts[:2])
            wait_until(lambda: not of_job(*bed.hosts))
        assert slowness.took < SOON * slowness.factor
        for name, run in runs.items():
            _, expected, says = ENDS[name]
            code = run.end()
            assert (128 - code if code < 0 else code) == expected, run.text
            assert not says or any(re.match(f"ddprun: {says}", line) for line in run.lines), run.text


EXCHANGE = """
import time
from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.collectives import all_gather_object
join_process_group()
print("up", flush=True)
last, longest, end = time.monotonic(), 0.0, time.monotonic() + 10
while not any(all_gather_object(time.monotonic() > end, "whether it is over")):
    longest, last = max(longest, time.monotonic() - last), time.monotonic()
    time.sleep(0.1)
leave_process_group()
print("longest", longest, flush=True)
"""


@pytest.mark.waits(12)
def test_what_is_away_for_less_than_the_silence_that_is_borne_ends_nothing(tmp_path: Path) -> None:
    """A shorter outage or pause ends nothing."""
    silence, away = 8.0, 4.0  # TCP tries again some seconds after the network is back
    with HostBed(4) as bed, ExitStack() as stack:
        runs = []
        for first, second in (bed.hosts[:2], bed.hosts[2:]):
            argv = ["-H", f"{first.name}:1,{second.name}:1", "--heartbeat-timeout", str(silence)]
            runs.append(start(stack, tmp_path / first.name, first, *argv, script=EXCHANGE))
        for run in runs:
            run.await_text("up", 2)
        paused = [*bed.hosts[3].processes(), *bed.hosts[3].processes(of_sshd=True)]
        bed.set_link(bed.hosts[1], up=False)
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(away)
        bed.set_link(bed.hosts[1], up=True)
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        for run in runs:
            assert run.end() == 0, run.text
            gaps = [float(gap) for gap in re.findall(r"longest ([0-9.]+)", run.text)]
            assert len(gaps) == 2 and min(gaps) > away - 1


# --- the cause --------------------------------------------------------------------------------------------------------

# A rank fails once all are up, and its neighbour takes its time to end.
FAIL = """
import os, signal, time
rank = os.environ["RANK"]
if rank == "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
open("up-" + rank, "w").close()
while rank == "1":
    time.sleep(0.05)
    if all(os.path.exists(f"up-{other}") for other in range(3)):
        raise ValueError("the data of rank 1 are gone")
time.sleep(1000)
"""


def test_the_last_lines_name_node_rank_exception_and_log(bed: HostBed, tmp_path: Path) -> None:
    """The last lines name node, rank, exception and log."""
    with Run(tmp_path, "-H", "h1:1,h2:2", write(tmp_path, FAIL), host=bed.hosts[0]) as run:
        run.await_files("up-0", "up-1", "up-2")
        with Slowness() as slowness:
            assert run.end() == 1
    assert slowness.took < 9 * slowness.factor
    *_, quoted, cause, log = run.lines
    assert quoted == "[h2:1] ValueError: the data of rank 1 are gone"
    assert cause == "ddprun: rank 1 on h2 failed with exit code 1: ValueError: the data of rank 1 are gone"
    path = Path(log.removeprefix("ddprun: its full output is in "))
    assert path.read_text().splitlines()[0] == "up" and path.is_relative_to(tmp_path / "ddprun-logs")
    assert not of_job(*bed.hosts)


# --- at any moment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [pytest.param(6, id="few"), pytest.param(30, id="many", marks=pytest.mark.night)])
def test_starts_that_are_ended_at_any_moment_leave_nothing(bed: HostBed, tmp_path: Path, count: int) -> None:
    """A start that you interrupt leaves nothing."""
    # Spread over a whole start and a little more. DDPRUN_STARTS says how many; many need --timeout=0.
    count = int(os.environ.get("DDPRUN_STARTS", count))
    h1, moments = bed.hosts[0], random.Random(7)
    begin = time.monotonic()
    with ExitStack() as stack:
        run = start(stack, tmp_path, h1, "-H", "h1:1,h2:1")
        run.await_text("up ", 2)
        whole = 1.2 * (time.monotonic() - begin)
        run.signal(signal.SIGTERM)
        assert run.end() == 143
    numbers = [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]
    for i in range(count):
        with ExitStack() as stack:
            run = start(stack, tmp_path, h1, "-H", "h1:1,h2:1")
            run.pid()
            time.sleep(whole * moments.uniform(i, i + 1) / count)
            with Slowness() as slowness:
                run.signal(numbers[i % len(numbers)])
                wait_until(lambda: not of_job(*bed.hosts))
            assert slowness.took < 6 * slowness.factor
            run.end()
