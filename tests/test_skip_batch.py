"""A bad batch costs a batch, not the run: with ``skip_batch`` N processes skip it as one process does.

A fault belongs to a sample, so it is on one rank, and on one process spoils the same batch. What one process does is
shown by plain Lightning with a module that returns ``None`` itself.
"""

from __future__ import annotations

import functools
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
from distributed import run_distributed
from lightning_scenarios import CLASSES, FEATURES, Net, fit, loader, outcome, quiet, trainer
from nursery import HOSTNAME, Nursery, noting_errors
from test_equivalence import assert_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial
from torchbearer.callbacks import StepLR
from two_hosts import live_on_hosts

import ddp_callbacks.data.skipping
from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.data.skipping import BadBatches, Fault
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results("world")]

RELATIVE = 1e-10
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
    "accumulating adam": ("any", lambda decides: Faulty("late", optimizer=adam), {"accumulate_grad_batches": 2}),
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


class Steps(Callback):  # type: ignore[misc]
    """Counts events."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"on_backward": 0, "on_step_training": 0}

    def on_backward(self, state: Any) -> None:
        self.counts["on_backward"] += 1

    def on_step_training(self, state: Any) -> None:
        self.counts["on_step_training"] += 1


def pairs(samples: int, batch_size: int, seed: int) -> Any:
    x, y, factor = faulty_data(samples, batch_size, seed).tensors
    rows = [(x[index], (y[index], factor[index])) for index in range(samples)]
    return DataLoader(rows, batch_size, shuffle=True)


def trial(strategy: str, optimizer: Any, callbacks: Any = (), **options: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    steps = Steps()
    first = DDPCallback(skip_batch="non_finite", **options) if strategy == "ours" else LeavesOut()
    made = Trial(
        model,
        optimizer(model.parameters()),
        weighted_loss,
        metrics=["loss"],
        callbacks=[first, steps, *callbacks],
        verbose=0,
    ).to("cpu", torch.float64)
    torch.manual_seed(5)
    made.with_train_generator(pairs(BATCHES * 7 - 3, 7, 8))
    history = made.run(2)
    kept = [{key: value for key, value in epoch.items() if not key.startswith("running_")} for epoch in history]
    return {"history": kept, "parameters": dict(model.state_dict()), "counts": steps.counts}


def momentum_in_a_trial(strategy: str) -> Any:
    return trial(strategy, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), [StepLR(10, 0.5, step_on_batch=True)])


def adam_in_a_trial(strategy: str) -> Any:
    return trial(strategy, lambda p: torch.optim.Adam(p, 0.02))


TORCHBEARER: dict[str, Callable[[str], Any]] = {
    "a Trial with momentum": momentum_in_a_trial,
    "a Trial with Adam": adam_in_a_trial,
}
SCENARIOS = LIGHTNING | TORCHBEARER


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


def run_all(layout: tuple[int, ...]) -> Any:
    if layout:
        live_on_hosts(layout, resolve_group())
    said, results = {}, {}
    with quiet():
        for name, scenario in SCENARIOS.items():
            said[name] = collecting()
            results[name] = plain(scenario("ours"))
    return results, said


WORLDS = {
    "two by shared memory": (2, ()),
    "two hosts": (2, (1, 1)),
    "three on two hosts": (3, (2, 1)),
    "four": (4, ()),
}
WIDE = [pytest.param(name, marks=pytest.mark.wide) for name in ("three on two hosts", "four")]
TWO = ["two by shared memory", "two hosts"]


@functools.cache
def on_ranks(world: str) -> list[Any]:
    world_size, layout = WORLDS[world]
    return run_distributed(run_all, world_size, layout)


@functools.cache
def one_process(name: str) -> Any:
    with quiet():
        return plain(SCENARIOS[name]("auto"))


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world", [*TWO, *WIDE])
def test_batches_that_are_bad_on_one_process_are_skipped_by_all_as_on_one(world: str, name: str) -> None:
    for rank, (results, _) in enumerate(on_ranks(world)):
        assert_equal(results[name], one_process(name), RELATIVE, f"rank {rank}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_one_skips_what_it_would_skip_by_returning_none(name: str) -> None:
    with quiet():
        assert_equal(plain(SCENARIOS[name]("ours")), one_process(name), relative=0.0)


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", TWO)
def test_each_skipped_batch_is_reported_once_with_rank_host_and_batch(world: str) -> None:
    (_, of_zero), (_, of_one) = on_ranks(world)
    assert not any(of_one.values())
    for name, said in of_zero.items():
        assert said or name == "parts that count nothing", name
        for text in said:
            reason = rf"rank \d \(host {re.escape(HOSTNAME)}, pid \d+\): (training_step returned None|the loss is \w+)"
            assert re.fullmatch(rf"epoch \d, batch \d+ is skipped( \(.*\))?\. {reason}(; {reason})*", text), text
    kinds = [re.sub(r".*the loss is ", "", text) for text in of_zero["momentum"]]
    assert set(kinds) == {"NaN", "infinite"}
    assert all("training_step returned None" in text for text in of_zero["none early"])


def test_many_skipped_batches_are_reported_now_and_then_and_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ddp_callbacks.data.skipping, "say", lambda text, level: said.append(text))
    bad = BadBatches(None)
    for batch in range(10_000):
        bad.report(bad.agree(Fault.NAN, 1.0), f"epoch 0, batch {batch}")
    bad.close()
    assert len(said) == 10 + 9 + 1
    assert f"epoch 0, batch 0 is skipped. rank 0 (host {HOSTNAME}, pid {os.getpid()}): the loss is NaN" == said[0]
    assert said[-2].startswith(
        "epoch 0, batch 9999 is skipped (10000 so far; not each is reported from now on). rank 0"
    )
    assert said[-1] == "10000 batches were skipped in this run, because of rank 0 for 10000"


# --- without the option -----------------------------------------------------------------------------------------------


def errors_of(nursery: Nursery, folder: Path, body: Callable[..., None], *args: Any) -> list[str]:
    """What each of two ranks has raised."""
    ranks = nursery.run(body, 2, folder, *args)
    assert [rank.code for rank in ranks] == [1, 1], [rank.stderr for rank in ranks]
    return [": ".join(rank.notes["error"]) for rank in ranks]


def fail_without_the_option(over_gloo: bool, every: int) -> None:
    if over_gloo:
        os.environ[SWITCH] = "0"
    rows = DataLoader(faulty_data(64, 8, 3, (NAN,)), 8)
    with quiet(), noting_errors():
        fit(CallbackStrategy(sync=LocalSGD(every=every) if every else "every_step"), Faulty("early"), rows)


@pytest.mark.parametrize("over_gloo", [False, True])
def test_without_the_option_none_on_some_ranks_is_an_error_with_rank_host_and_remedy(
    nursery: Nursery, tmp_path: Path, over_gloo: bool
) -> None:
    errors = errors_of(nursery, tmp_path, fail_without_the_option, over_gloo, 0)
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


def test_none_in_a_local_step_is_an_error_with_rank_host_and_remedy(nursery: Nursery, tmp_path: Path) -> None:
    errors = errors_of(nursery, tmp_path, fail_without_the_option, False, 50)
    raised = next(text for text in errors if text.startswith("SkippedBatchError"))
    assert f"rank {errors.index(raised)} (host {HOSTNAME}, pid " in raised
    assert "with local steps (sync=...) the processes do not meet in each step" in raised


class CountsMessages(Net):
    """How many collectives have been started when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.at.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


def count_messages() -> list[list[int]]:
    os.environ[SWITCH] = "0"
    counts = []
    with quiet():
        for skip_batch in (None, "non_finite", "any"):
            module = CountsMessages()
            fit(CallbackStrategy(skip_batch=skip_batch), module, loader(64, 8), max_epochs=1)
            counts.append([after - before for before, after in zip(module.at[2:], module.at[3:], strict=False)])
    return counts


def test_the_option_costs_one_message_in_each_step_and_nothing_without_it() -> None:
    for off, non_finite, either in run_distributed(count_messages, 2):
        assert off == [1] * len(off)  # the gradients
        assert non_finite == either == [2] * len(off)


# --- together with other settings -------------------------------------------------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), 0.1)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Manual, 'skip_batch="any" needs automatic optimization: Manual optimizes manually'),
        (functools.partial(Net, optimizer=lbfgs), 'skip_batch="any" does not work with LBFGS'),
    ],
)
def test_modules_that_take_steps_in_another_way_are_refused_by_name(module: Any, says: str) -> None:
    with quiet(), pytest.raises(ConfigurationError, match=re.escape(says)):
        fit(CallbackStrategy(skip_batch="any"), module())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: CallbackStrategy(skip_batch="none"),
            'skip_batch must be None, "no_loss" (training_step returned None)',
        ),
        (lambda: CallbackStrategy(skip_batch="any", sync=LocalSGD(every=8)), "they do not meet in each step"),
        (lambda: DDPCallback(skip_batch="non_finite", sync=DiLoCo(every=8)), "they do not meet in each step"),
        (lambda: DDPCallback(skip_batch="any"), 'skip_batch must be None or "non_finite" in a Trial'),
        (lambda: DDPCallback(skip_batch="nan"), "skip_batch must be None"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_a_remedy(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make()


def test_the_option_comes_from_a_command_line() -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    args = ["--trainer.strategy=ddp_callbacks.lightning.CallbackStrategy", "--trainer.strategy.skip_batch=any"]
    with quiet():
        made = LightningCLI(Net, args=[*args, "--trainer.accelerator=cpu"], run=False).trainer.strategy
    assert made._skip_batch == "any"


def other_settings() -> Any:
    collecting()
    differing = ""
    late = DataLoader(faulty_data(80, 8, 3), 8)
    with quiet():
        verified = fit(CallbackStrategy(skip_batch="any", verify="first_batch"), Faulty("late"), late, loader(5, 2, 9))
        half = fit(CallbackStrategy(skip_batch="any"), Faulty("never"), late, precision="bf16-mixed")
        try:
            fit(CallbackStrategy(skip_batch="any" if dist.get_rank() else None), Net())
        except MismatchError as error:
            differing = str(error)
    return plain(verified), half["parameters"], differing


@functools.cache
def with_other_settings() -> list[Any]:
    return run_distributed(other_settings, 2)


def test_verifying_the_first_batch_and_skipping_others_go_together() -> None:
    with quiet():
        expected = plain(fit("auto", Faulty("late"), DataLoader(faulty_data(80, 8, 3), 8), loader(5, 2, 9)))
    for verified, *_ in with_other_settings():
        assert_equal(verified, expected, RELATIVE)


def test_parameters_stay_finite_in_mixed_precision() -> None:
    (_, first, _), (_, second, _) = with_other_settings()
    assert all(value.isfinite().all() for value in first.values())
    assert_equal(first, second, 0.0)


def test_ranks_with_different_settings_do_not_train() -> None:
    for _, _, text in with_other_settings():
        assert "skip_batch: None on rank 0; any on rank 1" in text


def return_none_before_a_synchronized_layer() -> None:
    rows = DataLoader(faulty_data(80, 8, 3), 8)
    with quiet(), noting_errors():
        fit(CallbackStrategy(skip_batch="any"), Normalized(returns_none="early"), rows, sync_batchnorm=True)


def test_none_before_a_synchronized_batchnorm_is_an_error_and_no_hang(nursery: Nursery, tmp_path: Path) -> None:
    texts = errors_of(nursery, tmp_path, return_none_before_a_synchronized_layer)
    assert any("whether to skip the batch" in text and "the statistics of layers.0" in text for text in texts), texts


# --- a Trial ----------------------------------------------------------------------------------------------------------


def diverge() -> None:
    model = nn.Linear(FEATURES, CLASSES).double()
    rows = DataLoader(TensorDataset(torch.full((12, FEATURES), NAN).double(), torch.arange(12) % CLASSES), 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    callbacks = [DDPCallback(skip_batch="non_finite")]
    made = Trial(model, optimizer, nn.CrossEntropyLoss(), metrics=["loss"], callbacks=callbacks, verbose=0)
    made.to("cpu", torch.float64).with_train_generator(rows)
    with noting_errors():
        made.run(2)


def test_a_trial_all_of_whose_batches_are_bad_stops_everywhere(nursery: Nursery, tmp_path: Path) -> None:
    expected = "all 3 batches of epoch 0 were skipped: their losses were not finite."
    texts = errors_of(nursery, tmp_path, diverge)
    assert any(text.startswith(f"SkippedBatchError: {expected}") for text in texts)
    assert all(expected in text for text in texts)


# --- a long run -------------------------------------------------------------------------------------------------------


class Quiet(Faulty):
    """Returns ``None`` at a NaN, and a loss that is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, factor = batch
        return None if factor.isnan().any() else (F.cross_entropy(self(x), y, reduction="none") * factor).mean()


def train_long(steps: int, over_gloo: bool) -> Any:
    if over_gloo:
        os.environ[SWITCH] = "0"
    said = collecting()
    rows = faulty_data(4 * steps, 4, 11)
    with quiet():
        made = trainer(CallbackStrategy(skip_batch="any"), max_epochs=1, logger=False)
        module = Quiet(optimizer=adam)
        made.fit(module, DataLoader(rows, 4))
    return outcome(made, module)["parameters"], made.global_step, said


@pytest.mark.parametrize(
    ("steps", "over_gloo"), [(301, False), (301, True), pytest.param(10_000, False, marks=pytest.mark.wide)]
)
def test_a_run_with_a_bad_batch_in_twenty_ends_with_equal_replicas(steps: int, over_gloo: bool) -> None:
    (first, count, said), (second, *_) = run_distributed(train_long, 2, steps, over_gloo)
    assert count == steps
    assert all(value.isfinite().all() for value in first.values())
    assert_equal(first, second, 0.0)
    skipped = round(FAULTY * steps)
    assert said[-1].startswith(f"{skipped} batches were skipped in this run, because of rank 0 for ")
