"""A fit that is cut at any moment goes on at the next batch, on any number of processes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from comparing import assert_equal
from distributed import run_distributed
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning_scenarios import Net, loader, outcome, quiet
from lightning_scenarios import trainer as make_trainer
from nursery import HOST, free_port
from resume_lightning_scenarios import LOCAL, SCENARIOS, Collecting, averaging, collecting, comparable, freezing, joined

from ddp_callbacks.errors import CheckpointError, ConfigurationError, Preempted
from ddp_callbacks.lightning import Resume
from ddp_callbacks.lightning.saved_attributes import checksums_of_attributes, load_attributes, save_attributes

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results]

Request = tuple[str, int | None, str, dict[str, Any]]

WORLDS = (1, 2, 3, 4)
MOMENTS = {"dropout": 23, "workers": 35, "accumulation": 20, "by_hand": 14, "local_sgd": 17, "diloco": 17}


def run_requests(requests: list[Request]) -> list[dict[str, Any]]:
    """On a rank: one fit after another."""
    return [(SCENARIOS | LOCAL)[name](cut, path, **options) for name, cut, path, options in requests]


def on(world_size: int, requests: list[Request]) -> list[list[dict[str, Any]]]:
    """The results of each fit, by rank."""
    by_rank = [run_requests(requests)] if world_size == 1 else run_distributed(run_requests, world_size, requests)
    return [list(results) for results in zip(*by_rank, strict=True)]


class Cuts:
    """A selection of cuts: each scenario on each number of processes, to go on with as many and with another number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[Any, dict[Any, Any]] = {}
        draw = random.Random(17)
        cut = {(name, world): draw.randrange(2, MOMENTS[name] + 1) for name in SCENARIOS for world in WORLDS}
        self.same = [(name, world, cut[name, world]) for name, world in cut]
        self.others = []
        for index, name in enumerate(SCENARIOS):
            for world in WORLDS:
                other = [each for each in WORLDS if each != world][index % 3]
                self.others.append((name, world, other, draw.randrange(2, MOMENTS[name] + 1)))
        self.local = [(name, 2, draw.randrange(3, MOMENTS[name])) for name in LOCAL]

    def _once(self, key: Any, make: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def path(self, *what: Any) -> str:
        return str(self._folder / ("-".join(map(str, what)) + ".ckpt"))

    def whole(self, world: int) -> dict[str, list[dict[str, Any]]]:
        """Of each scenario, not cut, with dropout and augmentation."""
        return self._once(("whole", world), lambda: self._run_whole(world))

    def _run_whole(self, world: int) -> dict[Any, list[dict[str, Any]]]:
        names = [*SCENARIOS, *(LOCAL if world == 2 else ())]
        results = on(world, [(name, None, self.path("whole", name, world), {}) for name in names])
        return dict(zip(names, results, strict=True))

    def first(self, world: int) -> dict[Any, list[dict[str, Any]]]:
        """All that are cut on so many processes."""
        return self._once(("first", world), lambda: self._run_first(world))

    def _run_first(self, world: int) -> dict[Any, list[dict[str, Any]]]:
        requests: dict[Any, Request] = {}
        for each in self.same + self.local:
            if each[1] == world:
                requests[each] = (each[0], each[2], self.path(*each), {})
        for other in self.others:
            if other[1] == world:
                requests[other] = (other[0], other[3], self.path(*other), {"random": False})
        return dict(zip(requests, on(world, [*requests.values()]), strict=True))

    def second(self, world: int) -> dict[Any, list[dict[str, Any]]]:
        """All that go on with so many processes."""
        return self._once(("second", world), lambda: self._run_second(world))

    def _run_second(self, world: int) -> dict[Any, list[dict[str, Any]]]:
        for other in self.others:
            if other[2] == world:
                self.first(other[1])
        self.first(world)
        requests: dict[Any, Request] = {}
        for each in self.same + self.local:
            if each[1] == world:
                requests[each] = (each[0], None, self.path(*each), {})
        for other in self.others:
            if other[2] == world:
                requests[other] = (other[0], None, self.path(*other), {"random": False})
        return dict(zip(requests, on(world, [*requests.values()]), strict=True))

    @functools.cached_property
    def on_one(self) -> dict[str, dict[str, Any]]:
        """Of each scenario, not cut, on one process, without dropout and augmentation."""
        requests = [(name, None, self.path("one", name), {"random": False}) for name in SCENARIOS]
        return {name: result for name, (result,) in zip(SCENARIOS, on(1, requests), strict=True)}


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Cuts:
    return Cuts(tmp_path_factory.mktemp("cuts"))


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_fit_goes_on_with_the_same_bits_on_as_many_processes(cuts: Cuts, world_size: int) -> None:
    for each in (each for each in cuts.same + cuts.local if each[1] == world_size):
        halves = zip(cuts.first(world_size)[each], cuts.second(world_size)[each], strict=True)
        for (first, second), whole in zip(halves, cuts.whole(world_size)[each[0]], strict=True):
            assert first["is_cut"] and not second["is_cut"]
            assert_equal(comparable(joined(first, second)), comparable(whole), 0.0, str(each))


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_fit_goes_on_with_another_number_of_processes(cuts: Cuts, world_size: int) -> None:
    for other in (other for other in cuts.others if other[2] == world_size):
        first = cuts.first(other[1])[other][0]
        assert first["is_cut"]
        for second in cuts.second(world_size)[other]:
            assert_equal(comparable(joined(first, second)), comparable(cuts.on_one[other[0]]), 1e-10, str(other))


@pytest.mark.parametrize("name", LOCAL)
def test_a_file_in_a_window_of_local_steps_changes_nothing(cuts: Cuts, name: str) -> None:
    requests: list[Request] = [(name, None, cuts.path("every", name), {"every": 2})]
    for written, whole in zip(on(2, requests)[0], cuts.whole(2)[name], strict=True):
        assert_equal(comparable(written), comparable(whole), 0.0)


def test_a_fit_goes_on_from_every_moment(tmp_path: Path) -> None:
    whole = SCENARIOS["dropout"](None, f"{tmp_path}/whole.ckpt")
    assert whole["moments"] == MOMENTS["dropout"]
    for cut in range(1, whole["moments"] + 1):
        halves = [SCENARIOS["dropout"](at, f"{tmp_path}/{cut}.ckpt") for at in (cut, None)]
        assert_equal(comparable(joined(*halves)), comparable(whole), 0.0, f"cut at {cut}")


def collect(folder: str, cuts: list[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """On a rank: a fit that is not cut, and those that were."""
    whole = collecting(None, f"{folder}/whole.ckpt")
    halves = [[collecting(at, f"{folder}/{cut}.ckpt") for at in (cut, None)] for cut in cuts]
    return [(joined(*each), whole) for each in halves]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_module_collects_in_its_attributes_goes_on(tmp_path: Path, world_size: int) -> None:
    cuts = [*range(1, 18)] if world_size == 1 else [3, 8, 9, 16]
    call = functools.partial(run_distributed, collect, world_size) if world_size > 1 else lambda *args: [collect(*args)]
    for results in call(str(tmp_path), cuts):
        for cut, (found, whole) in zip(cuts, results, strict=True):
            assert whole["callback_metrics"]["outputs"] > 0
            assert_equal(comparable(found), comparable(whole), 0.0, f"cut at {cut}")


@pytest.mark.parametrize("scenario", [freezing, averaging])
def test_what_hooks_have_done_once_is_there_after_each_cut(tmp_path: Path, scenario: Callable[..., Any]) -> None:
    whole = scenario(None, f"{tmp_path}/whole.ckpt")
    assert whole["moments"] == 14
    for cut in range(1, 15):
        halves = [scenario(at, f"{tmp_path}/{cut}.ckpt") for at in (cut, None)]
        assert_equal(comparable(joined(*halves)), comparable(whole), 0.0, f"cut at {cut}")
    again = scenario(None, f"{tmp_path}/whole.ckpt")
    assert not again["logged"]
    assert_equal(again["parameters"], whole["parameters"], 0.0)


def attributes_of(changes: dict[str, Any]) -> dict[str, Any]:
    module = Collecting()
    before = checksums_of_attributes(module)
    vars(module).update(changes)
    return save_attributes(module, before)


def test_only_plain_attributes_that_have_changed_are_saved() -> None:
    module = Collecting()
    module.steps, module.weights, module.same = [1, (2.0, "text")], [module.layers[0].weight], 3
    module.layers.more = torch.nn.Module()
    before = checksums_of_attributes(module)
    assert save_attributes(module, before) == {}
    with torch.no_grad():
        module.layers[0].weight.add_(1.0)  # of a list that a copy would part from the module
    module.steps.append(None)
    module.lock, module.seen = object(), 7
    saved = save_attributes(module, before)
    assert {name: entry["value"] for name, entry in saved.items()} == {"steps": [1, (2.0, "text"), None], "seen": 7}
    module.steps.clear()
    load_attributes(module, [saved], 0, torch.device("cpu"), True)
    assert module.steps == [1, (2.0, "text"), None]


def test_attributes_that_another_number_of_processes_cannot_have_are_named() -> None:
    one = attributes_of({"outputs": [torch.ones(2)], "seen": 3})
    module = Collecting()
    message = r"Collecting\.outputs: each of the 1 processes of the run that was cut had its own"
    with pytest.warns(UserWarning, match=message):
        load_attributes(module, [one], None, torch.device("cpu"), True)
    assert (module.outputs, module.seen) == ([], 3)
    two = [attributes_of({"seen": 3, "scores": {"all": [1]}, "ratio": 0.5}), attributes_of({"seen": 4, "ratio": 0.5})]
    with pytest.warns(UserWarning, match=r"^Collecting\.scores, Collecting\.seen: each of the 2 processes") as caught:
        load_attributes(module, two, None, torch.device("cpu"), True)
        load_attributes(module, two, None, torch.device("cpu"), False)  # rank 0 alone says so
    assert len(caught) == 1
    assert (module.seen, module.ratio) == (3, 0.5)


# --- the file ---------------------------------------------------------------------------------------------------------


def trainer(strategy: str, **options: Any) -> pl.Trainer:
    with quiet():
        return make_trainer(strategy, **options)


class Asks(pl.Callback):
    """Asks to stop behind a batch of the training, or fails there."""

    def __init__(self, resume: Any, batch: int, error: BaseException | None = None) -> None:
        self.resume, self.batch, self.error = resume, batch, error

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            if self.error is not None:
                raise self.error
            self.resume.preemption.request("the test")


def fit(path: Path, stop: int | None = None, error: BaseException | None = None, **options: Any) -> dict[str, Any]:
    """On one process; what it leaves behind, also if it is stopped."""
    resume = Resume(path, **{name: options.pop(name) for name in ("every", "time_limit") if name in options})
    asks = [] if stop is None else [Asks(resume, stop, error)]
    module = options.pop("module", None) or Net()
    made = trainer("ddp_callbacks", callbacks=[resume, *asks, *options.pop("callbacks", [])], **options)
    with quiet(), contextlib.suppress(Preempted, ZeroDivisionError):
        made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module)


def test_lightning_alone_loads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    cut = fit(path, 6)
    module = Net()
    made = trainer("auto")
    with quiet():
        made.fit(module, loader(shuffle=True), loader(13, 5, 9), ckpt_path=path, weights_only=True)
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
    with quiet():
        made.fit(Net(), loader())
    assert (tmp_path / "run.ckpt").exists() and not list(Path().iterdir())


def test_lightning_says_once_that_the_fit_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer("ddp_callbacks", callbacks=[Resume(tmp_path / "run.ckpt")])
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.fit(Net(), loader(), loader(13, 5, 9))
    finally:
        logger.removeHandler(caplog.handler)
    records = {id(record): record.getMessage() for record in caplog.records}  # the handlers above have them, too
    assert sum("`Trainer.fit` stopped: `max_epochs=2` reached." in text for text in records.values()) == 1


def test_a_finished_fit_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    whole = fit(path)
    again = fit(path)
    assert not again["logged"]
    assert_equal(again["parameters"], whole["parameters"], 0.0)
    assert again["global_step"] == whole["global_step"] == 8
    assert again["callback_metrics"] == whole["callback_metrics"] != {}


@pytest.mark.parametrize("every", [2, timedelta(microseconds=1)])
def test_what_was_written_now_and_then_is_gone_on_from(tmp_path: Path, every: Any) -> None:
    whole = fit(tmp_path / "whole.ckpt")
    first = fit(tmp_path / "run.ckpt", 7, ZeroDivisionError(), every=every)
    second = fit(tmp_path / "run.ckpt", every=every)
    done = 4 + 1 + 1 + 2  # rows before the last file: of an epoch, its validation, its end, and of two batches
    assert len(first["logged"]) == done
    assert_equal(first["logged"] + second["logged"], whole["logged"], 0.0)
    assert_equal(second["parameters"], whole["parameters"], 0.0)


class AsksInSanityCheck(pl.Callback):
    def __init__(self, resume: Any) -> None:
        self.resume = resume

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.sanity_checking:
            self.resume.preemption.request("the test")


def test_a_cut_in_the_sanity_check_of_a_run_that_goes_on_loses_nothing(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole.ckpt", num_sanity_val_steps=1)
    first = fit(tmp_path / "run.ckpt", 5, ZeroDivisionError(), num_sanity_val_steps=1)  # the file is of epoch 0
    before = (tmp_path / "run.ckpt").read_bytes()
    resume = Resume(tmp_path / "run.ckpt")
    made = trainer("ddp_callbacks", callbacks=[resume, AsksInSanityCheck(resume)], num_sanity_val_steps=1)
    with quiet(), pytest.raises(Preempted):
        made.fit(Net(), loader(shuffle=True), loader(13, 5, 9))
    assert (tmp_path / "run.ckpt").read_bytes() == before
    second = fit(tmp_path / "run.ckpt", num_sanity_val_steps=1)
    assert second["global_step"] == whole["global_step"] == 8
    assert len(first["logged"] + second["logged"]) >= len(whole["logged"])
    assert_equal(second["parameters"], whole["parameters"], 0.0)


@pytest.mark.parametrize("search", [LearningRateFinder(), BatchSizeFinder()])
def test_a_search_is_not_taken_for_the_fit(tmp_path: Path, search: Any) -> None:
    made = trainer("ddp_callbacks", callbacks=[Resume(tmp_path / "run.ckpt"), search])
    message = f"Resume cannot tell the trials of {type(search).__name__} from the fit"
    with quiet(), pytest.raises(ConfigurationError, match=message):
        made.fit(Net(), loader())
    assert not list(tmp_path.iterdir())


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    made = trainer("ddp_callbacks", callbacks=[Resume(tmp_path / "run.ckpt")], fast_dev_run=True)
    with quiet():
        made.fit(Net(), loader(), loader(13, 5, 9))
    assert made.global_step == 1 and not list(tmp_path.iterdir())


class Sizes(Net):
    """Notes how many samples of each loader a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append([0 if part is None else len(part[0]) for part in batch])
        return super().training_step(batch[0], batch_idx)


def test_a_loader_that_has_ended_beside_a_longer_one_stays_ended(tmp_path: Path) -> None:
    def sizes(stop: int | None) -> list[list[int]]:
        resume, module = Resume(tmp_path / "run.ckpt"), Sizes()
        made = trainer("ddp_callbacks", callbacks=[resume, *([Asks(resume, stop)] if stop else [])], max_epochs=1)
        with quiet(), contextlib.suppress(Preempted):
            made.fit(module, CombinedLoader([loader(shuffle=True), loader(13)], "max_size"))
        return module.sizes

    assert len(sizes(3)) == 3
    assert sizes(None) == [[8, 8], [8, 5], [8, 0], [5, 0]]


def test_a_time_limit_stops_a_fit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole.ckpt", num_sanity_val_steps=0)
    limit = timedelta(microseconds=1)
    parts = [fit(tmp_path / "run.ckpt", time_limit=limit, num_sanity_val_steps=0) for _ in range(16)]
    assert [row for part in parts for row in part["logged"]] == whole["logged"]
    assert_equal(parts[-1]["parameters"], whole["parameters"], 0.0)


def test_model_checkpoints_have_no_states_of_loaders(tmp_path: Path) -> None:
    fit(tmp_path / "run.ckpt", callbacks=[ModelCheckpoint(tmp_path, "model")], enable_checkpointing=True)
    made = trainer("auto", max_epochs=3)
    with quiet():
        made.fit(Net(), loader(shuffle=True), loader(13, 5, 9), ckpt_path=tmp_path / "model.ckpt")
    assert made.global_step == 12


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    fit(path, 6)
    wide = Net()
    wide.more = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"model: Net with 83 numbers in 4 parameters in the file, Net with 89"):
        fit(path, module=wide)
    made = trainer("ddp_callbacks", callbacks=[Resume(path)])
    with quiet(), pytest.raises(CheckpointError, match="samples of the training: 29 in the file, 30 now"):
        made.fit(Net(), loader(30, shuffle=True), loader(13, 5, 9))
    made = trainer("ddp_callbacks", callbacks=[Resume(path)])
    with quiet(), pytest.raises(CheckpointError, match="batch size of the training: 8 in the file, 4 now"):
        made.fit(Net(), loader(29, 4, shuffle=True), loader(13, 5, 9))


def test_settings_of_resume_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every must be a positive number of training batches"):
        Resume(tmp_path / "run.ckpt", every=0)
    several = [Resume(tmp_path / "run.ckpt"), Resume(tmp_path / "other.ckpt")]
    with quiet(), pytest.raises(ConfigurationError, match="a Trainer takes one callback Resume, got 2"):
        trainer("ddp_callbacks", callbacks=several).fit(Net(), loader())
    assert not list(tmp_path.iterdir())
    with quiet(), pytest.raises(ConfigurationError, match='Resume needs Trainer\\(strategy="ddp_callbacks"\\)'):
        trainer("auto", callbacks=[Resume(tmp_path / "run.ckpt")]).fit(Net(), loader())


def test_either_package_goes_on_from_the_file_of_the_other(tmp_path: Path) -> None:
    whole = fit_by("lightning.pytorch", tmp_path / "whole.ckpt", None)
    for first, second in (("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")):
        path = tmp_path / f"{first}.ckpt"
        halves = [fit_by(first, path, 6), fit_by(second, path, None)]
        assert_equal(halves[1], whole, 0.0)


def fit_by(package: str, path: Path, stop: int | None) -> dict[str, torch.Tensor]:
    """The parameters that a package has trained."""
    lightning = importlib.import_module(package)
    home = "for_lightning" if package.startswith("lightning") else "for_pytorch_lightning"
    classes = importlib.import_module(f"ddp_callbacks.lightning.{home}")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(6, 3).double()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

    class Stops(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == stop:
                resume.preemption.request("the test")

    resume = classes.Resume.exactly(path)
    lightning.seed_everything(3, verbose=False)
    module = Module()
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with quiet():
        made = lightning.Trainer(
            strategy="ddp_callbacks",
            callbacks=[resume, Stops()],
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            **options,
        )
        with contextlib.suppress(Preempted):
            made.fit(module, loader(shuffle=True))
    return dict(module.state_dict())


# --- a program --------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import lightning.pytorch as pl
import torch
from lightning_scenarios import Net, loader, quiet
from ddp_callbacks.lightning import Resume

class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print("batch", trainer.fit_loop.total_batch_idx + 1, flush=True)
        if wait and trainer.fit_loop.total_batch_idx + 1 == 5:
            sys.stdin.readline()  # until the signal was sent

path, wait = sys.argv[1], sys.argv[2] == "wait"
pl.seed_everything(7, verbose=False)
module = Net()
with quiet():
    trainer = pl.Trainer(strategy="ddp_callbacks", accelerator="cpu", max_epochs=3, callbacks=[Resume(path), Tell()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader(shuffle=True), loader(13, 5, 9))
print("sum", sum(float(value.sum()) for value in module.state_dict().values()).hex(), flush=True)
"""


def start(folder: Path, path: str, mode: str, world_size: int) -> list[subprocess.Popen[str]]:
    (folder / "program.py").write_text(PROGRAM)
    port, processes = free_port(), []
    for rank in range(world_size):
        names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        variables = {name: str(number) for name, number in names.items()} if world_size > 1 else {}
        variables |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "PYTHONPATH": os.path.dirname(__file__)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(folder / "program.py"), str(folder / path), mode],
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def end(processes: list[subprocess.Popen[str]], code: int) -> list[list[str]]:
    """The lines that each has printed."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return [output.splitlines() for output, _ in outputs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_that_is_terminated_ends_with_75_and_goes_on(tmp_path: Path, world_size: int) -> None:
    ((*_, whole), *_) = end(start(tmp_path, "whole.ckpt", "run", 1), 0)
    processes = start(tmp_path, "run.ckpt", "wait", world_size)
    last = processes[-1]
    assert last.stdout is not None
    while last.stdout.readline().strip() not in ("batch 5", ""):
        pass
    last.send_signal(signal.SIGTERM)
    for lines in end(processes, 75):
        assert "batch 12" not in lines and not any(line.startswith("sum") for line in lines)
    stopped = torch.load(tmp_path / "run.ckpt", weights_only=True)["global_step"]
    for lines in end(start(tmp_path, "run.ckpt", "run", world_size), 0):
        assert lines[0] == f"batch {stopped + 1}"
        name, number = lines[-1].split()
        assert name == "sum"
        assert float.fromhex(number) == pytest.approx(float.fromhex(whole.split()[1]), rel=1e-10)
