"""Hosts for the tests of the launcher: one bed for all of a worker that do not break it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from jobs import of_job
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
