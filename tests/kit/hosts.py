"""Make real hosts on one machine: each has its own network, host name, processes, home and sshd. Linux, root.

Every namespace lives as long as a process of ours, and has no global name. When the tests end, in whatever way, the
pipes to these processes close, and the kernel removes the hosts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

NEEDS = ("sshd", "ssh", "ssh-keygen", "ip", "tc", "nft", "unshare", "nsenter", "mount")
NAMESPACES = ("--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_WIRE = str(Path(__file__).with_name("wire.py"))
_LIMIT = 300.0  # seconds for one command of the set-up
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

Done = subprocess.CompletedProcess[str]

# The first process of a host. It ends when its standard input does, and the host with it.
_HOST = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/sshd
hostname "$1"
mount --bind "$2/passwd" /etc/passwd
mount --bind "$2/hosts" /etc/hosts
echo ready
read -r _
"$(command -v sshd)" -D -e -f "$2/sshd_config" 2>"$2/sshd.log" &
read -r _ || true
"""
_PASSWD = """\
root:x:0:0:root:{home}:/bin/bash
sshd:x:105:65534::/run/sshd:/bin/false
"""
_SSHD_CONFIG = """\
ListenAddress {address}
HostKey {folder}/hostkey
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
UseDNS no
SetEnv TMPDIR={folder}/tmp
"""
_SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo ready && { read -r _ || true; }"
_SHORT = "ip link add {port} type veth peer name eth0 netns {pid}"  # of a cable
_CABLE = """
ip link set {port} master br0 up
nsenter -t {pid} -n sh -ec 'ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up'
"""


def missing() -> str | None:
    """Return why hosts cannot be made here; ``None`` if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts are made of Linux's namespaces, by root"
    if lacking := [name for name in NEEDS if shutil.which(name, path=_PATH) is None]:
        return f"needs {', '.join(lacking)}"
    trial = ["unshare", *NAMESPACES, "sh", "-c", "mount --make-rprivate / && mount -t tmpfs tmpfs /run"]
    tried = subprocess.run(trial, capture_output=True, text=True, timeout=_LIMIT, stdin=subprocess.DEVNULL)
    return f"hosts cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """One host: ``name`` resolves to ``address`` on all of them."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.home = folder / "home"
        self.init: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The host's first process, seen from outside."""
        assert self.init is not None
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def command(self, *argv: str, cwd: Path | str = "/") -> list[str]:
        """Return the command that runs ``argv`` on the host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", f"--wdns={cwd}", "--", *argv]

    def environ(self, **variables: str) -> dict[str, str]:
        """Return the environment of a user who has logged in there."""
        keep = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
        return {**keep, "HOME": str(self.home), "USER": "root", **variables}

    def start(self, *argv: str, environ: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        command = self.command(*argv, cwd=options.pop("cwd", "/"))
        return subprocess.Popen(command, env=environ or self.environ(), **options)

    def run(self, *argv: str, timeout: float = 600, input: str = "", **options: Any) -> Done:
        command = self.command(*argv, cwd=options.pop("cwd", "/"))
        environ = options.pop("environ", None) or self.environ()
        streams: dict[str, Any] = {"input": input, "capture_output": True, "text": True}
        return subprocess.run(command, env=environ, timeout=timeout, **streams, **options)

    def processes(self, of_sshd: bool = False) -> dict[int, str]:
        """Return the command lines of all processes except sshd's, or only sshd's, by process id seen from outside."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # the process has ended by now
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace and int(entry) != self.pid:
                    line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if line and ("sshd" in line) == of_sshd:  # empty if it has ended
                        found[int(entry)] = line
        return found


class HostBed:
    """``count`` hosts ``h1``, ``h2``, ... on one switch; use it in a ``with`` block.

    Each can log in to all others by key, and knows their host keys.

    Args:
        own_name: The address to which a host resolves its own name, 127.0.1.1 on Debian; if empty, its real address.
        delay: Seconds that a frame takes from a host to another one.
        loss: The part of the frames that are lost on the way from a host to the switch, or from there to a host.
    """

    def __init__(
        self, count: int, prefix: str = "h", own_name: str = "", delay: float = 0.0, loss: float = 0.0
    ) -> None:
        self._own_name, self._delay, self._loss = own_name, delay, loss
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
        self.hosts = [Host(f"{prefix}{i}", f"10.83.0.{i}", self._folder / f"{prefix}{i}") for i in range(1, count + 1)]

    def __enter__(self) -> HostBed:
        from kit.costs import count  # examples, too, make hosts

        count("hosts", len(self.hosts))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder)
            self._make_files()
            self._switch = stack.enter_context(_held(["unshare", "--net", "sh", "-c", _SWITCH]))
            for host in self.hosts:
                command = ["unshare", *NAMESPACES, "sh", "-c", _HOST, "sh", host.name, str(host.folder)]
                host.init = stack.enter_context(_held(command))
                self._lay_cable(host, stack)
                self._connect(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_link(self, host: Host, up: bool) -> None:
        """Plug or unplug the host's cable, at the switch."""
        _run_in_network(self._switch.pid, f"ip link set {self._port(host)} {'up' if up else 'down'}")

    def set_rate(self, host: Host, rate: str) -> None:
        """Limit the host's link to ``rate`` each way, in tc's words: ``200mbit``."""
        for pid, device in ((self._switch.pid, self._port(host)), (host.pid, "eth0")):
            bucket = f"root tbf rate {rate} burst 256kb latency 50ms"
            _run_in_network(pid, f"tc qdisc replace dev {device} {bucket}")

    def power_off(self, host: Host) -> None:
        """Kill the host's first process: the kernel then ends all others there."""
        os.kill(host.pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill all processes on the hosts except sshd's."""
        _end(self.hosts)

    def end_sshd(self) -> None:
        """End the hosts' sshd, so that another one can listen on port 22."""
        _end(self.hosts, of_sshd=True)

    def _port(self, host: Host) -> str:
        return f"v{self.hosts.index(host) + 1}"

    def _make_files(self) -> None:
        key = self._folder / "key"
        _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        known = []
        for host in self.hosts:
            (host.home / ".ssh").mkdir(parents=True, mode=0o700)
            (host.folder / "tmp").mkdir()  # leftovers of killed programs are removed with the host
            _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "hostkey")])
            kind, public = (host.folder / "hostkey.pub").read_text().split()[:2]
            known.append(f"{host.name},{host.address} {kind} {public}\n")
        for host in self.hosts:
            ssh = host.home / ".ssh"
            shutil.copy(key, ssh / "id_ed25519")
            shutil.copy(f"{key}.pub", ssh / "authorized_keys")
            (ssh / "known_hosts").write_text("".join(known))
            names = {other.name: other.address for other in self.hosts} | {"localhost": "127.0.0.1"}
            names[host.name] = self._own_name or host.address
            (host.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
            (host.folder / "passwd").write_text(_PASSWD.format(home=host.home))
            (host.folder / "sshd_config").write_text(_SSHD_CONFIG.format(address=host.address, folder=host.folder))

    def _lay_cable(self, host: Host, stack: ExitStack) -> None:
        if self._delay or self._loss:
            ends = [self._switch.pid, self._port(host), host.pid, "eth0"]
            words = [sys.executable, _WIRE, *ends, self._delay / 2, self._loss]
            stack.enter_context(_held(list(map(str, words))))
        else:
            _run_in_network(self._switch.pid, _SHORT.format(port=self._port(host), pid=host.pid))

    def _connect(self, host: Host) -> None:
        _run_in_network(self._switch.pid, _CABLE.format(port=self._port(host), pid=host.pid, address=host.address))
        assert host.init is not None and host.init.stdin is not None
        print(file=host.init.stdin, flush=True)
        self._await_sshd(host)

    def _await_sshd(self, host: Host) -> None:
        probe = f"import socket; socket.create_connection(('{host.address}', 22), 1).close()"
        end = time.monotonic() + _LIMIT
        while subprocess.run([*host.command(sys.executable, "-c", probe)], capture_output=True).returncode:
            assert time.monotonic() < end, (host.folder / "sshd.log").read_text()
            time.sleep(0.05)


@contextmanager
def _held(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and yield it when it says that it is ready. Its standard input closes at the end."""
    environ = {**os.environ, "PATH": _PATH}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", f"{command} failed"
            yield process
        finally:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # processes started from outside may wait there to be reaped
                process.wait(5)
            process.kill()


def _end(hosts: list[Host], of_sshd: bool = False) -> None:
    """Kill processes until none is left. Some end by themselves, such as the child by which sshd answers a login."""
    end = time.monotonic() + _LIMIT
    while left := {pid: line for host in hosts for pid, line in host.processes(of_sshd).items()}:
        assert time.monotonic() < end, left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _run_in_network(pid: int, script: str) -> None:
    """Run a shell script in the network namespace of a process."""
    _check(["nsenter", "-t", str(pid), "-n", "sh", "-ec", script])


def _check(command: list[str]) -> None:
    environ = {**os.environ, "PATH": _PATH}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, input="")
    assert done.returncode == 0, f"{command}: {done.stderr}"


def main() -> int:
    """Make hosts, and run a command on the first: ``python tests/kit/hosts.py --rate 1gbit 2 ddprun -H h1,h2 ...``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("count", type=int, help="number of hosts: h1, h2, ...")
    parser.add_argument("--rate", help="of each host's link, in tc's words: 200mbit; unlimited by default")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run on h1 (default: a shell)")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    with HostBed(arguments.count) as bed:
        for host in bed.hosts if arguments.rate else ():
            bed.set_rate(host, arguments.rate)
        first = bed.hosts[0]
        environ = {**os.environ, **first.environ()}
        return subprocess.run(first.command(*arguments.command or ["bash"], cwd=Path.cwd()), env=environ).returncode


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    sys.exit(main())
