"""What the strategy answers, gives back and exchanges, and what it makes of a Trainer's settings."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import unittest.mock
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader
from trainer_cases import OURS, PLAIN, RELATIVE, TWO, Bodies, message_of, on_one, quiet
from trainers import Net, Normalized, data, fit, halving, loader, outcome, trainer
from ways import Way

from ddp_callbacks.lightning import CallbackStrategy, DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

WORLD = Bodies(__name__, quiet)


# --- what the strategy is asked ---------------------------------------------------------------------------------------


def move(made: pl.Trainer, *_: Any) -> None:
    """Rank 0 moves a batch of its own to its device, as callbacks do that show samples."""
    if made.is_global_zero:
        made.strategy.batch_to_device(data(3).tensors)


@WORLD.as_on_one()
def test_a_hook_may_move_a_batch_of_its_own_to_the_device(strategy: str) -> Any:
    hooks: Any = dict.fromkeys(
        ["on_fit_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"], move
    )
    return fit(strategy, callbacks=[LambdaCallback(**hooks)])


class WithoutValidation(Net):
    validation_step: Any = None  # so one turns it off


@WORLD.as_on_one()
def test_a_step_that_is_none_is_left_out(strategy: str) -> Any:
    """A module may set its steps to `None`."""
    return fit(strategy, WithoutValidation(), loader(shuffle=True))


@WORLD.on(TWO)
def test_a_loader_outside_of_a_run_is_returned_as_it_is() -> None:
    """Outside of a run, the strategy leaves loaders alone."""
    made, given = trainer(OURS), loader()
    assert made.strategy.process_dataloader(given) is given
    made.fit(Net(), given, loader(13, 5, 9))
    assert made.strategy.process_dataloader(given) is given


@WORLD.on(TWO)
def test_the_strategy_answers_exactly_and_alike_on_all_ranks() -> None:
    """`strategy.reduce`, decisions and `broadcast` are exact; unequal `all_gather` raises."""
    fit(OURS, callbacks=[LambdaCallback(on_train_start=ask)], max_steps=1)


WEIGHTS = torch.arange(12.0).reshape(3, 4)


def gradient_of_gathered(strategy: Any) -> torch.Tensor:
    """It comes back transposed, as a contrastive loss makes it."""
    own = torch.ones(2, 3, requires_grad=True)
    gathered = strategy.all_gather(own, sync_grads=True).flatten(0, 1)
    (gathered.t().contiguous() * WEIGHTS).sum().backward()
    assert own.grad is not None
    return own.grad


def ask(made: pl.Trainer, module: Any) -> None:
    """In the middle of a run."""
    rank, strategy = dist.get_rank(), made.strategy
    reduce, decide, broadcast = strategy.reduce, strategy.reduce_boolean_decision, strategy.broadcast
    for found, right in (
        (reduce(torch.tensor(3 + rank)), torch.tensor(3.5)),  # Lightning's own: 3
        (reduce(torch.tensor([1, 2]) * (1 + rank), reduce_op="avg"), torch.tensor([1.5, 3.0])),
        (reduce(torch.tensor([2**40 + rank]), reduce_op="sum"), torch.tensor([2**41 + 1])),
        (reduce(torch.tensor([0.5, 4.0]) * (1 + rank), reduce_op=dist.ReduceOp.MAX), torch.tensor([1.0, 8.0])),
        (reduce(torch.tensor([3, 4]) * (1 + rank), reduce_op="min"), torch.tensor([3, 4])),
        (reduce(torch.tensor(3 + rank), reduce_op="product"), torch.tensor(12)),
        (reduce(torch.full((2,), 300.0, dtype=torch.float16)), torch.full((2,), 300.0, dtype=torch.float16)),
        (reduce(torch.tensor(rank == 1), reduce_op="sum"), torch.tensor(1)),
        (strategy.all_gather(torch.full((2,), float(rank))), torch.tensor([[0.0, 0.0], [1.0, 1.0]])),
        (gradient_of_gathered(strategy), 2 * WEIGHTS[:, 2 * rank : 2 * rank + 2].t()),
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    decided = [decide(rank == 0), decide(True), decide(rank == 0, all=False), decide(False, all=False)]
    assert decided == [False, True, True, False]
    told = [broadcast([f"a{rank}", 1.5, None]), broadcast(Path(f"p{rank}")), broadcast(f"r{rank}", src=1)]
    assert told == [["a0", 1.5, None], Path("p0"), "r1"]
    unequal = message_of(lambda: strategy.all_gather(torch.zeros(2 + rank)))
    assert unequal.startswith("MismatchError: all_gather needs tensors of the same shape, got [[2], [3]] by rank")


# --- what a run leaves behind -----------------------------------------------------------------------------------------


@WORLD.on(TWO)
def test_files_come_from_rank_zero_alone() -> None:
    """Rank 0 alone writes a Trainer's files."""
    options = {"logger": CSVLogger("files"), "enable_progress_bar": True, "enable_model_summary": True}
    made = trainer(OURS, callbacks=[ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True, **options)
    made.fit(Net(), loader(), loader(13, 5, 9))
    made.strategy.barrier()
    assert (made.is_global_zero, made.global_rank, made.world_size) == (dist.get_rank() == 0, dist.get_rank(), 2)
    checkpoint, metrics = sorted(str(path) for path in Path("files").rglob("*") if path.is_file())
    assert checkpoint.endswith(".ckpt") and metrics == "files/lightning_logs/version_0/metrics.csv"


class Copies(pl.Callback):
    """Copies a Trainer and what belongs to it by all means, in the middle of a fit."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.compare(trainer)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.compare(trainer)

    def compare(self, made: pl.Trainer) -> None:
        self.seen.append(f"step {made.global_step}")
        for each in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert type(each.strategy) is type(made.strategy)
            assert_equal(dict(each.callback_metrics), dict(made.callback_metrics), 0.0)
        for thing in (made.strategy, made.callbacks, made.fit_loop, made.lightning_module):
            copy.deepcopy(thing)


@WORLD.on(TWO)
def test_a_trainer_can_be_copied_and_pickled_in_the_middle_of_a_run_and_after_it() -> None:
    """You can copy and pickle a Trainer, even mid-run."""
    copies = Copies()
    made, module = trainer(OURS, callbacks=[copies], sync_batchnorm=True), Normalized()
    made.fit(module, loader(), loader(13, 5, 9))
    assert len(copies.seen) == 3
    copies.compare(made)
    original, copied = (each.validate(module, loader(13, 5, 9), verbose=False) for each in (made, copy.deepcopy(made)))
    assert_equal(copied, original, 0.0)


class FailsEverywhere(Normalized):
    where = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training" and batch_idx == 1:
            raise KeyError(self.where)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "validation":
            raise KeyError(self.where)
        return super().validation_step(batch, batch_idx)


@WORLD.as_on_one()
def test_a_trainer_fits_again_also_after_an_exception_that_all_processes_catch(strategy: str) -> Any:
    """A Trainer fits again, even after a caught exception."""
    results = []
    for where in ("training", "validation"):
        made, module = trainer(strategy, sync_batchnorm=True), FailsEverywhere()
        for module.where in (where, "", ""):
            with pytest.raises(KeyError) if module.where else contextlib.nullcontext():
                made.fit(module, loader(), loader(13, 5, 9))
            assert type(module.layers[0]) is nn.BatchNorm1d
            made.fit_loop.max_epochs += 1  # type: ignore[operator]
        results.append(outcome(made, module) | {"validated": made.validate(module, loader(13, 5, 9), verbose=False)})
    return results


# --- the callback beside a strategy -----------------------------------------------------------------------------------


@WORLD.as_on_one()
def test_the_callback_changes_nothing_beside_the_strategy(strategy: str) -> Any:
    """Lightning's `DDPCallback` changes nothing beside the strategy's name."""
    return fit(strategy, callbacks=[DDPCallback()])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_in_the_middle(strategy: str, path: Path) -> Path:
    """A checkpoint in the middle of the second of two epochs."""
    made = trainer(strategy, max_steps=6)
    made.fit(Net(scheduler=halving), loader(), loader(13, 5, 9))
    made.save_checkpoint(path)
    return path


def resume(strategy: str, path: Path) -> Any:
    devices, batch_size = (2, 4) if strategy == "ddp" else (1, 8)  # ddp's batches are those of each process
    made, module = trainer(strategy, max_epochs=3, devices=devices), Net(scheduler=halving)
    made.fit(module, loader(29, batch_size), loader(13, 5, 9), ckpt_path=path)
    return outcome(made, module)


@WORLD
def moved_checkpoints() -> Any:
    by_one = save_in_the_middle(PLAIN, Path(f"of-{dist.get_rank()}.ckpt"))
    of_one = resume(OURS, by_one)
    by_both = save_in_the_middle(OURS, Path("of-both.ckpt"))
    of_both = resume(OURS, by_both)
    with unittest.mock.patch.dict(os.environ):  # of which ddp removes some
        steps = resume("ddp", by_both)["global_step"]
    return of_one, of_both, steps, by_both.read_bytes()


def test_checkpoints_move_between_one_process_ddp_and_ours(tmp_path: Path) -> None:
    """A Trainer's checkpoint moves between one process, several and `ddp`."""
    with quiet():
        by_one, by_both = save_in_the_middle(PLAIN, tmp_path / "one.ckpt"), tmp_path / "both.ckpt"
        expected = resume(PLAIN, by_one)
    for of_one, of_both, steps, saved in WORLD.returned(moved_checkpoints):
        assert_equal([of_one, of_both], [expected, expected], RELATIVE)
        assert steps == expected["global_step"]
        by_both.write_bytes(saved)
    with quiet():
        assert_equal(resume(PLAIN, by_both), expected, RELATIVE)


def test_the_other_name_of_the_strategy_is_the_same_strategy() -> None:
    """You may also call the strategy `"callbacks"`."""
    with quiet():
        assert type(trainer("callbacks").strategy) is type(trainer(OURS).strategy) is CallbackStrategy


# --- settings that change the numbers, or how they are exchanged ------------------------------------------------------


def floats(precision: str, strategy: str) -> dict[str, torch.Tensor]:
    rows = DataLoader([(x.float(), y) for x, y in data(16)], 8)
    return fit(strategy, Net().float(), rows, precision=precision)["parameters"]


@WORLD
def precisions(strategy: str = OURS) -> Any:
    return {name: floats(name, strategy) for name in ("64-true", "32-true", "bf16-mixed")}


def test_precisions_are_lightning_s() -> None:
    """`32-true`, `64-true` and `bf16-mixed` work as in Lightning."""
    expected = on_one(precisions)
    first, second = WORLD.returned(precisions)
    assert_equal(second, first, 0.0)
    assert_equal(first["64-true"], expected["64-true"], RELATIVE)
    for name, rtol in (("bf16-mixed", 1e-3), ("32-true", 1e-6)):
        for key, value in first[name].items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[name][key], rtol=rtol, atol=rtol)


class Accumulates(Net):
    """By hand: two backwards without an exchange, a third with one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 3 < 2:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 3)
        else:
            self.manual_backward(self.loss(batch) / 3)
            optimizer.step()
            optimizer.zero_grad()


@WORLD.as_on_one()
def test_gradients_are_accumulated_by_hand_without_an_exchange(strategy: str) -> Any:
    """By hand you accumulate with `toggle_model(sync_grad=False)`."""
    return fit(strategy, Accumulates(), loader(29, 5))["parameters"]


@WORLD.as_on_one()
def test_an_optimizer_that_divides_its_state_works_as_under_ddp(strategy: str) -> Any:
    """`ZeroRedundancyOptimizer` works as under `ddp`."""

    def adam(net: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if strategy == OURS:
            return ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.05)
        return torch.optim.Adam(net.parameters(), lr=0.05)

    return fit(strategy, Net(optimizer=adam))["parameters"]


@WORLD
def running_statistics() -> Any:
    parameters = fit(OURS, Normalized(), loader(32, 8), max_epochs=1)["parameters"]
    averaged = Normalized()
    fit(OURS, averaged, callbacks=[EMAWeightAveraging(decay=0.7)], max_epochs=2)
    return parameters["layers.0.running_mean"], parameters["layers.0.num_batches_tracked"], averaged.state_dict()


def test_running_statistics_are_those_of_the_whole_data() -> None:
    """Running statistics cover all data, in averaged models, too."""
    (*_, first), (*_, second) = found = WORLD.returned(running_statistics)
    for mean, batches, _ in found:
        torch.testing.assert_close(mean, data(32).tensors[0].mean(0))
        assert batches == 4
    assert any("running_mean" in name for name in first)
    assert_equal(second, first, 0.0)


# --- what is sent -----------------------------------------------------------------------------------------------------


def trained(**options: Any) -> Any:
    torch.manual_seed(0)
    strategy: Any = CallbackStrategy(**options) if options else "auto"
    return fit(strategy, None, loader(32, 8))["parameters"]


APART = Way(layout=(1, 1))
SENT: dict[str, dict[str, Any]] = {
    "a hook": {"comm_hook": bf16_compress_hook},
    "bf16": {"compress": "bf16"},
}


@WORLD.runs(TWO, APART)
def by_what_is_sent() -> Any:
    return {name: trained(**options) for name, options in SENT.items()}


def test_a_comm_hook_is_used_and_compression_only_between_hosts() -> None:
    """A Trainer takes `comm_hook=`, and `compress=` between hosts."""
    with quiet():
        exact = trained()
    for here, apart in zip(WORLD.returned(by_what_is_sent), WORLD.returned(by_what_is_sent, APART), strict=True):
        assert_equal(here["bf16"], exact, RELATIVE)
        for parameters in (here["a hook"], *apart.values()):
            for name, value in parameters.items():
                assert 0 < (value - exact[name]).abs().max() < 0.02, name
