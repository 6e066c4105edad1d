"""Trials for the equivalence suite: each is a user's script, to which callbacks may be added.

``scenario(extra)`` builds everything from fixed seeds, runs it with the callbacks ``extra`` in front and returns what
must not depend on the number of processes: a nested structure of numbers and tensors.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torchbearer
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchbearer import Callback, Trial
from torchbearer.callbacks import (
    CosineAnnealingLR,
    EarlyStopping,
    GradientClipping,
    GradientNormClipping,
    L1WeightDecay,
    StepLR,
)
from torchbearer.metrics import lambda_metric, mean, std, to_dict, var

Extra = list[Any]
Scenario = Callable[[Extra], Any]
SCENARIOS: dict[str, Scenario] = {}

FEATURES, CLASSES = 6, 10
DEVICE = "cpu"  # tests/cuda sets another


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def data(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    # All classes occur in every 10 samples, so that ROC AUC is defined.
    y = (torch.arange(samples) * 7 + torch.randint(0, 2, (samples,), generator=generator) * 0) % CLASSES
    return TensorDataset(x, y)


def network(seed: int = 1, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def trial(
    extra: Extra,
    model: nn.Module | None = None,
    optimizer: Any = None,
    criterion: Any = None,
    metrics: Any = ("acc", "loss"),
    callbacks: Extra = (),  # type: ignore[assignment]
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
    return made


def outcome(made: Trial, history: Any, **more: Any) -> dict[str, Any]:
    """What must be equal: the history without the progress bar's own means, and the parameters."""
    kept = [{k: v for k, v in epoch.items() if not k.startswith("running_")} for epoch in history]
    state = {key: value.clone() for key, value in made.state[torchbearer.MODEL].state_dict().items()}
    return {"history": kept, "parameters": state, **more}


def run(made: Trial, train: Any, validation: Any = None, epochs: int = 3, **steps: Any) -> dict[str, Any]:
    made.with_generators(train, validation, **steps)
    return outcome(made, made.run(epochs))


@scenario
def shuffled_ragged_adam(extra: Extra) -> Any:
    made = trial(extra, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    return run(made, DataLoader(data(50), 16, shuffle=True), DataLoader(data(23, 9), 10))


@scenario
def unshuffled_drop_last_momentum(extra: Extra) -> Any:
    made = trial(extra, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    return run(made, DataLoader(data(50), 16, drop_last=True), DataLoader(data(20, 9), 7, shuffle=True))


@scenario
def batches_smaller_than_the_world(extra: Extra) -> Any:
    return run(trial(extra), DataLoader(data(7), 2, shuffle=True), DataLoader(data(5, 9), 3))


@scenario
def batches_of_one(extra: Extra) -> Any:
    return run(trial(extra), DataLoader(data(5), 1, shuffle=True), epochs=2)


@scenario
def weighted_sampler_adamw(extra: Extra) -> Any:
    made = trial(extra, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1))
    sampler = WeightedRandomSampler(torch.arange(1.0, 41.0), 33)
    return run(made, DataLoader(data(40), 8, sampler=sampler))


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


@scenario
def custom_samplers(extra: Extra) -> Any:
    lazy = run(trial(extra), DataLoader(data(30), 8, sampler=LazySampler(30)))
    grouped = run(trial(extra), DataLoader(data(30), batch_sampler=GrowingBatches(30)))
    plain = run(trial(extra), DataLoader(data(30), batch_sampler=BatchSampler(range(30), 4, False)))
    return [lazy, grouped, plain]


@scenario
def generator_of_the_loader(extra: Extra) -> Any:
    loader = DataLoader(data(32), 8, shuffle=True, generator=torch.Generator().manual_seed(11))
    ragged = DataLoader(data(30), 8, shuffle=True, generator=torch.Generator().manual_seed(12))
    return [run(trial(extra), loader), run(trial(extra), ragged)]


class Stream(IterableDataset[Any]):
    """Shuffles itself with Python's global generator."""

    def __init__(self, samples: int) -> None:
        self.rows = list(data(samples))

    def __iter__(self) -> Iterator[Any]:
        rows = list(self.rows)
        random.shuffle(rows)
        yield from rows

    def __len__(self) -> int:
        return len(self.rows)


@scenario
def iterable_dataset(extra: Extra) -> Any:
    first = run(trial(extra), DataLoader(Stream(30), 8), DataLoader(Stream(13), 4))
    workers = run(trial(extra), DataLoader(Stream(30), 8, num_workers=1), epochs=2)
    return [first, workers]


class Sample(nn.Module):
    """Takes a sample without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(-1, FEATURES))


@scenario
def bare_tensor_dataset(extra: Extra) -> Any:
    torch.manual_seed(2)
    made = trial(extra, model=Sample().double(), criterion=lambda p, t: nn.functional.cross_entropy(p, t.view(-1)))
    x, y = data(9).tensors
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A batch of TensorDataset .* has no common first dimension")
        return run(made, TensorDataset(x, y.view(-1, 1)), epochs=2)


@scenario
def list_of_batches(extra: Extra) -> Any:
    batches = list(DataLoader(data(30), 7))
    return run(trial(extra), batches, list(DataLoader(data(11, 9), 4)))


@scenario
def loader_without_automatic_batching(extra: Extra) -> Any:
    x, y = data(24).tensors
    batches = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 24, 6)]
    return run(trial(extra), DataLoader(batches, batch_size=None, shuffle=True))


class Sequences(Dataset[Any]):
    """Each entry is one sample: vectors over time, and a target for each time."""

    def __init__(self) -> None:
        x, y = data(40).tensors
        lengths = [5, 3, 6, 4, 2, 5, 3]
        self.rows = list(zip(x.split([*lengths, 12]), y.split([*lengths, 12]), strict=True))[:-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class OverTime(nn.Module):
    """What it says of a time depends on all before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.cumsum(0))


@scenario
def samples_one_by_one(extra: Extra) -> Any:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A batch of Sequences .* is taken for one sample")
        loader = DataLoader(Sequences(), batch_size=None, shuffle=True)
        return run(trial(extra, model=OverTime()), loader, DataLoader(Sequences(), batch_size=None))


@scenario
def custom_loader(extra: Extra) -> Any:
    def reading(state: Any) -> None:
        x, y = next(state[torchbearer.ITERATOR])
        state[torchbearer.X], state[torchbearer.Y_TRUE] = 2 * x, y

    def making(state: Any) -> None:
        state[torchbearer.X] = torch.randn(9, FEATURES, dtype=torch.float64)
        state[torchbearer.Y_TRUE] = torch.randint(0, CLASSES, (9,))

    reads = trial(extra).with_loader(reading)
    first = run(reads, DataLoader(data(30), 8, shuffle=True))
    makes = trial(extra).with_loader(making).for_train_steps(5)
    return [first, outcome(makes, makes.run(2))]


class Rosenbrock(nn.Module):
    """Makes its own data: noise around a point."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.tensor([-1.0, 2.0], dtype=torch.float64))

    def forward(self, _: Any) -> torch.Tensor:
        x, y = self.point + 0.01 * torch.randn(2, dtype=torch.float64)
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2


@scenario
def no_data(extra: Extra) -> Any:
    made = trial(
        extra,
        model=Rosenbrock(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        criterion=lambda prediction, _: prediction,
        metrics=["loss"],
    ).for_train_steps(7)
    return outcome(made, made.run(3))


@scenario
def workers(extra: Extra) -> Any:
    loader = DataLoader(data(30), 8, shuffle=True, num_workers=2)
    return run(trial(extra), loader, DataLoader(data(13, 9), 4, num_workers=2), epochs=2)


@scenario
def train_steps_below_and_above_an_epoch(extra: Extra) -> Any:
    def loader() -> DataLoader[Any]:
        return DataLoader(data(30), 8, shuffle=True)

    return [run(trial(extra), loader(), train_steps=steps) for steps in (2, 4, 9)]


@scenario
def schedulers(extra: Extra) -> Any:
    results = []
    for callback in (StepLR(3, 0.5, step_on_batch=True), CosineAnnealingLR(4)):
        made = trial(extra, metrics=["acc", "loss", "lr"], callbacks=[callback])
        results.append(run(made, DataLoader(data(30), 8, shuffle=True)))
    return results


@scenario
def clipping_and_decay(extra: Extra) -> Any:
    results = []
    for callback in (GradientClipping(0.01), GradientNormClipping(0.05), L1WeightDecay(0.1)):
        results.append(run(trial(extra, callbacks=[callback]), DataLoader(data(30), 8, shuffle=True)))
    return results


@scenario
def early_stopping(extra: Extra) -> Any:
    made = trial(
        extra,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.9),
        callbacks=[EarlyStopping(monitor="val_loss", patience=2, min_delta=0.01)],
    )
    result = run(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4), epochs=30)
    return result | {"epochs": len(result["history"])}


@scenario
def stop_in_the_middle_of_an_epoch(extra: Extra) -> Any:
    @torchbearer.callbacks.on_step_training
    def stop(state: Any) -> None:
        # Only the first rank decides; all must follow at the same step.
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 1 and _rank() == 0:
            state[torchbearer.STOP_TRAINING] = True

    return run(trial(extra, callbacks=[stop]), DataLoader(data(30), 8, shuffle=True))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@scenario
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

    made = trial(
        extra,
        metrics=["acc", "loss", "top_5_acc", "roc_auc", "epoch", "lr", margin, batch_error, order],
    )
    # Unshuffled, so that the first batch, of which one process shows the running ROC AUC, has all classes.
    return run(made, DataLoader(data(43), 11), DataLoader(data(21, 9), 9, shuffle=True))


@scenario
def regression(extra: Extra) -> Any:
    x, y = data(30).tensors
    made = trial(extra, model=network(outputs=1), criterion=nn.MSELoss(), metrics=["mse", "loss", "acc"])
    return run(made, DataLoader(TensorDataset(x, y.double().view(-1, 1) / 10), 8, shuffle=True))


@scenario
def weighted_and_ignored_targets(extra: Extra) -> Any:
    x, y = data(30).tensors
    y = y.clone()
    y[::4] = -100
    y[8:12] = -100  # with four processes, one has a batch without any target
    criterion = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64))
    first = run(trial(extra, criterion=criterion), DataLoader(TensorDataset(x, y), 8), DataLoader(data(13, 9), 4))
    second = run(trial(extra, metrics=["loss"]), DataLoader(TensorDataset(x, y), 8))
    return [first, second]


def ignored(rows: TensorDataset) -> TensorDataset:
    """Some targets are; of a batch of 8 four ranks' parts are without a target, but one."""
    x, y = rows.tensors
    y = y.clone()
    y[::4] = -100
    y[8:12] = -100
    return TensorDataset(x, y)


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
    weighed = [type(item)(weight=counted) for item in extra]
    stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=0.02)
    made = trial(weighed, criterion=own_mean, metrics=["loss"], callbacks=[stop])
    result = run(made, DataLoader(ignored(data(30)), 8), DataLoader(ignored(data(23, 9)), 6), epochs=8)
    made.with_test_generator(DataLoader(ignored(data(22, 3)), 5))
    return result | {"evaluation": made.evaluate(data_key=torchbearer.TEST_DATA)}


@scenario
def two_losses_with_a_backward_each(extra: Extra) -> Any:
    """By a closure of the user's own; the losses are means, or sums."""

    def closure(state: Any) -> None:
        state[torchbearer.OPTIMIZER].zero_grad()
        for factor in (1.0, -0.5):
            state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X] * factor)
            loss = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
            state[torchbearer.LOSS] = loss
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
            loss.backward()
            state[torchbearer.CALLBACK_LIST].on_backward(state)

    results = []
    for criterion in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        made = trial(extra, criterion=criterion, optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
        results.append(run(made.with_closure(closure), DataLoader(data(30), 8, shuffle=True)))
    return results


@scenario
def sum_reduction(extra: Extra) -> Any:
    made = trial(extra, criterion=nn.CrossEntropyLoss(reduction="sum"), optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    return run(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4))


@scenario
def kept_gradients(extra: Extra) -> Any:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    made = trial(extra, optimizer=lambda p: Keeping(p, lr=0.1, momentum=0.5))
    return run(made, DataLoader(data(30), 8, shuffle=True))


@scenario
def evaluate_and_predict(extra: Extra) -> Any:
    made = trial(extra, metrics=["acc", "loss", "roc_auc"])
    result = run(made, DataLoader(data(30), 11), DataLoader(data(23, 9), 10, shuffle=True), epochs=2)
    x, _ = data(25, 4).tensors
    made.with_test_generator(DataLoader(TensorDataset(x), 7))
    result["predictions"] = made.predict()
    result["evaluation"] = made.evaluate()
    result["on training data"] = made.evaluate(data_key=torchbearer.TRAIN_DATA)
    result["small"] = made.with_test_generator(DataLoader(TensorDataset(x[:2]), 7)).predict()
    result["later"] = outcome(made, made.run(4))
    return result


def synchronized(extra: Extra, weight: Any = None, **options: Any) -> tuple[Extra, nn.Module]:
    """``extra`` with ``sync_batchnorm=True``, and a model with two BatchNorm layers."""
    layers = network()
    first, second = nn.BatchNorm1d(FEATURES, **options), nn.BatchNorm1d(8, momentum=None, **options)
    with_batch_norm = [type(item)(sync_batchnorm=True, weight=weight) for item in extra]
    return with_batch_norm, nn.Sequential(first, *layers[:2], second, layers[2]).double()


@scenario
def synchronized_batch_norm(extra: Extra) -> Any:
    """Ragged batches, some smaller than the world, in training and in evaluations."""
    results = []
    for samples, batch_size, options in ((29, 8, {}), (11, 4, {}), (11, 4, {"track_running_stats": False})):
        callbacks, model = synchronized(extra, **options)
        made = trial(callbacks, model=model, callbacks=[GradientNormClipping(0.5)])
        validation = DataLoader(data(13, 9), 5)
        results.append(run(made, DataLoader(data(samples), batch_size, shuffle=True), validation))
        x, _ = data(11, 4).tensors
        predictions = made.with_test_generator(DataLoader(TensorDataset(x), 3)).predict()
        results.append({"predictions": predictions, "evaluation": made.evaluate()})
    return results


@scenario
def synchronized_batch_norm_with_weighted_targets(extra: Extra) -> Any:
    """Some ranks hold only targets that are ignored; the statistics, on which the others' loss depends, are theirs too.

    The last criterion is a mean over nothing there: its gradient is 0 / 0.
    """
    x, y = ignored(data(30)).tensors
    cases: list[tuple[Any, Any]] = [
        (nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64)), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (own_mean, counted),
    ]
    results = []
    for criterion, weight in cases:
        callbacks, model = synchronized(extra, weight)
        made = trial(callbacks, model=model, criterion=criterion, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
        results.append(run(made, DataLoader(TensorDataset(x, y), 8)))
    return results


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 3).double(), nn.Linear(FEATURES, 2).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), self.second(x)


@scenario
def predict_several_outputs(extra: Extra) -> Any:
    torch.manual_seed(1)
    made = Trial(TwoHeads(), callbacks=extra, verbose=0).to("cpu", torch.float64)
    x, _ = data(11, 4).tensors
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to format predictions")
        return made.with_test_generator(DataLoader(TensorDataset(x), 4)).predict()


@scenario
def several_trials_in_one_process(extra: Extra) -> Any:
    folds = []
    for fold in range(3):
        made = trial(extra if fold == 0 else [type(item)() for item in extra], model=network(fold))
        folds.append(run(made, DataLoader(data(20, fold), 6, shuffle=True), DataLoader(data(9, fold), 4), epochs=2))
    return folds


class DrawsAtEpochs(Callback):
    """Changes parameters at random, by all three libraries."""

    def on_start_epoch(self, state: Any) -> None:
        self._add(state, 0.05)

    def on_end_training(self, state: Any) -> None:
        self._add(state, 0.1)

    def on_end_epoch(self, state: Any) -> None:
        with torch.no_grad():
            weight = state[torchbearer.MODEL][0].weight
            weight.mul_(torch.rand_like(weight) > 0.1)

    def _add(self, state: Any, scale: float) -> None:
        with torch.no_grad():
            for parameter in state[torchbearer.MODEL].parameters():
                noise = torch.randn_like(parameter) + random.gauss(0, 1) + float(numpy.random.normal())
                parameter.add_(scale * noise)


@scenario
def parameters_changed_at_random_in_callbacks(extra: Extra) -> Any:
    made = trial(extra, callbacks=[DrawsAtEpochs()])
    random.seed(3)
    numpy.random.seed(3)
    result = run(made, DataLoader(data(30), 8, shuffle=True), DataLoader(data(13, 9), 4))
    again = run(made, DataLoader(data(30), 8, shuffle=True), epochs=5)
    return result, again, [float(torch.rand(())), random.random(), float(numpy.random.rand())]


@scenario
def a_batch_too_short_for_batchnorm_on_all(extra: Extra) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
    return [run(trial(extra, model=model), DataLoader(data(samples), 8), DataLoader(data(5), 4)) for samples in (2, 3)]


@scenario
def resumed(extra: Extra) -> Any:
    def make(callbacks: Extra) -> Trial:
        made = trial(
            callbacks,
            optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
            callbacks=[EarlyStopping(monitor="val_loss", patience=40)],
        )
        return made.with_generators(DataLoader(data(30), 8), DataLoader(data(13, 9), 4))

    first = make(extra)
    first.run(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trial.pt")
        torch.save(first.state_dict(), path)
        second = make([type(item)() for item in extra])
        second.load_state_dict(torch.load(path, weights_only=False))
    return outcome(second, second.run(4))
