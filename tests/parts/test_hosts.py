"""Which nodes, and how many processes on each: every spelling that people have, and what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.hosts import Host, parse_hostfile, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4,node2:4", [Host("node1", 4), Host("node2", 4)]),
        ("node1, node2", [Host("node1"), Host("node2")]),
        ("ann@node1:2,10.0.0.2", [Host("ann@node1", 2), Host("10.0.0.2")]),
        ("[fe80::1%eth0]:2,[::1],ann@[::2]:8", [Host("fe80::1%eth0", 2), Host("::1"), Host("ann@::2", 8)]),
    ],
)
def test_hosts_of_the_command_line(text: str, expected: list[Host]) -> None:
    """`-H` and host files take Open MPI's, DeepSpeed's and MPICH's spellings."""
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "-H : '' is not a host. Write HOST or HOST:SLOTS"),
        ("node1,,node2", "'' is not a host"),
        ("node1:4,node1:2", "node1 is named twice. Name it once, with all its slots"),
        ("node1:0", "the slots of node1 must be a number of at least 1, got '0'"),
        ("node1:-2", "at least 1, got '-2'"),
        ("node1:", "at least 1, got ''"),
        ("node1:four", "at least 1, got 'four'"),
        ("node1:²", "at least 1, got '²'"),
        ("fe80::1", "write an IPv6 address in brackets, got 'fe80::1': [fe80::1]"),
        ("-oProxyCommand=evil", "'-oProxyCommand=evil' is not a host"),
        ("node1;reboot", "'node1;reboot' is not a host"),
        ("$(reboot)", "is not a host"),
        ("node 1", "'node 1' is not a host"),
    ],
)
def test_a_wrong_host_is_named_with_the_rule(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_hosts(text)
    assert says in str(caught.value)


HOSTFILE = """
# Open MPI and DeepSpeed
node1 slots=4
node2 slots=2 max_slots=8   # the old one
node3:3

node4
node5 slots=1 python=/opt/py/bin/python3 chdir='/data/my job'
"""


def test_a_host_file_in_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(HOSTFILE)
    assert read_hostfile(str(path)) == [
        Host("node1", 4),
        Host("node2", 2),
        Host("node3", 3),
        Host("node4"),
        Host("node5", 1, "/opt/py/bin/python3", "/data/my job"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "hosts: no host given"),
        ("# nothing\n\n", "hosts: no host given"),
        ("node1 slots=4\nnode2 slot=4", "hosts, line 2: cannot parse 'slot=4'. Write HOST slots=N"),
        ("node1 4", "hosts, line 1: cannot parse '4'"),
        ("node1 slots=", "hosts, line 1: cannot parse 'slots='"),
        ("\nnode1 slots=no", "hosts, line 2: the slots of node1 must be a number of at least 1, got 'no'"),
        ("node1:2 slots=4", "hosts, line 1: slots is given twice"),
        ("node1 slots=4 slots=4", "hosts, line 1: slots is given twice"),
        ("node1\nnode2\nnode1 slots=2", "hosts: node1 is named twice"),
        ("node1 chdir='/data", 'hosts, line 1: No closing quotation: "node1 chdir=\'/data"'),
    ],
)
def test_a_broken_host_file_is_an_error_with_the_line(text: str, says: str) -> None:
    """An error names a wrong host and its line."""
    with pytest.raises(ConfigurationError) as caught:
        parse_hostfile(text, "hosts")
    assert says in str(caught.value)


def test_a_host_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the host file .*none: .*No such file"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"cannot read the host file .*binary: "):
        read_hostfile(str(tmp_path / "binary"))


@given(st.text(max_size=40))
def test_any_text_is_hosts_that_ssh_cannot_take_for_options_or_one_error(text: str) -> None:
    """ssh takes no host name for an option."""
    for parse in (parse_hosts, lambda text: parse_hostfile(text, "hosts")):
        try:
            hosts = parse(text)
        except ConfigurationError:
            continue
        assert hosts and all(host.name and not host.name.startswith("-") for host in hosts)
        assert all(host.slots is None or host.slots > 0 for host in hosts)
