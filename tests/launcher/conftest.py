"""Hosts for the tests of the launcher: one bed for all of a worker that do not break it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import of_job, program
from kit.hosts import HostBed


@pytest.fixture(scope="session")
def session_hosts() -> Iterator[HostBed]:
    with HostBed(3) as made:
        yield made


@pytest.fixture
def bed(session_hosts: HostBed) -> Iterator[HostBed]:
    """Three hosts. Nothing of a test may stay there, nor a job's folder; what did does not harm the next one."""
    yield session_hosts
    hosts, end = session_hosts.hosts, time.monotonic() + 60
    while (left := of_job(*hosts)) and time.monotonic() < end:
        time.sleep(0.05)
    session_hosts.end_all()
    folders = [path for host in hosts for path in (host.folder / "tmp").glob("ddprun-*")]
    assert not left and not folders


@pytest.fixture
def enter(bed: HostBed, tmp_path: Path) -> str:
    """A program that leads from this machine, which is none of the hosts, to one of them."""
    lines = "".join(f"    {host.name}) pid={host.pid} ;;\n" for host in bed.hosts)
    environ = "env -i HOME=/root PATH=$PATH SSH_CONNECTION='10.9.9.9 1 10.9.9.9 22'"
    namespaces = 'nsenter -t "$pid" -n -u -m -p --wdns=/ --'
    return program(tmp_path / "enter", f'case "$1" in\n{lines}esac\nshift\nexec {environ} {namespaces} "$@"')
