"""The command line of ``ddprun`` and what it makes of it, before anything is contacted."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ddp_callbacks.launcher import cli
from ddp_callbacks.launcher.meeting import choose_interface
from ddp_callbacks.launcher.options import parse_options, working_directory
from ddp_callbacks.launcher.plan import Here, Plan, describe, is_this_machine, make_plan
from ddp_callbacks.launcher.remote import BOOTSTRAP
from ddp_callbacks.launcher.ways import command_to, ssh_command


def plan(*argv: str, environ: dict[str, str] | None = None) -> Plan:
    options = parse_options(argv, environ or {})
    return make_plan(options, Here("/opt/python", "/work", lambda name: name in ("localhost", "here")))


def test_without_hosts_it_is_this_machine() -> None:
    """Without hosts, `ddprun` runs here, in your folder."""
    made = plan("train.py", "--lr", "0.1", "-H", "theirs")
    (node,) = made.nodes
    assert (node.host, node.processes, node.python, node.cwd) == (None, "", "/opt/python", "/work")
    assert (made.rendezvous, made.min_nodes, made.script) == ("fixed", 1, "train.py")
    assert made.command == ("train.py", "--lr", "0.1", "-H", "theirs")


def test_a_flag_of_the_script_may_look_like_the_beginning_of_ours() -> None:
    # torchrun refuses it: --logs could be --logs-specs or --logs_specs.
    command = ("train.py", "--logs", "a", "--node", "b")
    assert plan("--dry", *command).command == command


def test_hosts_come_in_their_order_with_their_processes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nme@b:2 python=/b/python\nhere chdir=/there  # a comment\n")
    made = plan("--hostfile", str(hosts), "--python", "/p", "--chdir", "/c", "train.py")
    assert [(node.name, node.host, node.rank, node.processes, node.python, node.cwd) for node in made.nodes] == [
        ("a", "a", 0, "4", "/p", "/c"),
        ("b", "me@b", 1, "2", "/b/python", "/c"),
        ("here", None, 2, "", "/p", "/there"),
    ]
    assert [node.processes for node in plan("-H", "a:4,b", "--nproc-per-node", "3", "x.py").nodes] == ["3", "3"]


def test_the_hosts_of_a_job_are_used(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")
    made = plan("train.py", environ={"PBS_NODEFILE": str(nodes)})
    assert [(node.host, node.processes) for node in made.nodes] == [("n1", "2"), ("n2", "2")]
    assert [node.host for node in plan("-H", "other", "t.py", environ={"PBS_NODEFILE": str(nodes)}).nodes] == ["other"]


@pytest.mark.parametrize(
    ("flags", "rendezvous", "nnodes", "min_nodes"),
    [
        (["-H", "a,b"], "fixed", "2:2", 2),
        (["-H", "a,b", "--nnodes", "2"], "fixed", "2:2", 2),
        (["-H", "a,b", "--max-restarts", "3"], "elastic", "2:2", 2),
        (["-H", "a", "--max-restarts", "3"], "fixed", "1:1", 1),
        (["-H", "a,b,c", "--nnodes", "1:4"], "elastic", "1:3", 1),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "a"], None, "2", 1),
        (["-H", "a,b", "--rdzv-backend", "etcd", "--rdzv-endpoint", "e:1"], None, "2:2", 2),
    ],
)
def test_how_the_nodes_meet(flags: list[str], rendezvous: str | None, nnodes: str, min_nodes: int) -> None:
    """Nodes meet at the first one, or at `--rdzv-endpoint`."""
    made = plan(*flags, "train.py")
    assert (made.rendezvous, made.torchrun["nnodes"], made.min_nodes) == (rendezvous, nnodes, min_nodes)


def test_a_static_endpoint_is_where_the_first_node_listens() -> None:
    """The first node listens at the port that is given."""
    for flags, address in (("--rdzv-endpoint [f::1]:4000", "f::1"), ("--master-addr n --master-port 4000", "n")):
        made = plan("-H", "a,b", *flags.split(), "train.py")
        assert (made.rendezvous, made.address, made.port) == ("fixed", address, 4000)


def values_of(action: argparse.Action) -> list[str]:
    """What to write behind a flag to try it."""
    if action.nargs == 0:
        return []
    of_their_own = {"nnodes": "1:2", "nproc_per_node": "3", "rdzv_conf": "key=value"}
    some = of_their_own.get(action.dest) or {int: "1", float: "0.5"}.get(action.type, "a,b,,c")  # type: ignore[call-overload]
    return [action.choices[0] if action.choices else some]  # type: ignore[index]


def test_every_flag_of_torchrun_is_taken_with_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddprun` takes every flag of torchrun."""
    # Each with each of its spellings and from its variable, as torchrun's own parser reads them.
    for action in (action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"):
        for spelling in action.option_strings:
            argv = [spelling, *values_of(action), "train.py"]
            ours = parse_options(argv, {})
            assert ours.torchrun[action.dest] == getattr(get_args_parser().parse_args(argv), action.dest), spelling
            assert ours.command == ("train.py",)
        (value,) = values_of(action) or ["1"]
        variable = f"PET_{action.dest.upper()}"
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            theirs = get_args_parser().parse_args(["train.py"])
        ours = parse_options(["train.py"], {variable: value})
        assert ours.torchrun[action.dest] == getattr(theirs, action.dest), variable
    defaults, ours = vars(get_args_parser().parse_args(["train.py"])), parse_options(["train.py"], {})
    differing = {name for name, value in ours.torchrun.items() if value != defaults.get(name, value)}
    assert differing <= {"master_port", "nproc_per_node"}


def test_variables_are_given_by_name_or_value_and_torchruns_own_always() -> None:
    environ = {"TOKEN": "a=b c", "PET_MAX_RESTARTS": "2", "OTHER": "x"}
    made = plan("-x", "TOKEN", "-x", "LR=0.1=", "-x", "E=", "t.py", environ=environ)
    assert made.torchrun["max_restarts"] == 2
    assert made.environ == {"TOKEN": "a=b c", "LR": "0.1=", "E": ""}
    assert made.forwarded == {"PET_MAX_RESTARTS": "2"}


def test_what_sets_up_the_libraries_here_is_given_to_all_nodes() -> None:
    # But which devices there are is for a command in ssh's place to say: srun, say.
    settings = {
        "GLOO_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "/x",
        "DDP_CALLBACKS_SHARED_MEMORY": "0",
    }
    devices = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environ = {**settings, **devices, "HOME": "/root", "PATH": "/bin", "TORCHELASTIC_RUN_ID": "7", "AWS_SECRET": "s"}
    made = plan("-H", "a,b", "t.py", environ=environ)
    assert (made.environ, made.forwarded) == ({}, {**settings, **devices})
    assert plan("-H", "a,b", "--rsh", "cat", "t.py", environ=environ).forwarded == settings
    names = "CUDA_VISIBLE_DEVICES DDP_CALLBACKS_SHARED_MEMORY GLOO_SOCKET_IFNAME OMP_NUM_THREADS PYTHONPATH"
    assert describe(made, command_to).count(f"  forwarded   {names}\n") == 2


def test_the_interface_that_is_told_is_the_one_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo takes the interface to the first node."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert choose_interface("127.0.0.1") == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert choose_interface("127.0.0.1") == "lo"


def test_the_description_says_what_would_run_where() -> None:
    made = plan("-H", "here:1,b:2", "-x", "A=b c", "-m", "pack.train", "--name", "it's")
    text = describe(made, command_to)
    first, second = text.split("\n\n")
    assert first.splitlines() == [
        "node 0: here",
        "  reached by  a local process",
        "  directory   /work",
        "  processes   1",
        """  command     /opt/python -u -m pack.train --name 'it'"'"'s'""",
        "  variables   'A=b c' OMP_NUM_THREADS=cores // 1 (if not set there)",
        "  rendezvous  the address of here, a free port",
    ]
    (ssh,) = [line for line in second.splitlines() if "reached by" in line]
    assert shlex.split(ssh.partition("by ")[2]) == ssh_command("b")
    assert "OMP_NUM_THREADS=cores // 2" in second


def test_ssh_is_given_the_host_and_the_bootstrap_alone_and_checks_host_keys() -> None:
    """ssh always checks host keys."""
    *flags, dashes, host, command = ssh_command("me@b")
    assert (flags[0], dashes, host, command) == ("ssh", "--", "me@b", BOOTSTRAP)
    assert not any("HostKey" in flag or "KnownHosts" in flag for flag in flags)


def test_this_machine_is_known_by_its_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddprun` knows this machine by names and addresses."""
    assert is_this_machine("localhost") and is_this_machine("127.0.0.1") and is_this_machine(os.uname().nodename)
    assert not is_this_machine("192.0.2.1") and not is_this_machine("no-such-host.invalid")
    assert not is_this_machine("me@localhost")  # someone else, perhaps
    meaning = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 0))]  # as on Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: meaning)
    assert is_this_machine("node1.example.com")


def test_slow_look_ups_of_names_go_on_beside_each_other_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow names delay a start only briefly."""
    # Each waits for all others; one never ends.
    monkeypatch.setattr("ddp_callbacks.launcher.plan._LOOKUP", 1.0)
    names = [f"n{number}" for number in range(32)]
    all_look, never = threading.Barrier(len(names)), threading.Event()

    def is_here(name: str) -> bool:
        all_look.wait(60)
        if name == "n7":
            never.wait()
        return name == "n3"

    options = parse_options(["-H", ",".join(names), "t.py"], {})
    begin = time.monotonic()
    made = make_plan(options, Here("python", "/work", is_here))
    assert 1.0 <= time.monotonic() - begin < 60
    never.set()
    assert [node.name for node in made.nodes if node.host is None] == ["n3"]


def test_the_working_directory_keeps_the_name_that_the_user_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    assert working_directory({"PWD": str(tmp_path / "link")}) == str(tmp_path / "link")
    for wrong in ("", "relative", str(tmp_path), "/no/such"):
        assert working_directory({"PWD": wrong}) == str(tmp_path / "real")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {"PMIX_RANK": "1"},
            r"as one of several .* \(PMIX_RANK=1\)\. Start it once, .*: env -u PMIX_RANK ddprun",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "1"}, "as rank 1 of 2. Start it once"),
    ],
)
def test_ddprun_under_a_launcher_is_refused(
    environ: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ddprun` under another launcher says how to start it."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["ddprun", "train.py"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert re.search(f"ddprun: ddprun was started {says}", capsys.readouterr().err)
