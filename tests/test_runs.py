"""What fails in one run, and is caught, is over when the next begins."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torchbearer
from nursery import HOSTNAME, Nursery, note, noting_errors
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from ddp_callbacks import GradientSynchronizer, join_process_group
from ddp_callbacks.errors import PeerError
from ddp_callbacks.torchbearer import DDPCallback

SAMPLES, BATCH, EPOCHS = 12, 4, 2
LONG = 2.5  # seconds, more than two looks of who waits


class Pruned(Exception):
    """As Optuna's TrialPruned."""


def my_rank() -> int:
    return int(os.environ.get("RANK", 0))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 3, generator=generator).double(), torch.randn(SAMPLES, 1, generator=generator).double()
    )


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def weights(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def train_plainly() -> list[float]:
    """What one process gives."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return weights(model)


def assert_trained(ranks: list[Any], name: str) -> None:
    expected = torch.tensor(train_plainly(), dtype=torch.float64)
    for rank in ranks:
        torch.testing.assert_close(
            torch.tensor(rank.notes[name], dtype=torch.float64), expected, rtol=1e-10, atol=1e-10
        )


# --- Torchbearer ------------------------------------------------------------------------------------------------------


def run_trial(misfortune: str) -> list[float]:
    model = new_model()

    @torchbearer.callbacks.on_sample
    def happens(state: Any) -> None:
        if state[torchbearer.EPOCH] == 1 and state[torchbearer.BATCH] == 1:
            if misfortune == "all prune":
                raise Pruned("of no promise")
            if misfortune == "out of memory on rank 1" and my_rank() == 1:
                raise torch.OutOfMemoryError("no room for the batch")
            if misfortune == "a long step on rank 0" and my_rank() == 0:
                time.sleep(LONG)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [DDPCallback(), happens]
    trial = Trial(model, optimizer, nn.functional.mse_loss, metrics=["loss"], callbacks=callbacks, verbose=0)
    trial = trial.to(torch.float64)
    trial.with_train_generator(DataLoader(data(), BATCH)).run(EPOCHS)
    return weights(model)


def sweep() -> None:
    """Two trials end in an exception, each is caught; the one after each has a long step, in which the others look."""
    torch.set_num_threads(1)
    previous = ""
    for misfortune in ("all prune", "a long step on rank 0", "out of memory on rank 1", "a long step on rank 0"):
        try:
            note("weights", run_trial(misfortune))
            note(f"after {previous}", run_trial("none"))
        except (Pruned, torch.OutOfMemoryError, PeerError) as error:
            previous = misfortune
            note(misfortune, [type(error).__name__, str(error)])


def test_a_pruned_trial_and_one_out_of_memory_leave_the_processes_able_to_train(
    nursery: Nursery, tmp_path: Path
) -> None:
    ranks = nursery.run(sweep, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    for rank in ranks:
        assert rank.notes["all prune"] == ["Pruned", "of no promise"]
    assert ranks[1].notes["out of memory on rank 1"] == ["OutOfMemoryError", "no room for the batch"]
    kind, text = ranks[0].notes["out of memory on rank 1"]
    assert kind == "PeerError"
    assert f"rank 1 (host {HOSTNAME}, pid {ranks[1].pid}) failed with OutOfMemoryError: no room for the batch" in text
    for name in ("weights", "after all prune", "after out of memory on rank 1"):
        assert_trained(ranks, name)


# --- Lightning --------------------------------------------------------------------------------------------------------


def run_fit(misfortune: str) -> list[float]:
    import lightning.pytorch as pl

    from ddp_callbacks.lightning import CallbackStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if misfortune == "all prune" and self.current_epoch == 1:
                raise Pruned("of no promise")
            if misfortune == "out of memory on rank 1" and my_rank() == 1 and self.current_epoch == 1:
                raise torch.OutOfMemoryError("no room for the batch")
            if misfortune == "a long step on rank 0" and my_rank() == 0 and self.global_step == 1:
                time.sleep(LONG)
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy=CallbackStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), BATCH))
    return weights(module.model)


def sweep_of_fits() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    previous = ""
    for misfortune in ("all prune", "a long step on rank 0", "out of memory on rank 1", "a long step on rank 0"):
        try:
            note("weights", run_fit(misfortune))
            note(f"after {previous}", run_fit("none"))
        except (Pruned, torch.OutOfMemoryError, PeerError) as error:
            previous = misfortune
            note(misfortune, [type(error).__name__, str(error)])


def test_a_pruned_fit_and_one_out_of_memory_leave_the_processes_able_to_train(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(sweep_of_fits, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert ranks[0].notes["all prune"] == ranks[1].notes["all prune"] == ["Pruned", "of no promise"]
    assert ranks[1].notes["out of memory on rank 1"][0] == "OutOfMemoryError"
    assert ranks[0].notes["out of memory on rank 1"][0] == "PeerError"
    for name in ("weights", "after all prune", "after out of memory on rank 1"):
        assert_trained(ranks, name)


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def loop(fails: bool) -> list[float]:
    model = new_model()
    synchronizer = GradientSynchronizer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for epoch in range(EPOCHS):
            for x, y in DataLoader(data(), BATCH):
                if fails and my_rank() == 1 and epoch == 1:
                    raise torch.OutOfMemoryError("no room for the batch")
                part = slice(my_rank(), None, 2)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[part]), y[part]).backward()
                optimizer.step()
    finally:
        synchronizer.close()
    return weights(model)


def loops() -> None:
    torch.set_num_threads(1)
    join_process_group()
    try:
        loop(fails=True)
    except Exception as error:
        note("caught", [type(error).__name__, str(error)])
    note("weights", loop(fails=False))


def test_an_own_loop_goes_on_after_an_exception_on_one_rank(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(loops, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    kind, text = ranks[0].notes["caught"]
    assert kind == "MismatchError" and "waits for the gradients of bucket 0, while rank 1" in text, text
    assert "waits for the begin of a run" in text
    assert_trained(ranks, "weights")


# --- ends that are for good -------------------------------------------------------------------------------------------


def die_between_two_trials() -> None:
    """Rank 1 catches what ends its trial, and then fails for good where nobody catches."""
    torch.set_num_threads(1)
    try:
        run_trial("all prune")
    except Pruned:
        pass
    if my_rank() == 1:
        note("happens")
        raise RuntimeError("the study cannot be saved")
    with noting_errors():
        run_trial("none")


def test_an_exception_that_ends_a_process_is_never_forgotten(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(die_between_two_trials, 2, tmp_path)
    assert [rank.code for rank in ranks] == [1, 1]
    kind, text = ranks[0].notes["error"]
    assert kind == "PeerError"
    assert f"pid {ranks[1].pid}) failed with RuntimeError: the study cannot be saved" in text
    assert ranks[0].noted_at["error"] - ranks[1].noted_at["happens"] < 4 * ranks[0].slowness


def fork_a_child() -> None:
    """A child that exits as an interpreter does, and one that raises: neither speaks for the rank."""
    torch.set_num_threads(1)
    join_process_group()
    for ends in (lambda: sys.exit(0), lambda: 1 / 0):
        child = os.fork()
        if child == 0:
            ends()
        os.waitpid(child, 0)
    note("weights", run_trial("a long step on rank 0"))


def test_a_forked_child_that_ends_does_not_speak_for_the_rank(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(fork_a_child, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert_trained(ranks, "weights")
