"""The rank, host and exception that ``ddprun`` names, for every way in which a rank of a training run can end."""

from __future__ import annotations

import random
import re
import signal
from itertools import product
from pathlib import Path

import pytest
from jobs import Run, ddprun, on_hosts, write
from kit.hosts import Host, HostBed

# Rank 1 ends; all others have caught and printed an exception by then.
SCRIPT = """
import atexit, os, resource, signal, sys, time, traceback
import torch
from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group

what, when = sys.argv[1:]
if os.environ["RANK"] != "1":
    try: open("/no such file of another rank")
    except OSError: traceback.print_exc()

def hang():
    open("hung", "w").close()
    while True: time.sleep(1000)

def happen(now):
    if os.environ["RANK"] != "1" or now != when:
        return
    if when == "late":
        atexit.register(time.sleep, 3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "raise": raise ValueError("the data are gone")
    if what == "exit": sys.exit(7)
    if what == "abort": os.abort()
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
        bytearray(1 << 33)
    if what == "import": import no_such_module
    if what == "hang": hang()

happen("before joining")
join_process_group()
model = torch.nn.Linear(10, 10)
synchronizer = GradientSynchronizer(model)
for step in range(10):
    model(torch.ones(2, 10)).sum().backward()
    if step == 5:
        happen("step")
        happen("late")
synchronizer.close()
happen("end")
leave_process_group()
"""
FAILED = "rank 1 on {host} failed(?: with exit code"
WHAT = {
    "raise": (1, f"{FAILED} 1)?: ValueError: the data are gone"),
    # It printed nothing: if it ends late, the others tell of it.
    "exit": (7, rf"{FAILED} 7)?(?:: no exception was printed| first\. rank \d on .* reports: .*)"),
    "abort": (134, f"{FAILED} 134)?: killed by SIGABRT"),
    "kill": (137, f"{FAILED} 137)?: killed by SIGKILL"),
    "memory": (1, f"{FAILED} 1)?: MemoryError"),
    "import": (1, f"{FAILED} 1)?: ModuleNotFoundError: No module named 'no_such_module'"),
    "hang": (143, r"(?:rank . on .*, )?rank 1 on {host}(?:, .*)?: .*script\.py:\d+ in hang"),
}
CASES = list(product(WHAT, ("before joining", "step", "end", "late")))


def some(count: int, seed: int) -> list[object]:
    """All cases at night; in make check a few of them."""
    drawn = random.Random(seed).sample(CASES, count)
    return [pytest.param(*case, id=", ".join(case), marks=[] if case in drawn else pytest.mark.night) for case in CASES]


def check(what: str, when: str, node: str, folder: Path, nodes: str, host: Host | None = None) -> None:
    """Rank 1 runs on ``node``."""
    with Run(folder, "-H", nodes, write(folder, SCRIPT), what, when, host=host) as run:
        if what == "hang":  # nobody but its user knows that it does
            run.await_files("hung")
            assert ddprun("stacks", cwd=folder, host=host).returncode == 0
            run.signal(signal.SIGTERM)
        code = run.end()
    expected, says = WHAT[what]
    # A rank that ends late may be killed before its time, and then has no exit code of its own.
    assert code == expected or (when == "late" and what in ("raise", "exit", "memory", "import")), run.text
    assert re.search(f"^ddprun: {says.format(host=node)}$", run.text, re.M), run.text
    assert len(re.findall(r"^ddprun: rank \d+ on \S+ failed", run.text, re.M)) == (what != "hang"), run.text


@pytest.mark.cold
@pytest.mark.parametrize(("what", "when"), some(3, seed=7))
def test_the_culprit_on_one_host_is_named(tmp_path: Path, what: str, when: str) -> None:
    """However a rank ends, it is named."""
    check(what, when, "localhost", tmp_path, "localhost:3")


class TestOnTwoHosts:
    pytestmark = on_hosts("ends")

    @pytest.mark.cold
    @pytest.mark.parametrize(("what", "when"), some(1, seed=8))
    def test_the_culprit_on_two_hosts_is_named(self, bed: HostBed, tmp_path: Path, what: str, when: str) -> None:
        check(what, when, "h2", tmp_path, "h1:1,h2:2", bed.hosts[0])
