"""``ddprun`` over real ssh between real hosts: what it starts, by which way, and what nobody else may see or do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from jobs import LIMIT, NASTY, STAY, Run, ddprun, on_hosts, signal_on, write
from kit.hosts import HostBed
from kit.machine import Slowness

from ddp_callbacks.launcher.facts import usable_cores

pytestmark = on_hosts("starts")

# --- the start --------------------------------------------------------------------------------------------------------

# The rank of h1 fails at first, once all are up.
SHOW = """
import json, os, sys, time
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PROBE"]
names += ["NCCL_DEBUG", "TORCHELASTIC_RESTART_COUNT"]
found = {name: os.environ.get(name) for name in names} | {"words": sys.argv[1:]}
print(json.dumps([os.uname().nodename, found]), flush=True)
rank, again = found["RANK"], found["TORCHELASTIC_RESTART_COUNT"] != "0" or "once" in sys.argv
open(f"up-{rank}", "w").close()
while not again:
    time.sleep(0.05)
    if rank == "2" and all(os.path.exists(f"up-{rank}") for rank in range(4)):
        raise ValueError("at first")
"""


def test_ranks_follow_the_order_of_the_hosts_also_after_a_restart(bed: HostBed, tmp_path: Path) -> None:
    """Ranks follow the order of the hosts, and get arguments and variables of any bytes."""
    (h1, _, h3), value = bed.hosts, os.fsdecode(os.fsencode("".join(NASTY)))
    flags = ["-H", "h3:2,h1:1,h2:1", "--max-restarts", "1", "--show-ranks", "all", "-x", f"PROBE={value}"]
    done = ddprun(*flags, write(tmp_path, SHOW), *NASTY, cwd=tmp_path, host=h1, NCCL_DEBUG="a 'b'")
    assert done.returncode == 0, done.stderr
    found = [re.fullmatch(r"\[(\w+:\d)\] (.*)", line).groups() for line in done.stdout.splitlines()]  # type: ignore[union-attr]
    expected = [(label, attempt) for label in ("h1:2", "h2:3", "h3:0", "h3:1") for attempt in "01"]
    assert sorted((label, json.loads(text)[1]["TORCHELASTIC_RESTART_COUNT"]) for label, text in found) == expected
    for label, text in found:
        host, variables = json.loads(text)
        del variables["TORCHELASTIC_RESTART_COUNT"]
        assert label == f"{host}:{variables['RANK']}"
        assert variables == {
            "RANK": label[-1],
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1" if label == "h3:1" else "0",
            "MASTER_ADDR": h3.address,
            "OMP_NUM_THREADS": str(max(1, usable_cores() // (2 if host == "h3" else 1))),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PROBE": value,
            "words": NASTY,
            "NCCL_DEBUG": "a 'b'",
        }


def test_restarts_are_those_of_the_job_not_of_each_host(bed: HostBed, tmp_path: Path) -> None:
    flags = ["-H", "h1:1,h2:1", "--max-restarts", "1"]
    done = ddprun(*flags, write(tmp_path, "raise SystemExit(3)"), cwd=tmp_path, host=bed.hosts[0])
    assert (done.returncode, re.findall("restart .*", done.stderr)) == (3, ["restart 1 of 1"] * 2), done.stderr


# --- with fewer hosts -------------------------------------------------------------------------------------------------


def test_an_elastic_run_does_not_wait_for_a_node_that_was_not_there(bed: HostBed, tmp_path: Path) -> None:
    flags = ["-H", "h1:1,nowhere:1", "--nnodes", "1:2"]
    with Slowness() as slowness:
        done = ddprun(*flags, write(tmp_path, SHOW), "once", cwd=tmp_path, host=bed.hosts[0])
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("ddprun: continuing without nowhere: unknown host ")
    assert slowness.took < 12 * slowness.factor


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


@pytest.mark.parametrize("flags", [[], ["--nnodes", "1:2"]])
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


def test_what_a_stranger_writes_to_the_store_is_not_run(bed: HostBed, tmp_path: Path) -> None:
    """Nothing runs what a stranger writes to the store."""
    h1, h2, h3 = bed.hosts
    elastic = ["-H", "h1:1,h2:1", "--max-restarts", "1", "--master-port", "29611", "--show-ranks", "all"]
    with Run(tmp_path, *elastic, write(tmp_path, STAY), host=h1) as run:
        run.await_text("up ", 2)
        h3.run(sys.executable, "-c", STRANGER, str(tmp_path / "owned"), timeout=LIMIT)
        signal_on(h2, "script.py")
        run.await_text("up ", 4)  # they meet again all the same
        run.signal(signal.SIGINT)
        assert run.end() == -signal.SIGINT
    assert not (tmp_path / "owned").exists()


# --- another command than ssh -----------------------------------------------------------------------------------------


def test_a_plain_command_takes_ssh_s_place(bed: HostBed, tmp_path: Path, enter: str) -> None:
    """Any command with a pipe replaces ssh."""
    # The address at which the nodes meet is found without ssh; what SSH_CONNECTION says there is somebody else's.
    flags = ["-H", "h1:1,h2:2", "--rsh", f"{enter} {{host}}", "--show-ranks", "all", "-x", "PROBE=a b"]
    done = ddprun(*flags, write(tmp_path, SHOW), "once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert sorted((variables["RANK"], host) for host, variables in found) == [("0", "h1"), ("1", "h2"), ("2", "h2")]
    assert {variables["MASTER_ADDR"] for _, variables in found} == {bed.hosts[0].address}
    assert {variables["PROBE"] for _, variables in found} == {"a b"}
