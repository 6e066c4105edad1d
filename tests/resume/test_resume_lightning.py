"""The file of Resume in a Trainer: when it is written and read, by whom, and what is refused.

That scripts go on with the numbers of one process is shown by test_lightning_equivalence.py.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gc
import importlib
import inspect
import os
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from kit.compare import assert_equal
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from trainers import Net, joined, loader, outcome, quiet
from trainers import trainer as make_trainer
from trainers_apart import run
from ways import RELATIVE, Way, alone, cut_at_every_moment, new_folder, on_ranks

import ddp_callbacks.torchbearer
from ddp_callbacks.auto import AUTO
from ddp_callbacks.errors import CheckpointError, ConfigurationError, Preempted
from ddp_callbacks.lightning import Resume

pytestmark = pytest.mark.usefixtures("seed_variables")


@pytest.mark.wide
def test_a_fit_goes_on_from_every_moment() -> None:
    """A fit may stop at any moment."""
    cut_at_every_moment(run, "dropout_and_attributes")


def test_one_process_reads_the_value_of_a_step_that_two_have_logged() -> None:
    name = "reading_a_step_behind_a_validation_in_mid_epoch"
    folder = new_folder([name])
    first = on_ranks(2, "trainers", Way(resumed_on=-1), [name], folder, {name: 4})[0][name][0]
    second = on_ranks(1, "trainers", Way(resumed_on=1), [name], folder)[0][name][0]
    assert_equal(joined(first, second), alone("trainers", name)[0], RELATIVE)


# --- the file ---------------------------------------------------------------------------------------------------------


def trainer(strategy: str, **options: Any) -> pl.Trainer:
    with quiet():
        return make_trainer(strategy, **options)


def fit_plainly(made: pl.Trainer, module: Any = None, train: Any = None, **options: Any) -> None:
    with quiet():
        made.fit(module or Net(), train or loader(shuffle=True), loader(13, 5, 9), **options)


class Asks(pl.Callback):
    """Asks to stop behind a batch of the training, or fails there."""

    def __init__(self, resume: Any, batch: int | None, error: BaseException | None = None) -> None:
        self.resume, self.batch, self.error = resume, batch, error

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            if self.error is not None:
                raise self.error
            self.resume.preemption.request("the test")


class AsksInSanityCheck(Asks):
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.sanity_checking:
            self.resume.preemption.request("the test")


def fit(
    path: Path, stop: int | None = None, error: BaseException | None = None, asks: Any = Asks, **options: Any
) -> dict[str, Any]:
    """On one process; what it leaves behind, also if it is stopped."""
    resume = Resume(path, **{name: options.pop(name) for name in ("every", "time_limit") if name in options})
    module = options.pop("module", None) or Net()
    callbacks = [resume, asks(resume, stop, error), *options.pop("callbacks", [])]
    made = trainer("ddp_callbacks", callbacks=callbacks, **options)
    with contextlib.suppress(Preempted, ZeroDivisionError):
        fit_plainly(made, module)
    return outcome(made, module)


def test_lightning_alone_loads_the_file(tmp_path: Path) -> None:
    """Lightning alone loads the file of `Resume`."""
    path = tmp_path / "run.ckpt"
    cut = fit(path, 6)
    made = trainer("auto")
    fit_plainly(made, ckpt_path=path, weights_only=True)
    assert made.global_step == 8  # with other batches: it begins the epoch's loader anew
    loaded = torch.load(path, weights_only=True)
    assert_equal(loaded["state_dict"], cut["parameters"], 0.0)
    assert loaded["global_step"] == 6
    assert "combined_loader" not in loaded["loops"]["fit_loop"]["state_dict"]


def test_the_file_is_where_the_script_was_when_it_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer("ddp_callbacks", callbacks=[Resume("run.ckpt")])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    fit_plainly(made)
    assert (tmp_path / "run.ckpt").exists() and not list(Path().iterdir())


def test_a_finished_fit_does_nothing(tmp_path: Path) -> None:
    """A finished fit does nothing more."""
    path = tmp_path / "run.ckpt"
    whole = fit(path)
    again = fit(path)
    assert not again["logged"]
    assert_equal(again["parameters"], whole["parameters"], 0.0)
    assert again["global_step"] == whole["global_step"] == 8
    assert again["callback_metrics"] == whole["callback_metrics"] != {}


class LogsValidationSteps(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True)


def test_batches_of_later_validations_are_counted_on(tmp_path: Path) -> None:
    options = {"max_epochs": 4, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    whole = fit(tmp_path / "whole.ckpt", module=LogsValidationSteps(), **options)
    fit(tmp_path / "cut.ckpt", 10, module=LogsValidationSteps(), **options)
    found = fit(tmp_path / "cut.ckpt", module=LogsValidationSteps(), **options)["logged"]
    assert found == whole["logged"][-len(found) :]


@pytest.mark.parametrize("every", [2, timedelta(microseconds=1)])
def test_what_was_written_now_and_then_is_gone_on_from(tmp_path: Path, every: Any) -> None:
    """A fit resumes from what `every` wrote."""
    whole = fit(tmp_path / "whole.ckpt")
    first = fit(tmp_path / "run.ckpt", 7, ZeroDivisionError(), every=every)
    second = fit(tmp_path / "run.ckpt", every=every)
    done = 4 + 1 + 1 + 2  # rows before the last file: of an epoch, its validation, its end, and of two batches
    assert len(first["logged"]) == done
    assert_equal(first["logged"] + second["logged"], whole["logged"], 0.0)
    assert_equal(second["parameters"], whole["parameters"], 0.0)


def test_a_cut_in_the_sanity_check_of_a_run_that_goes_on_loses_nothing(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole.ckpt", num_sanity_val_steps=1)
    path = tmp_path / "run.ckpt"
    fit(path, 5, ZeroDivisionError(), num_sanity_val_steps=1)  # the file is of epoch 0, whose rows are six
    first = fit(path, asks=AsksInSanityCheck, num_sanity_val_steps=1)
    second = fit(path, num_sanity_val_steps=1)
    assert second["global_step"] == whole["global_step"] == 8
    assert_equal(first["logged"] + second["logged"], whole["logged"][6:], 0.0)
    assert_equal(second["parameters"], whole["parameters"], 0.0)


class Wide(Net):
    """Counts the tensors of the size of a large one, in its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(54_321))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        self.count = sum(each.numel() == 54_321 for each in tensors)
        return super().training_step(batch, batch_idx)


def test_the_file_that_a_fit_goes_on_from_does_not_stay_in_memory(tmp_path: Path) -> None:
    whole, module = Wide(), Wide()
    fit(tmp_path / "whole.ckpt", module=whole)
    fit(tmp_path / "run.ckpt", 3, module=module)
    fit(tmp_path / "run.ckpt", module=module)
    assert module.count == whole.count


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    made = trainer("ddp_callbacks", callbacks=[Resume(tmp_path / "run.ckpt")], fast_dev_run=True)
    fit_plainly(made)
    assert made.global_step == 1 and not list(tmp_path.iterdir())


def test_a_time_limit_stops_a_fit(tmp_path: Path) -> None:
    """A fit stops at its time limit."""
    whole = fit(tmp_path / "whole.ckpt", num_sanity_val_steps=0)
    limit = timedelta(microseconds=1)
    parts = [fit(tmp_path / "run.ckpt", time_limit=limit, num_sanity_val_steps=0) for _ in range(16)]
    assert [row for part in parts for row in part["logged"]] == whole["logged"]
    assert_equal(parts[-1]["parameters"], whole["parameters"], 0.0)


class RunsOut(pl.Callback):
    """Lets the time be over at the end of a batch, as if an hour had passed."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            next(each for each in trainer.callbacks if isinstance(each, Timer)).load_state_dict(
                {"time_elapsed": {"train": 3600.0}}
            )


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("batch", [2, 4, 6])
def test_a_run_whose_max_time_was_over_goes_on_when_it_has_more(tmp_path: Path, batch: int, interval: str) -> None:
    whole = fit(tmp_path / "whole.ckpt", num_sanity_val_steps=0)
    path = tmp_path / "run.ckpt"
    timer = Timer(timedelta(hours=1), interval)
    cut = fit(path, callbacks=[RunsOut(batch), timer], num_sanity_val_steps=0)
    assert cut["global_step"] == (batch if interval == "step" else -(-batch // 4) * 4)
    last = fit(path, callbacks=[Timer(timedelta(hours=2), interval)], num_sanity_val_steps=0)
    assert last["global_step"] == whole["global_step"] == 8
    assert_equal(last["parameters"], whole["parameters"], 0.0)
    done = len(whole["logged"]) - len(last["logged"])
    assert_equal(last["logged"], whole["logged"][done:], 0.0)
    assert bool(last["logged"]) == (cut["global_step"] < 8)


def test_a_run_that_a_callback_has_ended_says_that_nothing_is_left_to_train(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "ddp_callbacks")
    path = tmp_path / "run.ckpt"
    for _ in range(2):
        stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
        found = fit(path, callbacks=[stopping], max_epochs=9)
        assert found["global_step"] == 8
    assert caplog.text.count("nothing is left to train: trainer.should_stop has ended the run in ") == 1


@pytest.mark.parametrize("steps", [2, 6])
def test_checkpoints_of_steps_that_a_killed_run_repeats_have_the_same_names(tmp_path: Path, steps: int) -> None:
    found = {}
    for name, ends in {"whole": [None], "cut": [ZeroDivisionError(), None]}.items():
        folder = tmp_path / name
        for error in ends:
            kept = ModelCheckpoint(
                folder, every_n_train_steps=steps, save_top_k=2, monitor="step", mode="max", save_last=True
            )
            fit(
                tmp_path / f"{name}.ckpt",
                7 if error else None,
                error,
                callbacks=[kept],
                every=5,
                enable_checkpointing=True,
            )
        found[name] = {path.name: torch.load(path)["global_step"] for path in folder.iterdir()}
    assert found["cut"] == found["whole"]
    assert found["whole"]["last.ckpt"] == 8 // steps * steps


def test_checkpoints_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "last.ckpt").write_text("of another run")
    for error in (ZeroDivisionError(), None):
        kept = ModelCheckpoint(folder, every_n_train_steps=6, save_last=True)
        fit(tmp_path / "run.ckpt", 7 if error else None, error, callbacks=[kept], every=5, enable_checkpointing=True)
    assert (folder / "last.ckpt").read_text() == "of another run"
    assert torch.load(folder / "last-v1.ckpt")["global_step"] == 6
    assert not (folder / "last-v2.ckpt").exists()


def test_a_last_write_that_fails_is_an_error_in_a_fit_that_an_except_block_has_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit raises the error of its last write, wherever you call it."""

    def full_disk(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    made = trainer("ddp_callbacks", max_epochs=1, callbacks=[Resume(tmp_path / "run.ckpt", async_save=True)])
    try:
        raise KeyError("a first attempt")
    except KeyError:
        with pytest.raises(CheckpointError, match=r"run\.ckpt cannot be written"):
            fit_plainly(made)


def test_model_checkpoints_have_no_states_of_loaders(tmp_path: Path) -> None:
    fit(tmp_path / "run.ckpt", callbacks=[ModelCheckpoint(tmp_path, "model")], enable_checkpointing=True)
    made = trainer("auto", max_epochs=3)
    fit_plainly(made, ckpt_path=tmp_path / "model.ckpt")
    assert made.global_step == 12


# --- loggers ----------------------------------------------------------------------------------------------------------


class Late(Net):
    """A column comes later."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.current_epoch == 1:
            self.log("late", 1.0)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("version", "cut", "error", "steps"),
    [(None, 3, None, 1), (7, 8, ZeroDivisionError(), 1), (None, 5, ZeroDivisionError(), 4)],
    ids=["at a file", "behind a file", "behind a file without rows"],
)
def test_a_csv_file_goes_on_where_it_was_cut(tmp_path: Path, version: Any, cut: int, error: Any, steps: int) -> None:
    """CSV files, TensorBoard's folders and `ModelCheckpoint`'s files go on."""

    def fit_with(name: str, version: Any, stop: int | None = None) -> ModelCheckpoint:
        saving = ModelCheckpoint(monitor="val_loss", save_top_k=2)
        logger = CSVLogger(tmp_path / name, version=version, flush_logs_every_n_steps=2)
        options = {"callbacks": [saving], "enable_checkpointing": True, "logger": logger, "every": 3}
        options["log_every_n_steps"] = steps
        fit(tmp_path / f"{name}.ckpt", stop, error, module=Late(), max_epochs=3, **options)
        return saving

    whole = fit_with("whole", None)
    fit_with("cut", version, cut)
    saving = fit_with("cut", version)
    folder = tmp_path / "cut/lightning_logs"
    assert [path.name for path in folder.iterdir()] == [f"version_{version or 0}"]
    expected = rows(tmp_path / "whole/lightning_logs/version_0")
    assert any("late" in row for row in expected)
    assert rows(folder / f"version_{version or 0}") == expected
    found = {Path(path).name.replace("-v1", "") for path in saving.best_k_models}  # beside one of the run that failed
    assert found == {Path(path).name for path in whole.best_k_models}


@pytest.mark.parametrize("version", [None, 7])
def test_a_csv_file_keeps_its_rows_if_a_script_validates_in_front_of_the_fit(tmp_path: Path, version: Any) -> None:
    def script(name: str, cut: int | None) -> list[dict[str, str]]:
        resume, module = Resume(tmp_path / f"{name}.ckpt"), Net()
        logger = CSVLogger(tmp_path / name, version=version)
        options = {"callbacks": [resume, Asks(resume, cut)], "log_every_n_steps": 1, "logger": logger}
        made = trainer("ddp_callbacks", **options)
        with quiet(), contextlib.suppress(Preempted):
            made.predict(module, loader(13, 5, 9))
            made.validate(module, loader(13, 5, 9), verbose=False)
            fit_plainly(made, module)
        assert len(list((tmp_path / name / "lightning_logs").iterdir())) == 1
        return rows(Path(logger.log_dir))

    expected = script("whole", None)
    before = script("cut", 6)
    assert 1 < len(before) < len(expected)
    assert before == expected[: len(before)]
    assert script("cut", None) == expected


def test_a_csv_file_keeps_its_rows_if_the_fit_is_refused(tmp_path: Path) -> None:
    def fit_with(module: Any, stop: int | None) -> list[dict[str, str]]:
        logger = CSVLogger(tmp_path, version=7, flush_logs_every_n_steps=1)
        error = None if stop is None else ZeroDivisionError()
        fit(tmp_path / "run.ckpt", stop, error, module=module, logger=logger, log_every_n_steps=1)
        return rows(tmp_path / "lightning_logs/version_7")

    before = fit_with(Net(), 6)
    wide = Net()
    wide.more = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="model: Net with 83 numbers"):
        fit_with(wide, None)
    with pytest.raises(ConfigurationError, match="this Trainer has SingleDeviceStrategy"):
        fit_plainly(trainer("auto", logger=CSVLogger(tmp_path, version=7), callbacks=[Resume(tmp_path / "run.ckpt")]))
    assert rows(tmp_path / "lightning_logs/version_7") == before


@pytest.mark.parametrize("first", [TensorBoardLogger, CSVLogger])
def test_tensorboard_goes_on_in_the_same_version(tmp_path: Path, first: Any) -> None:
    for stop, logger in ((3, first), (None, TensorBoardLogger)):
        fit(tmp_path / "run.ckpt", stop, logger=logger(tmp_path))
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def test_auto_on_one_process_chooses_the_strategy_that_resume_needs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(AUTO, "1")
    assert trainer("auto").strategy.__class__.__name__ == "SingleDeviceStrategy"
    for cut in (6, None):
        resume = Resume(tmp_path / "run.ckpt")
        made = trainer("auto", callbacks=[resume, Asks(resume, cut)])
        with contextlib.suppress(Preempted):
            fit_plainly(made)
        assert made.global_step == (cut or 8)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """`Resume` refuses files of another model or data set."""
    path = tmp_path / "run.ckpt"
    fit(path, 6)
    wide = Net()
    wide.more = torch.nn.Linear(2, 2)
    others = {
        r"model: Net with 83 numbers in 4 parameters .* in the file, Net with 89": (wide, loader()),
        "samples of the training: 29 in the file, 30 now": (Net(), loader(30)),
        "batch size of the training: 8 in the file, 4 now": (Net(), loader(29, 4)),
    }
    for message, (module, train) in others.items():
        with pytest.raises(CheckpointError, match=message):
            fit_plainly(trainer("ddp_callbacks", callbacks=[Resume(path)]), module, train)


class Scheduled(Net):
    def __init__(self, lr: float, epochs: int, kind: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.lr, self.epochs, self.kind = lr, epochs, kind

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), self.lr)
        warmup, decay = LinearLR(optimizer, total_iters=1), CosineAnnealingLR(optimizer, self.epochs)
        return [optimizer], [SequentialLR(optimizer, [warmup, decay], [1])]


def test_a_learning_rate_that_the_script_changes_is_not_ignored_silently(tmp_path: Path) -> None:
    # As in Lightning alone, a fit trained with the rate and the schedule of the file, whatever the script said.
    path = tmp_path / "run.ckpt"

    def train(lr: float, epochs: int, most: int) -> None:
        made = trainer("ddp_callbacks", callbacks=[Resume(path)], max_epochs=most)
        fit_plainly(made, Scheduled(lr, epochs), loader())

    train(0.1, 2, 1)
    train(0.1, 2, 2)
    others = "this script passes: lr of SGD 0.1, now 0.01; T_max of CosineAnnealingLR 2, now 4. The run resumes with"
    with pytest.raises(UserWarning, match=re.escape(f"{path} was written with other settings than {others}")):
        train(0.01, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer("ddp_callbacks", callbacks=[Resume(path)], max_epochs=3).fit(Scheduled(0.01, 2), loader())
    train(0.1, 2, 4)  # the file still has the settings with which it was trained


def test_the_state_of_another_optimizer_or_scheduler_is_refused(tmp_path: Path) -> None:
    # An error of torch's named no file ('step', 'lr_lambdas'), or the run went on without its schedule.
    path = tmp_path / "run.ckpt"
    fit_plainly(trainer("ddp_callbacks", callbacks=[Resume(path)], max_epochs=1), Scheduled(0.1, 2), loader())
    other = Scheduled(0.1, 2, torch.optim.Adam)
    text = "has the states of SGD, SequentialLR, LinearLR, CosineAnnealingLR, this script has Adam, SequentialLR"
    with pytest.raises(CheckpointError, match=text):
        fit_plainly(trainer("ddp_callbacks", callbacks=[Resume(path)], max_epochs=2), other, loader())


def test_settings_of_resume_are_checked(tmp_path: Path) -> None:
    """`Resume` refuses other strategies, a second `Resume`, and searches."""
    path = tmp_path / "run.ckpt"
    assert inspect.signature(Resume) == inspect.signature(ddp_callbacks.torchbearer.Resume)
    with pytest.raises(ConfigurationError, match="every must be a positive number of training batches"):
        Resume(path, every=0)
    refused = {
        "a Trainer takes one callback Resume, got 2": ("ddp_callbacks", [Resume(tmp_path / "other.ckpt")]),
        'Resume needs Trainer\\(strategy="ddp_callbacks"\\)': ("auto", []),
        "Resume cannot tell the trials of LearningRateFinder from the fit": ("ddp_callbacks", [LearningRateFinder()]),
        "Resume cannot tell the trials of BatchSizeFinder from the fit": ("ddp_callbacks", [BatchSizeFinder()]),
    }
    for message, (strategy, callbacks) in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            fit_plainly(trainer(strategy, callbacks=[Resume(path), *callbacks]))
    assert not list(tmp_path.iterdir())


# --- both packages ----------------------------------------------------------------------------------------------------


def test_either_package_goes_on_from_the_file_of_the_other(tmp_path: Path) -> None:
    """Either package of Lightning resumes the other's file."""
    packages = ["lightning.pytorch", "pytorch_lightning"]
    whole = fit_by(packages[0], tmp_path / "whole.ckpt", None)
    for first, second in (packages, packages[::-1]):
        fit_by(first, tmp_path / first, 6)
        assert_equal(fit_by(second, tmp_path / first, None), whole, 0.0)


def fit_by(package: str, path: Path, stop: int | None) -> dict[str, torch.Tensor]:
    """The parameters that a package has trained."""
    lightning = importlib.import_module(package)
    resume = importlib.import_module(f"ddp_callbacks.{package.partition('.')[0]}").Resume(path)

    class Stops(lightning.Callback):  # type: ignore[misc, name-defined]
        on_train_batch_end = Asks.on_train_batch_end

    stops = Stops()
    stops.resume, stops.batch, stops.error = resume, stop, None
    lightning.seed_everything(3, verbose=False)
    module = importlib.import_module(f"{package}.demos.boring_classes").BoringModel()
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with quiet(), contextlib.suppress(Preempted):
        limits = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 0}
        options |= {"strategy": "ddp_callbacks", "accelerator": "cpu", "callbacks": [resume, stops]} | limits
        lightning.Trainer(**options).fit(module)
    return dict(module.state_dict())
