"""Logged values are complete on every rank before anything reads them, and a read communicates nothing."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from distributed import run_distributed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner
from lightning_scenarios import CLASSES, LogsAll, Net, fit, loader, quiet, trainer
from lightning_scenarios import Record as Lines
from nursery import Nursery, note
from test_equivalence import assert_equal

import ddp_callbacks.lightning  # noqa: F401
from ddp_callbacks.comm.shared_memory import SWITCH
from ddp_callbacks.lightning import decisions
from ddp_callbacks.lightning.history import History, Record, join

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

Case = Callable[[], Any]
CASES: dict[str, Case] = {}
OURS = "ddp_callbacks"


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases() -> dict[str, Any]:
    with quiet():
        return {name: function() for name, function in CASES.items()}


@functools.cache
def seen() -> list[dict[str, Any]]:
    return run_distributed(run_cases, 2)


def by_rank(function: Case) -> list[Any]:
    return [results[function.__name__] for results in seen()]


def alone(function: Callable[[], Any]) -> Any:
    with quiet():
        return function()


# --- reading ----------------------------------------------------------------------------------------------------------


class Reads(pl.Callback):
    """A progress bar, say: rank 0 alone reads everything in every hook."""

    def __init__(self) -> None:
        self.read: list[tuple[str, dict[str, Any]]] = []


def _reading(hook: str) -> Callable[..., None]:
    def read(self: Reads, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            found = {**trainer.callback_metrics, **trainer.logged_metrics, **trainer.progress_bar_metrics}
            self.read.append((hook, {name: float(value) for name, value in sorted(found.items())}))

    return read


_BATCH = "on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step"
_TRAIN = "on_train_batch_end on_train_epoch_start on_train_epoch_end on_train_end"
_VALIDATION = "start end batch_start batch_end epoch_start epoch_end"

for _hook in [*_BATCH.split(), *_TRAIN.split(), *(f"on_validation_{name}" for name in _VALIDATION.split())]:
    setattr(Reads, _hook, _reading(_hook))


class LogsMetrics(LogsAll):
    def on_validation_epoch_end(self) -> None:
        self.log("recall", self.both["MulticlassRecall"], prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", self.accuracy)


def read_everywhere(strategy: str) -> Any:
    reads = Reads()
    results = fit(strategy, LogsMetrics(), loader(29, 8), loader(13, 5, 9), callbacks=[reads], max_epochs=3)
    return results["callback_metrics"], reads.read


def reading_everywhere(way: str) -> Any:
    os.environ[SWITCH] = "0" if way == "gloo" else "1"
    with quiet():
        return read_everywhere(OURS)


@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_a_bar_on_rank_zero_alone_reads_in_every_hook_what_it_reads_on_one_process(way: str) -> None:
    metrics, read = alone(lambda: read_everywhere("auto"))
    (first, found), (second, nothing) = run_distributed(reading_everywhere, 2, way)
    assert_equal([first, second], [metrics, metrics], 1e-10)
    assert [hook for hook, _ in found] == [hook for hook, _ in read] and not nothing
    assert_equal([values for _, values in found], [values for _, values in read], 1e-10)


class Accurate(Net):
    """A torchmetric that is logged per epoch, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy(self(batch[0]), batch[1])
        if self.trainer.is_global_zero or not self.trainer.current_epoch:
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return self.loss(batch)


def train_with_a_bar(strategy: str) -> Any:
    bar = pl.callbacks.TQDMProgressBar(leave=True)
    results = fit(strategy, Accurate(), loader(), callbacks=[bar], enable_progress_bar=True)
    return results["callback_metrics"]


@case
def with_a_bar() -> Any:
    return train_with_a_bar(OURS)


def test_a_metric_of_the_epoch_beside_a_progress_bar_and_no_checkpoint() -> None:
    expected = alone(lambda: train_with_a_bar("auto"))
    first, second = by_rank(with_a_bar)
    assert_equal(first, expected, 1e-10)
    assert set(second) == {"accuracy"}  # of the first epoch: in the second rank 0 alone has logged it


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


def stop_by_what_the_end_logs(strategy: str, folder: str) -> Any:
    stop = EarlyStopping("own", patience=1, check_on_train_epoch_end=True)
    saved = ModelCheckpoint(
        folder, "{epoch}-{own:.6f}", "own", save_top_k=-1, save_on_train_epoch_end=True, enable_version_counter=False
    )
    options: dict[str, Any] = {"callbacks": [stop, saved], "enable_checkpointing": True, "max_epochs": 12}
    made, module = trainer(strategy, **options), LogsAtTheEnd()
    made.fit(module, loader(32, 8))
    names = sorted(Path(path).name for path in saved.best_k_models)
    return names, stop.best_score, made.current_epoch, made.checkpoint_callback is saved


def stops_by_what_the_end_logs(folder: str) -> Any:
    with quiet():
        return stop_by_what_the_end_logs(OURS, folder)


def test_early_stopping_and_checkpoints_see_what_on_train_epoch_end_has_logged(tmp_path: Path) -> None:
    names, best, epochs, _ = alone(lambda: stop_by_what_the_end_logs("auto", str(tmp_path / "one")))
    assert epochs == 4 and len(names) == 4
    for found in run_distributed(stops_by_what_the_end_logs, 2, str(tmp_path / "two")):
        assert found[0] == names
        torch.testing.assert_close(found[1], best, rtol=1e-10, atol=0)
        assert found[2:] == (epochs, True)


class LogsItsMean(pl.Callback):
    """Of the losses of this process's parts."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("mean", torch.stack(self.losses).mean())


class FollowsItsMean(Net):
    """Its own hook comes after the callback's, reads what that has logged, and logs on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_epoch_end(self) -> None:
        mean = self.trainer.callback_metrics["mean"]
        self.seen.append(float(mean))
        self.log("follows", 2 * mean**2)


def follow_its_mean(strategy: str) -> Any:
    module = FollowsItsMean()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = fit(strategy, module, loader(48, 8, shuffle=True), loader(13, 5, 9), callbacks=[LogsItsMean()])
    return results, module.seen, [str(warning.message) for warning in caught if "end of an epoch" in str(warning)]


@case
def following_its_mean() -> Any:
    return follow_its_mean(OURS)


def test_a_hook_at_the_end_of_an_epoch_reads_the_whole_value_of_what_the_hook_before_has_logged() -> None:
    expected, seen, _ = alone(lambda: follow_its_mean("auto"))
    for results in by_rank(following_its_mean):
        assert_equal(results[:2], (expected, seen), 1e-10)


def test_values_that_differ_between_processes_at_the_end_of_an_epoch_are_named_once() -> None:
    (_, _, warned), (_, _, of_other) = by_rank(following_its_mean)
    assert len(warned) == 1 and not of_other
    assert warned[0].startswith("'mean' is logged at the end of an epoch, with another value on each process (from ")


class Collects(Net):
    """Keeps its outputs in a list, as was usual in Lightning 1."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch[0]))


@case
def collecting() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OURS, Collects(), loader(16, 8), loader(9, 4, 9))
    return [str(warning.message) for warning in caught if "has grown" in str(warning.message)]


def test_a_list_that_a_padding_batch_lengthens_is_named_once() -> None:
    first, second = by_rank(collecting)
    assert not first and len(second) == 1
    assert second[0].startswith("Collects.outputs has grown in a batch of which rank 1 has no sample")


class ReadsLate(Net):
    """Only now and then, between two steps, what a hook behind the step before has logged."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.read = first, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx >= self.first:
            self.read.append(float(self.trainer.callback_metrics["behind"]))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("behind", outputs["loss"])


def read_late(strategy: str, first: int) -> Any:
    module = ReadsLate(first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, module, loader(48, 8), loader(13, 5, 9), logger=False)
    return module.read, [str(warning.message) for warning in caught if "was logged by a hook" in str(warning.message)]


@case
def reading_late() -> Any:
    return [read_late(OURS, first) for first in (1, 3)]


def test_who_reads_between_steps_what_hooks_have_logged_gets_whole_values_or_is_told() -> None:
    (always, _), (now_and_then, _) = alone(lambda: [read_late("auto", first) for first in (1, 3)])
    for (read, silent), (read_late_, told) in by_rank(reading_late):
        assert_equal(read, always, 1e-10)
        assert not silent
        assert_equal(read_late_[1:], now_and_then[1:], 1e-10)
        assert len(told) == 1 and told[0].startswith(
            "'behind' was logged by a hook behind the step before, and is read"
        )


# --- before the strategy is set up ------------------------------------------------------------------------------------


class AsksEarly(Net):
    """Knows the number of steps when it is made, as warm-ups want it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.steps = where, 0

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self.steps = self.trainer.estimated_stepping_batches

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self.steps = self.trainer.estimated_stepping_batches


class CallbackAsksEarly(pl.Callback):
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if module.where == "callback":
            module.steps = trainer.estimated_stepping_batches


def ask_early(strategy: str) -> Any:
    modules = [AsksEarly(where) for where in ("setup", "configure_model", "callback")]
    return [
        fit(strategy, module, loader(29, 8, shuffle=True), callbacks=[CallbackAsksEarly()]) | {"steps": module.steps}
        for module in modules
    ]


@case
def asking_early() -> Any:
    return ask_early(OURS)


def test_the_number_of_steps_is_known_in_setup_and_the_loader_divided_all_the_same() -> None:
    expected = alone(lambda: ask_early("auto"))
    assert [result["steps"] for result in expected] == [8, 8, 8]
    for results in by_rank(asking_early):
        assert_equal(results, expected, 1e-10)


# --- what one rank alone knows ----------------------------------------------------------------------------------------


class Validated(Net):
    """Notes after which steps it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)


class Clock(pl.Callback):
    """Time passes by steps, and faster on rank 1."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1.0 + 0.4 * dist.get_rank()


@case
def validating_by_time() -> Any:
    clock, module = Clock(), Validated()
    readers = (evaluation_loop, fit_loop, training_epoch_loop, decisions)
    for reader in readers:
        vars(reader)["time"] = clock
    try:
        options: dict[str, Any] = {"val_check_interval": {"seconds": 4}, "check_val_every_n_epoch": None}
        made = trainer(OURS, callbacks=[clock], max_steps=12, max_epochs=-1, **options)
        made.fit(module, loader(), loader(13, 5, 9))
    finally:
        for reader in readers:
            vars(reader)["time"] = time
    return module.validated


def test_validation_by_time_is_at_the_same_step_on_all_ranks() -> None:
    assert by_rank(validating_by_time) == [[3, 6, 9, 12]] * 2  # by the faster clock: 1.4 s a step


class StopsOn(Net):
    """Some ranks want to stop after the first step, when their time is over, say."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", outputs["loss"], on_step=True)
        if self.trainer.global_step == 1 and self.trainer.global_rank in self.ranks:
            self.trainer.should_stop = True


class StopsAfterValidation(Net):
    """Rank 1 wants to stop after the first validation, in the middle of the epoch."""

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking and self.trainer.global_rank == 1:
            self.trainer.should_stop = True


class StopsAfterEpoch(Net):
    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank == 1:
            self.trainer.should_stop = True


def stop_alone(switch: str) -> list[int]:
    os.environ[SWITCH] = switch
    steps = []
    with quiet():
        for module in (StopsOn(0, 1), StopsOn(0), StopsOn(1), StopsAfterValidation(), StopsAfterEpoch()):
            made = trainer(OURS, max_epochs=5, val_check_interval=2)
            made.fit(module, loader(), loader(13, 5, 9))
            steps.append(made.global_step)
    return steps


@pytest.mark.parametrize("switch", ["0", "1"])
def test_what_all_ranks_decide_behind_a_step_stops_at_once_and_what_one_decides_after_the_next(switch: str) -> None:
    assert run_distributed(stop_alone, 2, switch) == [[1, 2, 2, 2, 4]] * 2


class Requeued(Net):
    """Slurm warns rank 1 in the second step, in the middle of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def get_requeued(tools: str) -> None:
    world_size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": world_size, "SLURM_NODEID": "0"}
    os.environ |= {"SLURM_NTASKS_PER_NODE": world_size, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    with quiet():
        made = trainer(OURS, default_root_dir=str(Path.cwd()), plugins=[SLURMEnvironment()])
        made.fit(Requeued(), loader())
    note("steps", made.global_step)


def test_slurm_s_warning_on_one_rank_saves_a_checkpoint_of_all_and_requeues(nursery: Nursery, tmp_path: Path) -> None:
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tools / "scontrol").chmod(0o755)
    ranks = nursery.run(get_requeued, 2, tmp_path, str(tools))
    assert [rank.notes.get("steps") for rank in ranks] == [8, 8], ranks[0].stderr + ranks[1].stderr
    assert asked.read_text() == "requeue 7\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2


# --- steps that are skipped -------------------------------------------------------------------------------------------


class SkipsSome(Net):
    """Every second batch is skipped, on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def skip_some(strategy: str) -> Any:
    adam = lambda module: torch.optim.Adam(module.parameters(), 0.05)  # noqa: E731
    return [
        fit(strategy, SkipsSome(optimizer=adam), loader(29, 8, shuffle=True)),
        fit(strategy, SkipsSome(), loader(29, 8), accumulate_grad_batches=3),
        fit(strategy, SkipsSome(), loader(29, 8), accumulate_grad_batches=2),  # each second one would be sent
    ]


@case
def skipping_some() -> Any:
    return skip_some(OURS)


def test_a_step_that_all_ranks_skip_is_skipped_as_on_one_process() -> None:
    expected = alone(lambda: skip_some("auto"))
    for results in by_rank(skipping_some):
        assert_equal(results, expected, 1e-10)


# --- how many messages a step takes -----------------------------------------------------------------------------------


class Counts:
    """Of the collectives that each step has started, from the begin of one forward to the begin of the next."""

    def __init__(self, module: Net) -> None:
        self.at: list[int] = []
        module.layers.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.at.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]


class LogsMuch(Net):
    """From the second step on: more than travels with the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            self.log_dict({f"value {number}": number * loss.detach() for number in range(40)})
        return loss


class HooksBehind(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class HooksBefore(HooksBehind):
    def on_before_backward(self, loss: torch.Tensor) -> None:
        pass


class ReadsBetween(HooksBehind):
    """What it has logged in the step before; it needs it at once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.log("before", self.trainer.callback_metrics["behind"] ** 2, on_step=True)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("behind", outputs["loss"])


class LogsNorms(Net):
    """The norm of the gradients, as many people do; in another step than the first nobody foresees it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step != 1:
            self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm(), on_step=True)  # type: ignore[union-attr]


class HooksOfOne(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


MESSAGES: dict[str, tuple[type[Net], dict[str, Any], list[int]]] = {
    "nothing behind the step": (Net, {}, [1, 1, 1, 1]),  # the gradients
    "hooks behind the step": (HooksBehind, {}, [1, 1, 1, 1]),
    "values of hooks behind the step": (LogsNorms, {}, [1, 1, 1, 1]),
    "and a logger": (LogsNorms, {"log_every_n_steps": 3}, [1, 2, 1, 1]),
    "hooks of one rank": (Net, {}, [1, 1, 1, 1]),
    "hooks before the gradients": (HooksBefore, {}, [2, 2, 2, 2]),  # and the values
    "what reads those between the steps": (ReadsBetween, {}, [2, 2, 2, 2]),
    "many values": (LogsMuch, {}, [3, 2, 2, 2]),  # in the first such step they are sent again
}


def logging_of(case: str) -> dict[str, Any]:
    options = MESSAGES[case][1]
    return options | {"logger": Lines() if options else False}


def count_messages(case: str) -> tuple[list[int], Any]:
    os.environ[SWITCH] = "0"
    module = MESSAGES[case][0]()
    counts, callbacks = Counts(module), [HooksOfOne()] if case == "hooks of one rank" and dist.get_rank() else []
    with quiet():
        results = fit(OURS, module, loader(48, 8), callbacks=callbacks, max_epochs=1, **logging_of(case))
    return [after - before for before, after in zip(counts.at, counts.at[1:], strict=False)], results


@pytest.mark.parametrize("case", MESSAGES)
def test_over_a_network_a_step_starts_no_message_that_is_not_needed(case: str) -> None:
    module, _, expected = MESSAGES[case]
    alone_ = alone(lambda: fit("auto", module(), loader(48, 8), max_epochs=1, **logging_of(case)))
    for messages, results in run_distributed(count_messages, 2, case):
        assert messages[1 : 1 + len(expected)] == expected  # in the first step the ranks find out
        assert_equal(results, alone_, 1e-10)


# --- an epoch of many batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["mean", "sum", "max", "min"])
def test_an_epoch_of_many_batches_keeps_and_sends_a_few_numbers(operation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5000, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 4, (2, 5000), generator=generator).double()
    histories = [History(operation), History(operation)]
    for batch in range(5000):
        for rank, history in enumerate(histories):
            weight, total = float(weights[rank, batch]), float(weights[:, batch].sum())
            is_stand_in = not weight and total > 0
            history.add(Record(batch, weight, total, weight or 3.0, weight, False, is_stand_in, values[rank, batch]))
            assert len(history._records) < 256
    sent = [history.parts() for history in histories]
    assert [part.numel() for parts in sent for part in parts] == [6, 0] * 2
    found, _ = join([(sums, rows) for sums, rows in sent], operation)
    # Where no rank counts, the mean is over nothing.
    counted = (weights > 0) | (weights.sum(0) == 0)
    expected = (values * weights).sum() / weights.sum() if operation == "mean" else 0.0
    expected = expected if operation == "mean" else getattr(values[counted], operation)()
    assert found == pytest.approx(float(expected), rel=1e-10)


# --- the learning rate finder -----------------------------------------------------------------------------------------


def find_learning_rate(strategy: str) -> Any:
    made, module = trainer(strategy, max_epochs=3, default_root_dir=tempfile.gettempdir()), Net()
    finder = Tuner(made).lr_find(module, loader(29, 8), num_training=40, early_stop_threshold=None)
    assert finder is not None
    return finder.suggestion(), finder.results["loss"]


@case
def finding_a_learning_rate() -> Any:
    return find_learning_rate(OURS)


def test_the_learning_rate_finder_suggests_what_it_suggests_on_one_process() -> None:
    expected = alone(lambda: find_learning_rate("auto"))
    assert_equal(by_rank(finding_a_learning_rate), [expected] * 2, 1e-10)


# --- advice that does not hold here -----------------------------------------------------------------------------------


@case
def advice() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OURS, LogsAll(), loader(29, 8), loader(13, 5, 9))
    return [str(warning.message) for warning in caught if "sync_dist" in str(warning.message)]


def test_nobody_is_advised_to_set_sync_dist() -> None:
    assert by_rank(advice) == [[], []]
