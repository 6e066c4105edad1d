"""Logged values are complete on every rank at moments that all ranks know, and a read communicates nothing."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from kit.compare import assert_equal
from kit.ranks import run_distributed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from shared_worlds import by_rank
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric
from trainer_cases import GLOO, OURS, RELATIVE, TWO, Bodies, on_one, quiet
from trainer_hooks import HOOKS, IN_A_STEP
from trainers import CLASSES, FEATURES, LogsAll, Net, fit, folder, loader, trainer
from trainers import Record as Lines

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.lightning import CallbackStrategy, decisions
from ddp_callbacks.process_group.client import Gathering

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


def warned(run: Callable[[], Any], words: str) -> list[str]:
    """The warnings of a run that have these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [text for each in caught if words in (text := str(each.message))]


# --- reading ----------------------------------------------------------------------------------------------------------


class Reads(pl.Callback):
    """A progress bar, say: rank 0 alone reads everything, in every hook that is not inside of a step."""

    def __init__(self) -> None:
        self.read: list[tuple[str, dict[str, float]]] = []


def _reading(hook: str) -> Callable[..., None]:
    def read(self: Reads, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            found = {**trainer.callback_metrics, **trainer.logged_metrics, **trainer.progress_bar_metrics}
            self.read.append((hook, {name: float(value) for name, value in sorted(found.items())}))

    return read


for _hook in HOOKS["callback"]:
    if _hook.startswith(("on_train_", "on_validation_")) and _hook not in {*IN_A_STEP, "on_validation_batch_end"}:
        setattr(Reads, _hook, _reading(_hook))


class LogsMetrics(LogsAll):
    def on_validation_epoch_end(self) -> None:
        self.log("recall", self.both["MulticlassRecall"], prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", self.accuracy)


@WORLD.as_on_one(TWO, GLOO)
def test_a_bar_on_rank_zero_alone_reads_between_steps_what_it_reads_on_one_process(strategy: str) -> Any:
    """Bars read complete values between logged steps."""
    reads = Reads()
    made = trainer(strategy, callbacks=[reads], max_epochs=3)
    made.fit(LogsMetrics(), loader(29, 8), loader(13, 5, 9))
    return dict(made.callback_metrics), made.strategy.broadcast(reads.read)


class OneSided(LogsAll):
    """Rank 0 alone logs a value first, sees to a metric, and reads many logged values in the middle of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.is_global_zero:
            self.log("mine", float(batch_idx), on_step=True, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        self.log_dict({f"loss{index}": loss * index for index in range(60)})
        if self.trainer.is_global_zero:
            self.seen(self(batch[0]), batch[1])
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        copy.deepcopy(self)
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.is_global_zero:
            assert "loss59" in self.trainer.callback_metrics


class MeansOfMeans(Net):
    """Keeps means of the batches' means in torchmetrics that get no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.nn.ModuleDict({"trained": MeanMetric(), "validated": MeanMetric()})

    def observe(self, batch: Any, stage: str) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.means[stage](loss)
        self.log(stage, self.means[stage], on_step=stage == "trained", on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.observe(batch, "trained")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.observe(batch, "validated")


@WORLD.as_on_one(TWO, GLOO)
def test_a_mean_metric_without_weights_is_the_mean_of_the_batches_means(strategy: str) -> Any:
    torch.set_default_dtype(torch.float64)  # that of torchmetrics, too
    try:
        return fit(strategy, MeansOfMeans(), loader(17, 8), loader(9, 8, 9))  # a rank has no sample of the last ones
    finally:
        torch.set_default_dtype(torch.float32)


@WORLD.as_on_one()
def test_what_rank_zero_alone_logs_reads_and_counts_disturbs_nobody(strategy: str) -> Any:
    """One process may log or read alone."""
    made = trainer(strategy)
    made.fit(OneSided(), loader(shuffle=True), loader(13, 5, 9))
    metrics = dict(made.callback_metrics)
    mine = [metrics.pop(name) for name in ("mine", "mine_step", "mine_epoch", "seen") if name in metrics]
    assert strategy != OURS or len(mine) == 4
    return metrics


# --- what a hook at the end of an epoch logs --------------------------------------------------------------------------


class LogsAtTheEnd(Net):
    """Each rank has seen a part of the sum; the mean over the ranks, weighted by samples, is that of all."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses += [loss.detach()] * len(batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        # It rises from the third epoch on.
        own = torch.stack(self.losses).mean()
        self.log("own", own + 3.0 * max(0, self.current_epoch - 2), sync_dist=True)


@WORLD.as_on_one()
def test_early_stopping_and_checkpoints_see_what_on_train_epoch_end_has_logged(strategy: str) -> Any:
    """`EarlyStopping` sees what `on_train_epoch_end` has logged."""
    stop = EarlyStopping("own", patience=1, check_on_train_epoch_end=True)
    options: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    with folder(strategy) as name:
        saved = ModelCheckpoint(name, "{epoch}-{own:.6f}", "own", save_top_k=-1, **options)
        made = trainer(strategy, callbacks=[stop, saved], enable_checkpointing=True, max_epochs=12)
        made.fit(LogsAtTheEnd(), loader(32, 8))
    assert made.current_epoch == 4
    return sorted(Path(path).name for path in saved.best_k_models), stop.best_score


class SharesItsStep(Net):
    """Logs the same key in training and validation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shared", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("shared", super().training_step(batch, batch_idx))


class ReadsAtTheEnd(pl.Callback):
    def __init__(self) -> None:
        self.read: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.read.append(float(trainer.callback_metrics["shared"]))


@WORLD.as_on_one()
def test_a_key_of_training_and_validation_has_the_value_of_the_validation_at_the_end_of_the_epoch(strategy: str) -> Any:
    callback = ReadsAtTheEnd()
    fit(strategy, SharesItsStep(), loader(29, 8), loader(13, 5, 9), callbacks=[callback], check_val_every_n_epoch=2)
    return callback.read


class LogsItsMean(pl.Callback):
    """Of the samples of this process."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.means: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means.append(batch[0].mean())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("mean", torch.stack(self.means).mean())


@WORLD
def logging_its_mean() -> Any:
    rows = loader(48, 8, shuffle=True), loader(13, 5, 9)
    return warned(lambda: fit(OURS, Net(), *rows, callbacks=[LogsItsMean()]), "end of an epoch")


def test_values_that_may_not_be_those_of_one_process_are_named_once() -> None:
    """A warning names values that may differ."""
    (differing,), nothing = WORLD.returned(logging_its_mean)
    assert nothing == []
    assert differing.startswith("'mean' is logged at the end of an epoch, with another value on each process (from ")


class PrintsAScore(Net):
    """From its outputs, which it has not logged: of this process's samples, unless they are gathered.

    Args:
        gather: Gathers a list; ``None`` leaves it out.
    """

    def __init__(self, gather: Callable[[list[Any]], Any] | None) -> None:
        super().__init__()
        self._gather, self.rates = gather, list[float]()
        self.found: dict[str, list[torch.Tensor]] = {"scores": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates.append(0.1)  # the same on all processes
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found["scores"].append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        found = self.found["scores"] if self._gather is None else self._gather(self.found["scores"])
        str(len(found))
        self.found["scores"].clear()

    predict_step, on_predict_epoch_end = validation_step, on_validation_epoch_end


class PrintsAScoreBesideAMetric(PrintsAScore):
    def __init__(self) -> None:
        super().__init__(None)
        self.metric = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metric.update(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.metric.compute())
        self.metric.reset()
        super().on_validation_epoch_end()


def gathered_by_torch(own: list[Any]) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def beside_a_metric() -> None:
    fit(OURS, PrintsAScoreBesideAMetric(), loader(48, 8, shuffle=True), loader(12, 4, 9))


@WORLD
def collecting() -> Any:
    ways = None, gathered_by_torch, lambda own: all_gather_object(own, "the scores")
    rows = loader(48, 8, shuffle=True), loader(12, 4, 9)
    fits = [warned(lambda way=way: fit(OURS, PrintsAScore(way), *rows), "collects") for way in ways]
    fits.append([text.replace("BesideAMetric", "") for text in warned(beside_a_metric, "collects")])
    new = [lambda way=way: trainer(OURS).predict(PrintsAScore(way), loader(16, 8)) for way in ways]  # a batch each
    return fits, [warned(each, "collects") for each in new]


def test_what_a_module_collects_of_its_part_is_named_unless_it_gathers_or_logs_it() -> None:
    """Collected parts are named."""
    named = ["each process collects in PrintsAScore.found['scores'] what it computes itself"]
    for alone, *gathered in WORLD.returned(collecting)[0]:
        assert [text.partition(",")[0] for text in alone] == named
        assert gathered[:2] == [[], []]
        assert [text.partition(",")[0] for each in gathered[2:] for text in each] == named * len(gathered[2:])


class Meter:
    def __init__(self) -> None:
        self.sum = 0.0


class Silent:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


SEEN: list[float] = []


class Centers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(())

    def update(self, value: torch.Tensor) -> None:
        self.center = 0.9 * self.center + value


class OwnSum(torchmetrics.Metric):
    """Is merged, so it collects nothing of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value

    def compute(self) -> torch.Tensor:
        return self.total


class Accumulates(Net):
    """What later steps may use: means over the part of this process, in whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline, self.rows, self.memory, self.meter = 0.0, 0, torch.zeros(3), Meter()
        self.losses: list[list[float]] = [[], []]
        self.seen, self.recent, self.confusion = 0, deque[float]([0.0], 1), [[0, 0], [0, 0]]
        self.steps, self.last, self.since, self.silent = 0, torch.zeros(()), 0.0, list[Silent]()
        self.center, self.hidden = torch.zeros(2), torch.zeros(4)
        self.others = torch.nn.ModuleList([Centers(), OwnSum()])
        self.sums, self.slots, self.shown = {"n": torch.zeros(2)}, [torch.zeros(2)], {"last": torch.zeros(2)}
        self.states = dict(self.state_dict())
        self.table = np.full(1, None)
        self.table[0] = Silent()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.baseline = 0.9 * self.baseline + 0.1 * loss.item()
        self.rows += (batch_idx % 2) * (len(batch[0]) if dist.get_rank() else 1)  # unequal parts
        self.memory[batch_idx % 3] = loss.detach()
        self.meter.sum += loss.item()
        self.losses[1].append(loss.item())
        self.seen += batch[0].numel()  # on each process as many
        self.recent.append(loss.item())
        self.confusion[batch_idx % 2][1] += int(loss.item() * 1e6)
        SEEN.append(loss.item())
        self.silent.append(Silent())  # cannot be compared
        self.center = 0.9 * self.center + loss.detach()
        self.sums["n"] = self.sums["n"] + loss.detach()
        self.slots[0] += loss.detach()
        for layer in self.others:
            layer.update(loss.detach())
        # The same on all processes, replaced in each step, of each sample, or a time:
        self.hidden = self.hidden + batch[0][:4, 0]
        self.shown["last"] = loss.detach().repeat(2)
        self.steps, self.last, self.since = self.steps + 1, loss.detach(), time.perf_counter()
        return loss


class KeepsSamples(Net):
    """Keeps something for each sample, and masks for the sizes of batches, as of the last batch of that size."""

    table: ClassVar[dict[float, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        self.table |= {float(row[0]): output.detach() for row, output in zip(batch[0], outputs, strict=True)}
        self.masks[len(batch[0])] = torch.ones(len(batch[0]))
        return super().training_step(batch, batch_idx)


class SumsItsPart(pl.Callback):
    """And weighs samples by its part."""

    total = 0.0

    def __init__(self) -> None:
        self.sampler = WeightedRandomSampler(torch.ones(3), 3)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += float(batch[0].sum())
        self.sampler.weights[batch_idx % 3] = outputs["loss"] * dist.get_rank()


class MeasuresTimes(pl.Callback):
    total, begin = 0.0, 0.0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("epoch_seconds", self.total)

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.total += time.perf_counter() - self.begin


@WORLD
def accumulating() -> Any:
    fits = [
        lambda: fit(OURS, Accumulates(), loader(48, 8, shuffle=True), callbacks=[SumsItsPart()]),
        lambda: fit(OURS, Net(), loader(48, 8, shuffle=True), callbacks=[MeasuresTimes()]),
        lambda: fit(OURS, KeepsSamples(), loader(48, 8, shuffle=True), max_epochs=2),
    ]
    return [text for each in fits for word in ("collects", "end of an epoch") for text in warned(each, word)]


def test_what_a_program_accumulates_of_its_part_is_named_in_whatever_it_is() -> None:
    text, of_samples = WORLD.returned(accumulating)[0]
    names = (
        "baseline",
        "rows",
        "memory",
        "meter.sum",
        "losses[1]",
        "seen",
        "recent",
        "confusion",
        "center",
        "sums['n']",
        "slots[0]",
    )
    others = "SumsItsPart.total", "SumsItsPart.sampler.weights", "Centers.center"
    expected = ", ".join([*(f"Accumulates.{name}" for name in names), "SEEN", *others])
    assert text.startswith(f"each process collects in {expected} what it computes itself, so what you compute")
    assert of_samples.startswith("each process collects in KeepsSamples.table what it computes itself")


class Collects(Net):
    """Keeps its outputs in a list, as Lightning's migration guide has it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.cat(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


@WORLD.as_on_one()
def test_lists_of_outputs_have_no_batch_of_which_a_rank_has_no_sample(strategy: str) -> Any:
    few = loader(9, 4, 9), loader(2, 1, 9)  # in the second rank 1 has no sample at all
    return [fit(strategy, Collects(), loader(16, 8), rows) for rows in few]


def of_all(parts: Any) -> list[float]:
    """The rows that all ranks have."""
    mine = torch.cat(parts).tolist()
    return sorted(itertools.chain(*by_rank(mine)) if dist.is_initialized() else mine)


class KeepsRows(Net):
    """In every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.count, self.seen = {"rows": list[torch.Tensor]()}, 0, torch.zeros(())

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0][:, 0]
        self.rows["rows"].append(rows)
        self.count += len(rows)
        self.seen += len(rows)
        return rows

    def on_test_epoch_end(self) -> None:
        self.found = of_all(self.rows["rows"]), sum(of_all([torch.tensor([float(self.count)]), self.seen[None]]))


class KeepsRowsOfAll(pl.Callback):
    def __init__(self) -> None:
        self.outputs, self.rows = list[torch.Tensor](), list[torch.Tensor]()
        self.trained = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.trained += 0 if getattr(trainer.strategy, "is_padding", False) else len(batch[1])

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.outputs.append(outputs)
        self.rows.append(batch[0][:, 0])


@WORLD.as_on_one()
def test_a_rank_without_a_sample_collects_nothing(strategy: str) -> Any:
    found = []
    for samples, batch_size in ((9, 4), (5, 1)):
        callback, module = KeepsRowsOfAll(), KeepsRows()
        made = trainer(strategy, callbacks=[callback], max_epochs=1)
        made.fit(module, loader(samples, batch_size))
        made.test(module, loader(samples, batch_size, 9), verbose=False)
        trained = sum(of_all([torch.tensor([float(callback.trained)])]))
        found.append([*module.found, of_all(callback.outputs), of_all(callback.rows), trained])
    return found


class TakesNoEmptyBatch(Collects):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not len(batch[0]):
            raise ValueError("as a recurrent layer does")
        super().validation_step(batch, batch_idx)


@WORLD.as_on_one()
def test_a_model_that_refuses_a_batch_without_rows_is_evaluated_all_the_same(strategy: str) -> Any:
    return fit(strategy, TakesNoEmptyBatch(), loader(16, 8), loader(2, 1, 9))


# --- metrics ----------------------------------------------------------------------------------------------------------


class OfImages(torchmetrics.Metric):
    """Keeps an entry per image in each list, as MeanAveragePrecision does."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("boxes", "truths"):
            self.add_state(name, default=[], dist_reduce_fx=None)

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for row, truth in zip(x, y, strict=True):
            self.boxes.append(row[: 1 + int(truth)])  # type: ignore[union-attr]
            self.truths.append(truth.reshape(1))  # type: ignore[union-attr]

    def compute(self) -> torch.Tensor:
        scores = [boxes.sum() * (truth + 1) for boxes, truth in zip(self.boxes, self.truths, strict=True)]  # type: ignore[arg-type]
        return torch.stack(scores).double().mean()


class LogsMetricsOfAll(Net):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.queries = OfImages(), torchmetrics.retrieval.RetrievalMAP().set_dtype(torch.float64)
        self.r2 = torchmetrics.R2Score().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.images(x, y)
        self.queries.update(x[:, 0].sigmoid(), y == 0, indexes=(x[:, 1] > 0).long())
        self.log_dict({"images": self.images, "queries": self.queries}, on_step=True, on_epoch=True)
        if len(x) != 1:
            self.r2(x[:, 0], x[:, 1])
        self.log("r2", self.r2)


@WORLD.as_on_one()
def test_metrics_with_lists_and_metrics_that_need_two_samples_merge_over_uneven_parts(strategy: str) -> Any:
    return [fit(strategy, LogsMetricsOfAll(), loader(16, 8), loader(*of, 9)) for of in ((16, 4), (13, 5), (9, 4))]


class MeansOfMasks(Net):
    """Both parts of the only batch have two samples that count, of five and of four."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, counts = batch
        self.log("masked", x[counts].sum() / counts.sum(), batch_size=int(counts.sum()))
        self.log("mean", x.mean(), batch_size=1)
        self.log("of_all", x.mean(), batch_size=9)


@WORLD.as_on_one()
def test_a_masked_mean_counts_by_its_mask_also_where_the_parts_count_equally(strategy: str) -> Any:
    x = torch.tensor([1.0, 1, 0, 0, 0, 5, 5, 0, 0], dtype=torch.float64)
    made = trainer(strategy)
    made.validate(MeansOfMasks(), DataLoader(TensorDataset(x, x > 0), 9), verbose=False)
    return dict(made.callback_metrics)


class LogsOtherReductions(Net):
    """What the parts of a batch do not have: their batches' extremes, sums of means, counts."""

    def _log_all(self, batch: Any, prefix: str) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        for reduction in ("max", "min", "sum"):
            self.log(f"{prefix}_{reduction}", loss, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log(f"{prefix}_highest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log(f"{prefix}_samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log(f"{prefix}_mean_of_samples", float(len(batch[0])), on_step=True, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._log_all(batch, "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_all(batch, "val")


@WORLD.as_on_one()
def test_extremes_sums_and_counts_are_those_of_whole_batches(strategy: str) -> Any:
    # The largest loss of a batch was that of a part; a sum of means was that of all parts.
    batches = loader(29, 8, shuffle=True), loader(13, 5, 9)
    return fit(strategy, LogsOtherReductions(), *batches, num_sanity_val_steps=1, max_epochs=2)


class LogsEverywhere(LogsOtherReductions):
    """For each of its loaders, whose first batch may count nothing."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_all(batch, "val")
        self.log("val_late", float(len(batch[0]) * (self.global_step > 0)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log_all(batch, "test")


@WORLD.as_on_one()
def test_extremes_and_counts_of_every_loader_and_call_are_those_of_whole_batches(strategy: str) -> Any:
    # Only those of the first loader were, after a sanity check: another file was the best one.
    found = []
    for sanity in (0, 1):
        made, module, rows = trainer(strategy, num_sanity_val_steps=sanity), LogsEverywhere(), loader(13, 5, 9)
        made.fit(module, loader(29, 8), [loader(9, 4, 7), rows])
        found += [dict(made.callback_metrics), *made.validate(module, rows, verbose=False)]
        found += made.test(module, rows, verbose=False)
    return found


class LogsWhatItHasSeen(Net):
    """The number of its samples, equal on all processes."""

    def on_validation_epoch_start(self) -> None:
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("seen", float(self.seen))
        self.log("summed", float(self.seen), reduce_fx="sum")


@WORLD.on(TWO)
def test_a_count_of_samples_that_is_logged_at_the_end_of_an_epoch_is_named_with_its_remedy() -> None:
    made, rows = trainer(OURS), loader(16, 4)
    text = warned(lambda: made.validate(LogsWhatItHasSeen(), rows, verbose=False), "end of an epoch")
    assert made.callback_metrics["summed"] == 16
    says = "'seen' is logged at the end of an epoch, and is the number of samples that this process has had"
    assert [each.partition(":")[0] for each in text] == ([] if dist.get_rank() else [says])


class LogsByAConstant(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("by_4", batch[0].mean(), batch_size=4)


@WORLD.as_on_one()
def test_batches_count_alike_by_a_constant_size_that_first_is_that_of_a_part(strategy: str) -> Any:
    made = trainer(strategy)
    made.validate(LogsByAConstant(), DataLoader(TensorDataset(torch.arange(12.0) ** 2), 8), verbose=False)
    return dict(made.callback_metrics)


class NeedsRows(Net):
    """Fails on a batch without rows, after its first metric has got it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.second = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch[0], batch[0].flip(1)
        self.first.update(x, y)
        self.second.update(x.reshape(max(1, len(x)), -1)[:, :FEATURES], y)
        self.log_dict({"first": self.first, "second": self.second})


@WORLD.as_on_one()
def test_a_step_that_fails_without_rows_leaves_no_row_of_padding_in_a_metric(strategy: str) -> Any:
    return trainer(strategy).test(NeedsRows(), loader(3, 1, 9), verbose=False)


class KeepsItsMetric(Net):
    """Saves a metric itself, as packages do that load it with few names allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["metric"] = self.metric


class SavesAtTheEnd(pl.Callback):
    """Notes whether rank 0's checkpoint needs ``getattr`` to be loaded."""

    needs_getattr: bool | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with folder("") as name:
            path = Path(name, "last.ckpt")
            trainer.save_checkpoint(path)
            pickled = zipfile.ZipFile(path).read("archive/data.pkl") if path.exists() else b""
            self.needs_getattr = all_gather_object(b"getattr" in pickled, "whether the file has one")[0]


@WORLD.as_on_one()
def test_a_metric_in_a_checkpoint_is_pickled_as_on_one_process(strategy: str) -> Any:
    saves = SavesAtTheEnd()
    fit(strategy, KeepsItsMetric(), callbacks=[saves], max_epochs=1)
    return saves.needs_getattr


# --- before the strategy is set up ------------------------------------------------------------------------------------


class AsksEarly(Net):
    """Knows the number of steps when it is made, as warm-ups want it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def setup(self, stage: str) -> None:
        self.steps.append(self.trainer.estimated_stepping_batches)

    def configure_model(self) -> None:
        self.steps.append(self.trainer.estimated_stepping_batches)


@WORLD.as_on_one()
def test_the_number_of_steps_is_known_early_and_the_loader_divided_all_the_same(strategy: str) -> Any:
    """`setup` and `configure_model` know `estimated_stepping_batches`."""
    module = AsksEarly()
    results = fit(strategy, module, loader(29, 8, shuffle=True))
    assert module.steps == [8, 8]
    return results


# --- what one rank alone knows ----------------------------------------------------------------------------------------


class Clock(pl.Callback):
    """Time passes by steps, and faster on rank 1; it notes after which steps there is a validation."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.validated: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1.0 + 0.4 * dist.get_rank()

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


@WORLD.on(TWO)
def test_validation_by_time_is_at_the_same_step_on_all_ranks() -> None:
    """Time-based validation comes at a common step."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for reader in (evaluation_loop, fit_loop, training_epoch_loop, decisions):
            patch.setitem(vars(reader), "time", clock)
        options: dict[str, Any] = {"val_check_interval": {"seconds": 4}, "check_val_every_n_epoch": None}
        made = trainer(OURS, callbacks=[clock], max_steps=12, max_epochs=-1, **options)
        made.fit(Net(), loader(), loader(13, 5, 9))
    assert by_rank(clock.validated) == [clock.validated] * 2 and len(clock.validated) >= 3
    for before, after in itertools.pairwise([0, *clock.validated]):
        assert after - before in (3, 4)  # by the faster clock, 1.4 s a step, or a step later


class DecidesByLosses(pl.Callback):
    """As many do: it sums losses, keeps the best ones by what is logged, and stops once they are small."""

    def __init__(self) -> None:
        self.sum, self.best, self.kept = 0.0, math.inf, list[float]()

    def _logged(self, trainer: Any) -> float:
        return float(trainer.callback_metrics["loss"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sum += outputs["loss"].item()
        if self._logged(trainer) < self.best:
            self.best = self._logged(trainer)
            self.kept.append(self.best)
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "best.ckpt")
        if outputs["loss"] < 0.6:
            trainer.should_stop = True


@WORLD.as_on_one()
def test_a_hook_that_decides_by_losses_gets_those_of_whole_batches(strategy: str) -> Any:
    """Hooks get the losses of whole batches."""
    # It got those of its part: ranks saved at other steps, and stopped at one that the speed of a message chose.
    callback = DecidesByLosses()
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_epochs": 9, "default_root_dir": folder}
        results = fit(strategy, Net(), loader(29, 8, shuffle=True), callbacks=[callback], **options)
    assert 4 < results["global_step"] < 36 and len(callback.kept) > 2
    return results, callback.sum, callback.kept


@WORLD.on(TWO)
def test_a_callback_of_one_rank_alone_reads_the_loss_of_its_part() -> None:
    callback = DecidesByLosses()
    callback.best = -math.inf  # it saves nothing
    fit(OURS, Net(), loader(29, 8), callbacks=[callback] if dist.get_rank() else [])
    assert (callback.sum > 0) == bool(dist.get_rank())


class CollectsInHooks(Net):
    """What is of the whole batch, also on a process that has no sample of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = [0.0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.found.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append(float(self.layers[0].weight.grad.norm()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


@WORLD.as_on_one()
def test_lists_of_hooks_keep_what_is_of_a_batch_of_which_a_rank_has_no_sample(strategy: str) -> Any:
    module = CollectsInHooks()
    return fit(strategy, module, loader(25, 8)), module.found


class ChangesItsMind(Net):
    """It wants to stop, but must go on for some steps, and then wants to go on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in (2, 4):
            self.trainer.should_stop = not self.trainer.should_stop


@WORLD.as_on_one()
def test_a_decision_to_stop_can_be_taken_back(strategy: str) -> Any:
    results = fit(strategy, ChangesItsMind(), loader(29, 8), max_epochs=2, min_steps=5)
    assert results["global_step"] == 8
    return results


class SkipsSome(Net):
    """Every second batch is skipped, on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@WORLD.as_on_one()
def test_a_step_that_all_ranks_skip_is_skipped_as_on_one_process(strategy: str) -> Any:
    """Steps that return `None` everywhere are skipped."""
    adam = lambda module: torch.optim.Adam(module.parameters(), 0.05)  # noqa: E731
    return [
        fit(strategy, SkipsSome(optimizer=adam), loader(29, 8, shuffle=True)),
        fit(strategy, SkipsSome(), loader(29, 8), accumulate_grad_batches=3),
        fit(strategy, SkipsSome(), loader(29, 8), accumulate_grad_batches=2),  # each second one would be sent
    ]


# --- how many messages a step takes -----------------------------------------------------------------------------------


class LogsMuch(Net):
    """From the second step on: more than travels with the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            self.log_dict({f"value {number}": number * loss.detach() for number in range(40)})
        return loss


class LogsNorms(Net):
    """The norm of the gradients, as many people do; in another step than the first nobody foresees it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step != 1:
            self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm(), on_step=True)  # type: ignore[union-attr]


class HooksOfOne(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


MESSAGES: dict[str, tuple[type[Net], dict[str, Any], list[int]]] = {
    "values of the step": (Net, {}, [1, 1, 1, 1]),  # the gradients
    "many values": (LogsMuch, {}, [1, 1, 1, 1]),
    "values of hooks behind the step": (LogsNorms, {}, [1, 1, 1, 1]),
    "and a logger": (LogsNorms, {"log_every_n_steps": 3}, [1, 2, 1, 1]),
    "hooks of one rank": (Net, {}, [1, 1, 1, 1]),
    "a vote on bad batches": (Net, {}, [2, 2, 2, 2]),
}


def count_messages(strategy: str, name: str) -> tuple[list[int], Any]:
    """How many collectives each step has started, from the begin of one forward to the next; what was trained."""
    kind, options, _ = MESSAGES[name]
    module, at = kind(), list[int]()
    if strategy == OURS:
        group: Any = dist.group.WORLD
        module.layers.register_forward_pre_hook(lambda *_: at.append(group._get_sequence_number_for_group()))
    callbacks = [HooksOfOne()] if name == "hooks of one rank" and strategy == OURS and dist.get_rank() else []
    logger = Lines() if options else False
    votes = name == "a vote on bad batches"
    chosen: Any = strategy
    if strategy == OURS:  # the comparison of the first batch calls forward, too
        chosen = CallbackStrategy(skip_batch="any" if votes else None, verify=None)
    results = fit(chosen, module, loader(48, 8), callbacks=callbacks, max_epochs=1, logger=logger, **options)
    return [after - before for before, after in itertools.pairwise(at)], results


@WORLD.runs(GLOO)
def messages() -> Any:
    return {name: count_messages(OURS, name) for name in MESSAGES}


@pytest.mark.parametrize("name", MESSAGES)
def test_over_a_network_a_step_starts_no_message_that_is_not_needed(name: str) -> None:
    """Over a network a step sends no unnecessary message."""
    _, expected = on_one(lambda strategy: count_messages(strategy, name))
    for found in WORLD.returned(messages, GLOO):
        counts, results = found[name]
        wanted = MESSAGES[name][2]
        assert counts[1 : 1 + len(wanted)] == wanted
        assert_equal(results, expected, RELATIVE)


@WORLD.runs(GLOO)
def messages_between_epochs() -> list[int]:
    """From the begin of the last forward of an epoch to that of the first one of the next."""
    group: Any = dist.group.WORLD
    module, at = Net(), list[int]()
    module.layers.register_forward_pre_hook(lambda *_: at.append(group._get_sequence_number_for_group()))
    with pytest.MonkeyPatch.context() as patch:
        module.layers.register_forward_pre_hook(lambda *_: patch.setattr(Gathering, "ask", None))
        fit(CallbackStrategy(verify=None), module, loader(24, 8), max_epochs=4, logger=False)  # type: ignore[arg-type]
    return [at[first] - at[first - 1] for first in range(3, len(at), 3)]


def test_between_two_epochs_there_are_three_exchanges() -> None:
    """Over a network three exchanges separate epochs."""
    gradients, end_of_data, end_of_epoch, order = 1, 1, 1, 1  # each is one message
    wanted = gradients + end_of_data + end_of_epoch + order
    assert WORLD.returned(messages_between_epochs, GLOO) == [[wanted] * 3] * 2


# --- what is left of a run --------------------------------------------------------------------------------------------


@WORLD
def left_behind() -> Any:
    module = LogsAll()
    said = warned(lambda: fit(OURS, module, loader(29, 8), loader(13, 5, 9)), "sync_dist")
    metrics = [(m.dist_sync_fn, m.dist_sync_on_step) for m in module.modules() if isinstance(m, torchmetrics.Metric)]
    return set(metrics), said


def test_metrics_are_left_as_they_were_and_nobody_is_advised_to_set_sync_dist() -> None:
    """A run leaves torchmetrics unchanged."""
    assert WORLD.returned(left_behind) == [({(None, False)}, [])] * 2


def log_alone() -> list[str]:
    """In a group of one process, such as one that has outlived the others."""
    return warned(lambda: fit(OURS, LogsAll(), loader(29, 8), loader(13, 5, 9)), "sync_dist")


def test_a_process_alone_in_its_group_is_not_advised_to_set_sync_dist() -> None:
    assert run_distributed(log_alone, 1) == [[]]
