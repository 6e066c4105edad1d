"""A Trial and a Trainer on two real hosts: their numbers, what ends them, and how they go on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from jobs import IMPATIENT, Run, of_job, on_hosts, signal_on, wait_until, write
from kit import commands
from kit.hosts import Host, HostBed
from kit.machine import Slowness

pytestmark = [*on_hosts("training"), pytest.mark.cold]

SCRIPT = str(Path(__file__).with_name("many_ranks.py"))


# --- misfortunes while gradients travel between the hosts -------------------------------------------------------------


def kill_rank(bed: HostBed, host: Host) -> None:
    signal_on(host, SCRIPT)


def cut_cable(bed: HostBed, host: Host) -> None:
    bed.set_link(host, up=False)


def power_off(bed: HostBed, host: Host) -> None:
    bed.power_off(host)


LOST = "the connection was lost"
# What trains, what happens to the second host of the job, its exit code, who is named, and how soon all has ended.
MISFORTUNES: dict[str, tuple[str, Callable[[HostBed, Host], None], int, str, float]] = {
    "killed": ("trial", kill_rank, 137, "rank 1 on {host} failed with exit code 137: killed by SIGKILL", 6),
    "cut off": ("trainer", cut_cable, 1, f"{{host}}: {LOST}", 9),
    "without power": ("trial", power_off, 1, f"{{host}}: {LOST}", 9),
    # ssh's own signs of life are then those of the connection that is shared.
    "cut off, by a shared connection": ("trial", cut_cable, 1, f"{{host}}: {LOST} (silent for 3.5 s)", 9),
}


@pytest.mark.waits(10)
def test_a_rank_or_host_that_is_lost_in_an_all_reduce_between_hosts_is_named(tmp_path: Path) -> None:
    """A lost node ends the job after `--heartbeat-timeout`."""
    with HostBed(2 * len(MISFORTUNES)) as bed, ExitStack() as stack:
        runs = {}
        for index, (what, (program, *_)) in enumerate(MISFORTUNES.items()):
            first, second = bed.hosts[2 * index : 2 * index + 2]
            bed.set_rate(second, "20mbit")  # a sum takes a second, a step without it some milliseconds
            (tmp_path / what).mkdir()
            if "shared" in what:
                (first.home / ".ssh" / "config").write_text(f"ControlPath {tmp_path}/master\n")
                master = stack.enter_context(first.start("ssh", "-M", "-N", second.name, stdin=subprocess.DEVNULL))
                stack.callback(master.kill)
                wait_until((tmp_path / "master").exists)
            argv = ["-H", f"{first.name}:1,{second.name}:1", *IMPATIENT, "-x", "ENDLESS=1", SCRIPT, program]
            runs[what] = stack.enter_context(Run(tmp_path / what, *argv, host=first))
        for run in runs.values():
            run.await_text("batch ", 3)
        for (what, run), second in zip(runs.items(), bed.hosts[1::2], strict=True):
            _, happens, code, says, seconds = MISFORTUNES[what]
            with Slowness() as slowness:
                happens(bed, second)
                if happens is cut_cable:
                    wait_until(lambda host=second: not of_job(host))  # type: ignore[misc]
                ended = run.end()
            assert ended == code, run.text
            assert any(line.startswith(f"ddprun: {says.format(host=second.name)}") for line in run.lines[-3:]), run.text
            assert slowness.took < seconds * slowness.factor
            assert run.host is not None and not [line for line in of_job(run.host) if "ssh -M" not in line]


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "killed"), [pytest.param("trial", 0, marks=pytest.mark.night), ("trainer", 1)])
def test_a_run_that_is_restarted_in_mid_epoch_has_the_numbers_of_one_process(
    bed: HostBed, tmp_path: Path, program: str, killed: int
) -> None:
    """Training over hosts gives one process's numbers, even restarted."""
    (tmp_path / "one").mkdir()
    commands.run(["python", SCRIPT, program], tmp_path / "one")
    flags = ["-H", "h1:1,h2:1", "--max-restarts", "1", "-x", "RESUMES=1", "-x", "PAUSE=0.2"]
    with Run(tmp_path, *flags, SCRIPT, program, host=bed.hosts[0]) as run:
        run.await_text("batch 4.")
        signal_on(bed.hosts[killed], f"-u {SCRIPT}")
        assert run.end() == 0, run.text
    assert "restart 1 of 1" in run.text
    numbers = re.findall(r"batch (\d+)\.", run.text)  # each process counts its own
    assert len(numbers) - numbers.index("1", 1) in (6, 9), run.text  # the file has three or six of twelve
    found, expected = (torch.load(folder / "result.pt") for folder in (tmp_path, tmp_path / "one"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# --- with fewer hosts -------------------------------------------------------------------------------------------------

WAIT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
print("up", rank, "of", world_size, "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.barrier()
if world_size > 1:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["never"]) if rank else dist.barrier()
dist.barrier()
print("done", rank, flush=True)
"""


# What happens to the second host of an elastic job.
LOSSES: tuple[Callable[[HostBed, Host], None], ...] = (
    cut_cable,
    power_off,
    lambda bed, host: signal_on(host, "stdin.buffer"),  # the node's program
)


@pytest.mark.waits(6)
def test_an_elastic_run_goes_on_within_seconds_without_a_host(tmp_path: Path) -> None:
    """Elastic runs continue without lost hosts."""
    # Rank 0 waits in a collective of torch's for 30 minutes; nothing tells it that the other host is cut off.
    elastic = ["--nnodes", "1:2", "--max-restarts", "1"]
    with HostBed(2 * len(LOSSES)) as bed, ExitStack() as stack:
        pairs = list(zip(bed.hosts[::2], bed.hosts[1::2], strict=True))
        runs = []
        for first, second in pairs:
            (tmp_path / first.name).mkdir()
            argv = ["-H", f"{first.name}:1,{second.name}:1", *elastic, "--show-ranks", "all", *IMPATIENT]
            script = write(tmp_path / first.name, WAIT)
            run = Run(tmp_path / first.name, *argv, script, host=first)
            runs.append(stack.enter_context(run))
        for run in runs:
            run.await_text("up ", 2)
        with Slowness() as slowness:
            for happens, (_, second) in zip(LOSSES, pairs, strict=True):
                happens(bed, second)
            for run in runs:
                run.await_text("continuing without it")
                run.await_text("up 0 of 1 attempt 1")
        assert slowness.took < 9 * slowness.factor
        for run, (first, second) in zip(runs, pairs, strict=True):
            assert run.end() == 0, run.text
            assert re.search(rf"ddprun: {second.name}: .*; continuing without it", run.text)
            assert f"ddprun: {first.name}: rank 0, " in run.text and "interface lo, restart 1" in run.text
