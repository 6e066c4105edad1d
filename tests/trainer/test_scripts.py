"""Trainers and Fabric loops as scripts: by each launcher, by processes of their own, with either package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fabric_loops import fabric, network, sgd, values
from fabric_loops import loader as rows
from fabric_loops import train as train_loop
from kit.commands import DEADLINE, TWO_PROCESSES, run, start
from kit.paths import FOLDERS
from kit.ranks import free_port
from trainer_cases import PLAIN, RELATIVE, quiet
from trainers import Net, loader, trainer

pytestmark = pytest.mark.usefixtures("seed_variables")


def report(made: Any, parameters: list[torch.Tensor]) -> float:
    total = sum(value.sum() for value in parameters).item()  # type: ignore[union-attr]
    # In one write: two processes share the pipe.
    print(f"rank {made.global_rank} of {made.world_size} sum {total!r}\n", end="", flush=True)
    return float(total)


def loop(made: Any, fails: bool = False) -> float:
    model = network()
    model, optimizer = made.setup(model, sgd(model))
    with quiet():
        train_loop(made, made.setup_dataloaders(rows()), model, optimizer)
    if fails and made.global_rank == 1:
        raise ZeroDivisionError("a bad sample")
    made.barrier()
    return report(made, values(model))


def fit(strategy: Any, devices: int = 2) -> float:
    with quiet():
        made, module = trainer(strategy, devices=devices, max_epochs=1), Net()
        made.fit(module, loader())
    return report(made, [*module.parameters()])


SCRIPT = """
import sys
sys.path[:0] = {tests!r}
{before}
from test_scripts import fit, loop
if __name__ == "__main__":
    {call}
"""
FABRIC = """
import ddp_callbacks.lightning
from ddp_callbacks.lightning import CallbackFabricStrategy
from lightning.fabric import Fabric
"""
FABRIC_OF_THE_OTHER = "import lightning_fabric, ddp_callbacks.pytorch_lightning\nfrom lightning_fabric import Fabric"
FABRIC_OF_THE_OTHER_ALONE = """
import lightning_fabric
from ddp_callbacks.pytorch_lightning import CallbackFabricStrategy
from lightning_fabric import Fabric
assert "lightning.fabric" not in sys.modules
assert issubclass(CallbackFabricStrategy, lightning_fabric.strategies.DDPStrategy)
assert isinstance(CallbackFabricStrategy(), lightning_fabric.strategies.DDPStrategy)
"""
PYTHON, FABRIC_RUN = ["python"], ["fabric", "run", "--accelerator", "cpu", "--devices", 2, "--main-port", 0]
STARTS = 'made = Fabric(accelerator="cpu", devices=2, strategy="ddp_callbacks"); made.launch(); loop(made, {fails})'
FORKS = """made = Fabric(accelerator="cpu", devices=2, strategy=CallbackFabricStrategy(start_method="fork"))
    made.launch(loop, {fails})"""
LAUNCHED = 'Fabric(accelerator="cpu", devices=2, strategy="callbacks").launch(loop)'
LAUNCHED_BEFORE = 'loop(Fabric(accelerator="cpu", devices=2, strategy="ddp_callbacks"))'
TRAINER = 'fit("ddp_callbacks")'
TRAINER_FORKS = 'from ddp_callbacks.lightning import CallbackStrategy; fit(CallbackStrategy(start_method="fork"))'
NOTEBOOK = "sys.ps1 = '>>> '"  # what Python defines where someone types
COLD, NIGHT = pytest.mark.cold, [pytest.mark.cold, pytest.mark.night]


def write(folder: Path, before: str, call: str, fails: bool = False) -> Path:
    script = folder / "script.py"
    call = call.replace("{fails}", str(fails))
    script.write_text(SCRIPT.format(tests=list(map(str, FOLDERS)), before=before, call=call))
    return script


@pytest.mark.parametrize(
    ("command", "before", "call"),
    [
        pytest.param(PYTHON, FABRIC, STARTS, id="Fabric"),
        pytest.param(PYTHON, FABRIC, FORKS, id="Fabric, forked"),
        pytest.param(TWO_PROCESSES, FABRIC_OF_THE_OTHER, LAUNCHED, id="Fabric by torchrun, of the other package"),
        pytest.param(FABRIC_RUN, FABRIC, LAUNCHED_BEFORE, id="fabric run", marks=COLD),
        pytest.param(
            ["ddprun", "--nproc-per-node", 2], FABRIC_OF_THE_OTHER_ALONE, LAUNCHED, id="Fabric by ddprun", marks=NIGHT
        ),
        pytest.param(PYTHON, "", TRAINER, id="Trainer", marks=COLD),
        pytest.param(PYTHON, "", TRAINER_FORKS, id="Trainer, forked", marks=NIGHT),
        pytest.param(PYTHON, NOTEBOOK, TRAINER, id="Trainer in a notebook", marks=NIGHT),
    ],
)
def test_a_script_starts_its_processes_and_they_have_the_numbers_of_one(
    request: pytest.FixtureRequest, command: list[Any], before: str, call: str, tmp_path: Path
) -> None:
    """`ddprun`, `torchrun`, `fabric run` and `python` start Fabric loops and Trainers."""
    if command is FABRIC_RUN:
        pytest.importorskip("click")
    words = [free_port() if word == 0 else word for word in command]
    is_cold = request.node.get_closest_marker("cold") is not None
    output = run([*words, write(tmp_path, before, call)], tmp_path, cold=is_cold)
    lines = sorted(re.findall(r"rank (\d) of (\d) sum (\S+)", output))
    # Processes that were forked have ended when the function returns, to rank 0 of one process.
    assert [(rank, size) for rank, size, _ in lines] in ([("0", "2"), ("1", "2")], [("0", "2")]), output
    with quiet():
        expected = pytest.approx(loop(fabric(PLAIN)) if "loop" in call else fit(PLAIN, 1), rel=RELATIVE)
    assert [float(total) for _, _, total in lines] == [expected] * len(lines)


@pytest.mark.parametrize("call", [STARTS, FORKS], ids=["started", "forked"])
def test_a_failure_in_a_process_that_fabric_has_started_ends_all(call: str, tmp_path: Path) -> None:
    with start([*PYTHON, write(tmp_path, FABRIC, call, fails=True)], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert "ZeroDivisionError: a bad sample" in output
    if call is STARTS:  # one of two that were forked ends both, before rank 0 can say anything
        assert re.search(r"PeerError: .*rank 1 \(host \S+, pid \d+\) failed with ZeroDivisionError", output)


UNEDITED = """
import os, sys
import torch, torchbearer
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

silent = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)

def rows(features):
    return DataLoader(torch.randn(29, features, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 8)

def sum_of(module):
    return float(sum(parameter.detach().sum() for parameter in module.parameters()))

def fit(**options):
    torch.manual_seed(2)
    module = BoringModel().double()
    pl.Trainer(max_epochs=2, accelerator="cpu", limit_val_batches=0, **silent, **options).fit(module, rows(32))
    return sum_of(module)

def run(resumes=False):
    callbacks = []
    if resumes and "DDP_CALLBACKS_AUTO" in os.environ:
        from ddp_callbacks.torchbearer import Resume
        callbacks = [Resume("run.pt")]
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1).double()
    pairs = [(row, row.sum(0, keepdim=True)) for row in rows(4).dataset]
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    trial = torchbearer.Trial(model, sgd, torch.nn.MSELoss(), ["loss"], callbacks=callbacks, verbose=0)
    trial.with_train_generator(DataLoader(pairs, 8)).to(torch.float64).run(2)
    return sum_of(model)

sums = [fit(), fit(), run(), run(resumes=True)]
if "ddp_callbacks.lightning" in sys.modules:
    from ddp_callbacks.lightning import DDPCallback
    assert sums[0] == fit(strategy="ddp_callbacks") == fit(callbacks=[DDPCallback()])
sys.stdout.write(f"sums {sums}\\n")
"""
AUTO = {
    "ddprun": ["ddprun", "--auto", "--no-report", "--nproc-per-node", 2, "--show-ranks", "all"],
    "torchrun": [*TWO_PROCESSES, "-m", "ddp_callbacks.auto"],
}


@pytest.mark.cold
def test_an_unedited_script_trains_on_all_processes(tmp_path: Path) -> None:
    """`--auto` trains unedited scripts, Trainers and Trials, to the bits of the strategy."""
    script = tmp_path / "script.py"
    script.write_text(UNEDITED)
    (alone,) = re.findall(r"sums \[(.*)\]", run([*PYTHON, script], tmp_path, cold=True))
    wanted = pytest.approx([float(each) for each in alone.split(", ")], rel=RELATIVE)
    for launcher in AUTO.values():
        output = run([*launcher, script], tmp_path, cold=True)
        found = re.findall(r"sums \[(.*?)\]", output)
        assert len(found) == 2, output
        assert all([float(each) for each in sums.split(", ")] == wanted for sums in found)
        for kind in ("Trainer of this script trains on 2 processes, by strategy='ddp_callbacks'", "Trial of this"):
            assert output.count(f"ddp_callbacks: --auto: each {kind}") == 1, output
        assert "has changed nothing" not in output and "of training" not in output
    (folder,) = (tmp_path / "ddprun-logs").iterdir()
    assert {path.name for path in folder.iterdir()} <= {"rank-0.log", "rank-1.log"}, "--no-report"


UNTOUCHED = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
pl.Trainer(strategy="ddp", devices=2, accelerator="cpu", fast_dev_run=True, logger=False).fit(BoringModel())
"""


def test_auto_says_that_it_has_changed_nothing(tmp_path: Path) -> None:
    """`--auto` says if unused."""
    script = tmp_path / "script.py"
    script.write_text(UNTOUCHED)
    output = run([*AUTO["ddprun"], script], tmp_path)
    says = "--auto has changed nothing: this script has made no Trainer with the default strategy"
    assert output.count(says) == 1, output


FORGOTTEN = {
    "Trainer": """
import lightning.pytorch as pl
pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
""",
    "Trial": "import torch, torchbearer; torchbearer.Trial(torch.nn.Linear(1, 1))",
    "script": "import torch",
    "group of its own": """
import torch, torch.distributed as dist, torchbearer
dist.init_process_group("gloo")
torchbearer.Trial(torch.nn.Linear(1, 1))
dist.destroy_process_group()
""",
}
TOLD_BY = {"script": ["ddprun"], "group of its own": []}


@pytest.mark.cold
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_script_that_trains_apart_on_each_process_is_told(kind: str, tmp_path: Path) -> None:
    """Forgetting the line is told, unless meant."""
    path = tmp_path / "script.py"
    path.write_text(FORGOTTEN[kind])
    command = ["ddprun", "--nproc-per-node", 2]
    output = run([*command, path], tmp_path, cold=True)
    told = [line for line in output.splitlines() if "they have joined no process group" in line]
    beginnings = TOLD_BY.get(kind, ["[localhost:0] ddp_callbacks", "ddprun"])
    assert [line.partition(f": this {kind} ")[0] for line in told] == beginnings, output
    assert output.splitlines()[-1] == told[-1] if told else "by itself" not in output
    if kind == "Trial":
        assert "by itself" not in run([*command, "--independent", path], tmp_path, cold=True)


OTHER_PACKAGE = """
import sys
import pytorch_lightning
import ddp_callbacks.pytorch_lightning as ours
assert "lightning.pytorch" not in sys.modules
from pytorch_lightning.demos.boring_classes import BoringModel
trainer = pytorch_lightning.Trainer(strategy="ddp_callbacks", accelerator="cpu", fast_dev_run=True, logger=False)
assert type(trainer.strategy) is ours.CallbackStrategy
assert isinstance(trainer.strategy, pytorch_lightning.strategies.DDPStrategy)
module = BoringModel()
trainer.fit(module)
sys.stdout.write(f"trained on {trainer.world_size} {trainer.model is module}\\n")  # at once: two processes write
"""
BOTH = """
import lightning.pytorch
import pytorch_lightning
import pickle
from ddp_callbacks import pytorch_lightning as second
from ddp_callbacks import lightning as first
options = {"accelerator": "cpu", "logger": False}
for package, ours, others in ((lightning.pytorch, first, second), (pytorch_lightning, second, first)):
    for strategy in ("ddp_callbacks", ours.CallbackStrategy(compress="bf16")):
        made = package.Trainer(strategy=strategy, **options).strategy
        assert type(made) is type(pickle.loads(pickle.dumps(made))) is ours.CallbackStrategy
        assert isinstance(made, package.strategies.DDPStrategy), package
    try:
        package.Trainer(strategy=others.CallbackStrategy(), **options)
    except ValueError as error:
        print(error)
"""
THE_WRONG_ONE = """
import pytorch_lightning
try:
    import ddp_callbacks.lightning
except ImportError as error:
    print(error)
"""
NEITHER = """
import importlib.util
import sys
sys.modules["torchmetrics"] = None  # it comes with Lightning
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "lightning" in name.split(".")[0] else find(name, *rest)
try:
    import ddp_callbacks.lightning
except ImportError as error:
    print(error)
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("script", "command", "says"),
    [
        (OTHER_PACKAGE, TWO_PROCESSES, "trained on 2 True"),
        (BOTH, PYTHON, "strategy=<CallbackStrategy of ddp_callbacks.pytorch_lightning>"),
        (THE_WRONG_ONE, PYTHON, "imported pytorch_lightning: import ddp_callbacks.pytorch_lightning instead of ddp_"),
        (NEITHER, PYTHON, 'Lightning is not installed: pip install "lightning'),
    ],
    ids=["the other", "both", "the wrong one", "neither"],
)
def test_either_package_will_do(script: str, command: list[Any], says: str, tmp_path: Path) -> None:
    """Each package of Lightning has its own import."""
    (tmp_path / "script.py").write_text(script)
    output = run([*command, "script.py"], tmp_path, cold=True)
    assert output.count(says) == (2 if command is TWO_PROCESSES else 1), output
