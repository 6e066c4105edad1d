"""What the callbacks of a Trial promise beyond equality with one process; each body runs on two ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.compare import assert_equal
from shared_worlds import TWO, World, by_rank
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchbearer import Callback, Metric, Trial
from torchbearer.callbacks import MostRecent
from trials import CLASSES, FEATURES, data, draws, network, normalized, parameters, train, trial

from ddp_callbacks import get_rank, shard_loader, with_shares
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.errors import ConfigurationError, PeerError
from ddp_callbacks.torchbearer import SHARE, AllReduceGradients, DDPCallback, ReduceMetrics, Resume, ShardData
from ddp_callbacks.torchbearer.metric_check import MetricCheck

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)


def as_on_one(body: Callable[[list[Any]], Any]) -> Any:
    """A test that it returns with ``DDPCallback`` what it returns without."""

    def test() -> None:
        assert_equal(body([DDPCallback()]), body([]), relative=1e-10)

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return WORLD(test)


def numbered(samples: int) -> TensorDataset:
    """The first feature is the number of the sample."""
    x, y = data(samples).tensors
    x[:, 0] = torch.arange(samples)
    return TensorDataset(x, y)


# --- BatchNorm --------------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(FEATURES, momentum=None)
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.linear(self.norm(x))


class CountsApart(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += dist.get_rank() * self.training
        return super().forward(x)


@WORLD
def test_running_statistics_are_the_mean_over_the_ranks_weighted_by_samples() -> None:
    """Running statistics average by samples; other buffers follow rank 0."""
    rows, model = data(28), CountsApart()
    made = trial([DDPCallback()], model=model).with_generators(DataLoader(rows, 7), DataLoader(data(12, 9), 5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "buffer steps differed")
        history = made.run(1)
    parts = rows.tensors[0].view(4, 7, FEATURES).split([4, 3], 1)
    expected = sum(part.var(1).mean(0) * part.shape[1] / 7 for part in parts)
    torch.testing.assert_close(model.norm.running_mean, rows.tensors[0].mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.norm.running_var, expected, rtol=1e-12, atol=0)
    assert model.steps == 4
    assert_equal(*by_rank([parameters(made), [dict(epoch) for epoch in history]]), 0.0)


@WORLD
def test_a_rank_without_a_sample_counts_nowhere_in_the_running_statistics() -> None:
    """A process without a sample counts nowhere."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(16, CLASSES)).double()
    images = torch.arange(48, dtype=torch.float64).view(3, 1, 4, 4) ** 2
    trained = trial([DDPCallback()], model=model)
    trained.with_generators(DataLoader(TensorDataset(images, torch.arange(3)), 2)).run(1)  # the last batch is one image
    torch.testing.assert_close(model[0].running_mean, images.mean().view(1), rtol=1e-12, atol=0)


class Zipped(DataLoader[Any]):
    def __init__(self, *loaders: DataLoader[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Any:
        return iter(zip(*self.loaders, strict=True))

    def __len__(self) -> int:
        return len(self.loaders[0])


@WORLD
def test_a_loader_that_is_none_of_torchs_but_by_name_is_divided() -> None:
    numbers: Any = torch.arange(12.0).view(6, 2)
    both = [DataLoader(numbers, 4), DataLoader(-numbers, 4)]
    parts = [part for part, _ in with_shares(shard_loader(Zipped(*both)))]
    start = 2 * dist.get_rank()
    assert torch.equal(parts[0][1], -numbers[start : start + 2]) and len(parts) == 2


@WORLD
def test_a_criterion_that_knows_the_batch_size_is_told_that_it_has_a_part() -> None:
    net = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    made = Trial(
        net, torch.optim.SGD(net.parameters()), lambda y, _: (y - torch.ones(4)).sum(), callbacks=[DDPCallback()]
    )
    made.with_train_data(torch.zeros(8, 2), torch.zeros(8), batch_size=4)
    with pytest.raises(RuntimeError) as raised:
        made.run(1, verbose=0)
    assert raised.value.__notes__[0].startswith("This process computes 2 of the 4 samples of the batch.")


@WORLD
def test_synchronized_layers_are_given_back() -> None:
    model, during = Normalized(), list[str]()

    @torchbearer.callbacks.on_step_training
    def fail(state: Any) -> None:
        during.append(type(state[torchbearer.MODEL].norm).__name__)
        raise KeyError("enough")

    trial([DDPCallback(sync_batchnorm=True)], model=model).with_generators(DataLoader(data(20), 10)).run(1)
    assert type(model.norm) is nn.BatchNorm1d
    failing = trial([DDPCallback(sync_batchnorm=True)], model=model, callbacks=[fail])
    with contextlib.suppress(KeyError, PeerError):
        failing.with_generators(DataLoader(data(20), 10)).run(1)
    assert during == ["SynchronizedBatchNorm1d"]
    assert type(model.norm) is nn.BatchNorm1d


@WORLD
def test_a_last_batch_too_short_for_batchnorm_on_all_processes_is_trained_by_fewer() -> None:
    """Batches too short for BatchNorm train on fewer processes."""
    made = trial([DDPCallback()], model=Normalized()).with_train_generator(DataLoader(data(15), 12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(2)
        trial([DDPCallback()], model=Normalized()).with_train_generator(DataLoader(data(6), 3)).run(2)
    assert_equal(*by_rank(parameters(made)), 0.0)
    texts, _ = by_rank([str(warning.message) for warning in caught])
    (about,) = (text for text in texts if "fewer than two" in text)
    assert about.startswith("a batch of 3 samples has fewer than two for each of 2 processes")
    assert "sync_batchnorm=True" in about


class StopsAlone(Callback):  # type: ignore[misc]
    def on_end_epoch(self, state: Any) -> None:
        state[torchbearer.STOP_TRAINING] |= dist.get_rank() == 1


@WORLD
def test_a_stop_of_one_rank_at_the_end_of_an_epoch_ends_all() -> None:
    made = trial([DDPCallback()], callbacks=[StopsAlone()]).with_train_generator(DataLoader(data(20), 5))
    assert len(made.run(4)) == 1


class Collects(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.sums, self.rates = list[float](), list[float]()

    def on_step_training(self, state: Any) -> None:
        self.sums.append(float(state[torchbearer.X].sum()))
        self.rates.append(0.1)  # the same on all processes


class Gathers(Collects):
    def on_end_epoch(self, state: Any) -> None:
        all_gather_object(self.sums, "the sums")


@WORLD
def test_what_a_callback_collects_of_its_part_is_named_unless_it_gathers_it() -> None:
    made = trial([DDPCallback()], callbacks=[Collects(), Gathers()]).with_train_generator(DataLoader(data(20), 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(2)
    texts, others = by_rank([text[:52] for each in caught if "collects" in (text := str(each.message))])
    assert (texts, others) == (["each process collects in Collects.sums what it compu"], [])


# --- random state -----------------------------------------------------------------------------------------------------


class Raises(Callback):  # type: ignore[misc]
    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def on_step_training(self, state: Any) -> None:
        if state[torchbearer.BATCH] == self.batch:
            raise ZeroDivisionError


@WORLD
def test_a_process_that_is_new_in_the_run_after_an_error_is_not_said_to_draw_otherwise() -> None:
    def made(raises: Raises) -> Trial:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)).double()
        return trial([DDPCallback()], model, callbacks=[raises])

    stays = made(raises := Raises(2))
    with pytest.raises((ZeroDivisionError, PeerError)):
        stays.with_train_generator(DataLoader(data(20), 5)).run(1)
    raises.batch = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (made(raises) if dist.get_rank() else stays).with_train_generator(DataLoader(data(20), 5)).run(1)
    assert not [each for each in caught if "random numbers" in str(each.message)]


def seed_all(seed: int) -> None:
    for library in (torch.manual_seed, random.seed, numpy.random.seed):
        library(seed)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


class Guesses(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x))


@WORLD
def test_a_prediction_with_dropout_is_named() -> None:
    for model, expected in ((nn.Linear(FEATURES, CLASSES), []), (Guesses(FEATURES, CLASSES), ["a prediction draws"])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trial([DDPCallback()], model=model).with_test_generator(DataLoader(data(20), 5)).predict()
        found = [str(each.message).partition("one process. ")[2] for each in caught]
        assert [text.partition(":")[0] for text in found if text] == expected


@WORLD.runs(TWO)
def random_states() -> Any:
    seed_all(7)
    drawn: list[Any] = []
    look = torchbearer.callbacks.on_sample(lambda state: drawn.append(draw()))
    made = Trial(network(), None, None, callbacks=[DDPCallback(), look], verbose=0).to("cpu", torch.float64)
    seed_all(7)
    made.with_train_generator(DataLoader(data(12), 6)).run(1)
    return drawn


def test_all_ranks_draw_the_users_numbers() -> None:
    """All processes draw your random numbers."""
    seed_all(7)
    torch.empty((), dtype=torch.int64).random_()  # the DataLoader's seed for its workers
    expected = [draw(), draw()]
    assert WORLD.returned(random_states) == [expected, expected]


class DrawsInBatches(Callback):  # type: ignore[misc]
    """Noise on gradients and parameters, as some optimizers add it; on one rank less is drawn in the data's events."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_sample(self, state: Any) -> None:
        self.drawn.append(float(torch.rand(len(state[torchbearer.X]))[0]))

    def on_backward(self, state: Any) -> None:
        for parameter in state[torchbearer.MODEL].parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter) + 0.01 * random.random())

    def on_step_training(self, state: Any) -> None:
        with torch.no_grad():
            for parameter in state[torchbearer.MODEL].parameters():
                parameter.add_(0.01 * torch.randn_like(parameter) + 0.01 * float(numpy.random.normal()))

    def on_end_epoch(self, state: Any) -> None:
        if get_rank() == 0:
            torch.rand(3)  # a picture for the log, say

    def on_start_training(self, state: Any) -> None:
        self.on_step_training(state)


@WORLD
def test_callbacks_that_change_parameters_at_random_change_them_alike_on_all_ranks() -> None:
    """Random changes of parameters agree on all processes."""
    noise = DrawsInBatches()
    made = trial([DDPCallback(), noise])
    torch.manual_seed(dist.get_rank())  # a user who seeds nothing
    made.with_train_generator(DataLoader(data(20), 8, shuffle=True)).run(3)
    assert_equal(*by_rank([parameters(made), draw()]), 0.0)
    own, other = by_rank(noise.drawn)
    assert len({*own, *other}) == 2 * len(own)


@WORLD.runs(TWO)
def goes_on_where_it_stopped() -> Any:
    """Parameters after four epochs with dropout, in one go and in two runs."""

    def started(name: str) -> Trial:
        model = nn.Sequential(network(), nn.Dropout(0.3), nn.Linear(CLASSES, CLASSES).double())
        made = trial([DDPCallback(), MostRecent(f"{name}.pt"), DrawsInBatches()], model=model)
        seed_all(11)
        return made.with_generators(DataLoader(data(20), 8, shuffle=True), DataLoader(data(7), 4))

    whole = started("whole")
    whole.run(4)
    started("first").run(2)
    again = started("again")
    again.load_state_dict(torch.load("first.pt", weights_only=False))
    torch.rand(7)
    again.evaluate()
    again.run(4)
    return parameters(whole), parameters(again)


def test_a_trial_that_goes_on_from_its_checkpoint_ends_with_the_numbers_of_one_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed Trial draws an uninterrupted one's numbers."""
    monkeypatch.chdir(tmp_path)
    for whole, resumed in [*WORLD.returned(goes_on_where_it_stopped), goes_on_where_it_stopped()]:
        assert_equal(resumed, whole, 0.0)


# --- data -------------------------------------------------------------------------------------------------------------


def shares_and_rows(made: Trial) -> tuple[list[Any], list[Any]]:
    shares, rows = [], []

    @torchbearer.callbacks.on_criterion
    def look(state: Any) -> None:
        shares.append((state[SHARE].local, state[SHARE].total))
        rows.append(state[torchbearer.X][:, 0].tolist())

    made.state[torchbearer.CALLBACK_LIST].append([look])
    made.run(1)
    return shares, rows


@WORLD
def test_per_process_gives_each_rank_whole_batches_in_turn() -> None:
    """`batch_size="per_process"` gives each process whole batches in turn."""
    made = trial([DDPCallback(batch_size="per_process")])
    made.with_generators(DataLoader(numbered(22), 4), DataLoader(data(9, 9), 4))
    (shares, rows), (other_shares, other_rows) = by_rank(shares_and_rows(made))
    assert shares == [(4, 8), (4, 8), (4, 6)]
    assert other_shares == [(4, 8), (4, 8), (2, 6)]
    assert (rows[0], other_rows[0], other_rows[2]) == ([0, 1, 2, 3], [4, 5, 6, 7], [20, 21])
    history, other_history = by_rank(made.state[torchbearer.HISTORY][0])
    assert history["train_steps"] == other_history["train_steps"] == 3
    assert history["val_loss"] == other_history["val_loss"]


@WORLD
def test_per_process_works_on_any_data() -> None:
    listed = train(trial([DDPCallback("per_process")]), list(DataLoader(data(20), 4)))
    making = trial([DDPCallback("per_process")])

    def loader(state: Any) -> None:
        state[torchbearer.X] = torch.randn(5, FEATURES, dtype=torch.float64)
        state[torchbearer.Y_TRUE] = torch.randint(0, CLASSES, (5,))

    making.with_loader(loader).for_train_steps(2)
    rows, other_rows = by_rank(shares_and_rows(making)[1])
    assert_equal(*by_rank([listed, parameters(making)]), 0.0)
    assert other_rows != rows, "each rank makes its own batch"


class LateFirst(TensorDataset):
    """The first samples take longer to load than all others."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.1 if index < 4 else 0.0)
        return super().__getitem__(index)


@WORLD
def test_workers_that_may_hand_out_batches_in_any_order_keep_the_order_of_the_sampler() -> None:
    """A loader's `in_order=False` becomes `True`."""
    loader = DataLoader(LateFirst(*numbered(14).tensors), 4, num_workers=2, in_order=False)
    rows, other_rows = by_rank(shares_and_rows(trial([DDPCallback()]).with_train_generator(loader))[1])
    assert rows == [[0, 1], [4, 5], [8, 9], [12]]
    assert other_rows == [[2, 3], [6, 7], [10, 11], [13]]
    assert not loader.in_order, "the user's loader is left as it was"


@WORLD
def test_a_distributed_sampler_is_left_alone() -> None:
    """A `DistributedSampler` keeps its loader undivided."""
    sampler = DistributedSampler(numbered(14), shuffle=False, drop_last=False)
    made = trial([DDPCallback()]).with_train_generator(DataLoader(numbered(14), 3, sampler=sampler))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        shares, rows = shares_and_rows(made)
    said = [str(each.message)[:50] for each in caught if "Sampler" in str(each.message)]
    assert by_rank(said) == [["The loader of TensorDataset has a DistributedSampl"], []]
    assert by_rank(rows) == [[[0, 2, 4], [6, 8, 10], [12]], [[1, 3, 5], [7, 9, 11], [13]]]
    assert shares == [(3, None), (3, None), (1, None)]
    x, y = numbered(14).tensors
    steps = [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11], [12, 13]]
    one = trial([]).with_train_generator([(x[step], y[step]) for step in steps])
    one.run(1)
    assert_equal(parameters(made), parameters(one), relative=1e-10)
    assert_equal(*by_rank(parameters(made)), 0.0)


class OwnRows(IterableDataset[Any]):
    """Splits itself."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(numbered(14))[dist.get_rank() :: 2])

    def __len__(self) -> int:
        return 7


@WORLD
def test_loaders_that_are_divided_already_are_left_alone() -> None:
    """`batch_size=None` leaves each process its own loader; `Resume` refuses it."""
    made = trial([DDPCallback(batch_size=None)]).with_train_generator(DataLoader(OwnRows(), 3))
    shares, rows = shares_and_rows(made)
    assert by_rank(rows) == [[[0, 2, 4], [6, 8, 10], [12]], [[1, 3, 5], [7, 9, 11], [13]]]
    assert shares == [(3, None), (3, None), (1, None)]
    assert_equal(*by_rank([parameters(made), made.state[torchbearer.HISTORY]]), 0.0)
    resumed = trial([DDPCallback(batch_size=None), Resume("none.pt")]).with_train_generator(DataLoader(OwnRows(), 3))
    with pytest.raises(ConfigurationError, match=r"divided already \(batch_size=None\)"):
        resumed.run(1)


# --- the model is never wrapped ---------------------------------------------------------------------------------------


@WORLD
def test_the_model_is_not_wrapped_and_copies_carry_nothing_of_ours() -> None:
    model = network()

    @torchbearer.callbacks.on_checkpoint
    def copy_it(state: Any) -> None:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.ones(1, FEATURES, dtype=torch.float64)).sum().backward()  # on one rank alone: no collective
            torch.jit.script(copied)

    made = trial([DDPCallback()], model=model, callbacks=[copy_it] if get_rank() == 0 else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        made.with_train_generator(loader := DataLoader(data(12), 4)).run(2)
    assert made.state[torchbearer.MODEL] is model
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert made.state[torchbearer.TRAIN_DATA][0] is loader


# --- each callback alone ----------------------------------------------------------------------------------------------


@WORLD
def test_callbacks_work_without_the_others() -> None:
    """`AllReduceGradients`, `ReduceMetrics` and `ShardData` work alone."""
    rank = dist.get_rank()
    x, y = data(8).tensors
    mine, his = (slice(1, 3), slice(4, 8)) if rank else (slice(0, 1), slice(0, 4))
    made, one = trial([AllReduceGradients()]), trial([])
    made.with_train_generator([(x[mine], y[mine])] * 3).run(1)
    one.with_train_generator([(x[:3], y[:3])] * 3).run(1)
    assert_equal(parameters(made), parameters(one), relative=1e-10)
    found = trial([ReduceMetrics()]).with_val_generator([(x[his], y[his])]).evaluate()
    assert_equal(found, trial([]).with_val_generator([(x, y)]).evaluate(), relative=1e-12)
    shards = trial([ShardData()], metrics=[]).with_train_generator(DataLoader(data(7), 4))
    assert shares_and_rows(shards)[0] == [[(2, 4), (2, 3)], [(2, 4), (1, 3)]][rank]


# --- calls within calls, and after those that fail --------------------------------------------------------------------


def looked_at(ddp: list[Callback], model: nn.Module | None = None, callbacks: Any = ()) -> Trial:
    loaders = (DataLoader(data(20), 6, shuffle=True), DataLoader(data(10, 9), 4), DataLoader(data(11, 3), 2))
    return trial(ddp, model=model, callbacks=callbacks).with_generators(*loaders)


def look(made: Trial) -> list[Any]:
    return [made.evaluate(), made.predict(), made.predict(data_key=torchbearer.VALIDATION_DATA)]


@as_on_one
def test_a_callback_that_evaluates_and_predicts_within_a_run_sees_all_data_and_so_do_calls_after_it(
    ddp: list[Callback],
) -> list[Any]:
    seen: list[Any] = []

    @torchbearer.callbacks.on_end_epoch
    def at_the_end(state: Any) -> None:
        if state[torchbearer.MAX_EPOCHS] == 2:  # not in what it calls
            seen.append(look(made))

    made = looked_at(ddp, callbacks=[at_the_end])
    loaders = made.state[torchbearer.TRAIN_DATA], made.state[torchbearer.TEST_DATA]
    made.run(2)
    assert loaders == (made.state[torchbearer.TRAIN_DATA], made.state[torchbearer.TEST_DATA])
    return [*seen, look(made), parameters(made)]


@WORLD
def test_a_trial_predicts_all_samples_after_a_run_that_raised() -> None:
    @torchbearer.callbacks.on_start_epoch
    def fail(state: Any) -> None:
        if state[torchbearer.MAX_EPOCHS] == 2:
            raise KeyError("enough")

    made = looked_at([DDPCallback()], callbacks=[fail])
    with contextlib.suppress(KeyError, PeerError):
        made.run(2)
    assert_equal(look(made), look(looked_at([])), relative=1e-10)


@WORLD
def test_a_callback_that_evaluates_within_a_run_finds_synchronized_batch_norm_and_leaves_it() -> None:
    def looks(ddp: list[Callback]) -> list[Any]:
        @torchbearer.callbacks.on_end_epoch
        def at_the_end(state: Any) -> None:
            if state[torchbearer.MAX_EPOCHS] == 3:
                seen.append(look(made))

        seen: list[Any] = []
        made = looked_at(ddp, model=normalized(), callbacks=[at_the_end])
        seen.append(made.run(3))
        assert "Synchronized" not in repr(made.state[torchbearer.MODEL])
        return [*seen, parameters(made)]

    assert_equal(looks([DDPCallback(sync_batchnorm=True)]), looks([]), relative=1e-10)


@WORLD
def test_an_evaluation_within_a_prediction_sees_all_samples_once() -> None:
    def looks(ddp: list[Callback], event: str) -> list[Any]:
        seen: list[Any] = []

        def evaluate(state: Any) -> None:
            delattr(watch, event)
            seen.append(made.evaluate())

        setattr(watch := Callback(), event, evaluate)
        made = looked_at(ddp, callbacks=[watch])
        return [made.predict(), *seen]

    for event in ("on_start", "on_start_validation", "on_end_validation", "on_end"):
        assert_equal(looks([DDPCallback()], event), looks([], event), relative=1e-10)


@as_on_one
def test_a_prediction_of_data_with_targets_has_the_metrics_of_one_process(ddp: list[Callback]) -> list[Any]:
    seen: list[dict[str, float]] = []
    watch = Callback()
    watch.on_end_epoch = lambda state: seen.append(dict(state[torchbearer.METRICS]))
    made = trial(ddp, callbacks=[watch]).with_val_generator(DataLoader(data(10, 9), 2))
    made.predict(data_key=torchbearer.VALIDATION_DATA)
    assert seen[0]["val_loss"] > 0
    return seen


class Fails(Callback):  # type: ignore[misc]
    def on_step_training(self, state: Any) -> None:
        if state[torchbearer.BATCH] == 1:
            raise KeyError("enough")


@WORLD
def test_a_model_whose_trial_raised_trains_in_a_new_one_and_in_a_loop_of_its_own() -> None:
    def trained(ddp: Any) -> list[Any]:
        model = network()
        for callbacks in ([Fails()], []):
            with contextlib.suppress(KeyError, PeerError):
                trial(ddp(), model=model, callbacks=callbacks).with_train_generator(DataLoader(data(20), 6)).run(1)
        for parameter in model.parameters():
            parameter.grad = None
        model(data(4).tensors[0]).sum().backward()  # as on one process: no hook is left
        return [dict(model.named_parameters()), [parameter.grad for parameter in model.parameters()]]

    assert_equal(trained(lambda: [DDPCallback(verify=None)]), trained(list), relative=1e-10)


@WORLD
def test_data_that_a_trial_has_predicted_are_freed() -> None:
    made, kept = trial([DDPCallback()]), []
    for _ in range(3):
        x = data(20).tensors[0]
        kept.append(weakref.ref(x.untyped_storage()))
        made.with_test_data(x, batch_size=5).predict()
    del x
    gc.collect()
    assert [storage() is None for storage in kept] == [True, True, False]  # the Trial has the last one


@as_on_one
def test_a_run_after_a_prediction_that_raised_has_the_numbers_of_one_process(ddp: list[Callback]) -> list[Any]:
    def fail(state: Any) -> None:
        del watch.on_end_validation
        raise KeyError("enough")

    watch = Callback()
    watch.on_end_validation = fail
    made = looked_at(ddp, callbacks=[watch])
    with contextlib.suppress(KeyError, PeerError):
        made.predict()
    return [made.run(2), made.evaluate(), parameters(made)]


@as_on_one
def test_a_run_after_one_that_raised_in_a_pass_has_the_order_and_the_means_of_one_process(ddp: list[Callback]) -> Any:
    def fail(state: Any) -> None:
        if state[torchbearer.EPOCH] == state[torchbearer.BATCH] == 1:
            del watch.on_backward
            raise KeyError("enough")

    watch = Callback()
    watch.on_backward = fail
    made = trial(ddp, callbacks=[watch])
    made.with_generators(DataLoader(numbered(20), 6, shuffle=True), DataLoader(data(9, 3), 4, shuffle=True))
    with contextlib.suppress(KeyError, PeerError):
        made.run(3)
    drawn = draws()
    history = [dict(epoch) for epoch in made.run(3)]
    assert_equal(*by_rank(history), 0.0)
    losses = [[epoch["loss"], epoch["val_loss"]] for epoch in history]  # running means forget what has failed
    return [drawn, losses, parameters(made)]


@WORLD
def test_resume_behind_a_run_that_raised_does_not_raise_its_error_again() -> None:
    @torchbearer.callbacks.on_backward
    def fail(state: Any) -> None:
        if get_rank():
            raise KeyError("enough")

    with contextlib.suppress(KeyError, PeerError):
        trial([DDPCallback()], callbacks=[fail]).with_train_generator(DataLoader(data(20), 6)).run(1)
    with tempfile.TemporaryDirectory() as folder:
        train(trial([DDPCallback(), Resume(Path(folder, "run.pt"))]), DataLoader(data(20), 6))


@as_on_one
def test_predictions_of_more_steps_than_batches_have_the_order_of_one_process_also_in_a_callback(ddp: Any) -> Any:
    rows = DataLoader(TensorDataset(data(13, 3).tensors[0]), 5)
    trials = [trial(ddp), trial(ddp, callbacks=[torchbearer.callbacks.AggregatePredictions()])]
    return [made.with_test_generator(rows, steps).predict() for made in trials for steps in (2, 5, 7, 9)]


@WORLD
def test_batches_too_short_for_batch_norm_train_on_fewer_processes_after_a_prediction() -> None:
    made = looked_at([DDPCallback()], model=normalized())
    made.predict()
    made.run(1)


def own_losses(state: Any) -> None:
    """A closure that sets no ``state[torchbearer.LOSS]``."""
    state[torchbearer.OPTIMIZER].zero_grad()
    loss = state[torchbearer.MODEL](state[torchbearer.X]).square().mean()
    state[torchbearer.CALLBACK_LIST].on_criterion(state)
    loss.backward()


@WORLD
def test_a_closure_without_torchbearers_loss_trains_and_options_that_need_it_name_it() -> None:
    def trained(ddp: list[Callback]) -> Any:
        made = trial(ddp, criterion=None, metrics=[]).with_closure(own_losses)
        made.with_train_generator(DataLoader(data(11), 4)).run(1)
        return parameters(made)

    assert_equal(trained([DDPCallback(verify=None)]), trained([]), relative=1e-10)
    refused: dict[str, dict[str, Any]] = {
        "skip_batch": {"skip_batch": "non_finite"},
        "sync_batchnorm": {"sync_batchnorm": True},
    }
    for option, options in refused.items():
        with pytest.raises(ConfigurationError, match=f"{option} of DDPCallback need.* has set no state"):
            trained([DDPCallback(**options)])


def returning_the_loss(state: Any) -> Any:
    state[torchbearer.OPTIMIZER].zero_grad()
    outputs = state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    loss = state[torchbearer.LOSS] = state[torchbearer.CRITERION](outputs, state[torchbearer.Y_TRUE])
    loss.backward()
    return loss


@as_on_one
def test_lbfgs_searches_by_the_loss_of_the_whole_batch_if_a_closure_returns_it(ddp: list[Callback]) -> Any:
    search = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    made = trial(ddp, optimizer=search).with_closure(returning_the_loss)
    return train(made, DataLoader(data(11), 11))


# --- metrics of the user's own ----------------------------------------------------------------------------------------


class Counter(Metric):  # type: ignore[misc]
    """Not built from decorators: the number of samples it saw."""

    def reset(self, state: Any) -> None:
        self.count = 0

    def process(self, *args: Any) -> None:
        self.count += len(args[0][torchbearer.Y_TRUE])

    def process_final(self, *args: Any) -> dict[str, int]:
        return {"count": self.count}


class TimeFirst(nn.Module):
    """Its predictions have shape ``[time, batch, class]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, -1, FEATURES).expand(3, -1, -1)


@WORLD
def test_a_metric_of_an_epoch_whose_predictions_do_not_begin_with_the_samples_is_refused_by_name() -> None:
    metric = torchbearer.metrics.to_dict(torchbearer.metrics.EpochLambda("tagged", lambda *_: 0.0))
    made = trial([DDPCallback()], TimeFirst(), lambda _: None, lambda *_: torch.zeros(()), [metric])
    for samples in (3, 4):  # of 4 both ranks have two
        made.with_val_generator(DataLoader(data(samples), samples))
        with pytest.raises(ConfigurationError, match=r"the metric tagged needs .* of Y_PRED, but there are 3 rows"):
            made.evaluate()


@WORLD
def test_a_metric_that_cannot_be_merged_is_averaged_and_named() -> None:
    """A warning names metrics that are only averaged."""
    made = trial([DDPCallback()], metrics=[Counter("count")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = made.with_train_generator(DataLoader(data(10), 5)).run(1)
    assert history[0]["count"] == pytest.approx((6 * 6 + 4 * 4) / 10)  # the ranks have 6 and 4 of the ten samples
    messages = [str(warning.message) for warning in caught]
    assert any("The metric count" in message and "weighted by samples" in message for message in messages)


@WORLD
def test_a_metric_that_counts_is_named_where_all_processes_count_alike() -> None:
    made = trial([DDPCallback()], metrics=[Counter("count")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.with_train_generator(DataLoader(data(16), 4)).run(1)
    texts = {str(each.message).partition(";")[0] for each in caught if "The metric" in str(each.message)}
    says = "The metric count is not built from Torchbearer's decorators and counts the samples of a process"
    assert by_rank([*texts])[0] == [says]


class CountsRows(Callback):
    """Collects what an evaluation predicts, as programs do to compute a confusion matrix, and joins it at the end."""

    def on_start_validation(self, state: Any) -> None:
        self.found: list[torch.Tensor] = []

    def on_step_validation(self, state: Any) -> None:
        self.found.append(state[torchbearer.Y_PRED].argmax(1))

    def on_end_validation(self, state: Any) -> None:
        self.rows = sum(map(len, all_gather_object(torch.cat(self.found), "the predictions")))


@WORLD
def test_a_callback_that_collects_rows_gets_none_of_a_padding_batch() -> None:
    for samples in (9, 1):  # rank 1 has no sample of the last batch of 9, and none at all of the other
        counts = CountsRows()
        trial([DDPCallback(), counts]).with_val_generator(DataLoader(data(samples), 4)).evaluate()
        assert counts.rows == samples


class JoinsRows(Metric):
    def __init__(self) -> None:
        super().__init__("joined")

    def reset(self, state: Any) -> None:
        self.rows: list[torch.Tensor] = []

    def process(self, state: Any) -> None:
        self.rows.append(state[torchbearer.Y_PRED])

    def process_final(self, state: Any) -> dict[str, float]:
        return {self.name: float(torch.cat(self.rows).mean())}


@WORLD
def test_a_metric_that_joins_rows_ends_on_a_rank_that_predicts_no_batch() -> None:
    made = trial([DDPCallback()], metrics=[JoinsRows()])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The metric joined is not built from Torchbearer's decorators")
        predictions = made.with_test_generator(DataLoader(data(5), 8)).predict()
    assert len(predictions) == 5


@WORLD
def test_a_rank_without_a_sample_has_the_history_of_the_others() -> None:
    histories = by_rank(trial([DDPCallback()]).with_train_generator(DataLoader(data(1), 4)).run(1))
    assert histories[0] == histories[1] and "running_loss" in histories[1][0]


def accuracy(y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
    return (y_pred.argmax(1) == y_true).double().mean()


def perplexity(y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y_pred, y_true).exp()


@WORLD
def test_a_metric_of_batches_that_is_no_mean_over_samples_is_named_once() -> None:
    of_batches = [torchbearer.metrics.lambda_metric(each.__name__)(each) for each in (accuracy, perplexity)]
    made = trial([DDPCallback()], metrics=[torchbearer.metrics.mean(each) for each in of_batches])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.with_generators(DataLoader(data(10), 5), DataLoader(data(10), 5)).run(2)
    (text,) = by_rank([str(each.message) for each in caught if "The metric" in str(each.message)])[0]
    assert text.startswith("The metric perplexity is no mean over samples: of the first batch it is ")


def test_parts_that_are_padded_to_other_lengths_are_not_compared_and_do_not_fail() -> None:
    parts = [(2.0, 1.0, [torch.ones(2, length), torch.ones(2, length)]) for length in (3, 4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MetricCheck().compare("accuracy", torchbearer.metrics.lambda_metric("accuracy")(accuracy), parts)
    assert not caught


def loss_in(state: Any) -> float:
    return float(state[torchbearer.LOSS])


@WORLD
def test_callbacks_read_the_loss_of_the_whole_batch_through_decorators_and_helpers() -> None:
    # Torchbearer's own decorators, and functions that a callback calls, hid who reads it.
    found = list[float]()

    @torchbearer.callbacks.on_step_training
    @torchbearer.callbacks.once_per_epoch
    def once(state: Any) -> None:
        found.append(float(state[torchbearer.LOSS]))

    @torchbearer.callbacks.on_step_training
    @torchbearer.callbacks.only_if(lambda state: state[torchbearer.BATCH] == 0)
    def first(state: Any) -> None:
        found.append(float(state[torchbearer.LOSS]))

    @torchbearer.callbacks.on_step_training
    def through_a_helper(state: Any) -> None:
        found.append(loss_in(state))

    for callback in (once, first, through_a_helper):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES).double()
        made = trial([DDPCallback()], model, callbacks=[callback])
        made.with_train_generator(DataLoader(data(5), 5)).run(1)
    assert len(found) == 3 and by_rank(found) == [found, found]
