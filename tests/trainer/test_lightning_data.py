"""What a Trainer's loaders give to each process, what they are afterwards, and what predictions are written."""

from __future__ import annotations

import collections
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from kit.compare import assert_equal
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from trainer_cases import OURS, RELATIVE, Bodies, assert_as_on_one, on_one, quiet
from trainers import FEATURES, Net, Stream, TwoSources, data, fit, loader, trainer

from ddp_callbacks.lightning import CallbackStrategy

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Noise(Dataset[Any]):
    """Each sample says what its process draws."""

    def __len__(self) -> int:
        return 8

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


def test_ranks_draw_apart_in_the_step_and_in_the_workers() -> None:
    """Steps and workers draw apart on each process."""
    (first, drawn), (second, of_second) = WORLD.returned(with_workers)
    assert sorted(first + second) == list(range(8))
    assert len({*drawn, *of_second}) == len(drawn) + len(of_second)


@WORLD
def loaders_of_the_user() -> Any:
    sampler = DistributedSampler(Noise(), shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # undivided() looks at what is said
        own, _ = collected(DataLoader(Noise(), 2, sampler=sampler))
    whole, _ = collected(DataLoader(Noise(), 4), use_distributed_sampler=False)
    return own, whole


def test_loaders_are_left_alone_where_the_user_says_so() -> None:
    """`use_distributed_sampler=False` keeps loaders undivided."""
    assert WORLD.returned(loaders_of_the_user) == [([0, 2, 4, 6], list(range(8))), ([1, 3, 5, 7], list(range(8)))]


@WORLD
def per_process(strategy: str = OURS) -> Any:
    size = 4 if strategy == OURS else 8
    chosen: Any = CallbackStrategy(batch_size="per_process") if strategy == OURS else strategy
    return fit(chosen, None, loader(32, size), loader(16, size, 9))


def test_per_process_batches_are_those_of_a_trainer_with_larger_ones() -> None:
    assert_as_on_one(per_process)


@WORLD
def lent_loaders(strategy: str = OURS) -> Any:
    """A loader of the user's own that combines others, given to two fits; one leaves its workers in mid-pass."""
    workers = [loader(22, 4, shuffle=True, num_workers=1, persistent_workers=kept) for kept in (False, True)]
    combined = CombinedLoader({"a": workers[0], "b": workers[1]}, "max_size_cycle")
    during: list[Any] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for each in trainer.train_dataloader.values():
                during.append((isinstance(each, DataLoader), each.dataset is workers[0].dataset, each.num_workers))

    results = [fit(strategy, TwoSources(), combined, max_epochs=1, limit_train_batches=3, callbacks=[Looks()])]
    alive = [child.name for child in multiprocessing.active_children()]
    results.append(fit(strategy, TwoSources(), combined, max_epochs=1))
    return results, alive, [each is own for each, own in zip(combined.flattened, workers, strict=True)], set(during)


def test_loaders_are_given_back_and_their_workers_end_with_the_fit() -> None:
    """A fit returns your loader and ends its workers."""
    expected = on_one(lent_loaders)[0]
    for results, alive, own, during in WORLD.returned(lent_loaders):
        assert_equal(results, expected, RELATIVE)
        assert (alive, own, during) == ([], [True, True], {(True, False, 1), (True, True, 1)})


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


@WORLD
def odd_batches(strategy: str = OURS) -> Any:
    mapped = fit(strategy, TakesMappings(), DataLoader(Wrapped(collections.UserDict), batch_size=None), max_epochs=1)
    return mapped, fit(strategy, None, DataLoader(Unsized(19), 4), max_epochs=1)


def test_batches_of_any_mapping_are_divided_also_of_loaders_without_a_length() -> None:
    """The library divides any Mapping; loaders need no length."""
    assert_as_on_one(odd_batches)


@WORLD
def undivided() -> Any:
    """What is said of batches that cannot be divided, and of a loader that is not; of two epochs each."""
    rows = data(16)
    given = [
        (TakesMappings(), DataLoader(Wrapped(dict, ragged=True), batch_size=None)),
        (Net(), DataLoader(rows, 2, sampler=DistributedSampler(rows))),
    ]
    said = []
    for module, batches in given:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(OURS, module, batches)
        texts = [str(each.message) for each in caught]
        said.append([text for text in texts if "istributedSampler" in text or "dimension" in text])
    return said


def test_what_is_not_divided_is_said_once() -> None:
    """One warning names what the library can't divide."""
    ((in_turn,), (left,)), (*others,) = WORLD.returned(undivided)
    assert "A batch of Wrapped (dict: [4, 6], [4], [3]) has no common first dimension" in in_turn
    assert "Yield tensors that all have the samples in front; or a data set with samples by index" in in_turn
    assert left.startswith("The loader of TensorDataset has a DistributedSampler, so it is left as it is")
    assert 'strategy="callbacks" is another name' in left
    assert others == [[], []]


# --- changes at random ------------------------------------------------------------------------------------------------


class Langevin(torch.optim.SGD):
    """Adds noise to the parameters, as some samplers do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))
        return loss


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

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_end(trainer, module)


class SplitsItsData(Net):
    """Splits in ``setup``, and draws by the part of the batch."""

    def setup(self, stage: str) -> None:
        self.order = torch.randperm(20).tolist()
        self.drawn: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(data(20), self.order), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(len(batch[0]))[0]))
        return self.loss(batch)


@WORLD
def random_changes() -> Any:
    module = SplitsItsData(optimizer=lambda net: Langevin(net.parameters(), 0.1))
    made = trainer(OURS, max_epochs=3, callbacks=[DrawsInBatches()])
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(made.global_rank)  # a user who seeds nothing
    made.fit(module)
    after = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return module.state_dict(), module.order, after, module.drawn


def test_hooks_that_change_parameters_at_random_change_them_alike_on_all_processes() -> None:
    (*first, own), (*second, other) = WORLD.returned(random_changes)
    assert_equal(second, first, 0.0)
    assert len({*own, *other}) == 2 * len(own)


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


def test_prediction_writers_get_each_row_once_with_its_index() -> None:
    """Prediction writers get each row once, with its index."""
    for (samples, _), expected, *ranks in zip(
        WRITTEN, on_one(predictions_written), *WORLD.returned(predictions_written), strict=True
    ):
        written = rows_by_index([batch for batches, _, _ in ranks for batch in batches])
        assert list(written) == list(range(samples))
        assert_equal(written, rows_by_index(expected[0]), RELATIVE)
        for batches, epochs, returned in ranks:
            ((rows, (indices,)),) = epochs
            assert_equal(list(zip(rows, indices, strict=True)), batches, 0.0)
            assert_equal(returned, expected[2], RELATIVE)
    # The last batch of the second has one sample: rank 1 computes a stand-in, which is nobody's row.
    assert [len(found[1][0]) for found in WORLD.returned(predictions_written)] == [3, 2]


class Fetches(Net):
    def predict_step(self, dataloader_iter: Any) -> Any:
        (x, _), _, _ = next(dataloader_iter)
        return self(x), [type(value).__name__ for value in x], x


@WORLD
def predictions_fetched(strategy: str = OURS) -> Any:
    return trainer(strategy).predict(Fetches(), loader(11, 5, 3))


def test_predictions_of_a_step_that_draws_itself_are_whole() -> None:
    assert_as_on_one(predictions_fetched)
