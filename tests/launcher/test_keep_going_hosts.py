"""``ddprun --keep-going`` on three hosts: whatever becomes of one, the others continue with the numbers of one process.

``SEED`` chooses the moments of the night; by default the date does.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import survival
from jobs import IMPATIENT, Run, ddprun, of_job, on_hosts, program, signal_on, write
from kit.hosts import Host, HostBed

pytestmark = [*on_hosts("recovery"), pytest.mark.cold]

PROGRAM = "stdin.buffer"  # words of the command line of a node's program
# What happens to a host, or to the rank on it.
FAULTS: dict[str, Callable[[HostBed, Host], None]] = {
    "rank killed": lambda _, host: signal_on(host, survival.SCRIPT),
    "rank stopped": lambda _, host: signal_on(host, survival.SCRIPT, signal.SIGSTOP),
    "cut off": lambda bed, host: bed.set_link(host, up=False),
    "without power": lambda bed, host: bed.power_off(host),
    "program killed": lambda _, host: signal_on(host, PROGRAM),
}


def prove(
    folder: Path, training: tuple[str, str], which: int, moment: tuple[str, int], copies: str, fault: str
) -> None:
    """The job that is started on the second host loses the rank of another one at a moment."""
    variables = ["-x", f'DIES={{"{which}": ["{moment[0]}", {moment[1]}, "stays"]}}', "-x", f"COPIES={copies}"]
    argv = ["-H", "h1:1,h2:1,h3:1", "--keep-going", *IMPATIENT, *variables, survival.SCRIPT, *training]
    with HostBed(3) as bed, Run(folder, *argv, host=bed.hosts[1]) as run:
        run.await_files("there")
        FAULTS[fault](bed, lost := bed.hosts[which])
        assert run.end() == 0, run.text
        assert re.search(rf"ddprun: .*{lost.name}.*; continuing with 2 processes\n", run.text), run.text
        assert not of_job(*(host for host in bed.hosts if host is not lost))
    survival.require_truth(folder, *training, run.text)


def test_a_job_that_loses_the_program_of_its_first_host_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Lost hosts change nothing."""
    prove(tmp_path, ("trainer", "adam"), 0, ("backward", 8), "often", "program killed")


@pytest.mark.parametrize(
    ("flags", "loses", "names"),
    [
        pytest.param(["-H", "h1:2", "--master-addr", "10.83.0.1"], False, ["h2"], id="a new one"),
        pytest.param(["-H", "h1:1,h2:1"], True, ["h2", "h3"], id="one that was lost, and a new one"),
    ],
)
def test_hosts_join_a_job(bed: HostBed, tmp_path: Path, flags: list[str], loses: bool, names: list[str]) -> None:
    """Hosts may join a running job."""
    argv = [*flags, "--keep-going", "-x", 'DIES={"0": ["forward", 3, "waits"]}', "-x", "COPIES=often"]
    with Run(tmp_path, *argv, survival.SCRIPT, "trial", "sgd", host=bed.hosts[0]) as run:
        run.await_files("waits")
        if loses:
            signal_on(bed.hosts[1], PROGRAM)
            run.await_text("continuing with 1 process")
        joined = ddprun("join", "-H", ",".join(f"{name}:1" for name in names), cwd=tmp_path, host=bed.hosts[0])
        said = f"ddprun: {', '.join(names)}: new processes start; they join once they are ready\n"
        assert (joined.returncode, joined.stderr) == (0, said)
        assert run.end() == 0, run.text
    for rank, host in enumerate(names, start=2):
        assert f"ddprun: rank {rank} on {host}: a new process joins; continuing with " in run.text, run.text
    survival.require_truth(tmp_path, "trial", "sgd", run.text)


def test_a_host_that_cannot_join_is_refused_and_the_job_continues(bed: HostBed, tmp_path: Path) -> None:
    refused = {
        "h2": "the processes of this job meet at an address that only h1 has. Start it with --master-addr, an address "
        "that the other nodes can reach.",
        "h1": "h1 takes part already. Its killed processes are replaced without a join.",
        "h2,h3": "--nnodes allows 2 nodes, and the job has 1 by now.",
        "h2:0": "-H h2:0: the slots of h2 must be a number of at least 1, got '0'.",
    }
    script = write(
        tmp_path, "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('now'): time.sleep(0.05)"
    )
    with Run(tmp_path, "-H", "h1:2", "--keep-going", "--nnodes", "1:2", script, host=bed.hosts[0]) as run:
        run.await_text("up")
        for hosts, why in refused.items():
            asked = ddprun("join", "-H", hosts, cwd=tmp_path, host=bed.hosts[0])
            assert (asked.returncode, asked.stderr) == (2, f"ddprun: {why}\n")
        (tmp_path / "now").touch()
        assert run.end() == 0, run.text
    over = ddprun("join", "-H", "h2", cwd=tmp_path, host=bed.hosts[0])
    assert (over.returncode, over.stderr.count("has ended.")) == (2, 1), over.stderr


def test_a_host_whose_new_process_failed_may_join_again(bed: HostBed, tmp_path: Path) -> None:
    path = program(
        tmp_path / "bin" / "run", '[ -z "$DDP_CALLBACKS_SUCCESSOR" ] || exit 3; until [ -e now ]; do sleep 0.05; done'
    )
    failures = {2: "h3: cannot start", 3: "rank 3 on h3: the new process ended with exit code 3 before it joined"}
    hosts, here = bed.hosts, {"cwd": tmp_path, "host": bed.hosts[0]}
    with Run(tmp_path, "-H", "h1:1,h2:1", "--keep-going", "--no-python", path, host=hosts[0]) as run:
        for begun in ("h1: rank 0, ", "h2: rank 1, "):
            run.await_text(begun)
        for rank, failure in failures.items():
            os.chmod(path, 0o755 if rank > 2 else 0o644)
            assert ddprun("join", "-H", "h3:1", **here).returncode == 0
            run.await_text(failure)
            run.wait_until(lambda: not of_job(hosts[2]))
        (tmp_path / "now").touch()
        assert run.end() == 0, run.text


@pytest.mark.night
@pytest.mark.waits(4)
@pytest.mark.parametrize("optimizer", survival.OPTIMIZERS)
@pytest.mark.parametrize("kind", survival.KINDS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", survival.PHASES)
def test_a_host_or_its_rank_may_be_lost_in_any_phase(
    tmp_path: Path, phase: str, fault: str, kind: str, optimizer: str
) -> None:
    chosen = random.Random(f"{survival.SEED} {phase} {fault} {kind} {optimizer}")
    moment = phase, chosen.randint(1, survival.PHASES[phase])
    copies = "often" if phase == "copy" else chosen.choice(["often", "seldom"])
    prove(tmp_path, (kind, optimizer), chosen.choice([0, 2]), moment, copies, fault)
