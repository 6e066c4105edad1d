"""Loops of Fabric for the equivalence suite: each is a user's, whose Fabric may be given a strategy.

``scenario(strategy)`` builds everything from fixed seeds, trains and returns what must not depend on the way, see
ways.py.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from trainers import CLASSES, FEATURES, data, quiet
from ways import Way

import ddp_callbacks.lightning  # noqa: F401  it makes the strategy known
from ddp_callbacks import BatchNormSynchronizer

Scenario = Callable[[Any], Any]
SCENARIOS: dict[str, Scenario] = {}
APART: dict[str, Scenario] = {}


def names(way: Way) -> list[str]:
    return list(SCENARIOS)


def run(name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
    """See :class:`ways.Table`; a loop has no moment at which it is cut."""
    with quiet():
        return SCENARIOS[name]("auto" if way is None else "ddp_callbacks"), 0


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def fabric(strategy: Any, **options: Any) -> Fabric:
    """Launched and seeded."""
    made = Fabric(**({"accelerator": "cpu", "devices": 1, "strategy": strategy} | options))
    made.launch()
    made.seed_everything(7, verbose=False)
    return made


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def loader(samples: int = 29, batch_size: int = 7, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """By default five batches, the last one of a single sample."""
    return DataLoader(data(samples, seed), batch_size, **options)


def values(*models: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def learn(made: Fabric, loss: Any, *optimizers: Any) -> None:
    made.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    made: Fabric, batches: Any, model: Any, optimizer: Any, epochs: int = 2, clip: dict[str, Any] | None = None
) -> list[Any]:
    """The norms before clipping, and the parameters."""
    norms = []
    for _ in range(epochs):
        for x, y in batches:
            made.backward(F.cross_entropy(model(x), y))
            if clip:
                norms.append(made.clip_gradients(model, optimizer, **clip))
            optimizer.step()
            optimizer.zero_grad()
    return [norms, values(model)]


def begin(strategy: Any) -> tuple[Fabric, Any, Any]:
    """A Fabric with a model and its optimizer."""
    made, model = fabric(strategy), network()
    return made, *made.setup(model, sgd(model))


def fit(strategy: Any, batches: Any = None, **options: Any) -> Any:
    made, model, optimizer = begin(strategy)
    batches = made.setup_dataloaders(loader(shuffle=True) if batches is None else batches)
    return train(made, batches, model, optimizer, **options)


@scenario
def ragged_batches_and_empty_parts(strategy: Any) -> Any:
    return fit(strategy)


@scenario
def clipping(strategy: Any) -> Any:
    return [fit(strategy, clip={"max_norm": 0.05}), fit(strategy, clip={"clip_val": 0.01})]


def with_dropout(made: Fabric) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    return made.setup(model, sgd(model))


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Noise, a level of it for each sample, and one number for the batch."""
    level = torch.rand(len(x), 1, dtype=x.dtype)
    return x + level * torch.randn_like(x) + torch.rand(())


@scenario
def dropout_and_noise(strategy: Any) -> Any:
    """In the model and in the body of the loop, with a validation inside that draws, too."""
    made = fabric(strategy)
    model, optimizer = with_dropout(made)
    batches, others = made.setup_dataloaders(loader(shuffle=True), loader(10, 4, 1))
    for index, (x, y) in enumerate(itertools.chain(batches, batches)):
        loss = F.cross_entropy(model(noisy(x)), y)
        if index % 3 == 1:
            with torch.no_grad():
                for other, _ in others:
                    model(noisy(other))
        learn(made, loss + F.cross_entropy(model(noisy(x)), y), optimizer)
    return [values(model), torch.rand(3)]


@scenario
def dropout_in_unusual_loops(strategy: Any) -> Any:
    """Two loaders at once, a loop that is left, an iterator that is kept."""
    made = fabric(strategy)
    model, optimizer = with_dropout(made)
    first, second = made.setup_dataloaders(loader(28, shuffle=True), loader(28, seed=1, shuffle=True))
    for (x, y), (other, _) in zip(first, second, strict=True):
        learn(made, F.cross_entropy(model(noisy(x)), y) + model(noisy(other)).square().mean(), optimizer)
    for x, y in first:
        learn(made, F.cross_entropy(model(noisy(x)), y), optimizer)
        break
    kept = iter(first)
    for _ in range(3):
        x, y = next(kept)
        learn(made, F.cross_entropy(model(noisy(x)), y), optimizer)
    del kept
    return [values(model), torch.rand(3)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(29).tolist():
            yield data(29)[index]


@scenario
def streams_and_workers(strategy: Any) -> Any:
    loaders = DataLoader(Stream(), 7), DataLoader(Stream(), 7, num_workers=1), loader(shuffle=True, num_workers=1)
    return [fit(strategy, batches) for batches in loaders]


@scenario
def gradient_accumulation(strategy: Any) -> Any:
    made, model, optimizer = begin(strategy)
    batches = made.setup_dataloaders(loader(shuffle=True))
    for index, (x, y) in enumerate(itertools.chain(batches, batches)):
        is_last = index % 3 == 2
        with made.no_backward_sync(model, enabled=not is_last):
            made.backward(F.cross_entropy(model(x), y) / 3)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@scenario
def two_optimizers(strategy: Any) -> Any:
    """Set up apart, and with a scheduler."""
    made: Any = fabric(strategy)
    model: Any = network()
    first, second = sgd(model[0], 0.2), torch.optim.Adam(model[2].parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 3, 0.5)
    model = made.setup_module(model)
    first, second = made.setup_optimizers(first, second)
    for x, y in made.setup_dataloaders(loader(shuffle=True)):
        learn(made, F.cross_entropy(model(x), y), first, second)
        scheduler.step()
    return values(model)


@scenario
def gan(strategy: Any) -> Any:
    """Two models, each with an optimizer; the loss of one passes through the other, and one steps less often."""
    made = fabric(strategy)
    generator: Any = network(1)
    judge: Any = nn.Linear(CLASSES, 1).double()
    generator, of_generator = made.setup(generator, torch.optim.Adam(generator.parameters(), 0.02))
    judge, of_judge = made.setup(judge, sgd(judge))
    batches = made.setup_dataloaders(loader(shuffle=True))
    for index, (x, y) in enumerate(itertools.chain(batches, batches)):
        fake = generator(x)
        of_generator.zero_grad()
        with made.no_backward_sync(judge, enabled=index % 2 == 0):  # its gradients are not wanted
            made.backward(F.softplus(-judge(fake)).mean())
        of_generator.step()
        of_judge.zero_grad()
        real = F.one_hot(y, CLASSES).double()
        made.backward((F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()) / 2)
        if index % 2:
            of_judge.step()
    return values(generator, judge)


class Pairs:
    """Batches of which nobody knows the number."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*range(start, start + 7)] for start in range(0, 28, 7)])


@scenario
def a_gradient_penalty_and_batches_of_unknown_number(strategy: Any) -> Any:
    """``torch.autograd.grad`` for a model's inputs, which may be computed before ``fabric.backward``."""
    made = fabric(strategy)
    judge: Any = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    judge, optimizer = made.setup(judge, sgd(judge))
    for x, _ in made.setup_dataloaders(DataLoader(loader(28).dataset, batch_sampler=Pairs())):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(judge(given).sum(), given, create_graph=True)
        learn(made, judge(x).mean() + (slope.norm(dim=1) - 1).square().mean(), optimizer)
    return values(judge)


@scenario
def a_model_that_some_ranks_do_not_use(strategy: Any) -> Any:
    made = fabric(strategy)
    first, second = network(), nn.Linear(FEATURES, CLASSES).double()
    optimizer: Any = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    model: Any = made.setup_module(first)
    extra: Any = made.setup_module(second)
    optimizer = made.setup_optimizers(optimizer)
    for x, y in made.setup_dataloaders(loader(shuffle=True)):
        loss = F.cross_entropy(model(x), y, reduction="none")
        chosen = x[:, 0] > 0.9
        if chosen.any():
            loss = loss + torch.where(chosen, F.cross_entropy(extra(x), y, reduction="none"), 0.0)
        learn(made, loss.mean(), optimizer)
    return values(model, extra)


def evaluate(model: Any, batches: Any) -> list[float]:
    """As a user does, who knows of no processes; the metrics live in variables, and keep states of every kind."""
    options: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
    loss = torchmetrics.MeanMetric().set_dtype(torch.float64)
    auroc = torchmetrics.AUROC(**options)
    both = torchmetrics.MetricCollection([torchmetrics.F1Score(**options), torchmetrics.Precision(**options)])
    for x, y in batches:
        logits = model(x)
        loss.update(F.cross_entropy(logits, y), len(y))
        auroc.update(logits, y)
        both.update(logits, y)
    return [loss.compute().item(), auroc.compute().item(), *(value.item() for value in both.compute().values())]


@scenario
def evaluation(strategy: Any) -> Any:
    """In the middle of an epoch, between drawing, forward and backward, and with gradients on at the end."""
    made, model, optimizer = begin(strategy)
    batches, few, more = made.setup_dataloaders(loader(30, shuffle=True), loader(2, 2, 9), loader(13, 4, 5))
    found = []
    for index, (x, y) in enumerate(batches):
        with torch.inference_mode():
            found.append(evaluate(model, few))
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            found.append(evaluate(model, more))
        if index == 3:
            next(iter(more))
        learn(made, loss, optimizer)
    found.append(evaluate(model, more))
    return [found, values(model)]


def ahead(batches: Any, lag: int) -> Iterator[Any]:
    """Draws so many batches before it hands out the one before them."""
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > lag:
            yield waiting.pop(0)
    yield from waiting


@scenario
def batches_drawn_ahead(strategy: Any) -> Any:
    """The last one is divided unlike the others; one Fabric's epochs follow each other, or its passes overlap."""
    made, model, optimizer = begin(strategy)
    batches = made.setup_dataloaders(loader(shuffle=True))
    for lag in (1, 2, 4):
        train(made, ahead(batches, lag), model, optimizer, epochs=1)
    for x, y in ahead(itertools.chain(batches, batches), 1):
        learn(made, F.cross_entropy(model(x), y), optimizer)
    return values(model)


@scenario
def changed_batches_drawn_ahead_or_skipped(strategy: Any) -> Any:
    """They are divided alike, so it does not matter which one a loss is of."""
    made, model, optimizer = begin(strategy)
    batches, more = made.setup_dataloaders(loader(30, 6, shuffle=True), loader(24, 12, 9))
    for x, y in ahead(itertools.chain(batches, batches), 2):
        learn(made, F.cross_entropy(model(x * 2), y), optimizer)
    for index, (x, y) in enumerate(batches):
        if index != 1:
            learn(made, F.cross_entropy(model(x * 2), y), optimizer)
    train(made, loader_of_changed(more), model, optimizer, epochs=1)
    learn(made, sum(F.cross_entropy(model(x), y) for x, y in loader_of_changed(more)), optimizer)
    return values(model)


def loader_of_changed(batches: Any) -> Iterator[Any]:
    return ((x + 1, y) for x, y in batches)


@scenario
def the_next_batch_is_drawn_between_forward_and_backward(strategy: Any) -> Any:
    made, model, optimizer = begin(strategy)
    batches: Any = iter(made.setup_dataloaders(loader(shuffle=True)))
    batch = next(batches)
    while batch is not None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        batch = next(batches, None)
        learn(made, loss, optimizer)
    return values(model)


@scenario
def several_backwards_of_a_batch(strategy: Any) -> Any:
    """Of one graph; and with the next batch in hand, of steps through time, of views."""
    made, model, optimizer = begin(strategy)
    batches = made.setup_dataloaders(loader(shuffle=True))
    for x, y in batches:
        losses = F.cross_entropy(model(x), y), model(x).square().mean()
        made.backward(losses[0], retain_graph=True)
        made.backward(losses[0] * 0.5)
        learn(made, losses[1], optimizer)
    for x, y in ahead(batches, 1):
        hidden = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for step in range(2):
            hidden = model(x) + hidden.detach() * step
            made.backward(F.cross_entropy(hidden, y))
        for view in (x[None].squeeze(0), x.detach()):
            learn(made, F.cross_entropy(model(view), y), optimizer)
    return values(model)


@scenario
def one_batch_again_and_again(strategy: Any) -> Any:
    """The pass over its loader has ended before it is computed, or later than its last batch."""
    made, model, optimizer = begin(strategy)
    batches = made.setup_dataloaders(loader())
    x, y = next(iter(batches))
    for _ in range(3):
        learn(made, F.cross_entropy(model(x + 1), y), optimizer)
    for index, (x, y) in enumerate(batches):
        if index == 3:
            break
        learn(made, F.cross_entropy(model(x), y), optimizer)
    return train(made, batches, model, optimizer, epochs=1)


@scenario
def critics_and_generators(strategy: Any) -> Any:
    """Several critics' steps for one of the generator, from noise alone."""
    made = fabric(strategy)
    generator, judge = network(1), nn.Linear(CLASSES, 1).double()
    maker, of_maker = made.setup(generator, sgd(generator))
    critic, of_critic = made.setup(judge, sgd(judge))
    noise = torch.linspace(-1, 1, 12 * FEATURES, dtype=torch.float64).view(12, FEATURES)
    batches = made.setup_dataloaders(loader(shuffle=True))
    for index, (_, y) in enumerate(itertools.chain(batches, batches)):
        real = F.one_hot(y, CLASSES).double()
        learn(made, critic(maker(noise).detach()).mean() - critic(real).mean(), of_critic)
        if index % 3 == 2:
            learn(made, -critic(maker(noise)).mean(), of_maker)
    return values(generator, judge)


@scenario
def several_loaders(strategy: Any) -> Any:
    """Drawn in turn, and at once where the batches are divided alike, or where one trains no model."""
    made, model, optimizer = begin(strategy)
    first, second = made.setup_dataloaders(loader(shuffle=True), loader(23, 5, 9))
    others = iter(second)
    for x, y in first:
        made.backward(F.cross_entropy(model(x), y))
        other, labels = next(others)
        learn(made, 0.5 * F.cross_entropy(model(other), labels), optimizer)
    alike = made.setup_dataloaders(loader(36, 12), loader(24, 12, 9))
    for (x, y), (other, labels) in zip(*alike, strict=False):
        learn(made, F.cross_entropy(model(x), y) + F.cross_entropy(model(other), labels), optimizer)
    for (x, y), (other, _) in zip(first, second, strict=True):
        learn(made, F.cross_entropy(model(x), y) + other.mean().tanh(), optimizer)
    return values(model)


@scenario
def lbfgs(strategy: Any) -> Any:
    made = fabric(strategy)
    model: Any = network()
    model, optimizer = made.setup(model, torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4))
    for x, y in made.setup_dataloaders(loader(23, 11)):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            made.backward(loss)
            return loss

        optimizer.step(closure)
    return values(model)


@scenario
def save_and_resume(strategy: Any) -> Any:
    """In another loop, from a file of one epoch."""
    made = fabric(strategy)
    with tempfile.TemporaryDirectory() as folder:
        path = made.broadcast(str(Path(folder) / "checkpoint.pt"))
        trained = save(made, path)
        made.barrier()
        return [trained, resume(made, path)]


def save(made: Fabric, path: str) -> Any:
    model = network()
    model, optimizer = made.setup(model, sgd(model))
    outcome = train(made, made.setup_dataloaders(loader()), model, optimizer, epochs=1)
    made.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
    return outcome


def resume(made: Fabric, path: str) -> Any:
    model = network(seed=5)
    model, optimizer = made.setup(model, sgd(model, 0.7))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    left = made.load(path, state)
    batches = made.setup_dataloaders(loader())
    lr = optimizer.state_dict()["param_groups"][0]["lr"]
    return [left, state["epoch"], lr, train(made, batches, model, optimizer, epochs=1)]


@scenario
def folds(strategy: Any) -> Any:
    """Models that come and go in one Fabric, random numbers between the passes, and a loop that is left early."""
    made = fabric(strategy)
    found: list[Any] = []
    for fold in range(3):
        made.seed_everything(fold, verbose=False)
        model: Any = network(fold)
        model, optimizer = made.setup(model, sgd(model))
        batches = made.setup_dataloaders(loader(shuffle=True))
        found.append(train(made, batches, model, optimizer, epochs=1))
        found.append(torch.rand(2, dtype=torch.float64))
        for x, _ in batches:
            found.append(F.mse_loss(model(x[:1]) * 0, torch.zeros(1, CLASSES, dtype=torch.float64)))
            break
    return found


@scenario
def batch_norm_of_whole_batches(strategy: Any) -> Any:
    made: Any = fabric(strategy)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)).double()
    model, optimizer = made.setup(module, sgd(module))
    layers = BatchNormSynchronizer(module, counts=lambda: made.strategy.share.local > 0)
    trained = train(made, made.setup_dataloaders(loader(30)), model, optimizer, epochs=1)
    layers.close()
    return [trained, list(module.buffers())]


@scenario
def frozen_layers_and_a_compiled_model(strategy: Any) -> Any:
    made = fabric(strategy)
    model: Any = network()
    model[0].requires_grad_(False)
    optimizer: Any = torch.optim.SGD(model[2].parameters(), 0.1)
    model = torch.compile(model, backend="aot_eager")
    model, optimizer = made.setup(model, optimizer)
    return train(made, made.setup_dataloaders(loader(24, 8)), model, optimizer, epochs=1)


@scenario
def a_temperature_that_only_the_optimizer_has(strategy: Any) -> Any:
    made = fabric(strategy)
    model: Any = network()
    temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model, optimizer = made.setup(model, torch.optim.SGD([*model.parameters(), temperature], 0.1))
    for x, y in made.setup_dataloaders(loader(29, 8)):
        optimizer.zero_grad()
        made.backward(F.cross_entropy(model(x) * temperature, y))
        optimizer.step()
    return values(model), temperature.detach().clone()


@scenario
def samples_that_no_loader_gave(strategy: Any) -> Any:
    """Each process makes the same batch itself: all count the same, also behind a last batch that some have none of."""
    made, model, optimizer = begin(strategy)
    x, y = data(8).tensors
    learn(made, F.cross_entropy(model(x), y), optimizer)
    train(made, made.setup_dataloaders(loader()), model, optimizer, epochs=1)
    learn(made, F.cross_entropy(model(x), y), optimizer)
    return values(model)
