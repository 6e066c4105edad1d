"""verify="first_batch": what cannot be exact is named, and what is exact passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchbearer
from distributed import run_distributed
from lightning_scenarios import LogsAll, Net, Normalized, NormalizedMaskedMean, counted, fit, loader, masked, quiet
from test_equivalence import assert_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchbearer import Trial

from ddp_callbacks.batch_norm import BatchNormSynchronizer
from ddp_callbacks.data.sharding import shard_loader
from ddp_callbacks.data.shares import BatchSize
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback
from ddp_callbacks.verification import check_verify, verify_gradient

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD_SIZE = 3
SAMPLES = 12  # compared in parts of 2, 4 and 6 samples
IGNORED = -100

Loss = Callable[[nn.Module, Any], torch.Tensor]
Case = Callable[[], Any]

cases: dict[str, Case] = {}


def case(function: Case) -> Case:
    cases[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    return {name: function() for name, function in cases.items()}


@functools.cache
def by_rank() -> list[dict[str, Any]]:
    return run_distributed(run_cases, WORLD_SIZE)


def outcome(call: Callable[[], Any]) -> str:
    """``"passes"``, or the error."""
    try:
        call()
    except (MismatchError, ConfigurationError) as error:
        return f"{type(error).__name__}: {error}"
    return "passes"


def result_of(function: Case) -> Any:
    """What all ranks saw alike."""
    results = [results[function.__name__] for results in by_rank()]
    assert results[1:] == results[:-1]
    return results[0]


# --- own loops ------------------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    """Samples of five features, a class of four, and every third class unknown."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    classes = torch.randint(4, (SAMPLES,), generator=generator)
    classes[::3] = IGNORED
    return TensorDataset(inputs, classes)


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


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each sample against all others of the batch."""
    embedded = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def verify(
    model: nn.Module,
    loss: Loss,
    weight_of: Callable[[Any], float] | None = None,
    batches_of: Any = None,
    batch_size: BatchSize = "global",
) -> str:
    batches = iter(shard_loader(DataLoader(samples(), SAMPLES) if batches_of is None else batches_of, batch_size))
    next(batches)
    first = batches.first_batch()

    def weight() -> tuple[float, float | None]:
        if weight_of is None:
            return first.share.local, first.share.total
        return weight_of(first.part) if first.share.local else 0.0, None

    return outcome(lambda: verify_gradient(model, functools.partial(loss, model), first.whole, first.part, weight))


def known(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


@case
def exact_losses() -> Any:
    return {
        "mean over samples": verify(network(), cross_entropy),
        "dropout": verify(network(nn.Dropout(0.5)), cross_entropy),
        "known targets, weighed": verify(network(), known_only, known),
        "a stream": verify(network(), cross_entropy, batches_of=DataLoader(Stream(), SAMPLES)),
        "shuffled, workers": verify(
            network(), cross_entropy, batches_of=DataLoader(samples(), SAMPLES, shuffle=True, num_workers=1)
        ),
        "fewer samples than ranks": verify(network(), cross_entropy, batches_of=DataLoader(samples(), 2)),
        "whole batches of each rank": verify(network(), cross_entropy, None, DataLoader(samples(), 3), "per_process"),
        "padded to the longest of a part": verify(
            network(), lengths, batches_of=DataLoader(samples(), SAMPLES, collate_fn=padded)
        ),
    }


def padded(samples: list[Any]) -> Any:
    """Inputs of different lengths, by classes, padded to the longest."""
    inputs = [sample[: 1 + int(label) % 5] for sample, label in samples]
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack([label for _, label in samples])


def lengths(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(F.pad(inputs, (0, 5 - inputs.shape[1]))), labels.clamp(min=0))


def test_losses_that_are_means_over_samples_or_rightly_weighed_pass() -> None:
    assert set(result_of(exact_losses).values()) == {"passes"}, result_of(exact_losses)


@case
def inexact_losses() -> Any:
    return {
        "contrastive": verify(network(), contrastive),
        "known targets": verify(network(), known_only),
        "wrong weight": verify(network(), known_only, lambda batch: known(batch) + 1),
        "sum": verify(network(), summed, batches_of=DataLoader(samples(), 6)),
        "batch norm": verify(network(nn.BatchNorm1d(6)), cross_entropy),
    }


@pytest.mark.parametrize("name", ["contrastive", "known targets", "wrong weight"])
def test_a_loss_that_is_no_mean_over_samples_is_named_with_the_parameter_and_weight(name: str) -> None:
    message = result_of(inexact_losses)[name]
    assert message.startswith("MismatchError: the gradient of the first batch on 3 processes is not that of one")
    assert ".weight differs by up to " in message or ".bias differs by up to " in message
    assert "give weight=, or correct it" in message


def test_a_sum_over_samples_is_told_as_one() -> None:
    says = (
        'Added up without weights the gradients are right: the loss is a sum over the samples. Say so (reduction="sum")'
    )
    assert says in result_of(inexact_losses)["sum"]


@case
def equal_parts() -> Any:
    """Each of the equal parts that training would take has as many known targets."""
    return verify(network(), known_only, batches_of=DataLoader(alternating(), SAMPLES))


def alternating() -> TensorDataset:
    inputs, classes = samples().tensors
    return TensorDataset(inputs, torch.where(torch.arange(SAMPLES) % 4 < 2, classes.clamp(min=0), IGNORED))


def test_a_wrong_weight_shows_where_equal_parts_would_hide_it() -> None:
    known_in = (alternating().tensors[1] != IGNORED).view(WORLD_SIZE, -1).sum(1)
    assert len(set(known_in.tolist())) == 1
    assert result_of(equal_parts).startswith("MismatchError: the gradient of the first batch")


def test_batch_norm_by_parts_is_named_with_its_layer() -> None:
    assert (
        "1 normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True"
        in (result_of(inexact_losses)["batch norm"])
    )


def test_the_difference_is_that_of_one_process() -> None:
    """The figure in the message, worked out here from the parts."""
    whole = gradients(known_only, slice(0, SAMPLES))
    parts = [gradients(known_only, part) for part in (slice(0, 2), slice(2, 6), slice(6, 12))]
    shares = (2 / 12, 4 / 12, 6 / 12)
    sums = [sum(share * part for share, part in zip(shares, same, strict=True)) for same in zip(*parts, strict=True)]
    largest = max(float((own - other).abs().max()) for own, other in zip(sums, whole, strict=True))
    assert f"differs by up to {largest:.2g} " in result_of(inexact_losses)["known targets"]


def gradients(loss: Loss, part: slice) -> Any:
    model = network()
    return torch.autograd.grad(loss(model, samples()[part]), list(model.parameters()))


@case
def synchronized_batch_norm() -> Any:
    outcomes = []
    for batch_size in (SAMPLES, 2):  # of two samples one rank has none
        model = network(nn.BatchNorm1d(6))
        counts = batch_size == SAMPLES or torch.distributed.get_rank() < batch_size
        synchronizer = BatchNormSynchronizer(model, counts=lambda counts=counts: counts)
        outcomes.append(verify(model, cross_entropy, batches_of=DataLoader(samples(), batch_size)))
        synchronizer.close()
    return outcomes


def test_synchronized_batch_norm_passes() -> None:
    assert result_of(synchronized_batch_norm) == ["passes", "passes"]


@case
def at_random() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, (F.dropout(batch[0], 0.5), batch[1]))

    return verify(network(), loss)


def test_a_model_that_draws_at_random_cannot_be_compared_and_that_is_said() -> None:
    assert "The model is random" in result_of(at_random)


@case
def traces() -> Any:
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn = torch.get_rng_state()
    whole = samples()[:]
    part = samples()[torch.distributed.get_rank() :: WORLD_SIZE]
    outcome(lambda: verify_gradient(model, functools.partial(cross_entropy, model), whole, part, lambda: (1.0, None)))
    return {
        "gradients": [parameter.grad for parameter in model.parameters()],
        "buffers": all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()),
        "random state": torch.equal(torch.get_rng_state(), drawn),
        "training": [layer.training for layer in model],
    }


def test_nothing_of_the_model_is_changed() -> None:
    assert result_of(traces) == {
        "gradients": [None] * 6,
        "buffers": True,
        "random state": True,
        "training": [True] * 4,
    }


# --- Torchbearer ----------------------------------------------------------------------------------------------------


def trial(criterion: Any, **options: Any) -> Trial:
    model = network()
    callbacks = [DDPCallback(verify="first_batch", **options)]
    made = Trial(model, torch.optim.SGD(model.parameters(), 0.1), criterion, callbacks=callbacks, verbose=0)
    return made.with_train_generator(DataLoader(samples(), SAMPLES)).to("cpu", torch.float64)


def against_others(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    embedded = F.normalize(outputs, dim=1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


@case
def trials() -> Any:
    def of_known(state: Any) -> torch.Tensor:
        return (state[torchbearer.Y_TRUE] != IGNORED).sum()

    def mean_of_known(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, classes)

    made = trial(nn.CrossEntropyLoss())
    return {
        "torch's own": outcome(lambda: made.run(2)),
        "its history": [len(made.state[torchbearer.HISTORY])],
        "sum": outcome(lambda: trial(nn.CrossEntropyLoss(reduction="sum")).run(1)),
        "weight": outcome(lambda: trial(mean_of_known, weight=of_known).run(1)),
        "no weight": outcome(lambda: trial(mean_of_known).run(1)),
        "contrastive": outcome(lambda: trial(against_others).run(1)),
    }


def test_a_trial_is_verified_in_its_first_batch() -> None:
    results = result_of(trials)
    assert [results[name] for name in ("torch's own", "its history", "sum", "weight")] == [
        "passes",
        [2],
        "passes",
        "passes",
    ]
    for name in ("no weight", "contrastive"):
        assert results[name].startswith("MismatchError: the gradient of the first batch on 3 processes is not that")


# --- Lightning ------------------------------------------------------------------------------------------------------


class KnownOnly(Net):
    """A mean over the targets that count."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, classes = batch
        return F.cross_entropy(self(inputs), classes, ignore_index=0)


class Summed(Net):
    """A sum over the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, classes = batch
        loss = F.cross_entropy(self(inputs), classes, reduction="sum") / 10
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        return loss


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def fit_verified(module: Net | None = None, *loaders: Any, weight: Any = None, **options: Any) -> str:
    strategy = CallbackStrategy(verify="first_batch", weight=weight)
    return outcome(lambda: fit(strategy, module, *(loaders or (loader(29, 8, shuffle=True),)), **options))  # type: ignore[arg-type]


@case
def trainers() -> Any:
    with quiet():
        return {
            "verified": fit(CallbackStrategy(verify="first_batch"), LogsAll()),  # type: ignore[arg-type]
            "weight": fit_verified(KnownOnly(), weight=lambda batch: (batch[1] != 0).sum()),
            "accumulated": fit_verified(accumulate_grad_batches=3),
            "synchronized batch norm": fit_verified(Normalized(), sync_batchnorm=True),
            "a part over nothing": fit_verified(
                NormalizedMaskedMean(), masked(29, 8, 0), weight=counted, sync_batchnorm=True
            ),
            "fewer samples than ranks": fit_verified(None, loader(11, 2)),
            "summed": fit(CallbackStrategy(reduction="sum", verify="first_batch"), Summed(), ragged()),  # type: ignore[arg-type]
            "no reduction": fit_verified(Summed()),
            "no weight": fit_verified(KnownOnly()),
            "batch norm": fit_verified(Normalized()),
            "by hand": fit_verified(ByHand()),
            "two loaders": fit_verified(None, [loader(29, 8), loader(29, 8)]),
        }


def test_a_trainer_that_is_verified_trains_as_one_process() -> None:
    """Values of steps and epochs, torchmetrics among them, do not see the batch that was computed again."""
    with quiet():
        expected = fit("auto", LogsAll())
    for results in by_rank():
        assert_equal(results["trainers"]["verified"], expected, 1e-10)
        for name in (
            "weight",
            "accumulated",
            "synchronized batch norm",
            "a part over nothing",
            "fewer samples than ranks",
        ):
            assert results["trainers"][name] == "passes", name


def ragged() -> DataLoader[Any]:
    return loader(26, 8, shuffle=True)  # two samples in the last batch, of which one rank has none


def test_a_loss_that_is_a_sum_trains_as_on_one_process_where_the_strategy_knows() -> None:
    with quiet():
        expected = fit("auto", Summed(), ragged())
    for results in by_rank():
        assert_equal(results["trainers"]["summed"], expected, 1e-10)
        assert 'Say so (reduction="sum")' in results["trainers"]["no reduction"]


def test_a_trainer_whose_loss_is_no_mean_over_samples_ends_at_its_first_batch() -> None:
    for results in by_rank():
        assert "processes is not that of one process: that of parameter layers." in results["trainers"]["no weight"]
        assert "layers.0 normalizes by each process's part" in results["trainers"]["batch norm"]


def test_what_cannot_be_verified_says_so() -> None:
    for results in by_rank():
        assert "needs automatic optimization" in results["trainers"]["by hand"]
        assert "ByHand optimizes manually" in results["trainers"]["by hand"]
        assert "needs one loader, divided among the processes" in results["trainers"]["two loaders"]


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_loss_is_a_mean_or_a_sum() -> None:
    with pytest.raises(ConfigurationError, match="got 'none'"):
        CallbackStrategy(reduction="none")
    with pytest.raises(ConfigurationError, match="Use one of the two"):
        CallbackStrategy(reduction="sum", weight=len)


def test_verify_takes_the_first_batch_or_nothing() -> None:
    check_verify(None, "every_step")
    with pytest.raises(ConfigurationError, match=r'must be None or "first_batch" .*, got True'):
        check_verify(True, "every_step")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="compares synchronized gradients, but sync="):
        check_verify("first_batch", object())
