"""Trials for the ways (see ways.py): each is a user's script, to which callbacks may be added.

``scenario(extra)`` builds everything from fixed seeds and returns what must not depend on the way: nested numbers and
tensors. For each Trial that it makes, ``extra(**options of DDPCallback)`` gives new callbacks, which stand
in front of its own. ``SCENARIOS[name](Extra())`` is the script without the library, ``SCENARIOS[name](Extra(Way()))``
with ``DDPCallback``.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torchbearer
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchbearer import Callback, Trial
from torchbearer.callbacks import (
    CosineAnnealingLR,
    CSVLogger,
    EarlyStopping,
    GradientClipping,
    GradientNormClipping,
    L1WeightDecay,
    L2WeightDecay,
    MostRecent,
    StepLR,
)
from torchbearer.callbacks.torch_scheduler import TorchScheduler
from torchbearer.metrics import EpochLambda, MetricList, lambda_metric, mean, running_mean, std, to_dict, var
from ways import Way

from ddp_callbacks import DiLoCo, LocalSGD, get_rank, get_world_size
from ddp_callbacks.torchbearer import DDPCallback, Resume

SCENARIOS: dict[str, Scenario] = {}
EXACT: list[str] = []  # SGD without momentum, or the same steps on every rank: local windows of one step are exact
APART: dict[str, Scenario] = {}  # depend on the number of ranks
ROUNDED = ["epochs_added_later", "a_run_behind_evaluations"]  # cut in the second run: one unit in the last place
NOT_MOVED = ["per_process"]  # refused in the middle of a pass, see test_resume_torchbearer.py
FEATURES, CLASSES = 6, 10
DEVICE = "cpu"  # tests/cuda sets another


class Extra:
    """Makes the callbacks that a way adds to each Trial of a scenario; without a way, those that only count moments.

    Args:
        way: See :class:`ways.Way`.
        folder: Of the files that outlive a cut: each Trial's own, and those that the scenario wants.
        cut: The moment at which the last rank asks to stop, counted over all Trials.
        resumes: Add ``Resume``.

    Attributes:
        moments: How many there were: each batch of training and validation, and each end of an epoch.
    """

    def __init__(self, way: Way | None = None, folder: str = "", cut: int | None = None, resumes: bool = False) -> None:
        self.way, self.folder, self.cut, self.resumes = way, folder, cut, resumes
        self.moments = self.trials = 0

    def __call__(self, **options: Any) -> list[Any]:
        self.trials += 1
        if self.way is None:
            return [Moments(self, lambda: None)]
        ours = DDPCallback(**dict(self.way.options) | options)
        if not self.resumes:
            return [ours, Moments(self, lambda: None)]
        resume = Resume(Path(self.folder, f"{self.trials}.pt"), **dict(self.way.resume))
        return [ours, resume, Moments(self, lambda: resume.preemption.request("the test"))]


Scenario = Callable[[Extra], Any]


class Moments(Callback):
    """Counts those at which a run can be cut, and asks to stop at one of them."""

    def __init__(self, extra: Extra, ask: Callable[[], None]) -> None:
        super().__init__()
        self.extra, self.ask = extra, ask
        self.trains = False  # evaluations are not resumed

    def on_start_training(self, state: Any) -> None:
        self.trains = True

    def on_step_training(self, state: Any) -> None:
        self._count()

    def on_step_validation(self, state: Any) -> None:
        self._count()

    def on_checkpoint(self, state: Any) -> None:
        self._count()

    def on_end(self, state: Any) -> None:
        self.trains = False

    def _count(self) -> None:
        self.extra.moments += self.trains
        if self.trains and self.extra.moments == self.extra.cut and get_rank() == get_world_size() - 1:
            self.ask()


def names(way: Way) -> list[str]:
    """The scenarios that this way applies to."""
    if dict(way.options).get("sync") == LocalSGD(1):
        return EXACT
    left_out = NOT_MOVED if way.resumed_on not in (0, way.size) else []
    return [name for name in (*SCENARIOS, *APART) if name not in left_out]


def run(name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
    """See :class:`ways.Table`."""
    # What is random in the workers of a loader is drawn in another way where a run can be resumed.
    extra = Extra(way, folder, cut, resumes=way is not None and (way.resumed_on != 0 or name in APART))
    return (SCENARIOS | APART)[name](extra), extra.moments


def joined(first: Any, second: Any) -> Any:
    return second


def fail() -> None:
    """A Trial that raises on all ranks in the middle of an epoch; see :class:`ways.Table`."""

    @torchbearer.callbacks.on_backward
    def raise_it(state: Any) -> None:
        if state[torchbearer.BATCH] == 1:
            raise KeyError("on all ranks")

    with contextlib.suppress(KeyError):
        train(trial([DDPCallback()], callbacks=[raise_it]), DataLoader(data(20), 6))


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def exact(function: Scenario) -> Scenario:
    EXACT.append(function.__name__)
    return scenario(function)


def apart(function: Scenario) -> Scenario:
    APART[function.__name__] = function
    return function


def data(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    # All classes occur in every 10 samples, so that ROC AUC is defined.
    y = (torch.arange(samples) * 7) % CLASSES
    return TensorDataset(x, y)


def network(seed: int = 1, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def trial(
    extra: list[Any],
    model: nn.Module | None = None,
    optimizer: Any = None,
    criterion: Any = None,
    metrics: Any = ("acc", "loss"),
    callbacks: Any = (),
) -> Trial:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters())
    made = Trial(
        model,
        optimizer,
        nn.CrossEntropyLoss() if criterion is None else criterion,
        metrics=list(metrics),
        callbacks=[*extra, *callbacks],
        verbose=0,
    ).to(DEVICE, torch.float64)
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    return made


def outcome(made: Trial, history: Any, **more: Any) -> dict[str, Any]:
    """What must be equal: the history, the parameters, the next random numbers."""
    return {"history": [dict(epoch) for epoch in history], "parameters": parameters(made), "draws": draws(), **more}


def parameters(made: Trial) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in made.state[torchbearer.MODEL].state_dict().items()}


def draws() -> list[float]:
    return [float(torch.rand(())), random.random()]


def train(made: Trial, batches: Any, validation: Any = None, epochs: int = 2, **steps: Any) -> dict[str, Any]:
    made.with_generators(batches, validation, **steps)
    return outcome(made, made.run(epochs))


@scenario
def shuffled_ragged_adam(extra: Extra) -> Any:
    made = trial(extra(), optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    return train(made, DataLoader(data(50), 16, shuffle=True), DataLoader(data(23, 9), 10))


@scenario
def unshuffled_drop_last_momentum(extra: Extra) -> Any:
    made = trial(extra(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    return train(made, DataLoader(data(50), 16, drop_last=True), DataLoader(data(20, 9), 7, shuffle=True))


@exact
def batches_smaller_than_the_world(extra: Extra) -> Any:
    small = train(trial(extra()), DataLoader(data(7), 2, shuffle=True), DataLoader(data(5, 9), 3))
    return [small, train(trial(extra()), DataLoader(data(5), 1, shuffle=True))]


class LazySampler(Sampler[int]):
    """Draws from Python's and torch's global generators as it goes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield (random.randrange(self.size) + int(torch.randint(0, 3, ()))) % self.size

    def __len__(self) -> int:
        return self.size


class GrowingBatches(Sampler[list[int]]):
    """A custom batch sampler with a generator of its own: batches of 1, 2, 3, ... indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        for length in range(1, 6):
            yield [self.random.randrange(self.size) for _ in range(length)]

    def __len__(self) -> int:
        return 5


@exact
def samplers(extra: Extra) -> Any:
    own = torch.Generator().manual_seed(11)
    loaders = {
        "lazy": DataLoader(data(30), 8, sampler=LazySampler(30)),
        "growing": DataLoader(data(30), batch_sampler=GrowingBatches(30)),
        "weighted": DataLoader(data(40), 8, sampler=WeightedRandomSampler(torch.arange(1.0, 41.0).tolist(), 33)),
        "own generator": DataLoader(data(30), 8, shuffle=True, generator=own),
    }
    return {name: train(trial(extra()), loader) for name, loader in loaders.items()}


class Stream(IterableDataset[Any]):
    """Shuffles itself with Python's global generator."""

    def __init__(self, samples: int) -> None:
        self.rows = list(zip(*data(samples).tensors, strict=True))

    def __iter__(self) -> Iterator[Any]:
        rows = list(self.rows)
        random.shuffle(rows)
        yield from rows

    def __len__(self) -> int:
        return len(self.rows)


@exact
def iterable_dataset(extra: Extra) -> Any:
    first = train(trial(extra()), DataLoader(Stream(30), 8), DataLoader(Stream(13), 4))
    workers = train(trial(extra()), DataLoader(Stream(30), 8, num_workers=1))
    return [first, workers]


@exact
def batches_that_are_made_already(extra: Extra) -> Any:
    batches: Any = list(DataLoader(data(30), 7))
    listed = train(trial(extra()), batches, list(DataLoader(data(11, 9), 4)))
    return [listed, train(trial(extra()), DataLoader(batches, batch_size=None, shuffle=True))]


@exact
def custom_loader(extra: Extra) -> Any:
    def reading(state: Any) -> None:
        x, y = next(state[torchbearer.ITERATOR])
        state[torchbearer.X], state[torchbearer.Y_TRUE] = 2 * x, y

    def making(state: Any) -> None:
        state[torchbearer.X] = torch.randn(9, FEATURES, dtype=torch.float64)
        state[torchbearer.Y_TRUE] = torch.randint(0, CLASSES, (9,))

    reads = trial(extra()).with_loader(reading)
    first = train(reads, DataLoader(data(30), 8, shuffle=True))
    makes = trial(extra()).with_loader(making).for_train_steps(5)
    return [first, outcome(makes, makes.run(2))]


class Rosenbrock(nn.Module):
    """Makes its own data: noise around a point."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor([-1.0, 2.0], dtype=torch.float64))

    def forward(self, _: Any) -> torch.Tensor:
        x, y = self.point + 0.01 * torch.randn(2, dtype=torch.float64)
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2


@exact
def no_data(extra: Extra) -> Any:
    made = trial(
        extra(),
        model=Rosenbrock(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        criterion=lambda prediction, _: prediction,
        metrics=["loss"],
    ).for_train_steps(7)
    return outcome(made, made.run(3))


@exact
def workers(extra: Extra) -> Any:
    loader = DataLoader(data(30), 8, shuffle=True, num_workers=2)
    return train(trial(extra()), loader, DataLoader(data(13, 9), 4, num_workers=2))


@exact
def workers_that_wait_for_another_trial(extra: Extra) -> Any:
    """The second Trial draws no seed for them."""
    loader = DataLoader(data(30), 8, shuffle=True, num_workers=1, persistent_workers=True)
    return [train(trial(extra()), loader) for _ in range(2)]


@exact
def train_steps_below_and_above_an_epoch(extra: Extra) -> Any:
    def loader() -> DataLoader[Any]:
        return DataLoader(data(30), 8, shuffle=True)

    more = train(trial(extra()), loader(), train_steps=9)
    return [more, train(trial(extra()), loader(), loader(), train_steps=3, val_steps=2)]


@scenario
def endless_loaders(extra: Extra) -> Any:
    """A pass begins where the last one has ended."""
    validation = DataLoader(data(13, 9), 5, shuffle=True)
    results = []
    for refreshes in (True, False):
        loader: Any = DataLoader(data(30), 6, shuffle=True)
        loader.inf = not refreshes
        made = trial(extra()).with_inf_train_loader()
        results.append(train(made, loader, validation, train_steps=3))
    return results


@scenario
def an_endless_loader_of_two_trials(extra: Extra) -> Any:
    loader: Any = DataLoader(data(30), 6, shuffle=True)
    return [train(trial(extra()).with_inf_train_loader(), loader, train_steps=3) for _ in range(2)]


@scenario
def a_validation_alone(extra: Extra) -> Any:
    return train(trial(extra(), metrics=[]), None, DataLoader(data(13, 9), 5, shuffle=True))


@scenario
def ours_behind_the_others_and_verifying(extra: Extra) -> Any:
    ours = sorted(extra(verify="first_batch"), key=lambda callback: isinstance(callback, DDPCallback))
    return train(trial(ours), DataLoader(data(30), 6, shuffle=True), DataLoader(data(13, 9), 5))


class SumsLosses(Callback):
    """It stops in the fourth epoch, once a loss is small."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_step_training(self, state: Any) -> None:
        self.total += state[torchbearer.LOSS].item()
        state[torchbearer.STOP_TRAINING] |= bool(state[torchbearer.LOSS] < 1.0) and state[torchbearer.EPOCH] == 3

    def on_end_epoch(self, state: Any) -> None:
        state[torchbearer.METRICS]["summed"] = self.total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        self.total = state_dict["total"]
        return self


@scenario
def callbacks_that_read_losses(extra: Extra) -> Any:
    rows = DataLoader(data(29), 8, shuffle=True)
    summed = trial(extra(), criterion=nn.CrossEntropyLoss(reduction="sum"), callbacks=[SumsLosses()])
    return [train(trial(extra(), callbacks=[SumsLosses()]), rows, epochs=6), train(summed, rows)]


class MovesATeacher(nn.Module):
    """In each forward of training, as its buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.teacher = network(), network(2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                    slow.mul_(0.8).add_(fast, alpha=0.2)
        return self.layers(x) + min(1.0, int(self.calls) / 9) * self.teacher(x)


@scenario
def a_model_that_moves_a_teacher(extra: Extra) -> Any:
    return train(trial(extra(), MovesATeacher()), DataLoader(data(30), 8), DataLoader(data(13, 9), 5))


@scenario
def epochs_added_later(extra: Extra) -> Any:
    made = trial(extra())
    made.with_generators(DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4)).run(1)
    return outcome(made, made.run(3))


@exact
def schedulers(extra: Extra) -> Any:
    on_plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.2)
    plateau = TorchScheduler(on_plateau, monitor="val_loss")
    results = []
    for callback in (StepLR(3, 0.5, step_on_batch=True), CosineAnnealingLR(4), plateau):
        made = trial(extra(), metrics=["acc", "loss", "lr"], callbacks=[callback])
        with warnings.catch_warnings():  # where a run goes on behind the last step of an epoch
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            results.append(train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4)))
    return results


@scenario
def clipping_and_decay(extra: Extra) -> Any:
    callbacks = (GradientClipping(0.01), GradientNormClipping(0.05), L1WeightDecay(0.1))
    return [train(trial(extra(), callbacks=[each]), DataLoader(data(30), 8, shuffle=True)) for each in callbacks]


@exact
def early_stopping(extra: Extra) -> Any:
    made = trial(
        extra(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.9),
        callbacks=[EarlyStopping(monitor="val_loss", patience=2, min_delta=0.01)],
    )
    result = train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4), epochs=30)
    return result | {"epochs": len(result["history"])}


@exact
def stop_in_the_middle_of_an_epoch(extra: Extra) -> Any:
    @torchbearer.callbacks.on_step_training
    def stop(state: Any) -> None:
        # Only the first rank decides; all must follow at the same step.
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 1 and get_rank() == 0:
            state[torchbearer.STOP_TRAINING] = True

    return train(trial(extra(), callbacks=[stop]), DataLoader(data(30), 8, shuffle=True))


@exact
def metrics(extra: Extra) -> Any:
    @mean
    @std
    @var
    @lambda_metric("margin")
    def margin(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return prediction.gather(1, target.view(-1, 1)).squeeze(1)

    @std
    @mean
    @lambda_metric("batch_error")
    def batch_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction.argmax(1) != target).double().mean()

    @to_dict
    @lambda_metric("order", on_epoch=True)
    def order(prediction: torch.Tensor, target: torch.Tensor) -> float:
        return float((prediction[:, 0] * torch.arange(len(target))).sum())

    made = trial(extra(), metrics=["acc", "loss", "top_5_acc", "roc_auc", "epoch", "lr", margin, batch_error, order])
    # Unshuffled, so that the first batch, of which one process shows the running ROC AUC, has all classes.
    return train(made, DataLoader(data(43), 11), DataLoader(data(21, 9), 9, shuffle=True))


class Tagger(nn.Module):
    """Its predictions have three rows for each sample; the targets have one."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(outputs=3 * CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).view(-1, CLASSES)


def tagging_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(prediction, target.repeat_interleave(3))


@exact
def predictions_and_targets_with_rows_of_their_own(extra: Extra) -> Any:
    @to_dict
    @lambda_metric("tagged", on_epoch=True)
    def tagged(prediction: torch.Tensor, target: torch.Tensor) -> float:
        return float(prediction[torch.arange(len(prediction)), target.repeat_interleave(3)].square().mean())

    made = trial(extra(), Tagger(), criterion=tagging_loss, metrics=["loss", tagged])
    return train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4))


class AddsMetric(Callback):
    """As ``PyCM`` does for a confusion matrix."""

    def on_start_training(self, state: Any) -> None:
        found = to_dict(EpochLambda("in_order", in_order, running=False))
        if not state[torchbearer.MODEL].training:
            found.eval(data_key=state[torchbearer.DATA])
        found.reset(state)
        state[torchbearer.METRIC_LIST] = MetricList([state[torchbearer.METRIC_LIST], found])

    on_start_validation = on_start_training


@exact
def metrics_that_a_callback_adds(extra: Extra) -> Any:
    made = trial(extra(), callbacks=[AddsMetric()])
    return train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4))


@exact
def regression(extra: Extra) -> Any:
    x, y = data(30).tensors
    made = trial(extra(), model=network(outputs=1), criterion=nn.MSELoss(), metrics=["mse", "loss", "acc"])
    return train(made, DataLoader(TensorDataset(x, y.double().view(-1, 1) / 10), 8, shuffle=True))


def ignored(rows: TensorDataset) -> TensorDataset:
    """Some targets are; of a batch of 8 four ranks' parts are without a target, but one."""
    x, y = rows.tensors
    y = y.clone()
    y[::4] = -100
    y[8:12] = -100
    return TensorDataset(x, y)


@exact
def weighted_and_ignored_targets(extra: Extra) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64))
    first = train(trial(extra(), criterion=criterion), DataLoader(ignored(data(30)), 8), DataLoader(data(13, 9), 4))
    return [first, train(trial(extra(), metrics=["loss"]), DataLoader(ignored(data(30)), 8))]


def own_mean(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Over the targets that are not ignored, written by hand: over none it is 0 / 0."""
    counts = target != -100
    losses = nn.functional.cross_entropy(prediction, target, reduction="none")
    return (losses * counts).sum() / counts.sum()


def counted(state: Any) -> torch.Tensor:
    return (state[torchbearer.Y_TRUE] != -100).sum()


@scenario
def means_over_what_counts(extra: Extra) -> Any:
    """In training, validation and evaluation; the validation loss decides when to stop."""
    stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=0.02)
    made = trial(extra(weight=counted), criterion=own_mean, metrics=["loss"], callbacks=[stop])
    result = train(made, DataLoader(ignored(data(30)), 8), DataLoader(ignored(data(23, 9)), 6), epochs=8)
    made.with_test_generator(DataLoader(ignored(data(22, 3)), 5))
    return result | {"evaluation": made.evaluate(data_key=torchbearer.TEST_DATA)}


SMALL_STEPS = functools.partial(torch.optim.SGD, lr=0.01)


def two_losses(state: Any) -> None:
    """A closure with a backward for each."""
    state[torchbearer.OPTIMIZER].zero_grad()
    for factor in (1.0, -0.5):
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X] * factor)
        state[torchbearer.LOSS] = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        state[torchbearer.LOSS].backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)


@scenario
def two_losses_with_a_backward_each(extra: Extra) -> Any:
    """By a closure of the user's own; the losses are means, or sums."""

    def trained(criterion: Any) -> Any:
        made = trial(extra(), criterion=criterion, optimizer=SMALL_STEPS).with_closure(two_losses)
        return train(made, DataLoader(data(30), 8, shuffle=True))

    return [trained(nn.CrossEntropyLoss()), trained(nn.CrossEntropyLoss(reduction="sum"))]


def without_events(state: Any) -> None:
    """A closure."""
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.LOSS] = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
    state[torchbearer.LOSS].backward()


@exact
def a_closure_without_events(extra: Extra) -> Any:
    """The last batch is smaller, and unevenly divided."""
    return train(trial(extra()).with_closure(without_events), DataLoader(data(31), 7, shuffle=True))


@scenario
def a_sum_in_a_closure_without_events(extra: Extra) -> Any:
    made = trial(extra(), criterion=nn.CrossEntropyLoss(reduction="sum"), optimizer=SMALL_STEPS)
    return train(made.with_closure(without_events), DataLoader(data(31), 7, shuffle=True))


FIRST, SECOND = torchbearer.state_key("first"), torchbearer.state_key("second")


@scenario
def a_closure_with_losses_under_keys_of_its_own(extra: Extra) -> Any:
    """As for two networks that compete: Torchbearer has no loss."""

    def closure(state: Any) -> None:
        state[torchbearer.OPTIMIZER].zero_grad()
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        state[FIRST] = nn.functional.cross_entropy(state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
        state[SECOND] = state[torchbearer.Y_PRED].abs().mean()
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        for key in (FIRST, SECOND):
            state[key].backward(retain_graph=True)
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    made = trial(extra(), criterion=None, metrics=[mean(FIRST), mean(SECOND)]).with_closure(closure)
    return train(made, DataLoader(data(31), 7, shuffle=True))


class EveryThird(torch.optim.Adam):
    """Takes a step in every third call, from the gradients of three backwards."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        closure()
        group["calls"] = group.get("calls", 0) + 1
        if group["calls"] % 3 == 0:
            super().step()
            self.zero_grad()


@scenario
def a_closure_that_accumulates(extra: Extra) -> Any:
    def accumulate(state: Any) -> None:
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        state[torchbearer.CALLBACK_LIST].on_forward(state)
        state[torchbearer.LOSS] = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        (state[torchbearer.LOSS] / 3).backward()
        state[torchbearer.CALLBACK_LIST].on_backward(state)

    made = trial(extra(), optimizer=lambda p: EveryThird(p, lr=0.05)).with_closure(accumulate)
    return train(made, DataLoader(data(31), 4, shuffle=True))


@scenario
def sum_reduction(extra: Extra) -> Any:
    made = trial(extra(), criterion=nn.CrossEntropyLoss(reduction="sum"), optimizer=SMALL_STEPS)
    return train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4))


def decayed_logits(state: Any) -> torch.Tensor:
    """A sum over the samples."""
    return 0.01 * state[torchbearer.Y_PRED].square().sum()


@scenario
def terms_that_callbacks_add_to_a_sum(extra: Extra) -> Any:
    """Of parameters, before and behind ours, and of samples."""
    results = []
    for sign in (1, -1):
        model = network()
        decay = L2WeightDecay(0.1, params=list(model.parameters()))
        callbacks = [*extra(), decay, torchbearer.callbacks.add_to_loss(decayed_logits)][::sign]
        made = trial(callbacks, model, SMALL_STEPS, nn.CrossEntropyLoss(reduction="sum"))
        results.append(train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4)))
    return results


@scenario
def a_term_of_parameters_in_batches_smaller_than_the_world(extra: Extra) -> Any:
    model = network()
    decay = L2WeightDecay(0.1, params=list(model.parameters()))
    made = trial(extra(), model, SMALL_STEPS, nn.CrossEntropyLoss(reduction="sum"), callbacks=[decay])
    return train(made, DataLoader(data(7), 2, shuffle=True))


@scenario
def kept_gradients(extra: Extra) -> Any:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    made = trial(extra(), optimizer=lambda p: Keeping(p, lr=0.1, momentum=0.5))
    return train(made, DataLoader(data(30), 8, shuffle=True))


@exact
def evaluate_and_predict(extra: Extra) -> Any:
    made = trial(extra(), metrics=["acc", "loss", "roc_auc"])
    result = train(made, DataLoader(data(30), 11), DataLoader(data(23, 9), 10, shuffle=True))
    x, _ = data(25, 4).tensors
    return result | {
        "predictions": made.with_test_generator(DataLoader(TensorDataset(x), 7)).predict(),
        "evaluation": made.evaluate(),
        "on training data": made.evaluate(data_key=torchbearer.TRAIN_DATA),
        "small": made.with_test_generator(DataLoader(TensorDataset(x[:2]), 7)).predict(),
    }


@scenario
def a_run_behind_evaluations(extra: Extra) -> Any:
    made = trial(extra())
    made.with_generators(DataLoader(data(30), 11), DataLoader(data(23, 9), 10)).run(2)
    made.evaluate()
    made.with_test_generator(DataLoader(TensorDataset(*data(25, 4).tensors[:1]), 7)).predict()
    return outcome(made, made.run(4))


def normalized(**options: Any) -> nn.Module:
    """A model with two BatchNorm layers."""
    layers: Any = network()
    first, second = nn.BatchNorm1d(FEATURES, **options), nn.BatchNorm1d(8, momentum=None, **options)
    return nn.Sequential(first, *layers[:2], second, layers[2]).double()


@scenario
def synchronized_batch_norm(extra: Extra) -> Any:
    """Ragged batches, some smaller than the world, in training and in evaluations."""
    results = []
    for samples, batch_size, options in ((29, 8, {}), (11, 4, {}), (11, 4, {"track_running_stats": False})):
        clip = GradientNormClipping(0.5)
        made = trial(extra(sync_batchnorm=True), model=normalized(**options), callbacks=[clip])
        results.append(train(made, DataLoader(data(samples), batch_size, shuffle=True), DataLoader(data(13, 9), 5)))
        made.with_test_generator(DataLoader(TensorDataset(data(11, 4).tensors[0]), 3))
        results.append({"predictions": made.predict(), "evaluation": made.evaluate()})
    return results


@scenario
def synchronized_batch_norm_with_weighted_targets(extra: Extra) -> Any:
    """Some ranks hold only targets that are ignored; the statistics, on which the others' loss depends, are theirs too.

    The last criterion is a mean over nothing there: its gradient is 0 / 0.
    """

    def weighed(criterion: Any, weight: Any = None) -> Any:
        made = trial(extra(sync_batchnorm=True, weight=weight), normalized(), SMALL_STEPS, criterion)
        return train(made, DataLoader(ignored(data(30)), 8))

    return {
        "weighted": weighed(nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64))),
        "sum": weighed(nn.CrossEntropyLoss(reduction="sum")),
        "own": weighed(own_mean, counted),
    }


@scenario
def several_trials_in_one_process(extra: Extra) -> Any:
    def fold(seed: int) -> Any:
        loaders = DataLoader(data(20, seed), 6, shuffle=True), DataLoader(data(9, seed), 4)
        return train(trial(extra(), model=network(seed)), *loaders)

    return [fold(seed) for seed in range(3)]


class Uncertainty(nn.Module):
    """Weighs two losses by learned variances, and counts its calls in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("steps", torch.tensor(0.0, dtype=torch.float64), persistent=False)

    def forward(self: Any, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.steps += torch.is_grad_enabled()
        losses = torch.stack([nn.functional.cross_entropy(scores, target), scores.square().mean() * self.steps.sqrt()])
        return (self.log_var.neg().exp() * losses + self.log_var).sum()


@scenario
def a_criterion_that_is_trained(extra: Extra) -> Any:
    criterion = Uncertainty()
    made = trial(extra(), None, lambda own: torch.optim.Adam([*own, *criterion.parameters()], 0.05), criterion)
    result = train(made, DataLoader(data(29), 8, shuffle=True), DataLoader(data(13, 9), 4))
    return result, criterion.log_var.detach().clone()


CRITIC, ITS_OPTIMIZER = torchbearer.state_key("critic"), torchbearer.state_key("critic_optimizer")


@scenario
def a_second_model_in_the_state(extra: Extra) -> Any:
    """As a discriminator is, beside a criterion that is trained."""

    def closure(state: Any) -> None:
        base(state)
        state[ITS_OPTIMIZER].zero_grad()
        state[CRITIC](state[torchbearer.Y_PRED].detach()).square().mean().backward()
        state[ITS_OPTIMIZER].step()

    base = torchbearer.bases.base_closure(
        *(torchbearer.X, torchbearer.MODEL, torchbearer.Y_PRED, torchbearer.Y_TRUE),
        *(torchbearer.CRITERION, torchbearer.LOSS, torchbearer.OPTIMIZER),
    )
    torch.manual_seed(3)
    criterion, critic = Uncertainty(), nn.Linear(CLASSES, 1).double()
    made = trial(
        extra(), None, lambda own: torch.optim.SGD([*own, *criterion.parameters()], 0.1, momentum=0.9), criterion
    )
    made.state[CRITIC], made.state[ITS_OPTIMIZER] = critic, torch.optim.Adam(critic.parameters(), 0.01)
    result = train(made.with_closure(closure), DataLoader(data(19), 4), DataLoader(data(13, 9), 5))
    return result, criterion.log_var.detach().clone(), critic.weight.detach().clone()


@scenario
def a_parameter_that_only_the_optimizer_has(extra: Extra) -> Any:
    scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def criterion(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores * scale, target)

    made = trial(extra(), None, lambda own: torch.optim.Adam([*own, scale], 0.05), criterion)
    return train(made, DataLoader(data(29), 8, shuffle=True)), scale.detach().clone()


class EvaluatesBetweenEpochs(Callback):
    """On other data than the run's validation."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy = False  # the evaluation has an event of this name, too
        self.results: list[dict[str, Any]] = []

    def on_end_epoch(self, state: Any) -> None:
        if not self.is_busy:
            self.is_busy = True
            self.results.append(state[torchbearer.SELF].evaluate(data_key=torchbearer.TEST_DATA))
            self.is_busy = False

    def state_dict(self) -> dict[str, Any]:
        return {"results": self.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        self.results = list(state_dict["results"])
        return self


@scenario
def evaluated_between_epochs(extra: Extra) -> Any:
    evaluates = EvaluatesBetweenEpochs()
    made = trial(extra(), callbacks=[evaluates]).with_test_generator(DataLoader(data(17, 5), 6))
    return train(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4)), evaluates.results


@scenario
def a_batch_too_short_for_batchnorm_on_all(extra: Extra) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
    return [
        train(trial(extra(), model=model), DataLoader(data(samples), 8), DataLoader(data(5), 4)) for samples in (2, 3)
    ]


@scenario
def files_of_callbacks(extra: Extra) -> Any:
    """They go on behind a cut."""
    log, kept = (str(Path(extra.folder, name)) for name in ("log.csv", "model.pt"))
    files = [CSVLogger(log, batch_granularity=False), MostRecent(kept)]
    made = trial(extra(), callbacks=files)
    result = train(made, DataLoader(Stream(27), 8), DataLoader(Stream(10), 4))
    saved = torch.load(kept, weights_only=False)[torchbearer.MODEL]
    return result | {"log": rows_of(log), "kept": {name: value.cpu() for name, value in saved.items()}}


def rows_of(path: str) -> list[list[float]]:
    with Path(path).open(newline="") as file:
        found = list(csv.DictReader(file))
    return [list(map(float, row.values())) for row in found]


@scenario
def resumed(extra: Extra) -> Any:
    def make() -> Trial:
        stop = EarlyStopping(monitor="val_loss", patience=40)
        made = trial(extra(), optimizer=lambda p: torch.optim.Adam(p, lr=0.05), callbacks=[stop])
        return made.with_generators(DataLoader(data(30), 8), DataLoader(data(13, 9), 4))

    first, second, file = make(), make(), io.BytesIO()
    first.run(2)
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=False))
    return outcome(second, second.run(4))


# --- numbers that depend on the number of ranks -----------------------------------------------------------------------


def own_metrics() -> list[Any]:
    """New ones for each run: a running mean keeps its values."""

    @running_mean
    @std
    @mean
    @lambda_metric("square")
    def square(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = nn.functional.one_hot(target, CLASSES).to(prediction.dtype)
        return (prediction.softmax(1) - wanted).square().sum(1)

    return [square, to_dict(EpochLambda("in_order", in_order, running=True, step_size=2))]


def in_order(prediction: torch.Tensor, target: torch.Tensor) -> float:
    """Depends on the order of an epoch's samples."""
    places = torch.arange(1, len(target) + 1, dtype=prediction.dtype)
    return float((prediction[:, 0] * places).sum() + (target * places).sum())


@scenario
def dropout_and_running_metrics(extra: Extra) -> Any:
    model = nn.Sequential(network(), nn.Dropout(0.3), nn.Linear(CLASSES, CLASSES).double())
    made = trial(extra(), model=model, metrics=["acc", "loss", *own_metrics()])
    made.with_generators(DataLoader(data(45), 10, shuffle=True), DataLoader(data(17, 9), 5, shuffle=True))
    history = made.run(3)
    return outcome(made, history, all_of_it=[dict(epoch) for epoch in history])


class Drawing(nn.Module):
    """Draws in all its layers, in training and in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 8, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, bias=False, batch_first=True)
        self.out = nn.Sequential(nn.Dropout(0.4), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.recurrent(x.view(len(x), -1, 3))[0]
        h = h + self.attention(h, h, h)[0] * (torch.rand(len(h), 1, 1, dtype=h.dtype) > 0.2)
        return self.out((h + 0.1 * torch.randn_like(h)).mean(1))


@scenario
def layers_that_draw(extra: Extra) -> Any:
    torch.manual_seed(1)
    made = trial(extra(), model=Drawing().double())
    return train(made, DataLoader(data(44), 12, shuffle=True), DataLoader(data(17, 9), 12))


class Augmented(TensorDataset):
    """Adds noise that it draws while it loads."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.2 * torch.randn_like(x), y


@apart
def augmentation_in_workers(extra: Extra) -> Any:
    loader = DataLoader(Augmented(*data(26).tensors), 8, shuffle=True, num_workers=1)
    return train(trial(extra()), loader, DataLoader(data(12, 9), 6))


@apart
def local_steps(extra: Extra) -> Any:
    def steps(sync: Any) -> Any:
        made = trial(extra(sync=sync), model=normalized(), optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
        return train(made, DataLoader(data(64), 8, shuffle=True), DataLoader(data(17, 9), 6))

    return [steps(LocalSGD(every=3)), steps(DiLoCo(every=3))]


@apart
def per_process(extra: Extra) -> Any:
    return train(trial(extra(batch_size="per_process")), DataLoader(data(30), 4), DataLoader(data(13, 9), 5))


@apart
def a_batch_that_is_skipped(extra: Extra) -> Any:
    """One process without the library would spoil its parameters."""

    @torchbearer.callbacks.on_sample
    def spoil(state: Any) -> None:
        if state[torchbearer.BATCH] == 2:
            state[torchbearer.X][:, 1] = torch.nan

    made = trial(extra(skip_batch="non_finite"), callbacks=[spoil])
    return train(made, DataLoader(data(30), 6, shuffle=True))


@apart
def gradients_that_are_compressed(extra: Extra) -> Any:
    """Between hosts, if there are any."""
    model = nn.Sequential(network(), nn.Linear(CLASSES, 64), nn.Linear(64, CLASSES)).double()
    made = trial(extra(compress="bf16"), model=model)
    return train(made, DataLoader(data(30), 6, shuffle=True))


import program_parts_trial  # noqa: E402, F401  (it adds scenarios)
