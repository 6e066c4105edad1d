"""What ``Resume`` promises a Trial beside the numbers: files, settings, refusals, and a program with real signals."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchbearer
from commands import DEADLINE, run, start
from comparing import assert_equal
from distributed import run_distributed
from resume_torchbearer_scenarios import (
    Network,
    Watch,
    make_trial,
    metrics,
    outcome,
    own_metrics,
    rows,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial
from torchbearer.callbacks import CSVLogger, GradientClipping, Tqdm

from ddp_callbacks import LocalSGD
from ddp_callbacks.checkpoints import CheckpointFile
from ddp_callbacks.checkpoints.intervals import EachTime
from ddp_callbacks.errors import CheckpointError, ConfigurationError, Preempted
from ddp_callbacks.torchbearer import SHARE, DDPCallback, Resume

EXIT_PREEMPTED = 75


def loader(samples: int = 30, batch_size: int = 6, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows(samples, seed)), batch_size, shuffle=True)


def make(watch: Watch, *callbacks: Any, **options: Any) -> Trial:
    model = Network()
    return make_trial(watch, model, torch.optim.Adam(model.parameters(), lr=0.05), list(callbacks), **options)


def cut(scenario: Callable[[], Any]) -> Preempted:
    with pytest.raises(Preempted) as caught:
        scenario()
    return caught.value


def position_in(path: Path) -> tuple[int, str, int]:
    """Number of whole epochs, phase, and batches of the pass."""
    saved = CheckpointFile(path, weights_only=False).read()
    assert saved is not None
    position = saved.own(0)["position"]
    return len(saved.shared["history"]), position["phase"], position["batches"]


# --- one process ------------------------------------------------------------------------------------------------------


def plain_trial(callbacks: list[Any]) -> Trial:
    model = Network(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    metrics = ["acc", "loss", *own_metrics()]
    made = Trial(model, optimizer, nn.CrossEntropyLoss(), metrics=metrics, callbacks=callbacks, verbose=0)
    torch.manual_seed(5)
    return made.to("cpu", torch.float64).with_generators(loader(), loader(13, 5, 1))


def result(made: Trial, epochs: int = 3) -> Any:
    history = [dict(epoch) for epoch in made.run(epochs)]
    return history, dict(made.state[torchbearer.MODEL].state_dict()), torch.rand(2)


def test_without_a_cut_and_without_ddp_callback_a_run_has_the_bits_of_one_without_us(tmp_path: Path) -> None:
    assert_equal(result(plain_trial([Resume(tmp_path / "run.pt")])), result(plain_trial([])), relative=0.0)


def test_a_single_process_needs_no_ddp_callback(tmp_path: Path) -> None:
    expected = result(plain_trial([]))
    for batch in (0, 2, 4):
        path = tmp_path / f"{batch}.pt"
        resume = Resume(path)

        @torchbearer.callbacks.on_step_training
        def ask(state: Any, resume: Resume = resume, batch: int = batch) -> None:
            if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (1, batch):
                resume.preemption.request("the test")

        preempted = cut(lambda resume=resume, ask=ask: plain_trial([resume, ask]).run(3))  # type: ignore[misc]
        assert (preempted.code, preempted.path) == (EXIT_PREEMPTED, str(path))
        assert "the test on rank 0" in str(preempted)
        again = torchbearer.callbacks.on_step_training(lambda state: None)
        assert_equal(result(plain_trial([Resume(path), again])), expected, relative=0.0)


def test_torchbearer_alone_goes_on_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    plain_trial([Resume(path)]).run(2)
    alone = plain_trial([])
    alone.load_state_dict(torch.load(path, weights_only=False))
    assert len(alone.state[torchbearer.HISTORY]) == 2
    assert len(alone.run(3)) == 3


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is to be loaded")


def test_a_finished_run_does_nothing_and_returns_its_history(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    first = metrics(None, path)
    assert_equal(metrics(None, path), first, relative=0.0)
    made = make(Watch(Resume(tmp_path / "other.pt"), None)).with_generators(loader(), None)
    history = made.run(2)
    again = make(Watch(Resume(tmp_path / "other.pt"), None))
    again.with_train_generator(DataLoader(Unreadable(*rows(30, 0)), 6, shuffle=True))
    assert again.run(2) == history


def test_more_epochs_go_on_and_a_second_run_can_be_cut(tmp_path: Path) -> None:
    def train(cut: int | None, path: Path) -> Any:
        watch = Watch(Resume(path), cut)
        made = make(watch).with_generators(loader(), None)
        made.run(1)
        return outcome(made, watch, made.run(3))

    expected = train(None, tmp_path / "whole.pt")
    for moment in (3, 6, 8, 12):
        cut(lambda moment=moment: train(moment, tmp_path / f"{moment}.pt"))  # type: ignore[misc]
        assert_equal(train(None, tmp_path / f"{moment}.pt"), expected, relative=0.0)


def test_each_few_batches_a_file_is_written_from_which_a_run_that_died_goes_on(tmp_path: Path) -> None:
    class Dies(Callback):  # type: ignore[misc]
        def on_step_training(self, state: Any) -> None:
            if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (1, 4):
                raise KeyError("a crash")

    def train(name: str, *more: Any) -> Any:
        watch = Watch(Resume(tmp_path / name, every=4), None)
        log = CSVLogger(str(tmp_path / f"{name}.csv"), batch_granularity=True)
        made = make(watch, log, *more).with_generators(loader(), None)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: log.csvfile.close())
            return outcome(made, watch, made.run(3), csv=(tmp_path / f"{name}.csv").read_text())

    expected = train("whole.pt")
    with pytest.raises(KeyError, match="a crash"):
        train("died.pt", Dies())
    assert position_in(tmp_path / "died.pt") == (1, "training", 3)
    assert position_in(tmp_path / "died.previous.pt") == (0, "training", 4)
    assert_equal(train("died.pt", Callback()), expected, relative=0.0)
    assert len(expected["csv"].splitlines()) == 1 + 3 * (5 + 1)


def test_by_default_the_end_of_each_epoch_is_written(tmp_path: Path) -> None:
    make(Watch(Resume(tmp_path / "run.pt"), None)).with_generators(loader(), None).run(2)
    assert position_in(tmp_path / "run.pt") == (2, "between epochs", 0)
    assert position_in(tmp_path / "run.previous.pt") == (1, "between epochs", 0)


def test_the_clock_is_looked_at_less_often_the_longer_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    interval = EachTime(timedelta(seconds=10), None)
    looks, written = [], []
    monkeypatch.setattr(interval, "_look", lambda: looks.append(moment) or EachTime._look(interval))
    for moment in range(1, 41):  # of half a second
        now[0] += 0.5
        if interval.is_due(is_batch=True, is_epoch_end=False):
            written.append(moment)
            interval.note_written()
    assert written == [20, 40]
    assert looks == [1, 10, 15, 17, 18, 19, 20, 21, 30, 35, 37, 38, 39, 40]


def test_a_time_limit_stops_the_run(tmp_path: Path) -> None:
    resume = Resume(tmp_path / "run.pt", time_limit=timedelta(microseconds=1))
    preempted = cut(lambda: make(Watch(resume, None)).with_generators(loader(), None).run(2))
    assert "the time limit" in str(preempted)
    assert position_in(tmp_path / "run.pt") == (0, "training", 1)


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
        made = make(Watch(Resume(tmp_path / "run.pt"), moment), Tqdm(tqdm_module=Bar)).with_generators(loader(), None)
        with contextlib.suppress(Preempted):
            made.run(1)
        assert [(bar.total, bar.updates) for bar in Bar.made] == bars


# --- passes of other kinds --------------------------------------------------------------------------------------------


def more_steps_than_batches(watch: Watch) -> Trial:
    return make(watch).with_generators(loader(), loader(13, 5, 1), train_steps=12)


def fewer_steps_than_batches(watch: Watch) -> Trial:
    return make(watch).with_generators(loader(), loader(13, 5, 1), train_steps=3, val_steps=2)


def a_list_of_batches(watch: Watch) -> Trial:
    return make(watch).with_generators(list(loader(24)), list(loader(13, 5, 1)))


def a_batch_in_front(state: Any) -> None:
    x = torch.cat([torch.arange(6, dtype=torch.float64).view(-1, 1), torch.randn(6, 5, dtype=torch.float64)], 1)
    state[torchbearer.X], state[torchbearer.Y_TRUE] = x, torch.arange(6) % 4


def a_loader_of_ones_own(watch: Watch) -> Trial:
    return make(watch).with_loader(a_batch_in_front).for_steps(train_steps=5, val_steps=3)


def only_validation(watch: Watch) -> Trial:
    return make(watch, metrics=[]).with_generators(None, loader(13, 5, 1))


def verified(watch: Watch) -> Trial:
    return make(watch, verify="first_batch").with_generators(loader(), None)


def skipping(watch: Watch) -> Trial:
    class Spoils(Callback):  # type: ignore[misc]
        def on_sample(self, state: Any) -> None:
            if state[torchbearer.BATCH] == 2:
                state[torchbearer.X][:, 1] = torch.nan

    return make(watch, Spoils(), skip_batch="non_finite").with_generators(loader(), None)


def without_refreshing(watch: Watch) -> Trial:
    return make(watch).with_generators(loader(), loader(13, 5, 1), train_steps=3).with_inf_train_loader()


def without_refreshing_at_all(watch: Watch) -> Trial:
    endless = loader()
    endless.inf = True
    return make(watch).with_generators(endless, loader(13, 5, 1), train_steps=3).with_inf_train_loader()


def resume_in_front(watch: Watch) -> Trial:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    callbacks = [watch.resume, DDPCallback(), watch]
    made = Trial(model, optimizer, nn.CrossEntropyLoss(), metrics=["acc"], callbacks=callbacks, verbose=0)
    torch.manual_seed(5)
    random.seed(5)
    return made.to("cpu", torch.float64).with_generators(loader(), loader(13, 5, 1))


def per_process(watch: Watch) -> Trial:
    return make(watch, batch_size="per_process").with_generators(loader(), loader(13, 5, 1))


def clipped(watch: Watch) -> Trial:
    """Torchbearer keeps the model's parameters in the callback."""
    return make(watch, GradientClipping(0.3)).with_generators(loader(), loader(13, 5, 1))


KINDS = (
    clipped,
    more_steps_than_batches,
    fewer_steps_than_batches,
    a_list_of_batches,
    a_loader_of_ones_own,
    only_validation,
    verified,
    skipping,
    without_refreshing,
    without_refreshing_at_all,
    resume_in_front,
    per_process,
)


def cut_and_go_on(folder: str, kinds: tuple[str, ...], moments: tuple[int, ...]) -> list[tuple[Any, list[Any]]]:
    """The result of each kind without a cut, and those with one."""

    def train(name: str, moment: int | None, path: str) -> Any:
        often = timedelta(microseconds=1) if name == "fewer_steps_than_batches" else None
        watch = Watch(Resume(path, every=often), moment)
        made = globals()[name](watch)
        return outcome(made, watch, made.run(3))

    found = []
    for name in kinds:
        whole, gone_on = train(name, None, f"{folder}/{name}.pt"), []
        for moment in moments:
            try:
                train(name, moment, f"{folder}/{name}-{moment}.pt")
            except Preempted:
                pass
            gone_on.append(train(name, None, f"{folder}/{name}-{moment}.pt"))
        found.append((whole, gone_on))
    return found


NAMES = tuple(kind.__name__ for kind in KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_passes_of_other_kinds_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    ((whole, gone_on),) = cut_and_go_on(str(tmp_path), (name,), (1, 2, 4, 5, 9))
    for one in gone_on:
        assert_equal(one, whole, relative=0.0)


def test_passes_of_other_kinds_go_on_bit_for_bit_on_two_processes(tmp_path: Path) -> None:
    for of_rank in run_distributed(cut_and_go_on, 2, str(tmp_path), NAMES, (2, 5)):
        for name, (whole, gone_on) in zip(NAMES, of_rank, strict=True):
            for one in gone_on:
                assert_equal(one, whole, relative=0.0, where=name)


# --- another number of processes --------------------------------------------------------------------------------------


def cut_in_a_window(path: str) -> Any:
    """This rank's own model in the middle of a window, and the samples that it has used there."""
    watch, seen = Watch(Resume(path), None), []

    class Asks(Callback):  # type: ignore[misc]
        def on_step_training(self, state: Any) -> None:
            seen.append(state[SHARE].local)
            if state[torchbearer.BATCH] == 1:
                watch.resume.preemption.request("the test")

    made = make(watch, Asks(), sync=LocalSGD(every=10**6)).with_generators(loader(27, 9), None)
    try:
        made.for_train_steps(10**6).run(1)
    except Preempted:
        pass
    return dict(made.state[torchbearer.MODEL].state_dict()), sum(seen)


def test_on_another_number_a_window_of_local_steps_is_closed(tmp_path: Path) -> None:
    found = run_distributed(cut_in_a_window, 2, str(tmp_path / "run.pt"))
    total = sum(samples for _, samples in found)
    alone = make(Watch(Resume(tmp_path / "other.pt"), None))
    alone.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=False))
    for name, value in alone.state[torchbearer.MODEL].state_dict().items():
        assert not torch.equal(found[0][0][name], found[1][0][name])
        mean = sum(model[name] * (samples / total) for model, samples in found)
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda w: make(w, metrics=["loss"]).with_generators(loader(), None), r"metrics: .* in the file, metric_list"),
        (lambda w: make(w).with_generators(loader(31), None), r"train_data: samples: 30 in the file, 31 now"),
        (lambda w: make(w).with_generators(loader(30, 5), None), r"train_data: batch size: 6 in the file, 5 now"),
        (
            lambda w: make_trial(w, Network(norm=True), torch.optim.Adam(Network().parameters()), []).with_generators(
                loader(), None
            ),
            r"model: Network with 84 parameters .* in the file, Network with 100 parameters",
        ),
    ],
)
def test_a_file_of_another_run_is_refused(tmp_path: Path, made: Any, says: str) -> None:
    cut(lambda: make(Watch(Resume(tmp_path / "run.pt"), 3)).with_generators(loader(), None).run(1))
    before = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(CheckpointError, match=says):
        made(Watch(Resume(tmp_path / "run.pt"), None)).run(1)
    assert (tmp_path / "run.pt").read_bytes() == before


@pytest.mark.parametrize("every", [0, -1, True, 1.5, timedelta(0)])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="every must be a positive number of training batches"):
        Resume("run.pt", every=every)


def test_a_trial_takes_one_resume(tmp_path: Path) -> None:
    made = make(Watch(Resume(tmp_path / "run.pt"), None), Resume(tmp_path / "other.pt"))
    with pytest.raises(ConfigurationError, match="a Trial takes one callback Resume, got 2"):
        made.with_generators(loader(), None).run(1)


def without_division(path: str) -> str:
    model = Network()
    made = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), callbacks=[Resume(path)])
    try:
        made.with_generators(loader(), None).run(1)
    except ConfigurationError as error:
        return str(error)
    return ""


def per_process_on_another_number(path: str) -> str:
    try:
        per_process(Watch(Resume(path), None)).run(3)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_several_processes_are_refused_where_the_position_has_no_meaning(tmp_path: Path) -> None:
    for text in run_distributed(without_division, 2, str(tmp_path / "none.pt")):
        assert "Resume needs DDPCallback" in text
    cut(lambda: per_process(Watch(Resume(tmp_path / "run.pt"), 3)).run(3))
    for text in run_distributed(per_process_on_another_number, 2, str(tmp_path / "run.pt")):
        assert re.search(r"the number of processes must be 1, .* got 2", text)


# --- a program --------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
import torch, torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ddp_callbacks import get_rank
from ddp_callbacks.torchbearer import DDPCallback, Resume

path, epochs = sys.argv[1], 6
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6, dtype=torch.float64), torch.arange(48) % 3)
model = nn.Linear(6, 3).double()

@torchbearer.callbacks.on_step_training
def tell(state):
    if "slow" in sys.argv:
        open(f"pid-{get_rank()}", "w").write(str(os.getpid()))
        print("batch", state[torchbearer.EPOCH], state[torchbearer.BATCH], flush=True)
        time.sleep(0.05)  # for the signal to come in the middle

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
trial = torchbearer.Trial(model, optimizer, nn.CrossEntropyLoss(), metrics=["loss"],
                          callbacks=[DDPCallback(), Resume(path), tell], verbose=0).to("cpu", torch.float64)
history = trial.with_train_generator(DataLoader(data, 4, shuffle=True)).run(epochs)
if get_rank() == 0:
    print("ended", len(history), *(f"{epoch['loss']:.15g}" for epoch in history), flush=True)
"""
LINE = re.compile(r"batch (\d+) (\d+)")


def stop_at(process: subprocess.Popen[str], batch: tuple[int, int], pid: Path, number: signal.Signals) -> str:
    """Signal a process when rank 0 has told of a batch of an epoch; the output until all have ended with 75."""
    text = ""
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                text += line
                if (found := LINE.search(line)) and (int(found[1]), int(found[2])) == batch:
                    os.kill(int(pid.read_text()), number)
            code = process.wait(DEADLINE)
        finally:
            process.kill()
    assert code == EXIT_PREEMPTED, text
    return text


@pytest.mark.cold
def test_a_program_that_gets_a_signal_exits_with_75_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (whole,) = re.findall("ended 6 (.*)", run(["python", "train.py", "whole.pt"], tmp_path, cold=True))
    command = ["python", "train.py", "run.pt", "slow"]
    text = stop_at(start(command, tmp_path, cold=True), (1, 3), tmp_path / "pid-0", signal.SIGTERM)
    assert re.search(r"stopped by SIGTERM on rank 0 .*run\.pt", text)
    assert "ended" not in text
    command = ["ddprun", "--nproc-per-node", 2, "--grace", 60, *command[1:]]
    text = stop_at(start(command, tmp_path, cold=True), (3, 5), tmp_path / "pid-1", signal.SIGUSR1)
    assert re.search(r"stopped by SIGUSR1 on rank 1 .*run\.pt", text)
    assert not re.search(r"batch 1 [0-3]$", text, re.MULTILINE)
    (gone_on,) = re.findall("ended 6 (.*)", run(["python", "train.py", "run.pt"], tmp_path, cold=True))
    assert list(map(float, gone_on.split())) == pytest.approx(list(map(float, whole.split())), rel=1e-10)
