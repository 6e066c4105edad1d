"""Which nodes, and how many processes on each: every spelling that people have, and what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.hosts import NodePlan, parse_hostfile, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4,node2:4", [NodePlan("node1", "4"), NodePlan("node2", "4")]),
        ("node1, node2", [NodePlan("node1"), NodePlan("node2")]),
        ("ann@node1:2,10.0.0.2", [NodePlan("ann@node1", "2"), NodePlan("10.0.0.2")]),
        (
            "[fe80::1%eth0]:2,[::1],ann@[::2]:8",
            [NodePlan("fe80::1%eth0", "2"), NodePlan("::1"), NodePlan("ann@::2", "8")],
        ),
    ],
)
def test_hosts_of_the_command_line(text: str, expected: list[NodePlan]) -> None:
    """`-H` and host files take Open MPI's, DeepSpeed's and MPICH's spellings."""
    assert parse_hosts(text) == expected


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
        NodePlan("node1", "4"),
        NodePlan("node2", "2"),
        NodePlan("node3", "3"),
        NodePlan("node4"),
        NodePlan("node5", "1", "/opt/py/bin/python3", "/data/my job"),
    ]


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
        assert hosts and all(host.host and not host.host.startswith("-") for host in hosts)
        assert all(not host.processes or int(host.processes) > 0 for host in hosts)
