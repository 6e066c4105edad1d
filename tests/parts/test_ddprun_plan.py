"""The command line of ``ddprun`` and what it makes of it, before anything is contacted."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import get_args_parser

from ddp_callbacks.cluster.network import own_addresses
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher import cli, connection, remote
from ddp_callbacks.launcher.connection import Connection, NodeProblem, Shared
from ddp_callbacks.launcher.flags import REFUSED
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.node import binding
from ddp_callbacks.launcher.options import is_this_machine, parse_options, working_directory
from ddp_callbacks.launcher.plan import describe, starts
from ddp_callbacks.launcher.remote import SHELL, command_to, ssh_command


def plan(*argv: str, environ: dict[str, str] | None = None) -> Job:
    return parse_options(argv, environ or {}, lambda name: name in ("localhost", "here"))


def test_without_hosts_it_is_this_machine() -> None:
    """Without hosts, `ddprun` runs here, in your folder."""
    made = plan("train.py", "--lr", "0.1", "-H", "theirs")
    (node,) = made.nodes
    assert (node.is_here, node.processes, node.python, node.cwd) == (True, "", sys.executable, os.getcwd())
    assert (made.min_nodes, made.script) == (1, "train.py")
    assert made.command == ["train.py", "--lr", "0.1", "-H", "theirs"]


def test_a_flag_of_the_script_may_look_like_the_beginning_of_ours() -> None:
    # torchrun refuses it: --logs could be --logs-specs or --logs_specs.
    command = ["train.py", "--logs", "a", "--node", "b"]
    assert plan("--dry-run", *command).command == command


def test_hosts_come_in_their_order_with_their_processes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nme@b:2 python=/b/python\nhere chdir=/there  # a comment\n")
    made = plan("--hostfile", str(hosts), "--python", "/p", "--chdir", "/c", "train.py")
    assert [
        (node.name, node.host, node.is_here, node.rank, node.processes, node.python, node.cwd) for node in made.nodes
    ] == [
        ("a", "a", False, 0, "4", "/p", "/c"),
        ("b", "me@b", False, 1, "2", "/b/python", "/c"),
        ("here", "here", True, 2, "", "/p", "/there"),
    ]
    hosts.write_text("\ufeffa\r\na\r\nb\r\n")  # a line for each slot, as in PBS_NODEFILE; of an editor of Windows
    assert [(node.host, node.processes) for node in plan("--hostfile", str(hosts), "t.py").nodes] == [
        ("a", "2"),
        ("b", "1"),
    ]
    assert plan("--chdir", "sub", "t.py").nodes[0].cwd == f"{os.getcwd()}/sub"
    assert [node.processes for node in plan("-H", "a:4,b", "--nproc-per-node", "3", "x.py").nodes] == ["3", "3"]


def test_the_hosts_of_a_job_are_used(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")
    made = plan("train.py", environ={"PBS_NODEFILE": str(nodes)})
    assert [(node.host, node.processes) for node in made.nodes] == [("n1", "2"), ("n2", "2")]
    for environ, cores in (
        ({"PBS_NODEFILE": str(nodes), "NCPUS": "4"}, [4, 4]),  # of the first chunk; the others are taken to be alike
        ({"SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_CPUS_PER_NODE": "8,2"}, [8, 2]),
        ({"SLURM_JOB_NODELIST": "n1,n2"}, [None, None]),
    ):
        assert [node.cores for node in plan("train.py", environ=environ).nodes] == cores
    assert [node.host for node in plan("-H", "other", "t.py", environ={"PBS_NODEFILE": str(nodes)}).nodes] == ["other"]


@pytest.mark.parametrize(
    ("flags", "least"), [([], 2), (["--nnodes", "2"], 2), (["--max-restarts", "3"], 2), (["--nnodes", "1:4"], 1)]
)
def test_an_elastic_job_can_do_with_fewer_nodes(flags: list[str], least: int) -> None:
    assert plan("-H", "a,b", *flags, "train.py").min_nodes == least


def test_the_first_node_listens_where_the_user_says() -> None:
    """The first node listens at the port that is given."""
    made = plan("-H", "a,b", "--master-addr", "f::1", "--master-port", "4000", "train.py")
    assert (made.master_addr, made.master_port) == ("f::1", 4000)


TAKEN: dict[str, tuple[str, str, object]] = {
    "nnodes": ("1:1", "min_nodes", 1),
    "nproc_per_node": ("3", "", None),
    "max_restarts": ("2", "max_restarts", 2),
    "shutdown_timeout": ("7", "shutdown_timeout", 7),
    "standalone": ("", "", None),
    "module": ("", "command", ["-m", "train.py"]),
    "no_python": ("", "no_python", True),
    "log_dir": ("there", "log_dir", "there"),
    "master_addr": ("a", "master_addr", "a"),
    "master_port": ("4000", "master_port", 4000),
}


def test_every_flag_of_torchrun_has_its_meaning_or_is_refused_by_name() -> None:
    """`ddprun` takes torchrun's flags, or says what to do instead."""
    # Each with each of its spellings, as torchrun's own parser reads them.
    for action in (action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"):
        for spelling in action.option_strings:
            if action.dest not in TAKEN:
                with pytest.raises(ConfigurationError, match=rf"^ddprun has no {spelling}: \w"):
                    plan(spelling, "x", "train.py")
                with pytest.raises(ConfigurationError, match=rf"^ddprun has no {spelling}: \w"):
                    plan(f"{spelling}=x", "train.py")
                continue
            value, name, expected = TAKEN[action.dest]
            made = plan(spelling, *([value] if value else []), "train.py")
            assert not name or getattr(made, name) == expected, spelling
    assert {"-n", "-np"} < REFUSED.keys()


def test_no_flag_has_its_default_from_a_variable_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {f"PET_{name.upper()}": value or "1" for name, (value, _, _) in TAKEN.items()}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert vars(plan("t.py", environ=theirs)) == vars(plan("t.py"))


def test_ranks_get_every_variable_that_torchrun_sets() -> None:
    """Ranks get every variable that torchrun sets."""
    place = {"processes": 2, "cores": 4, "interface": "eth0", "package": "/p"}
    (told,) = starts(plan("t.py"), [(plan("t.py").nodes[0], place)], ("127.0.0.1", 29500))
    theirs = set(re.findall(r'"([A-Z]\w+)":', inspect.getsource(LocalElasticAgent._start_workers)))
    of_one_rank = {"RANK", "LOCAL_RANK", "ROLE_RANK"}  # which the node's program adds
    assert {"WORLD_SIZE", "TORCHELASTIC_RUN_ID"} < theirs <= {*told.environ, *told.defaults, *of_one_rank}
    assert told.ranks == [0, 1]


def test_variables_are_given_by_name_or_value_and_torchruns_own_always() -> None:
    environ = {"TOKEN": "a=b c", "OTHER": "x"}
    made = plan("-x", "TOKEN", "-x", "LR=0.1=", "-x", "E=", "t.py", environ=environ)
    assert made.environ == {"TOKEN": "a=b c", "LR": "0.1=", "E": ""}
    some = {"WANDB_MODE": "offline", "WANDB_DIR": "/w", "OTHER": "x"}
    assert plan("-x", "WANDB_*", "t.py", environ=some).environ == {"WANDB_MODE": "offline", "WANDB_DIR": "/w"}
    assert made.forwarded == {}


def test_what_sets_up_the_libraries_here_is_given_to_all_nodes() -> None:
    # But which GPUs a program sees is a matter of each node.
    settings = {
        "GLOO_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "/x",
        "DDP_CALLBACKS_SHARED_MEMORY": "0",
    }
    devices = {"CUDA_VISIBLE_DEVICES": "0,1"}
    environ = {**settings, **devices, "HOME": "/root", "PATH": "/bin", "TORCHELASTIC_RUN_ID": "7", "AWS_SECRET": "s"}
    made = plan("-H", "a,b", "t.py", environ=environ)
    assert (made.environ, made.forwarded) == ({}, settings)
    assert plan("-x", "CUDA_VISIBLE_DEVICES", "t.py", environ=environ).environ == devices
    names = "DDP_CALLBACKS_SHARED_MEMORY GLOO_SOCKET_IFNAME OMP_NUM_THREADS PYTHONPATH"
    assert describe(made).count(f"  forwarded   {names}\n") == 2


@pytest.mark.parametrize(("threads", "left"), [("4", None), ("2", "2")])
def test_the_threads_that_pbs_sets_are_no_choice_of_the_user(
    threads: str, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PBS_JOBID": "7", "NCPUS": "4", "OMP_NUM_THREADS": threads}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["ddprun", "--dry-run", "t.py"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert os.environ.get("OMP_NUM_THREADS") == left


@pytest.mark.parametrize("help_says", ["", "--external-launcher[=args]"])
def test_in_slurm_srun_reaches_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_says: str) -> None:
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\necho '{help_says}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    external = ("--external-launcher",) if help_says else ()
    words = ("srun", *external, "--overlap", "--mpi=none", "--cpu-bind=none", "-N1", "-n1", "-w", "b")
    for flags in ([], ["--rsh", "srun"]):
        assert plan(*flags, "t.py", environ=job).nodes[1].rsh == words
    assert plan("-H", "a,b", "t.py", environ=job).nodes[1].rsh is None
    shows = "Nodes=a CPU_IDs=0-3 Mem=0 GRES=gpu:a100:3(IDX:0-2)\n Nodes=b CPU_IDs=0-3 Mem=0 GRES=gpu:2(IDX:0-1)"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '   JOB_GRES=gpu:5\n {shows}'\n")
    scontrol.chmod(0o755)
    made = plan("t.py", environ=job | {"SLURM_GPUS_PER_TASK": "1"})
    asked = [word for node in made.nodes for word in node.rsh or () if "gpus" in word]
    assert asked == ["--gpus-per-node=3", "--gpus-per-node=2"]


def test_srun_takes_no_flag_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CONF": "/c", "SLURM_JWT": "s", "WANDB_MODE": "off"}
    flags = ("SLURM_LABELIO", "SLURM_STDOUTMODE", "SRUN_CPUS_PER_TASK", "SLURM_EXPORT_ENV", "SLURM_GPU_BIND")
    for name, value in (kept | dict.fromkeys(flags, "1")).items():
        monkeypatch.setenv(name, value)
    node = NodePlan("b", rsh=("/opt/slurm/bin/srun", "-w", "b"))
    given = {name: value for name, value in remote.environ_to(node).items() if name in (*kept, *flags)}
    assert given == kept
    assert remote.environ_to(replace(node, is_here=True)).keys() >= {*flags}
    made = plan("t.py", environ={"SLURM_CPUS_PER_TASK": "4"})
    assert made.forwarded == {"SLURM_CPUS_PER_TASK": "4"}  # which scripts read


UNREAD = {
    "PE_HOSTFILE": "n1.cluster 4 all.q@n1 UNDEFINED\nn2.cluster 2 all.q@n2 UNDEFINED\n",
    "OAR_NODEFILE": "n1.cluster\nn1.cluster\nn2.cluster\n",
}


@pytest.mark.parametrize("name", UNREAD)
def test_jobs_of_schedulers_that_are_not_read_do_not_start_on_one_host(tmp_path: Path, name: str) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text(UNREAD[name])
    with pytest.raises(
        ConfigurationError, match=rf"^{name}=.*: this scheduler's jobs are not read\. .* -H n1.cluster,n2.cluster\."
    ):
        plan("t.py", environ={name: str(nodes)})
    assert len(plan("-H", "a,b", "t.py", environ={name: str(nodes)}).nodes) == 2
    nodes.write_text(UNREAD[name].partition("\n")[0])
    assert len(plan("t.py", environ={name: str(nodes)}).nodes) == 1


def test_a_heterogeneous_job_is_named_not_half_started() -> None:
    with pytest.raises(ConfigurationError, match=r"^SLURM_HET_SIZE=2: .* srun --het-group=0,1 python train\.py; or"):
        plan("t.py", environ={"SLURM_JOB_NODELIST": "a", "SLURM_HET_SIZE": "2"})


def test_cores_are_dealt_out_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--bind` gives ranks cores of their own."""
    write_system(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1, 9)))
    monkeypatch.setattr(binding, "_core", lambda thread: thread % 4)  # 1 and 5 are threads of a core
    for kind, ranks, cores in (
        ("none", 2, [set(range(1, 9))] * 2),
        ("core", 2, [{1, 2, 3}, {4, 5, 6, 7}]),
        ("numa", 2, [{1, 2, 3}, {4, 5, 6, 7}]),
        ("numa", 1, [{1, 2, 3}]),
        ("core", 8, [{1}, {1}, {2}, {3}, {4}, {5}, {6}, {7}]),
    ):
        assert binding.cores_of_ranks(kind, ranks, None, str(tmp_path)) == (cores, ""), (kind, ranks)
    assert binding.cores_of_ranks("core", 2, None, "/no/numa")[0] == [{8, 4, 1, 5}, {2, 6, 3, 7}]
    four = "0 | 1-2,7 | 3 | 4"
    assert binding.describe_cores([{0}, {1, 2, 7}, {3}, {4}], "") == f"on cores {four}"
    many = [*({core} for core in range(9)), {0, 1}]
    shown = "on cores 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | ... | 0-1, which ranks share, why"
    assert binding.describe_cores(many, "why") == shown
    assert "  binding     core\n" in describe(plan("--bind", "core", "t.py"))


@pytest.mark.parametrize(
    ("ranks", "visible", "cores", "says"),
    [
        (4, None, [{4, 5}, {6, 7}, {0, 1}, {2, 3}], "on the NUMA nodes 1, 1, 0, 0 of their GPUs"),
        (2, None, [{4, 5}, {6, 7}], "on the NUMA nodes 1, 1 of their GPUs"),
        (2, "3, 0", [{0, 1, 2, 3}, {4, 5, 6, 7}], "on the NUMA nodes 0, 1 of their GPUs"),
        (2, "GPU-a,GPU-b", [{0, 1, 2, 3}, {4, 5, 6, 7}], "on NUMA nodes in turn: /sys doesn't tell those of the GPUs"),
        (1, "4", [{0, 1, 2, 3}], "on NUMA nodes in turn: /sys doesn't tell those of the GPUs"),
        (5, None, [{0}, {1, 2}, {3}, {4, 5}, {6, 7}], ""),  # they do not have a GPU each
        (2, "", [{0, 1, 2, 3}, {4, 5, 6, 7}], ""),
    ],
)
def test_a_rank_is_bound_to_the_numa_node_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, visible: str | None, cores: list[set[int]], says: str
) -> None:
    gpus = {"0000:04:00.0": "1\n", "0000:0A:00.0": "1\n", "0000:8a:00.0": "0\n", "0000:8b:00.0": "0\n"}
    write_system(tmp_path, **gpus, **({"0000:8c:00.0": "-1\n"} if visible == "4" else {}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(binding, "_core", lambda thread: thread)
    assert binding.cores_of_ranks("numa", ranks, visible, str(tmp_path)) == (cores, says)


def write_system(folder: Path, **gpus: str) -> None:
    """Write what /sys and /proc say of a machine with two NUMA nodes, and of NVIDIA's GPUs by their addresses."""
    files = {f"sys/devices/system/node/{node}/cpulist": f"{cores}\n" for node, cores in CORES.items()}
    files |= {f"sys/bus/pci/devices/{address.lower()}/numa_node": node for address, node in gpus.items()}
    for name, text in (files | {f"proc/driver/nvidia/gpus/{address}/information": "" for address in gpus}).items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)


CORES = {"node0": "0-3", "node1": "4-7"}


def test_a_set_up_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SETUP_TIMEOUT", 0.0)

    async def start() -> None:
        node = Connection(replace(plan("t.py").nodes[0], setup="until false; do :; done"), Shared(10.0, 0.5))
        try:
            await node.greet()
        finally:
            await node.close(0)

    with pytest.raises(NodeProblem, match=r"no answer within 0\.5 s\. Does --setup wait for something\?"):
        asyncio.run(start())


def test_python_gets_the_libraries_that_it_needs_itself(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": "/it's here", "BASH_FUNC_f%%": "() { :; }"}
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH"\n')
    python.chmod(0o755)
    for setup in ("", "true  # mine"):
        with subprocess.Popen(["env", "-i", SHELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
            assert shell.stdin is not None and shell.stdout is not None
            shell.stdin.write(remote.FIRST_LINE)
            shell.stdin.flush()
            assert shell.stdout.readline() == remote.READY + b"\n"
            said, _ = shell.communicate(
                remote.opening(NodePlan("h", python=str(python), cwd="/", setup=setup), environ)
            )
        assert said == b"/it's here\n"


def test_a_key_that_others_may_read_is_told_in_ssh_s_words() -> None:
    said = ["Permissions 0644 for '/me/key' are too open.", "me@h: Permission denied (publickey)."]
    says = "ssh does not use your key: Permissions 0644 for '/me/key' are too open. Let nobody else read it (chmod 600)"
    assert remote.explain(NodePlan("h"), 255, said) == says


def test_a_login_shell_that_ends_by_its_start_up_file_is_told() -> None:
    says = "its login shell ended with exit code 0, and ran nothing: hello. Look for exit and exec in its"
    assert remote.explain(NodePlan("h"), 0, ["hello"]).startswith(says)
    assert remote.explain(NodePlan("h"), 255, ["hello"]) == "ssh cannot reach it: hello. Try: ssh h true"


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "GH_PAT", "MYSQL_PWD", "LIGHTNING_API_KEY", "DATABASE_URL", "PL_SECRET"]
)
def test_a_secret_is_not_shown(name: str) -> None:
    """`--dry-run` hides the values of secrets."""
    text = describe(plan("-x", f"{name}=abc", "-x", "NCCL_DEBUG=INFO", "t.py"))
    assert f"  variables   {name}=... NCCL_DEBUG=INFO " in text and "abc" not in text


def test_the_description_says_what_would_run_where() -> None:
    made = plan("-H", "here:1,b:2", "-x", "OMP_A=b c", "-m", "pack.train", "--name", "it's")
    text = describe(made)
    first, second = text.split("\n\n")
    assert first.splitlines() == [
        "node 0: here",
        "  reached by  a local process",
        f"  directory   {os.getcwd()}",
        "  processes   1",
        f"""  command     {sys.executable} -u -m pack.train --name 'it'"'"'s'""",
        "  variables   'OMP_A=b c' OMP_NUM_THREADS=cores // 1 (if not set there)",
        "  rendezvous  the address of here, a free port",
    ]
    (ssh,) = [line for line in second.splitlines() if "reached by" in line]
    assert shlex.split(ssh.partition("by ")[2]) == [*ssh_command("b"), SHELL]
    assert "OMP_NUM_THREADS=cores // 2" in second


def test_ssh_is_given_the_host_and_a_shell_alone_and_checks_host_keys() -> None:
    """ssh always checks host keys."""
    *flags, dashes, host, shell = command_to(plan("-H", "me@b", "t.py").nodes[0])
    assert (flags[0], dashes, host, shell) == ("ssh", "--", "me@b", SHELL)
    assert not any("HostKey" in flag or "KnownHosts" in flag for flag in flags)
    assert "-a" in flags  # the user's ssh agent stays here


def test_this_machine_is_known_by_its_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddprun` knows this machine by names and addresses."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    known = {"node1.example.com": "127.0.1.1", "node1.lab-b.example": "192.0.2.7"}
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **more: real(known.get(host, host), *args, **more))
    names = ("localhost", "127.0.0.1", "::1", "node1", "node1.example.com", *own_addresses())
    assert all(map(is_this_machine, names))
    assert not is_this_machine("node1.lab-b.example"), "another machine of the same first name"
    assert not any(map(is_this_machine, ("192.0.2.1", "no-such-host.invalid", "node10", "me@localhost")))
    monkeypatch.setattr(socket, "gethostname", lambda: "node1.example.com")
    assert is_this_machine("node1") and not is_this_machine("node1.example.org")


def test_the_working_directory_keeps_the_name_that_the_user_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    assert working_directory({"PWD": str(tmp_path / "link")}) == str(tmp_path / "link")
    for wrong in ("", "relative", str(tmp_path), "/no/such"):
        assert working_directory({"PWD": wrong}) == str(tmp_path / "real")
    (tmp_path / "real").rmdir()
    with pytest.raises(ConfigurationError, match="the current directory was removed"):
        working_directory({"PWD": str(tmp_path / "link")})


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


def test_the_shell_that_srun_opens_is_none_of_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    for name, value in (step | {"SLURM_STEP_NODELIST": "a,b", "SLURM_PTY_PORT": "39311"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["ddprun", "--dry-run", "train.py"])
    for has_terminal, code in ((True, 0), (False, 2)):
        monkeypatch.setattr(os, "isatty", lambda _, answer=has_terminal: answer)
        with pytest.raises(SystemExit, match=str(code)):
            cli.main()
    assert "as rank 0 of 4. Start it once" in capsys.readouterr().err
