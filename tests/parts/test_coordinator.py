"""The control channel without processes: what follows from each event, and who may connect."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddp_callbacks.cluster.environment import HEARTBEAT_TIMEOUT, SECRET
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import failures
from ddp_callbacks.process_group.client import Board
from ddp_callbacks.process_group.control_channel import Connection, Message
from ddp_callbacks.process_group.coordinator import FOREVER, REMEDY, Coordinator, Sent
from ddp_callbacks.process_group.places import Place
from ddp_callbacks.process_group.server import Server

SIZE = 3
NAMES = [f"rank {rank} (host h{rank}, pid {rank})" for rank in range(SIZE)]


def coordinator() -> Coordinator:
    made = Coordinator(SIZE)
    for rank, name in enumerate(NAMES):
        sent = made.receive(rank, {"event": "join", "name": name}, 0.0)
    assert sent == to_all(event="names", names=NAMES)
    return made


def to_all(**message: Any) -> list[tuple[int, Any]]:
    return [(rank, message) for rank in range(SIZE)]


def at(purpose: str, turn: int = 1, **other: Any) -> dict[str, Any]:
    turns = other.pop("turns", {purpose: turn} if turn else {})
    return asdict(Place(0, purpose, turn, turns, **{"line": "a.py:3"} | other))


def wait(purpose: str, turn: int = 1, broke: bool = False, **other: Any) -> dict[str, Any]:
    return {"event": "wait", "place": at(purpose, turn, **other), "broke": broke}


def leave(failed: bool = False, turns: dict[str, int] | None = None) -> dict[str, Any]:
    return {"event": "leave", "place": at("a sum", turns=turns or {}, failed=failed)}


def place(**other: Any) -> dict[str, Any]:
    quiet = {"turns": {}, "sequence": 4, "waits": False, "line": "a.py:3"}
    return {"event": "place", "place": at("a sum", **quiet | other)}


def put(name: str, value: Any, members: list[int] | None = None) -> dict[str, Any]:
    return {"event": "put", "about": name, "run": 0, "value": value, "members": members}


def ask(note: Any, name: str = "s", members: list[int] | None = None) -> dict[str, Any]:
    return {"event": "ask", "about": name, "run": 0, "members": members, "note": note}


def told(rank: int, purpose: str, **what: Any) -> tuple[int, Any]:
    return rank, {"event": "told", "about": purpose, "run": 0, **what}


def said(event: str, name: str, **what: Any) -> dict[str, Any]:
    return {"event": event, "about": name, "run": 0, **what}


def failure(run: int, rank: int) -> dict[str, Any]:
    return {"event": "end", "run": run, "what": {"kind": "failure", "report": {"rank": rank}}}


def ended(run: int, rank: int) -> list[tuple[int, Any]]:
    return to_all(event="end", run=run, kind="failure", report={"rank": rank})


DIED = to_all(event="end", run=FOREVER, kind="gone", ranks=[1])
LEFT = [told(0, "a sum", absent=[1])]
LATE = [f"{name} is not in any collective of ddp_callbacks: it last was in a sum, and is at a.py:3." for name in NAMES]
WHERE = {"event": "where"}
ELSEWHERE = LATE[0].replace(NAMES[0], "rank 0")

# Events: the time, the rank (None: time alone), what it says (None: its connection ends), and what follows.
TABLE: dict[str, list[tuple[float, int | None, Any, list[tuple[int, Any]]]]] = {
    "a rank dies": [(1, 1, None, DIED), (2, 2, None, [])],
    "a rank fails, and another after it": [
        (1, 1, failure(0, 1), ended(0, 1)),
        (1, 2, failure(0, 2), []),
        (2, 2, failure(1, 2), ended(1, 2)),
    ],
    "a rank that has left does not die": [(1, 1, leave(), []), (2, 1, None, [])],
    "a rank has left before another waits for it": [(1, 1, leave(), []), (2, 0, wait("a sum"), LEFT)],
    "a rank leaves while another waits for it": [
        (1, 0, wait("a sum"), []),
        (2, 1, leave(), LEFT),
        (2.9, None, None, []),
    ],
    "a rank has left whose messages are under way": [
        (1, 1, leave(turns={"a sum": 1}), []),
        (2, 0, wait("a sum"), []),
        (99, None, None, [(2, WHERE)]),
    ],
    "a rank has left since it has heard of a failure": [
        (1, 1, leave(failed=True), []),
        (2, 0, wait("a sum"), []),
        (5, None, None, [(2, WHERE)]),
        (6, None, None, LEFT),
    ],
    "a rank has left, and what the other waits for is not counted": [
        (1, 1, leave(), []),
        (2, 0, wait("a sum", 0), []),
        (3, None, None, LEFT),
    ],
    "two wait for each other": [
        (1, 2, wait("b"), []),
        (
            2,
            0,
            wait("a"),
            to_all(
                event="end",
                run=0,
                kind="mismatch",
                text=f"{NAMES[0]} waits for a (a.py:3), while {NAMES[2]} waits for b (a.py:3). {REMEDY}",
            ),
        ),
    ],
    "one is ahead": [(1, 0, wait("b", turns={"a": 1, "b": 1}), []), (2, 1, wait("a"), [])],
    "one has heard of a failure before": [(1, 0, wait("a", failed=True), []), (2, 1, wait("b"), [])],
    "a wait has ended": [(1, 0, wait("a"), []), (2, 0, {"event": "done", "about": "a"}, []), (3, 1, wait("b"), [])],
    "one waits in a collective of torch": [
        (1, 0, wait("a", sequence=4), []),
        (1, 2, wait("a", sequence=4), []),
        (3, None, None, [(1, WHERE)]),
        (
            3,
            1,
            place(torch="all_reduce", sequence=5),
            to_all(
                event="end",
                run=0,
                kind="mismatch",
                text=f"{NAMES[0]} waits for a, while {NAMES[1]} is not in any collective of ddp_callbacks: it last "
                f"was in a sum, and waits in torch.distributed's all_reduce at a.py:3. {REMEDY}",
            ),
        ),
    ],
    "one computes for long": [
        (1, 0, wait("a", sequence=4), []),
        (4, None, None, [(1, WHERE), (2, WHERE)]),
        (5, 1, place(), []),
        (20, None, None, []),
        (24, None, None, [(1, WHERE)]),  # the other owes an answer
    ],
    "a wait breaks, and all live": [
        (1, 0, wait("a", broke=True), [(1, WHERE), (2, WHERE)]),
        (1, 1, place(), []),
        (2, 2, place(), [told(0, "a", late=LATE[1:])]),
    ],
    "a wait breaks by the death of a rank that has said just before where it is": [
        (1, 0, wait("a"), []),
        (3, None, None, [(1, WHERE), (2, WHERE)]),
        (3, 2, place(), []),
        (3.5, 0, wait("a", broke=True), [(2, WHERE)]),
        (3.5, 1, place(), []),
        (3.6, 2, place(), []),
        (3.7, None, None, [(1, WHERE)]),
        (3.8, 1, None, [*DIED, told(0, "a", late=LATE[2:])]),
    ],
    "a wait breaks, and one is silent that owed an answer": [
        (1, 0, wait("a"), []),
        (3, None, None, [(1, WHERE), (2, WHERE)]),
        (9, 0, wait("a", broke=True), []),
        (10.9, 2, place(), []),
        (10.9, None, None, [(2, WHERE)]),
        (10.9, 2, place(), []),
        (11, None, None, [*DIED, told(0, "a", late=LATE[2:])]),
    ],
    "a wait breaks, and one waits elsewhere": [
        (1, 0, wait("a", broke=True), [(1, WHERE), (2, WHERE)]),
        (1, 1, place(waits=True), []),
        (2, 2, place(turns={"a": 1}), [told(0, "a", late=[])]),
    ],
    "a wait breaks, and one is silent": [
        (1, 0, wait("a", broke=True), [(1, WHERE), (2, WHERE)]),
        (1, 2, place(), []),
        (2.9, None, None, []),
        (3, None, None, [*DIED, told(0, "a", late=LATE[2:])]),
    ],
    "a wait between nodes breaks, where one waits for a rank of its node that is silent": [
        (0, 0, wait("a", turn=1), []),
        (1, 0, wait("between", 0, broke=True, members=[0, 2]), [(1, WHERE), (2, WHERE)]),
        (1, 2, place(waits=True), []),
        (3, None, None, [(2, WHERE), *DIED, told(0, "between", late=[])]),
    ],
    "all put": [
        (1, 2, put("x", "c"), []),
        (1, 0, put("x", "a"), []),
        (2, 1, put("x", "b"), to_all(**said("gathered", "x", values=["a", "b", "c"], times=1))),
    ],
    "all put the same": [
        (1, 2, put("x", [7]), []),
        (1, 0, put("x", [7]), []),
        (2, 1, put("x", [7]), to_all(**said("gathered", "x", values=[[7]], times=3))),
    ],
    "one of two asks, and both put": [
        (1, 0, ask(7, "v", [0, 2]), [(rank, said("asked", "v", note=7)) for rank in (0, 2)]),
        (1, 0, put("v", True, [0, 2]), []),
        (
            2,
            2,
            put("v", False, [0, 2]),
            [(rank, said("gathered", "v", values=[True, False], times=1)) for rank in (0, 2)],
        ),
    ],
    "two ask, and one has left": [
        (1, 1, leave(), []),
        (2, 0, ask("why"), to_all(**said("asked", "s", note="why"))),
        (2, 2, ask("too late"), []),
        (3, 0, put("s", 5), []),
        (3, 2, put("s", 4), to_all(**said("gathered", "s", values=[5, None, 4], times=1))),
    ],
    "an unknown event": [(1, 0, {"event": "nonsense"}, []), (1, 0, {}, [])],
}


@pytest.mark.parametrize("name", TABLE)
def test_what_ranks_hear_after_each_event(name: str) -> None:
    """Rank 0 decides who failed."""
    made = coordinator()
    for now, rank, message, expected in TABLE[name]:
        if rank is None:
            sent = made.tick(now)
        elif message is None:
            sent = made.lose(rank, now)
        else:
            sent = made.receive(rank, message, now)
        assert sent == expected, (now, message)


def test_a_rank_that_joins_late_hears_what_has_happened() -> None:
    made = Coordinator(2)
    made.receive(0, {"event": "join", "name": "early"}, 0.0)
    assert made.tick(1.0) == [(0, {"event": "missing", "ranks": [1]})] and made.tick(2.0) == []
    made.receive(0, failure(0, 0), 0.0)
    made.receive(0, ask("why"), 0.0)
    sent = made.receive(1, {"event": "join", "name": "late"}, 3.0)
    assert [message["event"] for rank, message in sent if rank == 1] == ["end", "asked", "names"]


def test_failures_of_runs_that_all_have_left_are_forgotten() -> None:
    made = coordinator()
    for run in range(60):
        assert made.receive(1, failure(run, 1), float(run)) == ended(run, 1)
    assert made.receive(2, failure(59, 2), 61.0) == made.receive(2, failure(58, 2), 62.0) == []
    late = made.receive(0, {"event": "join", "name": NAMES[0]}, 63.0)
    assert [message["run"] for rank, message in late if rank == 0 and message["event"] == "end"] == [58, 59]


def test_thousands_of_ranks_cost_rank_0_no_more_for_each_message_than_a_few() -> None:
    """Rank 0 serves thousands of ranks."""
    size, begin = 2048, time.process_time()
    made = Coordinator(size)
    for rank in range(size):
        made.receive(rank, {"event": "join", "name": f"rank {rank}"}, 0.0)
    for rank in range(2, size):
        assert made.receive(rank, wait("a sum"), 1.0) == []
    assert len(made.lose(1, 1.5)) == size
    asked = [made.receive(rank, wait("a sum", broke=True), 2.0) for rank in range(2, size)]
    assert [len(sent) for sent in asked] == [size - 2] + [0] * (size - 3)
    told = [message for rank in range(2, size) for _, message in made.receive(rank, place(waits=True), 3.0)]
    told += [message for _, message in made.receive(0, place(), 3.5)]
    assert [message["late"] for message in told if message["event"] == "told"] == [[ELSEWHERE]] * (size - 2)
    assert time.process_time() - begin < 20  # 1 s; with all pairs of ranks, an hour


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv(SECRET, raising=False)
    made = Server(2, dist.HashStore())
    yield made
    made.close()
    made.join()


def connect(server: Server) -> socket.socket:
    return socket.create_connection((server.address["host"], server.address["port"]), timeout=20)


def join(server: Server, rank: int) -> Connection:
    made = Connection(connect(server), 0)
    made.send({"event": "join", "rank": rank, "name": NAMES[rank], "secret": server.address["secret"]})
    return made


STRANGERS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"[]\n",
    "deep nesting": b"[" * 100_000 + b"\n",
    "no secret": b'{"event": "join", "rank": 0}\n',
    "a wrong secret": b'{"event": "join", "rank": 0, "secret": "guessed"}\n',
    "no such rank": b'{"event": "join", "rank": 7, "secret": "SECRET"}\n',
    "a rank that is no number": b'{"event": "join", "rank": "0", "secret": "SECRET"}\n',
}


def test_a_stranger_is_dropped_and_the_ranks_are_served(listening: Server) -> None:
    """A stranger cannot connect."""
    for said in STRANGERS.values():
        with connect(listening) as stranger:
            stranger.sendall(said.replace(b"SECRET", listening.address["secret"].encode()))
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b"", said
    first = join(listening, 0)
    second = join(listening, 0)
    with pytest.raises(ConnectionResetError):
        second.receive()
    other = join(listening, 1)
    assert first.receive() == [{"event": "names", "names": NAMES[:2]}]
    other.close()
    assert first.receive() == [{"event": "end", "run": FOREVER, "kind": "gone", "ranks": [1]}]
    first.close()
    second.close()


def test_a_rank_that_leaves_while_rank_0_sends_to_it_has_not_died(
    listening: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left, receive = threading.Event(), Coordinator.receive

    def wait_and_receive(self: Coordinator, rank: int, message: Message, now: float) -> Sent:
        if rank == 0 and message["event"] == "ask":
            assert has_left.wait(20)
        return receive(self, rank, message, now)

    monkeypatch.setattr(Coordinator, "receive", wait_and_receive)
    first, other = join(listening, 0), join(listening, 1)
    assert first.receive() == [{"event": "names", "names": NAMES[:2]}]
    for name in ("a", "b", "c"):  # the first message after its end resets the connection
        first.send(ask(None, name))
    other.send(leave())
    other.end()
    has_left.set()
    heard: list[Message] = []
    while len(heard) < 3:
        heard += first.receive()
    first.send(put("a", 3))
    heard += first.receive()
    assert [message["event"] for message in heard] == ["asked"] * 3 + ["gathered"]
    assert heard[-1]["values"] == [3, None]
    first.close()
    other.close()


MALFORMED: list[Any] = [
    {"event": "wait"},
    {"event": "wait", "place": {"no": "place"}, "broke": False},
    {"event": "put", "about": "another", "run": 0, "members": [0, 1]},
    {"event": "leave", "place": None},
    {"event": "end", "run": 0},
]


@pytest.mark.parametrize("message", MALFORMED, ids=lambda message: json.dumps(message))
def test_a_rank_whose_message_is_malformed_is_lost_and_the_others_are_served(listening: Server, message: Any) -> None:
    first, other = join(listening, 0), join(listening, 1)
    assert first.receive() == [{"event": "names", "names": NAMES[:2]}]
    other.send(message)
    (end,) = first.receive()
    assert end.pop("why").startswith("what it sent on the control channel is invalid: ")
    assert end == {"event": "end", "run": FOREVER, "kind": "gone", "ranks": [1]}
    first.send(put("s", 3, [0]))
    (heard,) = first.receive()
    assert heard["event"] == "gathered"
    first.close()
    other.close()


def test_a_secret_of_the_launcher_s_is_not_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of the launcher")
    made = Server(2, dist.HashStore())
    assert "of the launcher" not in json.dumps(made.address)
    rank = Connection(connect(made), 0)
    rank.send({"event": "join", "rank": 0, "name": NAMES[0], "secret": "of the launcher"})
    rank.send(leave())
    made.close()
    rank.end()
    rank.close()
    made.join()


@pytest.mark.parametrize("value", ["soon", "0", "-1"])
def test_a_limit_of_silence_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(HEARTBEAT_TIMEOUT, value)
    first, second = socket.socketpair()
    with first, second, pytest.raises(ConfigurationError, match=f"{HEARTBEAT_TIMEOUT} must be a positive number"):
        Connection(first, 0)


def test_the_first_request_for_a_gathering_counts_although_another_one_comes_late() -> None:
    board = Board()
    for note in ("stop", "requeue"):
        board.note({"event": "asked", "about": "decision 1", "run": None, "note": note})
    heard = board.get("asked", "decision 1")
    assert heard is not None and heard["note"] == "stop"


@pytest.mark.parametrize(("ends_after", "seconds"), [(1, 0.1), (3, 0.3), (99, 1.0)])
def test_a_waiting_rank_notices_within_a_tenth_of_a_second_that_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch, ends_after: int, seconds: float
) -> None:
    waited, told_after = list[float](), list[float]()
    pending: Any = SimpleNamespace(wait_slice=waited.append)
    here = SimpleNamespace(run=0, end_of_run=lambda: len(waited) >= ends_after)
    monkeypatch.setattr(failures, "found", lambda: here)
    monkeypatch.setattr(failures, "_wait_long", lambda *_: told_after.append(sum(waited)))
    group: Any = None
    failures.wait(pending, "a sum", group)
    assert told_after == [pytest.approx(seconds)]
