"""Hosts on which a job cannot run: ``ddprun`` and ``ddprun doctor`` name each, and what mends it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ddprun, of_job, on_hosts, write
from kit.hosts import _PATH, Host, HostBed
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
        r"file not found: script.py \(working directory .*/empty\)\. Copy it: rsync .*--chdir\.",
        "folder",
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
            ["-H", "h1,h9", "-x", "GLOO_SOCKET_IFNAME=lo"],
            r"h1: GLOO_SOCKET_IFNAME=lo does not lead to the others there\. Unset it, or name one that it has: eth0\.\n"
            r"ddprun: h9: GLOO_SOCKET_IFNAME=lo does not lead .*: eth0\.",
            id="interface",
        ),
        pytest.param(
            ["-H", "h1:1,h9:1"],
            r"h1: cannot connect to 10.83.0.9 port \d+: timed out\. Open the firewall of h9 for it, .*--unchecked\.\n"
            r"ddprun: h9: cannot connect to 10.83.0.1 port \d+: timed out\. Open the firewall of h1 .*--master-addr\.",
            id="firewall",
        ),
    ],
)
def test_nodes_that_cannot_meet_are_named_before_anything_starts(
    faulty: HostBed, tmp_path: Path, flags: list[str], says: str
) -> None:
    """It names nodes that differ or cannot meet."""
    done = ddprun(*flags, write(tmp_path, ANYTHING), cwd=tmp_path, host=faulty.hosts[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"ddprun: {says}\n", done.stderr), done.stderr
    assert not (tmp_path / "ddprun-logs").exists()


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_an_older_script_on_a_node_stops_the_start(bed: HostBed, tmp_path: Path, flags: list[str]) -> None:
    h1, name = bed.hosts[0], "script" if flags else "script.py"
    (tmp_path / "old").mkdir()
    write(tmp_path / "old", f"{ANYTHING}  # older")
    write(tmp_path, ANYTHING)
    (tmp_path / "hosts").write_text(f"h1:1\nh2:1 chdir={tmp_path}/old\n")
    done = ddprun("--hostfile", "hosts", *flags, name, cwd=tmp_path, host=h1)
    what = "module" if flags else "script"
    copy = f"Copy it: rsync -a --mkpath {tmp_path}/ h2:{tmp_path}/old/"
    said = f"its {what} is not that of h1. {copy}"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ddprun: h2: {said}. Or start all the same: --unchecked.\n"
    if not flags:
        allowed = ddprun("--unchecked", "--independent", "--hostfile", "hosts", name, cwd=tmp_path, host=h1)
        assert (allowed.returncode, allowed.stdout) == (0, "[h1:0] started\n")
        code, found = doctor(h1, "--hostfile", "hosts", name, cwd=tmp_path)
        bad = [(finding["node"], finding["check"], finding["remedy"]) for finding in found if finding["level"] == "red"]
        assert (code, bad[0]) == (1, ("h2", "script", said))


def test_a_firewall_between_two_other_nodes_stops_the_start(bed: HostBed, tmp_path: Path) -> None:
    h1, h2, h3 = bed.hosts
    close_ports(h2, h3)
    try:
        done = ddprun("-H", "h1:1,h2:1,h3:1", write(tmp_path, ANYTHING), cwd=tmp_path, host=h1)
    finally:
        assert h2.run("nft", "delete", "table", "inet", "t").returncode == 0
    assert (done.returncode, done.stdout) == (2, "")
    says = "ddprun: {}: cannot connect to {} port \\d+: timed out\\. Open the firewall of {} for it, .* from {}\\. .*"
    lines = [(h2.name, h3.address, h3.name, h2.address), (h3.name, h2.address, h2.name, h3.address)]
    for line, names in zip(done.stderr.splitlines(), lines, strict=True):
        assert re.fullmatch(says.format(*names), line)


WHERE = "import os; print(*(os.environ[name] for name in ('RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')))"


def test_the_job_uses_the_network_by_which_ssh_reaches_the_nodes(bed: HostBed, tmp_path: Path) -> None:
    h1, h2, _ = bed.hosts
    setup = "ip link add link eth0 name fast0 type macvlan mode bridge && ip addr add 192.168.9.{}/24 dev fast0 && "
    setup += "ip link set fast0 up && ip route add default via 10.83.0.254"
    known = h1.home / ".ssh" / "known_hosts"
    _, of_h2, _ = (before := known.read_text()).splitlines()
    known.write_text(f"{before}{of_h2.replace(h2.address, '192.168.9.2')}\n")
    config = str(h2.folder / "sshd_config")
    sshd = h2.run("sh", "-c", "command -v sshd", environ=h2.environ(PATH=_PATH)).stdout.strip()
    for number, host in enumerate((h1, h2), start=1):
        assert host.run("sh", "-c", setup.format(number), environ=host.environ(PATH=_PATH)).returncode == 0
    server = h2.start(sshd, "-D", "-f", config, "-o", "ListenAddress=192.168.9.2")
    try:
        hosts = ["-H", "h1:1,192.168.9.2:1", "--show-ranks", "all", "--no-prefix"]
        done = ddprun(*hosts, write(tmp_path, WHERE), cwd=tmp_path, host=h1)
    finally:
        for pid, line in h2.processes(of_sshd=True).items():
            if "192.168.9.2" in line:
                os.kill(pid, signal.SIGKILL)
        server.wait()
        known.write_text(before)
        for host in (h1, h2):
            host.run("sh", "-c", "ip link del fast0; ip route del default", environ=host.environ(PATH=_PATH))
    assert sorted(done.stdout.splitlines()) == [f"{rank} 192.168.9.1 fast0" for rank in (0, 1)], done.stderr


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
    assert code == 0, [finding for finding in found if finding["level"] == "red"]
    assert {finding["check"] for finding in found if finding["level"] != "green"} <= {
        "encryption",
        "/dev/shm",
        "memory",
    }
    checks = ["reached", "folder", "script", "python", "torch", "ddp_callbacks", "cores", "memory", "address"]
    for check in [*checks, "/dev/shm", "GPUs", "ports"]:
        assert {finding["node"] for finding in found if finding["check"] == check} == {"h1", "h2", "h3"}, check
    (result,) = [finding for finding in found if finding["check"] == "all-reduce"]
    assert re.fullmatch(r"[\d.]+ ms for 1 KiB, \d+ MB/s per node", result["text"])
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
    expected |= {("h9", "ports"): firewall}
    for fault, says in expected.items():
        assert re.fullmatch(says, mended[fault])
    lacking = {("h7", name) for name in ("ddp_callbacks", "torchbearer", "lightning", "pytorch-lightning")}
    told = {*expected, ("h1", "ports")}
    assert told <= set(mended) <= told | lacking
    (skipped,) = [finding for finding in found if finding["check"] == "all-reduce"]
    assert (skipped["level"], skipped["remedy"]) == ("amber", "skipped: fix the problems above first")
