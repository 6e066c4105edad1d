"""What ``Resume`` promises a Trial beside the numbers: files, refusals, and a bar.

That scripts go on with the numbers of one process is shown by test_equivalence.py.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchbearer
from kit.compare import assert_equal
from kit.ranks import run_distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial
from torchbearer.callbacks import CSVLogger, StepLR, Tqdm
from torchbearer.metrics import Metric
from trials import CLASSES, Extra, data, network, normalized, outcome, own_metrics, parameters, run, train, trial
from ways import Way, cut_at_every_moment

from ddp_callbacks import LocalSGD, get_rank
from ddp_callbacks.checkpoints import CheckpointFile
from ddp_callbacks.errors import EXIT_PREEMPTED, CheckpointError, ConfigurationError, Preempted
from ddp_callbacks.torchbearer import SHARE, DDPCallback, Resume

RUN = "1.pt"  # the file of the first Trial of a run


def loader(samples: int = 30, batch_size: int = 6, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(data(samples, seed), batch_size, shuffle=True)


def make(
    folder: Path | str, *callbacks: Any, cut: int | None = None, resume: dict[str, Any] | None = None, **options: Any
) -> Trial:
    """A Trial with ``Resume``, which is asked to stop at a moment."""
    way = Way(1, resumed_on=1, resume=tuple((resume or {}).items()))
    made = trial(Extra(way, str(folder), cut, resumes=True)(**options), callbacks=callbacks)
    return made.with_train_generator(loader())


def cut(made: Trial, epochs: int = 3) -> Preempted:
    with pytest.raises(Preempted) as caught:
        made.run(epochs)
    return caught.value


def asking(resume: Resume, epoch: int, batch: int | None) -> Any:
    """Asks to stop behind this batch."""

    @torchbearer.callbacks.on_step_training
    def ask(state: Any) -> None:
        if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (epoch, batch):
            resume.preemption.request("the test")

    return ask


def position_in(path: Path) -> tuple[int, int | None]:
    """Number of whole epochs, and of batches of the pass."""
    saved = CheckpointFile(path, weights_only=False).read()
    assert saved is not None
    return len(saved.shared["history"]), saved.own(0)["batches"]


# --- one process ------------------------------------------------------------------------------------------------------


def plain(*callbacks: Any) -> Trial:
    """Without ``DDPCallback``."""
    model = nn.Sequential(network(), nn.Dropout(0.2), nn.Linear(CLASSES, CLASSES).double())
    made = trial(list(callbacks), model=model, metrics=["acc", "loss", *own_metrics()])
    return made.with_generators(loader(), loader(13, 5, 1))


def result(made: Trial) -> Any:
    history = made.run(3)
    return outcome(made, history, all_of_it=[dict(epoch) for epoch in history])


def test_a_single_process_needs_no_ddp_callback(tmp_path: Path) -> None:
    """`Resume` alone keeps the bits of a Trial."""
    expected, resume = result(plain()), Resume(tmp_path / "run.pt")
    preempted = cut(plain(resume, asking(resume, 1, 2)))
    assert (preempted.code, preempted.path) == (EXIT_PREEMPTED, str(tmp_path / "run.pt"))
    assert "the test on rank 0" in str(preempted)
    again = torchbearer.callbacks.on_step_training(lambda state: None)
    assert_equal(result(plain(Resume(tmp_path / "run.pt"), again)), expected, relative=0.0)


def test_torchbearer_alone_goes_on_from_the_file(tmp_path: Path) -> None:
    """Torchbearer alone loads the file of `Resume`."""
    plain(Resume(tmp_path / "run.pt")).run(2)
    alone = plain()
    alone.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=False))
    assert len(alone.state[torchbearer.HISTORY]) == 2
    assert len(alone.run(3)) == 3


def test_an_evaluation_between_two_runs_does_not_change_the_epochs_of_the_one_that_goes_on(tmp_path: Path) -> None:
    def script(*callbacks: Any) -> Any:
        made = plain(*callbacks)
        made.run(1)
        made.evaluate()  # Torchbearer adds its values to the last epoch of the history
        return [dict(epoch) for epoch in made.run(3)]

    resume = Resume(tmp_path / "run.pt")

    @torchbearer.callbacks.on_step_validation
    def ask(state: Any) -> None:
        if len(state[torchbearer.HISTORY]) == state[torchbearer.EPOCH] == 2:
            resume.preemption.request("the test")

    expected = script()
    with pytest.raises(Preempted):
        script(resume, ask)
    again = torchbearer.callbacks.on_step_validation(lambda state: None)
    found = script(Resume(tmp_path / "run.pt"), again)
    assert_equal(found[1:], expected[1:], relative=0.0)  # what it evaluates in front is the model of the cut


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_csv_file_keeps_its_rows_if_a_script_evaluates_in_front_of_the_run(tmp_path: Path, call: str) -> None:
    def script(name: str, cut: int | None) -> list[str]:
        resume, log = Resume(tmp_path / f"{name}.pt"), CSVLogger(str(tmp_path / name), batch_granularity=True)

        @torchbearer.callbacks.on_step_training
        def ask(state: Any) -> None:
            if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (1, cut):
                resume.preemption.request("the test")

        made = plain(resume, log, ask).with_test_generator(loader())
        getattr(made, call)()
        with contextlib.suppress(Preempted):
            made.run(2)
        return (tmp_path / name).read_text().splitlines()

    expected = script("whole", None)
    assert len(expected) == 12
    assert script("cut", 2) == expected[:9]
    assert script("cut", None) == expected


class Total(Metric):  # type: ignore[misc]
    """Not built from decorators."""

    def reset(self, state: Any) -> None:
        self.total, self.count = 0.0, 0

    def process(self, state: Any) -> None:
        self.total += float(state[torchbearer.Y_PRED].abs().sum())
        self.count += len(state[torchbearer.Y_PRED])

    def process_final(self, state: Any) -> dict[str, float]:
        return {self.name: self.total / self.count}


class InAnObject(Total):
    def reset(self, state: Any) -> None:
        self.sums = defaultdict(lambda: 0.0)

    total = property(lambda self: self.sums["total"], lambda self, value: self.sums.update(total=value))
    count = property(lambda self: self.sums["count"], lambda self, value: self.sums.update(count=value))


def measured(folder: str, kind: type[Metric], cut: int | None) -> Any:
    """The rows of a metric, in a run that is asked to stop after a batch of the second epoch."""
    resume = Resume(Path(folder, "run.pt"))
    made = trial([DDPCallback(verify=None), resume, asking(resume, 1, cut)], metrics=[kind("own")])
    made.with_train_generator(DataLoader(data(30), 6))
    with contextlib.suppress(Preempted):
        return [epoch["own"] for epoch in made.run(2)]


def test_a_metric_of_a_class_of_the_users_goes_on_in_mid_epoch_or_is_named(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("whole", "cut", "object", "moved")}
    expected = measured(folders["whole"], Total, None)
    for name, kind in (("cut", Total), ("object", InAnObject), ("moved", Total)):
        assert measured(folders[name], kind, 1) is None
    assert measured(folders["cut"], Total, None) == expected
    with pytest.warns(UserWarning, match=r"InAnObject.sums cannot be saved: .* the metric own counts only"):
        assert measured(folders["object"], InAnObject, None) != expected
    run_distributed(measured_elsewhere, 2, folders["moved"])


def measured_elsewhere(folder: str) -> None:
    """On a rank, from the file of one process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured(folder, Total, None)
    said = [str(warning.message) for warning in caught if "the metric own counts only" in str(warning.message)]
    assert len(said) == (get_rank() == 0)
    assert all(text.startswith("Total.count, Total.total cannot be taken over from the 1 process of") for text in said)


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is to be loaded")


def test_a_finished_run_does_nothing_and_returns_its_history(tmp_path: Path) -> None:
    """A finished Trial only returns its history."""
    first = result(plain(Resume(tmp_path / "run.pt")))
    again = plain(Resume(tmp_path / "run.pt"))
    again.with_generators(DataLoader(Unreadable(*data(30).tensors), 6, shuffle=True), loader(13, 5, 1))
    assert_equal(result(again), first, relative=0.0)


class Reads(TensorDataset):
    """Notes what is read."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def evaluate_and_go_on(folder: str) -> list[int]:
    """What this rank reads in an epoch that is cut behind its third batch, and goes on."""
    rows = Reads(*data(30).tensors)  # a comparison of the first batch would read, too
    for cut_at in (2, None):
        resume = Resume(Path(folder, "run.pt"))
        made = plain(DDPCallback(verify=None), resume, asking(resume, 0, cut_at))
        made.with_train_generator(DataLoader(rows, 6, shuffle=True))
        read = len(rows.read)
        made.evaluate(data_key=torchbearer.TRAIN_DATA)
        del rows.read[read:]
        with contextlib.suppress(Preempted):
            made.run(1)
    return rows.read


def test_a_loader_that_was_evaluated_before_the_run_goes_on_at_the_next_sample(tmp_path: Path) -> None:
    first, second = run_distributed(evaluate_and_go_on, 2, str(tmp_path))
    assert sorted(first + second) == list(range(30))


def test_a_run_that_is_asked_to_stop_in_its_last_moment_is_finished(tmp_path: Path) -> None:
    resume = Resume(tmp_path / "run.pt")

    @torchbearer.callbacks.on_end_epoch
    def ask(state: Any) -> None:
        if state[torchbearer.EPOCH] == 2:
            resume.preemption.request("the test")

    assert len(plain(resume, ask).run(3)) == 3
    assert position_in(tmp_path / "run.pt")[0] == 3


# --- files ------------------------------------------------------------------------------------------------------------


class Dies(Callback):  # type: ignore[misc]
    def on_step_training(self, state: Any) -> None:
        if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (1, 4):
            raise KeyError("a crash")


def test_each_few_batches_a_file_is_written_from_which_a_run_that_died_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed Trial resumes from its last file."""

    def train_in(name: str, *more: Any) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = CSVLogger(str(folder / "log.csv"), batch_granularity=True)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: log.csvfile.close())
            found = train(make(folder, log, *more, resume={"every": 4}), loader(), epochs=3)
            return found | {"csv": (folder / "log.csv").read_text()}

    expected = train_in("whole")
    with pytest.raises(KeyError, match="a crash"):
        train_in("died", Dies())
    caplog.set_level("INFO")
    assert position_in(tmp_path / "died" / RUN) == (1, 3)
    assert position_in(tmp_path / "died" / "1.previous.pt") == (0, 4)
    assert_equal(train_in("died", Callback()), expected, relative=0.0)
    assert any(text.endswith(f"{RUN}, after batch 3 of epoch 2") for text in caplog.messages)
    assert len(expected["csv"].splitlines()) == 1 + 3 * (5 + 1)


def test_by_default_the_end_of_each_epoch_is_written(tmp_path: Path) -> None:
    """`Resume` writes each epoch by default."""
    make(tmp_path).run(2)
    assert position_in(tmp_path / RUN) == (2, None)
    assert position_in(tmp_path / "1.previous.pt") == (1, None)


def test_a_time_limit_stops_the_run(tmp_path: Path) -> None:
    assert "the time limit" in str(cut(make(tmp_path, resume={"time_limit": timedelta(microseconds=1)})))
    assert position_in(tmp_path / RUN) == (0, 1)


class Bar:
    """In place of tqdm's."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, total: int, **_: Any) -> None:
        self.total, self.updates = total, []
        self.made.append(self)

    def update(self, batches: int) -> None:
        self.updates.append(batches)

    def set_postfix_str(self, _: str) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_bar_begins_where_the_run_goes_on(tmp_path: Path) -> None:
    for moment, bars in ((3, [(5, [1] * 3)]), (None, [(5, [3, 1, 1])])):
        Bar.made.clear()
        with contextlib.suppress(Preempted):
            make(tmp_path, Tqdm(tqdm_module=Bar), cut=moment).run(1)
        assert [(bar.total, bar.updates) for bar in Bar.made] == bars


class Draws(Callback):  # type: ignore[misc]
    """A user's callback, which takes from an iterator."""

    def __init__(self) -> None:
        self.numbers, self.taken = (number for number in range(100)), []

    def on_step_training(self, _: Any) -> None:
        self.taken.append(next(self.numbers))


def test_an_iterator_of_a_users_callback_is_left_alone(tmp_path: Path) -> None:
    draws = [Draws(), Draws()]
    cut(make(tmp_path, draws[0], cut=3))
    make(tmp_path, draws[1]).run(1)
    assert [each.taken for each in draws] == [[0, 1, 2], [0, 1]]


# --- several processes ------------------------------------------------------------------------------------------------


def cut_in_a_window(folder: str) -> Any:
    """This rank's own model in the middle of a window, and the samples that it has used there."""
    seen = []
    count = torchbearer.callbacks.on_step_training(lambda state: seen.append(state[SHARE].local))
    made = make(folder, count, cut=2, sync=LocalSGD(every=10**6)).with_train_generator(loader(27, 9))
    with contextlib.suppress(Preempted):
        made.for_train_steps(10**6).run(1)
    return parameters(made), sum(seen)


def test_on_another_number_a_window_of_local_steps_is_closed(tmp_path: Path) -> None:
    """Another number of processes closes an open window."""
    (first, samples), (second, other_samples) = run_distributed(cut_in_a_window, 2, str(tmp_path))
    alone = make(tmp_path / "other")
    alone.load_state_dict(torch.load(tmp_path / RUN, weights_only=False))
    for name, value in parameters(alone).items():
        assert not torch.equal(first[name], second[name])
        mean = (samples * first[name] + other_samples * second[name]) / (samples + other_samples)
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)


def message_of(made: Trial) -> str:
    with pytest.raises(ConfigurationError) as caught:
        made.run(1)
    return str(caught.value)


def messages(folder: str) -> list[str]:
    """Of a Trial whose data nobody divides, and of one that has run on one process until now."""
    undivided = trial([Resume(f"{folder}/other.pt")]).with_train_generator(loader())
    return [message_of(undivided), message_of(make(folder, batch_size="per_process"))]


def test_several_processes_are_refused_where_the_position_has_no_meaning(tmp_path: Path) -> None:
    """`Resume` refuses several processes where positions mean nothing."""
    cut(make(tmp_path, cut=3, batch_size="per_process"))
    for undivided, per_process in run_distributed(messages, 2, str(tmp_path)):
        assert "Resume needs DDPCallback" in undivided
        assert re.search(r"the number of processes must be 1, .* got 2", per_process)


# --- refusals ---------------------------------------------------------------------------------------------------------


def other(folder: Path, batches: Any, **options: Any) -> Trial:
    callbacks = Extra(Way(1, resumed_on=1), str(folder), resumes=True)()
    return trial(callbacks, **options).with_train_generator(batches)


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    cut(make(tmp_path, cut=3))
    before = (tmp_path / RUN).read_bytes()
    others = {
        r"metrics: .* in the file, metric_list": other(tmp_path, loader(), metrics=["loss"]),
        r"samples of train_data: 30 in the file, 31 now": other(tmp_path, loader(31)),
        r"batch size of train_data: 6 in the file, 5 now": other(tmp_path, loader(30, 5)),
        r"model: Sequential with 146 .* in the file, .* with 174 n": other(tmp_path, loader(), model=normalized()),
    }
    for says, made in others.items():
        with pytest.raises(CheckpointError, match=says):
            made.run(1)
    assert (tmp_path / RUN).read_bytes() == before


def test_a_learning_rate_that_the_script_changes_is_not_ignored_silently(tmp_path: Path) -> None:
    def scheduled(lr: float, gamma: float) -> Trial:
        model, callbacks = network().float(), [StepLR(1, gamma), Resume(tmp_path / RUN)]
        optimizer = torch.optim.SGD(model.parameters(), lr)
        return Trial(model, optimizer, nn.CrossEntropyLoss(), callbacks=callbacks, verbose=0)

    for epochs in (1, 2):
        scheduled(0.1, 0.5).with_train_generator(loader()).run(epochs)
    with pytest.warns(UserWarning, match=r"lr of SGD 0\.1, now 0\.2; gamma of StepLR 0\.5, now 0\.9\. The run"):
        scheduled(0.2, 0.9).with_train_generator(loader()).run(3)


def test_a_trial_takes_one_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a Trial takes one callback Resume, got 2"):
        make(tmp_path, Resume(tmp_path / "other.pt")).run(1)


def test_losses_that_a_closure_has_set_are_there_if_no_batch_follows_a_cut() -> None:
    cut_at_every_moment(run, "a_closure_with_losses_under_keys_of_its_own")
