"""verify="first_batch": what cannot be exact is named, and what is exact passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchbearer import Trial
from trainer_cases import OURS, Bodies, assert_as_on_one, quiet
from trainers import LogsAll, Net, Normalized, NormalizedMaskedMean, counted, fit, loader, masked

from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.data.sharding import shard_loader
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback
from ddp_callbacks.verification import verify_gradient

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

SAMPLES = 12  # compared in parts of 4 and 8 samples
IGNORED = -100
PASSES = ""
DIFFERS = "MismatchError: the gradient of the first batch on 2 processes is not that of one process: that of parameter "

Loss = Callable[[nn.Module, Any], torch.Tensor]

WORLD = Bodies(__name__, quiet)


def outcome(call: Callable[[], Any]) -> str:
    """The error."""
    try:
        call()
    except (MismatchError, ConfigurationError) as error:
        return f"{type(error).__name__}: {error}"
    return PASSES


# --- losses -----------------------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    """Samples of five features, a class of four, and every third class unknown."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    classes = torch.randint(4, (SAMPLES,), generator=generator)
    classes[::3] = IGNORED
    return TensorDataset(inputs, classes)


def alternating() -> TensorDataset:
    """Each of the equal parts that training would take has as many known targets."""
    inputs, classes = samples().tensors
    return TensorDataset(inputs, torch.where(torch.arange(SAMPLES) % 6 < 3, classes.clamp(min=0), IGNORED))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 4)).double()


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0))


def known_only(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over the targets that are known."""
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED)


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="sum")


def against_others(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Each sample against all others of the batch."""
    embedded = F.normalize(outputs, dim=1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    return against_others(model(batch[0]), batch[1])


def at_random(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (F.dropout(batch[0], 0.5), batch[1]))


def padded(samples: list[Any]) -> Any:
    """Inputs of different lengths, by classes, padded to the longest."""
    inputs = [sample[: 1 + int(label) % 5] for sample, label in samples]
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack([label for _, label in samples])


def lengths(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (F.pad(batch[0], (0, 5 - batch[0].shape[1])), batch[1]))


def known(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def verify(
    loss: Loss,
    *layers: nn.Module,
    weight_of: Callable[[Any], float] | None = None,
    rows: Any = None,
    model: nn.Module | None = None,
    **options: Any,
) -> str:
    model = model or network(*layers)
    batches = iter(shard_loader(DataLoader(samples(), SAMPLES) if rows is None else rows, **options))
    next(batches)
    first = batches.first_batch()

    def weight() -> tuple[float, float | None]:
        if weight_of is None:
            return first.share.local, first.share.total
        return weight_of(first.part) if first.share.local else 0.0, None

    return outcome(lambda: verify_gradient(model, functools.partial(loss, model), first.whole, first.part, weight))


def synchronized(batch_size: int) -> str:
    model = network(nn.BatchNorm1d(6))
    counts = dist.get_rank() < batch_size  # of one sample one rank has none
    synchronizer = BatchNormSynchronizer(model, counts=lambda: counts)
    try:
        return verify(cross_entropy, model=model, rows=DataLoader(samples(), batch_size))
    finally:
        synchronizer.close()


WRONG = "give weight=, or correct it"
LOSSES: dict[str, tuple[Callable[[], str], str]] = {
    "mean over samples": (lambda: verify(cross_entropy), PASSES),
    "dropout": (lambda: verify(cross_entropy, nn.Dropout(0.5)), PASSES),
    "known targets, weighed": (lambda: verify(known_only, weight_of=known), PASSES),
    "a stream": (lambda: verify(cross_entropy, rows=DataLoader(Stream(), SAMPLES)), PASSES),
    "shuffled, workers": (
        lambda: verify(cross_entropy, rows=DataLoader(samples(), SAMPLES, shuffle=True, num_workers=1)),
        PASSES,
    ),
    "fewer samples than ranks": (lambda: verify(cross_entropy, rows=DataLoader(samples(), 1)), PASSES),
    "whole batches of each rank": (
        lambda: verify(cross_entropy, rows=DataLoader(samples(), 3), batch_size="per_process"),
        PASSES,
    ),
    "padded to the longest of a part": (
        lambda: verify(lengths, rows=DataLoader(samples(), SAMPLES, collate_fn=padded)),
        PASSES,
    ),
    "synchronized batch norm": (lambda: synchronized(SAMPLES), PASSES),
    "contrastive": (lambda: verify(contrastive), WRONG),
    "known targets": (lambda: verify(known_only), WRONG),
    "wrong weight": (lambda: verify(known_only, weight_of=lambda batch: known(batch) + 1), WRONG),
    "equal parts": (lambda: verify(known_only, rows=DataLoader(alternating(), SAMPLES)), DIFFERS),
    "sum": (
        lambda: verify(summed, rows=DataLoader(samples(), 6)),
        "Added up without weights the gradients are right: the loss is a sum over the samples. Say so "
        '(reduction="sum")',
    ),
    "batch norm": (
        lambda: verify(cross_entropy, nn.BatchNorm1d(6)),
        "1 normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True",
    ),
    "at random": (lambda: verify(at_random), "The model is random"),
}


def assert_told(message: str, says: str) -> None:
    """It passes, or the error says this."""
    assert says in message if says else message == PASSES, message
    if says == WRONG:
        assert message.startswith(DIFFERS)
        assert ".weight differs by up to " in message or ".bias differs by up to " in message


@WORLD
def losses() -> dict[str, str]:
    return {name: call() for name, (call, _) in LOSSES.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_an_exact_loss_passes_and_another_is_named(name: str) -> None:
    """`verify="first_batch"` names an inexact loss and the remedy."""
    for found in WORLD.returned(losses):
        assert_told(found[name], LOSSES[name][1])


def test_equal_parts_would_hide_a_wrong_weight() -> None:
    known_in = (alternating().tensors[1] != IGNORED).view(2, -1).sum(1)
    assert len(set(known_in.tolist())) == 1


def gradients(loss: Loss, part: slice) -> Any:
    model = network()
    return torch.autograd.grad(loss(model, samples()[part]), list(model.parameters()))


def test_the_difference_is_that_of_one_process() -> None:
    whole = gradients(known_only, slice(0, SAMPLES))
    first, second = gradients(known_only, slice(0, 4)), gradients(known_only, slice(4, SAMPLES))
    sums = [own / 3 + other * 2 / 3 for own, other in zip(first, second, strict=True)]
    largest = max(float((own - other).abs().max()) for own, other in zip(sums, whole, strict=True))
    for found in WORLD.returned(losses):
        assert f"differs by up to {largest:.2g} " in found["known targets"]


@WORLD
def traces() -> Any:
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn, whole, part = torch.get_rng_state(), samples()[:], samples()[dist.get_rank() :: 2]
    outcome(lambda: verify_gradient(model, functools.partial(cross_entropy, model), whole, part, lambda: (1.0, None)))
    return {
        "gradients": [parameter.grad for parameter in model.parameters()],
        "buffers": all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()),
        "random state": torch.equal(torch.get_rng_state(), drawn),
        "training": [layer.training for layer in model],
    }


def test_nothing_of_the_model_is_changed() -> None:
    """`verify` changes nothing of the model."""
    expected = {"gradients": [None] * 6, "buffers": True, "random state": True, "training": [True] * 4}
    assert WORLD.returned(traces) == [expected] * 2


# --- Trials and Trainers ----------------------------------------------------------------------------------------------


def run_trial(criterion: Any, **options: Any) -> str:
    model = network()
    callbacks = [DDPCallback(verify="first_batch", **options)]
    made = Trial(model, torch.optim.SGD(model.parameters(), 0.1), criterion, callbacks=callbacks, verbose=0)
    made.with_train_generator(DataLoader(samples(), SAMPLES)).to("cpu", torch.float64)
    return outcome(lambda: made.run(2))


def of_known(state: Any) -> torch.Tensor:
    return (state[torchbearer.Y_TRUE] != IGNORED).sum()


def mean_of_known(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, classes)


class KnownOnly(Net):
    """A mean over the targets that count."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=0)


class Summed(Net):
    """A sum over the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 10
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        return loss


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def run_trainer(module: Net | None = None, rows: Any = None, weight: Any = None, **options: Any) -> str:
    strategy: Any = CallbackStrategy(verify="first_batch", weight=weight)
    return outcome(lambda: fit(strategy, module, rows or loader(29, 8, shuffle=True), **options))


RUNS: dict[str, tuple[Callable[[], str], str]] = {
    "a Trial with torch's own": (lambda: run_trial(nn.CrossEntropyLoss()), PASSES),
    "a Trial with a sum": (lambda: run_trial(nn.CrossEntropyLoss(reduction="sum")), PASSES),
    "a Trial with weight": (lambda: run_trial(mean_of_known, weight=of_known), PASSES),
    "a Trial without weight": (lambda: run_trial(mean_of_known), DIFFERS),
    "a contrastive Trial": (lambda: run_trial(against_others), DIFFERS),
    "weight": (lambda: run_trainer(KnownOnly(), weight=lambda batch: (batch[1] != 0).sum()), PASSES),
    "accumulated": (lambda: run_trainer(accumulate_grad_batches=3), PASSES),
    "synchronized batch norm": (lambda: run_trainer(Normalized(), sync_batchnorm=True), PASSES),
    "a part over nothing": (
        lambda: run_trainer(NormalizedMaskedMean(), masked(29, 8, 0), weight=counted, sync_batchnorm=True),
        PASSES,
    ),
    "fewer samples than ranks": (lambda: run_trainer(None, loader(11, 1)), PASSES),
    "a sum": (lambda: run_trainer(Summed()), 'Say so (reduction="sum")'),
    "no weight": (lambda: run_trainer(KnownOnly(), loader(29, 8)), f"{DIFFERS}layers."),
    "batch norm": (lambda: run_trainer(Normalized()), "layers.0 normalizes by each process's part"),
    "by hand": (lambda: run_trainer(ByHand()), "needs automatic optimization"),
    "two loaders": (
        lambda: run_trainer(None, [loader(29, 8), loader(29, 8)]),
        "needs one loader, divided among the processes",
    ),
}


@WORLD
def runs() -> dict[str, str]:
    return {name: run() for name, (run, _) in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_verified_in_its_first_batch(name: str) -> None:
    for found in WORLD.returned(runs):
        assert_told(found[name], RUNS[name][1])


@WORLD
def trained(strategy: str = OURS) -> Any:
    """Values of steps and epochs, torchmetrics among them, do not see the batch that was computed again."""
    chosen: Any = CallbackStrategy(verify="first_batch") if strategy == OURS else strategy
    return fit(chosen, LogsAll())


@WORLD
def trained_by_a_sum(strategy: str = OURS) -> Any:
    """With two samples in the last batch."""
    chosen: Any = CallbackStrategy(reduction="sum", verify="first_batch") if strategy == OURS else strategy
    return fit(chosen, Summed(), loader(26, 8, shuffle=True))


def test_a_trainer_that_is_verified_trains_as_one_process() -> None:
    assert_as_on_one(trained)


def test_a_loss_that_is_a_sum_trains_as_on_one_process_where_the_strategy_knows() -> None:
    """`reduction="sum"` trains a sum as one process does."""
    assert_as_on_one(trained_by_a_sum)
