"""Which of several failures ``ddprun`` tells, and in which words; and where the library tells something else."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator

import pytest

from ddp_callbacks.errors import EXIT_PREEMPTED, say
from ddp_callbacks.launcher.first_failure import End, Record, first_cause, read_record
from ddp_callbacks.reporting.stacks import innermost, summary

DISAGREE = """\
the ranks disagree about the Trial:
  lr: 0.1 on rank 0; 0.2 on rank 1
Give each the same.
Ranks: rank 0 (host a, pid 1), rank 1 (host b, pid 2)."""
QUOTED = "rank 1 (host b, pid 2) failed with ValueError: x"


def test_the_record_of_torch_is_read_too() -> None:
    """torch's `@record` names the exception, too."""
    of_torch = json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}})
    record = read_record(of_torch, 0.0)
    assert record is not None and record.reason == "ValueError: x"
    later = json.dumps({"exceptions": ["ValueError: y"], "time": 7.0, "blames": None})
    assert read_record(f"{of_torch}\n{later}", 2.0) == Record(("ValueError: y",), 5.0)
    assert read_record(later[:-5], 2.0) is None
    assert read_record("", 0.0) is None
    assert read_record('{"ready": true}', 0.0) is None


def peer(message: str) -> Record:
    """Of an error that names the rank with which its message begins."""
    return Record((f"ddp_callbacks.errors.PeerError: {message}",), 20.0, (int(message[5]),))


def own(text: str = "ValueError: x") -> Record:
    return Record((text,), 0.5)


FAILED, SILENT, LEFT = (
    QUOTED,
    "rank 1 (host b, pid 2) died or went silent while rank 0 waits",
    "rank 1 (host b, pid 2) left the run while rank 0 waits for x",
)
SAYS_FAILED, SAYS_SILENT, SAYS_LEFT = (End("a", 0, 1.0, 1, printed=peer(text)) for text in (FAILED, SILENT, LEFT))
TOO = End("a", 2, 0.9, 1, printed=peer("rank 0 (host a, pid 1) left the run while rank 2 waits for x"))
BROKEN = End("a", 0, 1.0, 1, printed=own("RuntimeError: Connection closed by peer"))
NODE = End("b", None, 0.5, 1, "the connection was lost (broken)")
LOST = End("b", None, 6.0, 1, "the connection was lost", is_ours=True)
REPORTS = "first. rank 0 on a reports: ddp_callbacks.errors.PeerError:"
CHECKPOINT = "ddp_callbacks.errors.CheckpointError:"
b = functools.partial(End, "b", 1)
FIRST: dict[str, tuple[list[End], str]] = {
    "what failed itself": (
        [SAYS_FAILED, b(3.0, 1, printed=own())],
        "1: rank 1 on b failed with exit code 1: ValueError: x",
    ),
    "takes long to exit, and is ended": (
        [SAYS_FAILED, TOO, b(9.0, 143, printed=own(), is_ours=True)],
        "1: rank 1 on b failed: ValueError: x",
    ),
    "has printed nothing yet": ([SAYS_FAILED, b(9.0)], f"1: rank 1 on b failed {REPORTS} {FAILED}"),
    "left with code 0": ([SAYS_LEFT, TOO, b(0.5, 0)], f"1: rank 1 on b exited with code 0 {REPORTS} {LEFT}"),
    "left with code 0, and more wait for one that waits for it": (
        [SAYS_LEFT, TOO, End("a", 3, 0.9, 1, printed=TOO.printed), b(0.5, 0)],
        f"1: rank 1 on b exited with code 0 {REPORTS} {LEFT}",
    ),
    "failed, and left with code 0": (
        [SAYS_FAILED, b(0.5, 0, printed=own())],
        "1: rank 1 on b exited with code 0: ValueError: x",
    ),
    "silent, and killed by ddprun": (
        [SAYS_SILENT, b(5.0, 137, is_ours=True)],
        f"1: rank 1 on b failed {REPORTS} {SILENT}",
    ),
    "killed by someone else": (
        [SAYS_SILENT, b(0.5, 137, "killed by SIGKILL")],
        "137: rank 1 on b failed with exit code 137: killed by SIGKILL",
    ),
    "its node is lost": ([SAYS_SILENT, b(5.0), LOST], "1: b: the connection was lost"),
    "neither says why: the first": (
        [End("a", 0, 1.0, 3), b(2.0, 7)],
        "3: rank 0 on a failed with exit code 3: no exception was printed",
    ),
    "exits without an exception, after its connections": (
        [BROKEN, b(2.0, 7)],
        "7: rank 1 on b failed with exit code 7: no exception was printed",
    ),
    "exits with code 0, after its connections": (
        [BROKEN, b(2.0, 0)],
        "1: rank 0 on a failed with exit code 1: RuntimeError: Connection closed by peer. "
        "Before, rank 1 on b exited with code 0",
    ),
    "exits with the code for a preemption, alone": (
        [SAYS_FAILED, b(2.0, 75)],
        f"1: rank 1 on b exited with code 75 {REPORTS} {FAILED}",
    ),
    "a broken connection follows from a signal": (
        [BROKEN, b(2.0, 1, "killed by SIGSEGV")],
        "1: rank 1 on b failed with exit code 1: killed by SIGSEGV",
    ),
    "noticed late, on a busy machine": (
        [BROKEN, b(3.0, 1, printed=own(), is_ours=True)],
        "1: rank 1 on b failed with exit code 1: ValueError: x",
    ),
    "node": ([SAYS_FAILED, NODE, b(9.0)], "1: b: the connection was lost (broken)"),
    "a rank, before its node": (
        [b(0.4, 3), End("b", 2, 9.0), LOST],
        "3: rank 1 on b failed with exit code 3: no exception was printed",
    ),
    "the silent one is busy": (
        [SAYS_SILENT, b(9.0, 143, is_ours=True), End("c", 3, 8.0, 1, printed=own("KeyError: 3"))],
        "1: rank 3 on c failed with exit code 1: KeyError: 3",
    ),
    "every rank": (
        [End("a", 0, 1.0, 1, printed=own(f"MismatchError: {DISAGREE}"))],
        f"1: rank 0 on a, like every rank, failed with exit code 1: MismatchError: {DISAGREE}",
    ),
    "every rank, and another one first": (
        [End("a", 0, 1.1, 1, printed=own()), b(1.0, 1, printed=own())],
        "1: rank 0 on a, like every rank, failed with exit code 1: ValueError: x",
    ),
    "every rank, and another one first, and this one was ended meanwhile": (
        [End("a", 0, 1.1, 143, printed=own(), is_ours=True), b(1.0, 1, printed=own())],
        "1: rank 0 on a, like every rank, failed with exit code 1: ValueError: x",
    ),
    "every rank by the same exit code": (
        [End("a", 0, 1.1, 3), b(1.0, 3)],
        "3: rank 1 on b, like every rank, failed with exit code 3: no exception was printed",
    ),
    "every rank, and the one that writes for all knows the cause": (
        [
            End("a", 0, 1.0, 1, printed=Record(("OSError: File too large", f"{CHECKPOINT} no"), 0.4)),
            b(1.0, 1, printed=own(f"{CHECKPOINT} no")),
        ],
        f"1: rank 0 on a, like every rank, failed with exit code 1: {CHECKPOINT} no",
    ),
    "aborts when the first one is gone": (
        [End("a", 0, 2.0, 1, printed=own()), b(1.0, 134, "killed by SIGABRT", wrote={"e": b"ValueError: caught"})],
        "1: rank 0 on a failed with exit code 1: ValueError: x",
    ),
    "says something and exits": (
        [End("a", 0, 1.0, 7, wrote={"e": b"no data\n"})],
        "7: rank 0 on a failed with exit code 7: no exception ended it; its last output: no data",
    ),
    "says 20,000 characters": (
        [End("a", 0, 1.0, 7, wrote={"e": b"x" * 20_000})],
        f"7: rank 0 on a failed with exit code 7: no exception ended it; its last output: {'x' * 1000}",
    ),
    "-": ([End("a", 0, 1.0, 7)], "7: rank 0 on a failed with exit code 7: no exception was printed"),
    "nobody": ([End("a", 0, 1.0, 0), b(2.0, 0, printed=own())], ""),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_first_cause_is_not_who_tells_of_it(case: str) -> None:
    ends, expected = FIRST[case]
    for order in (ends, ends[::-1]):
        cause = first_cause(order)
        assert ("" if cause is None else f"{cause.code}: {cause.text}") == expected


STACKS = """\
Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x2 (most recent call first):
"""
WAITS = '  File "/env/site-packages/ddp_callbacks/process_group/failures.py", line 246 in _wait_slice\n'
LOGS = '  File "/env/site-packages/wandb/run.py", line 1 in log\n'
IMPORTS = (
    '  File "/usr/lib/python3.11/dataclasses.py", line 433 in _create_fn\n'
    '  File "/env/site-packages/torch/distributed/tensor/_ops.py", line 442 in <module>\n'
)
MINE = '  File "/home/me/train.py", line 12 in training_step\n  File "/home/me/train.py", line 40 in <module>\n'


@pytest.mark.parametrize(("is_ending", "code"), [(True, EXIT_PREEMPTED), (False, 137)])
def test_a_preempted_rank_that_ddprun_kills_as_its_end_takes_long_is_preempted(is_ending: bool, code: int) -> None:
    end = End("a", 0)
    end.hear("f", b'{"preempted": true}\n')
    end.hear("f", b'{"kept_by": ["reader"]}\n')
    end.take(137, "SIGKILL", 0.0, is_ending, 0.0)
    assert end.code == code and (is_ending or end.reason == "killed by SIGKILL")


def test_a_rank_that_waits_in_a_library_is_shown_by_the_line_of_the_script() -> None:
    own, library = "/home/me/train.py:12 in training_step", "ddp_callbacks/process_group/failures.py:246 in _wait_slice"
    loads = WAITS.replace("ddp_callbacks/process_group/failures", "torch/utils/data/dataloader")
    assert innermost(STACKS + MINE) == own
    assert innermost(STACKS + WAITS + MINE) == f"{own}, waiting for other ranks"
    assert innermost(STACKS + loads + MINE) == f"{own}, waiting for a worker of a DataLoader"
    assert innermost(STACKS + LOGS + MINE) == f"{own}, in /env/site-packages/wandb/run.py:1 in log"
    assert innermost(STACKS + WAITS) == f"/env/site-packages/{library}, waiting for other ranks"
    assert innermost(STACKS + IMPORTS + MINE) == f"{own}, in /usr/lib/python3.11/dataclasses.py:433 in _create_fn"
    assert innermost(STACKS) == "Python is still starting there, or has ended"
    lines = {"0": innermost(STACKS + WAITS + MINE), "1": innermost(STACKS + MINE), "2": innermost("")}
    assert summary(lines) == [
        f"1: {own}",
        "2: unknown: it wrote no stack. Is it stopped (kill -CONT)?",
        f"0: {own}, waiting for other ranks",
    ]


@pytest.fixture
def levels() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    loggers = (logging.root, logging.getLogger("ddp_callbacks"))
    before = [logger.level for logger in loggers]
    yield loggers
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("root", "own", "prefix"),
    [
        (logging.INFO, logging.NOTSET, "INFO:ddp_callbacks:"),
        (logging.WARNING, logging.NOTSET, "ddp_callbacks: "),
        (logging.WARNING, logging.INFO, "INFO:ddp_callbacks:"),
        (logging.INFO, logging.WARNING, None),
    ],
)
def test_a_root_logger_of_a_package_hides_no_announcement(
    root: int,
    own: int,
    prefix: str | None,
    levels: tuple[logging.Logger, logging.Logger],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    for logger, level in zip(levels, (root, own), strict=True):
        logger.setLevel(level)
    say("hello")
    assert capsys.readouterr().err == ("" if prefix is None else f"{prefix}hello\n")
