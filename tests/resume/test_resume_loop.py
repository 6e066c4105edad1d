"""A loop of one's own that is cut at any batch goes on at the next one, on any number of processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.once import once
from kit.ranks import Nursery, note, run_distributed
from resumed import ONE, in_all_pairs, in_pairs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ways import Way

from ddp_callbacks import (
    CheckpointFile,
    DiLoCo,
    GradientSynchronizer,
    LocalSGD,
    LocalSums,
    ParameterAverager,
    Preemption,
    join_process_group,
    load_checkpoint,
    resumable_loader,
    samples_needed,
    save_checkpoint,
    seed_by_rank,
    with_shares,
)
from ddp_callbacks.comm import all_reduce
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.random_state import plain_global_state
from ddp_callbacks.errors import EXIT_PREEMPTED, CheckpointError, ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

SAMPLES, BATCH_SIZE, EPOCHS = 34, 8, 3  # four batches, and one of two samples, of which some of three ranks have none
BATCHES = 5
EXACT = ("no_sync", "synchronized", "clipped")  # equal on all numbers of processes
WINDOWS = {"LocalSGD": LocalSGD(every=3), "DiLoCo": DiLoCo(every=3)}  # average parameters every three batches
KINDS = (*EXACT, "dropout", *WINDOWS)
RELATIVE = 1e-10


class Loop:
    """Adam, a schedule, accumulation over two batches, and the mean loss of each epoch.

    Args:
        kind: "no_sync" accumulates with it, "synchronized" without. "dropout" draws, and has running statistics, which
            differ between the ranks.
    """

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        self.model = nn.Sequential(
            nn.Linear(5, 7),
            nn.BatchNorm1d(7) if kind == "dropout" else nn.Tanh(),
            nn.Dropout(0.5 if kind == "dropout" else 0.0),
            nn.Linear(7, 1),
        ).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        at_least = samples_needed(self.model, BATCH_SIZE, get_world_size())
        self.loader = resumable_loader(DataLoader(data, BATCH_SIZE, shuffle=True), at_least=at_least)
        self.progress: dict[str, Any] = {"epoch": 0, "batch": 0, "losses": []}
        self.sums = LocalSums(loss=0.0, samples=0)
        self.averager = None
        if kind in WINDOWS:
            self.averager = ParameterAverager(self.model, WINDOWS[kind], self.optimizer if kind == "DiLoCo" else None)
        self.synchronizer = None if self.averager else GradientSynchronizer(self.model)
        engine = self.averager or self.synchronizer
        names = ("model", "optimizer", "schedule", "loader", "progress", "sums")
        self.objects = {name: getattr(self, name) for name in names} | {"engine": engine}
        if kind == "dropout":
            seed_by_rank()

    def step(self, batch: Any, share: Any) -> None:
        inputs, targets = batch
        self.progress["batch"] += 1
        is_last = self.progress["batch"] % 2 == 0 or self.progress["batch"] == BATCHES
        accumulates = self.kind in ("no_sync", "dropout") and not is_last
        if self.synchronizer is not None:
            self.synchronizer.weigh(share.local, share.total)
        no_sync = self.synchronizer.no_sync() if self.synchronizer is not None and accumulates else None
        with no_sync or contextlib.nullcontext():
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
        if share.local:
            self.sums["loss"] += loss.item() * share.local
            self.sums["samples"] += share.local
        if is_last or self.averager is not None:
            if self.kind == "clipped":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averager is not None:
            self.averager.step(share.local)

    def end_epoch(self) -> None:
        total = all_reduce(torch.tensor([self.sums["loss"], self.sums["samples"]], dtype=torch.float64), "the loss")
        self.progress["losses"].append((total[0] / total[1]).item())
        self.progress.update(epoch=self.progress["epoch"] + 1, batch=0)
        self.sums.update(loss=0.0, samples=0)
        self.schedule.step()

    def run(self, cut: int | None = None) -> Loop:
        """To the end, or until this many batches; a cut of 5.5 is the end of the first epoch."""
        while self.progress["epoch"] < EPOCHS:
            for batch, share in with_shares(self.loader):
                self.step(batch, share)
                if cut == self.progress["epoch"] * BATCHES + self.progress["batch"]:
                    return self
            self.end_epoch()
            if cut == self.progress["epoch"] * BATCHES + 0.5:
                return self
        return self

    def result(self) -> tuple[list[float], list[torch.Tensor]]:
        if self.averager is not None:
            self.averager.outer_step()
        if self.synchronizer is not None:
            self.synchronizer.close()
        return self.progress["losses"], parameters_of(self)


def parameters_of(loop: Loop) -> list[torch.Tensor]:
    return [value.detach().clone() for value in loop.model.state_dict().values()]


def cuts_of(kind: str, seed: str) -> list[float]:
    """In the middle of an epoch, and at its end; before and after what follows it."""
    draw = random.Random(kind + seed)
    return [draw.randrange(1, EPOCHS * BATCHES), draw.choice((0.5 + BATCHES, BATCHES, 2 * BATCHES))]


def path_of(folder: str, kind: str, cut: float) -> Path:
    return Path(folder, f"{kind}-{cut}.pt")


def cut_loops(way: Way, folder: str, seed: str) -> dict[str, Any]:
    """On the ranks: how each loop ends that is not cut; and those that are, which leave their files."""
    way.enter()
    results = {}
    for kind in KINDS:
        results[kind] = Loop(kind).run().result()
        for cut in cuts_of(kind, seed):
            loop, path = Loop(kind).run(cut), path_of(folder, kind, cut)
            with CheckpointFile(path, async_save=cut % 2 == 0) as file:
                save_checkpoint(file, loop.objects)
            results[path.stem] = loop.result()  # at the end of the window
    return results


def go_on(way: Way, folder: str, seed: str, is_same: bool) -> dict[str, Any]:
    """On the ranks: each loop after its cuts, as it is loaded, what it draws first, and its end."""
    way.enter()
    results: dict[str, Any] = {}
    for kind in KINDS:
        for cut in cuts_of(kind, seed):
            loop, path = Loop(kind), path_of(folder, kind, cut)
            if kind not in EXACT and not is_same:
                torch.rand(3)
            assert load_checkpoint(path, loop.objects)
            loaded = loop.progress["losses"][:], parameters_of(loop)
            draws = checksum_of(plain_global_state()[0])
            results[path.stem] = loaded, draws, loop.run().result()
    return results


@once
def uncut(way: Way, seed: str = "") -> tuple[list[dict[str, Any]], str]:
    """What each rank has of loops that are not cut, and of those that are; and the folder of their files."""
    folder = tempfile.mkdtemp()
    return run_distributed(cut_loops, way.size, way, folder, seed), folder


def assert_goes_on(before: Way, after: Way, seed: str = "") -> None:
    (first, *others), folder = uncut(before, seed)
    by_rank = run_distributed(go_on, after.size, after, folder, seed, before == after)
    for name in by_rank[0]:
        kind = name.split("-")[0]
        different = len({results[name][1] for results in by_rank})
        assert before == after or different == (after.size if kind == "dropout" else 1), f"{name}: what ranks draw"
        for rank, results in enumerate(by_rank):
            loaded, _, ended = results[name]
            if before == after:
                assert_loops_equal(ended, [first, *others][rank][kind], 0, name)
            elif kind in EXACT:
                assert_loops_equal(ended, uncut(ONE, seed)[0][0][kind], RELATIVE, name)
            else:
                assert len(ended[0]) == EPOCHS, name
            if before != after and kind in WINDOWS:
                assert_loops_equal(loaded, first[name], RELATIVE, name)


def assert_loops_equal(found: Any, expected: Any, relative: float, name: str) -> None:
    """The mean losses of the epochs, and the parameters."""
    assert found[0] == pytest.approx(expected[0], rel=relative, abs=0), name
    torch.testing.assert_close(found[1], expected[1], rtol=relative, atol=relative, msg=name)


@pytest.mark.shares_results
@in_pairs
def test_a_loop_that_is_cut_goes_on_at_the_next_batch(before: Way, after: Way) -> None:
    """Your own loop resumes at the next batch."""
    assert_goes_on(before, after)


@pytest.mark.shares_results("seed")
@in_all_pairs
@pytest.mark.parametrize("seed", range(8))
def test_a_loop_cut_anywhere_goes_on_at_the_next_batch(before: Way, after: Way, seed: int) -> None:
    assert_goes_on(before, after, str(seed))


# --- stopped by a signal ----------------------------------------------------------------------------------------------


def train_until_asked(path: str, signalled: int | None) -> None:
    """As on the page: after each batch, the ranks ask whether to stop."""
    join_process_group()
    loop = Loop("no_sync")
    with Preemption() as preemption, CheckpointFile(path, async_save=True) as file:
        note("goes on", load_checkpoint(file, loop.objects))
        while loop.progress["epoch"] < LONG:
            for batch, share in with_shares(loop.loader):
                loop.step(batch, share)
                if get_rank() == signalled and loop.progress["epoch"] >= 1:
                    signalled = None
                    os.kill(os.getpid(), signal.SIGTERM)
                if preemption.is_requested():
                    save_checkpoint(file, loop.objects)
                    note("stopped at", loop.progress["epoch"] * BATCHES + loop.progress["batch"])
                    preemption.exit(path)
            loop.end_epoch()
    note("losses", loop.result()[0])


LONG = 300  # epochs; the ranks agree within a fraction of them


def test_a_loop_that_a_signal_stops_on_several_processes_goes_on_on_others(nursery: Nursery, tmp_path: Path) -> None:
    path, stopped = str(tmp_path / "run.pt"), [0]
    for world_size, signalled in ((2, 1), (1, 0)):
        ranks = nursery.run(train_until_asked, world_size, tmp_path, path, signalled)
        assert [rank.code for rank in ranks] == [EXIT_PREEMPTED] * world_size, ranks[0].stderr
        assert {rank.notes["goes on"] for rank in ranks} == {bool(stopped[1:])}
        (at,) = {rank.notes["stopped at"] for rank in ranks}
        stopped.append(at)
        for rank in range(world_size):
            (tmp_path / f"notes-{rank}").unlink()
    assert stopped == sorted(stopped) and stopped[-1] < LONG * BATCHES
    (whole,) = nursery.run(train_until_asked, 1, tmp_path, str(tmp_path / "whole.pt"), None)
    (tmp_path / "notes-0").unlink()
    for rank in nursery.run(train_until_asked, 2, tmp_path, path, None):
        assert rank.code == 0, rank.stderr
        assert rank.notes["losses"] == pytest.approx(whole.notes["losses"], rel=RELATIVE, abs=0)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_loop_is_refused_what_it_cannot_go_on_from(tmp_path: Path) -> None:
    path, loop = tmp_path / "run.pt", Loop("no_sync").run(3)
    assert not load_checkpoint(path, loop.objects)
    save_checkpoint(path, loop.objects)
    data = TensorDataset(torch.zeros(35, 5), torch.zeros(35, 1))
    others = {
        "model": (
            nn.Linear(5, 1),
            r"model: Sequential with parameters 7x5, 7, 1x7, 1 in .* Linear with parameters",
        ),
        "loader": (
            resumable_loader(DataLoader(data, 16)),
            r"samples in the data set of loader: 34 in the file, 35 now; batch size of loader: 8 in the file, 16 now",
        ),
        "another": ({}, r"must hold the objects \['another', 'engine', .*\], got \['engine', .*\]"),
    }
    for name, (value, text) in others.items():
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(path, {**loop.objects, name: value})
    with pytest.raises(ConfigurationError, match="'data' must have state_dict and load_state_dict, or be a dict of"):
        save_checkpoint(path, {"data": DataLoader(data)})
    with CheckpointFile(path) as file:
        file.write({}, {}, {})
    with pytest.raises(CheckpointError, match="belongs to another run"):
        load_checkpoint(path, loop.objects)
