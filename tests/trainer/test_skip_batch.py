"""A bad batch costs a batch, not the run: with ``skip_batch`` N processes skip it as one process does.

A fault belongs to a sample, so it is on one rank, and on one process spoils the same batch. What one process does is
shown by plain Lightning with a module that returns ``None`` itself.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
import torchmetrics
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import HOSTNAME, Nursery, noting_errors
from shared_worlds import in_ways
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial
from torchbearer.callbacks import StepLR
from trainer_cases import GLOO, RELATIVE, TWO, WIDE, Bodies, quiet
from trainers import CLASSES, FEATURES, Net, fit, loader
from ways import Way

import ddp_callbacks.data.skipping
from ddp_callbacks import LocalSGD
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)

BATCHES = 40
FAULTY = 0.05  # of the batches
NAN, INF = math.nan, math.inf


def faulty_data(samples: int, batch_size: int, seed: int, faults: tuple[float, ...] = (NAN, INF)) -> TensorDataset:
    """Each sample has a factor of its loss, which is NaN or infinite in one sample of some batches."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    factor = torch.ones(samples, dtype=torch.float64)
    batches = range(0, samples, batch_size)
    for begin in draw.sample(batches, max(2, round(FAULTY * len(batches)))):
        factor[draw.randrange(begin, min(begin + batch_size, samples))] = draw.choice(faults)
    return TensorDataset(x, y, factor)


def faulty_loader(batch_size: int = 7, seed: int = 3, batches: int = BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(faulty_data(batches * batch_size - 3, batch_size, seed), batch_size, **options)


# --- a Trainer --------------------------------------------------------------------------------------------------------


class Faulty(Net):
    """Logs in several ways.

    Args:
        returns_none: ``"early"``: before the forward, ``"late"``: in the middle; ``"never"``: the loss is not finite.
        decides: Whether it returns ``None`` in place of a loss that is not finite: one process without the option.
    """

    def __init__(self, returns_none: str = "never", decides: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.returns_none, self.decides = returns_none, decides
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
        return None if is_bad and self.decides else {"loss": loss, "extra": 1}

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
        return (F.cross_entropy(self(x), y, reduction="none") * counts).sum() / counts.sum()


def masked_loader() -> DataLoader[Any]:
    """Batches of 6: in most only the first sample counts, so that other parts have nothing; in one none does."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, FEATURES, dtype=torch.float64, generator=generator), torch.zeros(48, dtype=torch.int64)
    y[::6], y[3], y[30] = 1, 2, 0
    return DataLoader(TensorDataset(x, y), 6)


class Normalized(Faulty):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers = nn.Sequential(nn.BatchNorm1d(FEATURES), *self.layers).double()


SETTINGS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    # name: skip_batch, the module of (decides), options of fit
    "momentum": ("non_finite", lambda decides: Faulty("never", decides, scheduler=per_step), {}),
    "adam": ("any", lambda decides: Faulty("never", decides, optimizer=adam, scheduler=per_step), {}),
    "accumulating": ("non_finite", lambda decides: Faulty("never", decides), {"accumulate_grad_batches": 3}),
    "none early": ("no_loss", lambda decides: Faulty("early", scheduler=per_step), {}),
    "none late": ("any", lambda decides: Faulty("late"), {"gradient_clip_val": 0.1}),
    "none early, accumulating": ("any", lambda decides: Faulty("early"), {"accumulate_grad_batches": 3}),
    "synchronized batchnorm": ("any", lambda decides: Normalized(returns_none="late"), {"sync_batchnorm": True}),
    "nan with synchronized batchnorm": (
        "non_finite",
        lambda decides: Normalized(decides=decides),
        {"sync_batchnorm": True},
    ),
}


def given(strategy: str, skip_batch: Any, **options: Any) -> Any:
    """Ours with the option, or one process without us."""
    return CallbackStrategy(skip_batch=skip_batch, **options) if strategy == "ours" else strategy


def settings_of(strategy: str, name: str) -> Any:
    skip_batch, make, options = SETTINGS[name]
    module = make(strategy != "ours")
    return fit(given(strategy, skip_batch), module, faulty_loader(shuffle=True), loader(13, 5, 9), **options)


def running_statistics(strategy: str) -> Any:
    """Each process has enough samples of each batch for BatchNorm."""
    rows = DataLoader(faulty_data(8 * BATCHES, 8, 6), 8)
    return [
        fit(given(strategy, "any"), Observes(how, strategy != "ours"), rows, loader(5, 2, 9))
        for how in ("never", "early", "late")
    ]


def small_batches(strategy: str) -> Any:
    """Smaller than the world: some ranks compute another batch in their place."""
    return [
        fit(given(strategy, "any"), Faulty(how, strategy != "ours"), faulty_loader(4, 5, 12), loader(5, 2, 9))
        for how in ("never", "early", "late")
    ]


def parts_that_count_nothing(strategy: str) -> Any:
    def counted(batch: Any) -> Any:
        return (batch[1] != 0).sum()

    return [
        fit(given(strategy, "any", weight=counted), _decided(Masked(returns_none), strategy), masked_loader())
        for returns_none in (False, True)
    ]


def _decided(module: Any, strategy: str) -> Any:
    """With plain Lightning: a module that returns ``None`` in place of a loss that is not finite."""
    if strategy != "ours":
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            output = step(batch, batch_idx)
            return None if output is None or not output.isfinite() else output

        module.training_step = training_step
    return module


LIGHTNING: dict[str, Callable[[str], Any]] = {
    **{name: functools.partial(settings_of, name=name) for name in SETTINGS},
    "running statistics": running_statistics,
    "small batches": small_batches,
    "parts that count nothing": parts_that_count_nothing,
}


# --- a Trial ----------------------------------------------------------------------------------------------------------


def weighted_loss(output: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(output, labels, reduction="none") * factor).mean()


class LeavesOut(Callback):  # type: ignore[misc]
    """What one process without us would have to do: the closure ends, and metrics do not see the batch."""

    def on_init(self, state: Any) -> None:
        trial, metrics = state[torchbearer.SELF], state[torchbearer.METRIC_LIST]
        closure, process = trial.closure, metrics.process
        self.skipped = False

        def ending(state: Any) -> None:
            self.skipped = False
            try:
                closure(state)
            except ArithmeticError:
                self.skipped = True

        trial.closure = ending
        last: dict[str, Any] = {}

        def processing(data: Any) -> Any:
            if not self.skipped:
                last.update(process(data))
            return dict(last)

        metrics.process = processing

    def on_criterion(self, state: Any) -> None:
        if not state[torchbearer.LOSS].isfinite():
            raise ArithmeticError


def pairs(samples: int, batch_size: int, seed: int) -> Any:
    x, y, factor = faulty_data(samples, batch_size, seed).tensors
    rows = [(x[index], (y[index], factor[index])) for index in range(samples)]
    return DataLoader(rows, batch_size, shuffle=True)


def a_trial(strategy: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    first = DDPCallback(skip_batch="non_finite") if strategy == "ours" else LeavesOut()
    optimizer, callbacks = adam(model), [first, StepLR(10, 0.5, step_on_batch=True)]
    made = Trial(model, optimizer, weighted_loss, metrics=["loss"], callbacks=callbacks, verbose=0)
    made.to("cpu", torch.float64)
    torch.manual_seed(5)
    history = made.with_train_generator(pairs(BATCHES * 7 - 3, 7, 8)).run(2)
    kept = [{key: value for key, value in epoch.items() if not key.startswith("running_")} for epoch in history]
    return {"history": kept, "parameters": dict(model.state_dict())}


SCENARIOS = LIGHTNING | {"a Trial": a_trial}


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
    ddp_callbacks.data.skipping.say = lambda text, level: said.append(text)
    return said


@WORLD.runs(TWO, WIDE)
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
@in_ways(TWO, WIDE)
def test_batches_that_are_bad_on_one_process_are_skipped_by_all_as_on_one(way: Way, name: str) -> None:
    """With `skip_batch`, all skip what is bad on one."""
    for rank, (results, _) in enumerate(WORLD.returned(all_scenarios, way)):
        assert_equal(results[name], one_process(name), RELATIVE, f"rank {rank}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_skips_what_it_would_skip_by_returning_none(name: str) -> None:
    with quiet():
        assert_equal(plain(SCENARIOS[name]("ours")), one_process(name), relative=0.0)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_each_skipped_batch_is_reported_once_with_rank_host_and_batch() -> None:
    """A message names each skipped batch, rank and host."""
    (_, of_zero), (_, of_one) = WORLD.returned(all_scenarios)
    assert not any(of_one.values())
    for name, said in of_zero.items():
        assert said or name == "parts that count nothing", name
        for text in said:
            reason = rf"rank \d \(host {re.escape(HOSTNAME)}, pid \d+\): (training_step returned None|the loss is \w+)"
            assert re.fullmatch(rf"epoch \d, batch \d+ is skipped( \(.*\))?\. {reason}(; {reason})*", text), text
    kinds = [re.sub(r".*the loss is ", "", text) for text in of_zero["momentum"]]
    assert set(kinds) == {"NaN", "infinite"}
    assert all("training_step returned None" in text for text in of_zero["none early"])


class CountsMessages(Net):
    """How many collectives have been started when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.at.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@WORLD.runs(GLOO)
def messages() -> list[set[int]]:
    counts = []
    for skip_batch in (None, "non_finite", "any"):
        module = CountsMessages()
        fit(CallbackStrategy(skip_batch=skip_batch), module, loader(64, 8), max_epochs=1)
        counts.append({after - before for before, after in itertools.pairwise(module.at[2:])})
    return counts


def test_the_option_costs_one_message_in_each_step_and_nothing_without_it() -> None:
    """`skip_batch` costs one message in each step."""
    assert WORLD.returned(messages, GLOO) == [[{1}, {2}, {2}]] * 2  # the gradients, and the vote


# --- errors -----------------------------------------------------------------------------------------------------------


def without_the_option(**options: Any) -> None:
    rows = DataLoader(faulty_data(64, 8, 3, (NAN,)), 8)
    fit(CallbackStrategy(**options), Faulty("early"), rows)  # type: ignore[arg-type]


def before_a_synchronized_layer() -> None:
    rows, module = DataLoader(faulty_data(80, 8, 3), 8), Normalized(returns_none="early")
    fit(CallbackStrategy(skip_batch="any"), module, rows, sync_batchnorm=True)  # type: ignore[arg-type]


def diverge() -> None:
    model = nn.Linear(FEATURES, CLASSES).double()
    rows = DataLoader(TensorDataset(torch.full((12, FEATURES), NAN).double(), torch.arange(12) % CLASSES), 4)
    callbacks = [DDPCallback(skip_batch="non_finite")]
    made = Trial(model, adam(model), nn.CrossEntropyLoss(), metrics=["loss"], callbacks=callbacks, verbose=0)
    made.to("cpu", torch.float64).with_train_generator(rows).run(2)


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
}


def fail(name: str, gloo: bool) -> None:
    os.environ[SWITCH] = "0" if gloo else "1"
    run = ERRORS[name][0] if name else without_the_option
    with quiet(), noting_errors():
        run()


def errors_of(nursery: Nursery, folder: Path, name: str = "", gloo: bool = False) -> list[str]:
    """What each of two ranks has raised."""
    ranks = nursery.run(fail, 2, folder, name, gloo)
    assert [rank.code for rank in ranks] == [1, 1], [rank.stderr for rank in ranks]
    return [": ".join(rank.notes["error"]) for rank in ranks]


@pytest.mark.parametrize("gloo", [False, True])
def test_without_the_option_none_on_some_ranks_is_an_error_with_rank_host_and_remedy(
    nursery: Nursery, tmp_path: Path, gloo: bool
) -> None:
    """Without `skip_batch`, `None` on some ranks raises an error."""
    errors = errors_of(nursery, tmp_path, gloo=gloo)
    (raised,) = (text for text in errors if text.startswith("SkippedBatchError"))
    (heard,) = (text for text in errors if text.startswith("PeerError"))
    rank = errors.index(raised)
    assert re.fullmatch(
        rf"SkippedBatchError: rank {rank} \(host {re.escape(HOSTNAME)}, pid \d+\): training_step returned None in "
        rf"epoch 0, batch \d, where rank {1 - rank} has a loss\. All processes must skip a batch, or none\. To skip "
        r'the whole batch whenever one process returns None, use CallbackStrategy\(skip_batch="no_loss"\)\.',
        raised,
    )
    assert f"rank {rank} (host {HOSTNAME}" in heard and "failed with SkippedBatchError" in heard


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_skipped_is_an_error_on_all_and_no_hang(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """What can't be skipped raises an error everywhere."""
    texts = errors_of(nursery, tmp_path, name)
    assert any(all(words in text for words in ERRORS[name][1]) for text in texts), texts


# --- together with other settings -------------------------------------------------------------------------------------


def late() -> DataLoader[Any]:
    return DataLoader(faulty_data(80, 8, 3), 8)


@WORLD
def verified_and_in_half_precision() -> Any:
    collecting()
    verified = fit(CallbackStrategy(skip_batch="any", verify="first_batch"), Faulty("late"), late(), loader(5, 2, 9))
    half = fit(CallbackStrategy(skip_batch="any"), Faulty("never"), late(), precision="bf16-mixed")
    return plain(verified), half["parameters"]


def test_verifying_the_first_batch_and_mixed_precision_go_together_with_skipping() -> None:
    """`skip_batch` works beside `verify` and mixed precision."""
    with quiet():
        expected = plain(fit("auto", Faulty("late"), late(), loader(5, 2, 9)))
    (first, half), (second, of_second) = WORLD.returned(verified_and_in_half_precision)
    assert_equal([first, second], [expected, expected], RELATIVE)
    assert all(value.isfinite().all() for value in half.values())
    assert_equal(of_second, half, 0.0)
