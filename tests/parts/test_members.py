"""Who takes part in a job, by the launcher's list in a file; and calls that are entered again without others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_callbacks.checkpoints import recovery
from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.cluster.environment import KEEP_GOING, NEWS, WorkerEnv
from ddp_callbacks.errors import PeerError, RendezvousError
from ddp_callbacks.process_group import rendezvous, survivors
from ddp_callbacks.process_group.control_channel import end_when_silent
from ddp_callbacks.process_group.members_file import Members

SIZE = 4
Noted = Callable[..., None]


@pytest.fixture(autouse=True)
def note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Noted:
    """Notes lines as the launcher does; a text may be a part of one."""

    def add(*lines: Any) -> None:
        with (tmp_path / "news").open("a") as file:
            file.writelines(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines)

    monkeypatch.setenv(KEEP_GOING, "1")
    monkeypatch.setenv(NEWS, str(tmp_path / "news"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "news"))  # the launcher passes on what is announced
    return add


def members(rank: int) -> Members:
    return Members(place(rank))


def place(rank: int, size: int = SIZE, started: int | None = None) -> WorkerEnv:
    return WorkerEnv(rank, size, rank if started is None else started, "127.0.0.1", 29500)


def listed(generation: int, *ranks: int, **replaced: int) -> Any:
    again = {number.removeprefix("rank"): count for number, count in replaced.items()}
    return {"members": {"generation": generation, "ranks": ranks, "replaced": again}}


# What the launcher has noted, and the place of rank 3, or how often ranks were replaced that it finds beside it.
LISTS: dict[str, tuple[list[Any], WorkerEnv]] = {
    "nothing": ([], place(3)),
    "two are left": ([listed(1, 2, 3)], place(1, 2, started=3)),
    "the newest counts": ([listed(1, 0, 2, 3), listed(2, 2, 3)], place(1, 2, started=3)),
    "others have exited": ([{"ended": {"0": 0}}, listed(1, 0, 2, 3)], place(2, 3, started=3)),
    "the last line is being written": ([listed(1, 0, 2, 3), '{"members": {"gener'], place(2, 3, started=3)),
}


@pytest.mark.parametrize("case", LISTS)
def test_the_ranks_that_are_left_are_numbered_anew_by_the_newest_list(case: str, note: Noted) -> None:
    """Survivors get new ranks."""
    lines, expected = LISTS[case]
    last = members(3)
    assert last.follow() == place(3) and not last.have_changed()
    note(*lines)
    has_changed = expected.world_size < SIZE
    assert last.have_changed() == last.is_outdated() == has_changed and last.generation == 0
    assert (not has_changed or last.await_change()) and last.follow() == expected
    assert not last.have_changed() and not last.is_outdated()


def test_a_line_counts_once_it_is_whole(note: Noted) -> None:
    one, line = members(0), json.dumps(listed(1, 0, 3))
    note(line[:20])
    assert not one.have_changed()
    note(line[20:], "\n")
    assert one.have_changed()


def test_a_replaced_process_is_another_one_though_nobody_has_seen_its_rank_missing(note: Noted) -> None:
    one, busy = members(0), members(1)
    busy.admits = False  # it is in a call that a new process cannot join
    note(listed(2, 0, 1, 2, 3, rank3=1))
    assert one.await_change() and one.follow().world_size == SIZE
    assert busy.await_change() and busy.follow().world_size == SIZE - 1


def test_a_store_is_announced_to_those_that_follow_the_same_list(note: Noted) -> None:
    before, same, other, after = (members(rank) for rank in (0, 1, 3, 3))
    other.admits = False
    note(listed(1, 0, 1, 3, rank3=1))
    for each in (before, same):
        each.follow()
    before.announce_store("h2", 7)
    note(listed(2, 1, 3, rank3=1))
    after.follow()
    assert (same.announced_store(), after.announced_store()) == (("h2", 7), None)


def test_a_process_that_the_launcher_has_given_up_is_told_so(note: Noted) -> None:
    note(listed(1, 0, 2, 3))
    with pytest.raises(PeerError, match="the launcher has given up this process, which was started as rank 1, and"):
        members(1).follow()


def test_ranks_that_have_exited_have_the_numbers_of_the_list(note: Noted) -> None:
    one = members(0)
    assert one.ended() == set()
    note({"ended": {"1": 0}}, {"ended": {"3": 0}})
    assert one.ended() == {1, 3}
    note(listed(1, 0, 2, 3))
    one.follow()
    assert one.ended() == {2}


@pytest.mark.parametrize("lacks", [KEEP_GOING, NEWS])
def test_without_the_option_or_the_launcher_no_list_counts(
    monkeypatch: pytest.MonkeyPatch, note: Noted, lacks: str
) -> None:
    monkeypatch.delenv(lacks)
    note(listed(1, 0, 2), {"ended": {"3": 0}})
    one = members(1)
    assert not one.have_changed() and one.follow().world_size == SIZE
    assert one.ended() == ({3} if lacks == KEEP_GOING else set())


# --- stores on machines that were lost --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "news", "why"),
    [
        (0, listed(1, 1, 2, 3), "and the members have changed"),
        (0, {"ended": {"0": 0}}, "but exited with code 0"),
        (1, listed(2, 0, 1, 3), "and the members have changed"),
        (1, {"ended": {"0": 0}}, "but exited with code 0"),
    ],
)
def test_a_process_waits_for_no_store_that_nobody_serves(
    monkeypatch: pytest.MonkeyPatch, note: Noted, generation: int, news: Any, why: str
) -> None:
    monkeypatch.setattr(rendezvous, "_LOOK", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Members(replace(place(1), port=silent.getsockname()[1]))
        note(*[listed(1, 0, 1, 2)] * generation)
        here = one.follow()
        note(news)
        with pytest.raises(RendezvousError, match=why):
            rendezvous.meet(one, here, timedelta(seconds=60))


def test_connections_to_a_silent_machine_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_CALLBACKS_HEARTBEAT_TIMEOUT", "3.5")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        here, there = (socket.create_connection(each.getsockname()) for each in (server, other))
        with here, there:
            end_when_silent(server.getsockname()[1])
            limits = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in (here, there)]
            assert limits == [3500, 0] and here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_member_that_dies_while_gloo_connects_is_left_out(monkeypatch: pytest.MonkeyPatch, note: Noted) -> None:
    errors = [RuntimeError("Gloo connectFullMesh failed with Connect timeout [none]")]
    one = members(1)
    one.is_new = True

    def form_group(*_: Any) -> list[int]:
        if errors:
            note(listed(1, 1, 2))
            raise errors.pop()
        return [0, 0]

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(SIZE))
    monkeypatch.setattr(survivors, "_members", None)
    monkeypatch.setattr(survivors, "meet", lambda _, env, __: (env, dist.HashStore()))
    monkeypatch.setattr(survivors, "form_group", form_group)
    monkeypatch.setattr(survivors, "set_timeout", lambda _: None)
    env, _ = survivors.form_group_of(one, "gloo", timedelta(seconds=60))
    assert (env.rank, env.world_size, one.generation, one.is_new) == (0, 2, 1, False)


# --- entering a call again --------------------------------------------------------------------------------------------


@pytest.fixture
def survivals(monkeypatch: pytest.MonkeyPatch) -> list[PeerError]:
    """The errors after which the ranks that are left, one here, have met."""
    found: list[PeerError] = []
    monkeypatch.setattr(recovery, "form_anew", found.append)
    return found


class Host:
    """Its method fails so often before it returns, by whatever error."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.recovery, self.begun_again, self.followed = list(errors), Recovery(), 0, 0

    def run(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def begin_again(self) -> None:
        self.begun_again += 1

    def follow(self) -> None:
        self.followed += 1

    def call(self, method: Any = None) -> str:
        return self.recovery.call(method or self.run, self)  # type: ignore[no-any-return]


def test_the_outermost_call_is_entered_again_as_often_as_others_die(survivals: list[PeerError]) -> None:
    first, second = PeerError("rank 1"), PeerError("rank 0")
    host = Host(first, second)
    assert host.call(host.call) == "done"
    assert (survivals, host.begun_again, host.followed) == ([first, second], 2, 2)


def test_a_call_of_another_object_inside_is_left_to_the_outermost_one(survivals: list[PeerError]) -> None:
    error = PeerError("rank 1")
    outer, inner = Host(), Host(error)
    assert outer.call(inner.call) == "done"
    assert (survivals, outer.begun_again, inner.begun_again) == ([error], 1, 0)


def test_another_error_ends_the_call(survivals: list[PeerError]) -> None:
    with pytest.raises(KeyError, match="mine"):
        Host(KeyError("mine")).call()
    assert survivals == []


def test_a_call_that_is_entered_again_begins_with_the_attributes_of_its_first_begin(survivals: list[PeerError]) -> None:
    attributes: dict[str, Any] = {"seen": [1], "mean": torch.zeros(2)}
    host, begins, drawn = Host(PeerError("rank 1")), list[Any](), list[float]()

    def run() -> str:
        begins.append(host.recovery.at_start({"callback": attributes}, "cpu").get("callback"))
        attributes["seen"].append(2)
        drawn.append(torch.rand(()).item())
        attributes["mean"] += 1
        return host.run()

    host.call(run)
    assert begins[0] is None
    assert (begins[1]["seen"], begins[1]["mean"].tolist()) == ([1], [0, 0])
    assert drawn[1] == drawn[0], "the random state is that of the begin, too"
    host.errors.append(PeerError("rank 2"))
    host.call(run)
    assert begins[3]["seen"] == [1, 2, 2], "a later call has a begin of its own"


def test_a_call_that_is_over_everywhere_returns_although_a_process_has_died_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(flag: bool, purpose: str) -> None:
        raise PeerError(purpose)

    monkeypatch.setattr(recovery, "any_rank", lose)
    monkeypatch.setattr(recovery, "form_anew", lambda error: True)
    host = Host()
    assert host.call() == "done"
    assert (host.begun_again, host.followed) == (0, 1)


@pytest.mark.parametrize(
    ("own", "others", "is_over"),
    [
        (2, [2], True),
        (2, [1], False),
        (2, [2, 1], False),
        (2, [3], True),  # it has returned, so all had come to the end
        (2, [2, 0], False),  # a new process has the call before it
        (1, [1], False),
        (3, [2], False),
        (4, [4, 5], True),
    ],
)
def test_a_call_is_over_if_nobody_is_in_it(
    monkeypatch: pytest.MonkeyPatch, own: int, others: list[int], is_over: bool
) -> None:
    monkeypatch.setattr(survivors, "_position", own)
    assert survivors._is_over([own, *others]) == is_over
    assert survivors._position == (own if is_over or own % 2 else own - 1)
