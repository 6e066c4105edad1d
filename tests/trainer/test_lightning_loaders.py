"""Loaders with a ``state_dict``: a Trainer goes on in the middle of an epoch, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from kit.once import once
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from trainer_cases import OURS, PLAIN, RELATIVE, Bodies, quiet
from trainers import Net, Stream, TwoSources, data, loader, outcome, trainer

from ddp_callbacks import shard_loader
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.lightning import CallbackStrategy

pytest.importorskip("torchdata")

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)

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


def train_and_resume(strategy: str, name: str, folder: Path) -> tuple[Any, Any, Path]:
    """An epoch, the same from a checkpoint in its middle, and that checkpoint."""
    whole, saved = train(strategy, name, folder), checkpoint_of(folder, name)
    return parameters(whole), parameters(train(strategy, name, folder / "again", saved)), saved


@WORLD
def resumed() -> dict[str, Any]:
    """Of each loader: an epoch, the same from its own checkpoint in the middle, and from that of one process."""
    results = {}
    for name in LOADERS:
        whole, again, saved = train_and_resume(OURS, name, Path(name))
        *_, by_one = train_and_resume(PLAIN, name, Path(f"{name}-{dist.get_rank()}"))
        from_one = parameters(train(OURS, name, Path(name, "from-one"), by_one))
        results[name] = (whole, again, from_one), saved.read_bytes()
    return results


@once
def one_process(name: str, folder: Path) -> tuple[Any, Any, Path]:
    with quiet():
        return train_and_resume(PLAIN, name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaders")


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_with_a_state_goes_on_in_the_middle_of_an_epoch(folder: Path, name: str) -> None:
    """A loader with a `state_dict` goes on in mid-epoch."""
    whole, again, _ = one_process(name, folder)
    if name not in AHEAD:
        assert_equal(again, whole, 0.0, "one process")
    for rank, results in enumerate(WORLD.returned(resumed)):
        for how, found, expected in zip(HOW, results[name][0], (whole, again, again), strict=True):
            assert_equal(found, expected, RELATIVE, f"rank {rank} {how}")


@pytest.mark.parametrize("name", LOADERS)
def test_one_process_goes_on_from_the_checkpoint_of_several(folder: Path, tmp_path: Path, name: str) -> None:
    _, expected, _ = one_process(name, folder)
    saved = tmp_path / "saved.ckpt"
    saved.write_bytes(WORLD.returned(resumed)[0][name][1])
    with quiet():
        found = train(PLAIN, name, tmp_path, saved)
    assert_equal(parameters(found), expected, RELATIVE)


@WORLD
def per_process() -> list[Any]:
    """Whole batches in turn: a step draws as many as there are processes. An epoch, and the same from its middle."""
    results = []
    for path in (None, Path("per-process/step=2.ckpt")):
        saving = ModelCheckpoint("per-process", "{step}", every_n_train_steps=2, save_top_k=-1)
        strategy: Any = CallbackStrategy(batch_size="per_process")
        made, module = trainer(strategy, callbacks=[saving], enable_checkpointing=True, max_epochs=1), Net()
        made.fit(module, torchdata_s(data(SAMPLES)), ckpt_path=path)
        results.append(parameters(outcome(made, module)))
    return results


def test_per_process_batches_go_on_where_they_were() -> None:
    for whole, again in WORLD.returned(per_process):
        assert_equal(again, whole, RELATIVE)


@WORLD
def divided() -> Any:
    sharded = [shard_loader(one) for one in (Resumable(), torchdata_s(data(SAMPLES)), loader())]
    drawn = [sum(len(batch[0]) for batch in one) for one in sharded]
    kinds = [(hasattr(one, "state_dict"), isinstance(one, DataLoader)) for one in sharded]
    return all(isinstance(one, ShardedLoader) for one in sharded), kinds, drawn


def test_a_divided_loader_has_a_state_if_the_user_s_has_one() -> None:
    for found in WORLD.returned(divided):
        assert found == (True, [(True, False), (True, True), (False, True)], [15, 15, found[2][2]])
