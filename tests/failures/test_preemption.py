"""All ranks stop at the same moment once one of them has been asked to."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchbearer
from kit.commands import start
from kit.ranks import Nursery, note, run_distributed
from misfortunes import Misfortune, batches, my_rank, new_model, sgd
from shared_worlds import TWO, WIDE, World, by_rank
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import on_sample

from ddp_callbacks import Preemption
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce
from ddp_callbacks.errors import EXIT_PREEMPTED, PeerError, Preempted
from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.torchbearer import DDPCallback, Resume

WORLD = World(__name__)
pytestmark = pytest.mark.shares_results()


def steps_until_a_stop(preemption: Preemption) -> int:
    """How many steps this rank takes, of which each waits for all ranks."""
    for step in range(1, 10_000):
        all_reduce(torch.ones(1), "a step")
        if preemption.is_requested():
            return step
    return 0


@WORLD.on(TWO, WIDE)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_is_named_on_all() -> None:
    """Signals and requests stop all at one step."""
    for rank, name in ((1, "SIGUSR1"), (0, "SIGTERM")):
        with Preemption() as preemption:
            assert not preemption.is_requested()  # a moment of its own before the others' first
            if dist.get_rank() == rank:
                os.kill(os.getpid(), signal.Signals[name])
            end = steps_until_a_stop(preemption), preemption.reason
            assert preemption.is_requested()  # it stays so
        assert by_rank(end) == [end] * dist.get_world_size()
        assert end[0] > 0 and end[1].startswith(f"{name}, first seen on rank {rank} (host ")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@WORLD.on(WIDE)
def test_a_stop_of_all_ranks_is_found_after_one_of_some() -> None:
    some = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with Preemption(process_group=some) as preemption:
            assert not preemption.is_requested()
    with Preemption() as preemption:
        if dist.get_rank() == 2:
            preemption.request("a test")
        end = steps_until_a_stop(preemption)
    assert by_rank(end) == [end] * 3 and end


@WORLD
def test_ranks_that_are_far_apart_stop_where_the_first_of_them_is() -> None:
    # Rank 0 is far ahead when rank 1 is asked to stop, as with local steps.
    taken = 0
    with Preemption() as preemption:
        if dist.get_rank() == 0:
            while taken < 500:
                assert not preemption.is_requested()
                taken += 1
        all_reduce(torch.ones(1), "a meeting")
        if dist.get_rank() == 1:
            preemption.request("the budget is spent")
        while not preemption.is_requested():
            taken += 1
            if dist.get_rank() == 0:
                time.sleep(1e-3)
        assert preemption.reason.startswith("the budget is spent on rank 1 (host ")
    assert by_rank(taken) == [taken] * 2 and taken >= 500


@WORLD
def test_a_request_behind_the_last_moment_of_another_rank_stops_nobody_and_blocks_nobody() -> None:
    is_late = dist.get_rank() == 1
    with Preemption() as preemption:
        answers = [preemption.is_requested() for _ in range(2 if is_late else 3)]
        all_gather_object(None, "the last moment of rank 0")
        if is_late:
            preemption.request("too late for rank 0")
            answers.append(preemption.is_requested())
        assert answers == [False] * 3
    all_gather_object(None, "the end")


def fail_while_another_wants_to_stop() -> str:
    """Rank 1, which comes to no moment: its process may have died as well."""
    if dist.get_rank() == 1:
        report_failure(RuntimeError("the disk is full"))
        return ""
    begin = time.monotonic()
    with Preemption() as preemption, pytest.raises(PeerError) as caught:
        preemption.request("a test")
        while not preemption.is_requested():
            time.sleep(1e-3)
    assert time.monotonic() - begin < 20
    return str(caught.value)


def test_a_rank_that_wants_to_stop_hears_of_one_that_fails_instead() -> None:
    text, _ = run_distributed(fail_while_another_wants_to_stop, 2, deadline=60)
    assert re.match(r"rank 1 \(host \S+, pid \d+\) failed with RuntimeError: the disk is full", text)


# --- a Trial and a Trainer --------------------------------------------------------------------------------------------


def signal_in_a_long_step() -> None:
    model = new_model()

    @on_sample
    def sample(state: Any) -> None:
        if state[torchbearer.BATCH] == 5:
            if my_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(2)
            note("in the step")

    trial = Trial(model, sgd(model), mse_loss, callbacks=[DDPCallback(), sample, Resume("run.pt")], verbose=0)
    rows = TensorDataset(torch.ones(400, 3), torch.ones(400, 1))
    trial.to(torch.float64).with_train_generator(DataLoader(rows, 4))
    try:
        trial.run(1)
    except Preempted:
        note("stopped")
        raise


@pytest.mark.waits(2)
def test_the_file_is_there_after_the_step_in_which_the_signal_came(nursery: Nursery, tmp_path: Path) -> None:
    """The checkpoint is there a step after the signal."""
    ranks = nursery.run_watched(signal_in_a_long_step, 2, tmp_path)
    assert [rank.code for rank in ranks] == [EXIT_PREEMPTED] * 2, [rank.stderr for rank in ranks]
    position = torch.load(tmp_path / "run.pt", weights_only=False)["ddp_callbacks"]
    own = torch.load(io.BytesIO(position["ranks"][0].numpy().tobytes()), weights_only=False)
    assert own["batches"] == 6, "the batch under way is the last one"
    for rank in ranks:
        assert rank.noted_at["stopped"] - rank.noted_at["in the step"] < 2 * rank.slowness


def leave_signals_alone() -> None:
    """Two epochs of three steps, in which a signal comes that the program handles itself."""
    signal.signal(signal.SIGUSR1, lambda *_: note("handled"))
    model = new_model()

    @on_sample
    def signal_myself(state: Any) -> None:
        if state[torchbearer.BATCH] == 2 and my_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    callbacks = [DDPCallback(), signal_myself, Resume("run.pt", on_signal=False)]
    trial = Trial(model, sgd(model), mse_loss, callbacks=callbacks, verbose=0).to(torch.float64)
    note("epochs", len(trial.with_train_generator(batches(Misfortune())).run(2)))


def test_signals_are_left_alone_where_the_user_says_so(nursery: Nursery, tmp_path: Path) -> None:
    """With `on_signal=False` signals remain your program's."""
    for number, rank in enumerate(nursery.run(leave_signals_alone, 2, tmp_path)):
        assert rank.code == 0, rank.stderr
        assert rank.notes["epochs"] == 2 and ("handled" in rank.notes) == (number == 1)


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_stops_by_a_signal_a_request_and_time_without_a_group() -> None:
    with Preemption() as preemption:
        assert not preemption.is_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_requested()
        assert preemption.reason.startswith("SIGTERM, first seen on rank 0 (host ")
    with Preemption() as preemption:
        assert not preemption.is_requested()
        preemption.request("a test")
        assert preemption.is_requested()
    with Preemption(time_limit=timedelta(microseconds=1)) as preemption:
        assert preemption.is_requested()
        assert preemption.reason.startswith("the time limit")


def test_the_end_of_a_run_that_was_stopped_has_an_exit_code_and_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stopped run exits with code 75."""
    monkeypatch.setenv("DDP_CALLBACKS_NEWS", "")  # as ddprun does
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "told"))
    with Preemption() as preemption, caplog.at_level("INFO"), pytest.raises(Preempted) as caught:
        preemption.request("the budget is spent")
        assert preemption.is_requested()
        preemption.exit("run.pt")
    assert caught.value.code == EXIT_PREEMPTED == 75
    assert (tmp_path / "told").read_text() == '{"preempted": true}\n'
    place = rf"rank 0 \(host {socket.gethostname()}, pid {os.getpid()}\)"
    said = rf"stopped by the budget is spent on {place}; run\.pt is written, from which .* resumes"
    assert re.fullmatch(said, caplog.messages[0])


SIGNALLED = """
import os, signal, sys
from ddp_callbacks import Preemption
from ddp_callbacks.process_group import preemption
preemption.SAME = float(sys.argv[1])
asked = Preemption()
for _ in range(2):
    with asked:
        for _ in range(int(sys.argv[2])):
            os.kill(os.getpid(), signal.SIGTERM)
        print(asked.is_requested(), asked.reason.split(",")[0], flush=True)
"""


@pytest.mark.parametrize(
    ("same", "signals", "code"),
    [
        pytest.param(3.0, 2, 0, id="right behind the first"),
        pytest.param(0.0, 2, -signal.SIGTERM, id="later"),
        pytest.param(0.0, 1, 0, id="in the second run"),
    ],
)
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, same: float, signals: int, code: int) -> None:
    """A second signal ends a process at once."""
    with start(["python", "-c", SIGNALLED, same, signals], tmp_path) as program:
        printed, _ = program.communicate(timeout=60)
    assert (program.returncode, printed) == (code, "True SIGTERM\n" * (0 if code else 2))


def wait_to_be_terminated(is_ready: Any) -> None:
    is_ready.set()
    time.sleep(60)


def test_a_forked_child_still_ends_when_it_is_terminated() -> None:
    """A forked child still ends on SIGTERM."""
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    with Preemption() as preemption:
        child = context.Process(target=wait_to_be_terminated, args=(is_ready,))
        child.start()
        assert is_ready.wait(20)  # Python forgets a signal that comes before it has set the child up
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert not preemption.is_requested()


SPAWNING = """
import os, sys, time, torch
from ddp_callbacks import Preemption, spawn
from ddp_callbacks.comm.collectives import all_reduce


def train(stops):
    if not stops:
        os.write(1, b"ready\\n")  # at once, also beside the other
        time.sleep(60)
    with Preemption() as preemption:
        os.write(1, b"ready\\n")  # at once, also beside the other
        while not preemption.is_requested():
            all_reduce(torch.ones(1), "a step")
        preemption.exit("run.pt")


if __name__ == "__main__":
    spawn(train, 2, (sys.argv[1] == "stops",))
"""


@pytest.mark.cold
@pytest.mark.parametrize(("does", "code"), [("stops", 75), ("ends", -signal.SIGTERM)])
def test_a_signal_to_a_script_that_spawns_reaches_its_processes_whose_end_is_its_own(
    tmp_path: Path, does: str, code: int
) -> None:
    """A signal reaches the processes that you spawned."""
    (tmp_path / "train.py").write_text(SPAWNING)
    with start(["python", "train.py", does], tmp_path) as job:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        for _ in range(2):
            next(line for line in lines if line == "ready\n")
        job.terminate()
        assert job.wait(60) == code


DUMPED = """
import faulthandler, os, signal, sys
from ddp_callbacks import Preemption
faulthandler.register(signal.SIGUSR1, file=sys.stdout)
with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGUSR1)
    print(preemption.is_requested(), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
print("lives", flush=True)
"""


def test_a_signal_for_which_faulthandler_prints_stacks_still_prints_them(tmp_path: Path) -> None:
    with start(["python", "-c", DUMPED], tmp_path) as program:
        printed, _ = program.communicate(timeout=60)
    assert program.returncode == 0 and printed.endswith("lives\n") and printed.count("most recent call first") == 2
    assert "False\n" in printed
    assert "SIGUSR1 does not ask to stop: faulthandler, or other code in C, handles it" in printed
