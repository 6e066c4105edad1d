"""``backend="mpi4py"`` under real launchers: MPICH's of its package, and Open MPI's where the system has it.

Ranks that come to grief, or whose end is looked at, are real interpreters; the others are warm, see :mod:`warm_python`.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import DEADLINE, environment, start
from machine import Slowness
from mpi_ranks import loss, network
from test_equivalence import assert_equal, one_process

from ddp_callbacks import join_process_group

pytestmark = pytest.mark.mpi
RANKS = Path(__file__).with_name("mpi_ranks.py")
MPICH = shutil.which("mpiexec", path=str(Path(sys.executable).parent))  # which pip puts beside Python
OPEN_MPI = shutil.which("mpirun.openmpi")
OPEN_MPI_LIBRARY = "libmpi.so.40"
RELATIVE = 1e-10


Done = subprocess.CompletedProcess[str]


def mpiexec(processes: int, name: str, *arguments: object, cold: bool = False, **variables: str) -> Done:
    """Run a function of :mod:`mpi_ranks` on that many ranks."""
    if MPICH is None:
        pytest.skip("there is no mpiexec beside Python: pip install mpich")
    return run([MPICH, "-n", str(processes)], name, arguments, variables, cold)


def mpirun(processes: int, name: str, *arguments: object, cold: bool = False, **variables: str) -> Done:
    """The same with Open MPI."""
    if OPEN_MPI is None:
        pytest.skip("there is no mpirun.openmpi: apt-get install openmpi-bin")
    command = [OPEN_MPI, "--allow-run-as-root", "--oversubscribe", "-n", str(processes)]
    return run(command, name, arguments, {"MPI4PY_LIBMPI": OPEN_MPI_LIBRARY} | variables, cold)


def run(
    command: list[str], name: str, arguments: tuple[object, ...], variables: dict[str, str], cold: bool = False
) -> Done:
    environ = {key: value for key, value in environment().items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    python = sys.executable if cold else "python"
    process = start(
        [*command, python, "-W", "error", RANKS, name, *arguments],
        Path.cwd(),
        env=environ | variables,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its processes
        stdout, stderr = process.communicate(timeout=30)
        raise AssertionError(f"still running after {DEADLINE} s\n{stdout}\n{stderr}") from None
    return Done(command, process.returncode, stdout, stderr)


def assert_ended_well(done: Done) -> None:
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("ddp_callbacks: summing CPU tensors using")
    ]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("processes", [2, 3])
def test_every_collective_gives_what_torch_computes_for_all_dtypes_and_layouts(processes: int) -> None:
    assert_ended_well(mpiexec(processes, "every_collective"))


def test_every_collective_over_open_mpi() -> None:
    assert_ended_well(mpirun(3, "every_collective"))


@pytest.mark.parametrize("launch", [mpiexec, mpirun])
def test_operations_of_several_groups_complete_in_whatever_order_they_are_waited_for(launch: Any) -> None:
    assert_ended_well(launch(3, "any_order", 40))


@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    assert_ended_well(mpiexec(processes, "gradients", tmp_path))
    model = network()
    loss(model, slice(0, 6 * processes)).backward()
    for way, found in pickle.loads((tmp_path / "gradients").read_bytes()).items():
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=RELATIVE, atol=1e-14, msg=lambda t, w=way: f"{w}: {t}"
            )


@pytest.mark.parametrize(("processes", "shared_memory"), [(2, 0), (3, 0), (2, 1)])
def test_a_trial_gives_the_numbers_of_one_process(tmp_path: Path, processes: int, shared_memory: int) -> None:
    assert_ended_well(mpiexec(processes, "torchbearer_scenarios", tmp_path, shared_memory))
    for rank in range(processes):
        for name, result in pickle.loads((tmp_path / f"rank-{rank}").read_bytes()).items():
            assert_equal(result, one_process(name), RELATIVE, f"rank {rank} {name}")


def test_workers_of_loaders_are_forked_while_mpi_runs() -> None:
    assert_ended_well(mpiexec(2, "forks_workers"))


def test_a_lightning_trainer_takes_it_as_its_backend(tmp_path: Path) -> None:
    from lightning_scenarios import Net, loader, quiet, trainer

    done = mpiexec(2, "lightning", tmp_path)
    assert done.returncode == 0, done.stderr
    with quiet(), pytest.MonkeyPatch.context() as patch:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            patch.setenv(name, "0")  # seed_everything sets them
        module = Net()
        trainer("auto").fit(module, loader())
    assert_equal(
        pickle.loads((tmp_path / "lightning").read_bytes()), [p.detach() for p in module.parameters()], RELATIVE
    )


@pytest.mark.cold
def test_the_program_of_torchs_tutorial_runs_with_plain_torch() -> None:
    done = mpiexec(2, "tutorial", cold=True)
    assert_ended_well(done)
    assert done.stdout == "received [1.0, -1.0]\n"


def test_nobody_burns_a_core_while_there_is_nothing_to_do() -> None:
    assert_ended_well(mpiexec(2, "sleeps"))


# --- the end ----------------------------------------------------------------------------------------------------------

# How a rank ends, where the other waits, the job's exit code, the seconds in which it has ended on a machine that has
# nothing else to do, and what it prints.
ENDS = [
    (
        "raises",
        "collectives",
        1,
        8,
        ["ValueError: sensor 7 gave nothing", "PeerError: rank 1 .* failed with ValueError"],
    ),
    ("raises", "DDP", 1, 8, ["ValueError: sensor 7 gave nothing"]),
    ("exits with 3", "collectives", 3, 8, ["PeerError: rank 1 .* left the run"]),
    ("exits with 3", "DDP", 3, 8, []),
    ("exits with 0", "collectives", 1, 10, ["PeerError: rank 1 .* left the run while rank 0"]),
    ("returns", "DDP", 1, 12, ["PeerError: rank 1 left the run while rank 0"]),
    ("is killed", "collectives", 9, 5, []),
    (
        "is interrupted",
        "collectives",
        130,
        8,
        ["KeyboardInterrupt", "PeerError: rank 1 .* failed with KeyboardInterrupt"],
    ),
    (
        "is stuck",
        "collectives",
        1,
        15,
        ["PeerError: rank 0 .* waited for all-reduce over MPI in vain, .* rank 1 .* and is at .*mpi_ranks"],
    ),
]


@pytest.mark.cold
@pytest.mark.parametrize(("how", "where", "code", "within", "says"), ENDS)
def test_a_rank_that_comes_to_grief_ends_the_job(
    how: str, where: str, code: int, within: float, says: list[str]
) -> None:
    with Slowness() as slowness:
        done = mpiexec(2, "misfortune", how, 1, where, cold=True)
        ended = time.time()
    happened = re.search(r"happens at ([\d.]+)", done.stdout)
    assert happened, done.stderr
    assert done.returncode == code, done.stderr
    assert ended - float(happened[1]) < within * slowness.factor
    for text in says:
        assert re.search(text, done.stderr), done.stderr


@pytest.mark.cold
@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("exits with 3", 3), ("is killed", 137)])
def test_open_mpi_ends_the_job_too(how: str, code: int) -> None:
    done = mpirun(2, "misfortune", how, 0, "collectives", cold=True)
    assert done.returncode == code, done.stderr


@pytest.mark.cold
@pytest.mark.parametrize(("launch", "last"), [(mpiexec, 0), (mpiexec, 1), (mpirun, 0)])
def test_ranks_that_end_at_different_times_end_well(launch: Any, last: int) -> None:
    done = launch(2, "ends_last", last, cold=True)
    assert_ended_well(done)
    assert sorted(done.stdout.splitlines()) == ["last line of 0", "last line of 1"]


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_without_mpi4py_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['mpi4py'] = None; import ddp_callbacks as d; d.join_process_group(backend='mpi4py')"
    )
    with start(["python", "-c", program], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert 'ConfigurationError: backend="mpi4py" needs mpi4py' in output
    assert 'pip install "mpi4py' in output and "mpich" in output


def test_a_process_that_mpiexec_has_not_started_is_told_so() -> None:
    if MPICH is None:
        pytest.skip("there is no MPI library: pip install mpich")
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29499"}
    done = run([], "joins", (), place)
    assert done.returncode == 1
    assert "ConfigurationError: this process is rank 1 of 2, but MPI knows of no other process" in done.stderr
    assert 'Start it as "mpiexec -n 2 python ..."' in done.stderr


def test_a_rank_that_mpi_numbers_otherwise_is_told_so() -> None:
    done = mpiexec(2, "joins", RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29499")
    assert done.returncode != 0
    assert re.search(r"this process is rank 0 of 4, but to MPI it is rank \d of 2", done.stderr), done.stderr


def test_the_library_of_another_launcher_is_named() -> None:
    if MPICH is None:
        pytest.skip("there is no MPI library: pip install mpich")
    done = run([], "joins", (), {"OMPI_COMM_WORLD_SIZE": "2"})
    assert "Open MPI's mpirun has started this process, but mpi4py has loaded MPICH" in done.stderr, done.stderr


def test_a_rank_that_does_not_join_is_named() -> None:
    done = mpiexec(2, "one_stays_away")
    assert done.returncode != 0
    assert "RendezvousError: rank 1 of the 2 in MPI's world did not come within 3 s" in done.stderr, done.stderr


def test_a_group_needs_a_default_group_of_the_same_backend() -> None:
    done = mpiexec(2, "needs_the_default_group")
    assert done.returncode != 0
    assert "a group of backend mpi4py needs a default group of that backend, got" in done.stderr, done.stderr


@pytest.mark.cold
def test_the_core_does_not_import_it() -> None:
    program = "import sys, ddp_callbacks; ddp_callbacks.join_process_group; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)


def test_one_process_alone_is_a_world_of_one() -> None:
    assert_ended_well(mpiexec(1, "joins"))
    assert join_process_group().world_size == 1
