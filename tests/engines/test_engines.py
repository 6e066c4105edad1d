"""What the page on other engines shows gives one process's numbers; engines that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit.leftovers import Machine
from kit.paths import ROOT, python_path
from kit.ranks import free_port
from kit.warm import Server

LIMIT = 1500.0  # seconds, on a machine that is busy with other work, for Ray's many processes
pytestmark = [pytest.mark.apps, pytest.mark.timeout(LIMIT + 60)]

HERE = Path(__file__).parent
TRAINING, ON_PAGE = HERE / "training.py", HERE / "on_page.py"
JOBS = ROOT / "examples" / "jobs"


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}: make check-engines")


def start(command: list[Any], folder: Path, **environ: Any) -> subprocess.Popen[str]:
    """Start it as in a shell: without what pytest has set."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DDP_CALLBACKS"))}
    own |= {"PATH": f"{Path(sys.executable).parent}:{own['PATH']}", "PYTHONPATH": python_path()}
    own |= {"RESULT": str(folder / "result"), "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # a process that tests don't need
    own |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{LIMIT:.0f}"}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = {name: str(value) for name, value in environ.items()}
    return subprocess.Popen(list(map(str, command)), cwd=folder, env=own | environ, **options)


def finish(*processes: subprocess.Popen[str]) -> str:
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(said)
    return "\n".join(said)


@pytest.fixture(autouse=True)
def ray_ends(server: Server) -> Iterator[None]:
    """Ray's own processes end after the program that has started them, on a busy machine later than others may."""
    machine, deadline = Machine(server.pid), time.monotonic() + LIMIT
    yield
    while any("ray" in line for line in machine.processes().values()) and time.monotonic() < deadline:
        time.sleep(0.2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """The parameters that plain Lightning and plain Torchbearer train on one process."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("trainer", "trial"):
        finish(start([sys.executable, "-c", f"import training; training.{name}()"], folder, RESULT=folder / name))
    trainer, trial = (torch.load(folder / name) for name in ("trainer", "trial"))
    return {"with_strategy": trainer, "with_callback": trial, "loop": trial}


def assert_trained(expected: list[torch.Tensor], result: Path, said: str) -> None:
    assert result.exists(), said
    for actual, parameter in zip(torch.load(result), expected, strict=True):
        torch.testing.assert_close(actual, parameter, rtol=1e-10, atol=1e-12)


ENGINES = (
    *(("Ray Train", "ray", name) for name in ("with_strategy", "with_callback", "loop")),
    *(("Dask", "distributed", name) for name in ("with_strategy", "with_callback")),
    *(("Submitit", "submitit", name) for name in ("with_strategy", "with_callback")),
)


@pytest.mark.parametrize(("heading", "module", "name"), ENGINES)
def test_an_engine_trains_as_one_process(
    tmp_path: Path, expected: dict[str, list[torch.Tensor]], heading: str, module: str, name: str
) -> None:
    """Inside Ray, Dask, Submitit and Hydra, one process's numbers."""
    need(module)
    said = finish(start([sys.executable, ON_PAGE, heading, name], tmp_path))
    assert_trained(expected[name], tmp_path / "result", said)


def test_ray_starts_again_after_a_kill(tmp_path: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    """A worker of Ray that is killed changes no number."""
    need("ray")
    environ = {"KILL": tmp_path / "killed", "RESUME": tmp_path / "run.ckpt"}
    said = finish(start([sys.executable, ON_PAGE, "Ray Train", "with_strategy"], tmp_path, **environ))
    assert (tmp_path / "killed").exists(), said
    assert_trained(expected["with_strategy"], tmp_path / "result", said)


def test_a_sweep_of_hydra(tmp_path: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    need("hydra")
    sweep = ["--multirun", "+seed=1,2", "hydra.sweep.dir=sweep"]
    said = finish(start(["ddprun", "--nproc-per-node", 2, HERE / "train_hydra.py", *sweep], tmp_path, FOLDER=tmp_path))
    for seed in (1, 2):
        assert_trained(expected["with_strategy"], tmp_path / f"seed {seed}", said)


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((JOBS / name).read_text()))


def test_kubernetes_accepts_the_indexed_job() -> None:
    """Kubernetes accepts the manifests, whose commands train."""
    need("kubernetes_validate")
    import kubernetes_validate

    for document in documents("indexed_job.yaml"):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    (job,) = documents("trainjob.yaml")  # its parts that are Kubernetes's own
    trainer = job["spec"]["trainer"]
    container = {"name": "node", "resources": trainer["resourcesPerNode"]}
    container |= {key: trainer[key] for key in ("image", "command", "env")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": job["metadata"], "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_command_of_the_indexed_job(tmp_path: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    service, job = documents("indexed_job.yaml")
    pod = job["spec"]["template"]["spec"]
    address = f"{job['metadata']['name']}-0.{pod['subdomain']}"  # the name of the pod with index 0
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    *shell, line = pod["containers"][0]["command"]
    line = (
        line.replace(f"={address}", "=127.0.0.1").replace("29500", str(free_port())).replace("train.py", str(TRAINING))
    )
    assert "127.0.0.1" in line
    pods = [start([*shell, line], tmp_path, JOB_COMPLETION_INDEX=index) for index in range(job["spec"]["completions"])]
    assert_trained(expected["with_strategy"], tmp_path / "result", finish(*pods))


def test_the_command_of_the_trainjob_with_the_variables_that_kubeflow_sets(
    tmp_path: Path, expected: dict[str, list[torch.Tensor]]
) -> None:
    (job,) = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    *command, script = trainer["command"]
    assert script == "train.py"
    environ = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
    environ |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": free_port()}
    nodes = [start([*command, TRAINING], tmp_path, PET_NODE_RANK=rank, **environ) for rank in range(2)]
    assert_trained(expected["with_strategy"], tmp_path / "result", finish(*nodes))


@pytest.mark.parametrize("name", ["with_strategy", "with_callback", "loop"])
def test_a_cell_of_a_notebook(tmp_path: Path, expected: dict[str, list[torch.Tensor]], name: str) -> None:
    """A notebook's cell trains on two processes."""
    need("nbclient")
    program = f"""
import nbformat, on_page
from nbclient import NotebookClient

cells = ["from training import {name} as train", on_page.shown("Notebooks")]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=500, startup_timeout=500, kernel_name="python3").execute()
"""
    said = finish(start([sys.executable, "-c", program], tmp_path))
    assert_trained(expected[name], tmp_path / "result", said)
