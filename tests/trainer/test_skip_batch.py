"""A bad batch costs a batch, not the run: with ``skip_batch`` N processes skip it as one process does.

A fault belongs to a sample, so it is on one rank, and on one process spoils the same batch. What one process does is
shown by plain Lightning with a module that returns ``None`` itself.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import HOSTNAME
from shared_worlds import in_ways
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from trainer_cases import RELATIVE, WIDE, Bodies, message_of, quiet
from trainers import CLASSES, FEATURES, Net, fit, loader
from ways import Way

import ddp_callbacks.data.bad_batches
from ddp_callbacks import LocalSGD
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)

BATCHES = 16
BY_SHARED_MEMORY = Way(tier="wide")
BY_GLOO = Way(3, gloo=True, tier="night")
NAN, INF = math.nan, math.inf


def faulty_data(samples: int, batch_size: int, seed: int, faults: tuple[float, ...] = (NAN, INF)) -> TensorDataset:
    """Each sample has a factor of its loss, which is NaN or infinite in one sample of some batches, not the first."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    factor = torch.ones(samples, dtype=torch.float64)
    for begin, fault in zip(draw.sample(range(2 * batch_size, samples, batch_size), len(faults)), faults, strict=True):
        factor[draw.randrange(begin, min(begin + batch_size, samples))] = fault
    return TensorDataset(x, y, factor)


def faulty_loader(batch_size: int = 7, seed: int = 3, batches: int = BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(faulty_data(batches * batch_size - 3, batch_size, seed), batch_size, **options)


# --- a Trainer --------------------------------------------------------------------------------------------------------


class Faulty(Net):
    """Logs in several ways.

    Args:
        returns_none: ``"early"``: before the forward, ``"late"``: in the middle; ``"never"``: the loss is not finite.
    """

    def __init__(self, returns_none: str = "never", **options: Any) -> None:
        super().__init__(**options)
        self.returns_none = returns_none
        self.count = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, factor = batch
        is_bad = not bool(factor.isfinite().all())
        self.log("begun", x[:, 0].mean(), on_step=True, on_epoch=True)
        if is_bad and self.returns_none == "early":
            return None
        self.observe()
        self.count.update((x[:, 1] > 0).double())
        self.log("count", self.count, on_step=False, on_epoch=True)
        logits = self(x)
        loss = (F.cross_entropy(logits, y, reduction="none") * factor).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        if is_bad and self.returns_none == "late":
            return None
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("done", x[:, 2].sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "extra": 1}

    def observe(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))


class Observes(Faulty):
    """Has a layer that sees the same on each process: its statistics tell how often it was called."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = nn.BatchNorm1d(2).double()
        self.register_buffer("seen", torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))

    def observe(self) -> None:
        self.norm(self.seen)


def per_step(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8), "interval": "step"}


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), 0.02)


class Masked(Net):
    """The mean over samples that are not of class 0; a part without one has a loss of 0 / 0, or returns ``None``."""

    def __init__(self, returns_none: bool) -> None:
        super().__init__()
        self.returns_none = returns_none

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        counts = (y != 0).double()
        if self.returns_none and not counts.any():
            return None
        loss = (F.cross_entropy(self(x), y, reduction="none") * counts).sum() / counts.sum()
        if counts.any():
            self.log("loss", loss, on_epoch=True)  # the whole batch counts, though only some ranks log
        return loss


def masked_loader() -> DataLoader[Any]:
    """Batches of 6: in most only the first sample counts, so that other parts have nothing; in one none does."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, FEATURES, dtype=torch.float64, generator=generator), torch.zeros(48, dtype=torch.int64)
    y[::6], y[3], y[30] = 1, 2, 0
    return DataLoader(TensorDataset(x, y), 6)


class Normalized(Faulty):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layers = nn.Sequential(nn.BatchNorm1d(FEATURES), *self.layers).double()


def fit_with(strategy: str, skip_batch: Any, module: Any, rows: Any = None, weight: Any = None, **options: Any) -> Any:
    """By ours with the option; or by one process without us, on which the module decides."""
    chosen: Any = CallbackStrategy(skip_batch=skip_batch, weight=weight) if strategy == "ours" else strategy
    if strategy != "ours":
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            output = step(batch, batch_idx)
            loss = output["loss"] if isinstance(output, dict) else output
            return None if loss is None or not loss.isfinite() else output

        module.training_step = training_step
    validations = [] if weight else [loader(13, 5, 9)]  # a weight would be that of their means, too
    return fit(chosen, module, rows or faulty_loader(), *validations, **options)


def counted(batch: Any) -> Any:
    return (batch[1] != 0).sum()


def enough_for_batchnorm() -> Any:
    return DataLoader(faulty_data(8 * BATCHES, 8, 6), 8)


def many_bad_ones() -> Any:
    return DataLoader(faulty_data(40 * 7 - 3, 7, 4, (NAN, INF) * 4), 7)


def smaller_than_the_world() -> Any:
    return faulty_loader(2, 5, 12)


SYNCHRONIZED: dict[str, Any] = {"sync_batchnorm": True}
SCENARIOS: dict[str, Callable[[str], Any]] = {
    "momentum": lambda by: fit_with(by, "non_finite", Faulty(scheduler=per_step)),
    "accumulating": lambda by: fit_with(by, "any", Faulty(optimizer=adam), accumulate_grad_batches=3),
    "none early": lambda by: fit_with(by, "no_loss", Faulty("early", scheduler=per_step)),
    "none late": lambda by: fit_with(by, "any", Faulty("late"), gradient_clip_val=0.1),
    "none early, accumulating": lambda by: fit_with(by, "any", Faulty("early"), accumulate_grad_batches=3),
    "synchronized batchnorm": lambda by: fit_with(by, "any", Normalized("late"), **SYNCHRONIZED),
    "nan with synchronized batchnorm": lambda by: fit_with(by, "non_finite", Normalized(), **SYNCHRONIZED),
    "many batches": lambda by: fit_with(by, "any", Faulty("late"), many_bad_ones()),
    "running statistics": lambda by: fit_with(by, "any", Observes(), enough_for_batchnorm()),
    "running statistics, none late": lambda by: fit_with(by, "any", Observes("late"), enough_for_batchnorm()),
    "small batches": lambda by: fit_with(by, "any", Faulty(), smaller_than_the_world()),
    "small batches, none early": lambda by: fit_with(by, "any", Faulty("early"), smaller_than_the_world()),
    "parts that count nothing": lambda by: fit_with(by, "any", Masked(False), masked_loader(), counted),
    "none of parts that count nothing": lambda by: fit_with(by, "any", Masked(True), masked_loader(), counted),
    "none of parts that count nothing, by default": lambda by: fit_with(
        by, None, Masked(True), masked_loader(), counted
    ),
}


# --- a Trial ----------------------------------------------------------------------------------------------------------


def weighted_loss(output: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(output, labels, reduction="none") * factor).mean()


def a_trial(strategy: str) -> Any:
    """One process trains without the batches that are to be skipped."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    callbacks = [DDPCallback(skip_batch="non_finite")] if strategy == "ours" else []
    made = Trial(model, adam(model), weighted_loss, metrics=["loss"], callbacks=callbacks, verbose=0)
    made.to("cpu", torch.float64)
    found = [(x, (y, factor)) for x, y, factor in faulty_loader(7, 8)]
    batches = [batch for batch in found if strategy == "ours" or batch[1][1].isfinite().all()]
    history = made.with_train_generator(DataLoader(batches, batch_size=None)).run(2)
    return {"loss": [epoch["loss"] for epoch in history], "parameters": dict(model.state_dict())}


SCENARIOS["a Trial"] = a_trial


# --- N processes and one ----------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """With a number in the place of NaN, which is equal to nothing."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value.double(), nan=123.0)
    return 123.0 if isinstance(value, float) and math.isnan(value) else value


def collecting() -> list[str]:
    """What the library says about batches from now on."""
    said: list[str] = []
    ddp_callbacks.data.bad_batches.say = lambda text, level: said.append(text)
    return said


@WORLD.runs(BY_SHARED_MEMORY, WIDE, BY_GLOO)
def all_scenarios() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What each gives, and what is said of it."""
    said, results = {}, {}
    for name, scenario in SCENARIOS.items():
        said[name] = collecting()
        results[name] = plain(scenario("ours"))
    return results, said


@once
def one_process(name: str) -> Any:
    with quiet():
        return plain(SCENARIOS[name]("auto"))


@pytest.mark.parametrize("name", SCENARIOS)
@in_ways(BY_SHARED_MEMORY, WIDE, BY_GLOO)
def test_batches_that_are_bad_on_one_process_are_skipped_by_all_as_on_one(way: Way, name: str) -> None:
    """With `skip_batch`, all skip what is bad on one."""
    for rank, (results, _) in enumerate(WORLD.returned(all_scenarios, way)):
        assert_equal(results[name], one_process(name), RELATIVE, f"rank {rank}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_skips_what_it_would_skip_by_returning_none(name: str) -> None:
    with quiet():
        assert_equal(plain(SCENARIOS[name]("ours")), one_process(name), relative=0.0)


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_each_skipped_batch_is_reported_once_with_rank_host_and_batch() -> None:
    """A message names each skipped batch, rank and host."""
    (_, told), (_, of_one) = WORLD.returned(all_scenarios, BY_SHARED_MEMORY)
    assert told["many batches"][-1].startswith("16 batches were skipped in this run, because of rank 0 for ")
    of_zero = told | {"many batches": told["many batches"][:-1]}
    assert not any(of_one.values())
    for name, said in of_zero.items():
        assert said or "parts that count nothing" in name, name
        for text in said:
            reason = rf"rank \d \(host {re.escape(HOSTNAME)}, pid \d+\): (training_step returned None|the loss is \w+)"
            assert re.fullmatch(rf"epoch \d, batch \d+ is skipped( \(.*\))?\. {reason}(; {reason})*", text), text
    kinds = [re.sub(r".*the loss is ", "", text) for text in of_zero["momentum"]]
    assert set(kinds) == {"NaN", "infinite"}
    assert all("training_step returned None" in text for text in of_zero["none early"])


# --- errors -----------------------------------------------------------------------------------------------------------


def without_the_option(**options: Any) -> None:
    rows = DataLoader(faulty_data(64, 8, 3, (NAN, NAN)), 8)
    fit(CallbackStrategy(**options), Faulty("early"), rows)  # type: ignore[arg-type]


def before_a_synchronized_layer() -> None:
    rows, module = DataLoader(faulty_data(80, 8, 3), 8), Normalized(returns_none="early")
    fit(CallbackStrategy(skip_batch="any"), module, rows, sync_batchnorm=True)  # type: ignore[arg-type]


def diverge(optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> None:
    model = nn.Linear(FEATURES, CLASSES).double()
    rows = DataLoader(TensorDataset(torch.full((12, FEATURES), NAN).double(), torch.arange(12) % CLASSES), 4)
    callbacks = [DDPCallback(skip_batch="non_finite")]
    made = Trial(model, optimizer(model), nn.CrossEntropyLoss(), metrics=["loss"], callbacks=callbacks, verbose=0)
    made.to("cpu", torch.float64).with_train_generator(rows).run(2)


def lbfgs(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters())


def with_lbfgs() -> None:
    fit(CallbackStrategy(skip_batch="any"), Net(optimizer=lbfgs), loader())  # type: ignore[arg-type]


ERRORS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "a local step": (
        lambda: without_the_option(sync=LocalSGD(every=50)),
        ("SkippedBatchError: ", "with local steps (sync=...) the processes do not meet in each step"),
    ),
    "a synchronized layer": (
        before_a_synchronized_layer,
        ("whether to skip the batch", "the statistics of layers.0"),
    ),
    "a Trial that diverges": (
        diverge,
        ("SkippedBatchError: all 3 batches of epoch 0 were skipped: their losses were not finite.",),
    ),
    "LBFGS in a Trial": (lambda: diverge(lbfgs), ('skip_batch="non_finite" does not work with LBFGS',)),
    "LBFGS in a Trainer": (with_lbfgs, ('skip_batch="any" does not work with LBFGS',)),
}


@WORLD
def errors() -> dict[str, str]:
    found = {name: message_of(run) for name, (run, _) in ERRORS.items()}
    return found | {"": message_of(without_the_option)}


def test_without_the_option_none_on_some_ranks_is_an_error_with_rank_host_and_remedy() -> None:
    """Without `skip_batch`, `None` on some ranks raises an error."""
    texts = [found[""] for found in WORLD.returned(errors)]
    (raised,) = (text for text in texts if text.startswith("SkippedBatchError"))
    (heard,) = (text for text in texts if text.startswith("PeerError"))
    rank = texts.index(raised)
    assert re.fullmatch(
        rf"SkippedBatchError: rank {rank} \(host {re.escape(HOSTNAME)}, pid \d+\): training_step returned None in "
        rf"epoch 0, batch \d, where rank {1 - rank} has a loss\. All processes must skip a batch, or none\. .*"
        r"To skip "
        r'the whole batch whenever one process returns None, use CallbackStrategy\(skip_batch="no_loss"\)\.',
        raised,
    )
    assert f"rank {rank} (host {HOSTNAME}" in heard and "failed with SkippedBatchError" in heard


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_skipped_is_an_error_on_all_and_no_hang(name: str) -> None:
    """What can't be skipped raises an error everywhere."""
    texts = [found[name] for found in WORLD.returned(errors)]
    assert "no error" not in texts
    assert any(all(words in text for words in ERRORS[name][1]) for text in texts), texts


# --- together with other settings -------------------------------------------------------------------------------------


@WORLD
def beside_others() -> Any:
    rows = DataLoader(faulty_data(80, 8, 3), 8)
    verified = fit(CallbackStrategy(skip_batch="any", verify="first_batch"), Faulty("late"), rows, loader(5, 2, 9))
    half = fit(CallbackStrategy(skip_batch="any"), Faulty("never"), rows, precision="bf16-mixed")
    return verified["global_step"], half["parameters"]


def test_verifying_the_first_batch_and_mixed_precision_go_together_with_skipping() -> None:
    """`skip_batch` works beside `verify` and mixed precision."""
    (verified, half), (steps, of_second) = WORLD.returned(beside_others)
    assert verified == steps == 20
    assert all(value.isfinite().all() for value in half.values())
    assert_equal(of_second, half, 0.0)
