"""``backend="mpi4py"`` under real launchers: MPICH's of its package, and Open MPI's where the system has it.

Ranks that come to grief are real interpreters; the others are warm, see :mod:`kit.warm`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mpi_ranks
import pytest
from kit.commands import DEADLINE, TWO_PROCESSES, environment, start
from kit.once import once
from kit.ranks import free_port

pytestmark = [pytest.mark.mpi, pytest.mark.shares_results("library")]
RANKS = 3
VARIABLES: dict[str, Callable[[], dict[str, str]]] = {
    "MPICH": lambda: {"MASTER_PORT": str(free_port())},  # tests beside this one use it, too; Open MPI's jobs have names
    "Open MPI": lambda: {"MPI4PY_LIBMPI": "libmpi.so.40"},
}

Done = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def leaves_no_shared_memory() -> Iterator[None]:
    """MPICH leaves its files behind where a rank ends without ``MPI_Finalize``."""
    found = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield
    for path in set(Path("/dev/shm").glob("mpich_shm_*")) - found:
        if not is_mapped(path):  # by a test that runs beside this one
            path.unlink(missing_ok=True)


def is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended
            if str(path) in maps.read_text():
                return True
    return False


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
    """Run a function of :mod:`mpi_ranks` on that many ranks."""
    command = [*launcher(library), "-n", str(processes)]
    environ = {**environment(), **VARIABLES[library](), **variables}
    words = [*command, sys.executable if cold else "python", "-W", "error", mpi_ranks.__file__, *program]
    process = start(words, Path.cwd(), env=environ, stderr=subprocess.PIPE)
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes
        stdout, stderr = process.communicate(timeout=30)
        raise AssertionError(f"still running after {DEADLINE} s\n{stdout}\n{stderr}") from None
    return Done(words, process.returncode, stdout, stderr)


@once
def checked(library: str) -> list[dict[str, str]]:
    """The tracebacks of the checks of :mod:`mpi_ranks` on each rank; over MPICH gradients go by MPI, too."""
    switch = str(int(library != "MPICH"))
    with tempfile.TemporaryDirectory() as folder:
        done = launch(library, RANKS, "all_checks", folder, DDP_CALLBACKS_SHARED_MEMORY=switch)
        assert done.returncode == 0, done.stderr
        return [json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(RANKS)]


each_library = pytest.mark.parametrize("library", ["MPICH", "Open MPI"])


def checks(*names: str) -> Any:
    """A test of these checks of :mod:`mpi_ranks`, for each library."""
    return lambda test: each_library(pytest.mark.parametrize("name", names)(test))


def require(library: str, name: str) -> None:
    launcher(library)  # skips
    assert [of_rank[name] for of_rank in checked(library)] == [""] * RANKS


@checks(
    "every_operation",
    "halves_are_summed_in_float32",
    "what_it_lacks_is_named",
    "a_short_message_raises",
    "a_group_that_rank_0_does_not_create",
    "who_waits_leaves_the_core_alone",
    "any_order",
)
def test_operations_give_what_torch_computes_for_all_dtypes_and_layouts_in_any_order(library: str, name: str) -> None:
    """`backend="mpi4py"` moves and sums any dtypes and strides, in any order; what it lacks is named."""
    require(library, name)


@checks("gradients", "a_trial")
def test_gradients_and_a_trial_have_the_numbers_of_one_process(library: str, name: str) -> None:
    """Training over MPI gives one process's numbers."""
    require(library, name)


@pytest.mark.parametrize(
    ("processes", "program", "says"),
    [
        (1, "joins_alone", ""),
        (2, "ends_apart", ""),
        (2, "hears_late_that_all_have_come", ""),
        (2, "makes_groups_beside_gloo", ""),
        (2, "gives_up", None),
        (2, "loads_with_spawned_workers", ""),
        (2, "joins_without_variables", "rank 0 of 1, but to MPI it is rank . of 2.* set RANK, WORLD_SIZE"),
    ],
)
def test_how_jobs_begin_and_end(processes: int, program: str, says: str | None) -> None:
    done = launch("MPICH", processes, program)
    assert (done.returncode == 0) == (says == ""), done.stderr
    assert re.search(says or "", done.stderr), done.stderr


@each_library
def test_processes_that_mpirun_starts_meet_and_talk_through_gloo(library: str) -> None:
    done = launch(library, RANKS, "through_gloo")
    assert done.returncode == 0, done.stderr


def test_a_lightning_trainer_takes_it_as_its_backend() -> None:
    done = launch("MPICH", 2, "a_trainer")
    assert done.returncode == 0, done.stderr


@pytest.mark.cold
def test_the_program_of_torchs_tutorial_runs_with_plain_torch() -> None:
    """Plain torch can use the backend."""
    done = launch("MPICH", 2, "tutorial", cold=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "received [1.0, -1.0]\n", "")


# How rank 1 ends while rank 0 waits for it, and what the job prints.
ENDS = [
    ("MPICH", "raises", "ValueError: sensor 7 gave nothing"),
    ("MPICH", "is killed", ""),
    ("MPICH", "exits with 3", "PeerError: rank 1 .*left the run while rank 0"),
    ("MPICH", "returns", "PeerError: rank 1 .*left the run while rank 0"),
    ("Open MPI", "raises", "ValueError: sensor 7 gave nothing"),
    ("Open MPI", "is killed", ""),
]
OFTEN = ENDS[:2]


@pytest.mark.cold
@pytest.mark.parametrize(
    ("library", "how", "says"), [pytest.param(*end, marks=[] if end in OFTEN else pytest.mark.night) for end in ENDS]
)
def test_a_rank_that_comes_to_grief_ends_the_job(library: str, how: str, says: str) -> None:
    """A failing process ends its MPI job."""
    done = launch(library, 2, "misfortune", how, cold=True)
    assert done.returncode != 0
    assert re.search(says, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("command", "program", "says"),
    [
        (["python"], "joins_without_mpi4py", r"backend=\"mpi4py\" needs mpi4py.* pip install \"mpi4py.*mpich"),
        (TWO_PROCESSES, "joins", r"this process is rank 1 of 2, but to MPI it is rank 0 of 1.* \"mpiexec -n 2 python"),
    ],
)
def test_what_cannot_work_is_named(command: list[Any], program: str, says: str, tmp_path: Path) -> None:
    """Errors name missing mpi4py, and processes that MPI doesn't know."""
    launcher("MPICH")  # skips
    with start([*command, mpi_ranks.__file__, program], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(says, output), output


@pytest.mark.cold
def test_the_core_does_not_import_it() -> None:
    """The library imports MPI only if you ask."""
    program = "import sys, ddp_callbacks; ddp_callbacks.join_process_group; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)
