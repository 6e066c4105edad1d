"""``backend="mpi4py"`` under real launchers: MPICH's of its package, and Open MPI's where the system has it.

Ranks that come to grief, or whose end is looked at, are real interpreters; the others are warm, see :mod:`kit.warm`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mpi_ranks
import pytest
from kit.commands import DEADLINE, environment, start
from kit.machine import Slowness
from kit.once import once

from ddp_callbacks import join_process_group

pytestmark = [pytest.mark.mpi, pytest.mark.shares_results("library")]
RANKS = 3
OPEN_MPI_LIBRARY = {"MPI4PY_LIBMPI": "libmpi.so.40"}

Done = subprocess.CompletedProcess[str]


def launcher(library: str) -> list[str]:
    """The command before ``-n``."""
    if library == "MPICH":  # pip puts it beside Python
        path, missing = shutil.which("mpiexec", path=str(Path(sys.executable).parent)), "pip install mpich"
    else:
        path, missing = shutil.which("mpirun.openmpi"), "apt-get install openmpi-bin"
    if path is None:
        pytest.skip(f"{library} is not here: {missing}")
    return [path] if library == "MPICH" else [path, "--allow-run-as-root", "--oversubscribe"]


def launch(library: str, processes: int, *program: Any, cold: bool = False, **variables: str) -> Done:
    """Run a function of :mod:`mpi_ranks` on that many ranks; on none: without a launcher."""
    command = [*launcher(library), "-n", str(processes)] if processes else []
    environ = {key: value for key, value in environment().items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    environ |= variables | (OPEN_MPI_LIBRARY if library == "Open MPI" else {})
    words = [*command, sys.executable if cold else "python", "-W", "error", mpi_ranks.__file__, *program]
    process = start(words, Path.cwd(), env=environ, stderr=subprocess.PIPE, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its processes
        stdout, stderr = process.communicate(timeout=30)
        raise AssertionError(f"still running after {DEADLINE} s\n{stdout}\n{stderr}") from None
    return Done(words, process.returncode, stdout, stderr)


def assert_ended_well(done: Done) -> None:
    said = [line for line in done.stderr.splitlines() if not line.startswith("ddp_callbacks: summing CPU tensors")]
    assert (done.returncode, said) == (0, [])


@once
def checked(library: str) -> list[dict[str, str]]:
    """The tracebacks of the checks of :mod:`mpi_ranks` on each rank; over MPICH gradients go by MPI, too."""
    switch = str(int(library != "MPICH"))
    with tempfile.TemporaryDirectory() as folder:
        assert_ended_well(launch(library, RANKS, "all_checks", folder, DDP_CALLBACKS_SHARED_MEMORY=switch))
        return [json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(RANKS)]


each_library = pytest.mark.parametrize("library", ["MPICH", "Open MPI"])


def checks(*names: str) -> Any:
    """A test of these checks, for each library."""
    return lambda test: each_library(pytest.mark.parametrize("name", names)(test))


def require(library: str, name: str) -> None:
    launcher(library)  # skips
    assert [of_rank[name] for of_rank in checked(library)] == [""] * RANKS


@checks("every_operation", "halves_are_summed_in_float32")
def test_every_operation_gives_what_torch_computes_for_all_dtypes_and_layouts(library: str, name: str) -> None:
    """`backend="mpi4py"` has all collectives, dtypes and strides."""
    require(library, name)


@checks("any_order", "sleeps")
def test_operations_complete_in_any_order_and_nobody_burns_a_core(library: str, name: str) -> None:
    """MPI operations finish in any order without burning cores."""
    require(library, name)


@checks("gradients", "a_trial")
def test_gradients_and_a_trial_have_the_numbers_of_one_process(library: str, name: str) -> None:
    """Training over MPI gives one process's numbers."""
    require(library, name)


def test_a_lightning_trainer_takes_it_as_its_backend() -> None:
    done = launch("MPICH", 2, "a_trainer")
    assert done.returncode == 0, done.stderr


@pytest.mark.cold
def test_the_program_of_torchs_tutorial_runs_with_plain_torch() -> None:
    """Plain torch can use the backend."""
    done = launch("MPICH", 2, "tutorial", cold=True)
    assert_ended_well(done)
    assert done.stdout == "received [1.0, -1.0]\n"


# --- the end ----------------------------------------------------------------------------------------------------------


TOLD = r"PeerError: rank 1 .* failed with "
# How a rank ends, where the other waits, the job's exit code, the seconds in which it has ended on a machine that has
# nothing else to do, and what it prints.
ENDS = [
    ("MPICH", "raises", "collectives", 1, 8, ["ValueError: sensor 7 gave nothing", f"{TOLD}ValueError"]),
    ("MPICH", "exits with 3", "DDP", 3, 8, []),
    ("MPICH", "returns", "DDP", 1, 12, ["PeerError: rank 1 left the run while rank 0"]),
    ("MPICH", "is killed", "collectives", 9, 5, []),
    ("MPICH", "is interrupted", "collectives", 130, 8, ["KeyboardInterrupt", f"{TOLD}KeyboardInterrupt"]),
    ("MPICH", "is stuck", "collectives", 1, 15, [r"PeerError: rank 0 .* waited .* in vain, .* is at .*mpi_ranks"]),
    ("Open MPI", "exits with 3", "collectives", 3, 15, []),
    ("Open MPI", "is killed", "collectives", 137, 15, []),
]


@pytest.mark.cold
@pytest.mark.parametrize(
    ("library", "how", "where", "code", "within", "says"),
    [pytest.param(*end, marks=[] if end[1] in ("raises", "is killed") else pytest.mark.night) for end in ENDS],
)
def test_a_rank_that_comes_to_grief_ends_the_job(
    library: str, how: str, where: str, code: int, within: float, says: list[str]
) -> None:
    """A failing process ends its MPI job."""
    with Slowness() as slowness:
        done = launch(library, 2, "misfortune", how, where, cold=True)
        ended = time.time()
    happened = re.search(r"happens at ([\d.]+)", done.stdout)
    assert happened, done.stderr
    assert done.returncode == code, done.stderr
    assert ended - float(happened[1]) < within * slowness.factor
    for text in says:
        assert re.search(text, done.stderr), done.stderr


@pytest.mark.cold
@pytest.mark.night
@pytest.mark.waits(4)
@each_library
def test_ranks_that_end_at_different_times_end_well(library: str) -> None:
    done = launch(library, 2, "ends_last", cold=True)
    assert_ended_well(done)
    assert sorted(done.stdout.splitlines()) == ["last line of 0", "last line of 1"]


# --- what cannot work -------------------------------------------------------------------------------------------------

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29499"}
# Processes, what they run, their variables, and what they say.
REFUSED = [
    (0, "joins", PLACE, r"this process is rank 1 of 4, but MPI knows of no other process.* \"mpiexec -n 4 python"),
    (2, "joins", PLACE, r"this process is rank 1 of 4, but to MPI it is rank \d of 2"),
    (0, "joins", {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI's mpirun has started .* but mpi4py has loaded MPICH"),
    (2, "one_stays_away", {}, "RendezvousError: rank 1 of the 2 in MPI's world did not come within 3 s"),
    (2, "needs_the_default_group", {}, "a group of backend mpi4py needs a default group of that backend, got"),
    (0, "joins_without_mpi4py", {}, r"backend=\"mpi4py\" needs mpi4py.* pip install \"mpi4py.*mpich"),
]


@pytest.mark.parametrize(("processes", "program", "variables", "says"), REFUSED)
def test_what_cannot_work_is_named(processes: int, program: str, variables: dict[str, str], says: str) -> None:
    """Errors name missing mpi4py, foreign libraries, and absent ranks."""
    launcher("MPICH")  # skips
    done = launch("MPICH", processes, program, **variables)
    assert done.returncode != 0
    assert re.search(says, done.stderr, re.DOTALL), done.stderr


@pytest.mark.cold
def test_the_core_does_not_import_it() -> None:
    """The library imports MPI only if you ask."""
    program = "import sys, ddp_callbacks; ddp_callbacks.join_process_group; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)


def test_one_process_alone_is_a_world_of_one() -> None:
    assert_ended_well(launch("MPICH", 1, "joins"))
    assert join_process_group().world_size == 1
