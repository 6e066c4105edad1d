"""Loaders with a ``state_dict``: a Trainer goes on in the middle of an epoch, on any number of processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning_scenarios import Net, Stream, TwoSources, data, loader, outcome, quiet, trainer
from test_equivalence import assert_equal
from torch.utils.data import DataLoader

from ddp_callbacks import shard_loader
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

SAMPLES, BATCH_SIZE, STOP = 29, 4, 5  # a checkpoint behind the fifth of eight batches, and one in the second epoch


class Resumable:
    """A loader of a user's own, that counts what it has yielded."""

    def __init__(self) -> None:
        self.rows = DataLoader(data(SAMPLES), BATCH_SIZE)
        self.yielded = 0

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.rows):
            if index >= self.yielded:
                self.yielded += 1
                yield batch
        self.yielded = 0

    def __len__(self) -> int:
        return len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]


def torchdata_s(rows: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows, batch_size=BATCH_SIZE, **options)


def shuffled() -> Any:
    generator = torch.Generator().manual_seed(11)
    return torchdata_s(data(SAMPLES), shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[], Any]] = {
    "a_loader_of_the_user_s": Resumable,
    "torchdata_s": lambda: torchdata_s(data(SAMPLES)),
    "torchdata_s_that_shuffles": shuffled,
    "torchdata_s_with_workers": lambda: torchdata_s(data(SAMPLES), num_workers=2),
    "torchdata_s_of_a_stream": lambda: torchdata_s(Stream(SAMPLES)),
    "two_of_torchdata_s": lambda: CombinedLoader(
        {"a": torchdata_s(data(SAMPLES)), "b": torchdata_s(data(17, 5))}, "min_size"
    ),
}


# Without a length, Lightning fetches a batch ahead, which the state then counts as trained, on one process, too.
AHEAD = ("torchdata_s_of_a_stream",)
HOW = ("uninterrupted", "resumed", "resumed from the checkpoint of one process")


def module_for(name: str) -> Any:
    return TwoSources() if name == "two_of_torchdata_s" else Net()


def train(strategy: Any, name: str, folder: Path, path: Path | None = None, max_steps: int = -1) -> Any:
    """One epoch, and the checkpoints in its middle."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP if name != "two_of_torchdata_s" else 3)
    options = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": 1, "max_steps": max_steps}
    made, module = trainer(strategy, **options), module_for(name)
    made.fit(module, LOADERS[name](), ckpt_path=path)
    return outcome(made, module)


def checkpoint_of(folder: Path, name: str) -> Path:
    return folder / f"step={STOP if name != 'two_of_torchdata_s' else 3}.ckpt"


def parameters(result: Any) -> Any:
    return {name: result[name] for name in ("parameters", "global_step", "epochs")}


def save_and_resume(folder: str, by_one: dict[str, str]) -> Any:
    """Of each loader: an epoch, the same from its own checkpoint in the middle, and from that of one process."""
    results = {}
    with quiet():
        for name in by_one:
            own = Path(folder) / name
            whole = train("ddp_callbacks", name, own)
            resumed = train("ddp_callbacks", name, own / "again", checkpoint_of(own, name))
            from_one = train("ddp_callbacks", name, own / "from-one", Path(by_one[name]))
            results[name] = [parameters(result) for result in (whole, resumed, from_one)]
    return results


@functools.cache
def one_process(folder: Path) -> dict[str, tuple[Any, Any, str]]:
    """Of each loader: an epoch, the same from a checkpoint in the middle, and that checkpoint."""
    found = {}
    with quiet():
        for name in LOADERS:
            whole = train("auto", name, folder / name)
            resumed = train("auto", name, folder / name / "again", checkpoint_of(folder / name, name))
            found[name] = parameters(whole), parameters(resumed), str(checkpoint_of(folder / name, name))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaders")


@functools.cache
def on_ranks(world_size: int, folder: Path) -> list[Any]:
    by_one = {name: path for name, (*_, path) in one_process(folder / "one").items()}
    return run_distributed(save_and_resume, world_size, str(folder / str(world_size)), by_one)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_a_loader_with_a_state_goes_on_in_the_middle_of_an_epoch(folder: Path, world_size: int, name: str) -> None:
    pytest.importorskip("torchdata")
    whole, resumed, _ = one_process(folder / "one")[name]
    if name not in AHEAD:
        assert_equal(resumed, whole, 0.0, "one process")
    for rank, results in enumerate(on_ranks(world_size, folder)):
        for how, found, expected in zip(HOW, results[name], (whole, resumed, resumed), strict=True):
            assert_equal(found, expected, 1e-10, f"rank {rank} {how}")


@pytest.mark.parametrize("name", LOADERS)
def test_one_process_goes_on_from_the_checkpoint_of_several(folder: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchdata")
    _, expected, _ = one_process(folder / "one")[name]
    on_ranks(2, folder)
    with quiet():
        resumed = train("auto", name, tmp_path, checkpoint_of(folder / "2" / name, name))
    assert_equal(parameters(resumed), expected, 1e-10)


def resume_per_process(folder: str) -> Any:
    """Whole batches in turn: a step draws as many as there are processes."""
    with quiet():
        strategy = functools.partial(CallbackStrategy, batch_size="per_process")
        results = []
        for path in (None, Path(folder) / "step=2.ckpt"):
            saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
            made = trainer(strategy(), callbacks=[saving], enable_checkpointing=True, max_epochs=1)
            module = Net()
            made.fit(module, torchdata_s(data(SAMPLES)), ckpt_path=path)
            results.append(parameters(outcome(made, module)))
    return results


def test_per_process_batches_go_on_where_they_were(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    for whole, resumed in run_distributed(resume_per_process, 2, str(tmp_path)):
        assert_equal(resumed, whole, 1e-10)


def divide() -> Any:
    with quiet():
        sharded = [shard_loader(one) for one in (Resumable(), torchdata_s(data(SAMPLES)), loader())]
        drawn = [sum(len(batch[0]) for batch in one) for one in sharded]
    kinds = [(hasattr(one, "state_dict"), isinstance(one, DataLoader)) for one in sharded]
    return all(isinstance(one, ShardedLoader) for one in sharded), kinds, drawn


def test_a_divided_loader_has_a_state_if_the_user_s_has_one() -> None:
    pytest.importorskip("torchdata")
    for found in run_distributed(divide, 2):
        assert found == (True, [(True, False), (True, True), (False, True)], [15, 15, found[2][2]])
