"""What a job's report says, from totals that ranks have sent: without processes or a clock."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchbearer
from kit.budget import NUMBERS, calibrate
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_callbacks.cluster.environment import REPORT
from ddp_callbacks.data.sharding import with_shares
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.run_job import take_request
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.reporting import page, recorder, summary
from ddp_callbacks.reporting.collector import Collector, in_any_case
from ddp_callbacks.reporting.progress import Progress
from ddp_callbacks.reporting.recorder import PARTS, Recorder
from ddp_callbacks.reporting.requests import RUNS, ask, folder_of, hold, new_folder, take_requests
from ddp_callbacks.reporting.status import show_status, table
from ddp_callbacks.reporting.stopwatch import Stopwatch, begin_wait, end_wait
from ddp_callbacks.reporting.trace import Span, write
from ddp_callbacks.torchbearer import DDPCallback

NO_TIME = dict.fromkeys(PARTS, 0.0)
EVEN = NO_TIME | {"in forward": 20.0, "in backward": 40.0, "waiting": 10.0, "between steps": 5.0}


def job(*ranks: dict[str, float], steps: int = 1000, nodes: int = 1, **more: Any) -> dict[str, Any]:
    """The data of a job whose ranks took these seconds for each part."""
    about = {"settings": {"compress": "None"}, "versions": {"torch": "2.13.0"}, "device": "CPU", "threads": 1}
    return {
        "command": ["train.py", "--name", "<b>"],
        "date": "2026-01-02 03:04",
        "seconds": 90.0,
        "events": [(10.0, "epoch", "epoch 1"), (40.0, "note", "rank 1 on a was killed; continuing with 1 process")],
        "ranks": [
            {
                "rank": number,
                "node": f"node{number % nodes}",
                "seconds": EVEN | own,
                "waits": NO_TIME | {"waiting": (EVEN | own)["waiting"]},
                "least": NO_TIME | {"waiting": min((EVEN | each)["waiting"] for each in ranks)},
                "loads_all": False,
                "starting": 0.0,
                "compared": 0.0,
                "batch": 64,
                "longest": [1, 0.5],
                "steps": steps,
                "samples": [(9.0, 0), (50.0, steps // 2), (90.0, steps)],
                "stepped": 0.1,
                "is_lost": False,
                "stage": "training",
                "line": "epoch 1",
                "epoch": 2,
                "gradients": [23_000_000, steps, 23.0],
                "memory": [512],
                "about": about,
            }
            | more
            for number, own in enumerate(ranks)
        ],
    }


def replaced(data: dict[str, Any]) -> dict[str, Any]:
    """Let rank 1 have missed most of it."""
    data["ranks"][1]["steps"] //= 4
    return data


def stopped(data: dict[str, Any]) -> dict[str, Any]:
    """Let rank 1 have taken long for one step."""
    data["ranks"][1]["longest"] = [700, 38.0]
    return data


def by_turns(data: dict[str, Any]) -> dict[str, Any]:
    """Let some rank wait little, another one in each step."""
    for rank in data["ranks"]:
        rank["least"] = NO_TIME
    return data


SLOW = {"in forward": 60.0, "waiting": 10.0}
FAST = {"waiting": 50.0}
LINES = {
    "even": (
        job({}, {}),
        "2 processes, 75 s of training: 80 % computing, 13 % exchanging gradients, 7 % between steps; at most 1.7 "
        "times as fast as one",
    ),
    "one is slow": (
        job(FAST, SLOW, nodes=2),
        "2 processes, 115 s of training: 70 % computing, 9 % exchanging gradients, 17 % waiting for slower processes, "
        "4 % between steps; rank 1 on node1 sets the pace; at most 1.4 times as fast as one",
    ),
    "by turns within each step": (
        by_turns(job({"waiting": 40.0}, {"waiting": 40.0})),
        "2 processes, 105 s of training: 57 % computing, 38 % waiting for slower processes, 5 % between steps; at most "
        "1.2 times as fast as one",
    ),
    "each process loads all": (
        job({"loading": 65.0}, {"loading": 65.0}, loads_all=True),
        "2 processes, 2.3 min of training: 43 % computing, 46 % loading, 7 % exchanging gradients, 4 % between steps; "
        "at most 1.4 times as fast as one",
    ),
    "alone": (
        job({"waiting": 0.0, "loading": 65.0}),
        "1 process, 2.2 min of training: 46 % computing, 50 % loading, 4 % between steps",
    ),
    "alone, and its loader is not ours": (job({"waiting": 0.0}), "1 process, 65 s of training"),
    "one sample for two": (
        job({}, {}, batch=1),
        "2 processes, 75 s of training: 80 % computing, 13 % exchanging gradients, 7 % between steps; at most 1.0 "
        "times as fast as one",
    ),
    "nobody trains": (job({}, {}, steps=0), ""),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_says_where_the_time_of_a_job_went(name: str) -> None:
    """Reports add up."""
    data, line = LINES[name]
    assert summary.one_line(data) == line


ADVICE = {
    "nothing": (
        job({}, {}),
        ["Nothing stands out: most of the time goes into computing, which is all that training_step does, logging "],
    ),
    "loads": (job({"loading": 60.0}, {"waiting": 70.0}), ["Rank 0 loads for 44 % of its time. Give the DataLoader"]),
    "rank 0 writes checkpoints": (
        job({"between steps": 60.0}, {"waiting": 70.0}),
        ["The others wait for rank 0, most of all while it is between steps: look at its hooks, checkpoints and"],
    ),
    "each of them is late": (
        by_turns(job({"between steps": 60.0, "waiting": 60.0}, {"in backward": 90.0, "waiting": 60.0})),
        ["The ranks wait for each other by turns for 34 % of their time: rank 0 is late between steps and rank 1 is"],
    ),
    "each of them is hardly late": (
        by_turns(job({"between steps": 15.0, "waiting": 60.0}, {"in backward": 50.0, "waiting": 60.0})),
        ["The ranks wait for each other by turns for 44 % of their time: their batches take unequal times"],
    ),
    "all load all": (
        job({"loading": 60.0}, {"loading": 60.0}, loads_all=True),
        ["Each rank loads for 44 % of its time. It"],
    ),
    "all load": (job({"loading": 60.0}, {"loading": 60.0}), ["Each rank loads"]),
    "slow": (job(FAST, SLOW), ["The others wait for rank 1, most of all while it is computing"]),
    "stopped once": (
        stopped(job(FAST, SLOW)),
        ["The others wait for rank 1, most of all while it is computing: its step 700 alone took 38 s."],
    ),
    "exchange": (job({"waiting": 90.0}, {"waiting": 90.0}), ["The exchange of gradients takes 58 %"]),
    "between": (
        job({"between steps": 90.0}, {"between steps": 90.0}),
        ["56 % goes by between steps: in the optimizer, checkpoints, callbacks or loggers. A profiler, such as"],
    ),
    "validation": (job({"validation": 90.0}, {"validation": 90.0}), ["Validation takes 55 %"]),
    "the first batches take long": (
        job({"loading": 60.0}, {"loading": 60.0}, starting=50.0),
        ["Each rank loads for 44 % of its time. Most of that is the first batch of each epoch: persist"],
    ),
    "more processes than samples": (
        job({}, FAST, SLOW, batch=2),
        ["A batch has 2 samples for 3 processes: 1 computes none of it. Start 2, or take larger batches."],
    ),
    "uneven parts": (
        job({}, {}, batch=3),
        ["A batch of 3 samples is divided unevenly among 2 processes: rank 0 has 2"],
    ),
    "almost even parts": (job({}, {}, batch=31), ["Nothing stands out"]),
    "rank 0 is slow": (
        job(SLOW, FAST),
        ["The others wait for rank 0, most of all while it is computing: look for what r"],
    ),
    "one step was long on all": (job({}, {}, longest=[41, 30.0]), ["Step 41 alone took 30 s. See what the ranks did"]),
    "one step was long on a process alone": (
        job({"waiting": 0.0}, longest=[41, 30.0]),
        ["Step 41 alone took 30 s.", "Start two processes"],
    ),
    "compared for long": (
        job({"between steps": 90.0}, {"between steps": 90.0}, compared=80.0),
        ["56 % goes by between steps: most of it to compare batches with one process, which verify=None"],
    ),
    "it hung": (job({}, {"waiting": 90.0}, stepped=60.0), ["No rank took a step in the last 60 s: see what happened"]),
    "one was replaced": (
        replaced(job({"waiting": 60.0}, {})),
        ["25 % went by while ranks waited for one that was lost or stopped: see what happened"],
    ),
    "one was stopped": (
        job({"waiting": 30.0}, {"in forward": 10.0, "in backward": 20.0, "between steps": 2.0, "waiting": 0.0}),
        ["24 % went by while ranks waited for one that was lost or stopped: see what happened"],
    ),
    "two are late, one after the other": (
        by_turns(job({"waiting": 30.0}, {"waiting": 30.0}, EVEN | {"in forward": 0.0, "waiting": 50.0}, batch=66)),
        ["The ranks wait for each other by turns"],
    ),
    "uneven parts that take unequal times": (job(SLOW, FAST, batch=3), ["A batch of 3 samples is divided unevenly"]),
    "short steps": (job({}, {}, steps=30_000), ["A step takes 2.5 ms"]),
    "only steps are marked": (job({"waiting": 0.0}), ["Start two processes"]),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_report_says_what_to_try_next(name: str) -> None:

    data, found = ADVICE[name]
    said = summary.advice(data)
    assert len(said) == len(found) and all(text.startswith(begin) for text, begin in zip(said, found, strict=True)), (
        said
    )


class Page(HTMLParser):
    """The bars of a page, the tags that are open, and all that would come from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.bars: list[list[float]] = []
        self.foreign: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if found.get("class") == "bar":
            self.bars.append([])
        if tag == "i":
            self.bars[-1].append(float(re.findall(r"width:([\d.]+)%", found["style"] or "")[0]))
        if tag in ("script", "link", "img", "b") or {"src", "href"} & found.keys():
            self.foreign.append(tag)


def test_the_page_has_a_bar_for_each_rank_and_nothing_from_elsewhere() -> None:

    found = Page(page.render(job(FAST, SLOW)))
    widths = [sum(bar) for bar in found.bars]
    assert widths == pytest.approx([100.0, 100.0], abs=0.5) and not found.foreign
    assert found.bars[0] == pytest.approx([52.2, 8.7, 34.8, 4.3], abs=0.1)
    alone = page.render(job({"waiting": 0.0}))
    assert not Page(alone).bars and "computing" not in alone


def test_the_course_of_a_short_job_with_two_messages_is_a_line() -> None:
    data = job({}, {})
    data["ranks"][0]["samples"] = [(5.0, 0), (6.0, 100)]
    assert "<polyline points='0.0,10.0 1000.0,10.0'" in page.render(data)


def test_the_page_says_that_a_bound_is_no_gain() -> None:
    assert "ddprun predict measures it" in page.render(job({}, {}))
    assert "ddprun predict measures it" not in page.render(job({}))


def test_a_job_that_does_not_train_gets_no_report(tmp_path: Path) -> None:
    assert page.write(job({}, {}, steps=0), tmp_path) == "" and not list(tmp_path.iterdir())
    assert page.write(job({}, {}), tmp_path).endswith(f"; {tmp_path}/report.html")
    assert json.loads((tmp_path / "report.json").read_text())["ranks"][1]["steps"] == 1000


def said(process: int, steps: int, **more: Any) -> bytes:
    seconds = [steps * 0.01] * 3 * len(PARTS)
    known = {"seconds": seconds, "steps": steps, "epoch": 1, "validation": 0, "held_out": 0, "memory": [1]}
    known |= {"gradients": [0, 0, 0.0], "loads_all": False, "stage": "training", "starting": 0.0, "longest": [1, 0.5]}
    known |= {"compared": 0.0, "validated": [0, 0, 0.0], "batch": 64}
    return json.dumps(known | {"process": process, "about": {}} | more).encode() + b"\n"


def test_ranks_that_are_slow_one_after_the_other_make_no_long_exchange() -> None:
    # Rank 0 is late for 50 s, then rank 1: each waits for nobody in its half.
    waits = [[0.1 * max(when - 50, 0) for when in range(100)], [0.1 * min(when, 50) for when in range(100)]]
    ranks = [[(float(when), 10 * when, [0.0] * 15 + [own[when], 0.0, 0.0]) for when in range(100)] for own in waits]
    found = in_any_case(ranks)
    assert all(sum(own) < 0.1 * 5 for own in found), found  # of 5 s
    alone = in_any_case(ranks[:1])
    assert sum(alone[0]) == pytest.approx(4.9)


def test_a_successor_adds_to_what_its_rank_has_done() -> None:
    collector = Collector(["train.py"])
    first, second = said(7, 10), said(7, 20, epoch=2)
    collector.hear("a", 0, "r", first + second[:30])  # a message can come in two pieces
    collector.hear("a", 0, "r", second[30:])
    collector.note("rank 0 was killed")
    collector.hear("a", 0, "r", said(8, 5))
    collector.hear("a", 0, "e", b"\r10 %\r\x1b[32m20 %\x1b[0m\x1b[A\n")  # colours, and a move of the cursor
    data = collector.data()
    (rank,) = data["ranks"]
    assert rank["steps"] == 25 and rank["seconds"]["loading"] == pytest.approx(0.25) and rank["line"] == "20 %"
    assert [text for _, _, text in data["events"]] == ["epoch 1", "epoch 2", "rank 0 was killed"]


def test_the_samples_of_a_long_job_stay_few() -> None:
    collector = Collector(["train.py"])
    for step in range(5000):
        collector.hear("a", 0, "r", said(1, step))
    samples = collector.data()["ranks"][0]["samples"]
    assert len(samples) <= 400 and samples[-1][1] == 4999


@pytest.mark.parametrize("flags", ["--once", "--json"])
def test_a_running_job_says_what_its_ranks_do(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, collector = new_folder(tmp_path), Collector(["train.py"])
    (folder / "request").write_text("1\n")  # of a command that was killed
    for rank in (0, 1):
        collector.hear("a", rank, "r", said(rank, 20, epoch=3))
        collector.hear("a", rank, "o", b"loss 0.5\nloss 0.25\n")

    async def ask() -> None:
        answers = asyncio.create_task(take_requests(folder, partial(take_request, None, collector, folder)))
        assert await asyncio.to_thread(show_status, [str(folder), flags]) == 0
        answers.cancel()

    asyncio.run(ask())
    text = capsys.readouterr().out
    if flags == "--json":
        assert [rank["steps"] for rank in json.loads(text)["ranks"]] == [20, 20]
        return
    title, head, *rows = text.splitlines()
    assert title.startswith("train.py: for ") and head.split()[:4] == ["node", "rank", "epoch", "step"]
    assert [row.split()[:4] for row in rows] == [["a", "0", "3", "20"], ["a", "1", "3", "20"]]
    assert all(re.search(r" 17 % +0.0 GB +0\.\d s ago  loss 0.25$", row) for row in rows), rows


def test_a_rank_that_hangs_or_is_lost_is_seen_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    collector = Collector(["train.py"])
    for second in range(30):  # rank 2 dies after 4 s, and the others hang after 8
        now[0] += 1.0
        for rank in (0, 1) if second > 4 else (0, 1, 2):
            collector.hear("a", rank, "r", said(rank, 10 * min(second, 8)))
    collector.lose(2)
    *_, first, second, lost, says = table(collector.data()).splitlines()
    assert [row.split()[3:5] for row in (first, second, lost)] == [["80", "0"], ["80", "0"], ["40", "0"]]
    assert "21 s ago" in first and "21 s ago" in second and lost.endswith("  lost")
    assert says == "No rank has taken a step for 21 s. Where they are: ddprun stacks"
    for rank in (0, 1):
        collector.hear("a", rank, "r", said(rank, 80, stage="validating", held_out=rank))
    assert "21 s ago, validating" in table(collector.data()) and "0.0 s ago, validating" in table(collector.data())
    assert "No rank has" not in table(collector.data())  # a batch of a validation is a sign of life
    now[0] += 30.0
    assert "No rank has taken a step for 30 s" in table(collector.data())
    collector.hear("a", 0, "r", said(0, 80, stage=""))  # its training is over, and the script is not
    assert "No rank has" not in table(collector.data())
    collector.hear("a", 2, "r", said(7, 1))  # its successor
    assert "lost" not in table(collector.data())


def test_the_table_shows_who_waits_now_and_not_who_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], {0: [0.0] * 3 * len(PARTS), 1: [0.0] * 3 * len(PARTS)}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    collector = Collector(["train.py"])
    for second in range(60):  # rank 0 waits for 45 s, then rank 1
        now[0] += 1.0
        for rank, own in spent.items():
            own[PARTS.index("waiting" if (second >= 45) == rank else "in forward")] += 1.0
            collector.hear("a", rank, "r", said(rank, second, seconds=own))
    first, second_ = table(collector.data()).splitlines()[2:]
    assert (" 0 % " in first, " 100 % " in second_) == (True, True)


def test_a_rank_that_is_lost_sets_no_pace() -> None:
    data = job({"waiting": 40.0}, {"waiting": 40.0}, {})
    assert summary.pace_of(data) == 2
    data["ranks"][2]["is_lost"] = True
    assert summary.pace_of(data) is None


@pytest.mark.parametrize(
    ("running", "killed", "elsewhere", "chosen"),
    [([0, 1], [], [], 1), ([0], [1, 2], [], 0), ([0], [2], [1], 1), ([], [], [], 2)],
)
def test_a_command_asks_the_newest_job_that_still_runs_and_none_whose_ddprun_was_killed(
    tmp_path: Path, running: list[int], killed: list[int], elsewhere: list[int], chosen: int
) -> None:
    folders = [tmp_path / f"20260102-03040{number}-000000001" for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        if number in running:
            hold(folder)
        if number in (*killed, *elsewhere):
            (folder / RUNS).write_text("elsewhere" if number in elsewhere else socket.gethostname())
        if number in killed:
            with pytest.raises(ConfigurationError, match=f"^the job of {folder} has ended"):
                ask(str(folder), "stacks.txt", 60.0)
    assert folder_of(str(tmp_path)) == folders[chosen]


def test_a_command_finds_the_jobs_of_a_folder_and_says_if_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=f"^there is no job in {tmp_path}. Name the folder of its logs"):
        folder_of(str(tmp_path))
    folder = new_folder(str(tmp_path / "ddprun-logs"))
    (tmp_path / "runs").mkdir()  # TensorBoard's
    monkeypatch.chdir(tmp_path)
    assert (
        folder_of(None) == folder_of(str(tmp_path)) == folder_of(str(folder.parent)) == folder_of(str(folder)) == folder
    )
    (folder / RUNS).unlink()
    (folder / "rank-0.log").touch()
    assert folder_of(str(folder)) == folder


def test_a_command_without_a_job_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^there is no job in ddprun-logs\. .*, or only DIR, as in --log-dir"):
        ask(None, "stacks.txt", 1.0)


def test_a_job_in_which_no_rank_trains_says_so() -> None:
    assert table(Collector(["train.py"]).data()).endswith("; no rank has begun to train with ddp_callbacks")


def test_a_job_without_a_report_says_that_status_needs_it() -> None:
    assert "; it was started with --no-report, " in table(Collector(["train.py"], is_sent=False).data())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    yield now


def test_recording_a_step_takes_microseconds(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    made, batches = Recorder(str(tmp_path / "out")), type("Batches", (), {})()

    def steps(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            made.begin_loading(batches, True)
            made.end_loading(True)
            for part in ("between steps", "in forward", "in backward"):
                made.mark(part)
            made.launch()
            made.mark("waiting")
            made.step()
        return (time.process_time() - begin) / count

    # 15 us, or 0.3 % of a step of 5 ms, where the calibration takes as long as noted
    slowness = min(calibrate() for _ in range(3)) / NUMBERS["calibration"]
    assert min(steps(1000) for _ in range(5)) < 0.003 * 0.005 * slowness


def test_a_recorder_counts_each_part_of_a_step(clock: list[float], tmp_path: Path) -> None:

    (tmp_path / "out").touch()
    made = Recorder(str(tmp_path / "out"))

    class Batches:
        pass

    batches, held_out = Batches(), Batches()

    def after(seconds: float) -> None:
        clock[0] += seconds

    after(100.0)  # imports
    for _ in range(3):
        made.begin_loading(batches, True)
        after(0.5)
        begin_wait()
        after(0.0625)
        end_wait()  # for a rank that starts its workers
        made.end_loading(True)
        for part, seconds in (("in forward", 1.0), ("in backward", 2.0)):
            after(seconds)
            made.mark(part)
        made.launch()
        after(4.0)
        made.mark("waiting")
        made.step()
        made.step()  # another optimizer, with the same batch
        after(0.25)
    made.begin_loading(held_out, False)
    after(0.125)
    made.end_loading(True)
    after(8.0)
    begin_wait()
    after(16.0)
    end_wait()  # for the last rank
    made.end_validation()
    after(0.5)  # a checkpoint
    made.begin_loading(batches, True)
    made.send()
    last = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert dict(zip(PARTS, last["seconds"], strict=False)) == {
        "in forward": 3.0,
        "in backward": 6.0,
        "loading": 1.5,
        "waiting": 28.1875,
        "between steps": 1.25,
        "validation": 8.125,
    }
    assert (last["steps"], last["epoch"], last["validation"], last["gradients"]) == (3, 0, 1, [0, 3, 12.0])
    assert last["validated"] == [1, 3, 24.125]


def test_ranks_that_are_late_by_turns_wait_for_each_other(clock: list[float], tmp_path: Path) -> None:
    collector = Collector(["train.py"])
    for rank in range(2):
        (tmp_path / "out").write_bytes(b"")
        made = Recorder(str(tmp_path / "out"))
        for step in range(41):
            made.mark("between steps")
            clock[0] += 1.0 + 2.0 * (step % 2 == rank)
            made.mark("in forward")
            made.launch()
            clock[0] += 0.5 + 2.0 * (step % 2 != rank)
            made.mark("waiting")
            made.step()
        made.send()
        for line in (tmp_path / "out").read_bytes().splitlines():
            collector.hear("a", rank, "r", line + b"\n")
    data = collector.data()
    assert summary.one_line(data) == (
        "2 processes, 2.4 min of training: 57 % computing, 14 % exchanging gradients, 29 % waiting for slower "
        "processes; at most 1.1 times as fast as one"
    )
    assert [text[:70] for text in summary.advice(data)] == [
        "The ranks wait for each other by turns for 29 % of their time: their b"
    ]


def test_a_process_alone_counts_what_an_undivided_loader_takes(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as in a Fabric loop, in which nothing else tells that it trains
    (tmp_path / "out").touch()
    made = Recorder(str(tmp_path / "out"))
    monkeypatch.setattr(recorder, "recorder", lambda: made)

    def batches() -> Iterator[int]:
        for number in range(3):
            clock[0] += 2.0
            yield number

    for _ in with_shares(batches()):
        made.step()
        clock[0] += 1.0
    made.send()
    last = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert last["steps"] == 3 and last["about"]["versions"]
    assert dict(zip(PARTS, last["seconds"], strict=False))["loading"] == 6.0


def test_a_loader_that_is_not_divided_is_timed_on_several_processes_too(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    made = Recorder(str(tmp_path / "out"))
    monkeypatch.setattr(recorder, "recorder", lambda: made)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", recorder.timed_loading(_BaseDataLoaderIter.__next__))

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            clock[0] += 2.0
            return super().__getitem__(index)

    samples = Slow(torch.zeros(4))
    for divided in (DataLoader(samples, sampler=DistributedSampler(samples, 2, 0)), with_shares(DataLoader(samples))):
        for _ in divided:
            clock[0] += 1.0
            made.mark("in forward")
            made.mark("waiting")
            made.step()
    made.send()
    assert [last_of(tmp_path / "out")[part] for part in ("loading", "in forward")] == [12.0, 6.0]


def last_of(path: Path) -> dict[str, Any]:
    said = json.loads(path.read_text().splitlines()[-1])
    return said | dict(zip(PARTS, said["seconds"], strict=False))


def test_a_process_alone_tells_steps_validations_and_the_rest_apart(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(REPORT, str(tmp_path / "out"))
    monkeypatch.setattr(recorder.threading.Thread, "start", lambda _: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(recorder.atexit, "register", lambda _: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)  # to be restored
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    recorder.recorder.cache_clear()
    try:
        made = recorder.recorder()
        assert made is not None
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        for _ in range(2):
            for number, _ in enumerate(DataLoader([0, 1, 2, 3])):  # type: ignore[arg-type]
                clock[0] += 1.0
                if number % 2:  # gradients are accumulated
                    optimizer.step()
                    clock[0] += 0.25
            with torch.no_grad():
                for _ in DataLoader([0, 1]):  # type: ignore[arg-type]
                    clock[0] += 8.0
        clock[0] += 32.0  # a checkpoint
        made.end()
        clock[0] += 100.0
        made.end()
    finally:
        recorder.recorder.cache_clear()
    said = last_of(tmp_path / "out")
    assert (said["steps"], said["in forward"], said["between steps"], said["validation"]) == (4, 8.0, 33.0, 32.0)
    assert said["validated"] == [2, 4, 32.0]


def test_what_follows_the_last_step_counts_and_what_has_not_ended(clock: list[float], tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    made = Recorder(str(path))
    for hangs in (False, True):
        made.mark("in forward")
        made.send()
        assert last_of(path)["steps"] == 0  # it is known that it trains
        clock[0] += 3.0
        made.send()
        assert last_of(path)["in backward"] == 3.0  # after forward
        with suppress(KeyboardInterrupt):
            try:
                if hangs:
                    raise KeyboardInterrupt
            finally:
                made.end()
        assert (last_of(path)["between steps"], last_of(path)["in backward"]) == (3.0, 3.0 * hangs)
    made.mark("in forward")
    begin_wait()
    clock[0] += 2.0
    made.send()
    end_wait()
    assert (last_of(path)["waiting"], last_of(path)["in backward"]) == (2.0, 3.0)


class Slow(pl.Callback, torchbearer.Callback):  # type: ignore[misc]
    """Writes a checkpoint after the last step of a Trainer or a Trial."""

    def on_train_end(self, *_: Any) -> None:
        time.sleep(0.2)

    on_checkpoint = on_train_end


def fit_trainer() -> None:
    options: Any = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = pl.Trainer(
        strategy=CallbackStrategy(), accelerator="cpu", max_steps=2, limit_val_batches=0, callbacks=[Slow()], **options
    )
    trainer.fit(BoringModel())


def run_trial() -> None:
    net = torch.nn.Linear(2, 1)
    trial = torchbearer.Trial(
        net, torch.optim.SGD(net.parameters()), torch.nn.MSELoss(), callbacks=[DDPCallback(), Slow()]
    )
    trial.with_train_data(torch.zeros(4, 2), torch.zeros(4, 1)).run(1, verbose=0)


@pytest.mark.parametrize("train", [fit_trainer, run_trial])
@pytest.mark.filterwarnings("ignore")
def test_the_checkpoint_after_the_last_step_is_in_the_report(
    train: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    made = Recorder(str(tmp_path / "out"))
    monkeypatch.setattr(recorder, "recorder", lambda: made)
    made.mark("in forward")
    train()
    assert last_of(tmp_path / "out")["between steps"] > 0.2


def test_a_trace_shows_all_machines_on_one_clock(tmp_path: Path) -> None:
    # The clock of rank 1's machine is 500 s ahead; it computes for 30 ms longer, so rank 0 waits for it.

    def spans(ahead: int, computing: int) -> Iterator[Span]:
        for step in range(4, 8):
            begin, summed = ahead + step * 100_000, ahead + step * 100_000 + 60_000
            yield Span(step, "in backward", begin, begin + computing)
            yield Span(step, "bucket 0", begin + computing, summed + step % 2 * 40)  # messages take their time
            yield Span(step, "waiting", begin + computing, summed)

    traced = {0: ("a", [*spans(0, 20_000)]), 1: ("b", [*spans(500_000_000, 50_000)])}
    said = write(traced, tmp_path)
    assert said == f"the trace of 4 steps, for ui.perfetto.dev: {tmp_path}/trace.json"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begins = {
        (event["pid"], event["name"], event["args"]["step"]): event["ts"] for event in events if event["ph"] in "Xb"
    }
    for step in range(4, 8):
        assert begins[0, "in backward", step] == begins[1, "in backward", step] == (step - 4) * 100_000
        assert begins[1, "bucket 0", step] - begins[0, "bucket 0", step] == 30_000
    assert {event["args"].get("name") for event in events if event["ph"] == "M"} >= {"rank 0 on a", "rank 1 on b"}
    none = "no trace: it begins with step 4, and no process took so many steps"
    assert write({0: ("a", [])}, tmp_path / "none") == none


def batches_of(**attributes: bool) -> Any:
    return type("Batches", (), attributes)()


def test_the_listeners_of_a_wait_hear_when_it_was(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[float, float]] = []
    monkeypatch.setattr(Stopwatch, "listeners", [lambda *span: heard.append(span)])
    begin_wait()
    clock[0] += 2.0
    end_wait()
    assert heard == [(0.0, 2.0)]


def test_all_loaders_of_a_validation_count_once_and_change_nothing_of_how_training_loads() -> None:
    progress, loaders = Progress(), [batches_of(loads_all=True), batches_of(), batches_of()]
    for place, loader in enumerate(loaders):
        progress.begin_loading(loader, not place)
        progress.end_loading(not place)
        progress.step() if not place else None
    assert progress.validations == 1 and progress.loads_all


def test_a_pass_that_goes_on_after_a_loss_is_no_new_epoch() -> None:
    progress = Progress()
    for is_continued in (True, True, False):
        progress.begin_loading(batches_of(is_continued=is_continued), True)
        progress.end_loading(True)
        progress.step()
    assert progress.epoch == 1


def test_a_step_after_the_end_was_drawn_ahead_counts_once() -> None:
    progress, loader = Progress(), batches_of()
    for drawn in ([True, True], [False]):
        for has_batch in drawn:
            progress.begin_loading(loader, True)
            progress.end_loading(has_batch)
        assert progress.step()
    assert not progress.step() and progress.steps == 2


def test_a_rank_that_validates_or_has_failed_tells_what_it_was_doing(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    made, loaders = Recorder(str(tmp_path / "out")), [batches_of(), batches_of()]
    for place, loader in enumerate(loaders):
        made.begin_loading(loader, not place)
        made.end_loading(True)
    clock[0] += 8.0
    made.send()
    assert last_of(tmp_path / "out")["validation"] == 8.0
    made.end_validation()
    made.mark("in forward")
    clock[0] += 3.0
    monkeypatch.setattr(sys, "last_value", KeyError(), raising=False)
    made.end()
    assert last_of(tmp_path / "out")["in backward"] == 3.0


def test_where_a_rank_had_not_waited_its_first_wait_is_one_for_slower_ranks() -> None:
    shortest, waits = recorder._Shortest(), dict.fromkeys(PARTS, 0.0)
    for step in range(1, 21):
        waits["waiting"] = 0.5 * step
        shortest.end_step(waits.values(), step)
    waits["validation"] = 7.0
    assert shortest.of(waits.values()) == [0, 0, 0, 10.0, 0, 0]


def test_before_the_step_after_a_validation_a_rank_waits_for_those_that_validate(
    clock: list[float], tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    made = Recorder(str(tmp_path / "out"))
    made.mark("in forward")
    made.begin_loading(batches_of(), False)
    made.end_loading(False)
    for seconds in (5.0, 1.0):
        clock[0] += seconds
        made.mark("waiting")
        made.step()
    made.send()
    waits = dict(zip(PARTS, last_of(tmp_path / "out")["seconds"][len(PARTS) :], strict=False))
    assert (waits["validation"], waits["waiting"]) == (5.0, 1.0)


def test_a_step_has_no_waits_of_a_validation() -> None:
    assert summary.step_of(job({}, waits=NO_TIME | {"validation": 15.0})["ranks"][0]) == pytest.approx(0.06)
