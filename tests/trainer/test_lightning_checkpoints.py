"""What a Trainer saves and resumes from, in each of Lightning's ways, and where each process has a disk of its own."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from kit.compare import assert_equal
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from trainer_cases import OURS, RELATIVE, Bodies, message_of, quiet
from trainers import Net, fit, halving, loader, outcome, trainer

from ddp_callbacks.checkpoints import transfer
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

Script = Callable[[Any, Path], Any]
SCRIPTS: dict[str, Script] = {}  # of a strategy and a folder, which is another on each rank
MISHAPS: dict[str, Callable[[Path], str]] = {}  # of the folder of all ranks

WORLD = Bodies(__name__, quiet)


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def mishap(function: Callable[[Path], str]) -> Callable[[Path], str]:
    MISHAPS[function.__name__] = function
    return function


@WORLD
def scripts() -> dict[str, Any]:
    """What each gives on this rank, which has a folder of its own, and the files there; they travel in pieces."""
    transfer.CHUNK_NBYTES = 1000
    results = {}
    for name, run in SCRIPTS.items():
        own = Path(name).absolute() / f"rank{dist.get_rank()}"
        own.mkdir(parents=True)
        results[name] = run(OURS, own), [str(path) for path in own.rglob("*") if path.is_file()]
    return results


@WORLD
def mishaps() -> dict[str, str]:
    return {name: fail(Path(name).absolute()) for name, fail in MISHAPS.items()}


def loaders() -> Any:
    return loader(29, 8), loader(13, 5, 9)


def run_twice(strategy: Any, path: Any, folder: Path, **options: Any) -> Any:
    """A fit that stops in the middle of an epoch, and another Trainer that goes on from what it has saved."""
    for steps, resumed in ((6, None), (11, path)):
        module = Net(scheduler=halving)
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last=True)
        settings = {"callbacks": [saving], "enable_checkpointing": True, "default_root_dir": folder} | options
        made = trainer(strategy, max_epochs=-1, max_steps=steps, **settings)
        made.fit(module, *loaders(), ckpt_path=resumed)
    return outcome(made, module), made.test(module, loader(13, 5, 9), ckpt_path="best", verbose=False)


@script
def the_last_of_this_disk(strategy: Any, folder: Path) -> Any:
    return run_twice(strategy, "last", folder)


@script
def a_checkpoint_of_a_requeued_job(strategy: Any, folder: Path) -> Any:
    """Slurm's folder is one that all see; ``"hpc"`` takes the newest of it."""
    shared = folder.parent / f"of-{strategy}"
    for steps, resumed in ((6, None), (11, "hpc")):
        module = Net(scheduler=halving)
        made = trainer(strategy, max_epochs=-1, max_steps=steps, default_root_dir=shared)
        made.fit(module, *loaders(), ckpt_path=resumed)
        made.save_checkpoint(shared / "hpc_ckpt_1.ckpt")
    return outcome(made, module)


@script
def saved_in_a_thread(strategy: Any, folder: Path) -> Any:
    return run_twice(strategy, folder / "last.ckpt", folder, plugins=[AsyncCheckpointIO()])


@script
def saved_in_a_thread_of_the_strategy(strategy: Any, folder: Path) -> Any:
    threaded = CallbackStrategy(checkpoint_io=AsyncCheckpointIO()) if strategy == OURS else strategy
    fit(threaded, None, *loaders(), callbacks=[ModelCheckpoint(folder, save_last=True)], enable_checkpointing=True)
    made, module = trainer(strategy, max_epochs=3), Net()
    made.fit(module, *loaders(), ckpt_path=folder / "last.ckpt")
    return outcome(made, module)


class Stumbles(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 6 and not self.trainer.ckpt_path:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


@script
def saved_on_an_exception(strategy: Any, folder: Path) -> Any:
    """The next fit goes on from it, without being told."""
    for _ in range(2):
        module = Stumbles(scheduler=halving)
        made = trainer(strategy, max_epochs=3, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
        try:
            made.fit(module, *loaders())
        except ZeroDivisionError:
            stopped_at = made.global_step
    return stopped_at, outcome(made, module)


@script
def saved_by_time(strategy: Any, folder: Path) -> Any:
    """Each process has a clock of its own; rank 0's counts."""
    saving = ModelCheckpoint(folder, "{step}", train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    fit(strategy, None, *loaders(), callbacks=[saving], enable_checkpointing=True)
    return Path(saving.best_model_path).name


class Keeps(pl.Callback):
    """Has a state that is no plain data."""

    value: Any = None

    def on_fit_start(self, *_: Any) -> None:
        self.value = self.value or fractions.Fraction(1, 3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": fractions.Fraction(2, 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@script
def state_of_any_kind(strategy: Any, folder: Path) -> Any:
    saving = ModelCheckpoint(folder, save_last=True)
    fit(strategy, None, *loaders(), callbacks=[saving, Keeps()], enable_checkpointing=True, max_epochs=1)
    keeps = Keeps()
    made, module = trainer(strategy, callbacks=[keeps]), Net()
    made.fit(module, *loaders(), ckpt_path=folder / "last.ckpt", weights_only=False)
    return float(keeps.value), outcome(made, module)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_rank_zero_alone_has_saved_resumes_all_as_on_one_process(tmp_path: Path, name: str) -> None:
    """A checkpoint on rank 0's disk resumes all processes."""
    with quiet():
        expected = SCRIPTS[name]("auto", tmp_path)
    for rank, results in enumerate(WORLD.returned(scripts)):
        found, files = results[name]
        assert_equal(found, expected, RELATIVE, f"rank {rank}")
        assert not rank or not files, "rank 0 alone writes"


# --- nothing to resume from -------------------------------------------------------------------------------------------


def resume(path: Any, **options: Any) -> str:
    return message_of(lambda: trainer(OURS, max_epochs=2).fit(Net(), *loaders(), ckpt_path=path, **options))


@mishap
def a_file_that_nobody_has(folder: Path) -> str:
    return resume(folder / "none.ckpt")


@mishap
def a_registry_that_is_not_installed(folder: Path) -> str:
    return resume("registry:my-model")


@mishap
def a_file_that_rank_zero_has_not(folder: Path) -> str:
    made = trainer(OURS, max_epochs=1)
    made.fit(Net(), *loaders())
    made.save_checkpoint(folder / "whole.ckpt")
    made.strategy.barrier()
    return resume(folder / ("whole.ckpt" if dist.get_rank() else "none.ckpt"))


@mishap
def a_file_that_may_not_be_read(folder: Path) -> str:
    """An object of a class, in a file that rank 0 alone has."""
    made = trainer(OURS, max_epochs=1, callbacks=[Keeps()])
    made.fit(Net(), *loaders())
    made.save_checkpoint(folder / "objects.ckpt")
    made.strategy.barrier()
    return resume(folder / ("none.ckpt" if dist.get_rank() else "objects.ckpt"), weights_only=True)


@mishap
def a_path_that_rank_zero_was_not_given(folder: Path) -> str:
    return resume(folder / "none.ckpt" if dist.get_rank() else None)


@mishap
def a_url_that_rank_zero_alone_reaches(folder: Path) -> str:
    made = trainer(OURS, max_epochs=1)
    made.fit(Net(), *loaders())
    made.save_checkpoint(folder / "first.ckpt")
    made.strategy.barrier()
    return resume("http://127.0.0.1:1/first.ckpt" if dist.get_rank() else folder / "first.ckpt")


@mishap
def best_without_a_callback(folder: Path) -> str:
    return resume("best")


@mishap
def trains_afterwards(folder: Path) -> str:
    return resume(None)


@pytest.mark.parametrize(
    ("name", "says", "elsewhere"),
    [
        ("a_file_that_nobody_has", "FileNotFoundError: Checkpoint file not found: ", None),
        ("a_registry_that_is_not_installed", "FileNotFoundError: Checkpoint file not found: ", None),
        (
            "a_file_that_rank_zero_has_not",
            "FileNotFoundError: Checkpoint file not found: ",
            "FileNotFoundError: Checkpoint file not found on rank 0: ",
        ),
        ("a_file_that_may_not_be_read", "UnpicklingError: Weights only load failed", "PeerError: "),
        ("a_path_that_rank_zero_was_not_given", "MismatchError: the ranks disagree about what they resume from", None),
        ("a_url_that_rank_zero_alone_reaches", "no error", None),
        ("best_without_a_callback", 'ValueError: `.fit(ckpt_path="best")` is set but `ModelCheckpoint` is not', None),
        ("trains_afterwards", "no error", None),
    ],
)
def test_what_cannot_be_resumed_from_is_an_error_on_all_and_nobody_waits(
    name: str, says: str, elsewhere: str | None
) -> None:
    """An unusable checkpoint raises an error everywhere."""
    first, second = (results[name] for results in WORLD.returned(mishaps))
    assert first.startswith(says), first
    assert second.startswith(elsewhere or says), second
