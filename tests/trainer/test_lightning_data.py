"""What a Trainer's loaders give to each process, what they are afterwards, and what predictions are written."""

from __future__ import annotations

import collections
import copy
import multiprocessing
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
import trainers
from kit.compare import assert_equal
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from trainer_cases import OURS, PLAIN, RELATIVE, TWO, Bodies, message_of, on_one, quiet
from trainers import FEATURES, Net, Stream, TwoSources, data, fit, loader, outcome, trainer

from ddp_callbacks.errors import PeerError
from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Noise(Dataset[Any]):
    """Each sample says what its process draws."""

    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, torch.rand(()).item(), random.random()


class Collects(Net):
    """The rows of its batches, and what its step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.append(torch.stack([part.double() for part in batch], 1))
        self.drawn.append(torch.rand(()).item())
        return self(torch.ones(1, FEATURES, dtype=torch.float64)).sum()


def collected(rows: Any, **options: Any) -> tuple[list[int], list[float]]:
    """The samples that this rank has seen, and all that it has drawn."""
    module = Collects()
    made = trainer(OURS, max_epochs=1, **options)
    pl.seed_everything(5, workers=True, verbose=False)
    made.fit(module, rows)
    seen = torch.cat(module.rows)
    return seen[:, 0].int().tolist(), [*seen[:, 1:].flatten().tolist(), *module.drawn]


@WORLD
def with_workers() -> Any:
    return collected(DataLoader(Noise(), 4, num_workers=1))


def test_samples_draw_apart_in_the_workers_and_the_ranks_one_number_in_a_step() -> None:
    (first, drawn), (second, of_second) = WORLD.returned(with_workers)
    assert sorted(first + second) == list(range(8))
    assert drawn[-2:] == of_second[-2:]  # of the two steps
    assert len({*drawn, *of_second}) == len(drawn) + len(of_second) - 2


class TwoLoaders(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch["a"]) + self(torch.nn.functional.dropout(batch["b"][0])).square().mean()


@WORLD.on(TWO)
def test_dropout_in_steps_on_batches_of_different_sizes_is_named() -> None:
    fit(OURS, TwoLoaders(), {"a": loader(16, 4), "b": loader(16, 4)}, max_epochs=1)
    with pytest.warns(UserWarning, match="a step joins loaders whose batches have different sizes"):
        fit(OURS, TwoLoaders(), {"a": loader(16, 4), "b": loader(32, 8)}, max_epochs=1)


class DividesItself(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.size = 8 // self.trainer.world_size  # type: ignore[union-attr]

    def train_dataloader(self) -> Any:
        return loader(16, self.size)

    def val_dataloader(self) -> Any:
        return loader(16, self.size, 9)


@WORLD.on(TWO)
def test_a_data_module_that_divides_the_batch_size_itself_is_named() -> None:
    says = (
        r"DividesItself.setup \(.*test_lightning_data.py:\d+\) reads world_size before the loaders are made. .*, or use"
    )
    with pytest.warns(UserWarning, match=says):
        trainer(OURS, max_epochs=1, num_sanity_val_steps=1).fit(Net(), datamodule=DividesItself())
    trainer(CallbackStrategy(batch_size="per_process"), max_epochs=1).fit(Net(), datamodule=DividesItself())


class OfABatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self(batch[0])[:, 0] - torch.ones(4)).square().mean()


class OfMore(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).squeeze()[:, 0].square().mean()


@WORLD.on(TWO)
def test_a_step_that_fails_on_another_size_is_told_that_it_has_a_part() -> None:
    of = "of the {} samples of the batch."
    for model, samples, says in ((OfABatch(), 16, f"2 {of.format(4)} Take"), (OfMore(), 18, f"1 {of.format(2)} x.sq")):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            fit(CallbackStrategy(verify=None), model, loader(samples, 4), max_epochs=1)
        assert raised.value.__notes__[0].startswith(f"This process computes {says}")


class Guesses(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.dropout(self(batch[0]))


@WORLD.on(TWO)
def test_a_prediction_with_dropout_is_named() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some random numbers")
        trainer(OURS).predict(Net(), loader(16, 4))
        trainer(CallbackStrategy(randomness="by_process")).predict(Guesses(), loader(16, 4))
    with pytest.warns(UserWarning, match="a prediction draws: each process computes whole batches"):
        trainer(OURS).predict(Guesses(), loader(16, 4))


@WORLD.on(TWO)
def test_loaders_are_left_alone_where_the_user_says_so() -> None:
    """`use_distributed_sampler=False` keeps loaders undivided."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the next test looks at what is said
        own, _ = collected(DataLoader(Noise(), 2, sampler=DistributedSampler(Noise(), shuffle=False)))
    whole, _ = collected(DataLoader(Noise(), 4), use_distributed_sampler=False)
    assert (own, whole) == ([*range(dist.get_rank(), 8, 2)], [*range(8)])


@WORLD.on(TWO)
def test_during_a_fit_a_loader_is_a_data_loader_of_the_user_s_data_and_workers() -> None:
    """A fit's loader is a `DataLoader`."""
    rows, seen = loader(8, 4, num_workers=1), []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            given = trainer.train_dataloader
            seen.append((isinstance(given, DataLoader), given.dataset is rows.dataset, given.num_workers))

    trainer(OURS, max_epochs=1, callbacks=[Looks()]).fit(Net(), rows)
    assert seen == [(True, True, 1)] * 2


@WORLD.as_on_one()
def test_per_process_batches_are_those_of_a_trainer_with_larger_ones(strategy: str) -> Any:
    size = 4 if strategy == OURS else 8
    chosen: Any = CallbackStrategy(batch_size="per_process") if strategy == OURS else strategy
    return fit(chosen, None, loader(32, size), loader(16, size, 9))


@WORLD.as_on_one()
def test_loaders_are_given_back_and_their_workers_end_with_the_fit(strategy: str) -> Any:
    """A fit returns your loader and ends its workers."""
    workers = [loader(22, 4, shuffle=True, num_workers=1, persistent_workers=kept) for kept in (False, True)]
    combined = CombinedLoader({"a": workers[0], "b": workers[1]}, "max_size_cycle")
    # It leaves its workers in mid-pass.
    results = [fit(strategy, TwoSources(), combined, max_epochs=1, limit_train_batches=3)]
    assert strategy != OURS or not multiprocessing.active_children()
    results.append(fit(strategy, TwoSources(), combined, max_epochs=1))
    assert all(each is own for each, own in zip(combined.flattened, workers, strict=True))
    return results


class LooksAtAll(pl.Callback):
    """Loops over the Trainer's loaders itself, as for class means."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: Any, *_: Any) -> None:
        loaders = trainer.train_dataloader or [], trainer.val_dataloaders or []
        self.seen.append([[sum(float(x.sum()) for x, _ in rows), sum(len(x) for x, _ in rows)] for rows in loaders])

    on_train_start = on_train_epoch_end = on_validation_end = on_train_end = on_fit_end = look


@WORLD.as_on_one()
def test_a_hook_that_loops_over_a_loader_of_the_trainer_sees_whole_batches(strategy: str) -> Any:
    looks = LooksAtAll()
    return fit(strategy, None, loader(22, 4, shuffle=True), loader(9, 4, 9), callbacks=[looks]), looks.seen


class Unsized(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


class Wrapped(IterableDataset[Any]):
    """Batches of a Mapping that is no dict; of rows that go together in no dimension."""

    def __init__(self, like: type, ragged: bool = False) -> None:
        self.like, self.ragged = like, ragged

    def __iter__(self) -> Iterator[Any]:
        for batch in loader(12, 4):
            rows = {"x": batch[0], "y": batch[1]}
            yield self.like(rows | {"lengths": torch.ones(3)} if self.ragged else rows)


class TakesMappings(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss((batch["x"], batch["y"]))


@WORLD.as_on_one()
def test_batches_of_any_mapping_are_divided_also_of_loaders_without_a_length(strategy: str) -> Any:
    """The library divides any Mapping; loaders need no length."""
    mapped = fit(strategy, TakesMappings(), DataLoader(Wrapped(collections.UserDict), batch_size=None), max_epochs=1)
    return mapped, fit(strategy, None, DataLoader(Unsized(19), 4), max_epochs=1)


@WORLD.on(TWO)
def test_what_is_not_divided_is_said_once() -> None:
    """One warning names a loader that is left as it is."""
    sampled = DataLoader(data(16), 2, sampler=DistributedSampler(data(16)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OURS, None, sampled)
    said = [str(each.message) for each in caught if "istributedSampler" in str(each.message)]
    assert len(said) == (0 if dist.get_rank() else 1)  # in two epochs
    if said:
        assert said[0].startswith("The loader of TensorDataset has a DistributedSampler, so it is left unchanged")
        assert 'strategy="callbacks" is another name' in said[0]
        assert [each.filename for each in caught if str(each.message) == said[0]] == [trainers.__file__]  # calls fit


@WORLD.on(TWO)
def test_what_cannot_be_divided_is_refused_with_the_remedy() -> None:
    """A Trainer refuses what it can't divide."""
    ragged = DataLoader(Wrapped(dict, ragged=True), batch_size=None)
    said = message_of(lambda: fit(OURS, TakesMappings(), ragged))
    assert "a batch of Wrapped (dict: [4, 6], [4], [3]) has no common first dimension" in said
    steps = TwoSources()
    said = message_of(lambda: fit(OURS, steps, {"a": loader(16, 4), "b": loader(11, 4)}))  # its third batch has 3
    assert steps.trainer.global_step == 0
    assert f"equal proportions, as one number weighs their loss, got 2 of 4, {2 - dist.get_rank()} of 3 samples" in said
    together = CombinedLoader([loader(16, 4), loader(11, 4)], "min_size")
    validated = Net()
    assert message_of(lambda: fit(OURS, validated, loader(16, 4), together, num_sanity_val_steps=1)) == said
    assert validated.trainer.global_step == 0


def drop_negative(samples: Any) -> Any:
    return default_collate([sample for sample in samples if sample[0][0] > 0])


@WORLD.on(TWO)
def test_a_part_that_a_collate_fn_empties_is_told() -> None:
    rows = TensorDataset(torch.tensor([[1.0] * FEATURES, [-1.0] * FEATURES]).double(), torch.tensor([0, 1]))
    made = DataLoader(rows, 2, collate_fn=drop_negative, num_workers=1)
    with pytest.raises((IndexError, PeerError)) as caught:
        fit(OURS, None, made)
    said = "".join(traceback.format_exception(caught.value))
    assert "collate_fn has got this process's 1 samples of a batch of TensorDataset. If it leaves out" in said


# --- changes at random ------------------------------------------------------------------------------------------------


class DrawsInBatches(pl.Callback):
    """Noise on gradients and parameters, and a picture for the log of rank 0."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter) + 0.01 * random.random())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter) + 0.01 * float(numpy.random.normal()))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            torch.rand(3)


class SplitsItsData(Collects):
    """Splits in ``setup``, and draws in each step."""

    def setup(self, stage: str) -> None:
        self.order = torch.randperm(20).tolist()

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Noise(20), self.order), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(8, 4)


@WORLD
def random_changes() -> Any:
    module = SplitsItsData()
    made = trainer(OURS, max_epochs=3, callbacks=[DrawsInBatches()])
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(made.global_rank)  # a user who seeds nothing
    made.fit(module)
    after = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return module.state_dict(), module.order, after, module.drawn


def test_hooks_that_change_parameters_at_random_change_them_alike_on_all_processes() -> None:
    (*first, own), (*second, other) = WORLD.returned(random_changes)
    assert_equal(second, first, 0.0)
    assert own == other


# --- predictions ------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches.append((prediction, list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append((predictions, indices))


class Checks(pl.Callback):
    """What hooks get belongs together."""

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        torch.testing.assert_close(outputs, module(batch[0]).softmax(1))


WRITTEN = [(13, True), (11, True), (11, False)]  # samples, and whether they are returned


@WORLD
def predictions_written(strategy: str = OURS) -> Any:
    found = []
    for samples, returned in WRITTEN:
        writer = Writer()
        made = trainer(strategy, callbacks=[writer, Checks()])
        rows = made.predict(Net(), loader(samples, 5, 3), return_predictions=returned)
        found.append((writer.batches, writer.epochs, rows))
    return found


def rows_by_index(batches: list[Any]) -> dict[int, torch.Tensor]:
    """Of what writers have got, each row once."""
    pairs = [(index, row) for rows, indices in batches for index, row in zip(indices, rows, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(sorted(pairs))


def test_prediction_writers_get_each_row_once_with_its_index_and_all_at_the_end_of_the_epoch() -> None:
    """Prediction writers get each row once, finally all."""
    for (samples, _), expected, *ranks in zip(
        WRITTEN, on_one(predictions_written), *WORLD.returned(predictions_written), strict=True
    ):
        written = rows_by_index([batch for batches, _, _ in ranks for batch in batches])
        assert list(written) == list(range(samples))
        assert_equal(written, rows_by_index(expected[0]), RELATIVE)
        for _, epochs, returned in ranks:
            assert_equal([epochs, returned], [*expected[1:]], RELATIVE)
    assert [len(found[1][0]) for found in WORLD.returned(predictions_written)] == [2, 1]  # of three batches


class Shuffled(BatchSampler):
    """Shuffles by the number of its passes."""

    passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = torch.randperm(13, generator=torch.Generator().manual_seed(self.passes)).split(3)
        return iter([part.tolist() for part in order])


@WORLD.as_on_one()
def test_a_batch_sampler_begins_one_pass_for_a_prediction(strategy: str) -> Any:
    # Lightning's own sampler around it begins one at each call of iter(), and there were two.
    sampler = Shuffled(SequentialSampler(range(13)), 3, False)
    return trainer(strategy).predict(Net(), DataLoader(data(13), batch_sampler=sampler))


class DrawsAtOnce(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(29).split(8)])


@WORLD.as_on_one()
def test_a_batch_sampler_that_draws_when_a_pass_begins_draws_in_each_that_lightning_begins(strategy: str) -> Any:
    # Lightning begins two passes of a loader that it makes anew, and torch one more with workers.
    sampler = DrawsAtOnce(SequentialSampler(range(29)), 8, False)
    return [
        fit(strategy, Net(), DataLoader(data(29), batch_sampler=sampler, num_workers=workers), **options, max_epochs=3)
        for workers, options in ((0, {}), (0, {"reload_dataloaders_every_n_epochs": 1}), (1, {}))
    ]


class Fetches(Net):
    def predict_step(self, dataloader_iter: Any) -> Any:
        (x, _), _, _ = next(dataloader_iter)
        return self(x)


@WORLD.on(TWO)
def test_a_step_that_draws_itself_is_refused_with_the_remedy() -> None:
    """A step that draws its batches itself is refused."""
    said = message_of(lambda: trainer(OURS).predict(Fetches(), loader(11, 5, 3)))
    assert said.startswith("ConfigurationError: Fetches.predict_step(dataloader_iter) draws batches that only it sees")
    assert said.endswith("Write predict_step(batch, batch_idx).")


# --- loaders with a state ---------------------------------------------------------------------------------------------

SAMPLES, BATCH_SIZE, STOP = 29, 4, 3
CHECKPOINT = f"step={STOP}.ckpt"  # in the middle of eight batches


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
    "torchdata_s_that_shuffles": shuffled,
    "torchdata_s_with_workers": lambda: torchdata_s(data(SAMPLES), num_workers=2),
    "torchdata_s_of_a_stream": lambda: torchdata_s(Stream(SAMPLES)),
    "two_of_torchdata_s": lambda: CombinedLoader(
        {"a": torchdata_s(data(SAMPLES)), "b": torchdata_s(data(16, 5))}, "min_size"
    ),
}


def train(strategy: Any, name: str, folder: Path, path: Path | None = None) -> Any:
    """One epoch, and the checkpoints in its middle."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)
    made = trainer(copy.deepcopy(strategy), callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    module = TwoSources() if name == "two_of_torchdata_s" else Net()
    made.fit(module, LOADERS[name](), ckpt_path=path)
    results = outcome(made, module)
    return {name: results[name] for name in ("parameters", "global_step", "epochs")}


def train_and_resume(strategy: Any, name: str, folder: Path) -> list[Any]:
    """An epoch, and the same from a checkpoint in its middle."""
    return [train(strategy, name, folder), train(strategy, name, folder / "again", folder / CHECKPOINT)]


@WORLD
def resumed() -> dict[str, Any]:
    """Of each loader: an epoch, the same from its own checkpoint in the middle, and from that of one process."""
    results = {}
    for name in LOADERS:
        found, of_one = train_and_resume(OURS, name, Path(name)), Path(f"{name}-{dist.get_rank()}")
        train(PLAIN, name, of_one)
        found.append(train(OURS, name, Path(name, "from-one"), of_one / CHECKPOINT))
        results[name] = found, Path(name, CHECKPOINT).read_bytes()
    return results


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_with_a_state_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, name: str) -> None:
    """A loader with a `state_dict` goes on in mid-epoch."""
    pytest.importorskip("torchdata")
    with quiet():
        whole, again = train_and_resume(PLAIN, name, tmp_path)
    # Without a length, Lightning fetches a batch ahead, which the state then counts as trained, on one process, too.
    if name != "torchdata_s_of_a_stream":
        assert_equal(again, whole, 0.0, "one process")
    saved = tmp_path / "saved.ckpt"
    for rank, results in enumerate(WORLD.returned(resumed)):
        found, content = results[name]
        assert_equal(found, [whole, again, again], RELATIVE, f"rank {rank}")
        saved.write_bytes(content)
    with quiet():
        assert_equal(train(PLAIN, name, tmp_path / "back", saved), again, RELATIVE, "one process from several")


@WORLD
def per_process() -> list[Any]:
    """Whole batches in turn: a step draws as many as there are processes."""
    strategy: Any = CallbackStrategy(batch_size="per_process")
    return train_and_resume(strategy, "torchdata_s_that_shuffles", Path("per-process"))


def test_per_process_batches_go_on_where_they_were() -> None:
    pytest.importorskip("torchdata")
    for whole, again in WORLD.returned(per_process):
        assert_equal(again, whole, RELATIVE)
