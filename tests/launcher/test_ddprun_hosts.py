"""``ddprun`` over real ssh between real hosts: what it starts, by which way, and what nobody else may see or do."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from jobs import DDPRUN, LIMIT, PLAIN, STAY, Run, ddprun, kill_on, of_job, on_hosts, wait_until, write
from kit.hosts import HostBed
from kit.machine import Slowness
from kit.paths import ROOT
from test_ddprun_here import ECHO, NASTY

from ddp_callbacks.launcher.facts import usable_cores
from ddp_callbacks.launcher.remote import as_hex

pytestmark = on_hosts("starts")

# --- the start --------------------------------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PROBE"]
print(json.dumps([os.uname().nodename, {name: os.environ.get(name) for name in names}]))
"""


@pytest.mark.cold
def test_ranks_follow_the_order_of_the_hosts_and_share_one_address(bed: HostBed, tmp_path: Path) -> None:
    """Ranks follow the order of the hosts."""
    h1, _, h3 = bed.hosts
    flags = ["-H", "h3:2,h1:1,h2:1", "--show-ranks", "all", "-x", "PROBE=a b"]
    done = ddprun(*flags, write(tmp_path, SHOW), cwd=tmp_path, host=h1)
    assert done.returncode == 0, done.stderr
    lines = dict(re.fullmatch(r"\[(\w+:\d)\] (.*)", line).groups() for line in done.stdout.splitlines())  # type: ignore[union-attr]
    assert sorted(lines) == ["h1:2", "h2:3", "h3:0", "h3:1"]
    for label, text in lines.items():
        host, variables = json.loads(text)
        assert label == f"{host}:{variables['RANK']}"
        assert variables == {
            "RANK": label[-1],
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1" if label == "h3:1" else "0",
            "MASTER_ADDR": h3.address,
            "OMP_NUM_THREADS": str(max(1, usable_cores() // (2 if host == "h3" else 1))),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PROBE": "a b",
        }


def test_what_sets_up_a_library_here_is_alike_on_all_nodes(bed: HostBed, tmp_path: Path) -> None:
    """All nodes get variables of `-x` and of libraries."""
    script = write(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('NCCL_DEBUG'))")
    variables = {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "a 'b'"}
    flags = ["-H", "h1:1,h2:1", "--show-ranks", "all"]
    done = ddprun(*flags, script, cwd=tmp_path, host=bed.hosts[0], command=PLAIN, **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[h1:0] 3 a 'b'", "[h2:1] 3 a 'b'"]


AGAIN = """
import os, time
rank, attempt, host = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.uname().nodename
print("up", rank, "on", host, "attempt", attempt, flush=True)
open(f"up-{rank}-{attempt}", "w").close()
while attempt == "0":
    time.sleep(0.05)
    if host == "h1" and all(os.path.exists(f"up-{rank}-0") for rank in range(3)):
        raise ValueError("at first")
"""


@pytest.mark.cold
def test_rank_0_is_on_the_first_host_also_after_a_restart(bed: HostBed, tmp_path: Path) -> None:
    # h2 is the first here, although its address is not.
    flags = ["-H", "h2:1,h3:1,h1:1", "--max-restarts", "1", "--show-ranks", "all", "--no-prefix"]
    done = ddprun(*flags, write(tmp_path, AGAIN), cwd=tmp_path, host=bed.hosts[0])
    assert done.returncode == 0, done.stderr
    hosts = enumerate(["h2", "h3", "h1"])
    expected = [f"up {rank} on {host} attempt {attempt}" for rank, host in hosts for attempt in (0, 1)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.cold
def test_the_pbs_script_of_the_docs_trains_on_the_hosts_of_its_job(bed: HostBed, tmp_path: Path) -> None:
    """In a PBS or Slurm job, `ddprun` takes its nodes."""
    # As PBS runs it: on the first host alone, with a host file that names a host once for each of its processes.
    (tmp_path / "nodes").write_text("h1\nh1\nh2\nh2\n")
    host = bed.hosts[0]
    environ = host.environ(
        PBS_ENVIRONMENT="PBS_BATCH",
        PBS_JOBID="12.server",
        PBS_NODEFILE=str(tmp_path / "nodes"),
        PBS_O_WORKDIR=str(tmp_path),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        SCRIPT=f"{ROOT / 'examples' / 'digits' / 'train.py'} --epochs 1",
    )
    done = host.run("bash", str(ROOT / "examples" / "jobs" / "ddp.pbs"), environ=environ, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert re.search("^ddprun: h2: ranks 2-3, 1 thread each, interface eth0$", done.stderr, re.M)
    assert "4 processes hold equal parameters" in done.stdout


def test_arguments_values_and_folders_of_any_bytes_arrive_unchanged(bed: HostBed, tmp_path: Path) -> None:
    folder = tmp_path / "a 'folder' $HOME; \n\udcff"
    folder.mkdir()
    drawn = random.Random(7)
    words = [os.fsdecode(bytes(drawn.choices(range(1, 256), k=drawn.randint(0, 30)))) for _ in range(200)]
    arguments, value = [*NASTY, *words, "-H", "h3", "--", "--lr=1"], "".join([*NASTY, *words])
    flags = [
        "-H",
        "h1:1,h2:1",
        "--show-ranks",
        "all",
        "--no-prefix",
        "-x",
        f"PROBE={value}",
        "--log-dir",
        str(tmp_path),
    ]
    script = write(folder, ECHO, "it's a script\udcfe.py")
    done = ddprun(*flags, script, *arguments, cwd=folder, host=bed.hosts[0], command=PLAIN)
    assert done.returncode == 0, done.stderr
    expected = [[as_hex(word) for word in arguments], as_hex(value), as_hex(str(folder))]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2


# --- with fewer hosts -------------------------------------------------------------------------------------------------


@pytest.mark.cold
def test_an_elastic_run_does_not_wait_for_a_node_that_was_not_there(bed: HostBed, tmp_path: Path) -> None:
    flags = ["-H", "h1:1,nowhere:1", "--nnodes", "1:2"]
    with Slowness() as slowness:
        done = ddprun(*flags, write(tmp_path, SHOW), cwd=tmp_path, host=bed.hosts[0])
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ddprun: continuing without nowhere: unknown host ")
    assert slowness.took < 12 * slowness.factor  # much less than the 30 s for which torchrun waits for late nodes


@pytest.mark.cold
def test_an_elastic_run_goes_on_without_an_agent_that_was_killed(bed: HostBed, tmp_path: Path) -> None:
    flags = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1", "--show-ranks", "all"]
    argv = ["-H", "h1:1,h2:1", *flags, write(tmp_path, STAY)]
    with Run(tmp_path, *argv, host=bed.hosts[0], command=DDPRUN) as run:
        run.await_text("up ", 2)
        kill_on(bed.hosts[1], "launcher.agent")
        run.await_text("continuing without it")
        run.await_text("up 0", 2)
        run.signal(signal.SIGINT)
        assert run.end() == 130


# --- what others see, and can do --------------------------------------------------------------------------------------

LISTENERS = """
import os, subprocess
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(subprocess.run(["ss", "-tlnH"], capture_output=True, text=True).stdout)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.cold
@pytest.mark.parametrize("flags", [[], ["--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1"]])
def test_nothing_listens_on_all_interfaces(bed: HostBed, tmp_path: Path, flags: list[str]) -> None:
    """Nothing listens on all interfaces."""
    h1 = bed.hosts[0]
    done = ddprun("-H", "h1:1,h2:1", "--no-prefix", *flags, write(tmp_path, LISTENERS), cwd=tmp_path, host=h1)
    assert done.returncode == 0, done.stderr
    addresses = {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines() if "LISTEN" in line}
    assert addresses == {h1.address}


def test_no_argument_or_value_stands_on_a_command_line_of_ssh(bed: HostBed, tmp_path: Path) -> None:
    """No ssh command line shows an argument or value."""
    argv = ["-H", "h1:1,h2:1", "-x", "SECRET=value-7", write(tmp_path, STAY), "argument-7"]
    with Run(tmp_path, *argv, host=bed.hosts[0]) as run:
        run.await_text("up")
        lines = "".join(line for host in bed.hosts for line in host.processes().values() if "script.py" not in line)
        run.signal(signal.SIGTERM)
        assert run.end() == 143
    assert "sys.stdin.buffer" in lines and "argument-7" not in lines and "value-7" not in lines


STRANGER = """
import base64, os, pickle, sys, time
from torch.distributed import TCPStore
class Run:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[1],)
store = TCPStore("10.83.0.1", 29611, is_master=False, wait_for_workers=False)
for _ in range(20):
    store.set("torch.rendezvous.none", base64.b64encode(b"x" * 32 + pickle.dumps(Run())).decode())
    store.set("torch.rendezvous.none", base64.b64encode(pickle.dumps(Run())).decode())
    store.set("none/1/here/1", pickle.dumps(Run()))
    time.sleep(0.1)
"""


@pytest.mark.cold
def test_what_a_stranger_writes_to_the_store_is_not_run(bed: HostBed, tmp_path: Path) -> None:
    """Nothing runs what a stranger writes to the store."""
    h1, h2, h3 = bed.hosts
    elastic = ["-H", "h1:1,h2:1", "--max-restarts", "1", "--master-port", "29611", "--show-ranks", "all"]
    with Run(tmp_path, *elastic, write(tmp_path, STAY), host=h1, command=DDPRUN) as run:
        run.await_text("up ", 2)
        h3.run(sys.executable, "-c", STRANGER, str(tmp_path / "owned"), timeout=LIMIT)
        kill_on(h2, "script.py")
        run.await_text("up ", 4)  # they meet again all the same
        run.signal(signal.SIGINT)
        assert run.end() == 130
    assert not (tmp_path / "owned").exists()


# --- another command than ssh -----------------------------------------------------------------------------------------


@pytest.fixture
def enter(bed: HostBed, tmp_path: Path) -> str:
    """A program that leads from this machine, which is none of the hosts, to one of them."""
    lines = "".join(f"    {host.name}) pid={host.pid} ;;\n" for host in bed.hosts)
    environ = "env -i HOME=/root PATH=$PATH SSH_CONNECTION='10.9.9.9 1 10.9.9.9 22'"
    namespaces = 'nsenter -t "$pid" -n -u -m -p --wdns=/ --'
    program = tmp_path / "enter"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{lines}esac\nshift\nexec {environ} {namespaces} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_a_plain_command_takes_ssh_s_place(bed: HostBed, tmp_path: Path, enter: str) -> None:
    """Any command with a pipe replaces ssh."""
    # The address at which the nodes meet is found without ssh; what SSH_CONNECTION says there is somebody else's.
    flags = ["-H", "h1:1,h2:2", "--rsh", f"{enter} {{host}}", "--show-ranks", "all", "-x", "PROBE=a b"]
    done = ddprun(*flags, write(tmp_path, SHOW), cwd=tmp_path, command=PLAIN)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert sorted((variables["RANK"], host) for host, variables in found) == [("0", "h1"), ("1", "h2"), ("2", "h2")]
    assert {variables["MASTER_ADDR"] for _, variables in found} == {bed.hosts[0].address}
    assert {variables["PROBE"] for _, variables in found} == {"a b"}


def test_a_job_that_a_plain_command_has_started_ends_with_a_signal_or_the_command(
    bed: HostBed, tmp_path: Path, enter: str
) -> None:
    flags = ["-H", "h1:1,h2:1", "--rsh", enter, "--show-ranks", "all", write(tmp_path, STAY), "deaf"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        with Run(tmp_path, *flags) as run:
            run.await_text("up", 2)
            with Slowness() as slowness:
                run.signal(number)
                wait_until(lambda: not of_job(*bed.hosts))
            assert slowness.took < 5 * slowness.factor


@pytest.mark.cold
def test_the_doctor_looks_at_nodes_that_a_plain_command_reaches(bed: HostBed, tmp_path: Path, enter: str) -> None:
    done = ddprun("doctor", "--json", "-H", "h1,h2", "--rsh", enter, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)["findings"]
    (h1, h2) = [finding["text"] for finding in found if finding["check"] == "reached"]
    assert h1.startswith("by enter, ") and h2.startswith("by enter, ")
    addresses = [finding["text"] for finding in found if finding["check"] == "address"]
    assert addresses == [f"{host.address} (eth0)" for host in bed.hosts[:2]]
