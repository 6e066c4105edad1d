"""Rank 0 speaks: one progress bar, one set of files, of the merged values; a kill leaves a checkpoint that loads."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchbearer
from kit.ranks import Nursery, Rank, note
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial
from torchbearer.callbacks import Best, CallbackList, CSVLogger, Interval, ModelCheckpoint, MostRecent, TensorBoard

from ddp_callbacks.torchbearer import DDPCallback

pytestmark = pytest.mark.shares_results()

EPOCHS, STEPS, SAMPLES = 2, 4, 30
MERGED = ("acc", "loss", "val_acc", "val_loss")


# --- bodies ---------------------------------------------------------------------------------------------------------


class OwnLogger(Callback):  # type: ignore[misc]
    """A logger of the user's own, which Torchbearer does not know: a line for each epoch."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_end_epoch(self, state: Any) -> None:
        with open(self.path, "a") as file:
            print(json.dumps(plain(state[torchbearer.METRICS])), file=file)


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))


def make_trial(callbacks: list[Any], **options: Any) -> Trial:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=callbacks,
        **options,
    )
    return trial.with_generators(DataLoader(data(), 8, shuffle=True), DataLoader(data(14), 8))


def write_and_show() -> None:
    torch.set_num_threads(1)
    show_progress()
    print("=== files", file=sys.stderr, flush=True)
    write_everything()


def write_everything() -> None:
    """Each rank has a folder of its own for its files, so that a file shows who wrote it."""
    mine = f"rank-{os.environ.get('RANK', '0')}"
    os.mkdir(mine)
    trial = make_trial(
        [
            CSVLogger(f"{mine}/before.csv"),
            ModelCheckpoint(f"{mine}/each.{{epoch}}.pt"),
            OwnLogger(f"{mine}/own"),
            DDPCallback(also_rank_zero=(OwnLogger,)),
            CSVLogger(f"{mine}/after.csv", batch_granularity=True),
            ModelCheckpoint(f"{mine}/best-only.pt", save_best_only=True),
            Best(f"{mine}/best.{{epoch}}.pt", monitor="val_loss"),
            MostRecent(f"{mine}/recent.{{epoch}}.pt"),
            Interval(f"{mine}/step.{{epoch}}.{{t}}.pt", save_model_params_only=True, on_batch=True),
            TensorBoard(f"{mine}/tb", write_graph=False),
        ],
        verbose=0,
    )
    trial.run(EPOCHS)
    note("written", plain(trial.state[torchbearer.HISTORY]))


def show_progress() -> None:
    """Every way to ask for a progress bar, a line on stderr before each."""
    trial = make_trial([DDPCallback()])
    trial.with_test_generator(DataLoader(TensorDataset(data(10).tensors[0]), 4))
    phases: dict[str, Callable[[], Any]] = {
        "default": lambda: trial.run(1),
        "positional 2": lambda: trial.run(2, 2),
        "verbose=1": lambda: trial.run(3, verbose=1),
        "verbose=0": lambda: trial.run(4, verbose=0),
        "evaluate": lambda: trial.evaluate(),
        "predict": lambda: trial.predict(),
        "replay": lambda: trial.replay(),
    }
    for name, phase in phases.items():
        print(f"=== {name}", file=sys.stderr, flush=True)
        result = phase()
        note(name, plain(result[-1:] if isinstance(result, list) else result) if name != "replay" else None)
    note("history", plain(trial.state[torchbearer.HISTORY]))


def die_while_saving(moments: list[str]) -> None:
    """Save one checkpoint, then die at one moment of saving the next, in a folder of its own."""
    torch.set_num_threads(1)
    moment = moments[int(os.environ["INDEX"])]
    os.mkdir(moment)
    trial = make_trial(
        [DDPCallback(), MostRecent(f"{moment}/recent.{{epoch}}.pt"), MostRecent(f"{moment}/same.pt")], verbose=0
    )
    trial.run(1)
    arm(moment)
    trial.run(2)


def arm(moment: str) -> None:
    """Kill this process at ``moment`` of the next save."""
    when, name, number = moment.split("-")
    owner: Any = torch if name == "save" else os
    real, calls = getattr(owner, name), []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) < int(number):
            return real(*args, **kwargs)
        if when == "during":  # half of the file is there
            real(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rank]]:
    """The folder with the ranks' files, and the ranks."""
    folder = tmp_path_factory.mktemp("written")
    ranks = nursery.run(write_and_show, 2, folder)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    return folder, ranks


def test_only_rank_0_writes_files(written: tuple[Path, list[Rank]]) -> None:
    """Rank 0 alone writes a Trial's files; `also_rank_zero` adds yours."""
    folder, ranks = written
    assert files(folder / "rank-1") == []
    # The running means are a rank's own.
    one, other = ([[epoch[key] for key in MERGED] for epoch in rank.notes["written"]] for rank in ranks)
    assert one == other and len(one) == EPOCHS
    names = files(folder / "rank-0")
    assert [name for name in names if "events.out" not in name] == sorted(
        ["before.csv", "after.csv", "own", "best-only.pt", "recent.1.pt", "each.0.pt", "each.1.pt"]
        + [name for name in names if name.startswith("best.")]
        + [f"step.{epoch}.{batch}.pt" for epoch in range(EPOCHS) for batch in range(STEPS)]
    )
    assert len([name for name in names if name.startswith("best.")]) == 1, "only the best is kept"
    assert [os.path.dirname(name) for name in names if "events.out" in name] == ["tb/Linear_torchbearer"]


def test_checkpoints_load_and_hold_the_run(written: tuple[Path, list[Rank]]) -> None:
    """Torchbearer's checkpoints load, as without us."""
    folder, ranks = written
    history = ranks[0].notes["written"]
    for name, epochs in {"each.0.pt": 1, "each.1.pt": 2, "recent.1.pt": 2}.items():
        # Torchbearer pickles its own classes, so torch's weights_only cannot hold.
        saved = torch.load(folder / "rank-0" / name, weights_only=False)
        assert plain(saved[torchbearer.HISTORY]) == history[:epochs]
    steps = [torch.load(folder / "rank-0" / f"step.1.{batch}.pt")["weight"] for batch in range(STEPS)]
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(steps))
    torch.testing.assert_close(saved[torchbearer.MODEL]["weight"], steps[-1], rtol=0, atol=0)
    best = min(range(EPOCHS), key=lambda epoch: history[epoch]["val_loss"])
    assert (folder / "rank-0" / f"best.{best}.pt").exists()
    for name in (f"best.{best}.pt", "best-only.pt"):
        saved = torch.load(folder / "rank-0" / name, weights_only=False)
        assert plain(saved[torchbearer.HISTORY]) == history[: best + 1]


def test_the_csv_holds_one_line_per_epoch_or_step_with_the_merged_values(written: tuple[Path, list[Rank]]) -> None:
    """CSV files and TensorBoard get merged values."""
    folder, ranks = written
    with (folder / "rank-0" / "before.csv").open() as file:
        epochs = list(csv.DictReader(file))
    assert [row["epoch"] for row in epochs] == ["0", "1"]
    for row, expected in zip(epochs, ranks[0].notes["written"], strict=True):
        for key in MERGED:
            assert float(row[key]) == pytest.approx(expected[key], rel=1e-6), key
    with (folder / "rank-0" / "after.csv").open() as file:
        steps = list(csv.reader(file))[1:]
    assert [row[:2] for row in steps] == [
        [str(epoch), str(batch)] for epoch in range(EPOCHS) for batch in [*range(STEPS), 1]
    ], "a line per step, and per epoch one more at its end, the second and last batch of the validation"


def test_tensorboard_holds_the_merged_values(written: tuple[Path, list[Rank]]) -> None:
    folder, ranks = written
    history = ranks[0].notes["written"]
    events = scalars(folder / "rank-0" / "tb" / "Linear_torchbearer")
    for key in (*MERGED, "running_loss"):
        expected = [(epoch, pytest.approx(values[key], rel=1e-6)) for epoch, values in enumerate(history)]
        assert events[f"epoch/{key}"] == expected, key
    own = [json.loads(line) for line in (folder / "rank-0" / "own").read_text().splitlines()]
    assert own == [{key: values[key] for key in own[0]} for values in history]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a run, by tag: (step, value)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- progress bars --------------------------------------------------------------------------------------------------


PHASES = ["default", "positional 2", "verbose=1", "evaluate", "predict", "replay"]


def test_only_rank_0_shows_a_progress_bar(written: tuple[Path, list[Rank]]) -> None:
    """Rank 0 alone shows a Trial's progress bars."""
    _, shown = written
    shows = phases_of(shown[0])
    assert [name for name in shows if shows[name].strip()] == PHASES
    assert all("100%" in shows[name] for name in PHASES)
    for rank in shown[1:]:
        assert list(phases_of(rank)) == list(shows), "it has come through all of them"
        assert "".join(phases_of(rank).values()).strip() == ""
    for rank in shown:
        # gloo of torch 2.8 prints a line for each group.
        assert not [line for line in rank.stdout.splitlines() if not line.startswith("[Gloo] Rank ")], rank.stdout


def test_bars_end_with_the_merged_values_and_count_the_steps(written: tuple[Path, list[Rank]]) -> None:
    """Bars count your loader's steps."""
    _, shown = written
    shows, history = phases_of(shown[0]), shown[0].notes["history"]
    for epoch, phase in enumerate(("default", "positional 2")):
        training = final_bar(shows[phase], f"{epoch}/{epoch + 1}(t)")
        assert training == rounded(history[epoch], "acc", "loss", "running_acc", "running_loss")
        assert final_bar(shows[phase], f"{epoch}/{epoch + 1}(v)") == rounded(history[epoch], "val_acc", "val_loss")
    over_epochs = ("acc", "loss", "running_acc", "running_loss", "val_acc", "val_loss")
    assert final_bar(shows["verbose=1"], "") == rounded(history[2], *over_epochs)
    evaluated = [rank.notes["evaluate"] for rank in shown]
    assert evaluated == [evaluated[0]] * len(shown)
    assert final_bar(shows["evaluate"], "0/1(e)") == rounded(evaluated[0], "val_acc", "val_loss")
    assert "| 4/4 [" in shows["default"] and "| 2/2 [" in shows["default"]
    assert "| 2/2 [" in shows["predict"], "two ranks compute three batches in two turns"


def phases_of(rank: Rank) -> dict[str, str]:
    """What a rank wrote to stderr, by phase."""
    parts = re.split(r"^=== (.*)$", rank.stderr.partition("=== files")[0], flags=re.MULTILINE)
    assert parts[0] == "", parts[0]
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def final_bar(text: str, label: str) -> dict[str, str]:
    """The metrics of the last state of the bar ``label``."""
    bars = [bar for bar in re.split(r"[\r\n]+", text) if bar.startswith(label) and "=" in bar]
    return dict(re.findall(r"(\w+)=([-+.\de]+|nan)", bars[-1]))


def rounded(values: dict[str, float], *keys: str) -> dict[str, str]:
    return {key: str(round(values[key], 4)) for key in keys}


# --- checkpoints and kills ------------------------------------------------------------------------------------------

# when-what-which: of the two checkpointers, the first has a name for each epoch and removes the old file; the second
# always writes the same file. Which epochs must be there afterwards, under recent.{epoch}.pt, and in same.pt.
MOMENTS: dict[str, tuple[set[int], int]] = {
    "during-save-1": ({0}, 0),
    "before-replace-1": ({0}, 0),
    "after-replace-1": ({0, 1}, 0),
    "before-replace-2": ({1}, 0),
    "after-replace-2": ({1}, 1),
}


@pytest.fixture(scope="module")
def killed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    for first in range(0, len(MOMENTS), 2):
        moments = list(MOMENTS)[first : first + 2]
        ranks = nursery.run(die_while_saving, len(moments), folder, moments, launched=False)
        assert [rank.code for rank in ranks] == [-signal.SIGKILL] * len(moments), [rank.stderr for rank in ranks]
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_saving_leaves_checkpoints_that_load(killed: Path, moment: str) -> None:
    """A killed Trial leaves checkpoints that load."""
    epochs, same = MOMENTS[moment]
    folder = killed / moment
    found = {int(path.name.split(".")[1]) for path in folder.glob("recent.*.pt")}
    assert found == epochs, "the previous one goes only when the new one is there"
    for epoch in found:
        assert trained_epochs(folder / f"recent.{epoch}.pt") == epoch + 1
    assert trained_epochs(folder / "same.pt") == same + 1


def trained_epochs(path: Path) -> int:
    """Load a checkpoint into a Trial; the epochs that it has behind it."""
    saved = torch.load(path, weights_only=False)
    callbacks = [
        MostRecent(str(path))
        for kind in saved[torchbearer.CALLBACK_LIST][CallbackList.CALLBACK_TYPES]
        if kind is MostRecent
    ]
    trial = make_trial([DDPCallback(), *callbacks], verbose=0)
    trial.load_state_dict(saved)
    return len(trial.state[torchbearer.HISTORY])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_exception_while_saving_leaves_the_old_checkpoint_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An exception while saving keeps the old checkpoint."""

    def fail(_: Any, path: Any, *args: Any, **options: Any) -> None:
        Path(path).write_bytes(b"a beginning")
        raise error

    trial = make_trial([DDPCallback(), MostRecent(str(tmp_path / "recent.{epoch}.pt"))], verbose=0)
    trial.run(1)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(type(error)):
        trial.run(2)
    assert [path.name for path in tmp_path.iterdir()] == ["recent.0.pt"]
    assert trained_epochs(tmp_path / "recent.0.pt") == 1


def test_what_kills_have_left_of_a_checkpoint_goes_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "[a]"  # taken as it is
    folder.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    left = [f"recent.3.pt.{host}-{dead.pid}.tmp", f"recent.0.pt.{host}-{os.getpid()}.tmp"]
    kept = [
        f"recent.4.pt.{host}-{os.getppid()}.tmp",  # it lives
        f"recent.3.pt.another-{dead.pid}.tmp",
        f"other.3.pt.{host}-{dead.pid}.tmp",
        "recent.3.pt",
    ]
    for name in left + kept:
        (folder / name).write_bytes(b"half")
    make_trial([DDPCallback(), MostRecent(str(folder / "recent.{epoch}.pt"))], verbose=0).run(1)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "recent.0.pt"])


def test_a_previous_checkpoint_that_somebody_moved_away_is_no_error(tmp_path: Path) -> None:
    trial = make_trial([DDPCallback(), MostRecent(str(tmp_path / "recent.{epoch}.pt"))], verbose=0)
    trial.run(1)
    (tmp_path / "recent.0.pt").rename(tmp_path / "kept.pt")
    trial.run(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.pt", "recent.1.pt"]


def test_a_checkpoint_in_the_working_directory_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_trial([DDPCallback(), MostRecent("model.pt")], verbose=0).run(2)
    assert json.dumps(os.listdir(tmp_path)) == '["model.pt"]'
