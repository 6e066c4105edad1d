"""What the strategy is and answers: its processes, packages and names, its reductions, and what it gives back."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from kit.paths import FOLDERS
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from trainer_cases import OURS, PLAIN, RELATIVE, Bodies, assert_as_on_one, quiet
from trainers import Net, Normalized, fit, loader, outcome, trainer

from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackStrategy, DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


# --- what the strategy is asked ---------------------------------------------------------------------------------------


class Asks(Net):
    """Asks in the middle of a run."""

    def on_train_start(self) -> None:
        rank, strategy = dist.get_rank(), self.trainer.strategy
        reduce, decide, broadcast = strategy.reduce, strategy.reduce_boolean_decision, strategy.broadcast
        self.reduced = [
            reduce(torch.tensor(3 + rank)),
            reduce(torch.tensor([1, 2]) * (1 + rank), reduce_op="avg"),
            reduce(torch.tensor([2**40 + rank]), reduce_op="sum"),
            reduce(torch.tensor([0.5, 4.0]) * (1 + rank), reduce_op=dist.ReduceOp.MAX),
            reduce(torch.tensor([3, 4]) * (1 + rank), reduce_op="min"),
            reduce(torch.tensor(3 + rank), reduce_op="product"),
            reduce(torch.tensor([300.0, 300.0], dtype=torch.float16)),
            reduce(torch.tensor(rank == 1), reduce_op="sum"),
        ]
        self.decided = [decide(rank == 0), decide(True), decide(rank == 0, all=False), decide(False, all=False)]
        mine = {"path": f"a{rank}", "numbers": [rank, 1.5, None], "tensor": torch.arange(3) + rank}
        self.told = [broadcast(mine), broadcast(Path(f"p{rank}")), broadcast(f"r{rank}", src=1), broadcast({rank})]
        strategy.barrier("here")
        self.gathered = strategy.all_gather(torch.full((2,), float(rank)))
        with pytest.raises(MismatchError) as raised:
            strategy.all_gather(torch.zeros(2 + rank))
        self.refused = str(raised.value)


@WORLD
def answers() -> Any:
    module = Asks()
    fit(OURS, module, max_steps=1)
    return {name: getattr(module, name) for name in ("reduced", "decided", "told", "gathered", "refused")}


def test_the_strategy_answers_exactly_and_alike_on_all_ranks() -> None:
    """`strategy.reduce`, decisions and `broadcast` are exact; unequal `all_gather` raises."""
    reduced = [
        torch.tensor(3.5),  # Lightning's own: 3
        torch.tensor([1.5, 3.0]),
        torch.tensor([2**41 + 1]),
        torch.tensor([1.0, 8.0]),
        torch.tensor([3, 4]),
        torch.tensor(12),
        torch.tensor([300.0, 300.0], dtype=torch.float16),
        torch.tensor(1),
    ]
    for found in WORLD.returned(answers):
        for answer, right in zip(found["reduced"], reduced, strict=True):
            torch.testing.assert_close(answer, right, rtol=0, atol=0)
        assert found["decided"] == [False, True, True, False]
        plain, *others = found["told"]
        assert (plain["path"], plain["numbers"], plain["tensor"].tolist()) == ("a0", [0, 1.5, None], [0, 1, 2])
        assert others == [Path("p0"), "r1", {0}]
        assert found["gathered"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert "all_gather needs tensors of the same shape, got [[2], [3]] by rank" in found["refused"]


# --- what a run leaves behind -----------------------------------------------------------------------------------------


@WORLD
def files() -> Any:
    options = {"logger": CSVLogger("files"), "enable_progress_bar": True, "enable_model_summary": True}
    made = trainer(OURS, callbacks=[ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True, **options)
    made.fit(Net(), loader(), loader(13, 5, 9))
    made.strategy.barrier()
    paths = [str(path) for path in Path("files").rglob("*") if path.is_file()]
    return (made.is_global_zero, made.global_rank, made.world_size), sorted(paths)


def test_files_come_from_rank_zero_alone() -> None:
    """Rank 0 alone writes a Trainer's files."""
    for rank, (place, paths) in enumerate(WORLD.returned(files)):
        assert place == (rank == 0, rank, 2)
        checkpoint, metrics = paths
        assert checkpoint.endswith(".ckpt") and metrics == "files/lightning_logs/version_0/metrics.csv"


class Copies(pl.Callback):
    """Copies a Trainer and what belongs to it by all means, in the middle of a fit."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.found["during"] = copied_metrics(trainer)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.found["validating"] = copied_metrics(trainer)


def copied_metrics(made: pl.Trainer) -> Any:
    """Whether the copies have the same kind of strategy, and which values they have beside those of the original."""
    copies = [pickle.loads(pickle.dumps(made)), copy.deepcopy(made)]
    torch.save(made.callbacks, io.BytesIO())
    for thing in (made.strategy, made.callbacks, made.fit_loop, made.lightning_module):
        copy.deepcopy(thing)
    kinds = {type(each.strategy) is type(made.strategy) for each in copies}
    return kinds, [dict(each.callback_metrics) for each in (made, *copies)]


@WORLD
def copied_trainers() -> Any:
    copies = Copies()
    made = trainer(OURS, callbacks=[copies])
    made.fit(Net(), loader(), loader(13, 5, 9))
    validated = [each.validate(Net(), loader(13, 5, 9), verbose=False) for each in (made, copy.deepcopy(made))]
    return {"after": copied_metrics(made), **copies.found}, validated


def test_a_trainer_can_be_copied_and_pickled_in_the_middle_of_a_run_and_after_it() -> None:
    """You can copy and pickle a Trainer, even mid-run."""
    for found, (original, copied) in WORLD.returned(copied_trainers):
        assert list(found) == ["after", "during", "validating"]
        for kinds, (expected, *metrics) in found.values():
            assert kinds == {True}
            assert_equal(metrics, [expected, expected], 0.0)
        assert_equal(copied, original, 0.0)


@WORLD
def layers_of_a_fit() -> Any:
    """During a fit, in a pickle made during it, after it, and after one that raised."""
    during: list[Any] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            layer = module.layers[0]
            during.append((type(layer).__name__, type(pickle.loads(pickle.dumps(layer))), list(module.state_dict())))

    class Raises(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("enough")

    module = Normalized()
    layer, found = module.layers[0], {"keys": list(module.state_dict())}
    fit(OURS, module, sync_batchnorm=True, callbacks=[Looks()])
    found["after"] = type(layer), module.layers[0] is layer
    with contextlib.suppress(KeyError):
        fit(OURS, module, sync_batchnorm=True, callbacks=[Raises()])
    return found | {"during": during[0], "after an exception": type(layer)}


def test_layers_that_sync_batchnorm_has_synchronized_are_given_back() -> None:
    for found in WORLD.returned(layers_of_a_fit):
        assert found["during"] == ("SynchronizedBatchNorm1d", nn.BatchNorm1d, found["keys"])
        assert found["after"] == (nn.BatchNorm1d, True)
        assert found["after an exception"] is nn.BatchNorm1d


@WORLD
def again_and_again(strategy: str = OURS) -> Any:
    made, module = trainer(strategy), Net()
    results = []
    for epochs in (1, 3):
        made.fit_loop.max_epochs = epochs
        made.fit(module, loader(), loader(13, 5, 9))
        results.append(made.validate(module, loader(13, 5, 9), verbose=False))
    return results, outcome(made, module)


def test_a_trainer_runs_again() -> None:
    assert_as_on_one(again_and_again)


class FailsEverywhere(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training" and batch_idx == 1:
            raise KeyError(self.where)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "validation":
            raise KeyError(self.where)
        return super().validation_step(batch, batch_idx)


@WORLD
def fits_after_an_exception(strategy: str = OURS) -> Any:
    results = []
    for where in ("training", "validation"):
        made, module = trainer(strategy), FailsEverywhere(where)
        with pytest.raises(KeyError):
            made.fit(module, loader(), loader(13, 5, 9))
        results.append(fit(strategy))
        module.where = ""
        made.fit(module, loader(), loader(13, 5, 9))
        results.append(outcome(made, module))
    return results


def test_an_exception_that_all_processes_catch_leaves_the_next_fit_as_it_is_on_one() -> None:
    """A Trainer fits again, even after a caught exception."""
    assert_as_on_one(fits_after_an_exception)


# --- the callback beside a strategy -----------------------------------------------------------------------------------


@WORLD
def with_the_callback(strategy: str = OURS) -> Any:
    return fit(strategy, callbacks=[DDPCallback()])


@WORLD
def the_callback_beside_ddp() -> Any:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError) as raised:
        patch.setenv("WORLD_SIZE", "2")  # ddp removes it
        fit("ddp", callbacks=[DDPCallback()], devices=2)
    return str(raised.value)


def test_the_callback_changes_nothing_beside_the_strategy_and_refuses_another() -> None:
    """Lightning's `DDPCallback` changes nothing beside the strategy."""
    with quiet():
        assert_equal(with_the_callback(PLAIN), fit(PLAIN), 0.0)
    assert_as_on_one(with_the_callback)
    for message in WORLD.returned(the_callback_beside_ddp):
        assert 'needs strategy="ddp_callbacks" for these 2 processes' in message
        assert "This Trainer has DDPStrategy" in message


# --- checkpoints ------------------------------------------------------------------------------------------------------


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def save_in_the_middle(strategy: str, path: Path) -> Path:
    """A checkpoint in the middle of the second of two epochs."""
    made = trainer(strategy, max_steps=6)
    made.fit(Net(scheduler=halving), loader(), loader(13, 5, 9))
    made.save_checkpoint(path)
    return path


def resume(strategy: str, path: Path) -> Any:
    devices, batch_size = (2, 4) if strategy == "ddp" else (1, 8)  # ddp's batches are those of each process
    made, module = trainer(strategy, max_epochs=3, devices=devices), Net(scheduler=halving)
    made.fit(module, loader(29, batch_size), loader(13, 5, 9), ckpt_path=path)
    return outcome(made, module)


@WORLD
def moved_checkpoints() -> Any:
    by_one = save_in_the_middle(PLAIN, Path(f"of-{dist.get_rank()}.ckpt"))
    of_one = resume(OURS, by_one)
    by_both = save_in_the_middle(OURS, Path("of-both.ckpt"))
    return of_one, resume(OURS, by_both), resume("ddp", by_both)["global_step"], by_both.read_bytes()


def test_checkpoints_move_between_one_process_ddp_and_ours(tmp_path: Path) -> None:
    """A Trainer's checkpoint moves between one process, several and `ddp`."""
    with quiet():
        by_one, by_both = save_in_the_middle(PLAIN, tmp_path / "one.ckpt"), tmp_path / "both.ckpt"
        expected = resume(PLAIN, by_one)
    for of_one, of_both, steps, saved in WORLD.returned(moved_checkpoints):
        assert_equal([of_one, of_both], [expected, expected], RELATIVE)
        assert steps == expected["global_step"]
        by_both.write_bytes(saved)
    with quiet():
        assert_equal(resume(PLAIN, by_both), expected, RELATIVE)
    one, both = (torch.load(path, weights_only=False) for path in (by_one, by_both))
    assert list(one) == list(both)
    assert list(one["state_dict"]) == list(both["state_dict"]) == list(Net().state_dict())


# --- as scripts -------------------------------------------------------------------------------------------------------


def test_the_other_name_of_the_strategy_is_the_same_strategy() -> None:
    """You may also call the strategy `"callbacks"`."""
    with quiet():
        assert type(trainer("callbacks").strategy) is type(trainer(OURS).strategy) is CallbackStrategy


def total(module: Any) -> float:
    return sum(value.sum() for value in module.state_dict().values()).item()


SCRIPT = """
import sys
{first}
sys.path[:0] = {tests!r}
from test_lightning_strategy import CallbackStrategy, Net, loader, quiet, total, trainer
if __name__ == "__main__":
    with quiet():
        made, module = trainer({strategy}, devices=2, max_epochs=1), Net()
        made.fit(module, loader())
        # In one write: two processes share the pipe.
        print(f"rank {{made.global_rank}} of {{made.world_size}} sum {{total(module)!r}}" + chr(10), end="", flush=True)
"""
NOTEBOOK = "sys.ps1 = '>>> '"  # what Python defines where someone types


@pytest.mark.cold
@pytest.mark.parametrize(
    ("first", "strategy"),
    [
        ("", '"ddp_callbacks"'),
        pytest.param("", 'CallbackStrategy(start_method="fork")', marks=pytest.mark.night),
        pytest.param(NOTEBOOK, '"ddp_callbacks"', marks=pytest.mark.night),
    ],
)
def test_the_trainer_starts_processes_of_its_own(first: str, strategy: str, tmp_path: Path) -> None:
    """Without a launcher, a Trainer starts `devices` processes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first, tests=list(map(str, FOLDERS)), strategy=strategy))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with quiet():
        module = Net()
        trainer(PLAIN, max_epochs=1).fit(module, loader())
    lines = sorted(line.split(" sum ") for line in done.stdout.splitlines() if line.startswith("rank"))
    # Processes that were forked have ended when fit returns, to rank 0 of one process.
    assert [line[0] for line in lines] in (["rank 0 of 2", "rank 1 of 2"], ["rank 0 of 2"])
    assert [float(line[1]) for line in lines] == [pytest.approx(total(module), rel=1e-10)] * len(lines)


OTHER_PACKAGE = """
import sys
import pytorch_lightning
import ddp_callbacks.lightning as ours
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
from ddp_callbacks.lightning import CallbackStrategy
import pytorch_lightning as pl
import pickle
options = {"accelerator": "cpu", "logger": False}
trainers = [pl.Trainer(strategy=CallbackStrategy(compress="bf16"), **options)]
trainers.append(pl.Trainer(strategy="ddp_callbacks", **options))
other = {"options": options, "CallbackStrategy": CallbackStrategy}
exec("import lightning.pytorch as pl; made = pl.Trainer(strategy=CallbackStrategy(), **options)", other)
trainers.append(other["made"])
for package in (pl, other["pl"]):
    made = package.Trainer(strategy="ddp_callbacks", **options)
    assert isinstance(made.strategy, package.strategies.DDPStrategy), package
assert all(type(pickle.loads(pickle.dumps(made.strategy))) is type(made.strategy) for made in trainers)
print([type(made.strategy).__module__.rpartition(".")[2] for made in trainers])
"""
NEITHER = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "lightning" in name.split(".")[0] else find(name, *rest)
try:
    import ddp_callbacks.lightning
except ImportError as error:
    print(error)
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("script", "ranks", "says"),
    [
        (OTHER_PACKAGE, 2, "trained on 2 True"),
        (BOTH, 1, "['for_pytorch_lightning', 'for_pytorch_lightning', 'for_lightning']"),
        (NEITHER, 1, 'Lightning is not installed: pip install "lightning'),
    ],
)
def test_either_package_will_do(script: str, ranks: int, says: str, tmp_path: Path) -> None:
    """The strategy works with `lightning`, `pytorch_lightning` and both."""
    (tmp_path / "script.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *(torchrun if ranks > 1 else []), "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(says) == ranks, done.stdout + done.stderr
