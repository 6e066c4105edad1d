"""All ranks stop at the same moment once one of them has been asked to."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import TWO_PROCESSES, start
from distributed import run_distributed

from ddp_callbacks import Preemption
from ddp_callbacks.comm.collectives import all_gather_json, all_reduce
from ddp_callbacks.errors import EXIT_PREEMPTED, ConfigurationError, PeerError, Preempted
from ddp_callbacks.process_group.failures import report_failure


def steps_until_a_stop(preemption: Preemption, most: int = 10_000) -> int:
    """How many steps this rank takes, of which each waits for all ranks."""
    for step in range(1, most + 1):
        all_reduce(torch.ones(1), "a step")
        if preemption.is_requested():
            return step
    return 0


def stop_by_a_signal_to_one_rank_while_the_others_are_in_a_step() -> list[tuple[int, str]]:
    ends = []
    for rank, number in ((1, signal.SIGUSR1), (0, signal.SIGTERM)):
        with Preemption() as preemption:
            if dist.get_rank() == rank:
                assert not preemption.is_requested()  # a moment of its own before the others' first
                os.kill(os.getpid(), number)
            else:
                assert not preemption.is_requested()
            ends.append((steps_until_a_stop(preemption), preemption.reason))
            assert preemption.is_requested()  # it stays so
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return ends


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_is_named_on_all(world_size: int) -> None:
    first, *others = run_distributed(stop_by_a_signal_to_one_rank_while_the_others_are_in_a_step, world_size)
    assert all(ends == first for ends in others)
    (steps_one, reason_one), (steps_two, reason_two) = first
    assert steps_one > 0 and steps_two > 0
    assert reason_one.startswith("SIGUSR1 on rank 1 (host ") and reason_two.startswith("SIGTERM on rank 0 (host ")


def stop_ranks_that_do_not_wait_for_each_other() -> int:
    """Rank 0 is far ahead when rank 1 is asked to stop, as with local steps."""
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
    return taken


def test_ranks_that_are_far_apart_stop_where_the_first_of_them_is() -> None:
    one, other = run_distributed(stop_ranks_that_do_not_wait_for_each_other, 2)
    assert one == other >= 500


def ask_when_another_rank_has_ended() -> list[bool]:
    answers = []
    with Preemption() as preemption:
        if dist.get_rank() == 1:
            answers = [preemption.is_requested() for _ in range(2)]
            preemption.request("too late for rank 0")
            answers += [preemption.is_requested()]
        else:
            answers = [preemption.is_requested() for _ in range(3)]
    all_gather_json(None, "the end")
    return answers


def test_a_request_behind_the_last_moment_of_another_rank_stops_nobody_and_blocks_nobody() -> None:
    assert run_distributed(ask_when_another_rank_has_ended, 2) == [[False] * 3] * 2


def stop_by_time() -> list[str]:
    # Only the clock of one rank says so.
    limit = timedelta(seconds=0.3) if dist.get_rank() == 1 else timedelta(hours=1)
    with Preemption(time_limit=limit) as preemption:
        begin = time.monotonic()
        steps_until_a_stop(preemption, 10**6)
        assert 0.2 < time.monotonic() - begin < 20
        return [preemption.reason]


def test_a_time_limit_stops_all() -> None:
    one, other = run_distributed(stop_by_time, 2)
    assert one == other and one[0].startswith("the time limit on rank 1")


def fail_while_another_wants_to_stop() -> str:
    if dist.get_rank() == 1:  # it enters no context: its process may have died as well
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
    text, _ = run_distributed(fail_while_another_wants_to_stop, 2)
    assert text.startswith("rank 1 failed with RuntimeError: the disk is full")


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_stops_by_a_signal_a_request_and_time_without_a_group() -> None:
    with Preemption() as preemption:
        assert not preemption.is_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_requested()
        assert preemption.reason.startswith("SIGTERM on rank 0 (host ")
    with Preemption() as preemption:
        assert not preemption.is_requested()
        preemption.request("a test")
        assert preemption.is_requested()
    with Preemption(time_limit=timedelta(microseconds=1)) as preemption:
        assert preemption.is_requested()
        assert preemption.reason.startswith("the time limit")


def test_the_end_of_a_run_that_was_stopped_has_an_exit_code_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with Preemption() as preemption, caplog.at_level("INFO"), pytest.raises(Preempted) as caught:
        preemption.request("the budget is spent")
        assert preemption.is_requested()
        preemption.exit("run.pt")
    assert caught.value.code == EXIT_PREEMPTED == 75
    place = rf"rank 0 \(host {socket.gethostname()}, pid {os.getpid()}\)"
    said = rf"stopped by the budget is spent on {place}; run\.pt is written, from which .* goes on"
    assert re.fullmatch(said, caplog.messages[0])


@pytest.mark.parametrize("limit", [timedelta(0), 60, "04:00:00"])
def test_a_time_limit_must_be_longer_than_zero(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="time_limit must be a timedelta longer than zero, or None, got "):
        Preemption(time_limit=limit)


AGAIN = """
import os, signal
from ddp_callbacks import Preemption
from ddp_callbacks.process_group import preemption
preemption.SAME = 0.0
asked = Preemption()
for _ in range(2):
    with asked:
        os.kill(os.getpid(), signal.SIGTERM)
        print(asked.is_requested(), asked.reason.split()[0], flush=True)
"""


def test_a_signal_to_the_second_run_of_a_program_is_its_first() -> None:
    ended = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True SIGTERM\n" * 2), ended.stderr


PROGRAM = """
import os, signal, sys, time
from ddp_callbacks import Preemption
from ddp_callbacks.process_group import preemption
preemption.SAME = float(sys.argv[1])
with Preemption() as asked:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", asked.is_requested(), flush=True)
"""


@pytest.mark.parametrize(("same", "code", "printed"), [(3.0, 0, "still here True\n"), (0.0, -signal.SIGTERM, "")])
def test_a_second_signal_ends_the_process_at_once_unless_it_comes_right_behind_the_first(
    same: float, code: int, printed: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(same)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr


def wait_to_be_terminated(is_ready: Any) -> None:
    is_ready.set()
    time.sleep(60)


def test_a_forked_child_still_ends_when_it_is_terminated() -> None:
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
import sys, time, torch
from ddp_callbacks import Preemption, spawn
from ddp_callbacks.comm.collectives import all_reduce


def train(stops):
    if not stops:
        print("ready", flush=True)
        time.sleep(60)
    with Preemption() as preemption:
        print("ready", flush=True)
        while not preemption.is_requested():
            all_reduce(torch.ones(1), "a step")
        preemption.exit("run.pt")


if __name__ == "__main__":
    spawn(train, 2, (sys.argv[1] == "stops",))
"""


@pytest.mark.parametrize(("does", "code"), [("stops", 75), ("ends", -signal.SIGTERM)])
def test_a_signal_to_a_script_that_spawns_reaches_its_processes_whose_end_is_its_own(
    tmp_path: Path, does: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    job = subprocess.Popen([sys.executable, str(script), does], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    for _ in range(2):
        assert job.stdout.readline() == "ready\n"
    job.terminate()
    assert job.wait(60) == code
    job.stdout.close()


SLOW_STEPS = """
import os, sys, time, torch, torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial, callbacks
from ddp_callbacks.torchbearer import DDPCallback, Resume


@callbacks.on_sample
def begin(state):
    line = f"rank {os.environ['RANK']} batch {state[torchbearer.BATCH]} pid {os.getpid()}\\n"
    os.write(1, line.encode())  # at once: the other process writes to the same pipe
    time.sleep(float(sys.argv[1]))


model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trial = Trial(model, optimizer, nn.MSELoss(), callbacks=[DDPCallback(), begin, Resume("run.pt")])
trial.with_train_generator(DataLoader(TensorDataset(torch.ones(400, 2), torch.ones(400, 1)), batch_size=4))
trial.run(1, verbose=0)
"""


def test_the_file_is_there_a_step_after_the_signal_to_any_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW_STEPS)
    seconds = 0.5
    with start([*TWO_PROCESSES, script, seconds], tmp_path, cold=True) as job:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        words = next((line.split() for line in lines if line.startswith("rank 1 batch 5 ")), None)
        assert words is not None
        begin = time.monotonic()
        os.kill(int(words[-1]), signal.SIGUSR1)
        while not (tmp_path / "run.pt").exists() and time.monotonic() - begin < 60:
            time.sleep(0.01)
        took = time.monotonic() - begin
        rest = "".join(lines)
        job.wait(60)
    position = torch.load(tmp_path / "run.pt", weights_only=False)["ddp_callbacks"]
    own = torch.load(io.BytesIO(position["ranks"][0].numpy().tobytes()), weights_only=False)
    assert own["position"]["batches"] == 6, rest  # the batch under way is the last one
    assert took < 2 * seconds + 2, rest  # the machine has other work
