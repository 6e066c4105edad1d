"""What the callbacks promise beyond equality with one process; each case runs on ranks and says what it saw."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torchbearer
from distributed import run_distributed
from scenarios import CLASSES, FEATURES, data, network, outcome, run, trial
from test_equivalence import assert_equal
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchbearer import Callback, Metric, Trial
from torchbearer.callbacks import MostRecent

from ddp_callbacks import __version__
from ddp_callbacks.errors import PeerError
from ddp_callbacks.torchbearer import SHARE, AllReduceGradients, DDPCallback, Flatten, ReduceMetrics, ShardData

pytestmark = pytest.mark.shares_results()

Case = Callable[[], Any]
CASES: dict[str, Case] = {}
WORLD_SIZE = 3


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    return {name: function() for name, function in CASES.items()}


@functools.cache
def seen() -> list[dict[str, Any]]:
    return run_distributed(run_cases, WORLD_SIZE)


def by_rank(function: Case) -> list[Any]:
    return [results[function.__name__] for results in seen()]


# --- BatchNorm -------------------------------------------------------------------------------------------


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
            self.steps += 1 + dist.get_rank()
        return self.linear(self.norm(x))


class Spy(Callback):  # type: ignore[misc]
    """Keeps each rank's own statistics from before they are merged, and its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0

    def on_sample(self, state: Any) -> None:
        self.samples += state[SHARE].local

    def on_step_training(self, state: Any) -> None:
        norm = state[torchbearer.MODEL].norm
        self.mean, self.var = norm.running_mean.clone(), norm.running_var.clone()


@case
def batch_norm() -> Any:
    spy = Spy()
    model = Normalized()
    made = trial([DDPCallback()], model=model, callbacks=[spy])
    result = run(made, DataLoader(data(40), 10, shuffle=True), DataLoader(data(12, 9), 5), epochs=1)
    return result | {"own": (spy.samples, spy.mean, spy.var), "steps": int(model.steps)}


def test_running_statistics_are_the_mean_over_the_ranks_weighted_by_samples() -> None:
    results = by_rank(batch_norm)
    samples = [result["own"][0] for result in results]
    assert samples == [16, 12, 12]
    for index, name in ((1, "norm.running_mean"), (2, "norm.running_var")):
        expected = sum(result["own"][0] * result["own"][index] for result in results) / sum(samples)
        for result in results:
            torch.testing.assert_close(result["parameters"][name], expected, rtol=1e-12, atol=0)


def test_other_buffers_are_those_of_rank_0() -> None:
    assert [result["steps"] for result in by_rank(batch_norm)] == [4, 4, 4]


def test_batch_norm_models_are_equal_everywhere() -> None:
    first, *others = by_rank(batch_norm)
    for other in others:
        assert_equal(other["parameters"], first["parameters"], relative=0.0)
        assert_equal(other["history"], first["history"], relative=0.0)


@case
def batch_norm_without_samples() -> Any:
    """Batches of two images on three ranks: rank 2 has none."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(16, CLASSES)).double()
    made = trial([DDPCallback()], model=model)
    made.with_generators(DataLoader(TensorDataset(images(), torch.arange(4)), 2)).run(1)
    return model[0].running_mean.clone()


def images() -> torch.Tensor:
    return torch.arange(64, dtype=torch.float64).view(4, 1, 4, 4) ** 2


def test_a_rank_without_a_sample_counts_nowhere_in_the_running_statistics() -> None:
    for mean in by_rank(batch_norm_without_samples):
        torch.testing.assert_close(mean, images().mean().view(1), rtol=1e-12, atol=0)


class Raises(Callback):  # type: ignore[misc]
    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.found = found

    def on_step_training(self, state: Any) -> None:
        self.found.append(type(state[torchbearer.MODEL].norm))
        raise KeyError("enough")


def layers_of_runs() -> Any:
    """In a run, after it, and after one that raised."""
    model, during = Normalized(), list[Any]()
    made = trial([DDPCallback(sync_batchnorm=True)], model=model)
    made.with_generators(DataLoader(data(20), 10)).run(1)
    after = type(model.norm)
    failing = trial([DDPCallback(sync_batchnorm=True)], model=model, callbacks=[Raises(during)])
    with contextlib.suppress(KeyError, PeerError):
        failing.with_generators(DataLoader(data(20), 10)).run(1)
    return [after, *[kind.__name__ for kind in during], type(model.norm)]


def test_synchronized_layers_are_given_back() -> None:
    for found in run_distributed(layers_of_runs, 2):
        assert found == [nn.BatchNorm1d, "SynchronizedBatchNorm1d", nn.BatchNorm1d]


@case
def a_last_batch_too_short_for_all() -> Any:
    model = Normalized()
    made = trial([DDPCallback()], model=model).with_train_generator(DataLoader(data(15), 12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(2)
        small = trial([DDPCallback()], model=Normalized()).with_train_generator(DataLoader(data(8), 4))
        small.run(2)
    return outcome(made, [])["parameters"], [str(warning.message) for warning in caught]


def test_a_last_batch_too_short_for_batchnorm_on_all_processes_is_trained_by_fewer() -> None:
    (first, texts), *others = by_rank(a_last_batch_too_short_for_all)
    for parameters, _ in others:
        assert_equal(parameters, first, 0.0)
    about = [text for text in texts if "BatchNorm" in text]
    assert len(about) == 1 and about[0].startswith("a batch of 4 samples has fewer than two for each of 3 processes")
    assert "sync_batchnorm=True" in about[0]


# --- random state ----------------------------------------------------------------------------------------


@case
def random_states() -> Any:
    model = network()
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    draws: list[Any] = []

    @torchbearer.callbacks.on_sample
    def draw(_: Any) -> None:
        draws.append((float(torch.rand(())), random.random(), float(numpy.random.rand())))

    made = Trial(model, None, None, callbacks=[DDPCallback(), draw], verbose=0).to("cpu", torch.float64)
    made.with_train_generator(DataLoader(data(12), 6)).run(1)
    return draws


def test_ranks_draw_different_numbers_and_rank_0_the_users() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    torch.empty((), dtype=torch.int64).random_()  # the DataLoader's seed for its workers
    expected = [(float(torch.rand(())), random.random(), float(numpy.random.rand())) for _ in range(2)]
    ranks = by_rank(random_states)
    assert ranks[0] == expected
    for column in range(3):
        assert len({rank[0][column] for rank in ranks}) == WORLD_SIZE


class DrawsInBatches(Callback):
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
        if dist.get_rank() == 0:
            torch.rand(3)  # a picture for the log, say

    def on_start_training(self, state: Any) -> None:
        self.on_step_training(state)


@case
def random_changes() -> Any:
    torch.manual_seed(dist.get_rank())  # a user who seeds nothing
    draws = DrawsInBatches()
    made = trial([DDPCallback(), draws])
    torch.manual_seed(dist.get_rank())
    made.with_train_generator(DataLoader(data(20), 8, shuffle=True)).run(3)
    after = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
    return outcome(made, [])["parameters"], draws.drawn, after


def test_callbacks_that_change_parameters_at_random_change_them_alike_on_all_ranks() -> None:
    (first, own, after), *others = by_rank(random_changes)
    for parameters, drawn, drawn_after in others:
        assert_equal(parameters, first, 0.0)
        assert len({*drawn, *own}) == 2 * len(own)
        assert drawn_after == after


def goes_on_where_it_stopped(folder: str) -> Any:
    """Parameters after four epochs with dropout, in one go and in two runs."""

    def started(name: str) -> Trial:
        model = nn.Sequential(network(), nn.Dropout(0.3), nn.Linear(CLASSES, CLASSES).double())
        made = trial([DDPCallback(), MostRecent(f"{folder}/{name}.pt"), DrawsInBatches()], model=model)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(11)
        return made.with_generators(DataLoader(data(20), 8, shuffle=True), DataLoader(data(7), 4))

    whole = started("whole")
    whole.run(4)
    started("first").run(2)
    again = started("again")
    again.load_state_dict(torch.load(f"{folder}/first.pt", weights_only=False))
    torch.rand(7)
    again.evaluate()
    again.run(4)
    return outcome(whole, [])["parameters"], outcome(again, [])["parameters"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trial_that_goes_on_from_its_checkpoint_ends_with_the_numbers_of_one_that_was_never_stopped(
    world_size: int, tmp_path: Path
) -> None:
    for whole, resumed in run_distributed(goes_on_where_it_stopped, world_size, str(tmp_path)):
        assert_equal(resumed, whole, 0.0)


# --- data ------------------------------------------------------------------------------------------------


def shares_and_rows(made: Trial, epochs: int = 1) -> tuple[list[Any], list[Any]]:
    shares, rows = [], []

    @torchbearer.callbacks.on_criterion
    def look(state: Any) -> None:
        shares.append((state[SHARE].local, state[SHARE].total))
        rows.append(state[torchbearer.X][:, 0].tolist())

    made.state[torchbearer.CALLBACK_LIST].append([look])
    made.run(epochs)
    return shares, rows


@case
def per_process() -> Any:
    made = trial([DDPCallback(batch_size="per_process")])
    x, y = data(22).tensors
    x[:, 0] = torch.arange(22)
    made.with_generators(DataLoader(TensorDataset(x, y), 4), DataLoader(data(9, 9), 4))
    shares, rows = shares_and_rows(made)
    return shares, rows, made.state[torchbearer.HISTORY][0]


def test_per_process_gives_each_rank_whole_batches_in_turn() -> None:
    ranks = by_rank(per_process)
    # 22 samples in batches of 4 are 6 batches: two steps of three.
    assert [rank[0] for rank in ranks] == [[(4, 12), (4, 10)], [(4, 12), (4, 10)], [(4, 12), (2, 10)]]
    assert [rank[1][0] for rank in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ranks[2][1][1] == [20, 21]
    assert [rank[2]["train_steps"] for rank in ranks] == [2, 2, 2]
    assert len({rank[2]["val_loss"] for rank in ranks}) == 1


@case
def per_process_on_other_data() -> Any:
    batches = list(DataLoader(data(20), 4))
    listed = run(trial([DDPCallback("per_process")]), batches, epochs=2)
    making = trial([DDPCallback("per_process")])

    def loader(state: Any) -> None:
        state[torchbearer.X] = torch.randn(5, FEATURES, dtype=torch.float64)
        state[torchbearer.Y_TRUE] = torch.randint(0, CLASSES, (5,))

    making.with_loader(loader).for_train_steps(2)
    _, rows = shares_and_rows(making)
    return listed, rows, {key: value.clone() for key, value in making.state[torchbearer.MODEL].state_dict().items()}


def test_per_process_works_on_any_data() -> None:
    first, *others = by_rank(per_process_on_other_data)
    for other in others:
        assert_equal(other[0], first[0], relative=0.0)
        assert_equal(other[2], first[2], relative=0.0)
        assert other[1] != first[1], "each rank makes its own batch"


class LateFirst(TensorDataset):
    """The first samples take longer to load than all others."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3 if index < 4 else 0.0)
        return super().__getitem__(index)


@case
def out_of_order() -> Any:
    x, y = data(14).tensors
    x[:, 0] = torch.arange(14)
    loader = DataLoader(LateFirst(x, y), 4, num_workers=2, in_order=False)
    made = trial([DDPCallback()]).with_train_generator(loader)
    return *shares_and_rows(made), loader.in_order


def test_workers_that_may_hand_out_batches_in_any_order_keep_the_order_of_the_sampler() -> None:
    ranks = by_rank(out_of_order)
    assert [rank[1] for rank in ranks] == [
        [[0, 1], [4, 5], [8, 9], [12]],
        [[2], [6], [10], [13]],
        [[3], [7], [11], [12, 13]],  # the last is a stand-in
    ]
    assert ranks[2][0] == [(1, 4), (1, 4), (1, 4), (0, 2)]
    assert [rank[2] for rank in ranks] == [False] * 3, "the user's loader is left as it was"


@case
def distributed_sampler() -> Any:
    x, y = data(14).tensors
    x[:, 0] = torch.arange(14)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=False)
    made = trial([DDPCallback()]).with_train_generator(DataLoader(dataset, 3, sampler=sampler))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        shares, rows = shares_and_rows(made)
    said = [str(each.message)[:50] for each in caught if "Sampler" in str(each.message)]
    return shares, rows, outcome(made, made.state[torchbearer.HISTORY]), said


def test_a_distributed_sampler_is_left_alone() -> None:
    ranks = by_rank(distributed_sampler)
    assert [rank[3] for rank in ranks] == [["The loader of TensorDataset has a DistributedSampl"], [], []]
    assert [rank[1] for rank in ranks] == [[[0, 3, 6], [9, 12]], [[1, 4, 7], [10, 13]], [[2, 5, 8], [11, 0]]]
    assert ranks[0][0] == [(3, None), (2, None)]
    assert_equal(ranks[1][2], ranks[0][2], relative=0.0)
    x, y = data(14).tensors
    x[:, 0] = torch.arange(14)
    order = [0, 3, 6, 1, 4, 7, 2, 5, 8, 9, 12, 10, 13, 11, 0]
    one = trial([]).with_train_generator([(x[part], y[part]) for part in (order[:9], order[9:])])
    assert_equal(ranks[0][2]["parameters"], outcome(one, one.run(1))["parameters"], relative=1e-10)


@case
def loaders_after_the_run() -> Any:
    loader = DataLoader(data(12), 4, shuffle=True)
    made = trial([DDPCallback()]).with_train_generator(loader)
    made.run(1)
    generator, steps = made.state[torchbearer.TRAIN_DATA]
    return generator is loader, steps, type(loader.batch_sampler).__name__


def test_the_users_loader_is_given_back_unchanged() -> None:
    assert by_rank(loaders_after_the_run) == [(True, 3, "BatchSampler")] * WORLD_SIZE


# --- the model is never wrapped --------------------------------------------------------------------------


@case
def model_afterwards() -> Any:
    import copy
    import pickle

    model = network()
    during: list[Any] = []

    @torchbearer.callbacks.on_checkpoint
    def copy_it(state: Any) -> None:
        copied = copy.deepcopy(state[torchbearer.MODEL])
        unpickled = pickle.loads(pickle.dumps(state[torchbearer.MODEL]))
        torch.jit.script(copied)
        during.extend(hooks_of(copied) + hooks_of(unpickled))

    made = trial([DDPCallback()], model=model, callbacks=[copy_it])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        made.with_train_generator(DataLoader(data(12), 4)).run(2)
    attributes = sorted(vars(model)) == sorted(vars(network()))
    return made.state[torchbearer.MODEL] is model, list(model.state_dict()), attributes, during, hooks_of(model)


def hooks_of(model: nn.Module) -> list[Any]:
    return [hook for parameter in model.parameters() for hook in (parameter._post_accumulate_grad_hooks or {}).values()]


def test_the_model_is_not_wrapped_and_copies_carry_nothing_of_ours() -> None:
    expected = (True, ["0.weight", "0.bias", "2.weight", "2.bias"], True, [], [])
    assert by_rank(model_afterwards) == [expected] * WORLD_SIZE


# --- each callback alone ---------------------------------------------------------------------------------


@case
def gradients_alone() -> Any:
    torch.manual_seed(3)  # the same model everywhere; rank r has r + 1 samples of its own
    x, y = data(6).tensors
    rank = dist.get_rank()
    mine = slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
    made = trial([AllReduceGradients()])
    made.with_train_generator([(x[mine], y[mine])] * 3).run(1)
    return outcome(made, [])


def test_all_reduce_gradients_alone_weighs_by_the_samples_of_each_rank() -> None:
    one = trial([]).with_train_generator([data(6).tensors] * 3)
    one.run(1)
    for result in by_rank(gradients_alone):
        assert_equal(result["parameters"], outcome(one, [])["parameters"], relative=1e-10)


@case
def metrics_alone() -> Any:
    x, y = data(12).tensors
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    made = trial([ReduceMetrics()], metrics=["acc", "loss"]).with_val_generator([(x[mine], y[mine])])
    return made.evaluate()


def test_reduce_metrics_alone() -> None:
    expected = trial([], metrics=["acc", "loss"]).with_val_generator([data(12).tensors]).evaluate()
    for result in by_rank(metrics_alone):
        assert_equal(result, expected, relative=1e-12)


@case
def shards_alone() -> Any:
    made = trial([ShardData()], metrics=[])
    made.with_train_generator(DataLoader(data(7), 4))
    return shares_and_rows(made)[0]


def test_shard_data_alone() -> None:
    assert by_rank(shards_alone) == [[(2, 4), (1, 3)], [(1, 4), (1, 3)], [(1, 4), (1, 3)]]


# --- metrics of the user's own ---------------------------------------------------------------------------


class Counter(Metric):  # type: ignore[misc]
    """Not built from decorators: the number of samples it saw."""

    def reset(self, state: Any) -> None:
        self.count = 0

    def process(self, *args: Any) -> None:
        self.count += len(args[0][torchbearer.Y_TRUE])

    def process_final(self, *args: Any) -> dict[str, int]:
        return {"count": self.count}


@case
def own_metric() -> Any:
    made = trial([DDPCallback()], metrics=[Counter("count")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = made.with_train_generator(DataLoader(data(10), 5)).run(1)
    return history[0]["count"], [str(warning.message) for warning in caught]


def test_a_metric_that_cannot_be_merged_is_averaged_and_named() -> None:
    # Ranks 0, 1 and 2 have 4, 4 and 2 of the ten samples.
    for value, messages in by_rank(own_metric):
        assert value == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
        assert any("The metric count" in message and "weighted by samples" in message for message in messages)


# --- without ranks ---------------------------------------------------------------------------------------


def test_flatten_keeps_the_batch_dimension() -> None:
    flatten = Flatten()
    state = {torchbearer.X: torch.zeros(5, 1, 28, 28)}
    flatten.on_sample(state)
    assert state[torchbearer.X].shape == (5, 784)
    state = {torchbearer.X: [torch.zeros(3, 2, 2), (torch.zeros(3), None)]}
    flatten.on_sample_validation(state)
    assert state[torchbearer.X][0].shape == (3, 4)
    assert state[torchbearer.X][1][0].shape == (3,)


def test_flatten_acts_in_training_validation_and_prediction() -> None:
    x, y = torch.randn(6, 2, 3), torch.arange(6)
    model = nn.Linear(6, CLASSES)
    made = Trial(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), callbacks=[Flatten()], verbose=0
    )
    made.with_generators(DataLoader(TensorDataset(x, y), 2), DataLoader(TensorDataset(x, y), 2)).run(1)
    predictions = made.with_test_generator(DataLoader(TensorDataset(x), 4)).predict()
    torch.testing.assert_close(predictions, model(x.flatten(1)).detach())


def test_the_bundle_is_a_list_of_public_callbacks() -> None:
    import ddp_callbacks.torchbearer as public

    names = [type(callback).__name__ for callback in DDPCallback()]
    assert names == [
        "ReportFailures",
        "BroadcastParameters",
        "ShardData",
        "MergeBuffers",
        "AllReduceGradients",
        "ReduceMetrics",
        "GatherPredictions",
        "CompareReplicas",
        "RankZeroOutput",
        "AgreeToStop",
    ]
    assert set(names) <= set(public.__all__)


def test_the_version_stands_in_one_place() -> None:
    from importlib.metadata import version

    assert version("ddp_callbacks") == __version__
