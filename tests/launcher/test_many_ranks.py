"""Many processes on many hosts: the numbers of one process, whatever happens, and failures that are named."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
from jobs import Run, of_job, on_hosts
from kit import commands
from kit.hosts import HostBed
from kit.once import once

pytestmark = [*on_hosts("many"), pytest.mark.cold]

SCRIPT = str(Path(__file__).with_name("many_ranks.py"))
# It may have been ended before it has left Python.
FAILED = r"ddprun: rank {rank} on {host} failed(?: with exit code 1)?: RuntimeError: sensor 7 gave nothing"
Parameters = dict[str, dict[str, torch.Tensor]]


@once
def truth() -> Parameters:
    """Of one process."""
    folder = Path(tempfile.mkdtemp())
    commands.run(["python", SCRIPT, "loop", "trial", "trainer"], folder)
    return torch.load(folder / "result.pt")  # type: ignore[no-any-return]


def require_truth(folder: Path) -> None:
    found: Parameters = torch.load(folder / "result.pt")
    expected = {way: truth()[way] for way in found}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def train(bed: HostBed, folder: Path, *ways: str, flags: str = "", on: str = "", **variables: str) -> Run:
    """Four processes on each host, by default."""
    names = on or ",".join(f"{host.name}:4" for host in bed.hosts)
    given = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    return Run(folder, *flags.split(), *given, "-H", names, SCRIPT, *ways, host=bed.hosts[0])


@pytest.mark.parametrize(
    ("hosts", "ways"),
    [(4, ["loop", "trial"]), pytest.param(8, ["loop", "trial", "trainer"], marks=pytest.mark.night)],
)
def test_four_processes_on_each_of_many_hosts_train_as_one(tmp_path: Path, hosts: int, ways: list[str]) -> None:
    """32 processes on 8 hosts train as one."""
    with HostBed(hosts) as bed, train(bed, tmp_path, *ways) as run:
        assert run.end() == 0, run.text
    require_truth(tmp_path)


@pytest.mark.night
def test_the_one_of_32_processes_that_fails_is_named_and_five_go_on(tmp_path: Path) -> None:
    with HostBed(8) as bed:
        with train(bed, tmp_path, "trial", RESUMES="1", FAILS="17") as run:
            assert run.end() == 1
        assert re.fullmatch(FAILED.format(rank=17, host="h5"), run.lines[-2]), run.text
        with train(bed, tmp_path, "trial", on="h2:3,h7:2", RESUMES="1") as run:
            assert run.end() == 0, run.text
        assert run.text.count("] batch ") == 9, run.text  # the file has three of twelve
    require_truth(tmp_path)


@pytest.mark.night
def test_a_host_of_eight_loses_its_power_and_the_others_continue(tmp_path: Path) -> None:
    with HostBed(8) as bed:
        with train(bed, tmp_path, "trial", flags="--keep-going --heartbeat-timeout 5", PAUSE="0.3") as run:
            run.await_text("batch 4.")
            bed.power_off(bed.hosts[2])
            assert run.end() == 0, run.text
        assert "continuing with 28 processes" in run.text
        assert not of_job(*bed.hosts[:2], *bed.hosts[3:])
    require_truth(tmp_path)


@pytest.mark.night
def test_hosts_that_are_far_from_each_other_train_as_one_and_accuse_nobody(tmp_path: Path) -> None:
    """Long, lossy links work."""
    with HostBed(3, delay=0.02, loss=0.005) as bed:
        for host in bed.hosts:
            bed.set_rate(host, "100mbit")
        everywhere = ",".join(f"{host.name}:2" for host in bed.hosts)
        with train(bed, tmp_path, "loop", "trial", "trainer", on=everywhere) as run:
            assert run.end() == 0, run.text
        said = [line for line in run.lines if not line.startswith("[") and ": ranks " not in line]
        assert "waits for" not in run.text and len(said) == 1, run.text  # where the time went
        require_truth(tmp_path)
        with train(bed, tmp_path, "trial", on=everywhere, FAILS="5") as run:
            assert run.end() == 1
        assert re.fullmatch(FAILED.format(rank=5, host="h3"), run.lines[-2]), run.text
        with train(bed, tmp_path, "trial", on=everywhere, flags="--keep-going", PAUSE="0.3") as run:
            run.await_text("batch 4.")
            bed.power_off(bed.hosts[2])
            assert run.end() == 0, run.text
        assert "continuing with 4 processes" in run.text
    require_truth(tmp_path)
