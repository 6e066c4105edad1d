"""Which of several failures ``ddprun`` tells, and in which words."""

from __future__ import annotations

import functools
import json
import random
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_callbacks.launcher.agent import Reports, _tell_of_ends
from ddp_callbacks.launcher.failures import End, first_cause
from ddp_callbacks.launcher.tracebacks import Printed, Reader, printed_in


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    run(\n{error}\n'


DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
OUT_OF_MEMORY = trace("torch.cuda.OutOfMemoryError: out of memory. Tried\nto allocate much")
CHAIN = f"""some warning: not this\n{trace("KeyError: 'x'")}{DURING}{OUT_OF_MEMORY}"""
LOADER = trace("KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal " + trace("KeyError: 'missing'"))
DISK = (
    trace("RuntimeError: basic_ios::clear: iostream error")
    + DURING
    + trace("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
)
DISAGREE = """\
the ranks disagree about the Trial:
  lr: 0.1 on rank 0; 0.2 on rank 1
Give each the same.
Ranks: rank 0 (host a, pid 1), rank 1 (host b, pid 2)."""
MISMATCH = trace(f"ddp_callbacks.errors.MismatchError: {DISAGREE}")
QUOTED = "rank 1 (host b, pid 2) failed with ValueError: x"
PEER = (
    trace("RuntimeError: Connection closed by peer")
    + CAUSED
    + trace(f"""ddp_callbacks.errors.PeerError: {QUOTED}
This is rank 0 (host a, pid 1), which stops because the run cannot continue without it. The other rank's traceback:
{trace("KeyError: 'y'")}{DURING}{trace("ValueError: x")}""")
)


def prefixed(text: str) -> str:
    """As torch's hook prints it in a process group."""
    return "".join(f"[rank12]: {line}\n" if line else "\n" for line in text.splitlines())


def read(text: str, seed: int = 0) -> Printed | None:
    """In pieces of any size."""
    reader, data, pieces = Reader(), text.encode(), random.Random(seed)
    while data:
        size = pieces.randint(1, 300)
        reader.feed(data[:size], 7.0)
        data = data[size:]
    return reader.last


@pytest.mark.parametrize("change", [str, prefixed], ids=["plain", "prefixed"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(CHAIN, "torch.cuda.OutOfMemoryError: out of memory. Tried (after KeyError: 'x')", id="chain"),
        pytest.param(
            "Traceback (most recent call last):\n  File 'x'\nKeyboardInterrupt\n", "KeyboardInterrupt", id="-"
        ),
        pytest.param(LOADER, "KeyError: 'missing', in DataLoader worker process 0", id="loader"),
        pytest.param(MISMATCH, f"ddp_callbacks.errors.MismatchError: {DISAGREE}", id="mismatch"),
        pytest.param(PEER, f"ddp_callbacks.errors.PeerError: {QUOTED}", id="peer"),
    ],
)
def test_an_exception_is_told_in_few_words_and_one_of_ours_whole(text: str, change: type, reason: str) -> None:
    """The last lines tell an exception briefly."""
    for seed in range(5):
        printed = read(change(text), seed)
        assert printed is not None and printed.reason == reason


def test_a_full_disk_is_guessed_from_torch_s_words() -> None:
    printed = read(prefixed(DISK))
    assert printed is not None
    assert printed.reason.endswith(
        "unexpected pos 576 vs 534 (after RuntimeError: basic_ios::clear: iostream error). "
        "torch could not write a file: is its disk full?"
    )


def test_the_last_traceback_counts_also_behind_a_progress_bar() -> None:
    printed = read(f"{CHAIN}going on\n 50%|##  | 3/6{prefixed(LOADER)}wandb: Run history:\nTotal: 7\n")
    assert printed is not None and printed.reason == "KeyError: 'missing', in DataLoader worker process 0"


@pytest.mark.parametrize("text", ["no traceback\nValueError: quoted by somebody\n", "", "Traceback (most recent call"])
def test_what_is_no_traceback_is_no_exception(text: str) -> None:
    assert read(text) is None


def test_a_message_of_30_megabytes_is_told_by_its_beginning() -> None:
    reader = Reader()
    reader.feed(b"[rank0]: Traceback (most recent call last):\n[rank0]:   File 'x'\n[rank0]: ValueError: large ", 1.0)
    for _ in range(480):
        reader.feed(b"x" * (1 << 16), 2.0)
    reader.feed(b"\n", 3.0)
    assert reader.last is not None and reader.last.reason.startswith("ValueError: large xxx")
    assert len(reader.last.reason) < 3000 and reader.last.began == 1.0


def peer(message: str) -> Printed | None:
    return printed_in(f"ddp_callbacks.errors.PeerError: {message}")


def own(text: str = "ValueError: x") -> Printed | None:
    printed = printed_in(text)
    assert printed is not None
    printed.began = 0.5
    return printed


FAILED, SILENT, LEFT = (
    QUOTED,
    "rank 1 (host b, pid 2) died or went silent while rank 0 waits",
    "rank 1 (host b, pid 2) left the run while rank 0 waits for x",
)
SAYS_FAILED, SAYS_SILENT, SAYS_LEFT = (End("a", 0, 1.0, 1, printed=peer(text)) for text in (FAILED, SILENT, LEFT))
TOO = End("a", 2, 0.9, 1, printed=peer("rank 0 (host a, pid 1) left the run while rank 2 waits for x"))
BROKEN = End("a", 0, 1.0, 1, printed=own("RuntimeError: Connection closed by peer"))
NODE = End("b", None, 0.5, 1, "torchrun's agent ended with exit code 1")
LOST = End("b", None, 6.0, 1, "the connection was lost", is_ours=True)
REPORTS = "first. rank 0 on a reports: ddp_callbacks.errors.PeerError:"
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
        [BROKEN, b(2.0, 7)],
        "1: rank 0 on a failed with exit code 1: RuntimeError: Connection closed by peer",
    ),
    "a broken connection follows from a signal": (
        [BROKEN, b(2.0, 1, "killed by SIGSEGV")],
        "1: rank 1 on b failed with exit code 1: killed by SIGSEGV",
    ),
    "noticed late, on a busy machine": (
        [BROKEN, b(3.0, 1, printed=own(), is_ours=True)],
        "1: rank 1 on b failed with exit code 1: ValueError: x",
    ),
    "agent": ([SAYS_FAILED, NODE, b(9.0)], "1: b: torchrun's agent ended with exit code 1"),
    "the silent one is busy": (
        [SAYS_SILENT, b(9.0, 143, is_ours=True), End("c", 3, 8.0, 1, printed=own("KeyError: 3"))],
        "1: rank 3 on c failed with exit code 1: KeyError: 3",
    ),
    "every rank": (
        [End("a", 0, 1.0, 1, printed=own(f"MismatchError: {DISAGREE}"))],
        f"1: rank 0 on a, like every rank, failed with exit code 1: MismatchError: {DISAGREE}",
    ),
    "-": ([End("a", 0, 1.0, 7)], "7: rank 0 on a failed with exit code 7: no exception was printed"),
    "nobody": ([End("a", 0, 1.0, 0), b(2.0, 0, printed=own())], ""),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_first_cause_is_not_who_tells_of_it(case: str) -> None:
    ends, expected = FIRST[case]
    for order in (ends, ends[::-1]):
        cause = first_cause(order)
        assert ("" if cause is None else f"{cause.code}: {cause}") == expected


def test_as_many_long_messages_as_a_node_has_workers_all_arrive(tmp_path: Path) -> None:
    """As many long messages as a node has workers arrive."""
    # Together they are too large for one datagram.
    ranks, error, fire = range(200), tmp_path / "error.json", "\N{FIRE}"
    error.write_text(json.dumps({"message": {"message": fire * 5000, "extraInfo": {"timestamp": "1"}}}))
    ended = [SimpleNamespace(proc=SimpleNamespace(poll=lambda code=rank % 2: code, pid=7)) for rank in ranks]
    context: Any = SimpleNamespace(
        subprocess_handlers=dict(enumerate(ended)),
        error_files=dict.fromkeys(ranks, str(error)),
        envs={rank: {"RANK": str(rank + 8)} for rank in ranks},
    )
    node, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with node, agent:
        sender = threading.Thread(target=_tell_of_ends, args=(context, Reports(agent), set()))
        sender.start()
        found = [json.loads(socket.recv_fds(node, 1 << 18, 2)[0])["noticed"] for _ in ranks]
        sender.join()
    assert [(end["rank"], end["code"]) for end in found] == [(rank + 8, rank % 2) for rank in ranks]
    assert {end["message"] for end in found} == {fire * 4096}
