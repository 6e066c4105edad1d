"""Hosts on which a job cannot run: ``ddprun`` and ``ddprun doctor`` name each, and what mends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ddprun, of_job, on_hosts, write
from kit.hosts import Host, HostBed
from kit.machine import Slowness

pytestmark = on_hosts("faults")

ANYTHING = "import sys; print('started')"


@pytest.fixture(scope="module")
def faulty() -> Iterator[HostBed]:
    """h1 is good; each other host has a fault of its own, here or in the host file below."""
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


# Of each node: what ddprun says, and which of the doctor's checks fails, with the remedy.
FAULTS = {
    "h2": (
        r"login refused \(.*Permission denied.*\)\..*ssh-copy-id h2, or ssh-add\.",
        "reached",
        r"login refused .*ssh-copy-id h2.*",
    ),
    "h3": (
        r"its host key has changed\..*ssh-keygen -R h3.*",
        "reached",
        r"its host key has changed.*ssh-keygen -R h3.*",
    ),
    "h4": (
        r"its host key is unknown\. Check and accept it: ssh h4 true\.",
        "reached",
        r"its host key is unknown.*ssh h4 true",
    ),
    "h5": (
        r"cannot start the interpreter /no/python\. .*",
        "reached",
        r"cannot start the interpreter /no/python\. Install it there .*, or set its path with --python.*",
    ),
    "h6": (
        r"cannot enter the working directory /no/such: .*",
        "folder",
        r"cannot enter the working directory /no/such: .*rsync .*--chdir",
    ),
    "h7": (
        r"ddp_callbacks is not installed .*Run: ssh h7 /usr/bin/python3 -m pip install /.* "
        r"\(the folder of its repository; no package index has it\)\.",
        "torch",
        r"torch is not installed. Run: ssh h7 /usr/bin/python3 -m pip install torch==.*",
    ),
    "h8": (
        r"file not found: script.py \(working directory .*/empty\)\.",
        "script",
        r"file not found: script.py .*rsync -a --mkpath .* h8:.*",
    ),
    "nowhere": (r"unknown host \(.*\)\. Check the name, or add it to ~/.ssh/config\.", "", ""),
    "10.83.0.99": (r"ssh cannot reach it: .*\. Try: ssh 10.83.0.99 true\.", "", ""),
}


def write_hosts(folder: Path, *others: str) -> list[str]:
    (folder / "empty").mkdir()
    lines = ["h1", "h2", "h3", "h4", "h5 python=/no/python", "h6 chdir=/no/such", "h7 python=/usr/bin/python3"]
    (folder / "hosts").write_text("\n".join([*lines, f"h8 chdir={folder}/empty", "h9", *others, ""]))
    return ["--hostfile", "hosts", write(folder, ANYTHING)]


def test_each_node_that_cannot_do_its_part_is_named_once_and_no_good_one(faulty: HostBed, tmp_path: Path) -> None:
    """`ddprun` names unfit nodes before anything starts."""
    argv = write_hosts(tmp_path, "nowhere", "10.83.0.99")
    done = ddprun(*argv, cwd=tmp_path, host=faulty.hosts[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "ddprun-logs").exists()
    for line, (node, (says, *_)) in zip(done.stderr.splitlines(), FAULTS.items(), strict=True):
        assert re.fullmatch(f"ddprun: {node}: {says}", line)


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
    """It names nodes that cannot meet, too."""
    done = ddprun(*flags, write(tmp_path, ANYTHING), cwd=tmp_path, host=faulty.hosts[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"ddprun: {says}\n", done.stderr), done.stderr
    assert not (tmp_path / "ddprun-logs").exists()


# --- the doctor -------------------------------------------------------------------------------------------------------


def doctor(host: Host | None, *argv: str, cwd: Path) -> tuple[int, list[dict[str, str]]]:
    """Its exit code, and what it found. It may take 20 s, but is busy itself while the machine is watched."""
    with Slowness() as slowness:
        done = ddprun("doctor", "--json", *argv, cwd=cwd, host=host)
    assert slowness.took < 12 * slowness.factor
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["works"] == (done.returncode == 0)
    return done.returncode, report["findings"]


@pytest.mark.cold
def test_the_doctor_finds_good_nodes_good_which_a_plain_command_reaches(
    bed: HostBed, tmp_path: Path, enter: str
) -> None:
    """`ddprun doctor` passes good nodes, and mentions unencrypted traffic."""
    code, found = doctor(None, "-H", "h1,h2,h3", "--rsh", enter, write(tmp_path, ""), cwd=tmp_path)
    assert code == 0, found
    assert {finding["check"] for finding in found if finding["level"] != "green"} <= {
        "encryption",
        "/dev/shm",
        "memory",
    }
    checks = ["reached", "folder", "script", "python", "torch", "ddp_callbacks", "cores", "memory", "address"]
    for check in [*checks, "/dev/shm", "GPUs", "ports"]:
        assert {finding["node"] for finding in found if finding["check"] == check} == {"h1", "h2", "h3"}, check
    (result,) = [finding for finding in found if finding["check"] == "all-reduce"]
    assert re.fullmatch(r"[\d.]+ ms for one number, \d+ MB/s per node", result["text"])
    assert all(finding["text"].startswith("by enter, ") for finding in found if finding["check"] == "reached")
    addresses = [finding["text"] for finding in found if finding["check"] == "address"]
    assert addresses == [f"{host.address} (eth0)" for host in bed.hosts]
    (encryption,) = [finding for finding in found if finding["check"] == "encryption"]
    assert "not encrypted" in encryption["remedy"]
    assert not of_job(*bed.hosts)


def test_the_doctor_names_each_fault_and_what_mends_it_and_nothing_else(faulty: HostBed, tmp_path: Path) -> None:
    """The doctor names each fault and its repair."""
    code, found = doctor(faulty.hosts[0], *write_hosts(tmp_path), cwd=tmp_path)
    assert code == 1
    mended = {(finding["node"], finding["check"]): finding["remedy"] for finding in found if finding["level"] == "red"}
    firewall = r"cannot connect to 10.83.0.1 port \d+: timed out\. .*ufw allow from 10.83.0.9.*"
    expected = {(node, check): remedy for node, (_, check, remedy) in FAULTS.items() if check}
    expected |= {("h9", "ports"): firewall, ("", "all-reduce"): "skipped: fix the problems above first"}
    for fault, says in expected.items():
        assert re.fullmatch(says, mended[fault])
    lacking = {("h7", name) for name in ("ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning")}
    told = {*expected, ("h1", "ports")}
    assert told <= set(mended) <= told | lacking
