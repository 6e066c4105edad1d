"""Parts of programs with a Trial."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import program_parts
import program_parts_draws  # noqa: F401  (it adds its parts)
import torch
import torchbearer
import trials
from program_parts import CONTAINERS, Build, Change, add, calls_in, part
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback
from torchbearer.callbacks import (
    CosineAnnealingLR,
    EarlyStopping,
    GradientClipping,
    GradientNormClipping,
    L1WeightDecay,
    L2WeightDecay,
    StepLR,
)
from torchbearer.callbacks.torch_scheduler import TorchScheduler
from torchbearer.metrics import EpochLambda, lambda_metric, mean, std, to_dict, var
from trials import CLASSES, EveryThird, Extra

from ddp_callbacks.errors import PeerError

trial_part = functools.partial(part, "trial")


class TrialBuild(Build):
    """
    Attributes:
        wraps: Make a module around the model, or around the criterion.
        also_trained: Modules whose parameters the optimizer has, too.
        steps: Options of ``with_generators``.
        changes: What is done to a new Trial.
    """

    def __init__(self, seed: int, extra: Extra) -> None:
        super().__init__(seed, trials.data, extra.resumes and extra.cut is None)
        self.extra, self.model = extra, trials.network()
        self.criterion: Any = nn.CrossEntropyLoss()
        self.optimizer: Callable[[Any], Any] = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.also_trained: list[nn.Module] = []
        self.metrics: list[Any] = ["acc", "loss"]
        self.steps: dict[str, Any] = {}
        self.changes: list[Callable[[Any], Any]] = []

    def run(self) -> Any:
        self.trial = self.new_trial()
        return [call() for call in (*self.before, self.fit, *self.after)]

    def new_trial(self) -> Any:
        def optimizer(parameters: Any) -> Any:
            return self.optimizer([*parameters, *(q for each in self.also_trained for q in each.parameters())])

        callbacks = copy.deepcopy(self.callbacks)
        made = trials.trial(self.extra(**self.given), self.model, optimizer, self.criterion, self.metrics, callbacks)
        made.with_generators(self.train, self.validation, **self.steps)
        for change in self.changes:
            change(made)
        return made

    def fit(self) -> Any:
        history = self.trial.run(self.epochs)
        others = [each.state_dict() for each in self.also_trained]
        states = self.trial.state[torchbearer.OPTIMIZER].state_dict()["state"]
        return trials.outcome(self.trial, history, others=copy.deepcopy(others), optimizer=copy.deepcopy(states))

    def insert(self, layer: Callable[[], nn.Module], is_first: bool) -> None:
        made = layer().double()
        self.model = nn.Sequential(made, self.model) if is_first else nn.Sequential(self.model, made)

    def change_batches(self, change: Change) -> None:
        class Changes(Callback):
            def on_sample(self, state: Any) -> None:
                state[torchbearer.X] = change(state[torchbearer.X])

            on_sample_validation = on_sample

        self.callbacks.append(Changes())

    def change_predictions(self, change: Change) -> None:
        self.criterion = Changed(change, self.criterion)

    def change_gradients(self, change: Callable[[Any], None]) -> None:
        class Changes(Callback):
            def on_backward(self, state: Any) -> None:
                change(state[torchbearer.MODEL].parameters())

        self.callbacks.append(Changes())


class Changed(nn.Module):
    def __init__(self, change: Change, inner: Any) -> None:
        super().__init__()
        self.change, self.inner = change, inner

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> Any:
        return self.inner(self.change(prediction), target)


# --- state ------------------------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Counts its calls in training, and scales by them what it returns."""

    def __init__(self, inner: Any, container: str) -> None:
        super().__init__()
        self.inner, self.kept = inner, CONTAINERS[container]()

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        if self.training:
            add(self.kept)
        return self.inner(*args) * (1 + 0.05 * min(calls_in(self.kept), 9))


@trial_part(each=CONTAINERS)
def criterion_keeps_calls_in(p: TrialBuild, container: str) -> None:
    p.criterion = Keeps(p.criterion, container)


@trial_part()
def criterion_is_an_object(p: TrialBuild) -> None:
    class Annealed:
        def __init__(self, inner: Any) -> None:
            self.inner, self.calls = inner, 0

        def __call__(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(prediction, target) * (1 + 0.1 * min(self.calls, 9))

    p.criterion = Annealed(p.criterion)


class Buffered(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self: Any, *args: torch.Tensor) -> torch.Tensor:
        self.calls += self.training  # a prediction's batches are dealt out
        return self.inner(*args) * (1 + 0.05 * self.calls)


@trial_part()
def criterion_with_a_buffer(p: TrialBuild) -> None:
    p.criterion = Buffered(p.criterion)


@trial_part()
def model_with_a_buffer(p: TrialBuild) -> None:
    p.model = Buffered(p.model)


@trial_part(each=CONTAINERS)
def model_keeps_calls_in(p: TrialBuild, container: str) -> None:
    p.model = Keeps(p.model, container)


@trial_part()
def criterion_with_parameters(p: TrialBuild) -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

        def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.inner(prediction * self.scale, target)

    p.criterion = Scaled(p.criterion)
    p.also_trained.append(p.criterion)


@trial_part(each=("on_step_training", "on_forward"))
def teacher_moved_in(p: TrialBuild, event: str) -> None:
    student = p.model
    teacher = copy.deepcopy(student).requires_grad_(False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = student, teacher

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.student(x) + 0.5 * self.teacher(x)

        @torch.no_grad()
        def move(self) -> None:
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.8).add_(new, alpha=0.2)

    p.model = both = Both()
    p.callbacks.append(type("Moves", (Callback,), {event: lambda self, state: both.move()})())


@trial_part(without="rounded_in")  # which rounds the cache, too
def model_with_a_cache(p: TrialBuild) -> None:
    class Cached(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("mask", torch.ones(0, 1, dtype=torch.float64), persistent=False)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            if len(self.mask) < len(x):
                self.mask = torch.full((len(x), 1), 0.9, dtype=torch.float64)
            return self.inner(x * self.mask[: len(x)])

    p.model = Cached(p.model)


@trial_part(kind="batchnorm", without="validation_of_single_samples")
def batchnorm(p: TrialBuild) -> None:
    p.model = nn.Sequential(nn.BatchNorm1d(trials.FEATURES).double(), p.model)
    p.given["sync_batchnorm"] = True


# --- losses and metrics -----------------------------------------------------------------------------------------------


@trial_part(kind="loss", without="metric closure")
def sum_as_criterion(p: TrialBuild) -> None:
    p.criterion = nn.CrossEntropyLoss(reduction="sum")
    p.given["reduction"] = "sum"  # a module around the criterion does not say so
    p.optimizer = trials.SMALL_STEPS


@trial_part(kind="loss", without="rows train validation")
def weighed(p: TrialBuild) -> None:
    p.criterion, p.given["weight"] = trials.own_mean, trials.counted
    p.metrics = ["loss"]
    p.train, p.validation = (DataLoader(trials.ignored(p.data(size, size)), 8) for size in (30, 23))


@trial_part(kind="loss", without="rows train validation")
def weighed_classes(p: TrialBuild) -> None:
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    p.criterion = nn.CrossEntropyLoss(weight=weight)
    p.allowed.append("not that of one process.*give weight=")  # what wraps the criterion hides the class weights
    p.metrics = ["loss"]
    p.train, p.validation = DataLoader(trials.ignored(p.data(30)), 8), DataLoader(p.data(13, 9), 4)


@trial_part(each=("L1", "L2"))
def decays(p: TrialBuild, norm: str) -> None:
    class Decay(Callback):
        def on_criterion(self, state: Any) -> None:
            each = [q.abs().sum() if norm == "L1" else q.square().sum() for q in state[torchbearer.MODEL].parameters()]
            state[torchbearer.LOSS] = state[torchbearer.LOSS] + 0.01 * torch.stack(each).sum()

    p.callbacks.append(Decay())


@trial_part(each=("L1", "L2"))
def decays_by_torchbearer(p: TrialBuild, norm: str) -> None:
    kind = {"L1": L1WeightDecay, "L2": L2WeightDecay}[norm]
    p.callbacks.append(_Late(lambda state: kind(0.02, params=list(state[torchbearer.MODEL].parameters()))))


class _Late(Callback):
    """Makes a callback when the run has its model."""

    def __init__(self, make: Callable[[Any], Callback]) -> None:
        super().__init__()
        self.make = make

    def on_criterion(self, state: Any) -> None:
        self.make(state).on_criterion(state)

    def on_backward(self, state: Any) -> None:
        self.make(state).on_backward(state)


@lambda_metric("square")
def _square(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction.softmax(1) - F.one_hot(target.clamp(min=0), CLASSES)).square().sum(1)


@lambda_metric("error")
def _error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction.argmax(1) != target).double().mean()


def _in_order(prediction: torch.Tensor, target: torch.Tensor) -> float:
    places = torch.arange(1, len(target) + 1, dtype=prediction.dtype)
    return float((prediction[:, 0] * places).sum() + (target * places).sum())


METRICS: dict[str, Callable[[], Any]] = {
    "mean": lambda: mean(_square),
    "std": lambda: std(_square),
    "var": lambda: var(_square),
    "of_batches": lambda: std(mean(_error)),
    "epoch_lambda": lambda: to_dict(EpochLambda("in_order", _in_order, running=False)),
    "top_5_acc": lambda: "top_5_acc",
    "epoch": lambda: "epoch",
    "lr": lambda: "lr",
}


@trial_part(kind="metric", each=METRICS, without="weighed weighed_classes")
def metric(p: TrialBuild, name: str) -> None:
    p.metrics = [*p.metrics, METRICS[name]()]


@trial_part(kind="rows", without="train validation loss metric tested_and_predicted")
def predictions_with_more_rows_than_targets(p: TrialBuild) -> None:
    """A tagger: two words in a sentence."""

    def accuracy(prediction: torch.Tensor, target: torch.Tensor) -> float:
        return float((prediction[:, 0] * (target.reshape(-1) + 1)).mean())

    def criterion(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, target.reshape(-1))

    def data(samples: int, seed: int = 0) -> TensorDataset:
        x, y = trials.data(samples, seed).tensors
        return TensorDataset(x, torch.stack([y, (y + 3) % CLASSES], 1))

    class Words(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.inner(x), self.inner(-x)], 1).flatten(0, 1)

    p.allowed.append("It draws random numbers: draw those of the samples")  # in sizes of its own, for two words each
    p.model, p.criterion = Words(p.model), criterion
    p.train, p.validation = DataLoader(data(29), 8, shuffle=True), DataLoader(data(13, 9), 5)
    p.metrics = ["loss", to_dict(EpochLambda("words", accuracy, running=False))]


@trial_part(without="metric rows", each=("on_start", "on_start_training"))
def callback_replaces_metrics(p: TrialBuild, event: str) -> None:
    def replace(self: Any, state: Any) -> None:
        before = state[torchbearer.METRIC_LIST].metric_list
        state[torchbearer.METRIC_LIST] = torchbearer.metrics.MetricList([*before, std(_square)])

    p.callbacks.append(type("Replaces", (Callback,), {event: replace})())


# --- optimization -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.02),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "every_third": functools.partial(EveryThird, lr=0.05),
}


@trial_part(kind="optimizer", each=OPTIMIZERS, without="sum_as_criterion")
def optimizer(p: TrialBuild, name: str) -> None:
    p.optimizer = OPTIMIZERS[name]


@trial_part(each=("norm", "value"))
def clips(p: TrialBuild, how: str) -> None:
    p.callbacks.append(GradientNormClipping(0.05) if how == "norm" else GradientClipping(0.01))


PLATEAU = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.2)
SCHEDULES: dict[str, Callable[[], Any]] = {
    "step": lambda: StepLR(3, 0.5, step_on_batch=True),
    "cosine": lambda: CosineAnnealingLR(4),
    "plateau": lambda: TorchScheduler(PLATEAU, monitor="val_loss"),
}


@trial_part(each=SCHEDULES, without="no_validation optimizer")
def schedule(p: TrialBuild, name: str) -> None:
    p.callbacks.append(SCHEDULES[name]())


@trial_part(kind="closure", without="optimizer loss")
def closure_with_two_losses(p: TrialBuild) -> None:
    p.changes.append(lambda made: made.with_closure(trials.two_losses))


# --- hooks and the loop -----------------------------------------------------------------------------------------------


@trial_part(each=("on_start_epoch", "on_end_training", "on_end_epoch"))
def draws_in(p: TrialBuild, event: str) -> None:
    def draw(self: Any, state: Any) -> None:
        with torch.no_grad():
            for parameter in state[torchbearer.MODEL].parameters():
                parameter.add_(0.02 * torch.randn_like(parameter) + 0.01 * random.random())

    p.callbacks.append(type("Draws", (Callback,), {event: draw})())


@trial_part(each=("on_end_training", "on_start_epoch", "on_sample"))
def rounded_in(p: TrialBuild, event: str) -> None:
    def rounds(self: Any, state: Any) -> None:
        state[torchbearer.MODEL].float().double()

    p.callbacks.append(type("Rounds", (Callback,), {event: rounds})())


@trial_part()
def freezes(p: TrialBuild) -> None:
    class Freezes(Callback):
        def on_start_epoch(self, state: Any) -> None:
            next(state[torchbearer.MODEL].parameters()).requires_grad_(state[torchbearer.EPOCH] < 1)

    p.callbacks.append(Freezes())


@trial_part()
def replaces_samples(p: TrialBuild) -> None:
    class Replaces(Callback):
        def on_sample(self, state: Any) -> None:
            state[torchbearer.X] = state[torchbearer.X] * 1.5

        on_sample_validation = on_sample

    p.callbacks.append(Replaces())


@trial_part(without="no_validation")
def stops_early(p: TrialBuild) -> None:
    p.callbacks.append(EarlyStopping(monitor="val_loss", patience=1, min_delta=0.02))
    p.epochs = 4


@trial_part(without="no_validation")
def steps(p: TrialBuild) -> None:
    p.steps = {"train_steps": p.rng.randint(1, 9), "val_steps": p.rng.randint(1, 4)}


@trial_part(without="steps")
def endless_loader(p: TrialBuild) -> None:
    p.changes.append(lambda made: made.with_inf_train_loader())
    p.steps = {"train_steps": p.rng.randint(2, 6)}


@trial_part(kind="loads")
def reads_batches_itself(p: TrialBuild) -> None:
    def read(state: Any) -> None:
        x, y = next(state[torchbearer.ITERATOR])
        state[torchbearer.X], state[torchbearer.Y_TRUE] = 2 * x, y

    p.changes.append(lambda made: made.with_loader(read))


@trial_part(kind="train", without="rows loss endless_loader")
def batches_that_are_made_already(p: TrialBuild) -> None:
    p.train = list(DataLoader(p.data(p.rng.randint(12, 30)), p.rng.randint(2, 7)))


# --- what else is called ----------------------------------------------------------------------------------------------


@trial_part(without="no_validation")
def evaluated_before(p: TrialBuild) -> None:
    p.before.append(lambda: p.trial.evaluate())


@trial_part(without="rows")
def tested_and_predicted(p: TrialBuild) -> None:
    tests, rows = DataLoader(p.data(11, 4), p.rng.randint(1, 4)), DataLoader(TensorDataset(p.data(9, 3).tensors[0]), 2)
    p.after.append(lambda: p.trial.with_test_generator(tests).evaluate(data_key=torchbearer.TEST_DATA))
    p.after.append(lambda: p.trial.with_test_generator(rows, len(rows)).predict())


@trial_part()
def behind_a_run_that_has_failed(p: TrialBuild) -> None:
    @torchbearer.callbacks.on_backward
    def fail(state: Any) -> None:
        raise ArithmeticError("on all processes")

    def attempt() -> None:
        made = trials.trial(Extra(p.extra.way)() if p.extra.way else [], callbacks=[fail])
        with contextlib.suppress(ArithmeticError, PeerError):
            trials.train(made, DataLoader(trials.data(20), 6, shuffle=True))

    p.before.insert(0, attempt)


@trial_part(without="steps endless_loader", can_be_cut=False)
def run_longer(p: TrialBuild) -> None:
    def again() -> Any:
        p.epochs += 1
        return p.fit()

    p.after.append(again)


@trial_part()
def run_by_another_trial(p: TrialBuild) -> None:
    def again() -> Any:
        p.trial = p.new_trial()
        return p.fit()

    p.after.append(again)


@trial_part()
def fails_first(p: TrialBuild) -> None:
    @torchbearer.callbacks.on_backward
    def fail(state: Any) -> None:
        if state[torchbearer.BATCH] == 1 and p.trial is first[0]:
            raise ArithmeticError("on all processes")

    first: list[Any] = []

    def attempt() -> None:
        first.append(p.trial)
        with contextlib.suppress(ArithmeticError):
            p.fit()
        p.trial = p.new_trial()

    p.callbacks.append(fail)
    p.before.insert(0, attempt)


# --- scenarios --------------------------------------------------------------------------------------------------------


def of_parts(name: str, *programs: str) -> None:
    trials.SCENARIOS[name] = program_parts.of_parts("trial", functools.partial(TrialBuild, 0), *programs)


of_parts(
    "criteria_that_count_their_calls",
    "criterion_with_a_buffer",
    "criterion_is_an_object",
    "criterion_keeps_calls_in=object",
)
of_parts(
    "parameters_changed_at_random_in_callbacks",
    "draws_in=on_start_epoch draws_in=on_end_training draws_in=on_end_epoch noise_in_gradients=numpy",
)
